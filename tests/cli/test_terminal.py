"""Commands as programs on a terminal: what is drawn, and what Ctrl-C ends there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.control.threaded_box import ThreadedBox

WITHIN_S = 30.0
EVENT = b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n'


class Endless(BaseHTTPRequestHandler):
    """A model that talks until its client leaves."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(EVENT)
                time.sleep(0.02)
        except OSError:
            self.server.left.release()  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    server.daemon_threads = True
    server.left = threading.Semaphore(0)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def shared_proxy_port(proxy: ThreadingHTTPServer) -> int:
    return proxy.server_port


class Terminal:
    """A program on a terminal of 100 columns; it gets what is typed, `shown` is all it wrote."""

    def __init__(self, *words: str, socket: Path) -> None:
        self.fd, of_program = pty.openpty()
        fcntl.ioctl(of_program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hive", *words, "--socket", str(socket)],
            stdin=of_program,
            stdout=of_program,
            stderr=of_program,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(of_program)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupted(self, word: str) -> str:
        """`until` after Ctrl-C at a prompt: again where it came between the prompt and the wait for a key, which
        Python's readline sleeps through."""
        return self.until(word, again="\x03")

    def until(self, word: str, *, again: str = "") -> str:
        """The output until `word` was shown; the next call does not show it again."""
        ends, typed_at = time.monotonic() + WITHIN_S, 0.0
        while word not in self.shown:
            if again and time.monotonic() - typed_at > 1:
                self.type(again)
                typed_at = time.monotonic()
            assert time.monotonic() < ends, self.shown
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # its end is closed
                    break
        before, found, self.shown = self.shown.partition(word)
        assert found, before
        return before + found

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(WITHIN_S)
        os.close(self.fd)
        return code


@pytest.fixture
def start(shared_daemon: ThreadedBox) -> Iterator[object]:
    begun: list[Terminal] = []

    def one(*words: str) -> Terminal:
        begun.append(Terminal(*words, socket=shared_daemon.socket))
        return begun[-1]

    yield one
    for terminal in begun:
        if terminal.process.poll() is None:
            terminal.process.send_signal(signal.SIGKILL)
            terminal.end()


def test_ctrl_c_ends_an_answer_for_the_model_too_and_not_the_conversation(start, proxy: ThreadingHTTPServer) -> None:  # type: ignore[no-untyped-def]
    chat = start("run", "llama3.2", "--verbose")
    chat.until("> ")
    for question in ("one", "two"):
        chat.type(f"{question}\n")
        chat.until("word word")
        chat.type("\x03")
        assert proxy.left.acquire(timeout=WITHIN_S)  # type: ignore[attr-defined]
        assert "Ended: stopped" in chat.until("> ")
    chat.interrupted("Ctrl-D or /bye ends the conversation")
    chat.type('"""half\n')
    chat.until("... ")
    chat.interrupted("Ctrl-D or /bye ends the conversation")
    chat.until("> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_ctrl_c_ends_a_single_answer_with_exit_code_130(start) -> None:  # type: ignore[no-untyped-def]
    once = start("run", "llama3.2", "hi")
    once.until("word word")
    once.type("\x03")
    assert once.end() == 130


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x04", 1)])
def test_a_question_that_is_left_changes_nothing(start, key: str, code: int) -> None:  # type: ignore[no-untyped-def]
    """Ctrl-C at a question was an error of the code `internal`, with exit code 1."""
    asking = start("agent", "remove", "alice")
    asking.until("[y/N]: ")
    assert "\r\nhive: nothing was changed" in asking.until("[not_confirmed]", again=key)
    assert asking.end() == code
    still_there = start("agent", "show", "alice")
    still_there.until("Status: ")
    assert still_there.end() == 0


def test_a_pull_is_a_bar_and_ctrl_c_leaves_it_running(start) -> None:  # type: ignore[no-untyped-def]
    pulling = start("model", "pull", "slow")
    pulling.until("  50 % [############            ] 1.9 MiB of 3.8 MiB")
    pulling.type("\x03")
    assert "the pull goes on" in pulling.until("what is there")
    assert pulling.end() == 130
    cancelled = start("model", "pull", "slow", "--cancel")
    cancelled.until("it was cancelled")
    assert cancelled.end() == 0
