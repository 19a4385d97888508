"""A box with one GPU in virtual time, and the loads put on it: what benchmarks/pool.py drives its policies with.

One load at a time: 4 s and 1.5 GB/s. An unload takes 1.5 s. A model serves `PARALLEL` requests at once, each at a speed
that its size alone decides. Nothing is random but the workloads, by their seed.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

from hive.pool.state import Demand

HERE = Path(__file__).parent
LOAD_BASE_S, LOAD_GIB_PER_S, UNLOAD_S = 4.0, 1.5, 1.5
PARALLEL = 4
READ_GIB_PER_S = 2000.0
"""GiB of weights that the GPU reads in a second: a token needs all of them once."""
FASTEST_TOKENS_PER_S = 150.0
PROMPT_FACTOR = 40.0
"""A prompt is read so many times faster than an answer is written."""


class SimModel(NamedTuple):
    """A model, by its memory."""

    name: str
    size_gib: int

    @property
    def load_s(self) -> float:
        return LOAD_BASE_S + self.size_gib / LOAD_GIB_PER_S

    def service_s(self, tokens: tuple[int, int]) -> float:
        """Seconds for a request of (tokens in, tokens out)."""
        per_s = min(FASTEST_TOKENS_PER_S, READ_GIB_PER_S / self.size_gib)
        return tokens[0] / (PROMPT_FACTOR * per_s) + tokens[1] / per_s


class Ask:
    """One request. `client`: an agent's name, empty for a caller without one; `demand`: its form for the decider;
    `bound_s`: the bound of its wait that was printed as it came, if its model was not loaded."""

    __slots__ = ("at", "began", "bound_s", "client", "demand", "ended", "model", "service_s", "then")

    def __init__(
        self, at: float, model: str, service_s: float, client: str = "", then: Callable[[float], None] | None = None
    ) -> None:
        self.at = at
        self.model = model
        self.service_s = service_s
        self.client = client
        self.then = then
        self.began: float | None = None
        self.ended: float | None = None
        self.bound_s: float | None = None
        self.demand: Demand | None = None


class PoolPolicy(Protocol):
    """One way to decide. `arrived` and `ended` tell it of requests; `act` is asked whenever nothing moves: it may close
    gates, and begins at most one load or unload. It answers when to ask again at the latest."""

    def arrived(self, machine: SimMachine, ask: Ask) -> None: ...
    def ended(self, machine: SimMachine, ask: Ask) -> None: ...
    def act(self, machine: SimMachine) -> float | None: ...


class SimMachine:
    """The box. `ready`: loaded models; `moving`: the model that is loaded or unloaded now; `closed`: gates; `waiting`:
    requests by model, in order of arrival; `running`: requests in flight, by model."""

    def __init__(self, models: list[SimModel], room_gib: int, policy: PoolPolicy, until: float) -> None:
        self.models = {model.name: model for model in models}
        self.room_gib = room_gib
        self.policy = policy
        self.until = until
        self.now = 0.0
        self.ready: set[str] = set()
        self.moving = ""
        self.is_loading = False
        self.moved_at = 0.0
        self.closed: set[str] = set()
        self.waiting: dict[str, deque[Ask]] = {model.name: deque() for model in models}
        self.running: dict[str, set[Ask]] = {model.name: set() for model in models}
        self.ready_at = dict.fromkeys(self.models, 0.0)
        self.used_at = dict.fromkeys(self.models, 0.0)
        self.asks: list[Ask] = []
        self.loads = 0
        self.load_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._asked_for: float | None = None

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), act))

    @property
    def used_gib(self) -> int:
        held = self.ready | ({self.moving} if self.moving else set())
        return sum(self.models[name].size_gib for name in held)

    @property
    def free_gib(self) -> int:
        return self.room_gib - self.used_gib

    def is_busy(self, model: str) -> bool:
        """Whether something is in flight there, or about to be."""
        return bool(self.running[model]) or (model not in self.closed and bool(self.waiting[model]))

    def arrive(self, ask: Ask) -> None:
        self.asks.append(ask)
        self.waiting[ask.model].append(ask)
        self.policy.arrived(self, ask)

    def load(self, model: str) -> None:
        assert not self.moving, f"{model} and {self.moving} move at once"
        assert model not in self.ready
        assert self.models[model].size_gib <= self.free_gib, f"{model} does not fit"
        self.moving, self.is_loading, self.moved_at = model, True, self.now
        self.loads += 1
        self.load_s += self.models[model].load_s
        self.at(self.now + self.models[model].load_s, self._loaded)

    def unload(self, model: str) -> None:
        assert not self.moving, f"{model} and {self.moving} move at once"
        assert not self.running[model], f"{model} has requests in flight"
        self.ready.remove(model)
        self.closed.discard(model)
        self.moving, self.is_loading, self.moved_at = model, False, self.now
        self.at(self.now + UNLOAD_S, self._moved)

    def _loaded(self) -> None:
        self.ready.add(self.moving)
        self.ready_at[self.moving] = self.used_at[self.moving] = self.now
        self._moved()

    def _moved(self) -> None:
        self.moving, self.is_loading = "", False

    def _serve(self) -> None:
        for name in sorted(self.ready - self.closed):
            waiting, running = self.waiting[name], self.running[name]
            while waiting and len(running) < PARALLEL:
                ask = waiting.popleft()
                ask.began = self.now
                running.add(ask)
                self.at(self.now + ask.service_s, lambda ask=ask: self._end(ask))  # type: ignore[misc]

    def _end(self, ask: Ask) -> None:
        ask.ended = self.now
        self.running[ask.model].remove(ask)
        self.used_at[ask.model] = self.now
        self.policy.ended(self, ask)
        if ask.then is not None:
            ask.then(self.now)

    def run(self) -> SimMachine:
        while self._events and self._events[0][0] <= self.until:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._serve()
            if not self.moving:
                again = self.policy.act(self)
                self._serve()  # a gate may have been opened
                if again is not None and again > self.now and (self._asked_for is None or again != self._asked_for):
                    self._asked_for = again
                    self.at(again, lambda: None)
        self.now = self.until
        return self

    def waits_s(self, model: str = "") -> list[float]:
        """Of each request of the model, or of all: until it began, or until the end."""
        return [
            (self.until if ask.began is None else ask.began) - ask.at
            for ask in self.asks
            if not model or ask.model == model
        ]

    def waits_of_s(self, client: str) -> list[float]:
        """The same of the agents whose names begin so."""
        return [
            (self.until if ask.began is None else ask.began) - ask.at
            for ask in self.asks
            if ask.client.startswith(client)
        ]

    def served(self, model: str = "") -> int:
        return sum(ask.ended is not None for ask in self.asks if not model or ask.model == model)


# --- the workloads -----------------------------------------------------------------------------------------------


class AzureTokens:
    """Pairs of (tokens in, tokens out) as Azure's requests had them in 2023: `code` and `conv`."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[int, int]]] = {"code": [], "conv": []}
        self._weights: dict[str, list[int]] = {"code": [], "conv": []}
        for line in (HERE / "azure_tokens.csv").read_text().splitlines():
            if line[:1] not in "#s":
                service, into, out, requests = line.split(",")
                self._pairs[service].append((int(into), int(out)))
                self._weights[service].append(int(requests))

    def draw(self, chance: random.Random, service: str) -> tuple[int, int]:
        return chance.choices(self._pairs[service], self._weights[service])[0]


TOKENS = AzureTokens()


class Workload(NamedTuple):
    """`begin` puts its requests, or its agents, on a machine."""

    name: str
    models: list[SimModel]
    room_gib: int
    until: float
    begin: Callable[[SimMachine, random.Random], None]


def closed_loop(
    machine: SimMachine, chance: random.Random, client: str, script: Iterator[tuple[str, str]], tools_s: float = 3.0
) -> None:
    """An agent that asks, waits for the answer, uses its tools for about `tools_s`, and asks again."""

    def ask(now: float) -> None:
        model, service = next(script)
        tokens = (300, 0) if service == "embed" else TOKENS.draw(chance, service)
        seconds = max(0.05, machine.models[model].service_s(tokens))
        machine.arrive(Ask(now, model, seconds, client, answered))

    def answered(now: float) -> None:
        then = now + chance.expovariate(1 / tools_s)
        machine.at(then, lambda: ask(then))

    begin = chance.uniform(0, 30)
    machine.at(begin, lambda: ask(begin))


def task_script(chance: random.Random) -> Iterator[tuple[str, str]]:
    """An agent's tasks: plan, look around, write, look again, write (orchestrator, explorer, coder)."""
    while True:
        yield "plan", "conv"
        for _ in range(chance.randint(1, 3)):
            yield "embed", "embed"
            for _ in range(chance.randint(2, 6)):
                yield "explore", "code"
            for _ in range(chance.randint(4, 12)):
                yield "code", "conv"


def agents(machine: SimMachine, chance: random.Random) -> None:
    for number in range(8):
        own = random.Random(chance.random())
        closed_loop(machine, own, f"agent-{number}", task_script(own), tools_s=6.0)


def banded(machine: SimMachine, chance: random.Random) -> None:
    """The same; two of the agents ask with high priority (their names say so to pool_hive.py)."""
    for number in range(8):
        own = random.Random(chance.random())
        closed_loop(machine, own, f"{'high' if number < 2 else 'normal'}-{number}", task_script(own), tools_s=6.0)


def repeated(*steps: tuple[str, str]) -> Iterator[tuple[str, str]]:
    while True:
        yield from steps


def two_groups(machine: SimMachine, chance: random.Random) -> None:
    for group in ("left", "right"):
        for number in range(3):
            closed_loop(machine, random.Random(chance.random()), f"{group}-{number}", repeated((group, "conv")))


def alternating(machine: SimMachine, chance: random.Random) -> None:
    closed_loop(machine, chance, "one", repeated(("left", "conv"), ("right", "conv")))


ZIPF_SIZES = (34, 22, 20, 16, 14, 12, 9, 8, 6, 4, 2, 2)
ZIPF_REQUESTS = 3659
SESSION = 6.0
"""Requests of one caller after the other, on the mean; about 10 s apart."""


def zipf(machine: SimMachine, chance: random.Random) -> None:
    """Callers without a name, in sessions; models by popularity 1 / rank ** 1.1, whatever their size."""
    names = list(machine.models)
    chance.shuffle(names)
    weights = [1 / rank**1.1 for rank in range(1, len(names) + 1)]
    times: list[tuple[float, str]] = []
    while len(times) < ZIPF_REQUESTS:
        at = chance.uniform(0, machine.until)
        model = chance.choices(names, weights)[0]
        for _ in range(max(1, round(chance.expovariate(1 / SESSION)))):
            if at < machine.until:
                times.append((at, model))
            at += chance.expovariate(1 / 10.0)
    for at, model in sorted(times[:ZIPF_REQUESTS]):
        seconds = machine.models[model].service_s(TOKENS.draw(chance, "conv"))
        machine.at(at, lambda at=at, model=model, seconds=seconds: machine.arrive(Ask(at, model, seconds)))  # type: ignore[misc]


GRACE_S = 600.0
"""After the last request of a flood, to serve what waits."""


def flood(load: float) -> Callable[[SimMachine, random.Random], None]:
    """A hot model that is asked for `load` of what it can do, and a rare one asked every 120 s."""

    def begin(machine: SimMachine, chance: random.Random) -> None:
        until = machine.until - GRACE_S
        hot, rare = machine.models["hot"], machine.models["rare"]
        work_s = 0.0
        asks = []
        while work_s < load * PARALLEL * until:
            asks.append(Ask(chance.uniform(0, until), "hot", hot.service_s(TOKENS.draw(chance, "conv"))))
            work_s += asks[-1].service_s
        asks += [Ask(at, "rare", rare.service_s(TOKENS.draw(chance, "conv"))) for at in range(120, int(until), 120)]
        for ask in sorted(asks, key=lambda ask: ask.at):
            machine.at(ask.at, lambda ask=ask: machine.arrive(ask))  # type: ignore[misc]

    return begin


def pair(first: str, second: str) -> list[SimModel]:
    return [SimModel(first, 30), SimModel(second, 30)]


AGENTS_MODELS = [SimModel("plan", 34), SimModel("code", 22), SimModel("explore", 9), SimModel("embed", 2)]
ZIPF_MODELS = [SimModel(f"m{number:02}", size) for number, size in enumerate(ZIPF_SIZES)]
HOUR_S = 3600.0
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("agents", AGENTS_MODELS, 48, 2 * HOUR_S, agents),
        Workload("bands", AGENTS_MODELS, 48, 2 * HOUR_S, banded),
        Workload("two", pair("left", "right"), 40, 2 * HOUR_S, two_groups),
        Workload("alternate", pair("left", "right"), 40, 2 * HOUR_S, alternating),
        Workload("zipf", ZIPF_MODELS, 80, 4 * HOUR_S, zipf),
        Workload("flood68", pair("hot", "rare"), 40, 2 * HOUR_S + GRACE_S, flood(0.68)),
        Workload("flood96", pair("hot", "rare"), 40, 2 * HOUR_S + GRACE_S, flood(0.96)),
    )
}


def simulate(workload: Workload, policy: PoolPolicy, seed: int) -> SimMachine:
    machine = SimMachine(workload.models, workload.room_gib, policy, workload.until)
    workload.begin(machine, random.Random(f"{workload.name} {seed}"))
    return machine.run()
