"""The decision which models are near and which are far: their requests stay on this box, or leave it. Pure; made only
here.

A server that Hive knows answers by itself, with one exception: Ollama sends the requests of some models to its cloud,
or to the host that the model's manifest names (`remote_host`, since 0.12). Such a stub has any name, is 196 bytes
large, and is asked like every other model. So a model of an Ollama is near only if the list it gave last says so; a
model that is not in that list is unknown, and unknown counts as far.

A `remote` server leaves the box by the choice of the operator who named its address, and so does a server at an address
on another host. Judged here is only whether a server passes requests on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from hive.domain import ModelInfo, origin_of
from hive.models.names import spelled

HINT = "an operator permits it by its name in [tenant NAME] models"


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


@lru_cache(maxsize=256)
def is_elsewhere(address: str) -> bool:
    """Whether what is said to a server at this address leaves this machine; remembered, as each request asks. To one
    without an address nothing is said.

    >>> is_elsewhere("127.0.0.1:11434"), is_elsewhere("https://api.example.com"), is_elsewhere("")
    (False, True, False)
    """
    return bool(address) and not origin_of(address).is_here


class Whereabouts:
    """The near and far models of one server, by the list it gave last; made once for each list.

    `rule`: why requests for a model leave the box, by its row of the list or by its name alone; empty where they stay.
    None for a server that answers all of them by itself. `server`: what it is called.

    >>> there = [ModelInfo(name="tiny:latest"), ModelInfo(name="helper:latest", remote_host="https://h")]
    >>> where = Whereabouts(lambda model: model.remote_host, there)
    >>> [where.is_near(name) for name in ("tiny", "Helper", "nobody-knows")]
    [True, False, False]
    >>> Whereabouts(None, []).is_near("whatever")
    True
    """

    __slots__ = ("_far", "_near", "_rule", "_server", "far")

    def __init__(
        self, rule: Callable[[ModelInfo], str] | None, models: Sequence[ModelInfo], *, server: str = "the server"
    ) -> None:
        self._rule = rule
        self._server = server
        reasons = {model.name: "" if rule is None else rule(model) for model in models}
        self.far = frozenset(name for name, why in reasons.items() if why)
        """Names of the list that are far."""
        self._far = {spelled(name): reasons[name] for name in self.far}
        self._near = frozenset(spelled(name) for name, why in reasons.items() if not why)

    def __repr__(self) -> str:
        return f"<Whereabouts {len(self._near)} near, {len(self._far)} far>"

    @property
    def can_be_far(self) -> bool:
        """Whether such a server may send requests on, so that its list has to be known."""
        return self._rule is not None

    def keeps(self, before: Whereabouts) -> bool:
        """Whether all that was near is so still: then what was decided by the list before holds.

        >>> models = [[ModelInfo(name="a", remote_host=host)] for host in ("", "h")]
        >>> there = [Whereabouts(lambda model: model.remote_host, listed) for listed in models]
        >>> there[0].keeps(there[0]), there[1].keeps(there[0]), there[0].keeps(there[1])
        (True, False, True)
        """
        return not self.can_be_far or self._near >= before._near

    def is_near(self, name: str) -> bool:
        return not self.why_far(name)

    def why_far(self, name: str) -> str:
        """The reason why requests that name this model leave the box, or may leave it; empty if they stay.

        Of two names that are spelled alike one far one is enough: the server has its own way to choose between them.
        """
        why = self.why_known_far(name)
        if why or self._rule is None or spelled(name) in self._near:
            return why
        return f"{self._server} has not said where it runs"

    def why_known_far(self, name: str) -> str:
        """The same as far as the list or the name tells; empty also for a model of which neither does."""
        if self._rule is None:
            return ""
        return self._far.get(spelled(name)) or self._rule(ModelInfo(name=name))


NOWHERE = Whereabouts(None, [])
"""The value while no server is in use: nothing can be sent anywhere."""


def joined(servers: Sequence[Whereabouts]) -> Whereabouts:
    """The judge over the models of several servers. A name that none of them has told of is judged by all.

    >>> tiny, stub = ModelInfo(name="tiny"), ModelInfo(name="stub", remote_host="https://h")
    >>> sends_on = Whereabouts(lambda model: model.remote_host, [stub], server="Ollama")
    >>> both = joined([Whereabouts(None, [tiny]), sends_on])
    >>> [both.why_far(name) for name in ("tiny", "stub", "other")]
    ['', 'https://h', 'Ollama has not said where it runs']
    """
    if len(servers) < 2:
        return servers[0] if servers else NOWHERE
    return _Joined(servers)


class _Joined(Whereabouts):
    """Several servers; a name that one has told of is that server's to judge, of a name in two lists far is enough."""

    __slots__ = ("_servers",)

    def __init__(self, servers: Sequence[Whereabouts]) -> None:
        super().__init__(None, [])
        self._servers = servers
        self.far = frozenset(name for server in servers for name in server.far)
        self._far = {name: why for server in servers for name, why in server._far.items()}
        self._near = frozenset(name for server in servers for name in server._near)
        self._rule = next((server._rule for server in servers if server._rule is not None), None)
        self._server = next((server._server for server in servers if server._rule is not None), "")

    def why_known_far(self, name: str) -> str:
        if spelled(name) in self._near and spelled(name) not in self._far:
            return ""
        return super().why_known_far(name)


def named(models: frozenset[str] | None, aliases: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """The spelled names of the models that an operator named for a tenant, itself or as the target of an alias. A far
    model is used only by a tenant that has it named: a name that stands for several variants takes no far one.

    >>> sorted(named(frozenset({"fast", "tiny"}), {"fast": ("X:cloud", "x:1b")}))
    ['tiny', 'x:1b', 'x:cloud']
    """
    return frozenset(spelled(target) for name in models or () for target in aliases.get(spelled(name), (name,)))
