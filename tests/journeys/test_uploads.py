"""Files of agents through a whole Hive, by clients as they are: `curl -F` and `openai`, before a stand-in runner."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis]
RUNNER = Path(__file__).parents[1] / "fakes" / "fake_runner.py"
WEIGHTS = struct.pack("<IH", 6, 12) + b"WhisperSpec\0" + struct.pack("<III", 3, 0, 0)
PATH = "/v1/audio/transcriptions"


def whisper_config(folder: Path) -> str:
    """A model whose server is the stand-in; its weights have no tensor in them."""
    folder.chmod(0o755)
    model = folder / "model"
    model.mkdir()
    (model / "model.bin").write_bytes(WEIGHTS)
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    return (
        f"[inference]\nwhisper_program = {RUNNER}\n"
        "[pool]\nreserve_mb = 0\ncpu_mb = 500\n"
        f"[model ear]\nbackend = whisper\nfile = {model}\nvram_mb = 50\n"
    )


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Stack]:
    with stack(config=whisper_config(tmp_path)) as hive:
        hive.create("alice", "idler.py")
        yield hive


def access_of(hive: Stack) -> Any:
    return hive.get("/api/agents/alice/tokens")


def curl(hive: Stack, *words: str) -> tuple[int, Any]:
    access = access_of(hive)
    done = subprocess.run(
        [
            *("curl", "-sS", "-w", "\n%{http_code}", "-H", f"authorization: Bearer {access['model']}"),
            *words,
            f"{access['openai_base_url']}/audio/transcriptions",
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), json.loads(body)


@pytest.mark.wide
def test_clients_as_they_are_send_their_files(hive: Stack, tmp_path: Path) -> None:
    """curl sends the file before the model's name, and asks before it sends a long one; openai-python the name first.
    The first request finds the model not loaded."""
    for size in (190_000, 24 << 20):
        clip = tmp_path / "clip.wav"
        clip.write_bytes(os.urandom(size))
        wanted = hashlib.sha256(clip.read_bytes()).hexdigest()
        status, told = curl(hive, "-F", f"file=@{clip}", "-F", "model=ear", "-F", "temperature=0")
        assert (status, told["sha256"], told["fields"]) == (200, wanted, {"model": "ear", "temperature": "0"})
        access = access_of(hive)
        with openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0) as client:
            answer: Any = client.audio.transcriptions.create(
                model="ear", file=clip, timestamp_granularities=["word", "segment"], response_format="verbose_json"
            )
            assert (answer.text, answer.sha256) == ("the quick brown fox", wanted)
            assert answer.fields["timestamp_granularities[]"] == "segment"
            with pytest.deprecated_call():  # by openai, whose newest models have it no more
                assert client.audio.translations.create(model="ear", file=clip).text == "the quick brown fox"
    assert nameless(hive.pid_of("proxy")) == []


def nameless(pid: int) -> list[int]:
    """Bytes of each file without a name that a process has open."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/") and not os.stat(path).st_nlink:
                found.append(os.stat(path).st_size)
    return found


def test_what_is_refused_is_refused_in_words(hive: Stack, tmp_path: Path) -> None:
    clip = tmp_path / "clip.wav"
    clip.write_bytes(bytes(26 << 20))
    status, told = curl(hive, "-F", f"file=@{clip}", "-F", "model=ear")
    assert (status, "exceeds" in told["error"]["message"]) == (413, True)
    clip.write_bytes(b"RIFF")
    status, told = curl(hive, "-F", f"file=@{clip}", "-F", "model=none")
    assert status == 404
    status, told = curl(hive, "-F", f"file=@{clip}", "-F", f"mask=@{clip}", "-F", "model=ear")
    assert (status, '"mask" is a file' in told["error"]["message"]) == (400, True)


@pytest.mark.wide
def test_a_proxy_that_is_killed_leaves_nothing_of_a_file(hive: Stack, tmp_path: Path) -> None:
    clip = tmp_path / "clip.wav"
    clip.write_bytes(os.urandom(20 << 20))
    curl(hive, "-F", f"file=@{clip}", "-F", "model=ear")
    spool = hive.state / "spool"
    asked = threading.Thread(
        target=lambda: subprocess.run(
            [
                *("curl", "-s", "-F", f"file=@{clip}", "-F", "model=ear", "-F", "prompt=wait 30"),
                *("-H", f"authorization: Bearer {access['model']}"),
                f"{access['openai_base_url']}/audio/transcriptions",
            ],
            check=False,
            capture_output=True,
        )
    )
    access = access_of(hive)
    asked.start()
    dead = hive.pid_of("proxy")
    until(lambda: nameless(dead) == [20 << 20], within_s=30, what="the file is there")
    os.kill(dead, signal.SIGKILL)
    asked.join()
    hive.wait_for_next("proxy", dead)
    assert not [path.name for path in spool.rglob("*") if path.stat().st_size > 1 << 20]
    status, _ = curl(hive, "-F", f"file=@{clip}", "-F", "model=ear")
    assert status == 200
