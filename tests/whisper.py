"""A real hive-runner with real Whisper weights, and speech for it, for tests; skipped with the reason without."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ports import is_healthy

ROOT = Path(__file__).parents[1]
UP_WITHIN_S = 120.0
"""2 s on an idle machine."""
SPOKEN = (
    "The agents sleep in the hive, and wake when somebody calls them. "
    "The box makes room for the model, and nobody has to wait for long."
)
GERMAN = "Guten Morgen. Das Wetter ist heute sehr schön, und wir gehen mit dem Hund in den Park."


def cache() -> Path:
    return Path(os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")) / "whisper"


def model(name: str = "tiny.en") -> Path:
    """The directory of a model; skips the test without it."""
    path = cache() / "models" / name
    if not (path / "model.bin").is_file() or shutil.which("espeak-ng") is None:
        pytest.skip("no Whisper: run tests/tools/setup_whisper.sh")
    return path


def program(folder: Path) -> Path:
    """A hive-runner of this tree, as `pip install '.[whisper]'` makes one, in Whisper's environment."""
    model()
    path = folder / "hive-runner"
    if not path.exists():
        lines = (
            f"#!{cache()}/venv/bin/python",
            f"import sys; sys.path.insert(0, {str(ROOT)!r})",
            "from hive.runner.entry import run",
            "run()",
        )
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)
    return path


def speech(path: Path, text: str = SPOKEN, voice: str = "en") -> Path:
    """A WAV file in which espeak-ng says `text`."""
    subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", str(path), text], check=True, capture_output=True)
    return path


def silence(path: Path, seconds: float) -> Path:
    """A WAV file in which nobody says anything."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        for _ in range(int(seconds)):
            file.writeframes(b"\0\0" * 8000)
    return path


def word_error_rate(said: str, heard: str) -> float:
    """Words to be put in, taken out or changed for each word that was said.

    >>> word_error_rate("the agents sleep", "The agent sleeps."), word_error_rate("a b", "A, b!")
    (0.6666666666666666, 0.0)
    """
    wanted, found = (re.findall(r"[^\W_]+", text.lower()) for text in (said, heard))
    row = list(range(len(found) + 1))
    for number, word in enumerate(wanted, 1):
        last, row[0] = row[0], number
        for place, other in enumerate(found, 1):
            last, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, last + (word != other))
    return row[-1] / max(1, len(wanted))


class WhisperRunner:
    """`client` talks to it; `process` is it."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
        self.process, self.socket, self.log = process, socket, log
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket), verify=False), base_url="http://r", timeout=120
        )

    def is_up(self) -> bool:
        return is_healthy(self.socket)

    def hear(self, file: Path, path: str = "/v1/audio/transcriptions", **fields: str | list[str]) -> httpx.Response:
        with file.open("rb") as opened:
            return self.client.post(path, data={"model": "w", **fields}, files={"file": ("audio", opened)})


@contextmanager
def runner(folder: Path, name: str = "tiny.en", *flags: str) -> Iterator[WhisperRunner]:
    """Serves a model until the context ends."""
    socket, log = folder / "w.sock", folder / "w.log"
    words = ("--socket", str(socket), "--name", "w", "--spool", str(folder), "--model", str(model(name)), *flags)
    with log.open("wb") as output:
        process = subprocess.Popen([str(program(folder)), "whisper", *words], stdout=output, stderr=output)
    served = WhisperRunner(process, socket, log)
    try:
        until = time.monotonic() + UP_WITHIN_S
        while not served.is_up():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, f"not up: {log.read_text()}"
            time.sleep(0.1)
        yield served
    finally:
        served.client.close()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
