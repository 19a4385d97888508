"""The doings of each step of the tour, on its Hive: orders, callers, and what they and the kernel say. How that is
shown is decided elsewhere."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from hive.client.calls import Answer
from hive.demo.agents import DEMO_AGENTS
from hive.demo.callers import SAYINGS, Turn, accepts, bring_up, demo_spec, judge
from hive.demo.canned import answer_words
from hive.demo.port_claims import PortClaims
from hive.domain import AgentSpec
from hive.errors import AgentDown, HiveError, NotSupported, Saturated, TimedOut
from hive.host.listener import listener_at
from hive.host.process import TICK_US, identify, read_stat
from hive.http_client import httpx
from hive.tasks import spawn
from hive.tour.asking import HeardAnswer, ModelDoor, ask_agent, ask_model, since_ms
from hive.tour.own_hive import OwnHive
from hive.tour.steps import CROWD, CROWD_AT_ONCE, GUEST, GUEST_ASKS, IDLE_S, PLACES
from hive.up.services import DEMO_SOCKET

DEEP_ONE = "scribe"
"""The one that sleeps deep, where this machine can: its memory is the smallest."""
READY_S = 60.0
LISTEN_S = 0.05
ASLEEP_S = 25.0
"""An agent that has not gone to sleep by itself after so long is put to sleep."""
ACT_S = 30.0
QUIET_S = 1.0
"""A sleeper is watched for so long."""
TOKENS = 40
"""Of an answer to crowd and guest: two thirds of a second of the demo backend."""
ALL_TOKENS = 200
"""More than the demo backend's longest answer has."""
MIDDLE_TRIES = 5
LOOK_S = 0.1
BACK_S = 30.0
METERED_S = 8.0

Progress = Callable[[str], None]


class ToldSums(NamedTuple):
    """The sums of what whole answers told their callers, and how many requests had none, or not all of one."""

    answers: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    not_whole: int = 0

    def plus(self, tokens_in: int, tokens_out: int) -> ToldSums:
        return self._replace(
            answers=self.answers + 1, tokens_in=self.tokens_in + tokens_in, tokens_out=self.tokens_out + tokens_out
        )


class Scenes:
    """The steps, each a method that returns its figures. `progress` is told what goes on meanwhile.

    Each makes sure of what it needs, so any of them may be skipped, or ended in the middle.
    """

    def __init__(
        self, hive: OwnHive, health: Answer, callers: httpx.AsyncClient, ports: PortClaims, progress: Progress
    ) -> None:
        self._hive = hive
        self._ports = ports
        self._daemon = hive.daemon
        self._ingress_port = health["proxy"]["ingress_port"]
        self._callers = callers
        self._progress = progress
        self._specs: dict[str, AgentSpec] = {}
        self._turns: dict[str, int] = {}
        self._told = ToldSums()

    def __repr__(self) -> str:
        return f"<Scenes {len(self._specs)} agents, {self._told.answers} answers>"

    def of(self, name: str) -> Callable[[], Awaitable[Answer]]:
        """The step with this name."""
        found: Callable[[], Awaitable[Answer]] = getattr(self, name)
        return found

    # --- agents -------------------------------------------------------------------------------------------------------

    async def agents(self) -> Answer:
        """Creates the agents; each has a first turn."""
        begun = time.perf_counter()
        await self._agents_there()
        up_ms = since_ms(begun)
        turns = await asyncio.gather(*(self._turn(name) for name in self._specs))
        views = {name: await self._view(name) for name in self._specs}
        rows = [
            {
                "name": turn["name"],
                "pid": views[turn["name"]]["pid"],
                "uid": views[turn["name"]]["uid"],
                "ram_bytes": ram(views[turn["name"]]),
                "first_turn_ms": turn["took_ms"],
                "tokens_in": turn["tokens_in"],
                "tokens_out": turn["tokens_out"],
            }
            for turn in turns
        ]
        return {"agents": rows, "up_ms": up_ms}

    async def _agents_there(self) -> None:
        """All of them run, or sleep, and listen."""
        if not self._specs:
            for name, agent in DEMO_AGENTS.items():
                spec = demo_spec(name, agent, port=self._ports.take())
                self._specs[name] = msgspec.structs.replace(spec, idle_s=IDLE_S)
        self._progress("agents start")
        await asyncio.gather(*(self._bring_up(spec) for spec in self._specs.values()))

    async def _bring_up(self, spec: AgentSpec) -> None:
        await bring_up(self._daemon, self._hive.paths, spec, DEMO_AGENTS[spec.name])
        until = time.monotonic() + READY_S
        while not await accepts(spec.port or 0):
            if time.monotonic() > until:
                raise TimedOut(f"agent {spec.name} does not listen after {READY_S:g} s")
            view = await self._daemon.get(f"/api/agents/{spec.name}")
            if view["status"] in ("stopped", "error"):
                raise AgentDown(f"agent {spec.name} has ended: {view['reason']}")
            await asyncio.sleep(LISTEN_S)

    async def _view(self, name: str) -> Answer:
        return await self._daemon.get(f"/api/agents/{name}")

    async def _turn(self, name: str) -> Answer:
        """One turn through ingress. Raises AgentDown, also where its memory is not what it was."""
        url = await self._address(name)
        said = SAYINGS[len(name) % len(SAYINGS)]
        took_ms, told = await ask_agent(self._callers, "POST", f"{url}turn", {"say": said})
        turn = msgspec.convert(told, Turn)
        if wrong := judge(self._turns.get(name), turn):
            raise AgentDown(f"agent {name}: {wrong}")
        self._turns[name] = turn.turn
        tokens_in, tokens_out = told["tokens_in"] or 0, told["tokens_out"] or 0
        self._told = self._told.plus(tokens_in, tokens_out)
        return {
            "name": name,
            "took_ms": took_ms,
            "turn": turn.turn,
            "memory_whole": turn.state_ok,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }

    async def _address(self, name: str) -> str:
        tokens = await self._daemon.get(f"/api/agents/{name}/tokens")
        return str(tokens["ingress_url"])

    # --- sleep --------------------------------------------------------------------------------------------------------

    async def sleep(self) -> Answer:
        """Lets them fall asleep, and watches the sleepers for a second."""
        await self._agents_there()
        quiet_since = dict(await asyncio.gather(*(self._quiet_after_a_turn(name) for name in self._specs)))
        awake = {name: ram(await self._view(name)) for name in self._specs}
        asleep_at, ordered = await self._until_asleep()
        deep_note = await self._deep(DEEP_ONE)
        self._progress("watched for a second")
        watched = await asyncio.gather(*(self._watched(name) for name in self._specs))
        rows = []
        for name, (cpu_ms, answers) in zip(self._specs, watched, strict=True):
            view = await self._view(name)
            rows.append(
                {
                    "name": name,
                    "pid": view["pid"],
                    "status": view["status"],
                    "depth": view["depth"],
                    "asleep_after_ms": round((asleep_at[name] - quiet_since[name]) * 1e3),
                    "by_order": name in ordered,
                    "cpu_ms": cpu_ms,
                    "answers_past_hive": answers,
                    "ram_awake_bytes": awake[name],
                    "ram_asleep_bytes": ram(view),
                    "swap_bytes": view["swap_bytes"] or 0,
                }
            )
        return {"agents": rows, "deep_note": deep_note}

    async def _quiet_after_a_turn(self, name: str) -> tuple[str, float]:
        await self._turn(name)
        return name, time.perf_counter()

    async def _until_asleep(self) -> tuple[dict[str, float], set[str]]:
        """The moment (`perf_counter`) at which each was first seen asleep; and those that had to be told."""
        begun, asleep_at, ordered = time.perf_counter(), dict[str, float](), set[str]()
        while len(asleep_at) < len(self._specs):
            views = (await self._daemon.get("/api/agents?short=1"))["agents"]
            for view in views:
                if view["status"] == "paused" and view["name"] in self._specs:
                    asleep_at.setdefault(view["name"], time.perf_counter())
            self._progress(f"{len(asleep_at)} of {len(self._specs)} asleep")
            if since_ms(begun) > ASLEEP_S * 1e3:
                late = [name for name in self._specs if name not in asleep_at and name not in ordered]
                ordered.update(late)
                await asyncio.gather(*(self._pause(name) for name in late))
            await asyncio.sleep(LOOK_S)
        return asleep_at, ordered

    async def _pause(self, name: str, *, deep: bool = False) -> None:
        await self._daemon.post(f"/api/agents/{name}/pause", {"timeout_s": ACT_S, "deep": deep}, within_s=2 * ACT_S)

    async def _deep(self, name: str) -> str:
        """Has it give its memory back; the reason where this machine cannot."""
        self._progress(f"{name} gives its memory back")
        try:
            await self._pause(name, deep=True)
        except (NotSupported, Saturated) as error:
            return error.message.rpartition("deep sleep: ")[2]
        return ""

    async def _watched(self, name: str) -> tuple[float, bool]:
        """CPU time it used in QUIET_S, in ms, and whether it answered at its own port meanwhile."""
        pid = (await self._view(name))["pid"]
        before = read_stat(pid)
        answers = await _answers(self._specs[name].port or 0, within_s=QUIET_S)
        after = read_stat(pid)
        if before is None or after is None or before.start_ticks != after.start_ticks:
            raise AgentDown(f"agent {name} has ended")
        return (after.cpu_ticks - before.cpu_ticks) * TICK_US / 1e3, answers

    # --- wake ---------------------------------------------------------------------------------------------------------

    async def wake(self) -> Answer:
        """One call to each sleeper, the same call again, and a turn that checks its memory."""
        await self._agents_there()
        await self._until_asleep()
        rows = []
        for name in self._specs:
            self._progress(f"a caller comes to {name}")
            url, depth = await self._address(name), (await self._view(name))["depth"]
            asleep_ms, _ = await ask_agent(self._callers, "GET", url)
            awake_ms, _ = await ask_agent(self._callers, "GET", url)
            turn = await self._turn(name)
            view = await self._view(name)
            rows.append(
                {
                    "name": name,
                    "depth": depth,
                    "wake_ms": view["last_wake_ms"],
                    "cause": view["last_wake_cause"],
                    "asleep_ms": asleep_ms,
                    "awake_ms": awake_ms,
                    "turn": turn["turn"],
                    "memory_whole": turn["memory_whole"],
                }
            )
        return {"agents": rows}

    # --- fair share ---------------------------------------------------------------------------------------------------

    async def share(self) -> Answer:
        """Many questions of one tenant at once, and a few of another one in the middle of them."""
        crowd, guest = await self._door(CROWD), await self._door(GUEST)
        begun = time.perf_counter()
        asked_by_crowd = asyncio.gather(*(self._ask(crowd, f"question {number}") for number in range(CROWD_AT_ONCE)))
        try:
            in_line = await self._until_in_line()
            answers = []
            for number in range(GUEST_ASKS):
                self._progress(f"{in_line} of {CROWD}'s questions in line; {GUEST} asks its {number + 1}.")
                answers.append(await self._ask(guest, f"one question, number {number}"))
                in_line = (await self._queue())[CROWD]
            self._progress(f"{in_line} of {CROWD}'s questions in line")
            answers_of_crowd = await asked_by_crowd
        finally:
            asked_by_crowd.cancel()
        rows = [
            self._summed(CROWD, answers_of_crowd, at_once=CROWD_AT_ONCE),
            self._summed(GUEST, answers, at_once=1),
        ]
        return {"places": PLACES, "tenants": rows, "all_ms": since_ms(begun)}

    def _summed(self, name: str, answers: Sequence[HeardAnswer], *, at_once: int) -> Answer:
        first = [answer.first_ms for answer in answers if answer.first_ms is not None]
        return {
            "agent": name,
            "tenant": name,
            "asked": len(answers),
            "at_once": at_once,
            "whole": sum(answer.is_whole for answer in answers),
            "errors": sorted({answer.message for answer in answers if not answer.is_whole}),
            "first_word_ms": {
                "median": round(statistics.median(first), 1) if first else None,
                "longest": max(first, default=None),
            },
        }

    async def _door(self, name: str) -> ModelDoor:
        """The way to the model of one that lives outside Hive; it is made known where it is not."""
        spec = {"name": name, "runtime": "external", "tenant": name, "tier": "high"}
        await self._daemon.put(f"/api/agents/{name}", msgspec.json.encode(spec), within_s=ACT_S)
        tokens = await self._daemon.get(f"/api/agents/{name}/tokens")
        return ModelDoor(tokens["openai_base_url"], tokens["model"])

    async def _ask(
        self,
        door: ModelDoor,
        prompt: str,
        *,
        most_tokens: int = TOKENS,
        on_word: Callable[[], None] = lambda: None,
    ) -> HeardAnswer:
        answer = await ask_model(self._callers, door, prompt, most_tokens=most_tokens, on_word=on_word)
        if answer.is_whole:
            self._told = self._told.plus(answer.tokens_in, answer.tokens_out)
        else:
            self._told = self._told._replace(not_whole=self._told.not_whole + 1)
        return answer

    async def _until_in_line(self) -> int:
        """Questions of crowd that wait, once most of them do."""
        until, waiting = time.monotonic() + ACT_S, 0
        while waiting < (CROWD_AT_ONCE - PLACES) // 2 and time.monotonic() < until:
            waiting = (await self._queue())[CROWD]
            await asyncio.sleep(LOOK_S)
        return waiting

    async def _queue(self) -> dict[str, int]:
        """Tenant → its requests that wait."""
        told = await self._daemon.get("/api/queue")
        found = {tenant["name"]: int(tenant["waiting"]) for tenant in told["tenants"]}
        return dict.fromkeys((CROWD, GUEST), 0) | found

    # --- the backend is killed ----------------------------------------------------------------------------------------

    async def outage(self) -> Answer:
        """kill -9 of the demo backend while it answers, and what each caller is told until there is one again."""
        door = await self._door(GUEST)
        socket = str(self._hive.paths.runtime / DEMO_SOCKET)
        before = await asyncio.to_thread(listener_at, socket)
        if before is None or (process := identify(before.pid)) is None:
            raise HiveError("the demo backend cannot be found")
        asked: list[asyncio.Task[HeardAnswer]] = []
        try:
            await self._in_the_middle(door, asked)
            self._progress(f"kill -9 {before.pid}")
            process.send(signal.SIGKILL)
            refused, back_ms = await self._until_back(door, time.perf_counter())
            async with asyncio.timeout(ACT_S):
                told = [await each for each in asked]
        except TimeoutError:
            raise TimedOut(f"the model's callers have no answer after {ACT_S:g} s") from None
        finally:
            for each in asked:
                each.cancel()
        after = await asyncio.to_thread(listener_at, socket)
        callers = [{"when": "in the middle of its answer", **_seen(answer)} for answer in told[:PLACES]]
        callers += [{"when": "in line for a place", **_seen(answer)} for answer in told[PLACES:]]
        callers += [{"when": "while there was none", **_seen(answer)} for answer in refused[:1]]
        return {
            "killed_pid": before.pid,
            "new_pid": None if after is None else after.pid,
            "callers": callers,
            "refused": len(refused),
            "back_ms": back_ms,
        }

    async def _in_the_middle(self, door: ModelDoor, asked: list[asyncio.Task[HeardAnswer]]) -> None:
        """Fills `asked`: with PLACES answers that have begun and not ended, and one question in line behind them.

        Raises TimeoutError; TimedOut where answers end too soon each time.
        """
        prompts = sorted(
            (f"tell me more of {number}" for number in range(50)), key=lambda each: -len(answer_words(each))
        )
        for _ in range(MIDDLE_TRIES):
            speaking = [asyncio.Event() for _ in range(PLACES)]
            asked[:] = [
                spawn(self._ask(door, prompt, most_tokens=ALL_TOKENS, on_word=each.set), name="caller-answered")
                for prompt, each in zip(prompts, speaking, strict=False)
            ]
            async with asyncio.timeout(ACT_S):
                await asyncio.gather(*(each.wait() for each in speaking))
                asked.append(spawn(self._ask(door, "and one that waits in line"), name="caller-in-line"))
                while not any(each.done() for each in asked):
                    if (await self._queue())[GUEST]:
                        return
                    await asyncio.sleep(LISTEN_S)
                for each in asked:
                    await each
        raise TimedOut("the model's answers end before its server is killed", hint="this machine is too busy for that")

    async def _until_back(self, door: ModelDoor, killed: float) -> tuple[list[HeardAnswer], float]:
        """The answers that were none, and milliseconds from the kill to the first word of one that is."""
        refused: list[HeardAnswer] = []
        until = time.monotonic() + BACK_S
        while time.monotonic() < until:
            asked = time.perf_counter()
            answer = await self._ask(door, "is anybody there", most_tokens=5)
            if answer.is_whole:
                return refused, round((asked - killed) * 1e3 + (answer.first_ms or 0.0), 1)
            refused.append(answer)
            self._progress(f"{len(refused)} refused: {answer.message}")
            await asyncio.sleep(LOOK_S)
        raise TimedOut(f"the demo backend is not back after {BACK_S:g} s")

    # --- usage --------------------------------------------------------------------------------------------------------

    async def usage(self) -> Answer:
        """The books, once all that was asked is in them, beside what callers were told."""
        if not self._told.answers:
            door = await self._door(GUEST)
            await self._ask(door, "a question, so that there is something to count")
        told, until = self._told, time.monotonic() + METERED_S
        self._progress("the last requests come into the books")
        found = await self._daemon.get("/api/usage?since=1h&by=agent")
        while time.monotonic() < until:
            await asyncio.sleep(0.5)
            before, found = found, await self._daemon.get("/api/usage?since=1h&by=agent")
            totals = found["totals"]
            if totals["tokens_out"] >= told.tokens_out and totals["requests"] == before["totals"]["requests"]:
                break
        tenants = await self._daemon.get("/api/usage?since=1h&by=tenant")
        return {
            "agents": found["agents"],
            "tenants": tenants["tenants"],
            "totals": found["totals"],
            "told": told._asdict(),
        }


def ram(view: Answer) -> int:
    """Bytes of RAM that an agent holds, by its PSS where that was measured."""
    return int((view["held_bytes"] if view["pss_bytes"] is None else view["pss_bytes"]) or 0)


def _seen(answer: HeardAnswer) -> Answer:
    return {"words": answer.words, "status": answer.status, "code": answer.code, "message": answer.message}


async def _answers(port: int, *, within_s: float) -> bool:
    """Whether who listens there answers a GET in time; takes all of that time where it does not."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET / HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")
                return bool(await reader.read(1))
            finally:
                writer.close()
    except TimeoutError:
        return False
    except OSError:
        await asyncio.sleep(max(0.0, begun + within_s - time.monotonic()))
        return False
