"""`hive top` in scripts, and the commands that import Textual."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hive.store.database import Database
from hive.tui import opening

Hive = Any
"""conftest.Hive: test modules import no siblings."""

ALICE = {
    "id": "id-alice",
    "name": "alice",
    "status": "running",
    "depth": "awake",
    "tier": "medium",
    "tenant": "default",
    "model": None,
    "runtime": "process",
    "in_flight": 1,
    "parked": 0,
    "requests": 3,
    "tokens_in": 1200,
    "tokens_out": 34,
    "tokens_per_s": None,
    "rss_bytes": 94371840,
    "saved_bytes": 0,
    "idle_s": 0.0,
    "since": 1.7e9,
    "why": "1 request in flight",
    "last_wake_ms": 2.5,
    "last_wake_cause": "ingress",
    "wakes": 2,
    "pauses": 2,
}
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
}


def test_json_has_the_whole_of_it_in_this_shape(hive: Hive) -> None:
    found = hive("top", "--once", "--json").json
    assert found.pop("at") > 1.7e9
    assert [agent.pop("name") for agent in found["agents"][1:]] == ["busy-bob"]
    assert found.pop("agents")[0] == ALICE
    assert [(one["code"], one["fix"]) for one in found.pop("conditions")] == [
        ("redis_of_url_down", f"hive doctor redis --socket {hive.socket}")
    ]
    assert found.pop("memory").keys() == {"total_bytes", "available_bytes", "swap_total_bytes", "swap_free_bytes"}
    assert found == {
        "schema": "top",
        "version": 1,
        "source": "daemon",
        "place": str(hive.socket),
        "hive_version": "0.1.0",
        "isolation": "none",
        "problems": ["Redis at redis:6379 is down (WRONGPASS): its keys get old, all else works"],
        "backend": BACKEND,
        "queue": None,
        "gpus": [],
        "gpus_why_not": "no NVIDIA driver is loaded",
        "requests": None,
        "tokens_out": None,
        "wakes": None,
        "wake_ms": None,
        "events": [{"at": 1.7e9, "kind": "agent.paused", "text": "alice running → paused: idle for 312 s"}],
    }


def test_once_is_the_screen_as_text(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = hive("top", "--once", "--no-unicode").out.splitlines()
    assert lines == [
        "Hive 0.1.0 | backend up: demo backend (canned text), 4 at once | 2 running",
        "RAM 4.0G/8.0G | swap 81M/1.0G | saved 0 | isolation none",
        "Redis at redis:6379 is down (WRONGPASS): its keys get old, all else works; fix: "
        f"hive doctor redis --socket {hive.socket}",
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
