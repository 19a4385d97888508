"""Tables before a person at a terminal, and in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from hive.cli import audit, backend, bench, prompts, queue, secrets, token
from hive.cli.agents import mail
from hive.cli.call import CommandCall
from hive.cli.main import root
from hive.cli.templates import orders as template
from hive.cli.terminal import fitted, legend

HEADERS = ["NAME", "RAM", "WHY"]
ROWS = [["alice", "90 MiB", "a request in flight"]]
NOW = time.time()
AUDIT = {
    "id": 12345,
    "at": NOW,
    "actor": "uid:1000",
    "origin": "socket",
    "act": "backend.switched",
    "target": "backend.switch",
    "outcome": "not_permitted",
    "detail": {"user": "ann", "login_user": "root", "error": "ann is operator, and this is for admins"},
}
BACKEND = {
    "unit": "hive-inference-llama.service",
    "address": "",
    "backend": "llama",
    "state": "inactive",
    "answers": True,
    "version": "0.1.0-hive-demo",
    "in_use": True,
}
MESSAGE = {
    "id": "f21e548cfe92de7d",
    "sent_at": NOW - 174,
    "from": "uid:1000",
    "state": "refused",
    "attempts": 5,
    "text": "hi there, do you hear me at all or not",
    "last_error": "its inbox answered 501: <!DOCTYPE HTML> <html lang=en> <head> <meta charset=utf-8>",
}
MEASURED = {"pause_ms": 1234.5, "wake_ms": 2.4, "first_turn_ms": 18.6, "awake_turn_ms": 10.6, "bytes": 19 << 20}
BENCHED = {
    "agents": [
        {"name": "reporter", "awake_bytes": 19 << 20, "light": MEASURED, "deep": None, "skipped": "", "deep_note": ""}
    ],
    "density": [],
    "k": {"deep": None},
}
TOKEN = {
    "name": "ci",
    "role": "operator",
    "state": "live",
    "created_at": NOW - 4000,
    "created_by": "uid:1000",
    "expires_at": NOW + 1e6,
    "last_used_at": NOW - 4000,
    "id": "t_5f153f2e3604",
}
PROMPT = {
    "hash": "0123456789abcdef",
    "bytes": 123456,
    "agents": ["librarian", "scribe"],
    "tenants": ["default"],
    "model": "hf.co/somebody/some-model:q4_0",
    "warm_since": NOW - 174,
    "tokens_reused": 1234567,
    "why": "",
}
REQUEST = {
    "id": "6b03d66ed6dfc1-1234",
    "name": "librarian",
    "tenant": "default",
    "model": "hive-demo",
    "endpoint": "/v1/chat/completions",
    "waits_for": "",
    "state": "running",
    "duration_ms": 1234.0,
    "queue_ms": 1234.0,
}
QUEUE = {
    "work": [],
    "tokens_per_gpu_s": None,
    "slots": None,
    "drain_per_s": None,
    "running": 1,
    "waiting": 0,
    "tenants": [],
    "requests": [REQUEST],
    "left_out": 0,
}
SECRET = [
    "redis-daemon",
    "7m 13s ago",
    "hive-redis.service, hive-daemon.service",
    "The first administrator's token at the API on TCP.",
]
TEMPLATE = {
    "name": "langgraph",
    "owner": "team-a",
    "state": "failed",
    "stage": "packages",
    "why": "template langgraph does not start: its imports started threads",
    "agents": ["alice"],
    "older": ["alice"],
    "named_by": ["alice", "bob"],
    "held_bytes": 80 << 20,
    "shared_bytes": 70 << 20,
    "saved_bytes": -(80 << 20),
    "packages_at": NOW - 7300,
    "is_stale": True,
}
TABLES: dict[str, Callable[[], str]] = {
    "audit": lambda: audit._table([AUDIT]),
    "backends": lambda: backend._listed([BACKEND]),
    "messages": lambda: mail._listed({"name": "echo", "why": "", "messages": [MESSAGE]}),
    "bench": lambda: bench._told(BENCHED),
    "tokens": lambda: token._listed([TOKEN], NOW),
    "prompts": lambda: prompts._listed({"prompts": [PROMPT]}),
    "queue": lambda: queue._listed(QUEUE),
    "templates": lambda: template._listed([TEMPLATE]),
    "secrets": lambda: secrets._listed([SECRET]),
}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def make(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))

    return make


def red(header: str, cell: str) -> str:
    return "31" if (header, cell) == ("NAME", "alice") else ""


def test_a_file_or_a_pipe_gets_every_column_and_no_colour() -> None:
    told = fitted(HEADERS, ROWS, drop=["RAM"], prose="WHY", colour=red)
    assert told.splitlines() == ["NAME   RAM     WHY", "alice  90 MiB  a request in flight"]


def test_a_legend_is_for_a_person_alone(terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    call = CommandCall(root())
    legend(call, "counted since Hive was started")
    assert capsys.readouterr() == ("", "")
    terminal(80)
    legend(call, "")
    legend(call, "counted since Hive was started")
    assert capsys.readouterr() == ("", "counted since Hive was started\n")
    call.as_json = True
    legend(call, "counted since Hive was started")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_what_fits_in_colour(terminal: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal(24)
    told = fitted(HEADERS, ROWS, drop=["RAM"], prose="WHY", colour=red)
    assert told.splitlines() == ["NAME   WHY", "\x1b[31malice\x1b[0m  a request in fli…"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in fitted(HEADERS, ROWS, drop=["RAM"], prose="WHY", colour=red)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours have a length, and no width."""
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", TABLES)
def test_no_table_wraps_on_a_terminal_of_80_columns(terminal: Callable[[int], None], name: str) -> None:
    """Of all tables only that of `hive ps` knew how wide the terminal is."""
    whole = TABLES[name]()
    assert max(map(len, whole.splitlines())) > 80
    terminal(80)
    lines = TABLES[name]().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(whole.splitlines())


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("name", TABLES)
def test_on_a_wide_terminal_nothing_is_left_out(terminal: Callable[[int], None], name: str) -> None:
    whole = TABLES[name]()
    terminal(200)
    assert TABLES[name]() == whole
