"""One density run: for each way to keep agents the most of them that fit into a box of fixed memory.

`measured` is the whole of it. Driver and stub are outside the box; Hive and all agents are inside.
"""

# ruff: noqa: ASYNC240 - nobody else waits for this loop
from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hive import __version__
from hive.bench import agent_programs, leftovers, swapping
from hive.bench.agent_programs import Chosen
from hive.bench.box import MIB, MemoryBox, place
from hive.bench.driver import FULL, QUICK, BurstPace, measure
from hive.bench.leftovers import RunRecord
from hive.bench.search import (
    Edge,
    Series,
    Step,
    edge,
    first_guess,
    marginal_mib,
    next_agents,
    times,
)
from hive.bench.villages import (
    NO_TIME,
    HiveVillage,
    PlainVillage,
    Village,
    VillageGround,
    why_no_ready_state,
    why_no_templates,
)
from hive.errors import HiveError, NotPermitted, NotSupported, TimedOut
from hive.host.process import spawn as start_process
from hive.tasks import spawn

STUB = Path(__file__).parent / "stub.py"
TURN_S = 0.30
"""Two calls of the model take this together."""
SLO_OVER_S = 1.0
"""zram: p95 at most so much above that of agents that were never swapped, in the same run."""
SLO_FILE_S = 1.0
"""A swap file: p95 at most this."""
FIT_EVERY_S = 0.1
MOST = 1500
LEAST_MIB = 2.0
"""No agent was seen to take less, merged and asleep; what Hive itself gives back meanwhile can make it look so."""
START_OVER_S = 60.0
"""A step that has begun may take so long over its time to have its agents."""
SWAP_FACTOR = 4
"""Swap is so many times as large as the box."""
WAYS = ("none", "kernel", "hive", "templates", "ready")
WAY_NAMES = {
    "none": "no swap",
    "kernel": "kernel alone",
    "hive": "Hive",
    "templates": "Hive, templates",
    "ready": "Hive, ready state",
}
FILE_SHARE = 0.15
"""Of an agent's memory must be in RAM on a swap file, where its latency ends it: the first guess only."""

Say = Callable[[str], None]


class DensityOrder(NamedTuple):
    """An order for one run. `burst`: share of the agents that has a turn at a time; `ways`: of WAYS, in their order."""

    box_mib: int
    swap: str
    kind: str
    burst: float
    quick: bool
    python: Path | None = None
    ways: Sequence[str] = WAYS
    pace: BurstPace | None = None
    most: int = MOST

    @property
    def tempo(self) -> BurstPace:
        return self.pace or (QUICK if self.quick else FULL)


def measured(order: DensityOrder, *, say: Say) -> dict[str, Any]:
    """The whole run, as `hive bench density --json` prints it. Leaves nothing behind, Ctrl-C and SIGTERM included.

    Raises NotPermitted, NotSupported, Saturated (another run), HiveError, KeyboardInterrupt.
    """
    if os.geteuid() != 0:
        raise NotPermitted(
            "a density run makes a memory cgroup and swap, which only root may", hint="type it with sudo in front"
        )
    chosen = agent_programs.choose(order.kind, order.python)
    with leftovers.alone() as left:
        try:
            return asyncio.run(_interruptible(_Run(order, chosen, left, say).whole()))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _interruptible(work: Any) -> dict[str, Any]:
    """SIGINT, SIGTERM and SIGHUP cancel the work, which cleans up as it ends."""
    task = spawn(work, name="density run")
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, task.cancel)
    found: dict[str, Any] = await task
    return found


class _Run:
    """The state of one run."""

    def __init__(self, order: DensityOrder, chosen: Chosen, left: RunRecord, say: Say) -> None:
        self._order = order
        self._chosen = chosen
        self._left = left
        self._say = say
        self._stub: subprocess.Popen[bytes] | None = None
        self._base_p95_s: float | None = None
        self._directory = Path()

    async def whole(self) -> dict[str, Any]:
        begun = time.time()
        load = os.getloadavg()[0]
        self._directory = Path(tempfile.mkdtemp(prefix="hive-bench-", dir="/var/tmp"))
        self._left.note(directory=str(self._directory))
        self._directory.chmod(0o711)
        agent_programs.copy_to(self._directory / "programs")
        try:
            stub_port = await self._start_stub()
            ways = await self._all_ways(stub_port)
        finally:
            if self._stub is not None:
                self._stub.kill()
                self._stub.wait()
        self._left.clean()
        return {
            "made": {
                "at": int(begun),
                "took_s": round(time.time() - begun),
                "hive": __version__,
                "kernel": platform.release(),
                "cpu": cpu_name(Path("/proc/cpuinfo").read_text()),
                "cores": os.cpu_count(),
                "load_before": round(load, 2),
                "load_after": round(os.getloadavg()[0], 2),
                "python": self._chosen.interpreter,
            },
            "asked": {
                "box_mib": self._order.box_mib,
                "swap": self._order.swap,
                "agents": self._order.kind,
                "burst": self._order.burst,
                "quick": self._order.quick,
                "turn_s": TURN_S,
            },
            "never_swapped_p95_s": self._base_p95_s,
            "objective_s": self._objective_s,
            "ways": compared(ways),
        }

    async def _all_ways(self, stub_port: int) -> list[dict[str, Any]]:
        """Each way gets its share of the time that is left; one that is skipped leaves the others more."""
        wanted = [way for way in WAYS if way in self._order.ways]
        until = time.monotonic() + self._order.tempo.way_s * len(wanted)
        found = {way: _unmeasured(way, why) for way in wanted if (why := self._why_not(way))}
        for way, skipped in found.items():
            self._say(f"{WAY_NAMES[way]}: skipped, {skipped['skipped']}")
        there = [way for way in wanted if way not in found]
        for number, way in enumerate(there):
            now = time.monotonic()
            found[way] = await self._way(way, stub_port, until=now + (until - now) / (len(there) - number))
        return [found[way] for way in wanted]

    async def _start_stub(self) -> int:
        port_file = self._directory / "stub.port"
        self._stub = start_process(
            [sys.executable, str(STUB), str(port_file), str(TURN_S / 2)],
            env={"PATH": agent_programs.PATH},
            pdeathsig=signal.SIGKILL,
        )
        until = time.monotonic() + 30
        while not port_file.exists():
            if self._stub.poll() is not None or time.monotonic() > until:
                raise TimedOut("the model's stand-in does not start")
            await asyncio.sleep(0.05)
        return int(port_file.read_text())

    @property
    def _objective_s(self) -> float:
        """The p95 a step must keep; before there is a reference the turn itself stands for it."""
        base = TURN_S * 2 if self._base_p95_s is None else self._base_p95_s
        return round(SLO_FILE_S if self._order.swap == "file" else base + SLO_OVER_S, 3)

    async def _way(self, way: str, stub_port: int, *, until: float) -> dict[str, Any]:
        """One way, measured; no step begins after `until`."""
        if time.monotonic() > until:
            return _unmeasured(way, "no time was left for it")
        self._say(f"{WAY_NAMES[way]} …")
        swap = "none" if way == "none" else self._order.swap
        async with self._boxed(swap) as box:
            search = _Search(self, way, swap, VillageGround(box, self._directory, stub_port))
            try:
                return {**_unmeasured(way, ""), **await search.whole(until)}
            except HiveError as error:
                self._say(f"{WAY_NAMES[way]}: {error.message}")
                return _unmeasured(way, error.message)

    def _why_not(self, way: str) -> str:
        if way not in ("templates", "ready"):
            return ""
        if not self._chosen.program.warm:
            return f"there are no templates for {self._chosen.program.said}"
        if way == "ready" and not self._chosen.program.stops:
            return f"there is no ready state of {self._chosen.program.said}"
        return why_no_templates() if way == "templates" else why_no_ready_state()

    @contextlib.asynccontextmanager
    async def _boxed(self, swap: str) -> AsyncIterator[MemoryBox]:
        """A box with swap of its own, and a task that keeps its limit where it belongs."""
        device = ""
        size_bytes = self._order.box_mib * MIB
        if swap != "none":
            size = SWAP_FACTOR * size_bytes
            device = swapping.turn_on(swap, size, self._directory, self._left.note)
        label = str(os.getpid())
        path = _box_path(label)
        self._left.add_group(path)
        box = MemoryBox.make(label, size_bytes, device=device if swap == "zram" else "", swaps=swap != "none")
        fitting = spawn(_fit(box), name="fit the box")
        try:
            yield box
        finally:
            fitting.cancel()
            await asyncio.gather(fitting, return_exceptions=True)
            box.remove()
            if device:
                swapping.turn_off(device)
            self._left.note(groups=[], swap="", zram_before=None)

    def note_base(self, p95_s: float) -> None:
        """The p95 of agents that were never swapped."""
        if self._base_p95_s is None:
            self._base_p95_s = p95_s

    def village(self, way: str, ground: VillageGround) -> Village:
        if way in ("none", "kernel"):
            return PlainVillage(ground, self._chosen)
        return HiveVillage(ground, self._chosen, template={"templates": "packages", "ready": "ready"}.get(way, ""))

    @property
    def order(self) -> DensityOrder:
        return self._order

    @property
    def objective_s(self) -> float:
        return self._objective_s

    @property
    def serving(self) -> list[int]:
        return [] if self._stub is None else [self._stub.pid]

    def say(self, text: str) -> None:
        self._say(text)


class _Search:
    """The search of one way: a few agents say what one costs, then steps bracket the edge."""

    def __init__(self, run: _Run, way: str, swap: str, ground: VillageGround) -> None:
        self._run = run
        self._way = way
        self._swap = swap
        self._ground = ground
        self._village: Village | None = None
        self._hive_mib = 0.0
        self._steps: list[Step] = []
        self._ended = ""
        self._note = ""

    async def whole(self, until: float) -> dict[str, Any]:
        objective_s, most = self._run.objective_s, self._run.order.most
        try:
            agent_mib, guess = await self._probe()
            objective_s = self._run.objective_s  # the reference may be of this probe
            while (
                wanted := next_agents(guess, self._steps, objective_s=objective_s, swap=self._swap, most=most)
            ) is not None:
                if self._steps and time.monotonic() > until:
                    self._ended = f"no time for another step (at {wanted})"
                    break
                step = await self._step(wanted, until)
                if step is None:
                    self._ended = f"no time to start {wanted} agents"
                    break
                self._steps.append(step)
        finally:
            await self._leave()
        found = edge(self._steps, objective_s=objective_s)
        return {
            "hive_mib": round(self._hive_mib, 1),
            "agent_mib": round(agent_mib, 2),
            "first_guess": guess,
            "steps": [self._told(step) for step in self._steps],
            "edge": None if found is None else {**found._asdict(), "said": found.said},
            "note": "; ".join(filter(None, (self._note, self._ended))),
        }

    def _told(self, step: Step) -> dict[str, Any]:
        return {
            "agents": step.agents,
            "fits": step.fits(self._run.objective_s),
            "cpu_bound": step.is_cpu_bound,
            "series": [one._asdict() for one in step.series],
        }

    async def _probe(self) -> tuple[float, int]:
        """MiB of one more agent that nobody asks, and the number of agents that would fill the box."""
        few, more = (1, 3) if self._run.order.box_mib < 600 else (2, 6)
        village = await self._open()
        box = self._ground.box
        seen: list[tuple[int, float]] = []
        awake: list[float] = []
        if self._village is not None and village.serving:
            await asyncio.to_thread(box.empty)  # Hive gives most of what it does not use now, not between the two
        for agents in (few, more):
            why = await village.grow(agents)
            if why:
                self._note = f"not even {agents} agents start: {why}"
                return 0.0, max(1, agents - 1)
            if why := await village.why_not_as_meant():
                raise NotSupported(why)
            await village.rest()
            awake.append(_mib(box))
            if self._way == "none":
                await self._reference(village)
            else:
                await asyncio.to_thread(box.empty)
                await asyncio.sleep(1)  # who works takes back what he works with
            seen.append((agents, _mib(box)))
        awake_mib = max(0.05, (awake[1] - awake[0]) / (more - few))
        asleep_mib = max(LEAST_MIB, marginal_mib(seen[0], seen[1]))
        awake_mib = max(awake_mib, asleep_mib)  # Hive gave some back between the two looks
        base_mib = 0.0 if self._way == "none" else max(0.0, seen[1][1] - more * asleep_mib)  # Hive, a template
        burst = self._run.order.burst
        mib = asleep_mib if self._way == "none" else asleep_mib * (1 - burst) + awake_mib * burst
        if self._swap == "file":
            mib = max(mib, awake_mib * FILE_SHARE)
        guess = first_guess(box.size_bytes / MIB, base_mib, mib)
        self._run.say(f"  one more agent takes {mib:.1f} MiB, Hive {self._hive_mib:.0f} MiB: about {guess} agents")
        return mib, guess

    async def _reference(self, village: Village) -> None:
        """p95 of a few agents that nothing is swapped of."""
        series = await self._series(village)
        if series.turns and not series.failed and len(village.targets) > 1:
            self._run.note_base(series.p95_s)

    async def _step(self, agents: int, until: float) -> Step | None:
        """Measures this number; None where the time is over before they are there.

        Fewer than there are, and a step after a death, begin with an empty box.
        """
        village = self._village
        if village is not None and (agents < len(village.targets) or self._has_died()):
            await self._leave()
            village = None
        if village is None:
            village = await self._open()
        self._ground.box.was_overrun()
        killed = self._ground.box.killed()
        why = await village.grow(agents, until=until + START_OVER_S)
        if why == NO_TIME:
            return None
        if why:
            killed = self._ground.box.killed() - killed
            step = Step(agents, (Series(0.0, 0.0, 0, 0 if killed else 1, killed, 0.0),))
            self._run.say(f"  {agents} agents: do not start ({why})")
            return step
        await village.rest()
        series: list[Series] = []
        for _ in range(self._run.order.tempo.series):
            one = await self._series(village)
            one = one._replace(killed=self._ground.box.killed() - killed)  # those that died as others started, too
            series.append(one)
            self._run.say(f"  {agents} agents: {said(one)}")
            if one.killed or one.failed:
                break
        return Step(agents, tuple(series))

    def _has_died(self) -> bool:
        return bool(self._steps and any(one.killed or one.failed for one in self._steps[-1].series))

    async def _series(self, village: Village) -> Series:
        box = self._ground.box
        box.was_overrun()
        order = self._run.order
        one = await measure(
            village.targets,
            order.burst,
            order.tempo,
            serving=[*self._run.serving, *village.serving],
            killed=box.killed,
        )
        return one._replace(overrun=box.was_overrun())

    async def _open(self) -> Village:
        village = self._run.village(self._way, self._ground)
        self._village = village
        await village.open()
        self._hive_mib = _mib(self._ground.box) if village.serving else 0.0
        return village

    async def _leave(self) -> None:
        if self._village is not None:
            village, self._village = self._village, None
            await village.close()


def _unmeasured(way: str, why: str) -> dict[str, Any]:
    return {
        "way": way,
        "name": WAY_NAMES[way],
        "skipped": why,
        "hive_mib": None,
        "agent_mib": None,
        "first_guess": None,
        "steps": [],
        "edge": None,
        "note": "",
    }


async def _fit(box: MemoryBox) -> None:
    while True:
        box.fit()
        await asyncio.sleep(FIT_EVERY_S)


def _box_path(label: str) -> Path:
    return place(label, Path("/proc/self/mounts").read_text())[0]


def _mib(box: MemoryBox) -> float:
    return (box.used_bytes() + box.zram_bytes()) / MIB


def said(one: Series) -> str:
    """One series in words.

    >>> said(Series(0.5, 0.75, 40, 0, 0, 0.31))
    'p50 0.50 s, p95 0.75 s over 40 turns, driver, stub and Hive 31 % of the cores'
    """
    troubles = [
        f"{one.failed} turns without an answer" if one.failed else "",
        f"{one.killed} killed for memory" if one.killed else "",
        "the box held more than it has" if one.overrun else "",
    ]
    line = f"p50 {one.p50_s:.2f} s, p95 {one.p95_s:.2f} s over {one.turns} turns"
    line += f", driver, stub and Hive {one.busy * 100:.0f} % of the cores"
    return ", ".join(filter(None, [line, *troubles]))


def compared(ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each way with `times`: how many times the agents of the kernel alone; None where one of both is not known.

    `times_said`: the same in words, with a bound where it is one.
    """
    edges = {way["way"]: Edge(*(way["edge"][name] for name in Edge._fields)) if way["edge"] else None for way in ways}
    kernel = edges.get("kernel")
    found = []
    for way in ways:
        ratio, in_words = times(edges[way["way"]], kernel)
        found.append({**way, "times": ratio, "times_said": in_words})
    return found


def cpu_name(cpuinfo: str) -> str:
    """
    >>> cpu_name("processor : 0\\nmodel name\\t: Xeon 9\\n"), cpu_name("")
    ('Xeon 9', '')
    """
    return next((line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
