"""Agents forked from real templates: their memory, their place, their end; templates that end, fail and lie."""

# ruff: noqa: ASYNC240 - a test's loop may wait for its disk
from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import Limits
from hive.host.process import ProcessTable, real_uid
from hive.link.specs import SandboxSpec
from hive.runtimes import template as template_module
from hive.runtimes.process import ProcessRuntime, RunningProcess
from hive.runtimes.template import has_ended
from hive.runtimes.template_fit import note_of
from hive.sandbox.server import make_directories
from hive.settings.table import Paths
from tests.nobody import NOBODY, run_as_nobody
from tests.runtimes.benches import MARKS, printed
from tests.sandbox.harness import PYTHON, A, B, alive, runtime, sub_reaper, template, template_spec, uid_of
from tests.waiting import until

WAITS = "print('ready', flush=True)\nimport time; time.sleep(1000)"
LIAR = Path(__file__).parents[1] / "fakes" / "lying_fork_server.py"


@pytest.fixture
async def processes(paths: Paths, freezer: str) -> AsyncIterator[ProcessRuntime]:
    make_directories(paths)
    with sub_reaper():
        found = runtime(paths, freezer, log_max_bytes=1 << 20)
        yield found
        await found.templates.leave()


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


async def killed(*all_running: RunningProcess) -> None:
    for running in all_running:
        await running.kill()
        await ended(running)


def pid_of_template(running: RunningProcess) -> int:
    return int(running.run.template.split()[1])


def packages_of(name: str) -> str:
    """The directory of a real package, for the system's Python; skipped where that is of another version."""
    module = pytest.importorskip(name)
    found: str = os.path.dirname(os.path.dirname(module.__file__))
    tried = subprocess.run([PYTHON, "-c", f"import {name}"], env={"PYTHONPATH": found}, capture_output=True)
    if tried.returncode:
        pytest.skip(f"the system's Python cannot import {name} of this one")
    return found


# --- memory ------------------------------------------------------------------------------------------------------

PRIVATE = """
import gc, json, time
import openai
gc.collect()
lines = [line.split() for line in open("/proc/self/smaps_rollup")]
print(sum(int(line[1]) for line in lines if line[0].startswith("Private_")), flush=True)
time.sleep(1000)
"""


async def test_a_child_holds_a_fraction_of_what_a_program_holds_after_a_full_collection(
    processes: ProcessRuntime, paths: Paths
) -> None:
    """With the real `openai`: without gc.freeze a full collection in the child would copy what it shares."""
    env = {"PYTHONPATH": packages_of("openai")}
    warmed = template(paths, imports=["openai"], warm=["openai"], env=env)
    spec = template_spec(paths, A, ["-c", PRIVATE], template=warmed, env=env)
    child = await started(processes, spec)
    plain = msgspec.structs.replace(spec, template=None, command=[PYTHON, *spec.command])
    plain = msgspec.structs.replace(plain, log=str(paths.log(B)), home=str(paths.home(B)), uid=uid_of(B))
    program = await started(processes, plain, B)
    await until(lambda: printed(spec) and printed(plain))
    assert child.run.template
    assert not program.run.template
    of_child, of_program = int(printed(spec)), int(printed(plain))
    print(f"private: {of_program} KiB as a program, {of_child} KiB from the template")
    assert of_program > 2.5 * of_child
    stat = (await processes.templates.stats({A: child.run.template})).templates["t"]
    assert (stat.state, stat.agents, stat.older) == ("ready", (A,), ())
    assert stat.held_bytes >= stat.shared_bytes > 10 << 20
    assert not stat.is_stale
    await killed(child, program)


# --- its place ---------------------------------------------------------------------------------------------------


async def test_a_child_is_in_its_own_group_user_and_network_and_heeds_its_limits(
    processes: ProcessRuntime, paths: Paths, freezer: str
) -> None:
    running = await started(
        processes, template_spec(paths, A, ["-c", WAITS], limits=Limits(memory_mb=64, pids=20, files=99))
    )
    pid, of_template = running.run.main.pid, pid_of_template(running)
    if freezer == "cgroup":
        assert pid in [int(each) for each in Path(running.run.leaf or "", "cgroup.procs").read_text().split()]
        assert "/template.t" in Path(f"/proc/{of_template}/cgroup").read_text()
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(r"Max open files +99 +99 ", limits)
    status = Path(f"/proc/{pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    if os.geteuid() == 0:
        assert real_uid(pid) == uid_of(A)
        assert "CapEff:\t0000000000000000" in status
        assert "CapBnd:\t0000000000000000" in status
        kinds = [os.readlink(f"/proc/{each}/ns/user") for each in ("self", of_template, pid)]
        assert kinds[0] != kinds[1] == kinds[2]
        networks = [os.readlink(f"/proc/{each}/ns/net") for each in ("self", of_template, pid)]
        assert len({*networks}) == 3
        assert real_uid(of_template) == template(paths).first_uid
    await killed(running)


@pytest.mark.root
async def test_hive_listens_in_its_network_before_the_script_runs(processes: ProcessRuntime, paths: Paths) -> None:
    code = "import socket; socket.create_connection(('127.0.0.1', 9310)).close(); print('reached')"
    from hive.domain import INNER_PORT

    running = await started(processes, template_spec(paths, A, ["-c", code.replace("9310", str(INNER_PORT))]))
    inner = running.take_inner()
    assert inner is not None
    assert await ended(running) == 0
    assert printed(template_spec(paths, A, [])) == "reached\n"
    inner.close()


async def test_a_template_has_no_secret_and_no_home_of_hives(
    processes: ProcessRuntime, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVE_SECRET", "s")
    running = await started(processes, template_spec(paths, A, ["-c", WAITS], env={"OWN": "k"}))
    environ = Path(f"/proc/{pid_of_template(running)}/environ").read_bytes()
    assert {entry.split(b"=")[0] for entry in environ.split(b"\0") if entry} <= {b"PATH", b"LANG", b"TZ", b"HOME"}
    assert b"HOME=/nonexistent" in environ
    descriptors = os.listdir(f"/proc/{pid_of_template(running)}/fd")
    assert len(descriptors) == 4
    await killed(running)


# --- as an ordinary program --------------------------------------------------------------------------------------

SPECS: dict[str, Any] = {
    "a program": ({"command": ["/bin/echo", "ran"]}, {}, "a template runs FILE.py"),
    "a flag": ({"command": ["python", "-O", "-c", "print('ran')"]}, {}, "a template runs FILE.py"),
    "much": ({"env": {"MUCH": "x" * 70_000}}, {}, "longer than 65536 bytes"),
    "hash seed": ({"env": {"PYTHONHASHSEED": "1"}}, {}, "PYTHONHASHSEED is read only when an interpreter starts"),
    "no such package": ({}, {"imports": ["no_such_package"]}, "import no_such_package failed"),
    "no such recipe": ({}, {"warm": ["nope"]}, "warm nope failed: LookupError: no such recipe"),
    "no such python": ({}, {"python": "/nowhere/python"}, "no such command: /nowhere/python"),
    "threads": ({}, {"imports": ["threaded"]}, "its imports started threads"),
    "descriptors": ({}, {"imports": ["opened"]}, "its imports left descriptors open"),
    "exits": ({}, {"imports": ["exits"]}, "import exits failed: SystemExit: 3"),
    "dies": ({}, {"imports": ["dies"]}, "it ended before it was ready; it said: last words"),
}


@pytest.mark.parametrize("name", SPECS)
async def test_where_it_cannot_be_forked_it_is_an_ordinary_program_and_its_log_says_why(
    processes: ProcessRuntime, paths: Paths, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    of_agent, of_template, why = SPECS[name]
    packages = paths.state / "packages"
    packages.mkdir()
    (packages / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    )
    (packages / "opened.py").write_text("import os; left = os.open('/dev/null', 0)")
    (packages / "exits.py").write_text("raise SystemExit(3)")
    (packages / "dies.py").write_text("import os; print('last words', flush=True); os._exit(1)")
    chosen = template(paths, env={"PYTHONPATH": str(packages)}, **of_template)
    spec = template_spec(paths, A, of_agent.get("command", ["-c", "print('ran')"]), template=chosen)
    spec = msgspec.structs.replace(spec, **of_agent)
    if name == "no such python":
        spec = msgspec.structs.replace(spec, command=[PYTHON, "-c", "print('ran')"])
        why = "a template runs FILE.py"  # of another Python than its own
    running = await started(processes, spec)
    assert not running.run.template
    assert await ended(running) == 0
    first, *rest = printed(spec).splitlines()
    assert first.startswith("hive: started as a program of its own, not from template t: ")
    assert why in first
    assert why in note_of(spec, running.run)
    assert rest == ["ran"]
    assert "template_not_used agent=a template=t" in caplog.text


async def test_a_template_that_failed_is_tried_again_only_at_a_restart_or_with_another_description(
    processes: ProcessRuntime, paths: Paths
) -> None:
    packages = paths.state / "packages"
    packages.mkdir()
    chosen = template(paths, imports=["late"], env={"PYTHONPATH": str(packages)})
    said = await processes.templates.get(chosen)
    assert said == "template t does not start: import late failed: ModuleNotFoundError: No module named 'late'"
    (packages / "late.py").write_text("")
    assert await processes.templates.get(chosen) == said
    assert (await processes.templates.stats({})).templates["t"].state == "failed"
    await processes.templates.restart("t")
    one = await processes.templates.get(chosen)
    assert not isinstance(one, str)
    other = await processes.templates.get(msgspec.structs.replace(chosen, imports=[]))
    assert not isinstance(other, str)
    assert other is not one
    assert not one.is_alive()


async def test_a_pinned_template_stays_in_memory_or_says_that_it_may_not(
    processes: ProcessRuntime, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    """Its children are not pinned, and have the limits of any agent."""
    running = await started(processes, template_spec(paths, A, ["-c", WAITS], template=template(paths, pin=True)))
    of_template, of_child = (
        int(re.findall(r"VmLck:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
        for pid in (pid_of_template(running), running.run.main.pid)
    )
    assert of_template > 1000 or "its memory is not pinned" in caplog.text
    assert of_child == 0
    await killed(running)


async def test_a_changed_package_makes_it_stale(processes: ProcessRuntime, paths: Paths) -> None:
    packages = paths.state / "site-packages"
    (packages / "thing-1.dist-info").mkdir(parents=True)
    os.utime(packages / "thing-1.dist-info", (1e9, 1e9))
    os.utime(packages, (1e9, 1e9))
    await processes.templates.get(template(paths, env={"PYTHONPATH": str(packages)}))
    before = (await processes.templates.stats({})).templates["t"]
    (packages / "thing-2.dist-info").mkdir()
    after = (await processes.templates.stats({})).templates["t"]
    assert (before.is_stale, after.is_stale) == (False, True)


# --- the template's end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "restarted"])
async def test_its_children_go_on_without_it_and_the_next_start_makes_a_new_one(
    processes: ProcessRuntime, paths: Paths, how: str
) -> None:
    first = await started(processes, template_spec(paths, A, ["-c", WAITS]))
    of_first = pid_of_template(first)
    if how == "killed":
        os.kill(of_first, signal.SIGKILL)
    else:
        await processes.templates.restart("t")
    await until(lambda: not alive(of_first))
    second = await started(processes, template_spec(paths, B, ["-c", WAITS]), B)
    assert pid_of_template(second) not in (of_first, 0)
    stat = (await processes.templates.stats({A: first.run.template, B: second.run.template})).templates["t"]
    assert (stat.agents, stat.older) == ((A, B), (A,))
    assert alive(first.run.main.pid)
    assert await first.stop(grace_s=20)
    assert await ended(first) == 128 + signal.SIGTERM
    await killed(second)


AS_USER = """
import asyncio, os, sys, tempfile
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
    template = TemplateSpec(name="t", python="/usr/bin/python3", imports=["json"])
    code = "import os, time; print(os.getuid(), os.getcwd(), flush=True); time.sleep(1); raise SystemExit(3)"
    spec = SandboxSpec(name="a", command=["-c", code], env={}, home=str(paths.home("a")), log=str(paths.log("a")),
        template=template)
    await runtime.prepare("a", spec)
    running = await runtime.start("a", spec, mark="HIVE_MARK=m")
    print(bool(running.run.template), len(running._group.pids()), os.readlink("/proc/self/ns/user") ==
        os.readlink(f"/proc/{running.run.main.pid}/ns/user"))
    await running.freeze(deadline_s=9, give_up=lambda: False)
    print(running.is_frozen())
    await running.thaw(deadline_s=9)
    while not has_ended(running.ended_fd):
        await asyncio.sleep(0.01)
    print(await running.reap())
    print(Path(spec.log).read_text().split()[0])
    running.close()
    await runtime.templates.leave()

with tempfile.TemporaryDirectory() as top:
    asyncio.run(main(Path(top)))
"""


def test_as_a_user_an_agent_is_forked_too_without_a_namespace() -> None:
    assert run_as_nobody(AS_USER).split() == ["True", "1", "True", "True", "3", str(NOBODY)]


FROM_CLOSED = """
import asyncio, os, sys, tempfile
from pathlib import Path
import hive
from hive.host import parent
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.runtimes.process import ProcessRuntime
from hive.sandbox.server import make_directories
from hive.runtimes.template import has_ended
from hive.settings.table import Paths

async def main(top):
    os.chmod(top, 0o755)
    script = top / "agent.py"
    script.write_text("import hive; hive.ready(); import os; print(os.getuid(), flush=True)")
    parent.become_subreaper()
    paths = Paths(state=top / "d", runtime=top / "r")
    make_directories(paths)
    runtime = ProcessRuntime(paths, subtree=None, log_max_bytes=1 << 20)
    template = TemplateSpec(name="t", python="/usr/bin/python3", imports=["json"], script=str(script), first_uid=640000)
    spec = SandboxSpec(name="a", command=[str(script)], env={}, home=str(paths.home("a")), log=str(paths.log("a")),
        template=template, uid=640001, egress=[])
    await runtime.prepare("a", spec)
    running = await runtime.start("a", spec, mark="HIVE_MARK=m")
    while not has_ended(running.ended_fd):
        await asyncio.sleep(0.01)
    print(hive.__file__, running.run.template_note or "forked", await running.reap())
    print(Path(spec.log).read_text())
    running.close()
    await runtime.templates.leave()

with tempfile.TemporaryDirectory() as top:
    asyncio.run(main(Path(top)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: as a user a template is that user")
def test_a_template_needs_no_right_to_read_hives_own_files(tmp_path: Path) -> None:
    """A clone below /root, mode 700: the fork server could not be opened, and every agent was an ordinary program."""
    closed = tmp_path / "closed"
    shutil.copytree(Path(template_module.__file__).parents[1], closed / "hive")
    closed.chmod(0o700)
    env = {**os.environ, "PYTHONPATH": str(closed)}
    command = [sys.executable, "-c", FROM_CLOSED]
    ran = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [f"{closed}/hive/__init__.py", "forked", "0", "640001"]


async def test_many_agents_started_at_once_share_one_template(processes: ProcessRuntime, paths: Paths) -> None:
    one, other = await asyncio.gather(
        started(processes, template_spec(paths, A, ["-c", WAITS])),
        started(processes, template_spec(paths, B, ["-c", WAITS]), B),
    )
    assert one.run.template == other.run.template != ""
    await killed(one, other)


# --- templates that lie ------------------------------------------------------------------------------------------

LIES = {
    "nonsense": "it says what is no JSON",
    "no word": "it was not ready within",
    "flood": "it was not ready within",
    "silence": "it made no child within",
    "another process": "",
    "a file": "its child did not hand over itself",
    "a number": "its child did not hand over itself",
    "two": "its child did not hand over itself",
    "ended": "",
    "more words": "",
    "descriptor": "was not handed over to it",
    "limits": "its child has other limits than were asked for: Max open files",
}
LIES_OF_ROOT = {
    "rights": "it has capabilities",
    "other user": "it runs as uid",
    "no network": "it has no net namespace of its own",
    "second child": "",
}


@pytest.mark.wide
@pytest.mark.parametrize("lie", [*LIES, *(pytest.param(lie, marks=pytest.mark.root) for lie in LIES_OF_ROOT)])
async def test_a_template_that_lies_is_not_believed_and_the_agent_is_a_program(
    processes: ProcessRuntime, paths: Paths, freezer: str, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process of it is left, and none has run the script but the program."""
    if lie == "second child" and freezer == "signals":
        pytest.skip("without a control group nothing says what a template has made")
    monkeypatch.setattr(template_module, "IMPORTS_S", 2.0 if lie in ("no word", "flood") else 60.0)
    monkeypatch.setattr(template_module, "FORK_S", 0.5 if lie == "silence" else 30.0)
    liar = shutil.copy(LIAR, paths.state / "python")
    chosen = template(paths, python=str(liar), env={"LIE": lie})
    code = "import os, time; print(f'ran as {os.getpid()}', flush=True); time.sleep(1000)"
    spec = template_spec(paths, A, ["-c", code], template=chosen, limits=Limits(files=77))
    monkeypatch.setattr("hive.runtimes.process.exec_of", lambda command, python: [PYTHON, *command])
    running = await started(processes, spec)
    assert not running.run.template
    await until(lambda: "ran as" in printed(spec))
    first, *rest = printed(spec).splitlines()
    assert {**LIES, **LIES_OF_ROOT}[lie] in first
    assert rest == [f"ran as {running.run.main.pid}"]
    await until(lambda: strangers(paths, running) == [])
    if lie not in ("ended", "more words", "limits", "no network"):
        stat = (await processes.templates.stats({})).templates["t"]
        assert stat.state == "failed", first
    await killed(running)


def strangers(paths: Paths, running: RunningProcess) -> list[int]:
    """Processes of the agent's user, or of the liar, besides the agent and a template that still counts as good."""
    found = []
    for pid, stat in ProcessTable().processes.items():
        if stat.alive and pid != running.run.main.pid and os.geteuid() == 0 and real_uid(pid) == uid_of(A):
            found.append(pid)
    return found
