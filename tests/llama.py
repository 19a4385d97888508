"""A real llama-server with a tiny random model, for tests; skipped with the reason where none is built."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

MODEL = "tiny"
MAKE_MODEL = Path(__file__).with_name("tools") / "make_tiny_gguf.py"
LOADED_WITHIN_S = 30.0


class LlamaServer:
    """`address` is `host:port` or a socket path; it serves `MODEL` in 4 slots and has `/metrics`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def is_loaded(self) -> bool:
        uds = self.address if self.address.startswith("/") else None
        if uds and not _listens(uds):
            return False
        try:
            with httpx.Client(transport=httpx.HTTPTransport(uds=uds, verify=False), trust_env=False) as client:
                return client.get(("http://localhost" if uds else self.url) + "/health").status_code == 200
        except httpx.TransportError:
            return False


def _listens(path: str) -> bool:
    """httpcore 1.0 leaves a socket open that could not be connected, so that is tried before."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def program() -> Path | None:
    """`HIVE_LLAMA_SERVER`, else what tests/tools/build_llama_server.sh left in its cache; None where neither is."""
    cache = os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")
    path = Path(os.environ.get("HIVE_LLAMA_SERVER", f"{cache}/llama/llama-server"))
    return path if os.access(path, os.X_OK) else None


@contextmanager
def serve(
    folder: Path,
    *,
    on_socket: bool = False,
    as_router: bool = False,
    template: str = "",
    tokens: int = 0,
    more: Sequence[str] = (),
) -> Iterator[LlamaServer]:
    """llama-server on a free port, or on a socket in `folder`, where its model and log lie too; ready to answer.

    `as_router`: it starts without a model and loads `MODEL` when it is first asked for. `template`: a chat template
    instead of the model's. `tokens`: size of its vocabulary. `more`: words of its command line.
    """
    path = program()
    if path is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    models, log = folder / "models", folder / "llama.log"
    models.mkdir()
    model = models / f"{MODEL}.gguf"
    made = [sys.executable, str(MAKE_MODEL), str(model), *(["--tokens", str(tokens)] if tokens else [])]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    port = free_port()
    address = str(folder / "llama.sock") if on_socket else f"127.0.0.1:{port}"
    command = [str(path), *(["--host", address] if on_socket else ["--host", "127.0.0.1", "--port", str(port)])]
    command += ["--models-dir", str(models)] if as_router else ["-m", str(model), "--alias", MODEL]
    if template:
        (folder / "template.jinja").write_text(template)
        command += ["--jinja", "--chat-template-file", str(folder / "template.jinja")]
    command += ["--parallel", "4", "--metrics", "-c", "16384", "--threads", "1", "--sse-ping-interval", "1", *more]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            server = LlamaServer(process, address)
            _wait_until_loaded(server, log)
            yield server
        finally:
            process.kill()


def _wait_until_loaded(server: LlamaServer, log: Path) -> None:
    until = time.monotonic() + LOADED_WITHIN_S
    while not server.is_loaded():
        said = log.read_text(errors="replace")
        assert server.process.poll() is None, f"llama-server ended: {said}"
        assert time.monotonic() < until, f"llama-server does not answer: {said}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """One llama-server on TCP for the whole run."""
    with serve(tmp_path_factory.mktemp("llama")) as server:
        yield server


@pytest.fixture(scope="session")
def llama_server_on_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """One llama-server on a unix socket for the whole run."""
    with serve(tmp_path_factory.mktemp("llamas"), on_socket=True) as server:
        yield server
