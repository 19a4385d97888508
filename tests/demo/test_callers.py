"""The choices of the demo, and its treatment of a home that belongs to somebody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.agents.spec import check
from hive.demo.agents import DEMO_AGENTS
from hive.demo.callers import Turn, copy_files, demo_config, demo_spec, judge
from hive.demo.port_claims import PortClaims, is_free
from hive.errors import HiveError
from hive.settings.file import load_text


def test_every_sample_agent_has_a_spec_the_daemon_takes_and_files_that_exist() -> None:
    for name, agent in DEMO_AGENTS.items():
        spec = check(demo_spec(name, agent, port=18101))
        assert spec.idle_s is not None
        assert 1 <= spec.idle_s <= 10
        assert all(Path(source).is_file() for source in agent.files)
        assert set(agent.arguments) & set(agent.files.values())
    assert len(DEMO_AGENTS) == 3


@given(st.integers(0, 1000))
def test_turns_in_order_are_right_and_any_gap_is_not(previous: int) -> None:
    assert judge(previous, Turn(previous + 1, True)) is None
    assert judge(previous, Turn(previous + 2, True)) is not None
    assert judge(previous, Turn(1, True)) is not None or previous == 0
    assert judge(previous, Turn(previous + 1, False)) is not None


@pytest.fixture
def claims() -> Iterator[PortClaims]:
    claims = PortClaims()
    yield claims
    claims.close()


def test_a_taken_port_is_passed_over_but_a_living_agent_keeps_its_own(claims: PortClaims) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
        assert claims.take({"status": "running", "port": port}) == port
        assert claims.take({"status": "stopped", "port": port}) != port


def test_a_port_that_another_agent_of_this_hive_has_recorded_is_passed_over(claims: PortClaims) -> None:
    """It is refused by the daemon also while nobody listens there, and `hive up --demo` ended over that."""
    first = claims.take()
    claims.close()
    assert claims.take(others={first, None}) != first


def test_two_demos_that_begin_together_have_ports_of_their_own(claims: PortClaims) -> None:
    """Both looked before an agent of either listened, took the same ports, and one's callers met the other's agents."""
    program = "from hive.demo.port_claims import PortClaims; claims = PortClaims()\n"
    program += "print(*(claims.take() for _ in range(3)), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        theirs = [int(port) for port in other.stdout.readline().split()]
        ours = [claims.take() for _ in range(3)]
        assert len({*theirs, *ours}) == 6
        again = {"status": "stopped", "port": theirs[0]}
        assert claims.take(again) != theirs[0]
        other.communicate("\n")
    assert claims.take(again) == theirs[0], "given up with the process"


def test_the_demo_settings_do_not_override_what_was_given() -> None:
    text = "[sleep]\ncheck_s = 5\n[proxy]\nport = 12000\n"
    loaded = load_text(text, env={})
    settings = load_text(demo_config(text, list(loaded.origins)), env={}).settings
    assert settings.sleep.check_s == 5
    assert settings.sleep.minimum_awake_s == 1
    assert settings.proxy.port == 12000


def test_files_are_copied_into_the_home_private_to_the_agent(tmp_path: Path) -> None:
    source, home = tmp_path / "source.py", tmp_path / "home"
    source.write_text("print('new')")
    home.mkdir()
    (home / "agent.py").write_text("old")
    copy_files({str(source): "agent.py"}, home, uid=None)
    assert (home / "agent.py").read_text() == "print('new')"
    assert (home / "agent.py").stat().st_mode & 0o777 == 0o600


def test_a_link_an_agent_left_in_its_home_is_not_followed(tmp_path: Path) -> None:
    """As root it would have overwritten any file of the machine."""
    source, home, precious = tmp_path / "source.py", tmp_path / "home", tmp_path / "precious"
    source.write_text("print()")
    precious.write_text("precious")
    home.mkdir()
    (home / "agent.py").symlink_to(precious)
    copy_files({str(source): "agent.py"}, home, uid=None)
    assert precious.read_text() == "precious"
    assert not (home / "agent.py").is_symlink()


def test_a_home_that_is_a_link_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "home").symlink_to(elsewhere)
    with pytest.raises(HiveError, match="cannot copy"):
        copy_files({__file__: "agent.py"}, tmp_path / "home", uid=None)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_as_root_the_copies_belong_to_the_agent(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    copy_files({__file__: "agent.py"}, home, uid=70123)
    found = (home / "agent.py").stat()
    assert (found.st_uid, found.st_gid) == (70123, 70123)
