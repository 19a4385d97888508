"""`hive top` in scripts, and the commands that import Textual."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hive.build import version
from hive.store.database import Database
from hive.tui import opening
from tests.cli.conftest import show_backend

Hive = Any
"""conftest.Hive: test modules import no siblings."""

ALICE = {
    "name": "alice",
    "status": "running",
    "depth": "awake",
    "tier": "medium",
    "tenant": "default",
    "model": None,
    "runtime": "process",
    "held_at": None,
    "held_bytes": 90 * 1024 * 1024,
    "in_flight": 1,
    "parked": 0,
    "requests": 0,
    "tokens_in": 0,
    "tokens_out": 0,
    "tokens_per_s": None,
    "rss_bytes": 94371840,
    "saved_bytes": 0,
    "idle_s": 0.0,
    "why": "1 request in flight",
    "last_wake_ms": None,
    "last_wake_cause": None,
    "wakes": 0,
    "pauses": 0,
    "budget_percent": None,
}
STARTED = ["agent.created", "agent.starting", "agent.running"]
BACKEND = {
    "kind": "demo",
    "label": "demo backend (canned text)",
    "address": "/r/demo.sock",
    "version": "1",
    "up": True,
    "slots": 4,
    "warning": "the backend queues 3 requests itself",
    "models": ["demo"],
    "switching": "",
    "cluster": None,
}


@pytest.fixture
def beside_demo(hive: Hive) -> Hive:
    """The daemon has found a backend."""
    hive.daemon.call(show_backend, hive.box, "demo")
    return hive


def test_json_has_the_whole_of_it_in_this_shape(beside_demo: Hive) -> None:
    hive = beside_demo
    found = hive("top", "--once", "--json").json
    assert found.pop("at") > 1.7e9
    assert [agent.pop("name") for agent in found["agents"][1:]] == ["busy-bob"]
    alice = found.pop("agents")[0]
    assert (len(alice.pop("id")), alice.pop("since") > 1.7e9) == (32, True)
    assert alice == ALICE
    assert [(one["code"], one["fix"]) for one in found.pop("conditions")] == [
        ("redis_down", f"hive logs redis --socket {hive.socket}")
    ]
    assert found.pop("memory").keys() == {"total_bytes", "available_bytes", "swap_total_bytes", "swap_free_bytes"}
    assert [event["kind"] for event in found.pop("events")] == STARTED * 2
    [problem] = found.pop("problems")
    assert problem.startswith(f"Redis at {hive.box.paths.redis_socket} is down ")
    assert found == {
        "schema": "top",
        "version": 1,
        "source": "daemon",
        "place": str(hive.socket),
        "hive_version": hive.box.services.health.view()["version"],
        "isolation": "none",
        "backend": BACKEND,
        "queue": None,
        "gpus": [],
        "gpus_why_not": "no NVIDIA driver is loaded",
        "requests": 0,
        "tokens_out": 0,
        "wakes": 0,
        "wake_ms": None,
        "pool": None,
    }


@pytest.mark.usefixtures("host_memory")
def test_once_is_the_screen_as_text(beside_demo: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = beside_demo("top", "--once", "--no-unicode").out.splitlines()
    assert lines.pop(2).endswith(f"fix: hive logs redis --socket {beside_demo.socket}")
    assert lines == [
        f"Hive {version().partition('+')[0]} | backend up: demo backend (canned text), 4 at once | 2 running",
        "RAM 4.0G/8.0G | swap 81M/1.0G | saved 0 | 0 wakes since start | isolation none",
        "the backend queues 3 requests itself",
        "queue: unknown",
        "",
        "AGENT          STATE      DEPTH REQ TOK/S   RAM SAVED  IDLE WHY",
        "alice          * running  awake   1     -   90M     0    0s 1 request in flight",
        "busy-bob       * running  awake   1     -   90M     0    0s 1 request in flight",
    ]


def test_where_the_daemon_is_down_the_database_is_read(no_daemon: Hive, tmp_path: Any) -> None:
    Database.open(tmp_path / "hive.db").close()
    said = no_daemon("top", "--json", "--state-dir", str(tmp_path))
    assert said.code == 0
    assert said.json["source"] == "store"
    assert "the daemon is down" in said.json["problems"][0]


class Crashed:
    """Of Textual's App what the command uses: one that ended with `code`."""

    def __init__(self, code: int | None) -> None:
        self.return_code = code

    def __call__(self, *_: Any, **__: Any) -> Crashed:
        return self

    def run(self) -> None:
        """Textual says what happened by itself."""


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (0, 0), (None, 0)])
def test_a_screen_that_crashed_is_exit_1(
    no_daemon: Hive, monkeypatch: pytest.MonkeyPatch, code: int | None, exit_code: int
) -> None:
    """It was 0, whatever had happened."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(opening, "load", lambda *_, **__: (Crashed(code), None))
    assert no_daemon("top").code == exit_code


@pytest.mark.parametrize(
    "words", [["--help"], ["top", "--help"], ["agent", "list"], ["top", "--once"], ["status"]], ids=" ".join
)
def test_only_a_live_screen_loads_textual(hive: Hive, words: list[str]) -> None:
    program = "import sys; from hive.cli.main import main; main(sys.argv[1:]); print('textual' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "False"
