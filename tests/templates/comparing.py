"""An agent run once as a program and once as its template's child, and what differs in what it prints."""

# ruff: noqa: ASYNC240 - a test's loop may wait for its disk
from __future__ import annotations

import difflib
import shutil
from pathlib import Path

import msgspec

from hive.link.specs import SandboxSpec
from hive.runtimes.process import ProcessRuntime
from hive.runtimes.template import has_ended
from hive.settings.table import Paths
from tests.runtimes.benches import MARKS, printed
from tests.sandbox.harness import PYTHON, A, template, template_spec
from tests.waiting import until

FACTS = Path(__file__).with_name("facts.py")
SPOILT = """
import atexit, locale, logging, os, random, signal, sys, tempfile, time, multiprocessing
own, seeded = random.Random(), random.Random(7)
logging.getLogger("spoilt").addHandler(logging.StreamHandler())
tempfile.gettempdir()
def spoil():
    os.umask(0)
    os.environ["SPOILT"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.setitimer(signal.ITIMER_REAL, 1000)
    os.chdir("/usr")
    sys.argv.append("spoilt")
"""
"""A package that does while it is imported and warmed what no child may have of it."""


async def run(processes: ProcessRuntime, spec: SandboxSpec, *, forked: bool) -> str:
    """The output of an agent, and by its last line how it ended."""
    Path(spec.log).unlink(missing_ok=True)
    await processes.prepare(A, spec)
    if not forked:
        spec = msgspec.structs.replace(spec, template=None, command=[PYTHON, *spec.command])
    running = await processes.start(A, spec, mark=MARKS[A])
    assert bool(running.run.template) == forked, printed(spec)
    await until(lambda: has_ended(running.ended_fd))
    code = await running.reap()
    running.close()
    return f"{printed(spec)}ended with {code}\n"


async def compared(processes: ProcessRuntime, spec: SandboxSpec) -> str:
    """The lines that differ; empty where none does."""
    program = await run(processes, spec, forked=False)
    child = await run(processes, spec, forked=True)
    assert "ended with" in program
    return "".join(difflib.unified_diff(program.splitlines(True), child.splitlines(True), "program", "child", n=0))


def spoilt(paths: Paths, command: list[str], **more: object) -> SandboxSpec:
    """An agent of a template that was spoilt while it was made ready, with the scripts of this test beside it."""
    packages = paths.state / "packages"
    packages.mkdir(exist_ok=True)
    (packages / "spoilt.py").write_text(SPOILT)
    shutil.copy(FACTS, packages / "facts.py")
    env = {"PYTHONPATH": str(packages)}
    spec = template(paths, imports=["spoilt"], warm=["spoilt:spoil"], env=env)
    more["env"] = {**env, "OWN": "1", **more.get("env", {})}  # type: ignore[dict-item]
    return template_spec(paths, A, command, template=spec, **more)
