"""`hive status` where no daemon answers: it says what is so all the same, and what to type next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.cli import status
from hive.cli.main import main
from hive.conditions import TABLE, FoundCondition, Where, conditions_in, fix_of
from hive.doctor import offline_status
from hive.doctor.checks.target import Subject, TargetKind
from hive.doctor.offline_status import (
    DOWN,
    HANGS,
    UP,
    OfflineStatus,
    RecordedStatus,
    ServicePart,
    UnitStatus,
    conditions_of,
)
from hive.files import up_flags
from hive.host.process import identify
from hive.link.specs import SandboxSpec
from hive.paths import runtime_dir
from hive.runtimes.runtime import Run
from hive.sandbox.table import AgentRecords, Record
from hive.settings.table import Paths
from hive.store import audit
from hive.store.audit import AuditRecord
from hive.store.database import Database, plan_of
from tests.nobody import run_as_nobody

Hive = Any
"""conftest.Hive: test modules import no siblings."""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of a `hive up` that is not running, with a database."""
    monkeypatch.delenv("HIVE_SOCKET", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)
    directory = tmp_path / "state"
    directory.mkdir()
    Database.open(directory / "hive.db").close()
    return directory


@pytest.fixture
def runtime(state: Path) -> Iterator[Path]:
    """The path at which its sockets would be."""
    path = runtime_dir(state, os.geteuid(), os.environ)
    path.mkdir(parents=True, mode=0o700)
    yield path
    for one in path.iterdir():
        one.unlink()
    path.rmdir()


def add(state: Path, *statuses: str) -> None:
    """Agents with these, and something that happened to the last."""
    columns = "id, name, runtime, spec, status, depth, depth_goal, generation, reason, since, tenant, restart"
    with sqlite3.connect(state / "hive.db") as conn:
        for number, one in enumerate(statuses):
            values = (f"a{number}", f"n{number}", "process", "{}", one, "awake", "awake", 1, "", 0.0, "default", "no")
            conn.execute(
                f"INSERT INTO agents ({columns}, token_serial, created_at) VALUES ({', '.join('?' * 12)}, 1, 0)", values
            )
        detail = {"name": "x\x1b[2J"}
        row = AuditRecord(at=1.7e9, actor="idle", act="agent.paused", target="a0", origin="hive", detail=detail)
        audit.append(conn, row)
    conn.close()


def listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def last_lines(text: str) -> list[str]:
    """The fault and what to type."""
    return text.rstrip("\n").partition("\n\n")[2].splitlines()


# --- the screen ----------------------------------------------------------------------------------------------------


def test_a_hive_that_does_not_run_is_told_with_what_its_database_says(no_daemon: Hive, state: Path) -> None:
    add(state, "running", "paused", "running")
    said = no_daemon("status", "--state-dir", str(state))
    assert (said.code, said.err) == (5, "")
    assert f"Socket: {runtime_dir(state, os.geteuid(), os.environ)}/hive.sock: there is no such socket\n" in said.out
    assert "Agents: 1 paused, 2 running, as the database has them; last " in said.out
    assert " ago: agent.paused x\\x1b[2J\n" in said.out
    assert last_lines(said.out) == ["this Hive does not run  [not_running]", f"    hive up --state-dir {state}"]
    assert len(said.out.splitlines()) <= 24


def note(state: Path, number: int, pid: int) -> None:
    """Writes what the helper notes of an agent whose main process it has started."""
    main = identify(pid)
    assert main is not None
    spec = SandboxSpec(name=f"n{number}", command=["/bin/sleep"], env={}, home="/h", log="/l")
    records = AgentRecords.load(Paths(state, state).sandbox_table)
    records.records[f"a{number}"] = Record(spec=spec, run=Run(main=main, leaf=None, since=0.0))
    records.save(f"a{number}")


def test_agents_that_live_on_are_told_as_their_processes_are(no_daemon: Hive, state: Path) -> None:
    """After a kill -9 of `hive up`, or a machine that went down, the last record of each was told as what it is. Doctor
    said that no agent's process is left, and not that no Hive answers; the hint had none of the flags."""
    up_flags.keep(state / up_flags.NAME, " --demo --port 4")
    again = f"hive up --demo --port 4 --state-dir {state}"
    add(state, "running", "paused", "paused", "paused", "stopped")
    with contextlib.ExitStack() as ends:
        processes = [subprocess.Popen(["/bin/sleep", "600"]) for _ in range(3)]
        for process in processes:
            ends.callback(process.wait)
            ends.callback(process.kill)
        for number, process in enumerate(processes):
            note(state, number, process.pid)
        processes[0].kill()
        processes[0].wait()
        processes[1].send_signal(signal.SIGSTOP)
        os.waitpid(processes[1].pid, os.WUNTRACED)
        said = no_daemon("status", "--state-dir", str(state))
        assert "Agents: 2 ended, 1 paused, 1 running, 1 stopped, without a Hive; last " in said.out
        living = "2 agents live on, and no Hive answers that manages them"
        assert last_lines(said.out) == [
            *("this Hive does not run: 2 agents ended with it  [not_running]", f"    {again}"),
            *(f"{living}  [agents_without_hive]", f"    {again}"),
        ]
        checked = no_daemon("doctor", "hive.answers", "sandbox.leftovers", "--state-dir", str(state), "--json")
        assert [(one["status"], one["code"], one["fix"]) for one in checked.json["checks"]] == [
            ("fail", "not_running", again),
            ("warn", "agents_without_hive", again),
        ]
        assert (checked.code, checked.json["checks"][1]["reason"]) == (1, living)
        assert no_daemon("status", "--state-dir", str(state), "--json").json["agents"]["ended"] == 2


def test_the_same_facts_are_there_for_a_program(no_daemon: Hive, state: Path) -> None:
    add(state, "running")
    said = no_daemon("status", "--state-dir", str(state), "--json")
    answer = said.json
    assert (said.code, said.err) == (5, "")
    assert (answer["schema"], answer["version"], answer["status"], answer["code"]) == (
        *("status", 1, "down", "dependency_down"),
    )
    assert (answer["agents"], answer["last_event_at"], answer["kind"]) == ({"running": 1}, 1.7e9, "hive up")
    assert answer["next"] == [{"problem": "this Hive does not run", "command": f"hive up --state-dir {state}"}]
    [condition] = answer["conditions"]
    assert (condition["code"], condition["severity"]) == ("not_running", "error")
    assert (condition["text"], condition["fix"]) == (answer["problems"][0], answer["next"][0]["command"])
    assert answer["parts"].keys() == {"proxy", "helper", "redis"}
    assert (answer["database"], answer["state_dir"]) == (str(state / "hive.db"), str(state))


def test_parts_that_still_answer_are_told(no_daemon: Hive, state: Path, runtime: Path, redis_server: Any) -> None:
    (runtime / "redis.sock").symlink_to(redis_server.socket)
    with listen(runtime / "sandbox.sock"):
        answer = no_daemon("status", "--state-dir", str(state), "--json").json
    assert answer["parts"] == {
        "proxy": {"state": "down", "why": "there is no such socket"},
        "helper": {"state": "up", "why": ""},
        "redis": {"state": "up", "why": ""},
    }


def test_a_daemon_that_hangs_is_exit_7(
    no_daemon: Hive, state: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "ANSWER_S", 0.1)
    with listen(runtime / "hive.sock"):
        said = no_daemon("status", "--state-dir", str(state))
    assert said.code == 7
    assert "hive.sock: somebody listens there\n" in said.out
    assert "Daemon: hangs\n" in said.out
    assert last_lines(said.out)[0] == "the daemon listens, and does not answer  [daemon_hangs]"


def test_a_hive_up_that_runs_without_its_daemon_is_told_with_its_pid(no_daemon: Hive, state: Path) -> None:
    with (state / "up.lock").open("w") as held:
        held.write("4711\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        said = no_daemon("status", "--state-dir", str(state))
    lines = last_lines(said.out)
    assert " ".join(lines[:2]).startswith("hive up (pid 4711) runs, and its daemon does not: it is started again")
    assert f"    hive logs daemon --state-dir {state}" in lines
    assert f"    hive logs redis --state-dir {state}" in lines


def test_a_restore_that_was_cut_short_is_named_first(no_daemon: Hive, state: Path) -> None:
    plan_of(state / "hive.db").write_text("{}")
    said = no_daemon("status", "--state-dir", str(state))
    assert "Agents: unknown: a restore of it was cut short\n" in said.out
    lines = last_lines(said.out)
    assert lines[lines.index(f"    hive restore --finish --state-dir {state}") + 1 :] == [
        "this Hive does not run  [not_running]",
        f"    hive up --state-dir {state}",
    ]


def test_a_damaged_database_is_told_and_nothing_is_written(no_daemon: Hive, state: Path) -> None:
    (state / "hive.db").write_bytes(b"no database" * 1000)
    before = sorted(state.iterdir())
    said = no_daemon("status", "--state-dir", str(state))
    assert "is damaged" in said.out
    told = f"    hive restore FILE --state-dir {state}  # or restart: agents and tokens come from its second copy"
    assert told in last_lines(said.out)
    assert sorted(state.iterdir()) == before


def test_where_there_is_no_hive_at_all_it_says_how_one_begins(
    no_daemon: Hive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HIVE_SOCKET")
    monkeypatch.setattr("hive.paths.APPLIANCE_RUNTIME", tmp_path / "run")
    monkeypatch.setattr(offline_status, "find", lambda **_: Subject(kind=TargetKind.NONE))
    said = no_daemon("status")
    assert said.code == 5
    assert last_lines(said.out) == ["no Hive runs here, and none is installed  [no_hive]", "    hive up --demo"]


@pytest.mark.parametrize("words", ["['--socket', path], ''", "[], path"], ids=["--socket", "HIVE_SOCKET"])
def test_who_may_not_ask_is_exit_4_and_told_so(words: str) -> None:
    """With HIVE_SOCKET the next command named nothing, and sudo drops that variable: it asked another Hive."""
    out = run_as_nobody(
        "import os, socket, subprocess, sys, tempfile\n"
        "from hive.cli.main import main\n"
        "directory = tempfile.mkdtemp()\n"
        "path = f'{directory}/hive.sock'\n"
        "sock = socket.socket(socket.AF_UNIX); sock.bind(path); sock.listen(); os.chmod(path, 0)\n"
        f"words, os.environ['HIVE_SOCKET'] = {words}\n"
        "print(main(['status', *words]))\n"
        "os.unlink(path); os.rmdir(directory)\n"
    )
    assert "this user may not use it" in out
    assert "    sudo hive status --socket " in out
    assert out.splitlines()[-1] == "4"


# --- what to type --------------------------------------------------------------------------------------------------

UNITS = [
    UnitStatus("hive-proxy.service", "active", ""),
    UnitStatus("hive-daemon.service", "failed", "exit-code"),
    UnitStatus("hive-redis.service", "inactive", ""),
]
BOX = Where(installed=True)


def seen(**facts: Any) -> OfflineStatus:
    return OfflineStatus(tried={}, **{"kind": TargetKind.APPLIANCE, "state": Path("/s"), **facts})


def told(seen: OfflineStatus, code: str = "dependency_down", where: Where = BOX) -> list[tuple[str, str]]:
    return [(one.at(where).text, one.at(where).fix) for one in conditions_of(seen, code)]


def test_of_an_installed_hive_each_unit_that_does_not_run_is_named() -> None:
    assert told(seen(units=UNITS)) == [
        ("hive-daemon.service is failed (exit-code)", "systemctl status hive-daemon"),
        ("hive-redis.service is inactive", "systemctl status hive-redis"),
    ]


def test_an_installed_hive_that_was_stopped_is_started_by_one_command_and_what_failed_before_is_told() -> None:
    stopped = [unit._replace(active="inactive", why="") for unit in UNITS]
    stopped[0] = UnitStatus("hive-proxy.service", "failed", "resources")
    assert told(seen(units=stopped)) == [
        ("this Hive does not run: hive.target is stopped", "sudo systemctl start hive.target"),
        ("hive-proxy.service is failed (resources)", "systemctl status hive-proxy"),
    ]
    stopped[0] = UnitStatus("hive-proxy.service", "active", "")
    hidden = RecordedStatus(Path("/s/hive.db"), why="this user may not read it", may_not=True)
    assert told(seen(units=stopped, recorded=hidden)) == [
        ("hive-daemon.service is inactive", "sudo systemctl start hive.target"),
    ]


def test_a_link_to_a_socket_that_is_gone_is_no_socket_that_is_closed_to_this_user(
    no_daemon: Hive, state: Path, runtime: Path
) -> None:
    """Of a stopped appliance root was told that he may not use /run/hive/hive.sock."""
    (runtime / "hive.sock").symlink_to("daemon/hive.sock")
    assert "hive.sock: there is no such socket\n" in no_daemon("status", "--state-dir", str(state)).out


def test_a_database_this_user_may_not_read_is_no_problem_and_root_sees_more() -> None:
    hidden = RecordedStatus(Path("/s/hive.db"), why="this user may not read it", may_not=True)
    found = told(seen(kind=TargetKind.UP, recorded=hidden), where=Where())
    assert [fix for _, fix in found] == ["sudo hive status"]


PARTS = [
    ServicePart("proxy", DOWN, HANGS),
    ServicePart("helper", DOWN, "x"),
    ServicePart("redis", DOWN, "x", "/r"),
    ServicePart("proxy", UP),
]
DATABASE = Path("/s/hive.db")
STANDINGS = (
    (seen(kind=TargetKind.NONE), "no_hive"),
    (seen(is_missing=True), "no_state_directory"),
    (seen(units=UNITS), "unit_not_active"),
    (seen(units=[UNITS[0], UNITS[1]._replace(active="inactive")]), "daemon_stopped"),
    (seen(kind=TargetKind.UP, held_by=7, parts=PARTS), "daemon_ended", "part_down", "part_down", "redis_down"),
    (seen(kind=TargetKind.UP, recorded=RecordedStatus(DATABASE, why="x")), "database_unreadable", "not_running"),
    (
        seen(kind=TargetKind.UP, recorded=RecordedStatus(DATABASE, why="x", damage="x")),
        "database_damaged",
        "not_running",
    ),
    (seen(kind=TargetKind.UP, recorded=RecordedStatus(DATABASE, why="x", may_not=True)), "not_running_as_seen"),
    (
        seen(kind=TargetKind.UP, recorded=RecordedStatus(DATABASE, why="x", is_cut_short=True), free_bytes=0),
        *("restore_cut_short", "disk_nearly_full", "not_running"),
    ),
)


@pytest.mark.parametrize(("standing", "codes"), [(one, codes) for one, *codes in STANDINGS])
def test_each_thing_that_is_seen_has_a_code(standing: OfflineStatus, codes: list[str]) -> None:
    found = [one.code for one in conditions_of(standing, "dependency_down")]
    assert found == codes or codes == ["unit_not_active"] == sorted({*found})


def test_who_may_not_ask_and_a_daemon_that_hangs_have_one_too() -> None:
    assert [one.code for one in conditions_of(seen(), "not_permitted")] == ["daemon_refuses"]
    assert [one.code for one in conditions_of(seen(), "timeout")] == ["daemon_hangs"]


WHERES = (Where(), BOX, Where(composed=True), Where(option=" --state-dir /s", files=" --state-dir /s"))
FACTS = {"path": "/s", "at": "/r", "service": "redis", "name": "hive-redis", "template": "lg", "agent": "crash"}


def every_command() -> set[str]:
    """Of what the daemon, and status without it, may find."""
    codes = [*TABLE][: [*TABLE].index("shown_from_database") + 1]
    return {fix_of(code, FACTS, where).partition("  #")[0] for code in codes for where in WHERES}


@pytest.mark.parametrize("command", sorted(every_command()))
def test_every_command_that_is_named_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.removeprefix("sudo "))
    if words[0] == "hive":
        verbs = [word for word in words[1:] if not word.startswith(("-", "/"))]
        assert main([*verbs[: 2 if verbs[0] in ("agent", "backend", "config", "template") else 1], "--help"]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words if word.startswith("--"))
    elif words[0] == "systemctl":
        unit = words[2] if "." in words[2] else f"{words[2]}.service"
        assert (ROOT / "systemd" / unit).exists()
    elif words[0] == "docker":
        services = [line for line in (ROOT / "conf/compose.yaml").read_text().splitlines() if line.startswith("  ")]
        # Nothing of Hive's in containers needs a helper, so none is ever missed.
        assert words[2] == "up" or words[3] == "sandbox" or f"  {words[3]}:" in services
    else:
        assert words[:3] == ["df", "-h", "/s;"]


def test_a_daemon_that_is_older_than_codes_is_understood() -> None:
    assert [(one.text, one.fix) for one in conditions_in({"problems": ["it is so"]})] == [("it is so", "hive doctor")]


def test_a_code_that_this_command_does_not_know_is_told_as_the_daemon_tells_it() -> None:
    newer: dict[str, Any] = {
        "code": "newer",
        "severity": "error",
        "text": "it is so",
        "fix": "do it",
        "facts": {"why": "because"},
    }
    [one] = conditions_in({"conditions": [newer]})
    assert one.at(BOX) == FoundCondition(**newer)
