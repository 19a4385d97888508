"""An agent's life as a unit: run by test_unit.py in a machine with systemd as PID 1. Nothing is played."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC221, ASYNC240 - a test's loop may wait for its disk and for systemctl
from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hive.errors import HiveError, NotFound, NotPermitted, WrongState
from hive.host import systemd
from hive.host.process import ProcessTable, is_stopped
from hive.runtimes.unit import UnitRuntime
from hive.runtimes.unit_plan import unit_of
from tests.host.unit_agents import (
    BURN,
    PATHS,
    POLITE,
    PYTHON,
    SLEEP,
    Connect,
    asleep,
    group_of,
    new_id,
    report_of,
    reporter,
    show,
    spec_of,
    started,
    ticks,
)
from tests.sandbox.harness import Daemon, alive
from tests.waiting import until

# --- what systemd is busy with ---------------------------------------------------------------------------------------


async def test_a_start_waits_while_systemd_carries_out_what_nothing_may_replace(daemon: Daemon) -> None:
    """It failed with "Transaction is destructive", and the agent stayed in `error` whatever its policy."""
    slow = ["--slice=hive-agents.slice", "--property=ExecStop=/bin/sleep 4", "/bin/sleep", "1000"]
    subprocess.run(["systemd-run", "--quiet", "--unit=slow-to-stop.service", *slow], check=True)
    stop = ["systemctl", "stop", "--no-block", "--job-mode=replace-irreversibly", "hive-agents.slice"]
    subprocess.run(stop, check=True)
    agent = new_id()
    await daemon.client.define(agent, spec_of(agent, SLEEP))
    refused = subprocess.run(["systemctl", "start", "hive-agents.slice"], capture_output=True, text=True, check=False)
    assert systemd.IN_THE_WAY in refused.stderr, "it is not busy"
    pid = (await daemon.client.start(agent)).pid
    assert alive(pid)
    assert (await systemd.show("slow-to-stop.service", "ActiveState"))["ActiveState"] in ("inactive", "failed")


async def test_a_restart_is_told_from_a_stop() -> None:
    """By the job that ends it: a helper that is started again at once wakes nobody."""
    stopping = ["--property=ExecStop=/bin/sleep 2", "/bin/sleep", "1000"]
    subprocess.run(["systemd-run", "--quiet", "--unit=told.service", *stopping], check=True)
    assert not await systemd.is_being_restarted("told.service")
    restarting = subprocess.Popen(["systemctl", "try-restart", "told.service"])
    async with asyncio.timeout(60):
        while not await systemd.is_being_restarted("told.service"):
            await asyncio.sleep(0.02)
    assert restarting.wait() == 0
    ending = subprocess.Popen(["systemctl", "stop", "told.service"])
    while (await systemd.show("told.service", "ActiveState"))["ActiveState"] == "active":
        await asyncio.sleep(0.02)
    assert not await systemd.is_being_restarted("told.service")
    assert ending.wait() == 0


# --- what it is ----------------------------------------------------------------------------------------------------


async def test_this_host_can_run_units(runtime: UnitRuntime) -> None:
    can = await runtime.capabilities()
    assert (can.why_not, can.why_not_freeze) == ("", "")
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    assert ("memory_mb" in can.limits) == ("memory" not in controllers)


async def test_an_agent_is_a_unit_that_systemctl_shows_by_its_name(daemon: Daemon) -> None:
    agent = new_id()
    pid = await started(daemon, agent, SLEEP)
    shown = show(agent, "MainPID", "Description", "Slice", "ActiveState", "Delegate", "ControlGroup")
    assert shown["MainPID"] == str(pid)
    assert shown["Description"] == f"Hive agent agent-{agent}"
    assert (shown["Slice"], shown["ActiveState"], shown["Delegate"]) == ("hive-agents.slice", "active", "yes")
    status = subprocess.run(["systemctl", "status", unit_of(agent)], capture_output=True, text=True, check=True).stdout
    print(status)
    assert f"Main PID: {pid} (sleep)" in status
    assert re.search(rf"agent\n.*{pid} sleep 1000", status), status


async def test_it_is_a_user_of_its_own_without_any_right(daemon: Daemon) -> None:
    agent = new_id()
    pid = await started(daemon, agent, SLEEP)
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    uid = str(71000 + int(agent[1:]))
    assert status["Uid"].split() == [uid] * 4
    assert status["Gid"].split() == [uid] * 4
    assert status["Groups"].strip() == ""
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


async def test_its_command_and_environment_arrive_exactly_as_written(daemon: Daemon) -> None:
    agent = new_id()
    odd = ["$HOME", "${PATH}", "%n%%", "a'b\"c", "two\nlines", "back\\slash", "", "é", "-- ; exit"]
    env = {"PLAIN": "1", "ODD": "a'b\"c\n$HOME\t\x1b%i\\", "EMPTY": ""}
    command = reporter("import sys\nfound = {'args': sys.argv[1:], 'env': dict(os.environ), 'cwd': os.getcwd()}")
    await started(daemon, agent, [*command, *odd], env=env)
    found = await report_of(agent)
    assert found["args"] == odd
    assert found["cwd"] == str(PATHS.home(agent))
    inherited = {name: value for name, value in os.environ.items() if name in ("LANG", "TZ")}
    assert set(found["env"]) - {"LC_CTYPE"} == {"PLAIN", "ODD", "EMPTY", "PATH", "HOME", "HIVE_MARK", *inherited}
    assert {name: found["env"][name] for name in env} == env


async def test_its_environment_is_shown_to_nobody_and_left_nowhere(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP, env={"OPENAI_API_KEY": "sesame-1234"})
    shown = subprocess.run(["systemctl", "show", "--all", unit_of(agent)], capture_output=True, text=True, check=True)
    assert "sesame" not in shown.stdout
    assert [path.name for path in (PATHS.runtime / "start").iterdir()] == ["root_step"]
    for path in Path("/run/systemd/transient").rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes()


async def test_what_it_prints_is_in_the_journal_under_its_name(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, ["sh", "-c", "echo one; echo two >&2; exec sleep 1000"])
    await systemd.sync_journal()
    text = await systemd.read_journal(unit_of(agent), lines=50)
    assert "one\ntwo" in text
    assert "two" in (await systemd.read_journal(unit_of(agent), lines=1))
    by_name = ["journalctl", "--quiet", "--output=cat", f"--identifier=agent-{agent}"]
    assert subprocess.run(by_name, capture_output=True, text=True, check=True).stdout == "one\ntwo\n"


# --- asleep and awake ----------------------------------------------------------------------------------------------


async def test_asleep_it_uses_no_cpu_and_awake_it_goes_on(daemon: Daemon) -> None:
    agent = new_id()
    pid = await started(daemon, agent, BURN)
    frozen = await daemon.client.freeze(agent, 1)
    await daemon.client.confirm(agent, 1)
    assert frozen.how == "cgroup"
    assert "frozen 1" in (group_of(agent) / "agent/cgroup.events").read_text()
    before = ticks(pid)
    await asyncio.sleep(0.5)
    assert ticks(pid) == before
    assert (await daemon.client.stat([agent]))[agent].state == "frozen"
    await daemon.client.thaw(agent)
    await until(lambda: ticks(pid) > before)
    assert (await daemon.client.stat([agent]))[agent].state == "running"


async def test_systemd_is_never_asked_to_freeze_it(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP)
    await asleep(daemon, agent)
    assert show(agent, "FreezerState", "ActiveState") == {"FreezerState": "running", "ActiveState": "active"}
    assert (group_of(agent) / "cgroup.freeze").read_text().strip() == "0"


async def test_it_can_neither_thaw_itself_nor_leave_the_group_it_is_frozen_by(daemon: Daemon) -> None:
    agent = new_id()
    group = group_of(agent)
    await started(
        daemon,
        agent,
        reporter(
            f"group = {str(group)!r}\n"
            "found['seen'] = sorted(os.listdir('/sys/fs/cgroup/hive.slice/hive-agents.slice'))\n"
            "found['top'] = sorted(os.listdir('/sys/fs/cgroup'))\n"
            "def tried(what, *args):\n"
            "    try: what(*args); return 'done'\n"
            "    except OSError as error: return type(error).__name__\n"
            "def write(path, text): open(path, 'w').write(text)\n"
            "found['leave'] = tried(write, group + '/cgroup.procs', '0')\n"
            "found['stay'] = tried(write, group + '/agent/cgroup.procs', '0')\n"
            "found['thaw'] = tried(write, group + '/agent/cgroup.freeze', '0')\n"
            "found['make'] = tried(os.mkdir, group + '/agent/mine')\n"
            "found['other'] = tried(os.mkdir, '/sys/fs/cgroup/mine')\n"
        ),
    )
    found = await report_of(agent)
    assert found["seen"] == [unit_of(agent)], "other agents' groups are nobody's business"
    assert found["top"] == ["hive.slice"]
    assert {found[name] for name in ("leave", "stay", "thaw", "make")} == {"PermissionError"}
    assert found["other"] in ("PermissionError", "OSError")


async def test_a_daemon_reload_changes_nothing_for_those_awake_and_asleep(daemon: Daemon) -> None:
    awake, sleeper = new_id(), new_id()
    pid, sleeping = await started(daemon, awake, BURN), await started(daemon, sleeper, POLITE)
    await until((PATHS.home(sleeper) / "ready").exists)
    await asleep(daemon, sleeper)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    said = subprocess.run(["journalctl", "--boot", "--output=cat"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in said.splitlines() if line.startswith("/run/systemd/transient/hive-agent@")]
    assert show(awake, "MainPID") == {"MainPID": str(pid)}
    assert show(sleeper, "MainPID", "ActiveState") == {"MainPID": str(sleeping), "ActiveState": "active"}
    stats = await daemon.client.stat([awake, sleeper])
    assert (stats[awake].state, stats[sleeper].state) == ("running", "frozen")
    await asleep(daemon, awake)
    assert (await daemon.client.stop(sleeper, grace_s=5)).exit_code == 3


# --- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "exit 127"], 127),
        (["sh", "-c", "sleep 0.2; exit 9"], 9),
        (["sh", "-c", "sleep 0.2; kill -15 $$"], 143),
    ],
)
async def test_its_exit_code_is_told_and_its_name_is_free_again(daemon: Daemon, command: list[str], code: int) -> None:
    agent = new_id()
    for times in (1, 2):
        await started(daemon, agent, command)
        await until(lambda times=times: len(daemon.ended) == times)  # type: ignore[misc]
        assert daemon.ended[-1].agent == agent
        assert daemon.ended[-1].exit_code == code
        assert show(agent, "LoadState") == {"LoadState": "not-found"}
        assert not group_of(agent).exists()


async def test_stop_lets_it_say_goodbye_asleep_or_awake(daemon: Daemon) -> None:
    for sleeps in (False, True):
        agent = new_id()
        await started(daemon, agent, POLITE)
        await until((PATHS.home(agent) / "ready").exists)
        if sleeps:
            await asleep(daemon, agent)
        assert (await daemon.client.stop(agent, grace_s=10)).exit_code == 3
        assert (PATHS.home(agent) / "bye").exists()


async def test_one_that_ignores_sigterm_is_killed_with_all_its_children(daemon: Daemon) -> None:
    agent = new_id()
    stubborn = "trap '' TERM; (trap '' TERM; setsid sleep 1000) & echo $! >child; while :; do sleep 0.1; done"
    await started(daemon, agent, ["sh", "-c", stubborn])
    await until(lambda: (PATHS.home(agent) / "child").exists() and (PATHS.home(agent) / "child").read_text().strip())
    child = int((PATHS.home(agent) / "child").read_text())
    assert (await daemon.client.stop(agent, grace_s=0.3)).exit_code == 137
    assert not alive(child)


@pytest.mark.parametrize("reloaded", [False, True])
async def test_whoever_stops_a_sleeper_by_hand_thaws_it_first(daemon: Daemon, reloaded: bool) -> None:
    """systemd would send SIGTERM to frozen processes and kill them 10 s later; at shutdown too."""
    agent = new_id()
    await started(daemon, agent, POLITE)
    await until((PATHS.home(agent) / "ready").exists)
    await asleep(daemon, agent)
    if reloaded:
        subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "stop", unit_of(agent)], check=True)
    assert (PATHS.home(agent) / "bye").exists()
    await until(lambda: daemon.ended)


async def test_a_program_that_cannot_be_executed_is_told_why(daemon: Daemon) -> None:
    hidden, plain = Path("/root/hidden"), Path("/usr/local/plain")
    for path in (hidden, plain):
        path.write_text("#!/bin/sh\nsleep 1000\n")
    hidden.chmod(0o755)
    plain.chmod(0o644)
    for command, error, words in (
        ("no-such-program", NotFound, "no such command: no-such-program"),
        (str(hidden), (NotFound, NotPermitted), str(hidden)),
        (str(plain), NotPermitted, "may not execute"),
    ):
        agent = new_id()
        await daemon.client.define(agent, spec_of(agent, [command]))
        with pytest.raises(error, match=words):
            await daemon.client.start(agent)
        assert show(agent, "LoadState") == {"LoadState": "not-found"}
        assert (await daemon.client.stat([agent]))[agent].state == "gone"


async def test_a_unit_that_cannot_be_made_says_why(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = new_id()
    monkeypatch.setattr("hive.runtimes.unit_plan._ALWAYS", [("Type", "exec"), ("MemoryMax", "much")])
    await daemon.client.define(agent, spec_of(agent, SLEEP))
    with pytest.raises(HiveError, match="MemoryMax"):
        await daemon.client.start(agent)
    assert not group_of(agent).exists()


async def test_a_second_start_is_refused(daemon: Daemon, runtime: UnitRuntime) -> None:
    agent = new_id()
    pid = await started(daemon, agent, SLEEP)
    with pytest.raises(WrongState):
        await daemon.client.start(agent)
    with pytest.raises(WrongState, match="processes are left"):
        await runtime.start(agent, spec_of(agent, SLEEP), mark="HIVE_MARK=x")
    assert alive(pid), "neither did any harm to the one that runs"


# --- across helpers ------------------------------------------------------------------------------------------------


async def test_it_prints_on_when_the_helper_is_killed_and_the_next_one_takes_it_over(
    helper_process: Callable[[], subprocess.Popen[bytes]], connect: Connect
) -> None:
    first = helper_process()
    daemon = await connect()
    agent, sleeper = new_id(), new_id()
    chatty = [PYTHON, "-c", "import time\nfor n in range(10**9): print(n, 'x' * 990, flush=True); time.sleep(0.001)"]
    pid, sleeping = await started(daemon, agent, chatty), await started(daemon, sleeper, SLEEP)
    await asleep(daemon, sleeper)
    first.kill()
    first.wait()

    async def last_line() -> int:
        await systemd.sync_journal()
        return int((await systemd.read_journal(unit_of(agent), lines=1)).split()[0])

    before = await last_line()
    while await last_line() == before:
        await asyncio.sleep(0.01)
    assert (alive(pid), is_stopped(sleeping)) == (True, False), "cgroup.freeze is no SIGSTOP"
    helper_process()
    await until(lambda: daemon.connected == 2)
    stats = await daemon.client.reconcile({sleeper: 1})
    assert (stats[agent].state, stats[agent].pid) == ("running", pid)
    assert (stats[sleeper].state, stats[sleeper].pid) == ("frozen", sleeping)
    await daemon.client.thaw(sleeper)
    assert (await daemon.client.stop(sleeper, grace_s=5)).exit_code == 143
    assert (await daemon.client.stop(agent, grace_s=5)).exit_code == 143, "systemd knows, though the parent changed"


async def test_one_whose_helper_was_killed_before_it_wrote_it_down_is_found(runtime: UnitRuntime) -> None:
    agent, unknown = new_id(), new_id()
    spec = spec_of(agent, SLEEP)
    for directory in (PATHS.home(agent).parent, PATHS.agent_socket(agent).parent):
        directory.mkdir(parents=True, exist_ok=True)
    await runtime.prepare(agent, spec)
    running = await runtime.start(agent, spec, mark="HIVE_MARK=x")
    found = await runtime.find(agent, spec, ProcessTable(), mark="HIVE_MARK=x")
    assert found is not None
    assert (found.run.main, found.run.leaf) == (running.run.main, running.run.leaf)
    assert await runtime.find(unknown, spec_of(unknown, SLEEP), ProcessTable(), mark="HIVE_MARK=y") is None
    assert await found.kill()
    running.close()
    assert await found.reap() == 137
    found.close()


async def test_what_ended_while_no_helper_was_there_leaves_its_name_free(
    helper_process: Callable[[], subprocess.Popen[bytes]], connect: Connect
) -> None:
    first = helper_process()
    daemon = await connect()
    agent, orphaned = new_id(), new_id()
    await started(daemon, agent, ["sh", "-c", "while [ ! -e end ]; do sleep 0.01; done; exit 4"])
    await started(daemon, orphaned, ["sh", "-c", "setsid sleep 1000 & while [ ! -e end ]; do sleep 0.01; done"])
    first.kill()
    first.wait()
    for name in (agent, orphaned):
        (PATHS.home(name) / "end").touch()
    await until(lambda: show(agent, "ActiveState")["ActiveState"] == "failed")
    await until(lambda: show(orphaned, "SubState")["SubState"] == "exited")
    helper_process()
    await until(lambda: daemon.connected == 2)
    assert {row.state for row in (await daemon.client.reconcile({})).values()} == {"gone"}
    assert not any(group_of(name).exists() for name in (agent, orphaned))
    (PATHS.home(agent) / "end").unlink()
    await daemon.client.start(agent)


async def test_a_frozen_unit_nobody_knows_is_thawed_and_named(daemon: Daemon, runtime: UnitRuntime) -> None:
    agent, known = new_id(), new_id()
    for name in (agent, known):
        await started(daemon, name, SLEEP)
        await asleep(daemon, name)
    assert await runtime.thaw_strays({known}) == [agent]
    await until(lambda: "frozen 0" in (group_of(agent) / "agent/cgroup.events").read_text())
    assert "frozen 1" in (group_of(known) / "agent/cgroup.events").read_text()
