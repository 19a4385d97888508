"""The program as the shell sees it: pipes that close, full disks, Ctrl-C, no traceback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hive.cli import main as program
from hive.cli.call import CommandCall, agent_names, model_names
from hive.errors import AS_ROOT, NotPermitted
from hive.paths import runtime_dir
from tests.cli.conftest import show_backend

Hive = Any
"""conftest.Hive: test modules import no siblings."""

HIVE = [sys.executable, "-m", "hive"]


def test_a_reader_that_left_is_no_error_message(hive: Hive) -> None:
    for words in (["agent", "list"], ["events", "-f"], ["config", "show"]):
        with subprocess.Popen([*HIVE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            if words[0] == "events":
                process.send_signal(signal.SIGINT)
            assert b"Traceback" not in process.stderr.read()


def test_what_takes_root_is_said_as_the_command_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hive secrets list` of a user ended in `hint: sudo`."""
    words = ["config", "set", "proxy.listen", "a b"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert program._typed(NotPermitted(hint=AS_ROOT), words).hint == "as root: sudo hive config set proxy.listen 'a b'"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert program._typed(NotPermitted(hint=AS_ROOT), words).hint == ""


def test_a_full_disk_is_said_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*HIVE, "config", "show"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "hive: cannot write the result: No space left on device  [internal]\n")


def test_ctrl_c_is_130_without_a_word(hive: Hive) -> None:
    with subprocess.Popen([*HIVE, "events", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


def test_a_fault_of_hives_own_is_one_line_and_a_traceback_only_when_asked_for(
    no_daemon: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(program, "root", broken)
    said = no_daemon("status")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("hive: a fault in Hive itself: ZeroDivisionError: by zero  [internal]\n")
    monkeypatch.setenv("HIVE_DEBUG", "1")
    assert "Traceback" in no_daemon("status").err


def test_debug_shows_where_an_expected_failure_came_from(no_daemon: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in no_daemon("usage").err
    monkeypatch.setenv("HIVE_DEBUG", "1")
    said = no_daemon("usage")
    assert said.code == 5
    assert "Traceback" in said.err


def test_names_are_completed_from_the_daemon_and_without_one_not_at_all(
    hive: Hive, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.cli.call.COMPLETED_WITHIN_S", 10.0)
    hive.daemon.call(show_backend, hive.box, "llama3.2:q4_0", "llama3.2:q8_0\x1b[2J")
    there = CommandCall(program.root())
    assert agent_names(there, "") == ["alice", "busy-bob"]
    assert agent_names(there, "b") == ["busy-bob"]
    assert model_names(there, "") == ["llama3.2:q4_0"]  # and not the one whose name steers a terminal
    monkeypatch.delenv("HIVE_SOCKET")
    (tmp_path / "state").mkdir()
    (tmp_path / "state/socket").write_text(str(hive.socket))
    there.state_dir = tmp_path / "state"
    assert agent_names(there, "a") == ["alice"]
    monkeypatch.setenv("HIVE_SOCKET", str(hive.socket))
    environment = {
        **os.environ,
        "_HIVE_COMPLETE": "complete_bash",
        "COMP_WORDS": "hive agent show a",
        "COMP_CWORD": "3",
    }
    for _ in range(10):  # a busy machine may take longer than it waits
        done = subprocess.run(HIVE, env=environment, capture_output=True, text=True, check=False)
        if done.stdout.strip():
            break
    assert (done.stdout, done.stderr) == ("alice\n", "")
    environment["HIVE_SOCKET"] = str(tmp_path / "none.sock")
    done = subprocess.run(HIVE, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("hive ag", "1", "agent"),
        ("hive agent pau", "2", "pause"),
        ("hive config set proxy.ingress_p", "3", "proxy.ingress_port"),
        ("hive secrets rotate box", "3", "box-key"),
        ("hive backend switch vl", "3", "vllm"),
        ("hive backend logs ol", "3", "ollama"),
    ],
)
def test_commands_are_completed(line: str, word: str, expected: str) -> None:
    environment = {**os.environ, "_HIVE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": word}
    done = subprocess.run(HIVE, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{expected}\n"


@pytest.mark.parametrize(
    ("shell", "mark"),
    [("bash", "complete -o default -F _hive"), ("zsh", "#compdef hive"), ("fish", "complete --command hive")],
)
def test_a_completion_script_is_made_for_each_shell(shell: str, mark: str) -> None:
    environment = {**os.environ, "_HIVE_COMPLETE": f"source_{shell}"}
    done = subprocess.run(HIVE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert mark in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


def test_a_quick_command_loads_nothing_slow(no_daemon: Hive) -> None:
    slow = ("rich", "httpx", "redis", "msgspec", "pydantic", "asyncio", "starlette", "uvicorn", "uvloop", "http.client")
    ask = (
        "import sys; from hive.cli.main import main; code = main(['agent', 'list', '-q']); main(['agent', '--help']);"
        f"print('loaded', code, [name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "loaded 5 []"


def test_a_command_without_stdout_ends_with_its_code_and_no_traceback() -> None:
    """A command ends itself at once (entry.py), and what it flushes before that may not be there."""
    done = subprocess.run([sys.executable, "-m", "hive", "nonsense"], stderr=subprocess.PIPE, preexec_fn=_close_stdout)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def _close_stdout() -> None:
    os.close(1)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("daemon --state-dir /proc/no --runtime-dir /proc/no --isolation uid", 1),
        ("up --state-dir /proc/no --port 1", 5),
    ],
)
def test_a_service_that_is_told_paths_and_numbers_loads_no_pydantic(words: str, code: int) -> None:
    """Typer turned each into its type by pydantic: a fifth of every service's start, and megabytes of each for good; of
    the daemon, which is told one of a few words (--isolation), longest.
    """
    ask = f"import sys; from hive.cli.main import main; print(main({words.split()}), 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == f"{code} False"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--exit-after=soon", "a valid number"),
        ("--port=70000", "less than or equal to 65535"),
        ("--port=-1", "greater than or equal to 0"),
        ("--port=9x", "a valid integer"),
    ],
)
def test_a_number_that_is_none_or_too_large_is_a_usage_error(words: str, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*HIVE, "up", "--state-dir", str(tmp_path / "s"), words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"Invalid value for '{words.partition('=')[0]}'" in done.stderr
    assert said in done.stderr


def test_the_environment_names_a_state_directory(hive: Hive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each command of a session on another Hive took --state-dir anew. --socket and HIVE_SOCKET go before it."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "socket").write_text(str(hive.socket))
    monkeypatch.setenv("HIVE_STATE_DIR", str(state))
    monkeypatch.delenv("HIVE_SOCKET")
    assert hive("ps", "-q").out == "alice\nbusy-bob\n"
    assert hive("audit", "verify").err.startswith(f"hive: there is no {state}/hive.db")
    assert hive("backup", str(tmp_path / "x.tar")).err.startswith(f"hive: there is no {state}/hive.db")
    monkeypatch.setenv("HIVE_STATE_DIR", "/no/such/state")
    assert hive("ps", "-q", "--socket", str(hive.socket)).code == 0
    assert hive("ps", "-q", "--state-dir", str(state)).code == 0
    monkeypatch.setenv("HIVE_SOCKET", str(hive.socket))
    assert hive("ps", "-q").code == 0
    assert f"no Hive is installed in {tmp_path}" in hive("audit", "verify", "--prefix", str(tmp_path)).err


@pytest.mark.parametrize("words", [["ps"], ["top"], ["logs"], ["agent", "stop", "alice"]])
def test_a_state_directory_that_is_not_there_is_named(no_daemon: Hive, words: list[str]) -> None:
    """`--state-dir` with a typing error was answered with the socket of a directory nobody had heard of."""
    said = no_daemon(*words, "--state-dir", "/no/such/state")
    assert said.code == 5
    assert said.err == (
        "hive: there is no state directory /no/such/state  [dependency_down]\n"
        "hint: `hive up --state-dir /no/such/state` would make it\n"
    )


def test_a_hive_whose_state_directory_was_removed_still_answers(hive: Hive, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    runtime = runtime_dir(gone, os.geteuid(), os.environ)
    runtime.mkdir(mode=0o700)
    try:
        (runtime / "hive.sock").symlink_to(hive.socket)
        assert hive("ps", "-q", "--state-dir", str(gone)).out == "alice\nbusy-bob\n"
    finally:
        shutil.rmtree(runtime)


def test_status_and_doctor_name_the_missing_directory(no_daemon: Hive) -> None:
    words = ("--state-dir", "/no/such/state", "--json")
    assert no_daemon("status", *words).json["next"] == [
        {"problem": "there is no state directory /no/such/state", "command": "hive up --state-dir /no/such/state"}
    ]
    [check] = no_daemon("doctor", "hive.answers", *words).json["checks"]
    assert check["reason"] == "there is no state directory /no/such/state"
    assert check["fix"] == "hive up --state-dir /no/such/state"
