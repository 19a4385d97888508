"""`hive status` where no daemon answers: it says what is so all the same, and what to type next."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nobody import run_as_nobody

from hive.appliance import standing
from hive.appliance.checks.subject import Kind
from hive.appliance.standing import DOWN, HANGS, UP, Part, Recorded, Standing, Unit
from hive.cli import status
from hive.cli.main import main
from hive.cli.next_command import Problem, Where, about, of_disk, of_silence
from hive.control.switching import NONE_INSTALLED
from hive.places import runtime_dir
from hive.store import audit
from hive.store.audit import AuditRow
from hive.store.database import Database, plan_of

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
    """Where its sockets would be."""
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
        row = AuditRow(at=1.7e9, actor="idle", act="agent.paused", target="a0", origin="hive", detail=detail)
        audit.append(conn, row)
    conn.close()


def listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def last_lines(text: str) -> list[str]:
    """What is wrong and what to type."""
    return text.rstrip("\n").partition("\n\n")[2].splitlines()


# --- the screen ----------------------------------------------------------------------------------------------------


def test_a_hive_that_does_not_run_is_told_with_what_its_database_says(no_daemon: Hive, state: Path) -> None:
    add(state, "running", "paused", "running")
    said = no_daemon("status", "--state-dir", str(state))
    assert (said.code, said.err) == (5, "")
    assert f"Socket: {runtime_dir(state, os.geteuid(), os.environ)}/hive.sock: there is no such socket\n" in said.out
    assert "Agents: 1 paused, 2 running, as the database has them; last " in said.out
    assert " ago: agent.paused x\\x1b[2J\n" in said.out
    assert last_lines(said.out) == ["this Hive does not run", f"    hive up --state-dir {state}"]
    assert len(said.out.splitlines()) <= 24


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
    assert last_lines(said.out)[0] == "the daemon listens, and does not answer"


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
        "this Hive does not run",
        f"    hive up --state-dir {state}",
    ]


def test_a_damaged_database_is_told_and_nothing_is_written(no_daemon: Hive, state: Path) -> None:
    (state / "hive.db").write_bytes(b"no database" * 1000)
    before = sorted(state.iterdir())
    said = no_daemon("status", "--state-dir", str(state))
    assert "is damaged" in said.out
    assert f"    hive doctor sqlite.integrity --state-dir {state}" in last_lines(said.out)
    assert sorted(state.iterdir()) == before


def test_where_there_is_no_hive_at_all_it_says_how_one_begins(
    no_daemon: Hive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HIVE_SOCKET")
    monkeypatch.setattr("hive.places.APPLIANCE_RUNTIME", tmp_path / "run")
    monkeypatch.setattr(standing, "find", lambda **_: standing.Subject(kind=Kind.NONE))
    said = no_daemon("status")
    assert said.code == 5
    assert last_lines(said.out) == ["no Hive runs here, and none is installed", "    hive up --demo"]


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
    Unit("hive-proxy.service", "active", ""),
    Unit("hive-daemon.service", "failed", "exit-code"),
    Unit("hive-redis.service", "inactive", ""),
]
BOX = Where(installed=True)


def seen(**facts: Any) -> Standing:
    return Standing(tried={}, **{"kind": Kind.APPLIANCE, "state": Path("/s"), **facts})


def test_of_an_installed_hive_each_unit_that_does_not_run_is_named() -> None:
    assert of_silence(seen(units=UNITS), code="dependency_down", where=BOX) == [
        Problem("hive-daemon.service is failed (exit-code)", "systemctl status hive-daemon"),
        Problem("hive-redis.service is inactive", "systemctl status hive-redis"),
    ]


def test_an_installed_hive_that_was_stopped_is_started_by_one_command_and_what_failed_before_is_told() -> None:
    stopped = [unit._replace(active="inactive", why="") for unit in UNITS]
    stopped[0] = Unit("hive-proxy.service", "failed", "resources")
    assert of_silence(seen(units=stopped), code="dependency_down", where=BOX) == [
        Problem("this Hive does not run", "sudo systemctl start hive.target"),
        Problem("hive-proxy.service is failed (resources)", "systemctl status hive-proxy"),
    ]
    stopped[0] = Unit("hive-proxy.service", "active", "")
    hidden = Recorded(Path("/s/hive.db"), why="this user may not read it", may_not=True)
    assert of_silence(seen(units=stopped, recorded=hidden), code="dependency_down", where=BOX) == [
        Problem("hive-daemon.service is inactive", "sudo systemctl start hive.target"),
    ]


def test_a_link_to_a_socket_that_is_gone_is_no_socket_that_is_closed_to_this_user(
    no_daemon: Hive, state: Path, runtime: Path
) -> None:
    """Of a stopped appliance root was told that he may not use /run/hive/hive.sock."""
    (runtime / "hive.sock").symlink_to("daemon/hive.sock")
    assert "hive.sock: there is no such socket\n" in no_daemon("status", "--state-dir", str(state)).out


def test_a_database_this_user_may_not_read_is_no_problem_and_root_sees_more() -> None:
    hidden = Recorded(Path("/s/hive.db"), why="this user may not read it", may_not=True)
    found = of_silence(seen(kind=Kind.UP, recorded=hidden), code="dependency_down", where=Where())
    assert [one.command for one in found] == ["sudo hive status"]


SENTENCES = (
    "the proxy is not connected: no request is served, nobody is put to sleep",
    "the helper is not connected: no agent can be started, paused or woken",
    "Redis at /r/redis.sock is down: requests are served, their usage waits",
    "Redis at redis:6379 is down (WRONGPASS): requests are served, their usage waits",
    "usage waits, it cannot be written: the disk of /s/hive.db is full",
    "usage waits, it cannot be written: another program keeps /s/hive.db locked",
    "switching to vllm: requests for the model wait",
    "no inference server was started: vllm: exited with 1",
    f"no inference server was started: {NONE_INSTALLED}",
    "the backend does not answer",
)
HEALTHS: tuple[dict[str, Any], ...] = (
    {"state_dir": "/s", "redis": {"at": "/r/redis.sock"}, "backend": {"kind": "demo"}},
    {"state_dir": "/s", "redis": {"at": "redis:6379"}, "backend": {"kind": "vllm"}},
)
WHERES = (Where(), BOX, Where(composed=True), Where(option=" --state-dir /s", files=" --state-dir /s"))


def every_command() -> set[str]:
    found = {about(text, health, where) for text in SENTENCES for health in HEALTHS for where in WHERES}
    parts = [Part("proxy", DOWN, HANGS), Part("helper", DOWN, "x"), Part("redis", DOWN, "x"), Part("proxy", UP)]
    path = Path("/s/hive.db")
    standings = [
        seen(kind=Kind.NONE),
        seen(units=UNITS),
        seen(kind=Kind.UP, held_by=7, parts=parts),
        *(seen(kind=Kind.UP, recorded=Recorded(path, why="x", **more)) for more in ({}, {"is_damaged": True})),
        seen(kind=Kind.UP, recorded=Recorded(path, why="x", is_cut_short=True), free_bytes=0),
    ]
    codes = ("dependency_down", "timeout", "not_permitted")
    told = [of_silence(one, code=code, where=where) for one in standings for code in codes for where in WHERES]
    return found | {problem.command for problems in told for problem in problems}


@pytest.mark.parametrize("command", sorted(every_command()))
def test_every_command_that_is_named_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.removeprefix("sudo "))
    if words[0] == "hive":
        verbs = [word for word in words[1:] if not word.startswith(("-", "/"))]
        assert main([*verbs[: 2 if verbs[0] == "backend" else 1], "--help"]) == 0
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
        assert words == ["df", "-h", "/s"]


def test_what_no_table_knows_is_for_the_doctor() -> None:
    assert about("something new", {}, Where()) == "hive doctor"
    assert all(about(text, health, WHERES[0]) != "hive doctor" for text in SENTENCES for health in HEALTHS)


def test_a_disk_that_is_full_degrades_a_hive_that_has_not_noticed_yet(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_free_bytes", lambda _: 5 << 20)
    answer = json.loads(hive("status", "--json").out)
    assert answer["status"] == "degraded"
    assert answer["next"][-1] == of_disk("/s", 5 << 20)[0]._asdict()
    assert answer["problems"] == [one["problem"] for one in answer["next"]]
