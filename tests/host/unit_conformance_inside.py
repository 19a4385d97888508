"""Promises of every runtime, shown on agents as units, programs of their own and forked ones: the tests themselves are
those of tests/runtimes/test_conformance.py. Run by test_unit_conformance.py in a machine with systemd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hive.host import systemd
from hive.link.specs import SandboxSpec
from hive.runtimes.runtime import Runtime
from hive.runtimes.unit import UnitRuntime
from hive.sandbox.server import make_directories
from tests.host.unit_agents import PATHS
from tests.runtimes import test_conformance
from tests.runtimes.benches import KINDS, SCRIPTS, Floor
from tests.runtimes.test_conformance import floor
from tests.sandbox import harness
from tests.sandbox.harness import A, B

__all__ = ["floor"]
globals().update({name: test for name, test in vars(test_conformance).items() if name.startswith("test_")})


class UnitBench:
    """See `Bench`. `is_forked`: agents of a template. What was in the journal at `begin` is another bench's."""

    def __init__(self, runtime: UnitRuntime, *, is_forked: bool) -> None:
        self.name = "unit of a template" if is_forked else "unit"
        self.runtime: Runtime = runtime
        self._is_forked = is_forked
        self._before: dict[str, int] = {}

    def spec(self, agent: str, kind: str) -> SandboxSpec:
        name = f"agent-{agent}"
        if self._is_forked:
            return harness.template_spec(PATHS, agent, ["-c", SCRIPTS[kind]], name=name)
        return harness.spec(PATHS, agent, KINDS[kind], name=name)

    def cannot(self, what: str) -> str:
        return "an agent is found by the name of its unit" if what == "other mark" else ""

    async def printed(self, spec: SandboxSpec) -> str:
        agent = spec.name.removeprefix("agent-")
        return (await journal_of(agent))[self._before.get(agent, 0) :]

    async def begin(self) -> None:
        self._before = {agent: len(await journal_of(agent)) for agent in (A, B)}


async def journal_of(agent: str) -> str:
    """All that it printed itself; systemd's own lines of its unit have another identifier."""
    await systemd.sync_journal()
    command = ["journalctl", "--quiet", "--output=cat", f"--identifier=agent-{agent}"]
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return (await asked.communicate())[0].decode()


@pytest.fixture(params=[False, True], ids=["program", "template"])
async def bench(request: pytest.FixtureRequest, runtime: UnitRuntime) -> AsyncIterator[UnitBench]:
    make_directories(PATHS)
    made = UnitBench(runtime, is_forked=request.param)
    await made.begin()
    yield made
    await runtime.templates.leave()


async def test_an_agent_of_each_bench_is_what_it_is_called(floor: Floor) -> None:
    """None of a template was an ordinary program meanwhile."""
    running = await floor.start("idle")
    assert bool(running.run.template) == (floor.bench.name == "unit of a template")
