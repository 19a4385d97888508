"""The cost of sleeping agents: `python benchmarks/idle.py [--agents 10000] [--whole 1000]`.

First the daemon's parts alone: the deciders given their facts, whole rounds, the look at memory, a reconciliation, RAM
for each agent. Helper, proxy and SQLite answer at once there, so that what is measured is what the daemon itself does.
Then a real daemon with as many agents in SQLite, all asleep, beside a Redis, a proxy and a helper that has them frozen
without processes: how long it takes to start, list, reconcile. Then, with `--whole`, a whole Hive on this host with so
many process agents asleep: RAM and CPU time of all its processes. Needs redis-server; loopback only; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE / "tests" / "fakes"), str(HERE / "tests"), str(HERE)]

import msgspec
import psutil
import uvloop
from build_line import build_line
from control.box import Box
from journeys.stack import PROCESSES, Stack  # a Hive of its own, as the tests have it
from many_agents import ManyWorld

from hive.agents import depth, idle
from hive.agents.deepener import ASKED_AT_ONCE, LOOK_S, Deepener
from hive.agents.sleeper import Sleeper
from hive.domain import Agent, AgentSpec, AgentStatus, SleepDepth
from hive.host.memory import held_by
from hive.link.helper import AskStat, ProxyStats, Reconcile, Stat
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Activities, Activity, Done, Hello
from hive.link.server import LinkServer
from hive.runtimes.log_pipes import reading
from hive.settings.table import InferenceSection, Paths, Settings
from hive.store import agents as agents_store
from hive.store.database import Database
from hive.up.services import redis_command
from tests.waiting import until

ROUNDS = 5
CHECK_S = Settings().sleep.check_s
WHOLE_FOR_S = 60.0
DECIDED_IN_MS, OF_A_CORE_PERCENT, RAM_KIB = 50.0, 1.0, 200.0
"""Promises for 10,000 agents."""
LISTED_IN_S, LISTED_BY_COMMAND_IN_S, SHOWN_IN_S = 1.0, 2.0, 0.1
ROUND_IN_S, RECONCILED_IN_S, STARTED_IN_S = 0.05, 1.0, 5.0
"""The budgets of a real daemon with 10,000 agents, by the clock on the wall."""


def resident_kib() -> int:
    """Of this process."""
    return held_by([os.getpid()]).rss_bytes // 1024


async def cpu_ms(work: Callable[[], Awaitable[object]]) -> float:
    """CPU time of one call, the least of a few."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        await work()
        found.append(time.process_time() - began)
    return 1000 * min(found)


def tell(what: str, took_ms: float, every_s: float | None = None, promised: str = "") -> None:
    share = "" if every_s is None else f"   {took_ms / every_s / 10:.3f} % of a core, every {every_s:g} s"
    print(f"  {what:44} {took_ms:8.2f} ms{share}{'   promised: ' + promised if promised else ''}")


async def decide(agents: int) -> None:
    """The deciders alone, everybody's facts given."""
    awake = [
        idle.IdleFacts(status=AgentStatus.RUNNING, awake_since=0.0, last_active_at=float(n % 400), cpu_percent=0.1)
        for n in range(agents)
    ]
    asleep = [
        depth.DepthFacts(depth=SleepDepth.LIGHT, asleep_since=float(n % 60), some_avg10=0.0) for n in range(agents)
    ]

    async def judge_awake() -> None:
        for facts in awake:
            idle.verdict(facts, 500.0)

    async def judge_asleep() -> None:
        for facts in asleep:
            depth.verdict(facts, 61.0)

    tell(f"idle decider, {agents} agents", await cpu_ms(judge_awake), promised=f"≤ {DECIDED_IN_MS:g} ms")
    tell(f"depth decider, {agents} sleepers", await cpu_ms(judge_asleep))


async def rounds(agents: int) -> None:
    """Whole rounds, gathering the facts included."""
    promise = f"≤ {OF_A_CORE_PERCENT:g} %"
    world = ManyWorld(deep_after_s=1e9)
    for number in range(agents):
        world.add(f"a{number}")
    world.gates.seen = {f"a{number}": Activity(quiet_s=1.0) for number in range(agents)}
    sleeper = Sleeper(world.roster, world)
    tell("a round, all awake", await cpu_ms(sleeper.check), CHECK_S, promise)
    encoded = msgspec.msgpack.encode(Activities(agents=world.gates.seen))

    async def decode() -> None:
        msgspec.msgpack.decode(encoded, type=Activities)

    tell("  + decoding the proxy's answer", await cpu_ms(decode), CHECK_S)
    world.gates.seen = {}
    sleeper = Sleeper(world.roster, world)
    for life in world.roster:
        life._state.awake_since -= 1000.0

    async def compute_and_check() -> None:
        for held in world.helper.held.values():
            held.cpu_us += 10**12
        await sleeper.check()

    tell("a round, all quiet but computing", await cpu_ms(compute_and_check), CHECK_S, promise)

    world = ManyWorld(deep_after_s=1e9)
    before = resident_kib()
    for number in range(agents):
        world.add(f"a{number}", AgentStatus.PAUSED, depth=SleepDepth.LIGHT)
    gc.collect()
    of_one = (resident_kib() - before) / agents
    sleeper, deepener = Sleeper(world.roster, world), Deepener(world.roster, world)
    tell("a round, all asleep", await cpu_ms(sleeper.check), CHECK_S, promise)
    tell("a look at memory, all asleep", await cpu_ms(deepener.check), LOOK_S, promise)
    for swap_free, what in ((0, "no swap"), (1 << 20, "swap full")):
        world.swap_free, world.some_avg10 = swap_free, 50.0
        for _ in range(agents // ASKED_AT_ONCE + 1):
            await deepener.check()  # how much RAM each holds is asked once a sleep
        tell(f"  under pressure, {what}", await cpu_ms(deepener.check), LOOK_S, promise)
    world.some_avg10 = 0.0
    tell("a reconciliation, all asleep", await cpu_ms(world.roster.reconcile))
    print(f"  {'RAM of one agent in the daemon':44} {of_one:8.2f} KiB   promised: ≤ {RAM_KIB:g} KiB for all of Hive")


class Frozen:
    """The helper of a host on which all of `ids` are frozen: what is asked comes over a real link, and is answered."""

    def __init__(self, path: Path, ids: list[str]) -> None:
        self._all = {agent: Stat(state="frozen", pid=1, rss_bytes=8 << 20, freezer="cgroup") for agent in ids}
        self._server = LinkServer(
            path, name="sandbox", uids=frozenset(), on_link=self._greet, on_message=self._answer, on_lost=lambda _: None
        )

    def _greet(self, link: Link) -> None:
        link.tell(Hello(role="sandbox", epoch="bench", pid=os.getpid()))

    def _answer(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:  # noqa: ARG002
        if reply is None:
            return
        match message:
            case AskStat(agents=agents) if agents:
                reply(ProxyStats(agents={agent: self._all[agent] for agent in agents}))
            case AskStat() | Reconcile():
                reply(ProxyStats(agents=self._all))
            case _:
                reply(Done())

    def close(self) -> None:
        self._server.close()


class Stall:
    """The longest delay of a timer of the event loop: so long a wake would have waited for the daemon."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.worst_s = 0.0
        self._beat()

    def _beat(self) -> None:
        due = self._loop.time() + 0.001
        self._timer = self._loop.call_at(due, self._late, due)

    def _late(self, due: float) -> None:
        self.worst_s = max(self.worst_s, self._loop.time() - due)
        self._beat()

    def taken(self) -> float:
        """Seconds, since it was asked last."""
        worst, self.worst_s = self.worst_s, 0.0
        return worst

    def close(self) -> None:
        self._timer.cancel()


async def fill(paths: Paths, agents: int) -> list[str]:
    """SQLite as a daemon leaves it with so many asleep; their ids."""
    ids = [f"{number:032x}" for number in range(agents)]
    database = Database.open(paths.database)

    def work(conn: sqlite3.Connection) -> None:
        for number, agent in enumerate(ids):
            spec = AgentSpec(name=f"agent-{number}", command=["/bin/sleep", "1000000"])
            asleep = Agent(id=agent, spec=spec, status=AgentStatus.PAUSED, depth=SleepDepth.LIGHT)
            agents_store.insert(conn, asleep)

    await database.write(work)
    database.close()
    return ids


@asynccontextmanager
async def registered(agents: int) -> AsyncIterator[Box]:
    """A box in which a daemon may be started, with so many asleep."""
    base = Path(tempfile.mkdtemp(prefix="hive-bench-", dir="/var/tmp"))
    box = Box(base)
    for directory in (box.paths.state, box.paths.runtime, box.paths.redis_dir):
        directory.mkdir(parents=True)
    redis = subprocess.Popen(redis_command(box.paths), stdout=subprocess.DEVNULL)
    helper = Frozen(box.paths.sandbox_socket, await fill(box.paths, agents))
    box.spawn_real_proxy()
    try:
        await until(box.paths.redis_socket.exists)
        yield box
    finally:
        await box.kill_real_proxy()
        if box.daemon is not None:
            await box.stop_daemon()
        helper.close()
        redis.terminate()
        redis.wait()
        shutil.rmtree(base, ignore_errors=True)


async def timed(what: str, work: Awaitable[object], budget_s: float, stall: Stall) -> None:
    stall.taken()
    began = time.monotonic()
    await work
    took_s = time.monotonic() - began
    await asyncio.sleep(0.1)
    held_up = f"   the daemon's loop held up for {1000 * stall.taken():.0f} ms at most"
    print(f"  {what:44} {1000 * took_s:8.0f} ms   budget: {1000 * budget_s:.0f} ms{held_up}")


async def by_socket(path: Path, target: str) -> None:
    """The answer read and left as bytes: decoding it here would hold up the daemon, which is in this process."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: hive\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read(-1)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    writer.close()


async def by_command(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0


async def daemon_with(agents: int) -> None:
    """A real daemon, asked as an operator asks it."""
    print(f"a daemon with {agents} agents in SQLite, all asleep; wall time")
    async with registered(agents) as box:
        stall = Stall()
        settings = Settings(inference=InferenceSection(enabled="false"))
        await timed("daemon start, reconciled", box.start_daemon(settings), STARTED_IN_S, stall)
        daemon = box.daemon
        assert daemon is not None
        told = until(lambda: box.services.health.view()["proxy"]["connected"])
        await timed("  and the proxy told of everybody", told, STARTED_IN_S, stall)
        await asyncio.sleep(2)
        socket = box.paths.api_socket
        command = [sys.executable, "-m", "hive", "agent", "list", "--socket", str(socket)]
        await timed("GET /api/agents", by_socket(socket, "/api/agents"), LISTED_IN_S, stall)
        await timed("hive agent list", by_command(command), LISTED_BY_COMMAND_IN_S, stall)
        await timed("GET /api/agents/NAME", by_socket(socket, "/api/agents/agent-7"), SHOWN_IN_S, stall)
        await timed("one idle round", daemon.sleeper.check(), ROUND_IN_S, stall)
        await timed("a reconciliation", daemon.roster.reconcile(), RECONCILED_IN_S, stall)
        stall.close()


@contextmanager
def whole_hive() -> Iterator[Stack]:
    """With the settings an operator has, but nobody sleeps by itself."""
    base = Path(tempfile.mkdtemp(prefix="hive-bench-", dir="/var/tmp"))
    base.chmod(0o711)
    hive = Stack(base, url=None, config="[inference]\nauto_sleep_enabled = false\n")
    try:
        hive.start()
        yield hive
    finally:
        if hive.process is not None and hive.process.poll() is None:
            hive.stop()
        shutil.rmtree(base, ignore_errors=True)


def of_hive(hive: Stack) -> tuple[dict[str, int], dict[str, float]]:
    """RAM (PSS) in KiB and CPU seconds, by process."""
    assert hive.process is not None
    pids = {"up": hive.process.pid} | {name: hive.pid_of(name) for name in PROCESSES}
    pids["logs"] = reading(Paths(hive.state, hive.state).log_pipes)
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    ram = {name: int(process.memory_full_info().pss / 1024) for name, process in processes.items()}
    return ram, {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def whole(agents: int) -> None:
    """Everything Hive runs, with real processes asleep."""
    with whole_hive() as hive, ThreadPoolExecutor(8) as pool:

        def begin(number: int) -> None:
            name, command = f"a{number}", ["/bin/sleep", "1000000"]
            hive.post("/api/agents", {"name": name, "command": command, "deepest": "light"})
            hive.post(f"/api/agents/{name}/pause")

        begin(0)  # what the first one needs is no price of the others
        time.sleep(1)
        before, _ = of_hive(hive)
        began = time.monotonic()
        list(pool.map(begin, range(1, agents)))
        print(
            f"{agents} process agents asleep in a whole Hive ({time.monotonic() - began:.0f} s to start and pause them)"
        )
        time.sleep(5)
        after, used_before = of_hive(hive)
        time.sleep(WHOLE_FOR_S)
        _, used = of_hive(hive)
        each = {name: (after[name] - before[name]) / (agents - 1) for name in after}
        parts = ", ".join(f"{name} {kib:.1f}" for name, kib in each.items())
        print(f"  RAM of Hive for each agent  {sum(each.values()):8.1f} KiB ({parts})   promised: ≤ {RAM_KIB:g} KiB")
        shares = {name: 100 * (used[name] - used_before[name]) / WHOLE_FOR_S for name in used}
        parts = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        print(f"  CPU time of Hive            {sum(shares.values()):8.2f} % of a core ({parts})   promised: ≤ 1 %")


async def main(agents: int) -> None:
    print(f"{agents} agents, CPU time, the least of {ROUNDS}")
    await decide(agents)
    await rounds(agents)
    await daemon_with(agents)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--whole", type=int, default=0, metavar="AGENTS")
    arguments = parser.parse_args()
    print(build_line())
    uvloop.run(main(arguments.agents))
    if arguments.whole:
        whole(arguments.whole)
