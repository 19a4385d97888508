"""Live state in Redis, asked with redis_client.py at what redis_at.py names.

Two ways to use it. *Say* (`put_agent`, `touch`, `publish` …): never waits and never fails; `run`, a task of the
owner, writes what was said in one pipeline, keeps trying while Redis is away, and says everything about agents again
to a Redis that came back empty. *Ask* (`activity`, the verbs for old usage): awaits a bounded round trip, raises
DependencyDown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.domain import BackendInfo, ModelInfo, Tier
from hive.errors import DependencyDown
from hive.store import keys
from hive.store.channels import CHANNELS
from hive.store.redis_at import RedisAt
from hive.store.redis_client import Command, RedisClient, RedisRefused
from hive.store.stream import StreamFields
from hive.store.write_behind import ENTRIES, AgentKeys, Batch, WriteBehind

log = logging.getLogger("hive.store")

OP_TIMEOUT_S = 1.0
"""Nothing in the data path waits for Redis, so this only bounds how late a dead one is noticed."""
GATHER_S = 0.05
"""Time over which writes are gathered; they go out in one pipeline."""
AGENTS_AT_ONCE = 250
"""Said in one pipeline: some 10 ms of this process. All that Redis must know of 10,000 agents takes half a second."""
SWEEP_AGAIN_S = 10.0
PING_S = 2.0
_VM_CID = keys.VM_CIDS.removesuffix("*").encode()
RETRY_S = (0.1, 5.0)
REFRESH_S = 3600.0


class StreamEntry(NamedTuple):
    """One entry of `hive:usage`; `fields` is empty where it was deleted while it was pending."""

    id: bytes
    fields: dict[bytes, bytes]


class Live:
    """One Redis. Works, and says so with `up`, whether or not that Redis is there.

    `on_new_run` is called (on the loop) after Redis is found to be another process than before: whatever only
    the caller can rebuild (tokens, models) should be said again.
    """

    def __init__(
        self, at: RedisAt | Path, *, on_new_run: Callable[[], None] | None = None, op_timeout_s: float = OP_TIMEOUT_S
    ) -> None:
        self.at = at if isinstance(at, RedisAt) else RedisAt(str(at))
        self.up = False
        self.why_down = ""
        """The words of Redis, or the failure to ask it; empty while it is up and before it was first asked."""
        self._let_in = True
        self.run_id = ""
        self._on_new_run = on_new_run
        self._identified = 0
        self._waiting = WriteBehind()
        self._unswept: set[str] = set()
        """Forgotten agents that may still have keys of an earlier daemon."""
        self._sweep_at = float("-inf")
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._redis = RedisClient(self.at.place, within_s=op_timeout_s)

    def __repr__(self) -> str:
        return f"<Live {'up' if self.up else 'down'} {self._waiting!r}>"

    @property
    def messages_dropped(self) -> int:
        """Published messages Redis never got."""
        return self._waiting.messages_dropped

    async def close(self) -> None:
        """Ends `run`, writes what waits if Redis answers, disconnects."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if self.up:
                with contextlib.suppress(DependencyDown):
                    await self._flush()
        self._redis.close()

    # --- say -----------------------------------------------------------------------------------------------------

    def put_agent(
        self,
        agent: str,
        *,
        paused: bool,
        tier: Tier,
        instance: str | None = None,
        cid: int | None = None,
        prompt: tuple[str, str] | None = None,
    ) -> None:
        """The keys `paused`, `tier`, `vm:instance`, `vm:cid` of this agent, refreshed until `forget_agent`.

        `prompt`: hash and text of its system prompt. All agents with the prompt share its keys.
        """
        self._waiting.put_agent(agent, AgentKeys(paused, tier, instance, cid, prompt))
        self._something.set()

    def forget_agent(self, agent: str) -> None:
        """Deletes every key of this agent."""
        self._waiting.forget_agent(agent)
        self._something.set()

    def touch(self, agent: str, at: float) -> None:
        """The agent was active at `at` (Unix seconds)."""
        self._waiting.touch(agent, at)
        self._something.set()

    def set_totals(self, agent: str, *, tokens_in: int, tokens_out: int, requests: int) -> None:
        """The counts for display: from SQLite at the start and after `on_new_run`, and whenever rows are added."""
        self._waiting.set_totals(agent, tokens_in, tokens_out, requests)
        self._something.set()

    def set_models(self, models: Sequence[ModelInfo]) -> None:
        """`hive:models:available`, a JSON list of ModelInfo, gone after 300 s."""
        self._waiting.set_value(keys.MODELS_AVAILABLE, msgspec.json.encode(models), keys.MODELS_S)
        self._something.set()

    def set_backend(self, backend: BackendInfo | None) -> None:
        """`hive:inference:backend`, the kind of the backend, or an empty string where there is none."""
        kind = "" if backend is None else str(backend.kind)
        self._waiting.set_value(keys.INFERENCE_BACKEND, kind.encode(), None)
        self._something.set()

    def set_config(self, values: Mapping[str, str]) -> None:
        """`hive:config:runtime`, a JSON object: what was set at runtime, by `section.key`."""
        self._waiting.set_value(keys.CONFIG_RUNTIME, msgspec.json.encode(values), None)
        self._something.set()

    def set_lease(self, lease: str, held: Mapping[str, object], *, ttl_s: int) -> None:
        """`hive:gpu:lease:{id}`, a JSON object: who holds how much memory of which GPUs, until when."""
        self._waiting.set_value(keys.gpu_lease(lease), msgspec.json.encode(held), ttl_s)
        self._something.set()

    def drop_lease(self, lease: str) -> None:
        """Deletes that key."""
        self._waiting.drop_value(keys.gpu_lease(lease))
        self._something.set()

    def publish(self, event: msgspec.Struct) -> None:
        """Publishes one of the structs of `store/channels.py` on its channel. While Redis is away it is dropped."""
        self._waiting.publish(CHANNELS[type(event)], msgspec.json.encode(event))
        self._something.set()

    def add_usage(self, entries: Iterable[StreamFields]) -> None:
        """`hive:usage`, a stream of the last events that are in SQLite, some KB of them."""
        self._waiting.add_usage(entries)
        self._something.set()

    # --- ask -----------------------------------------------------------------------------------------------------

    # Before 0.2 the proxy sent usage through the stream, and the group `daemon` took it out.

    async def old_usage(self, count: int) -> list[StreamEntry]:
        """Entries that such a proxy left for the daemon. Where there are none (any more) the group is removed, which
        says that there may be some. Raises DependencyDown."""
        for begin in ("0", ">"):  # those a daemon was given and has not settled, then the others
            group = ("GROUP", keys.USAGE_GROUP, keys.USAGE_GROUP)
            try:
                [found] = await self._do(("XREADGROUP", *group, "COUNT", count, "STREAMS", keys.USAGE_STREAM, begin))
            except DependencyDown as error:
                if str(error.__cause__).startswith("NOGROUP"):
                    return []
                raise
            if entries := [StreamEntry(id, _pairs(fields)) for _, entries in found or () for id, fields in entries]:
                return entries
        await self._do(("XGROUP", "DESTROY", keys.USAGE_STREAM, keys.USAGE_GROUP))
        return []

    async def settle_old_usage(self, ids: Sequence[bytes]) -> None:
        """Acknowledges and deletes entries, both or neither. Raises DependencyDown."""
        await self._do(
            ("MULTI",),
            ("XACK", keys.USAGE_STREAM, keys.USAGE_GROUP, *ids),
            ("XDEL", keys.USAGE_STREAM, *ids),
            ("EXEC",),
        )

    # --- the connection ------------------------------------------------------------------------------------------

    async def _do(self, *commands: Command) -> list[Any]:
        """The replies to these, sent together. Raises DependencyDown."""
        try:
            replies = await self._redis.ask(commands)
            if self._identified != self._redis.connects:
                await self._identify()
        except (RedisRefused, OSError, TimeoutError) as error:
            # Redis answered, but no: it is up as far as the caller's next question is concerned.
            why = str(error) or "no answer in time"
            if not isinstance(error, RedisRefused) or not error.is_let_in:
                self._note(up=False, why=why, let_in=not isinstance(error, RedisRefused))
            raise DependencyDown(f"Redis does not answer at {self.at}: {why}") from error
        self._note(up=True)
        return replies

    async def _identify(self) -> None:
        """Finds out whether a new connection leads to the same Redis as before."""
        connects = self._redis.connects
        [told] = await self._redis.ask([("INFO", "server")])
        found = (line[7:].decode() for line in told.split(b"\r\n") if line.startswith(b"run_id:"))
        run_id = next(found, "")
        self._identified = connects
        if run_id == self.run_id:
            return
        first, self.run_id = not self.run_id, run_id
        if not first:
            log.warning("redis_restarted run_id=%s", run_id)
            self._waiting.say_agents_again()
            self._something.set()
            if self._on_new_run is not None:
                self._on_new_run()

    def _note(self, *, up: bool, why: str = "", let_in: bool = True) -> None:
        if up and not self.up:
            log.info("redis_up path=%s run_id=%s", self.at, self.run_id)
        elif not up and (self.up or not self.why_down or let_in is not self._let_in):
            log.warning("redis_down path=%s error=%s", self.at, why)
        self.up, self.why_down, self._let_in = up, why, let_in

    # --- writing behind ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Writes what was said, for ever; the owner spawns it once. Until then everything said waits."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        refreshed = loop.time()
        delay = RETRY_S[0]
        while True:
            if loop.time() - refreshed >= REFRESH_S:
                refreshed = loop.time()
                self._waiting.say_agents_again()
            try:
                await self._flush()
            except DependencyDown:
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_S[1])
                continue
            delay = RETRY_S[0]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    await self._something.wait()
            await asyncio.sleep(GATHER_S)

    async def _flush(self) -> None:
        """Writes what waits, or pings where nothing does. Raises DependencyDown; then everything waits again."""
        self._something.clear()
        batch = self._waiting.take()
        if not batch:
            await self._do(("PING",))
            await self._sweep()
            return
        parts = deque(in_parts(batch, AGENTS_AT_ONCE))
        try:
            while parts:
                await self._write(parts[0])
                parts.popleft()
        except DependencyDown:
            for part in reversed(parts):  # the last first: an agent this batch forgets may be in it again
                self._waiting.give_back(part)
            raise

    async def _write(self, batch: Batch) -> None:
        self._unswept |= batch.forgotten
        await self._sweep()
        await self._do(*commands_of(batch))

    async def _sweep(self) -> None:
        """Deletes what earlier daemons left that leads to forgotten agents. It is a look at every key there is: for one
        agent at once, of many that are removed one after the other for some together."""
        now = asyncio.get_running_loop().time()
        if not self._unswept or now < self._sweep_at:
            return
        gone = {agent.encode() for agent in self._unswept if agent not in self._waiting.known}
        async for found in self._scan(keys.VM):
            [owners] = await self._do(("MGET", *found))
            left = [key for key, owner in zip(found, owners, strict=True) if owner in gone]
            cids = [key.removeprefix(_VM_CID) for key in left if key.startswith(_VM_CID)]
            left += [keys.cid_tier(cid.decode()).encode() for cid in cids]
            if left:
                await self._do(("DEL", *left))
        self._unswept.clear()
        self._sweep_at = now + SWEEP_AGAIN_S

    async def _scan(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """Some keys of this pattern at a time."""
        cursor = b"0"
        while True:
            [[cursor, found]] = await self._do(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
            if found:
                yield found
            if cursor == b"0":
                return


def in_parts(batch: Batch, at_once: int) -> list[Batch]:
    """A batch about more than `at_once` agents as several, to be written one after another; any other as it is.

    Forgotten agents come first and messages last, as within one.

    >>> many = Batch(totals={str(n): (n, 0, 1) for n in range(5)}, messages=[("channel", b"{}")])
    >>> [(len(part.totals), len(part.messages)) for part in in_parts(many, 2)]
    [(0, 0), (2, 0), (2, 0), (1, 0), (0, 1)]
    """
    agents, totals = list(batch.agents.items()), list(batch.totals.items())
    most = max(len(agents), len(totals))
    if most <= at_once:
        return [batch]
    first = Batch(forgotten=batch.forgotten, gone_instances=batch.gone_instances, gone_cids=batch.gone_cids)
    first.gone_prompts = batch.gone_prompts
    middle = [
        Batch(agents=dict(agents[n : n + at_once]), totals=dict(totals[n : n + at_once]))
        for n in range(0, most, at_once)
    ]
    gone: Any = {"forgotten": set(), "gone_instances": set(), "gone_cids": set(), "gone_prompts": set()}
    return [first, *middle, msgspec.structs.replace(batch, agents={}, totals={}, **gone)]


def _pairs(fields: Sequence[bytes] | None) -> dict[bytes, bytes]:
    """
    >>> _pairs([b"a", b"1", b"b", b"2"]), _pairs(None)
    ({b'a': b'1', b'b': b'2'}, {})
    """
    return dict(zip(fields[::2], fields[1::2], strict=True)) if fields else {}


def commands_of(batch: Batch) -> Iterator[Command]:
    """The commands that write a batch."""
    for agent in batch.forgotten:
        yield ("DEL", *keys.keys_of_agent(agent))
        yield ("ZREM", keys.AGENTS_ACTIVITY, agent)
    for instance in batch.gone_instances:
        yield ("DEL", keys.vm_instance(instance))
    for cid in batch.gone_cids:
        yield ("DEL", keys.vm_cid(cid), keys.cid_tier(cid))
    for agent in batch.gone_prompts:
        yield ("DEL", keys.agent_prompt(agent))
    for agent, said in batch.agents.items():
        yield from _of_agent(agent, said)
    for hashed, (text, agents) in batch.prompts.items():
        yield from _of_prompt(hashed, text, agents)
    for agent, at in batch.touched.items():
        yield ("SET", keys.agent_activity(agent), f"{at:.3f}", "EX", keys.DAY_S)
    if batch.touched:
        scores = [word for agent, at in batch.touched.items() for word in (at, agent)]
        yield ("ZADD", keys.AGENTS_ACTIVITY, *scores)
        yield ("ZREMRANGEBYSCORE", keys.AGENTS_ACTIVITY, "-inf", max(batch.touched.values()) - keys.DAY_S)
        yield ("EXPIRE", keys.AGENTS_ACTIVITY, keys.DAY_S)
    for agent, (tokens_in, tokens_out, requests) in batch.totals.items():
        totals = ("input", tokens_in, "output", tokens_out, "requests", requests)
        yield ("HSET", keys.agent_tokens(agent), *totals)
    for key, (value, ttl_s) in batch.values.items():
        yield ("SET", key, value, *(() if ttl_s is None else ("EX", ttl_s)))
    for key in batch.gone_values:
        yield ("DEL", key)
    for entry in batch.usage:
        fields = [word for pair in dict(entry).items() for word in pair]
        yield ("XADD", keys.USAGE_STREAM, "MAXLEN", "~", ENTRIES, "*", *fields)
    for channel, message in batch.messages:
        yield ("PUBLISH", channel, message)


def _of_agent(agent: str, said: AgentKeys) -> Iterator[Command]:
    for_a_day = ("EX", keys.DAY_S)
    yield ("SET", keys.agent_tier(agent), str(said.tier), *for_a_day)
    if said.paused:
        yield ("SET", keys.agent_paused(agent), "1", *for_a_day)
    else:
        yield ("DEL", keys.agent_paused(agent))
    if said.instance is not None:
        yield ("SET", keys.vm_instance(said.instance), agent, *for_a_day)
    if said.cid is not None:
        yield ("SET", keys.vm_cid(said.cid), agent, *for_a_day)
        yield ("SET", keys.cid_tier(said.cid), str(said.tier), *for_a_day)
    if said.prompt is not None:
        yield ("SET", keys.agent_prompt(agent), said.prompt[0], *for_a_day)


def _of_prompt(hashed: str, text: str, agents: Sequence[str]) -> Iterator[Command]:
    """Puts a prompt and makes the set of its agents anew: any agent but `agents` loses it."""
    yield ("DEL", keys.prompt_agents(hashed))
    if not agents:
        yield ("DEL", keys.prompt(hashed))
        return
    yield ("SET", keys.prompt(hashed), text, "EX", keys.DAY_S)
    yield ("SADD", keys.prompt_agents(hashed), *agents)
    yield ("EXPIRE", keys.prompt_agents(hashed), keys.DAY_S)
