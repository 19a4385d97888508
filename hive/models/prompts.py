"""System prompts: the agents that share one, and the decision to have a backend read it before they ask. Pure.

A backend keeps the part of a prompt it has read and need not read it again (its prefix cache): within one group of
agents, for one model, as long as it runs. So a prompt is read once for each of these: a `Prefix`.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

BYTES_PER_TOKEN = 4
"""Bytes of English text per token, OpenAI's rule of thumb. With longer tokens some prompts are sent without need."""
RETRY_S = 10.0
"""Time until a prompt that could not be sent is tried again: agents that start meanwhile do not try it."""


@functools.lru_cache(maxsize=1024)
def hash_prompt(text: str) -> str:
    """SHA-256 of the text in UTF-8, its first 16 hex digits (seeds/000 §5).

    >>> hash_prompt("You are a customer service agent...")
    'a18ecbbe7784a5bf'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class PromptHolder(NamedTuple):
    """A living agent that has a system prompt. `group`: the one that shares a prefix cache with it; `model`: the one
    its requests are given, empty if there is none."""

    agent: str
    name: str
    tenant: str
    group: str
    model: str
    text: str

    @property
    def prefix(self) -> Prefix:
        return Prefix(hash_prompt(self.text), self.group, self.model)


class Prefix(NamedTuple):
    """A prefix that a backend keeps once. `prompt`: the hash."""

    prompt: str
    group: str
    model: str


def sharers(holders: Iterable[PromptHolder]) -> dict[Prefix, list[PromptHolder]]:
    """The holders of each prefix, in the order given; an agent that is not among `holders` any more shares nothing.

    >>> ann, ben = (PromptHolder(name, name, "t", "tenant t", "m", "Be kind.") for name in ("ann", "ben"))
    >>> eve = ben._replace(name="eve", group="tenant u")
    >>> [[one.name for one in found] for found in sharers([ann, ben, eve]).values()]
    [['ann', 'ben'], ['eve']]
    """
    found: dict[Prefix, list[PromptHolder]] = {}
    for holder in holders:
        found.setdefault(holder.prefix, []).append(holder)
    return found


def share_counts(shared: Mapping[Prefix, Sequence[PromptHolder]]) -> Counter[str]:
    """Hash of a prompt → number of agents that have it, of all tenants and models.

    >>> ann = PromptHolder("a", "ann", "t", "tenant t", "m", "Be kind.")
    >>> share_counts(sharers([ann, ann._replace(model="n"), ann._replace(text="Be brief.")]))[ann.prefix.prompt]
    2
    """
    found: Counter[str] = Counter()
    for prefix, holders in shared.items():
        found[prefix.prompt] += len(holders)
    return found


class PrefixStanding(msgspec.Struct, frozen=True):
    """The state of one prefix in the present run of the backend.

    `warm_at`: the time it was read, or reported as kept (Unix seconds); None if neither is known. `tokens`: of the
    whole question that was sent ahead, the prompt and some ten around it; None where none was. `reused`: prompt tokens
    of its agents' requests that the backend had kept, all together. `retry_at`: not before that (monotonic seconds);
    `why`: what went wrong then.
    """

    warm_at: float | None = None
    tokens: int | None = None
    reused: int = 0
    is_under_way: bool = False
    retry_at: float = 0.0
    why: str = ""


UNKNOWN = PrefixStanding()


class PrewarmVerdict(NamedTuple):
    """The decision to send it ahead now or not, and its reason."""

    send: bool
    why: str


def choose(standing: PrefixStanding, now: float) -> PrewarmVerdict:
    """Decides to send it ahead once per run of the backend; never if a request has shown that it is kept.

    >>> choose(UNKNOWN, 0.0)
    PrewarmVerdict(send=True, why='not read yet')
    >>> choose(PrefixStanding(warm_at=1.0), 0.0).send, choose(PrefixStanding(is_under_way=True), 0.0).send
    (False, False)
    >>> choose(PrefixStanding(retry_at=9.0, why="the backend does not answer"), 8.0)
    PrewarmVerdict(send=False, why='the backend does not answer')
    """
    if standing.warm_at is not None:
        return PrewarmVerdict(False, "kept by the backend")
    if standing.is_under_way:
        return PrewarmVerdict(False, "being read")
    if now < standing.retry_at:
        return PrewarmVerdict(False, standing.why)
    return PrewarmVerdict(True, "not read yet")


def is_warm(cached_tokens: int, text_bytes: int) -> bool:
    """Whether a request that reused so many tokens shows that a prompt of this length is kept.

    The other agents' first tokens may be its own by chance, so a few do not show it.

    >>> is_warm(2500, 10_000), is_warm(30, 10_000)
    (True, False)
    """
    return cached_tokens * BYTES_PER_TOKEN >= text_bytes


class Warmth:
    """Every prefix that was sent, or seen in use, since the backend began. The caller passes the time.

    >>> warmth, prefix = Warmth(), Prefix("a5e2", "tenant t", "m")
    >>> warmth.choose(prefix, now=0.0).send, warmth.begin(prefix), warmth.choose(prefix, now=0.0)
    (True, 0, PrewarmVerdict(send=False, why='being read'))
    >>> warmth.backend_began(); warmth.read(prefix, 0, tokens=900, at=5.0); warmth.choose(prefix, now=0.0).send
    True
    """

    def __init__(self) -> None:
        self.epoch = 0
        """The number of the backend's run that this describes; grows with every new run or backend."""
        self._standing: dict[Prefix, PrefixStanding] = {}

    def __repr__(self) -> str:
        warm = sum(one.warm_at is not None for one in self._standing.values())
        return f"<Warmth epoch {self.epoch}, {warm} of {len(self._standing)} warm>"

    def __len__(self) -> int:
        return len(self._standing)

    def backend_began(self) -> None:
        """Another backend, or the same one anew: it has kept nothing."""
        self.epoch += 1
        self._standing.clear()

    def model_began(self, model: str) -> None:
        """A server of its own for this model has begun: it has kept nothing. Others go on.

        >>> warmth, one, other = Warmth(), Prefix("a5e2", "tenant t", "m"), Prefix("a5e2", "tenant t", "n")
        >>> warmth.read(one, 0, tokens=9, at=5.0); warmth.read(other, 0, tokens=9, at=5.0); warmth.model_began("m")
        >>> warmth.choose(one, now=0.0).send, warmth.choose(other, now=0.0).send
        (True, False)
        """
        self._standing = {prefix: one for prefix, one in self._standing.items() if prefix.model != model}

    def standing(self, prefix: Prefix) -> PrefixStanding:
        return self._standing.get(prefix, UNKNOWN)

    def choose(self, prefix: Prefix, now: float) -> PrewarmVerdict:
        return choose(self.standing(prefix), now)

    def begin(self, prefix: Prefix) -> int:
        """Notes that it is sent now. Returns the epoch for `read` and `failed`: a result of an earlier epoch counts no
        more."""
        self._change(prefix, is_under_way=True)
        return self.epoch

    def read(self, prefix: Prefix, epoch: int, *, tokens: int | None, at: float) -> None:
        """The backend has read it, at `at` (Unix seconds)."""
        if epoch == self.epoch:
            self._change(prefix, is_under_way=False, warm_at=at, tokens=tokens, why="")

    def failed(self, prefix: Prefix, epoch: int, why: str, now: float) -> None:
        if epoch == self.epoch:
            self._change(prefix, is_under_way=False, retry_at=now + RETRY_S, why=why)

    def forgive(self) -> None:
        """Something changed: what failed may be tried again at once."""
        for prefix, one in self._standing.items():
            self._standing[prefix] = msgspec.structs.replace(one, retry_at=0.0)

    def saw(self, prefix: Prefix, *, cached_tokens: int, text_bytes: int, at: float) -> None:
        """A request of an agent that has this prompt reused so many tokens."""
        one = self.standing(prefix)
        is_shown = one.warm_at is None and is_warm(cached_tokens, text_bytes)
        self._change(prefix, reused=one.reused + cached_tokens, warm_at=at if is_shown else one.warm_at)

    def forget_all_but(self, prefixes: Iterable[Prefix]) -> None:
        """Forgets all other prefixes, as no agent has them any more; those under way stay until they end."""
        kept = set(prefixes)
        self._standing = {prefix: one for prefix, one in self._standing.items() if prefix in kept or one.is_under_way}

    def _change(self, prefix: Prefix, **changes: object) -> None:
        self._standing[prefix] = msgspec.structs.replace(self.standing(prefix), **changes)
