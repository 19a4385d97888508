"""The ready state: a template that stops inside its agents' script, at `hive.ready()`, and what keeps one from it."""

# ruff: noqa: ASYNC240 - a test's loop may wait for its disk
from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import Limits
from hive.link.specs import SandboxSpec
from hive.runtimes import template as template_module
from hive.runtimes.process import ProcessRuntime, RunningProcess
from hive.runtimes.template import has_ended
from hive.settings.table import Paths
from tests.nobody import NOBODY, run_as_nobody
from tests.runtimes.benches import MARKS, printed
from tests.sandbox.harness import PYTHON, A, B, alive, template, template_spec, uid_of
from tests.templates.comparing import FACTS, SPOILT, compared
from tests.waiting import until

GUARD = """
try:
    from hive import ready
except ImportError:
    def ready(): pass
"""
"""The import of docs/templates.md, for a script that is to run where no Hive is."""


def scripted(paths: Paths, body: str, *words: str, agent: str = A, **more: Any) -> SandboxSpec:
    """An agent with this script, forked from a template that stops in it. `of`: what the template has besides."""
    place = paths.state / "scripts"
    place.mkdir(exist_ok=True)
    script = place / "agent.py"
    if not script.exists() or script.read_text() != body:
        script.write_text(body)
    chosen = template(paths, imports=[], script=str(script), **more.pop("of", {}))
    command = more.pop("command", [str(script), *words])
    spec = template_spec(paths, agent, command, template=chosen, **more)
    return msgspec.structs.replace(spec, log=str(paths.log(agent)), home=str(paths.home(agent)), uid=uid_of(agent))


async def started(processes: ProcessRuntime, spec: SandboxSpec, agent: str = A) -> RunningProcess:
    await processes.prepare(agent, spec)
    running = await processes.start(agent, spec, mark=MARKS[agent])
    assert isinstance(running, RunningProcess)
    return running


async def ended(running: RunningProcess) -> int | None:
    await until(lambda: has_ended(running.ended_fd))
    code = await running.reap()
    running.close()
    return code


# --- an agent that goes on ---------------------------------------------------------------------------------------

FOUND = """
import os
if "OWN" not in os.environ:  # in the template
    import spoilt
    spoilt.spoil()
    os.environ["LEFT"] = "1"
else:
    import spoilt
ready()
import sys, tempfile
sys.modules.pop("hive", None)
tempfile.tempdir = None  # an agent looks for it again, a program has it of spoilt.py
import facts
"""


@pytest.mark.cgroup
@pytest.mark.parametrize(
    "env", [{}, {"PYTHONUNBUFFERED": "1", "TZ": "Asia/Tokyo", "PYTHONPATH": "/nowhere"}], ids=["plain", "other path"]
)
async def test_after_ready_an_agent_finds_the_same_as_a_program(
    processes: ProcessRuntime, paths: Paths, env: dict[str, str]
) -> None:
    """Though its script spoilt all of it before: signals, umask, directory, environment, arguments, descriptors."""
    spec = scripted(paths, GUARD + FOUND, "a", "-b", env={"OWN": "1", **env}, limits=Limits(files=123))
    (paths.state / "scripts" / "spoilt.py").write_text(SPOILT)
    shutil.copy(FACTS, paths.state / "scripts")
    assert await compared(processes, spec) == ""


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    "code",
    [
        "1/0",
        "import sys; sys.exit('over')",
        "def f(): raise KeyError('k')\nf()",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'exit'); print('main', __name__, __file__)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "ready(); print('twice'); raise SystemExit(3)",
        "import threading; t = threading.Thread(target=lambda: (ready(), print('there'))); t.start(); t.join()",
        "import multiprocessing as m\nif __name__ == '__main__':\n"
        "  p = m.get_context('spawn').Process(target=print, args=(1,)); p.start(); p.join(); print(p.exitcode)",
    ],
)
@pytest.mark.cgroup
async def test_after_ready_an_agent_ends_as_a_program_does(processes: ProcessRuntime, paths: Paths, code: str) -> None:
    """Its traceback, its code or signal; a second `hive.ready()` returns at once, as in a program."""
    assert await compared(processes, scripted(paths, f"{GUARD}ready()\n{code}\n")) == ""


SHARED = """
import hive, json, os, random, sys
made = {"by": os.getpid(), "draws": random.random(), "env": sorted(os.environ)}
own = random.Random()
hive.ready()
print(json.dumps({**made, "pid": os.getpid(), "argv": sys.argv[1:], "key": os.environ.get("KEY"), "cwd": os.getcwd(),
    "left": os.environ.get("OF_TEMPLATE"), "own": [random.random(), own.random()]}), flush=True)
import time; time.sleep(1000)
"""


async def test_agents_share_what_was_made_before_ready_and_have_an_identity_each(
    processes: ProcessRuntime, paths: Paths
) -> None:
    """In the template there was no agent's environment: what is made there holds no agent's secret."""
    specs = {
        agent: scripted(
            paths,
            SHARED,
            agent,
            agent=agent,
            env={"KEY": f"secret of {agent}"},
            of={"env": {"OF_TEMPLATE": "1"}},
        )
        for agent in (A, B)
    }
    running = [await started(processes, spec, agent) for agent, spec in specs.items()]
    await until(lambda: all(printed(spec) for spec in specs.values()))
    one, other = (json.loads(printed(spec)) for spec in specs.values())
    assert one["by"] == other["by"] == int(running[0].run.template.split()[1])
    assert one["draws"] == other["draws"]
    assert not {"KEY", "HIVE_MARK"} & {*one["env"]}
    assert len({*one["own"], *other["own"]}) == 4
    for agent, told in ((A, one), (B, other)):
        assert (told["argv"], told["key"]) == ([agent], f"secret of {agent}")
        assert (told["cwd"], told["left"]) == (str(paths.home(agent)), None)
    stat = (await processes.templates.stats({A: running[0].run.template})).templates["t"]
    assert (stat.state, stat.agents, stat.is_stale) == ("ready", (A,), False)
    for each in running:
        await each.kill()
        await ended(each)


PRIVATE = """
import gc, time
{prepare}
state = [str(number) * 20 for number in range(60_000)]
{ready}
gc.collect()
lines = [line.split() for line in open("/proc/self/smaps_rollup")]
print(sum(int(line[1]) for line in lines if line[0].startswith("Private_")), len(state), flush=True)
time.sleep(1000)
"""


async def test_what_a_script_made_before_ready_stays_shared_after_a_full_collection(
    processes: ProcessRuntime, paths: Paths
) -> None:
    """8 MiB of objects: without gc.freeze the collection in the child would copy each of their pages."""
    held = {}
    for agent, guard, call in ((A, "", ""), (B, "import hive", "hive.ready()")):
        spec = scripted(paths, PRIVATE.format(prepare=guard, ready=call), agent=agent)
        if not call:
            spec = msgspec.structs.replace(spec, template=None, command=[PYTHON, *spec.command])
        running = await started(processes, spec, agent)
        assert bool(running.run.template) == bool(call)
        await until(lambda spec=spec: printed(spec))  # type: ignore[misc]
        held[agent] = int(printed(spec).split()[0])
        await running.kill()
        await ended(running)
    print(f"private: {held[A]} KiB as a program, {held[B]} KiB after hive.ready()")
    assert held[A] - held[B] > 7 << 10


@pytest.mark.cgroup
async def test_a_package_hive_of_the_agents_own_environment_serves_too(processes: ProcessRuntime, paths: Paths) -> None:
    """Found where Python finds it, as is one file `hive.py` beside the script; without either the template has one."""
    packages = paths.state / "packages" / "hive"
    packages.mkdir(parents=True)
    shutil.copy(Path(template_module.__file__).parents[1] / "__init__.py", packages)
    body = "import hive, os; pid = os.getpid(); hive.ready(); print(pid != os.getpid(), hive.__file__)"
    spec = scripted(paths, body, of={"env": {"PYTHONPATH": str(packages.parent)}})
    running = await started(processes, spec)
    assert await ended(running) == 0
    assert printed(spec) == f"True {packages}/__init__.py\n"


# --- an agent that does not --------------------------------------------------------------------------------------

FAULTS = {
    "ends": ("print('over')", "its script ended before hive.ready()"),
    "exits": ("raise SystemExit(3)", "its script ended before hive.ready(): SystemExit: 3"),
    "raises": ("{}['k']", "its script failed before hive.ready(): KeyError: 'k'"),
    "syntax": ("x = (", "its script failed before hive.ready(): SyntaxError: '(' was never closed"),
    "needs its environment": (
        "import os; os.environ['AGENT_KEY']; ready()",
        "its script failed before hive.ready(): KeyError: 'AGENT_KEY'",
    ),
    "a thread calls it": (
        "import threading; t = threading.Thread(target=ready); t.start(); t.join()",
        "its script called hive.ready() in a thread: only the main thread may",
    ),
    "an event loop": (
        "import asyncio\nasync def main(): ready()\nasyncio.run(main())",
        "its script called hive.ready() in an event loop: call it before asyncio.run()",
    ),
    "threads": (
        "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); ready()",
        "its script started threads, which a fork does not copy: Thread-1",
    ),
    "a file": ("import os; left = os.open('/dev/null', 0); ready()", "its script left descriptors open"),
    "a socket": (
        "import socket; left = socket.create_server(('127.0.0.1', 0)); ready()",
        "its script left descriptors open, which every child would have",
    ),
    "a process": (
        "import subprocess; left = subprocess.Popen(['sleep', '9']); ready()",
        "its script started a process that has not ended",
    ),
    "catches all": ("try:\n  1/0\nfinally:\n  open('/nowhere/x')", "No such file or directory: /nowhere/x"),
    "dies": ("import os; print('last words', flush=True); os._exit(1)", "it ended before it was ready; it said: last"),
    "never": ("import time; time.sleep(99)", "has not called hive.ready()"),
    "module": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
}
RAN = "import sys; print('ran', sys.argv[1:], flush=True)"


@pytest.mark.wide
@pytest.mark.cgroup
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_script_that_cannot_stop_at_ready_fails_the_template_and_its_agents_are_programs(
    processes: ProcessRuntime,
    paths: Paths,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body, why = FAULTS[fault]
    if fault == "never":
        monkeypatch.setattr(template_module, "IMPORTS_S", 0.7)
    body = f"{GUARD}import os\nif 'OWN' in os.environ:\n    {RAN}\n    raise SystemExit(5)\n{body}\n"
    spec = scripted(paths, body, "a", env={"OWN": "1"})
    running = await started(processes, spec)
    assert not running.run.template
    assert await ended(running) == (1 if fault == "syntax" else 5)
    first, *rest = printed(spec).splitlines()
    assert first.startswith("hive: started as a program of its own, not from template t: template t does not start: ")
    assert why in first
    assert fault == "syntax" or rest == ["ran ['a']"]
    assert "template_not_used agent=a template=t" in caplog.text
    stat = (await processes.templates.stats({})).templates["t"]
    assert stat.state == "failed"
    assert why in stat.why


@pytest.mark.cgroup
async def test_a_script_that_cannot_be_read_is_told(processes: ProcessRuntime, paths: Paths) -> None:
    chosen = template(paths, imports=[], script="/nowhere/agent.py")
    said = await processes.templates.get(chosen)
    assert said == (
        "template t does not start: its script cannot be read: No such file or directory: /nowhere/agent.py"
    )


@pytest.mark.cgroup
@pytest.mark.parametrize("command", [["-c", "print('ran')"], ["-m", "this"], ["/usr/bin/env", "true"]])
async def test_an_agent_with_another_program_is_an_ordinary_program_and_its_log_says_so(
    processes: ProcessRuntime, paths: Paths, command: list[str]
) -> None:
    """It would else have the script's modules and state in its way."""
    spec = scripted(paths, "import hive; hive.ready()", command=command)
    running = await started(processes, spec)
    assert not running.run.template
    assert await ended(running) == 0
    why = "a template runs FILE.py" if command[0] == "/usr/bin/env" else f"its template stops inside {paths.state}"
    assert why in printed(spec).splitlines()[0]


@pytest.mark.cgroup
async def test_a_changed_script_or_module_beside_it_makes_it_stale(processes: ProcessRuntime, paths: Paths) -> None:
    spec = scripted(paths, "import beside, hive; hive.ready()")
    assert spec.template is not None
    place = Path(spec.template.script).parent
    (place / "beside.py").write_text("")
    for file in ("beside.py", "agent.py"):
        await processes.templates.get(spec.template)
        before = (await processes.templates.stats({})).templates["t"]
        (place / "unused.py").write_text("")
        with (place / file).open("a") as changed:
            changed.write("\n# another\n")
        after = (await processes.templates.stats({})).templates["t"]
        assert (before.state, before.is_stale, after.is_stale) == ("ready", False, True)
        await processes.templates.restart("t")
        assert not (await processes.templates.stats({})).templates["t"].is_stale


# --- killed ------------------------------------------------------------------------------------------------------

SLOW = """
import hive, os, pathlib, time
pathlib.Path({mark!r}).write_text(f"{{os.getpid()}}.")
time.sleep(99)
hive.ready()
"""


@pytest.mark.cgroup
async def test_a_template_killed_between_its_script_and_ready_is_failed_until_it_is_restarted(
    processes: ProcessRuntime, paths: Paths
) -> None:
    marks = paths.state / "marks"
    marks.mkdir()
    marks.chmod(0o777)
    spec = scripted(paths, SLOW.format(mark=str(marks / "there")))
    assert spec.template is not None
    asked = asyncio.ensure_future(processes.templates.get(spec.template))
    await until(lambda: (marks / "there").exists() and (marks / "there").read_text().endswith("."))
    script = spec.template.script.encode()
    pid = int((marks / "there").read_text().strip("."))
    os.kill(pid, signal.SIGKILL)
    assert await asked == "template t does not start: it ended before it was ready"
    assert not alive(pid)
    Path(script.decode()).write_text("import hive; hive.ready(); print('ran')")
    assert isinstance(await processes.templates.get(spec.template), str)
    await processes.templates.restart("t")
    running = await started(processes, spec)
    assert running.run.template
    of_template = int(running.run.template.split()[1])
    assert await ended(running) == 0
    os.kill(of_template, signal.SIGKILL)
    await until(lambda: not alive(of_template))
    again = await started(processes, spec)
    assert again.run.template.split()[1] != str(of_template)
    assert await ended(again) == 0


# --- as a user, and anywhere -------------------------------------------------------------------------------------

AS_USER = """
import asyncio, os, tempfile
from pathlib import Path
from hive.host import parent
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.runtimes.process import ProcessRuntime
from hive.sandbox.server import make_directories
from hive.runtimes.template import has_ended
from hive.settings.table import Paths

async def main(top):
    parent.become_subreaper()
    paths = Paths(state=top / "d", runtime=top / "r")
    make_directories(paths)
    runtime = ProcessRuntime(paths, subtree=None, log_max_bytes=1 << 20)
    script = top / "agent.py"
    script.write_text("import hive, os, sys; by = os.getpid(); hive.ready(); "
        "print(os.getuid(), by != os.getpid(), sys.argv[1:], os.getcwd() == os.environ['HOME']); sys.exit(3)")
    template = TemplateSpec(name="t", python="/usr/bin/python3", script=str(script))
    spec = SandboxSpec(name="a", command=[str(script), "x"], env={}, home=str(paths.home("a")),
        log=str(paths.log("a")), template=template)
    await runtime.prepare("a", spec)
    running = await runtime.start("a", spec, mark="HIVE_MARK=m")
    print(bool(running.run.template))
    while not has_ended(running.ended_fd):
        await asyncio.sleep(0.01)
    print(await running.reap())
    print(Path(spec.log).read_text())
    running.close()
    await runtime.templates.leave()

with tempfile.TemporaryDirectory() as top:
    asyncio.run(main(Path(top)))
"""


def test_as_a_user_a_template_stops_in_the_script_too() -> None:
    assert run_as_nobody(AS_USER).split() == ["True", "3", str(NOBODY), "True", "['x']", "True"]


def test_outside_of_a_template_ready_returns_at_once(tmp_path: Path) -> None:
    """With Hive and without."""
    script = tmp_path / "agent.py"
    script.write_text(f"{GUARD}ready(); print('went on', __name__)")
    ran = subprocess.run([PYTHON, str(script)], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ran.stdout == "went on __main__\n"
    import hive

    hive.ready()
