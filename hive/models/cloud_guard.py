"""The decision whether a request may leave this box. Pure; made only here, and carried out where the connection to the
server is taken (proxy/leaving.py).

Where a request goes is told by the resolved endpoint: the server's address, and of an Ollama the place of the model
(whereabouts.py). It is never told by a name. How far a request may go is told by the narrowest of four words: the
box's (`[inference] cloud`), its tenant's, its agent's, and that of the request itself (`X-Hive-Local-Only: 1`). None of
them can widen another one.
"""

from __future__ import annotations

from hive.domain import CloudUse

ORDER = tuple(CloudUse)
"""The narrowest first."""


def narrowest(*words: CloudUse | str | None) -> CloudUse:
    """The word that counts of several; one that is not there says nothing.

    >>> narrowest(CloudUse.FALLBACK, None, "asked"), narrowest("fallback", ""), narrowest("asked", "never")
    (<CloudUse.ASKED: 'asked'>, <CloudUse.FALLBACK: 'fallback'>, <CloudUse.NEVER: 'never'>)
    """
    said = [CloudUse(word) for word in words if word]
    return min(said, key=ORDER.index, default=CloudUse.NEVER)


def permit_of(
    box: CloudUse | str, tenant: CloudUse | str | None, agent: CloudUse | str | None, *, is_local_only: bool
) -> CloudUse:
    """The permit of a request, by the settings in force now.

    >>> permit_of("fallback", "", None, is_local_only=False), permit_of("fallback", "asked", None, is_local_only=True)
    (<CloudUse.FALLBACK: 'fallback'>, <CloudUse.NEVER: 'never'>)
    """
    return CloudUse.NEVER if is_local_only else narrowest(box, tenant, agent)


def may_leave(permit: CloudUse, *, is_fallback: bool) -> bool:
    """Whether a request with this permit may go to a far endpoint. `is_fallback`: the model asked for by name is
    another one, and this one stands in for it (a later rung of a task, a later target of an alias).

    >>> [may_leave(permit, is_fallback=False) for permit in CloudUse]
    [False, True, True]
    >>> [may_leave(permit, is_fallback=True) for permit in CloudUse]
    [False, False, True]
    """
    return permit is CloudUse.FALLBACK or (permit is CloudUse.ASKED and not is_fallback)


def why_it_stays(permit: CloudUse, model: str, *, is_local_only: bool = False) -> str:
    """The refusal, in words.

    >>> why_it_stays(CloudUse.ASKED, "sonnet")
    '"sonnet" is on another machine, and was not asked for by name: only a request that names it may leave this box'
    """
    name = f'"{model[:80]}"' if model else "the model"
    if is_local_only:
        return f"{name} is on another machine, and the request is local only (X-Hive-Local-Only)"
    if permit is CloudUse.NEVER:
        return f"{name} is on another machine, and nothing may leave this box"
    return (
        f"{name} is on another machine, and was not asked for by name: only a request that names it may leave this box"
    )
