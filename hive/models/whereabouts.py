"""Where what is said to a model goes: it stays on this box (near), or leaves it (far). Pure, and the only judge of it.

A server that Hive knows answers by itself, with one exception: Ollama sends the requests of some models to its cloud,
or to whatever host the model's manifest names (`remote_host`, since 0.12). Such a stub has any name, is 196 bytes
large, and is asked like every other model. So before an Ollama a model is near only where the list it gave last says
so; what is not in that list is unknown, and unknown counts as far.

A `remote` server is far by the choice of the operator who named its address, and so is the server at an address on
another host: what is judged here is whether a server sends on what it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hive.domain import BackendKind, ModelInfo
from hive.models.names import spelled

HINT = "an operator permits it by its name in [tenant NAME] models"
UNKNOWN = "Ollama has not said where it runs"


def why_far(kind: BackendKind | None, model: ModelInfo) -> str:
    """Why requests for this model leave the box, a clause that says where to; empty where they stay.

    >>> why_far(BackendKind.OLLAMA, ModelInfo(name="work-helper", remote_host="https://h:443", remote_model="big"))
    'Ollama sends it to https://h:443, as big'
    >>> why_far(BackendKind.OLLAMA, ModelInfo(name="tiny", size_bytes=9)), why_far(None, ModelInfo(name="x:cloud"))
    ('', '')
    """
    if kind is not BackendKind.OLLAMA:
        return ""
    if model.remote_host or model.remote_model:
        to = model.remote_host or "another host"
        return f"Ollama sends it to {to}{', as ' + model.remote_model if model.remote_model else ''}"
    return "Ollama sends what is named so to its cloud" if is_of_the_cloud(model.name) else ""


def is_of_the_cloud(name: str) -> bool:
    """Whether Ollama sends a model of this name to its cloud, whether it has it or not (2026-08-21).

    >>> [is_of_the_cloud(name) for name in ("gpt-oss:120b-cloud", " X:Cloud ", "cloud-9:1b")]
    [True, True, False]
    """
    tag = name.strip().lower().rpartition(":")[2]
    return tag == "cloud" or tag.endswith("-cloud")


def would_leave(name: str, why: str) -> str:
    """The refusal, in words.

    >>> would_leave("x:cloud", "Ollama sends what is named so to its cloud")
    '"x:cloud" would leave this box: Ollama sends what is named so to its cloud'
    """
    return f'"{name[:80]}" would leave this box: {why}'


class Whereabouts:
    """Of the models of one server, by the list it gave last; made once for each list.

    >>> there = [ModelInfo(name="tiny:latest"), ModelInfo(name="helper:latest", remote_host="https://h")]
    >>> where = Whereabouts(BackendKind.OLLAMA, there)
    >>> [where.is_near(name) for name in ("tiny", "Helper", "nobody-knows")]
    [True, False, False]
    >>> Whereabouts(BackendKind.VLLM, []).is_near("whatever")
    True
    """

    __slots__ = ("_far", "_near", "far", "kind")

    def __init__(self, kind: BackendKind | None, models: Sequence[ModelInfo]) -> None:
        self.kind = kind
        reasons = {model.name: why_far(kind, model) for model in models}
        self.far = frozenset(name for name, why in reasons.items() if why)
        """Names of the list that are far."""
        self._far = {spelled(name): reasons[name] for name in self.far}
        self._near = frozenset(spelled(name) for name, why in reasons.items() if not why)

    def __repr__(self) -> str:
        return f"<Whereabouts {len(self._near)} near, {len(self._far)} far>"

    @property
    def can_be_far(self) -> bool:
        """Whether such a server may send requests on, so that its list has to be known."""
        return self.kind is BackendKind.OLLAMA

    def keeps(self, before: Whereabouts) -> bool:
        """Whether all that was near is so still: then what was decided by the list before holds.

        >>> there = [Whereabouts(BackendKind.OLLAMA, [ModelInfo(name="a", remote_host=host)]) for host in ("", "h")]
        >>> there[0].keeps(there[0]), there[1].keeps(there[0]), there[0].keeps(there[1])
        (True, False, True)
        """
        return not self.can_be_far or self._near >= before._near

    def is_near(self, name: str) -> bool:
        return not self.why_far(name)

    def why_far(self, name: str) -> str:
        """Why requests that name this model leave the box, or may; empty where they stay.

        Of two names that are spelled alike one far one is enough: the server has its own way to choose between them.
        """
        if not self.can_be_far:
            return ""
        key = spelled(name)
        if key in self._far:
            return self._far[key]
        if is_of_the_cloud(name):
            return why_far(self.kind, ModelInfo(name=name))
        return "" if key in self._near else UNKNOWN


NOWHERE = Whereabouts(None, [])
"""Where no server is in use: nothing can be sent anywhere."""


def named(models: frozenset[str] | None, aliases: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """The spelled names of the models that an operator named for a tenant, itself or as the target of an alias. What
    is far is used by who has it named, and by nobody else: of a name that stands for more no far variant is taken.

    >>> sorted(named(frozenset({"fast", "tiny"}), {"fast": ("X:cloud", "x:1b")}))
    ['tiny', 'x:1b', 'x:cloud']
    """
    return frozenset(spelled(target) for name in models or () for target in aliases.get(spelled(name), (name,)))
