"""System prompts: which agents share one, and whether a backend is to read it before its agents ask. Pure.

A backend keeps what it has read of a prompt and need not read it again (its prefix cache), within the group of agents
that may meet there, for one model, as long as it runs. So that is what a prompt is read for once: a `Prefix`.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

BYTES_PER_TOKEN = 4
"""Of English text, OpenAI's rule of thumb. Where tokens are longer a prompt is sent that need not have been."""
RETRY_S = 10.0
"""After a prompt could not be sent: agents that start meanwhile do not try it again."""


@functools.lru_cache(maxsize=1024)
def hash_prompt(text: str) -> str:
    """SHA-256 of the text in UTF-8, its first 16 hex digits (seeds/000 §5).

    >>> hash_prompt("You are a customer service agent...")
    'a18ecbbe7784a5bf'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Holder(NamedTuple):
    """A living agent that has a system prompt. `group`: whose prompts may meet its own in a cache; `model`: the one its
    requests are given, empty where there is none."""

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
    """What a backend keeps once. `prompt`: the hash."""

    prompt: str
    group: str
    model: str


def sharers(holders: Iterable[Holder]) -> dict[Prefix, list[Holder]]:
    """Who shares what, in the order given; who is not among `holders` any more shares nothing.

    >>> ann, ben = (Holder(name, name, "t", "tenant t", "m", "Be kind.") for name in ("ann", "ben"))
    >>> eve = ben._replace(name="eve", group="tenant u")
    >>> [[one.name for one in found] for found in sharers([ann, ben, eve]).values()]
    [['ann', 'ben'], ['eve']]
    """
    found: dict[Prefix, list[Holder]] = {}
    for holder in holders:
        found.setdefault(holder.prefix, []).append(holder)
    return found


def share_counts(shared: Mapping[Prefix, Sequence[Holder]]) -> Counter[str]:
    """Hash of a prompt → how many agents have it, whatever their tenant and model.

    >>> ann = Holder("a", "ann", "t", "tenant t", "m", "Be kind.")
    >>> share_counts(sharers([ann, ann._replace(model="n"), ann._replace(text="Be brief.")]))[ann.prefix.prompt]
    2
    """
    found: Counter[str] = Counter()
    for prefix, holders in shared.items():
        found[prefix.prompt] += len(holders)
    return found


class Standing(msgspec.Struct, frozen=True):
    """How one prefix stands with the backend as it runs now.

    `warm_at`: when it was read, or reported as kept (Unix seconds); None where neither is known. `tokens`: of the whole
    question that was sent ahead, the prompt and some ten around it; None where none was. `reused`: prompt tokens of its
    agents' requests that the backend had kept, all together. `retry_at`: not before that (monotonic seconds); `why`:
    what went wrong then.
    """

    warm_at: float | None = None
    tokens: int | None = None
    reused: int = 0
    is_under_way: bool = False
    retry_at: float = 0.0
    why: str = ""


UNKNOWN = Standing()


class Verdict(NamedTuple):
    """Whether to send it ahead now, and why (not)."""

    send: bool
    why: str


def choose(standing: Standing, now: float) -> Verdict:
    """Once for as long as the backend runs; never where somebody's request has shown that it is kept.

    >>> choose(UNKNOWN, 0.0)
    Verdict(send=True, why='not read yet')
    >>> choose(Standing(warm_at=1.0), 0.0).send, choose(Standing(is_under_way=True), 0.0).send
    (False, False)
    >>> choose(Standing(retry_at=9.0, why="the backend does not answer"), 8.0)
    Verdict(send=False, why='the backend does not answer')
    """
    if standing.warm_at is not None:
        return Verdict(False, "kept by the backend")
    if standing.is_under_way:
        return Verdict(False, "being read")
    if now < standing.retry_at:
        return Verdict(False, standing.why)
    return Verdict(True, "not read yet")


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
    (True, 0, Verdict(send=False, why='being read'))
    >>> warmth.backend_began(); warmth.read(prefix, 0, tokens=900, at=5.0); warmth.choose(prefix, now=0.0).send
    True
    """

    def __init__(self) -> None:
        self.epoch = 0
        """Which run of which backend this is about; grows with every other one."""
        self._standing: dict[Prefix, Standing] = {}

    def __repr__(self) -> str:
        warm = sum(one.warm_at is not None for one in self._standing.values())
        return f"<Warmth epoch {self.epoch}, {warm} of {len(self._standing)} warm>"

    def __len__(self) -> int:
        return len(self._standing)

    def backend_began(self) -> None:
        """Another backend, or the same one anew: it has kept nothing."""
        self.epoch += 1
        self._standing.clear()

    def standing(self, prefix: Prefix) -> Standing:
        return self._standing.get(prefix, UNKNOWN)

    def choose(self, prefix: Prefix, now: float) -> Verdict:
        return choose(self.standing(prefix), now)

    def begin(self, prefix: Prefix) -> int:
        """It is sent now. The epoch, for `read` and `failed`: what began in an earlier one tells nothing any more."""
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
        """Nobody has the others any more; what is under way ends as it does."""
        kept = set(prefixes)
        self._standing = {prefix: one for prefix, one in self._standing.items() if prefix in kept or one.is_under_way}

    def _change(self, prefix: Prefix, **changes: object) -> None:
        self._standing[prefix] = msgspec.structs.replace(self.standing(prefix), **changes)
