"""Commands, ports, banner, summary: what `hive up` decides before it does anything."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import BackendInfo, BackendKind, Isolation
from hive.errors import ConfigError, NotPermitted
from hive.files import up_flags
from hive.files.ports import Ports, Remembered, choose_ports, recall, remember
from hive.settings.table import Paths
from hive.up import directories, services
from hive.up.backoff import FIRST_S, LONGEST_S, STEADY_S, next_delay_s
from hive.up.banner import banner
from hive.up.supervisor import summary
from hive.up.table import cells, plain_table

PATHS = Paths(Path("/state"), Path("/run/x"))
HEALTH = {
    "version": "0.1.0",
    "isolation": "uid",
    "freezer": "signal",
    "limits": "not enforced",
    "proxy": {"connected": True, "port": 11436, "ingress_port": 8480},
    "api": {"listen": "127.0.0.1", "port": 3001},
    "backend": {"kind": "demo", "label": "demo backend (canned text, no model)", "version": "1"},
}


def plan(backend: BackendInfo | None) -> services.UpPlan:
    return services.UpPlan(paths=PATHS, config=None, isolation=Isolation.NONE, backend=backend, watch_fd=7)


@given(st.lists(st.floats(0, 100), max_size=30))
def test_the_back_off_stays_between_its_bounds_and_starts_over_after_a_steady_life(lives: list[float]) -> None:
    delay: float | None = None
    for lived_s in lives:
        delay = next_delay_s(delay, lived_s=lived_s)
        assert FIRST_S <= delay <= LONGEST_S
        assert lived_s < STEADY_S or delay == FIRST_S


def test_redis_listens_on_no_port_keeps_nothing_and_evicts_nothing() -> None:
    command = services.redis_command(PATHS)
    pairs = dict(zip(command[1::2], command[2::2], strict=True))
    assert pairs["--port"] == "0"
    assert pairs["--save"] == ""
    assert pairs["--appendonly"] == "no"
    assert pairs["--maxmemory-policy"] == "noeviction"
    assert pairs["--unixsocketperm"] == "700"


@pytest.mark.parametrize(
    ("backend", "argument"),
    [
        (None, "demo=/run/x/demo.sock"),
        (BackendInfo(kind=BackendKind.OLLAMA, address="127.0.0.1:11434"), "ollama=127.0.0.1:11434"),
        (BackendInfo(kind=BackendKind.LLAMA, address="/run/l.sock"), "llama=/run/l.sock"),
    ],
)
def test_the_daemon_is_told_the_backend(backend: BackendInfo | None, argument: str) -> None:
    command = services.daemon_command(plan(backend), api_port=3000)
    assert command[command.index("--backend") + 1] == argument


def test_ports_move_only_the_first_time() -> None:
    assert "--move-ports" in services.proxy_command(plan(None), Ports(1, 2), move=True)
    assert "--move-ports" not in services.proxy_command(plan(None), Ports(1, 2), move=False)


def test_every_service_watches_the_pipe() -> None:
    commands = [
        services.sandbox_command(plan(None)),
        services.daemon_command(plan(None), api_port=3000),
        services.proxy_command(plan(None), Ports(1, 2), move=True),
        services.demo_backend_command(plan(None)),
    ]
    assert all(command[command.index("--watch-fd") + 1] == "7" for command in commands)


def test_ports_are_remembered_until_others_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    assert recall(path) is None
    before = Remembered(asked=Ports(11435, 8480), got=Ports(11436, 8481))
    remember(path, before)
    assert recall(path) == before
    assert choose_ports(Ports(11435, 8480), recall(path)) == Ports(11436, 8481)
    assert choose_ports(Ports(11435, 9000), recall(path)) == Ports(11435, 9000)
    path.write_text("{broken")
    assert recall(path) is None


def test_what_another_version_remembered_is_taken_and_the_api_is_where_it_is_asked_for(tmp_path: Path) -> None:
    """ports.json had no port of the API before there was one on TCP; agents must find the proxy all the same."""
    path = tmp_path / "ports.json"
    path.write_text('{"asked":{"proxy":11435,"ingress":8480},"got":{"proxy":11436,"ingress":8480}}')
    assert choose_ports(Ports(11435, 8480, 3000), recall(path)) == Ports(11436, 8480, 3000)
    assert choose_ports(Ports(11435, 8480, 0), recall(path)) == Ports(11436, 8480, 0)


def test_flags_are_kept_and_told_to_nobody_but_their_user(tmp_path: Path) -> None:
    path, uid = tmp_path / up_flags.NAME, os.getuid()
    assert up_flags.kept(path, uid) == ""
    up_flags.keep(path, " --demo --port 1")
    assert up_flags.kept(path, uid) == " --demo --port 1"
    assert up_flags.kept(path, uid + 1) == ""
    (tmp_path / "link").symlink_to(path)
    assert up_flags.kept(tmp_path / "link", uid) == ""
    up_flags.keep(path, "x" * (up_flags.LONGEST_BYTES + 1))
    assert up_flags.kept(path, uid) == ""


def test_the_banner_says_where_the_api_is() -> None:
    assert "http://127.0.0.1:3001" in banner(HEALTH, PATHS, command="hive", default_state=True)
    alone = {**HEALTH, "api": {"listen": "127.0.0.1", "port": None}}
    assert "on TCP nowhere" in banner(alone, PATHS, command="hive", default_state=True)


def test_the_banner_says_what_is_isolated_what_is_not_and_what_to_type() -> None:
    text = banner(HEALTH, PATHS, command="hive", default_state=True)
    for words in ("127.0.0.1:11436", "uid: each agent", "not enforced", "DEMO", "SIGSTOP", "/run/x/hive.sock"):
        assert words in text
    assert "  hive ps\n" in text


def test_the_banner_says_why_nobody_sleeps_deep() -> None:
    told = banner(HEALTH, PATHS, command="hive", default_state=True, why_not_deep="deep sleep: not permitted here (x)")
    assert "; not deep: not permitted here (x)\n" in told
    assert "goes to swap" in banner(HEALTH, PATHS, command="hive", default_state=True)


def test_the_banner_and_the_table_of_the_demo_are_a_terminal_of_24_lines_together() -> None:
    """The addresses at its top had scrolled away when the table had come."""
    paths = Paths(Path("/var/lib/hive-up"), Path("/run/hive-up-1bcdb7aa"))
    for isolation in Isolation:
        health = {**HEALTH, "isolation": isolation}
        why = "deep sleep: this host has no swap"
        text = banner(health, paths, command="hive", default_state=True, why_not_deep=why, width=80)
        assert max(map(len, text.splitlines())) <= 80
        head, heads, agents, empty = 1, 1, 3, 1
        assert len(text.splitlines()) + empty + head + heads + agents <= 24


def test_with_a_state_directory_of_its_own_the_commands_name_it_quoted() -> None:
    text = banner(HEALTH, Paths(Path("/my state"), Path("/run/x")), command="hive", default_state=False)
    assert "  hive status --state-dir '/my state'\n" in text


def test_a_real_backend_is_not_labelled_demo() -> None:
    health = {**HEALTH, "backend": {"kind": "ollama", "label": "Ollama at 127.0.0.1:11434", "version": "0.30"}}
    text = banner(health, PATHS, command="hive", default_state=True)
    assert "DEMO" not in text
    assert "Ollama at 127.0.0.1:11434 0.30" in text


def test_the_summary_has_the_promised_keys_of_this_run_alone_and_adds_the_demos_errors() -> None:
    stats = {
        "agents": 3,
        "requests": 7,
        "tokens_in": 70,
        "tokens_out": 30,
        "pauses": 4,
        "wakes": 4,
        "errors": 1,
        "wake_ms": {"p50": 2.0, "p99": 9.0},
        "more": "is left out",
    }
    before = {"requests": 2, "tokens_in": 20, "tokens_out": 5}
    found = summary(stats, before, HEALTH, demo_errors=2)
    assert list(found) == [
        *("agents", "requests", "tokens_in", "tokens_out", "pauses", "wakes", "wake_ms"),
        *("errors", "backend", "isolation"),
    ]
    assert found["errors"] == 3
    assert (found["requests"], found["tokens_in"], found["tokens_out"]) == (5, 50, 25)
    assert (found["backend"], found["isolation"]) == ("demo", "uid")


def test_the_plain_table_keeps_its_columns_whatever_an_agent_is_called() -> None:
    views = [{"name": "a" * 40, "status": "paused", "depth": "light", "brief": "x" * 100}, {"name": "b"}]
    lines = plain_table(views).split("\n")
    assert len(lines) == 3
    assert lines[1].index("paused") == lines[0].index("state")


def test_an_agent_without_a_wake_shows_a_dash_and_one_of_zero_ms_does_not() -> None:
    assert cells({"last_wake_ms": None})[-1] == "–"
    assert cells({"last_wake_ms": 0.0})[-1] == "0.0 ms"


def test_directories_are_made_for_us_alone_and_cleared_of_what_means_nothing_later(passable: Path) -> None:
    paths = Paths(passable / "state", passable / "run")
    directories.make_state(paths, uid=os.getuid())
    directories.make_rest(paths, uid=os.getuid())
    directories.write_socket(paths)
    assert (paths.state / "socket").read_text() == f"{paths.api_socket}\n"
    assert paths.state.stat().st_mode & 0o777 == (0o711 if os.getuid() == 0 else 0o700)
    assert paths.redis_dir.stat().st_mode & 0o777 == 0o700
    stale = paths.agent_socket("0123456789")
    stale.touch()
    paths.redis_socket.touch()
    paths.database.touch()
    directories.clear(paths)
    assert not paths.runtime.exists()
    assert not (paths.state / "socket").exists()
    assert paths.database.exists()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_as_root_a_state_directory_that_agents_could_not_reach_is_refused(passable: Path) -> None:
    closed = passable / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=f"{closed} lets nobody else pass"):
        directories.make_state(Paths(closed / "state", passable / "run"), uid=0)


def test_a_directory_of_something_else_is_not_taken_and_not_touched(passable: Path) -> None:
    """`hive up --state-dir /etc` as root changed the mode of /etc to 0711 and put its directories there."""
    state = passable / "used"
    state.mkdir(mode=0o755)
    (state / "passwd").touch()
    paths = Paths(state, passable / "r")
    with pytest.raises(ConfigError, match="in use, and not by a Hive"):
        directories.make_state(paths, uid=os.getuid())
    assert state.stat().st_mode & 0o777 == 0o755
    (state / "passwd").unlink()
    (state / "lost+found").mkdir()
    directories.make_state(paths, uid=os.getuid())
    (state / "up.lock").touch()
    (state / "anything").touch()
    directories.make_state(paths, uid=os.getuid())


def test_nothing_is_made_where_agents_could_not_reach_it(passable: Path) -> None:
    """`hive up --state-dir /root/x` was refused, and /root/x was there afterwards."""
    closed = passable / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="could not reach"):
        directories.make_state(Paths(closed / "a" / "b", passable / "r"), uid=0)
    assert list(closed.iterdir()) == []


def test_the_hint_for_a_state_directory_does_not_say_to_remove_it(passable: Path) -> None:
    """`--state-dir /etc/passwd` came with `hint: remove it`."""
    (passable / "file").write_text("precious")
    with pytest.raises(NotPermitted, match="is not a directory") as caught:
        directories.make_state(Paths(passable / "file", passable / "r"), uid=os.getuid())
    assert "--state-dir" in caught.value.hint
    assert "remove" not in caught.value.hint


def test_the_banner_fits_its_terminal() -> None:
    told = banner(HEALTH, PATHS, command="hive", default_state=True, width=60)
    assert max(map(len, told.splitlines())) <= 60
    assert " ".join(told.split()) == " ".join(banner(HEALTH, PATHS, command="hive", default_state=True).split())


def test_with_inference_disabled_there_is_no_backend_and_no_demo_in_its_place() -> None:
    disabled = msgspec.structs.replace(plan(None), serves=False)
    assert not disabled.starts_demo
    assert "--backend" not in services.daemon_command(disabled, api_port=0)
    assert plan(None).starts_demo
