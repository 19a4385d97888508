"""The services' own reading of their words, held against Typer's, for every command that units and programs write."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hive.cli import service_starts
from hive.cli.main import main
from hive.cli.service_starts import STARTS, plain_start
from hive.domain import BackendInfo, BackendKind, Isolation
from hive.files.ports import Ports
from hive.settings.table import Paths
from hive.up import services
from hive.up.services import UpPlan

ROOT = Path(__file__).parents[2]


def of_units() -> dict[str, list[str]]:
    found = {}
    for path in sorted((ROOT / "systemd").glob("*.service")):
        for line in re.findall(r"^Exec\w+=-?/opt/hive/current/bin/hive (.*)$", path.read_text(), re.M):
            words = shlex.split(line.replace("%i", "a-1"))
            if words[0] in STARTS:
                found[f"{path.name} {words[0]}"] = words
    return found


def of_hive_up() -> dict[str, list[str]]:
    paths = Paths(Path("/s"), Path("/r"))
    plan = UpPlan(paths=paths, config=None, isolation=Isolation.UID, backend=None, watch_fd=7)
    real = BackendInfo(kind=BackendKind.VLLM, address="127.0.0.1:8000", version="1")
    full = UpPlan(
        paths=paths, config=Path("/c"), isolation=Isolation.NONE, backend=real, watch_fd=7, is_found=True, serves=True
    )
    commands = [
        services.demo_backend_command(plan),
        *(services.sandbox_command(one) for one in (plan, full)),
        *(services.daemon_command(one, api_port=0) for one in (plan, full)),
        *(services.proxy_command(one, Ports(11435, 8480, 0), move=one is plan) for one in (plan, full)),
    ]
    return {f"up {number}": command[command.index("hive") + 1 :] for number, command in enumerate(commands)}


COMMANDS = {**of_units(), **of_hive_up()}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_what_hive_itself_writes_is_read_without_typer_and_as_typer_reads_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = plain_start(words)
    assert isinstance(start, partial)
    ours = inspect.signature(STARTS[words[0]]).bind(*start.args, **start.keywords)
    ours.apply_defaults()
    typers: list[Any] = []
    name = STARTS[words[0]].__name__
    monkeypatch.setattr(service_starts, name, lambda *given, **named: typers.append((given, named)))
    assert main(words) == 0
    [(given, named)] = typers
    theirs = inspect.signature(STARTS[words[0]]).bind(*given, **named)
    theirs.apply_defaults()
    assert ours.arguments == theirs.arguments


def test_the_commands_of_every_service_are_among_them() -> None:
    assert {words[0] for words in COMMANDS.values()} == set(STARTS)


WRONG = {
    "an option it lacks": ["sandbox", "--state-dir", "/s", "--runtime-dir", "/r", "--port", "1"],
    "one that is missing": ["proxy", "--state-dir", "/s"],
    "one without its value": ["proxy", "--state-dir", "/s", "--runtime-dir"],
    "one given twice": ["proxy", "--state-dir", "/s", "--runtime-dir", "/r", "--state-dir", "/t"],
    "a value behind =": ["proxy", "--state-dir=/s", "--runtime-dir", "/r"],
    "a relative path": ["proxy", "--state-dir", "s", "--runtime-dir", "/r"],
    "a port that is none": ["proxy", "--state-dir", "/s", "--runtime-dir", "/r", "--port", "65536"],
    "a number that is none": ["proxy", "--state-dir", "/s", "--runtime-dir", "/r", "--watch-fd", "-1"],
    "digits of another script": ["jobs", "--link-fd", "٣"],
    "an isolation nobody knows": ["daemon", "--state-dir", "/s", "--runtime-dir", "/r", "--isolation", "some"],
    "a word too many": ["jobs", "now"],
    "help": ["daemon", "--help"],
    "another command": ["ps"],
    "nothing": [],
}


@pytest.mark.parametrize("words", WRONG.values(), ids=WRONG)
def test_all_else_is_left_to_typer(words: list[str]) -> None:
    assert plain_start(words) is None


LOADED = """
import atexit, sys
from hive.cli.entry import run
atexit.register(lambda: print("typer" in sys.modules))
run()
"""


def ran(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOADED, "sandbox-thaw", *words, "--runtime-dir", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_service_loads_no_typer_unless_there_is_something_to_say(tmp_path: Path) -> None:
    plain = ran(tmp_path, "--state-dir", str(tmp_path))
    assert (plain.returncode, plain.stdout) == (0, "False\n"), plain.stderr
    by_typer = ran(tmp_path, f"--state-dir={tmp_path}")
    assert (by_typer.returncode, by_typer.stdout) == (0, "True\n"), by_typer.stderr


def test_an_error_is_said_in_the_same_words_either_way(tmp_path: Path) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text("[proxy]\nport = none\n")
    config = ("--config", str(conf))
    plain = ran(tmp_path, "--state-dir", str(tmp_path), *config)
    by_typer = ran(tmp_path, f"--state-dir={tmp_path}", *config)
    assert plain.stderr == by_typer.stderr
    assert "[proxy] port" in plain.stderr
    assert plain.returncode == by_typer.returncode == 2
