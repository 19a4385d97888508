"""Agents forked from a template, as units: run by test_unit.py in a machine with systemd. Nothing is played."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC221, ASYNC240 - a test's loop may wait for its disk and for systemctl
from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import Limits
from hive.host import systemd
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.runtimes.unit_plan import unit_of
from tests.host.unit_agents import (
    HELPER,
    PATHS,
    PYTHON,
    SLEEP,
    Connect,
    asleep,
    group_of,
    has_controller,
    is_hybrid,
    new_id,
    show,
    spec_of,
    ticks,
)
from tests.host.unit_exec_inside import ran
from tests.sandbox.harness import Daemon, alive
from tests.waiting import until

FIRST = 90000
TEMPLATE = TemplateSpec(name="lib", python=PYTHON, imports=["json", "decimal"], first_uid=FIRST)
AGENTS = Path("/srv/agents")


def agent_program(name: str, body: str) -> str:
    AGENTS.mkdir(mode=0o755, exist_ok=True)
    path = AGENTS / f"{name}.py"
    path.write_text(body)
    path.chmod(0o644)
    return str(path)


def forked(agent: str, command: list[str], template: TemplateSpec = TEMPLATE, **more: Any) -> SandboxSpec:
    uid = FIRST + int(agent[1:])
    return spec_of(agent, command, uid=uid, template=template, **more)


async def started(daemon: Daemon, agent: str, command: list[str], **more: Any) -> int:
    await daemon.client.define(agent, forked(agent, command, **more))
    return (await daemon.client.start(agent)).pid


def template_pid(name: str = "lib") -> int:
    command = ["systemctl", "show", f"hive-template@{name}.service", "--property=MainPID"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("=")[2])


async def journal(agent: str) -> str:
    await systemd.sync_journal()
    return await systemd.read_journal(unit_of(agent), lines=100)


@pytest.fixture(autouse=True)
def no_template_is_left() -> Iterator[None]:
    yield
    subprocess.run(["systemctl", "stop", "hive-template@*.service"], check=False)


IDLE = "import time\nwhile True: time.sleep(0.05)\n"


async def test_an_agent_of_a_template_is_the_main_process_of_its_unit(daemon: Daemon) -> None:
    agent = new_id()
    pid = await started(daemon, agent, [agent_program("idle", IDLE), "-v"])
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["PPid"] == "1"
    shown = show(agent, "MainPID", "ActiveState", "Slice", "Type")
    assert shown == {"MainPID": str(pid), "ActiveState": "active", "Slice": "hive-agents.slice", "Type": "notify"}
    assert (group_of(agent) / "agent/cgroup.procs").read_text().split() == [str(pid)]
    await until(lambda: not (group_of(agent) / "cgroup.procs").read_text())  # its stub is over, and goes
    uid = str(FIRST + int(agent[1:]))
    assert status["Uid"].split() == [uid] * 4
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    template = template_pid()
    assert os.readlink(f"/proc/{pid}/ns/user") == os.readlink(f"/proc/{template}/ns/user")
    assert os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user")
    for name in ("net", "mnt", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/{template}/ns/{name}")


async def test_what_it_prints_is_in_the_journal_under_its_name(daemon: Daemon) -> None:
    agent = new_id()
    body = "import sys, time\nprint('one', flush=True)\nprint('two', file=sys.stderr, flush=True)\ntime.sleep(1000)"
    await started(daemon, agent, [agent_program("prints", body)])
    async with asyncio.timeout(60):
        while "one\ntwo" not in await journal(agent):
            await asyncio.sleep(0.1)
    by_name = ["journalctl", "--quiet", "--output=cat", f"--identifier=agent-{agent}"]
    assert subprocess.run(by_name, capture_output=True, text=True, check=True).stdout == "one\ntwo\n"
    assert "hive: " not in await journal(agent)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os, time; time.sleep(0.2); os._exit(9)", 9),
        ("import os, time; time.sleep(0.2); os.kill(os.getpid(), 15)", 143),
    ],
)
async def test_its_exit_code_is_told_and_its_name_is_free_again(daemon: Daemon, body: str, code: int) -> None:
    agent = new_id()
    for times in (1, 2):
        await started(daemon, agent, ["-c", body])
        await until(lambda times=times: len(daemon.ended) == times)  # type: ignore[misc]
        assert daemon.ended[-1].exit_code == code
        assert show(agent, "LoadState") == {"LoadState": "not-found"}
        assert not group_of(agent).exists()
        assert "hive: " not in await journal(agent)


SEEN = """
import ctypes, json, os, resource, signal, socket, sys, stat
found = {}
def names(path):
    try: return sorted(os.listdir(path))
    except OSError as error: return error.strerror
for path in ("/", "/run", "/home", "/root", "/etc/hive", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/proc/self/fd", ".",
             "/var/lib/hive", "/sys/fs/cgroup"):
    found["in " + path] = names(path)
def tried(what, *args):
    try: what(*args); return "done"
    except OSError as error: return error.strerror
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) == -1: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def write(path): open(path, "w").write("x")
for path in ("/etc/x", "/usr/x", "/run/x", "/var/lib/hive/x", "/tmp/x", "/dev/shm/x", "x", "/var/tmp/x", "/opt/x"):
    found["write " + path] = tried(write, path)
for name, flag in dict(user=0x10000000, net=0x40000000, mnt=0x20000, pid=0x20000000).items():
    found["unshare " + name] = tried(call, "unshare", flag)
found["mount"] = tried(call, "mount", b"tmpfs", b"/tmp", b"tmpfs", 0, b"")
found["umount"] = tried(call, "umount2", b"/tmp", 0)
found["chroot"] = tried(os.chroot, "/tmp")
found["setuid"] = tried(os.setuid, 0)
found["setns"] = tried(call, "setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0)
found["ptrace"] = tried(call, "ptrace", 16, 1, 0, 0)
found["netlink"] = tried(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)
found["realtime"] = tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
found["suid"] = tried(os.chmod, "x", 0o4755)
found["hostname"] = tried(socket.sethostname, "x")
found["notify"] = tried(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect, "/run/systemd/notify")
found["kill 1"] = tried(os.kill, 1, 0)
found["umask"] = os.umask(0)
kinds = [name for name in dir(resource) if name.startswith("RLIMIT_")]
found["limits"] = {name: resource.getrlimit(getattr(resource, name)) for name in kinds}
found["env"] = {name: value for name, value in os.environ.items() if name not in ("HOME", "HIVE_MARK", "LC_CTYPE")}
found["argv"], found["cwd is home"] = sys.argv[1:], os.getcwd() == os.environ["HOME"]
found["ids"] = [os.getuid() == os.geteuid() == os.stat(".").st_uid, os.getgroups()]
found["interfaces"] = [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]]
found["own pids"] = len([name for name in os.listdir("/proc") if name.isdigit()])
found["oom"] = open("/proc/self/oom_score_adj").read()
found["session"] = [os.getpid() == os.getsid(0), os.getpgrp() == os.getpid()]
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
found["status"] = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
                                                    "Seccomp", "SigBlk", "SigIgn", "Umask", "Threads")}
found["signals"] = {number: str(signal.getsignal(number)) for number in range(1, 32)}
found["mount flags"] = {line.split()[4]: line.split()[5] for line in open("/proc/self/mountinfo")
                        if line.split()[4] in ("/", "/tmp", "/dev/shm", os.getcwd(), "/proc", "/sys", "/dev")}
found["mount flags"]["home"] = found["mount flags"].pop(os.getcwd())
json.dump(found, open("report.new", "w")); os.rename("report.new", "report.json")
import time; time.sleep(1000)
"""


async def report_of(agent: str) -> dict[str, Any]:
    path = PATHS.home(agent) / "report.json"
    await until(path.exists)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


async def test_it_sees_and_may_what_an_ordinary_agent_sees_and_may(daemon: Daemon) -> None:
    """Line by line: the same program, once executed and once forked. Root is nobody in a template's user namespace, so
    to become it is refused for another reason; and there is no control group to be seen, where the other's root step
    needed one."""
    script = agent_program("seen", SEEN)
    executed, child = new_id(), new_id()
    env = {"PLAIN": "1", "ODD": "a'b\"c\n$HOME\t%i\\"}
    await daemon.client.define(executed, spec_of(executed, [PYTHON, script, "a", ""], env=env))
    await daemon.client.start(executed)
    pid = await started(daemon, child, [script, "a", ""], env=env)
    assert show(child, "Type") == {"Type": "notify"}, await journal(child)
    try:
        wanted, found = await report_of(executed), await report_of(child)
    except TimeoutError:
        pytest.fail(await journal(executed) + await journal(child))
    differing = {name: (wanted[name], found[name]) for name in wanted if wanted[name] != found[name]}
    print(json.dumps(differing, indent=1))
    assert alive(pid)
    groups = set() if is_hybrid() else {"in /sys/fs/cgroup"}
    assert set(differing) == {"setuid", *groups}, differing


async def test_its_limits_are_those_of_its_unit(daemon: Daemon) -> None:
    agent = new_id()
    if not has_controller("memory"):
        pytest.skip("no memory controller")
    body = "import time\nheld = []\nwhile True: held.append(bytearray(2**20)); time.sleep(0.001)"
    await started(daemon, agent, ["-c", body], limits=Limits(memory_mb=64, files=100))
    await until(lambda: bool(daemon.ended))
    assert daemon.ended[-1].exit_code == 137
    if not is_hybrid():  # of a kill in a group of v1 systemd does not know
        assert daemon.ended[-1].why == "out of memory"


async def test_it_is_in_the_groups_that_an_ordinary_agents_program_is_in(daemon: Daemon) -> None:
    """In each hierarchy, v1's as well; also where systemd makes one for its unit later, and reads all anew."""
    executed, child = new_id(), new_id()
    limits = Limits(memory_mb=64, pids=50)
    await daemon.client.define(executed, spec_of(executed, SLEEP, limits=limits))
    pids = [(await daemon.client.start(executed)).pid, await started(daemon, child, ["-c", IDLE], limits=limits)]
    assert show(child, "Type") == {"Type": "notify"}, await journal(child)

    def groups() -> list[str]:
        texts = [Path(f"/proc/{pid}/cgroup").read_text() for pid in pids]
        return [text.replace(executed, "ID").replace(child, "ID") for text in texts]

    wanted, found = groups()
    assert found == wanted
    assert f":/hive.slice/hive-agents.slice/{unit_of('ID')}" in found
    for agent in (executed, child):
        subprocess.run(["systemctl", "set-property", "--runtime", unit_of(agent), "CPUQuota=50%"], check=True)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    wanted, found = groups()
    assert found == wanted
    if is_hybrid():
        assert f"cpu:/hive.slice/hive-agents.slice/{unit_of('ID')}" in found


async def test_asleep_it_uses_no_cpu_and_stop_lets_it_say_goodbye(daemon: Daemon) -> None:
    agent = new_id()
    body = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('bye', 'w').write('bye'), os._exit(3)))\n"
        "open('ready', 'w').close()\n"
        "while True: pass\n"
    )
    pid = await started(daemon, agent, ["-c", body])
    await until((PATHS.home(agent) / "ready").exists)
    await asleep(daemon, agent)
    before = ticks(pid)
    await asyncio.sleep(0.3)
    assert ticks(pid) == before
    assert (await daemon.client.stop(agent, grace_s=5)).exit_code == 3
    assert (PATHS.home(agent) / "bye").read_text() == "bye"


async def test_systemctl_stop_thaws_it_first(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, ["-c", IDLE])
    await asleep(daemon, agent)
    subprocess.run(["systemctl", "stop", unit_of(agent)], check=True)
    await until(lambda: bool(daemon.ended))
    assert not group_of(agent).exists()


@pytest.mark.parametrize("verb", ["daemon-reload", "daemon-reexec"])
async def test_systemd_read_anew_keeps_it_and_its_exit_code(daemon: Daemon, verb: str) -> None:
    agent = new_id()
    pid = await started(daemon, agent, ["-c", "import signal; signal.signal(15, lambda *_: exit(5))\n" + IDLE])
    subprocess.run(["systemctl", verb], check=True)
    assert show(agent, "MainPID", "ActiveState") == {"MainPID": str(pid), "ActiveState": "active"}
    assert (await daemon.client.stop(agent, grace_s=5)).exit_code == 5


async def test_the_end_of_a_template_ends_no_agent_and_the_next_starts_it_anew(daemon: Daemon) -> None:
    one, two = new_id(), new_id()
    pid = await started(daemon, one, ["-c", IDLE])
    first = template_pid()
    os.kill(first, signal.SIGKILL)
    await until(lambda: template_pid() == 0)
    assert alive(pid)
    await started(daemon, two, ["-c", IDLE])
    assert template_pid() not in (0, first)
    assert show(two, "Type") == {"Type": "notify"}
    assert (await daemon.client.stop(one, grace_s=5)).exit_code == 143


async def test_a_template_that_cannot_start_means_an_ordinary_program_and_a_line(daemon: Daemon) -> None:
    agent = new_id()
    broken = msgspec.structs.replace(TEMPLATE, name="broken", imports=["no_such_module"])
    body = "print('ran', flush=True); import time; time.sleep(1000)"
    await started(daemon, agent, [agent_program("ran", body)], template=broken)
    async with asyncio.timeout(60):
        while "ran" not in await journal(agent):
            await asyncio.sleep(0.1)
    said = await journal(agent)
    assert "hive: started as a program of its own, not from template broken: " in said
    assert "import no_such_module failed" in said
    assert show(agent, "Type") == {"Type": "exec"}


READY = """
try:
    from hive import ready
except ImportError:
    def ready(): pass
import json, os, sys, time
made = {"by": os.getpid(), "uid": os.getuid(), "keys": [name for name in os.environ if name.startswith("HIVE_")]}
ready()
now = {"pid": os.getpid(), "argv": sys.argv[1:], "home": os.getcwd(), "own": os.getuid()}
print(json.dumps({**made, **now}), flush=True)
open("here", "w").close()
while True: time.sleep(0.05)
"""


async def test_agents_go_on_from_hive_ready_in_the_script_their_template_stopped_in(daemon: Daemon) -> None:
    """The main process of its unit, with its own home, user and arguments; a killed template ends none of them."""
    script = agent_program("ready", READY)
    stops = msgspec.structs.replace(TEMPLATE, name="stops", imports=[], script=script)
    agents = [new_id(), new_id()]
    pids = [await started(daemon, agent, [script, agent], template=stops) for agent in agents]
    of_template = template_pid("stops")
    for agent, pid in zip(agents, pids, strict=True):
        await until((PATHS.home(agent) / "here").exists)
        async with asyncio.timeout(60):
            while '"argv"' not in await journal(agent):
                await asyncio.sleep(0.1)
        (line,) = [line for line in (await journal(agent)).splitlines() if '"argv"' in line]
        said = json.loads(line)
        assert (said["uid"], said["keys"]) == (FIRST, [])
        assert (said["argv"], said["home"], said["own"]) == ([agent], str(PATHS.home(agent)), FIRST + int(agent[1:]))
        assert show(agent, "MainPID", "Type") == {"MainPID": str(pid), "Type": "notify"}
        assert said["by"] == of_template
    await asleep(daemon, agents[0])
    os.kill(of_template, signal.SIGKILL)
    await until(lambda: template_pid("stops") == 0)
    assert all(alive(pid) for pid in pids)
    assert (await daemon.client.stop(agents[0], grace_s=5)).exit_code == 143
    third = new_id()
    await started(daemon, third, [script], template=stops)
    assert show(third, "Type") == {"Type": "notify"}
    other = new_id()
    await started(daemon, other, ["-c", IDLE], template=stops)
    assert show(other, "Type") == {"Type": "exec"}
    assert f"its template stops inside {script}" in await journal(other)


async def test_an_agent_with_networks_is_an_ordinary_program(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, ["-c", IDLE], egress=["192.0.2.0/24"])
    assert show(agent, "Type") == {"Type": "exec"}


async def test_a_program_inside_it_has_its_files_and_its_network(daemon: Daemon) -> None:
    agent = new_id()
    body = "import time\nopen('/tmp/mine', 'w').write('x')\nopen('here', 'w').write('y')\n"
    pid = await started(daemon, agent, ["-c", body + IDLE])
    await until((PATHS.home(agent) / "here").exists)
    inside = await ran(daemon, agent, "sh", "-c", "cat /tmp/mine here; echo; readlink /proc/self/ns/net; id -u")
    assert inside.code == 0, inside
    assert inside.output.decode().split() == ["xy", os.readlink(f"/proc/{pid}/ns/net"), str(FIRST + int(agent[1:]))]


# --- killed ----------------------------------------------------------------------------------------------------------


async def test_a_helper_that_is_killed_leaves_agents_that_the_next_adopts(
    helper_process: Any, connect: Connect
) -> None:
    first = helper_process()
    daemon = await connect()
    agent = new_id()
    pid = await started(daemon, agent, ["-c", "import signal; signal.signal(15, lambda *_: exit(5))\n" + IDLE])
    template = template_pid()
    first.kill()
    first.wait()
    await until(lambda: not alive(template))
    assert alive(pid)
    helper_process()
    daemon = await connect()
    stats = await daemon.client.stat([agent])
    assert (stats[agent].state, stats[agent].pid) == ("running", pid)
    assert (await daemon.client.stop(agent, grace_s=5)).exit_code == 5


KILLED = """
import os, signal
from hive.host import mount_trees
from hive.runtimes import unit_handover
from hive.runtimes.template import WaitingChild
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
async def die_later(*_, **__): die()
STEP = {step!r}
if STEP == "stub": unit_handover.wait_for_stub = die_later
if STEP == "trees": mount_trees.clone = die
if STEP == "groups": unit_handover._enter_groups = die
if STEP == "named": unit_handover._confirm = die_later
if STEP == "confirmed":
    notify = unit_handover._notify
    unit_handover._notify = lambda text, **more: die() if text == "READY=1" else notify(text, **more)
if STEP == "ready": unit_handover.RunningStub.end = die
if STEP == "before go": WaitingChild.release = die_later
"""


@pytest.mark.parametrize("step", ["stub", "trees", "groups", "named", "confirmed", "ready", "before go"])
async def test_a_helper_killed_between_two_steps_leaves_nothing_and_the_next_starts_it(
    helper_process: Any, connect: Connect, step: str
) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED.format(step=step) + HELPER])
    daemon = await connect()
    agent = new_id()
    await daemon.client.define(agent, forked(agent, ["-c", "print('ran', flush=True)\n" + IDLE]))
    asked = asyncio.ensure_future(daemon.client.start(agent))
    await until(lambda: killed.poll() is not None)
    asked.cancel()
    assert killed.returncode == -9
    helper_process()
    daemon = await connect()
    await daemon.client.define(agent, forked(agent, ["-c", "print('ran', flush=True)\n" + IDLE]))
    pid = (await daemon.client.start(agent)).pid
    assert alive(pid)
    assert show(agent, "MainPID", "Type") == {"MainPID": str(pid), "Type": "notify"}
    assert (group_of(agent) / "agent/cgroup.procs").read_text().split() == [str(pid)]
    async with asyncio.timeout(60):
        while (await journal(agent)).count("ran") != 1:
            await asyncio.sleep(0.1)
