"""A Hive whose llama-server keeps slots: the server may be killed and started anew, and its orders be held up."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import llama
from tests.journeys.sdk import door_of
from tests.journeys.stack import Stack, until
from tests.ports import free_port

RELAY = Path(__file__).parents[1] / "fakes" / "slot_relay.py"
KEPT_FILE = re.compile(r"[0-9a-f]{32}\.kv\Z")


class SlotServer:
    """A llama-server with one slot, on one port as often as it is started; whoever asks after an agent takes it."""

    def __init__(self, folder: Path, kept: Path) -> None:
        path = llama.program()
        if path is None:
            pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
        self.program = path
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = folder / f"{llama.MODEL}.gguf"
        self._kept = kept
        self._log = folder / "llama.log"
        self._process: subprocess.Popen[bytes] | None = None
        subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(self.model)], check=True, stdout=subprocess.DEVNULL)

    def start(self, *more: str) -> None:
        """Returns when it answers. `more`: words of its command line, of two that say the same the later one holds."""
        words = [self.program, "--host", "127.0.0.1", "--port", self.port, "-m", self.model, "--alias", llama.MODEL]
        words += ["--parallel", 1, "-c", 16384, "--threads", 1, "--metrics", "--cache-ram", 0]
        words += ["--slots", "--slot-save-path", self._kept / "engine", *more]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([str(word) for word in words], stdout=log, stderr=log)
        server = llama.LlamaServer(self._process, f"127.0.0.1:{self.port}")
        until(server.is_loaded, within_s=60, what="the llama-server answers")

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self, *more: str) -> None:
        self.kill()
        self.start(*more)


class SlotHold:
    """The relay before a server, as a test sees it (fakes/slot_relay.py)."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._hold = folder / "hold"
        self._events = folder / "events"
        self._events.touch()

    def hold(self, place: str) -> None:
        """The next order that comes there is held up."""
        self._events.write_text("")
        self._hold.write_text(place)

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    @property
    def events(self) -> list[str]:
        return self._events.read_text().split("\n")[:-1]

    def until_held(self) -> None:
        until(lambda: "held" in self.events, within_s=60, what="an order is held up")


@contextmanager
def slot_server(folder: Path, kept: Path) -> Iterator[SlotServer]:
    """Started."""
    server = SlotServer(folder, kept)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def relay_before(server: SlotServer, folder: Path) -> Iterator[SlotHold]:
    port = free_port()
    words = [sys.executable, str(RELAY), str(port), str(server.port), str(folder)]
    hold = SlotHold(folder, port)
    with subprocess.Popen(words) as process:
        try:
            yield hold
        finally:
            process.kill()


def slot_config(kept: Path, *, more: str = "") -> str:
    return (
        f"[inference]\nllama_slot_dir = {kept}\nllama_slots_at = light\nllama_slots_max_mb = 64\n"
        f"[daemon]\nbackend_check_s = 0.2\n{more}"
    )


class Said(NamedTuple):
    """An answer: its text, the tokens of the prompt, and those of them that were reused."""

    text: str
    tokens: int
    reused: int

    @property
    def is_kept(self) -> bool:
        return self.reused >= 0.95 * self.tokens

    @property
    def is_cold(self) -> bool:
        return self.reused < self.tokens / 2


def prompt_of(agent: str) -> str:
    """Agents have little in common."""
    return f"I am agent {agent}, and {agent} is what {agent} remembers. " * 12


def say(hive: Stack, agent: str, model: str = llama.MODEL) -> Said:
    """One request of the agent's, with its prompt; always the same answer, whatever was kept."""
    with door_of(hive, agent).openai() as client:
        told = client.completions.create(model=model, prompt=prompt_of(agent), max_tokens=6, temperature=0)
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    return Said(told.choices[0].text, told.usage.prompt_tokens, told.usage.prompt_tokens_details.cached_tokens or 0)


def parking(hive: Stack) -> Any:
    return hive.get("/api/cache")["parking"]


def found(hive: Stack, what: str) -> int:
    count: int = parking(hive)["first_requests"][what]["sleeps"]
    return count


def is_named(hive: Stack) -> bool:
    """Whether the server's slots are named in requests: only then is anything kept."""
    first, again = say(hive, "one"), say(hive, "one")
    return first.text == again.text and again.is_kept


def files(kept: Path) -> list[Path]:
    """All that is in the directory but directories."""
    return sorted(path for path in kept.rglob("*") if not path.is_dir())


def rows(hive: Stack) -> list[Path]:
    """The files that the database knows."""
    with closing(sqlite3.connect(f"file:{hive.state / 'hive.db'}?mode=ro", uri=True)) as database:
        return sorted(Path(row[0]) for row in database.execute("SELECT file FROM parked_slots"))


def agree(hive: Stack, kept: Path) -> bool:
    """Whether the disk and the record say the same, and nothing is there besides."""
    there = files(kept)
    return there == rows(hive) and all(KEPT_FILE.search(path.name) for path in there)


def asleep(hive: Stack, agent: str) -> None:
    """The agent sleeps, and its slot is on the disk."""
    saved = parking(hive)["saved"]
    hive.post(f"/api/agents/{agent}/pause")
    until(lambda: parking(hive)["saved"] > saved, within_s=60, what="its slot is on the disk")
