"""The sample agents as processes, each with the demo backend behind it."""

from __future__ import annotations

import ast
import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hive.demo.agents import DEMO_AGENTS
from hive.demo.agents.librarian import Librarian, card
from hive.demo.agents.sample_agent import ConversationMemory
from hive.demo.agents.scribe import Scribe
from hive.demo.agents.watcher import Watcher
from hive.domain import Dialect, Tier
from tests.fakes.programs import Program, demo_backend, fake_backend, started

PYTHON = "/usr/bin/python3"
NAMES = list(DEMO_AGENTS)


class Agent:
    """A running sample agent and one kept connection of a caller."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port
        self._caller = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def ask(
        self, method: str, path: str, body: Any = None, *, raw: bytes = b"", **fields: str
    ) -> tuple[int, dict[str, Any]]:
        self._caller.request(method, path, raw or (None if body is None else json.dumps(body)), fields)
        answer = self._caller.getresponse()
        found = answer.read()
        if answer.will_close:
            self._caller.close()
        return answer.status, json.loads(found)

    def turn(self, say: str) -> dict[str, Any]:
        status, found = self.ask("POST", "/turn", {"say": say})
        assert status == 200, found
        return found

    def close(self) -> None:
        self._caller.close()

    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    def cpu_ticks(self) -> int:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


@contextmanager
def running(name: str, home: Path, url: str, dialect: str = "ollama", **more: str) -> Iterator[Agent]:
    """The agent as Hive starts it: its files in its home, nothing else in its environment."""
    spec = DEMO_AGENTS[name]
    home.mkdir(exist_ok=True)
    for source, target in spec.files.items():
        shutil.copy(source, home / target)
    environment = {"HIVE_AGENT_PORT": "0", "HIVE_DIALECT": dialect, "HOME": str(home), "PATH": os.defpath}
    environment |= {"OLLAMA_HOST": url} if dialect == "ollama" else {"OPENAI_BASE_URL": f"{url}/v1"}
    with started([PYTHON, *spec.arguments], cwd=home, env=environment | more) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, f"{name} ended with {process.wait(60)}"
        agent = Agent(process.pid, json.loads(ready)["port"])
        try:
            yield agent
        finally:
            agent.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Program]:
    with demo_backend() as server:
        yield server


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("name", NAMES)
def test_an_agent_takes_turns_and_keeps_its_state(name: str, dialect: Dialect, demo: Program, tmp_path: Path) -> None:
    with running(name, tmp_path / name, demo.url, dialect) as agent:
        turns = [agent.turn(say) for say in ("tell me of rivers", "größer, bitte \u2028 蜂", "")]
        status, state = agent.ask("GET", "/")
        rss_mb = agent.rss_mb()
    assert [found["turn"] for found in turns] == [1, 2, 3]
    assert all(found["state_ok"] for found in turns)
    assert len({found["state"] for found in turns}) == 3
    assert all(found["model"] == "hive-demo" and "canned" in found["answer"] for found in turns)
    assert all(found["tokens_out"] == len(found["answer"].split()) for found in turns)
    assert all(found["tokens_in"] > 0 for found in turns)
    assert (status, state["name"], state["turn"], state["state"]) == (200, name, 3, turns[-1]["state"])
    assert 50 < rss_mb < 170
    assert rss_mb > DEMO_AGENTS[name].heap_mb


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_an_agent_without_callers_is_quiet(name: str, demo: Program, tmp_path: Path) -> None:
    """Less than 2 % of a core counts as idle, which is two ticks of 10 ms in a second."""
    with running(name, tmp_path / name, demo.url) as agent:
        agent.turn("hello")
        before = agent.cpu_ticks()
        threading.Event().wait(1.0)
        assert agent.cpu_ticks() - before <= 2


def test_a_model_that_refuses_is_a_502_with_the_reason_and_no_turn(demo: Program, tmp_path: Path) -> None:
    with running("scribe", tmp_path / "scribe", demo.url, HIVE_MODEL="llama3.2") as agent:
        status, found = agent.ask("POST", "/turn", {"say": "hello"})
        _, state = agent.ask("GET", "/")
    assert status == 502
    assert "not found" in found["error"]
    assert (state["turn"], state["state_ok"]) == (0, True)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("fault", ["--die-mid-stream=3", "--no-end-marker", "--error-mid-stream=3", "--bad-head"])
def test_half_an_answer_is_no_answer(dialect: Dialect, fault: str, tmp_path: Path) -> None:
    with (
        fake_backend("ollama" if dialect is Dialect.OLLAMA else "vllm", fault) as server,
        running("scribe", tmp_path / "scribe", server.url, dialect) as agent,
    ):
        status, found = agent.ask("POST", "/turn", {"say": "hello"})
        assert (status, agent.ask("GET", "/")[1]["turn"]) == (502, 0)
    assert "the model did not answer" in found["error"]


@pytest.mark.parametrize("dialect", Dialect)
def test_an_agent_outlives_its_backend_and_speaks_to_the_next(dialect: Dialect, tmp_path: Path) -> None:
    """The kept connection is dead then; that is found out before a byte of an answer, so it asks once more."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    kind = "ollama" if dialect is Dialect.OLLAMA else "vllm"
    with running("scribe", tmp_path / "scribe", f"http://127.0.0.1:{port}", dialect) as agent:
        assert agent.ask("POST", "/turn", {"say": "nobody there"})[0] == 502
        for turn in (1, 2):
            with fake_backend(kind, "--port", port) as server:
                found = agent.turn("hello")
                assert server.stats()["whole"] == 1
            assert (found["turn"], found["state_ok"], found["model"]) == (turn, True, "tiny")


def test_a_kept_connection_serves_many_turns(tmp_path: Path) -> None:
    with fake_backend("vllm") as server, running("scribe", tmp_path / "s", server.url, "openai") as agent:
        for _ in range(5):
            agent.turn("hello")
        assert server.stats()["open"] == 2  # the agent's one and this question's own


def test_a_path_in_the_hosts_address_is_kept(demo: Program, tmp_path: Path) -> None:
    """`OLLAMA_HOST=http://127.0.0.1:PORT/a/<token>` is how an agent on TCP says who it is."""
    with running("scribe", tmp_path / "scribe", f"{demo.url}/a/token") as agent:
        status, found = agent.ask("POST", "/turn", {"say": "hello"})
    assert status == 502
    assert "/a/token/api/tags" in found["error"]


def test_a_message_is_accepted_at_once_and_answered_in_the_log_and_a_second_time_it_is_none(
    demo: Program, tmp_path: Path
) -> None:
    with running("scribe", tmp_path / "scribe", demo.url) as agent:
        message = {"id": "m1", "text": "remember the milk", "from": "uid:0", "sent_at": 0}
        key: dict[str, Any] = {"Idempotency-Key": "m1"}
        first, again = (agent.ask("POST", "/inbox", message, **key) for _ in range(2))
        assert (first, again) == ((202, {"accepted": True}), (202, {"accepted": False}))
        while agent.ask("GET", "/")[1]["turn"] == 0:
            time.sleep(0.01)
        assert agent.turn("and the bread")["turn"] == 2
        assert agent.ask("POST", "/inbox", {"say": "x"})[0] == 400


def test_what_is_no_turn_is_refused(demo: Program, tmp_path: Path) -> None:
    with running("scribe", tmp_path / "scribe", demo.url) as agent:
        for raw in (b"{", b"[]", b'{"say": 3}', b'{"said": "x"}', b"\xff"):
            assert agent.ask("POST", "/turn", raw=raw)[0] == 400, raw
        assert agent.ask("GET", "/nothing")[0] == 404
        assert agent.ask("POST", "/nothing", {"say": "x"})[0] == 404
        assert agent.turn("still here")["turn"] == 1


def test_more_turns_than_it_keeps_still_fit_its_state(tmp_path: Path) -> None:
    with fake_backend("ollama", "--tokens", "1") as server, running("scribe", tmp_path / "s", server.url) as agent:
        found = [agent.turn(f"word {number}") for number in range(205)]
    assert found[-1]["turn"] == 205
    assert all(turn["state_ok"] for turn in found)


def spoil_a_note(scribe: Scribe) -> None:
    scribe._notes[2 * 7919]["weight"] = 2.0


def spoil_a_card(librarian: Librarian) -> None:
    librarian._cards[str(card(2 * 6007)["signature"])]["pages"] = 1


def lose_a_book(librarian: Librarian) -> None:
    librarian._shelves["bees"].pop()


def spoil_a_sample(watcher: Watcher) -> None:
    watcher._series[202][0] += 1e-9


@pytest.mark.wide
@pytest.mark.parametrize(
    ("character", "spoil"),
    [(Scribe, spoil_a_note), (Librarian, spoil_a_card), (Librarian, lose_a_book), (Watcher, spoil_a_sample)],
)
def test_a_changed_object_in_its_heap_is_seen(character: Callable[[], Any], spoil: Callable[[Any], None]) -> None:
    """Were the check blind, a sleep that does harm would go unseen."""
    whole = character()
    assert all(whole.spot_check(turn) for turn in range(50))
    spoil(whole)
    assert not whole.spot_check(2)


def test_a_memory_that_lost_or_changed_a_turn_is_seen() -> None:
    def memory() -> ConversationMemory:
        kept = ConversationMemory()
        for turn in range(300):
            kept.keep(f"say {turn}", "answer")
        return kept

    lost, changed, recounted, whole = memory(), memory(), memory(), memory()
    lost._texts.pop()
    changed._texts[100] = "x"
    recounted.turns = 299
    assert [kept.is_whole() for kept in (lost, changed, recounted, whole)] == [False, False, False, True]


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_needs_only_the_standard_library_of_python_3_9(name: str) -> None:
    for source in DEMO_AGENTS[name].files:
        tree = ast.parse(Path(source).read_text(), source, feature_version=(3, 9))
        imported = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert {module.partition(".")[0] for module in imported} <= STANDARD


STANDARD = {"__future__", "collections", "gc", "hashlib", "http", "importlib", "json", "os", "sys"}
STANDARD |= {"threading", "time", "typing", "urllib"}


def test_the_table_fits_hives_words() -> None:
    assert {agent.tier for agent in DEMO_AGENTS.values()} <= set(Tier)
    assert all(Path(source).is_file() for agent in DEMO_AGENTS.values() for source in agent.files)
    assert all("/" not in name for agent in DEMO_AGENTS.values() for name in agent.files.values())
