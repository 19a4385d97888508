"""The writes that Redis still has to get: a buffer that keeps the newest of everything. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from hive.domain import Tier
from hive.store.stream import StreamFields

MESSAGES = 1000
"""Published messages that may wait; beyond it the oldest is dropped and counted."""
ENTRIES = 100
"""Entries of the usage stream that may wait; beyond it the oldest is dropped, as the stream itself does."""


class AgentKeys(msgspec.Struct, frozen=True):
    """The keys of one agent in Redis.

    `instance`: its runtime's name for it, None where it has none of its own; `cid`: its machine's, if it has one.
    `prompt`: hash and text of its system prompt.
    """

    paused: bool
    tier: Tier
    instance: str | None = None
    cid: int | None = None
    prompt: tuple[str, str] | None = None


class Batch(msgspec.Struct):
    """One pipeline, `forgotten` first. Totals are `(in, out, requests)`; values `(bytes, TTL in s)`.

    `gone_values`: keys of values that are to be deleted, none of them in `values`.
    `prompts`: hash → text, and all the agents that have it; nobody has one without agents any more. `gone_prompts`:
    agents that have none any more.
    """

    forgotten: set[str] = set()
    agents: dict[str, AgentKeys] = {}
    gone_instances: set[str] = set()
    gone_cids: set[int] = set()
    gone_prompts: set[str] = set()
    prompts: dict[str, tuple[str, tuple[str, ...]]] = {}
    touched: dict[str, float] = {}
    totals: dict[str, tuple[int, int, int]] = {}
    values: dict[str, tuple[bytes, int | None]] = {}
    gone_values: set[str] = set()
    messages: list[tuple[str, bytes]] = []
    usage: list[StreamFields] = []

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)


class WriteBehind:
    """Collects until `take`; `give_back` undoes a `take` that could not be written, newer entries win.

    >>> waiting = WriteBehind()
    >>> waiting.touch("a1", 5.0); waiting.touch("a1", 6.0); waiting.touch("a1", 4.0)
    >>> batch = waiting.take()
    >>> batch.touched, bool(waiting.take())
    ({'a1': 6.0}, False)
    """

    def __init__(self) -> None:
        self._batch = Batch()
        self._messages: deque[tuple[str, bytes]] = deque(maxlen=MESSAGES)
        self._usage: deque[StreamFields] = deque(maxlen=ENTRIES)
        self.known: dict[str, AgentKeys] = {}
        self._sharers: dict[str, dict[str, None]] = {}
        """Hash of a prompt → the agents that have it."""
        self.messages_dropped = 0

    def __repr__(self) -> str:
        return f"<WriteBehind {len(self.known)} agents, {len(self._messages)} messages waiting>"

    def put_agent(self, agent: str, said: AgentKeys) -> None:
        before = self.known.get(agent)
        if before is not None and before.instance and before.instance != said.instance:
            self._batch.gone_instances.add(before.instance)
        if before is not None and before.cid is not None and before.cid != said.cid:
            self._batch.gone_cids.add(before.cid)
        if (before.prompt if before is not None else None) != said.prompt:
            self._change_prompt(agent, None if before is None else before.prompt, said.prompt)
        self.known[agent] = said
        self._batch.agents[agent] = said

    def forget_agent(self, agent: str) -> None:
        before = self.known.pop(agent, None)
        if before is not None and before.prompt is not None:
            self._change_prompt(agent, before.prompt, None)
        if before is not None and before.instance is not None:
            self._batch.gone_instances.add(before.instance)
        if before is not None and before.cid is not None and not self._is_taken(before.cid):
            self._batch.gone_cids.add(before.cid)
        for part in (self._batch.agents, self._batch.touched, self._batch.totals):
            part.pop(agent, None)
        self._batch.forgotten.add(agent)

    def _is_taken(self, cid: int) -> bool:
        return any(said.cid == cid for said in self.known.values())

    def _change_prompt(self, agent: str, before: tuple[str, str] | None, now: tuple[str, str] | None) -> None:
        if before is not None:
            self._sharers[before[0]].pop(agent, None)
            self._say_prompt(*before)
        if now is not None:
            self._sharers.setdefault(now[0], {})[agent] = None
            self._say_prompt(*now)
            self._batch.gone_prompts.discard(agent)
        else:
            self._batch.gone_prompts.add(agent)

    def _say_prompt(self, hashed: str, text: str) -> None:
        sharers = self._sharers.get(hashed, {})
        self._batch.prompts[hashed] = text, tuple(sharers)
        if not sharers:
            self._sharers.pop(hashed, None)

    def _is_forgotten(self, agent: str) -> bool:
        """Late news of a forgotten agent would bring its keys back."""
        return agent in self._batch.forgotten and agent not in self._batch.agents

    def touch(self, agent: str, at: float) -> None:
        batch = self._batch
        if batch.forgotten and self._is_forgotten(agent):
            return
        if at > batch.touched.get(agent, 0.0):
            batch.touched[agent] = at

    def set_totals(self, agent: str, tokens_in: int, tokens_out: int, requests: int) -> None:
        if not self._is_forgotten(agent):
            self._batch.totals[agent] = (tokens_in, tokens_out, requests)

    def set_value(self, key: str, value: bytes, ttl_s: int | None) -> None:
        self._batch.values[key] = (value, ttl_s)
        self._batch.gone_values.discard(key)

    def drop_value(self, key: str) -> None:
        self._batch.values.pop(key, None)
        self._batch.gone_values.add(key)

    def publish(self, channel: str, message: bytes) -> None:
        self.messages_dropped += len(self._messages) == MESSAGES
        self._messages.append((channel, message))

    def add_usage(self, entries: Iterable[StreamFields]) -> None:
        self._usage.extend(entries)

    def say_agents_again(self) -> None:
        """Every known agent is to be written once more: its keys age, or Redis began empty."""
        self._batch.agents = {**self.known, **self._batch.agents}
        for said in self.known.values():
            if said.prompt is not None and said.prompt[0] not in self._batch.prompts:
                self._say_prompt(*said.prompt)

    def _has_prompt(self, agent: str) -> bool:
        said = self.known.get(agent)
        return said is not None and said.prompt is not None

    def take(self) -> Batch:
        """All that waits; the buffer is empty afterwards."""
        batch, self._batch = self._batch, Batch()
        batch.messages = list(self._messages)
        self._messages.clear()
        batch.usage = list(self._usage)
        self._usage.clear()
        return batch

    def give_back(self, batch: Batch) -> None:
        """Takes back a batch that was not written. Its messages are dropped and counted: none is published late."""
        now = self._batch
        later = set(now.forgotten)
        now.forgotten |= batch.forgotten
        now.gone_instances |= batch.gone_instances
        now.gone_cids |= batch.gone_cids
        now.gone_prompts |= {agent for agent in batch.gone_prompts if not self._has_prompt(agent)}
        for hashed, (text, _) in batch.prompts.items():
            if hashed not in now.prompts:
                self._say_prompt(hashed, text)
        now.agents = {**{agent: said for agent, said in batch.agents.items() if agent not in later}, **now.agents}
        now.totals = {**{agent: said for agent, said in batch.totals.items() if agent not in later}, **now.totals}
        for agent in batch.touched.keys() - later:
            self.touch(agent, batch.touched[agent])
        kept = {key: value for key, value in batch.values.items() if key not in now.gone_values}
        now.gone_values |= batch.gone_values - now.values.keys()
        now.values = {**kept, **now.values}
        self.messages_dropped += len(batch.messages)
        self._usage = deque([*batch.usage, *self._usage], maxlen=ENTRIES)
