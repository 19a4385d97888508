"""A real vLLM on the CPU with a tiny random model, for tests; skipped with the reason where none is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

MODEL = "tiny"
SEQUENCES = 4
"""Requests it works on at once; the others wait in its own queue."""
NO_SPACE = '{"backend":"xgrammar","disable_any_whitespace":true}'
"""A random model writes white space between two words of JSON for ever, where it may."""
TAKES_ADAPTERS = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
MAKE_MODEL = Path(__file__).with_name("tools") / "make_tiny_hf_model.py"
SERVE = MAKE_MODEL.with_name("serve_vllm.py")
UP_WITHIN_S = 300.0
"""About 25 s on two idle cores; more than 100 s were seen on a machine that others had half of."""


class VllmServer:
    """`address` is `host:port`; it serves `MODEL`, `SEQUENCES` requests at once, by priority."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


def environment() -> Path | None:
    """`HIVE_VLLM_VENV`, else what tests/tools/setup_vllm_cpu.sh left in its cache; None where neither is."""
    cache = os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")
    venv = Path(os.environ.get("HIVE_VLLM_VENV", f"{cache}/vllm/venv"))
    return venv if os.access(venv / "bin" / "vllm", os.X_OK) else None


def model_for(venv: Path, folder: Path) -> Path:
    """The model beside the environment, else one made in `folder`."""
    if (made := venv.with_name("model")).is_dir():
        return made
    model = folder / "model"
    subprocess.run([venv / "bin" / "python", MAKE_MODEL, model], check=True, stdout=subprocess.DEVNULL)
    return model


def cache_for(venv: Path, folder: Path) -> Path:
    """The directory beside the environment where vLLM keeps what it found out about its own classes of models.

    A process of its own finds that out, a quarter of the CPU time of a start. `folder` where none can be written there.
    """
    kept = venv.with_name("cache")
    with contextlib.suppress(OSError):
        kept.mkdir(exist_ok=True)
    return kept if os.access(kept, os.W_OK) else folder


@contextmanager
def serve(
    venv: Path,
    folder: Path,
    model: Path | None = None,
    *,
    more: Sequence[str] = ("--enable-prefix-caching",),
    port: int = 0,
) -> Iterator[VllmServer]:
    """vLLM on this port, or a free one, all that it writes in `folder`; ready to answer. `more`: words of its command
    line."""
    port, log = port or free_port(), folder / "vllm.log"
    command = [str(venv / "bin" / "python"), "-P", str(SERVE)]
    command += ["--model", str(model or model_for(venv, folder)), "--served-model-name", MODEL, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-num-seqs", str(SEQUENCES), "--scheduling-policy", "priority"]
    # In bfloat16 its attention uses AMX wherever the CPU names it; not every kernel lets a process (SIGILL at the first
    # token).
    command += ["--dtype", "float32"]
    command += ["--enforce-eager", "--block-size", "32", "--enable-prompt-tokens-details", *more]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # Its worker in the engine's process: one process less that begins with torch. It allows that on a CPU with the
    # other setting only, of which the server passes over what it says itself.
    command += ["--distributed-executor-backend", "uni"]
    places = {name: str(folder) for name in ("HF_HOME", "VLLM_CONFIG_ROOT", "TMPDIR")}
    places["VLLM_CACHE_ROOT"] = str(cache_for(venv, folder))
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",  # more of them mostly wait for each other, with so small a model, and spin
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **places, **settings},
        ) as process,
    ):
        try:
            server = VllmServer(process, f"127.0.0.1:{port}")
            _wait_until_up(server, log)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the engine and its worker are processes of their own


def _wait_until_up(server: VllmServer, log: Path) -> None:
    until = time.monotonic() + UP_WITHIN_S
    while not server.is_up():
        assert server.process.poll() is None, f"vLLM ended: {log.read_text(errors='replace')[-3000:]}"
        assert time.monotonic() < until, f"vLLM does not answer: {log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.2)


@contextmanager
def served(*more: str, port: int = 0) -> Iterator[VllmServer]:
    """A vLLM on TCP, skipped with the reason. Its sockets lie in its folder, so that has a short name."""
    venv = environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    folder = Path(tempfile.mkdtemp(prefix="hive-vllm-"))
    try:
        with serve(venv, folder, more=("--enable-prefix-caching", *more), port=port) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[VllmServer]:
    """One vLLM for the whole run."""
    with served("--structured-outputs-config", NO_SPACE, *TAKES_ADAPTERS) as server:
        yield server
