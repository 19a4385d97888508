"""The runner's own paths: relayed to the daemon from the runner's listener, and nobody's anywhere else. Pure."""

from __future__ import annotations

from hive.errors import Refusal

PATHS = frozenset(
    {
        b"/v1/capabilities",
        b"/v1/models/load",
        b"/v1/models/unload",
        b"/v1/cache/flush",
        b"/health",
        b"/metrics",
    }
)
TASKS = b"/v1/models/load/"
"""A task's id stands behind it."""
ADAPTERS = b"/llm/adapters/"
"""An adapter's name stands behind it, and what is asked of it."""


def is_runners(target: bytes) -> bool:
    """Whether a request for this target is one to the runner.

    >>> [is_runners(target) for target in (b"/health", b"/v1/models/load/load-1?x", b"/v1/models", b"/v1/models/loads")]
    [True, True, False, False]
    >>> is_runners(b"/llm/adapters/legal/load"), is_runners(b"/llm/models")
    (True, False)
    """
    path = target.partition(b"?")[0]
    return path in PATHS or path.startswith((TASKS, ADAPTERS))


def refusal(target: bytes) -> Refusal:
    """The answer to a request for one of them that did not come to the runner's listener."""
    path = target.partition(b"?")[0][:80].decode("ascii", "backslashreplace")
    return Refusal(
        f"{path} is not offered to agents: it is the runner's, for operators",
        hint="with an operator's token at runner.sock; hive model, hive cache and hive capabilities do the same",
    )
