"""A real `hive-runner diffusers` on the CPU with tiny random pipelines; skipped with the reason where none is there."""

from __future__ import annotations

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

from tests.ports import is_healthy

TREE = Path(__file__).parents[1]
CLASSES = {
    "sd": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
}
UP_WITHIN_S = 120.0
"""About 8 s on two idle cores, most of it for importing torch."""
LACKING = "no diffusers: run tests/tools/setup_diffusers.sh or set HIVE_DIFFUSERS_VENV"


class DiffusersRunner:
    """The process, its socket and its log."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
        self.process, self.socket, self.log = process, socket, log

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.socket))
        return httpx.Client(transport=transport, base_url="http://runner", timeout=timeout_s, trust_env=False)

    def is_up(self) -> bool:
        return is_healthy(self.socket)


def environment() -> Path | None:
    """`HIVE_DIFFUSERS_VENV`, else what tests/tools/setup_diffusers.sh left in its cache; None where neither is."""
    cache = os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")
    venv = Path(os.environ.get("HIVE_DIFFUSERS_VENV", f"{cache}/diffusers/venv"))
    return venv if (venv.with_name("pipelines") / "flux").is_dir() else None


def pipeline(kind: str) -> Path:
    """The directory of the tiny pipeline of a class. Skips where there is none."""
    if (venv := environment()) is None:
        pytest.skip(LACKING)
    return venv.with_name("pipelines") / kind


def runner_program(folder: Path) -> Path:
    """A `hive-runner` of that environment, as its console script would be, with this tree's code. With one thread:
    more of them mostly wait for each other, with so small a model, and spin."""
    if (venv := environment()) is None:
        pytest.skip(LACKING)
    program = folder / "hive-runner"
    python = venv / "bin" / "python"
    lines = (
        f"#!{python}",
        "import os, sys",
        "os.environ.setdefault('OMP_NUM_THREADS', '1')",
        f"sys.path.insert(0, {str(TREE)!r})",
        "from hive.runner.entry import run",
        "run()",
    )
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return program


@contextmanager
def started(model: Path, more: Sequence[str] = ()) -> Iterator[DiffusersRunner]:
    """The runner of a pipeline as it starts; killed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="hive-img-"))
    log, socket = folder / "log", folder / "s"
    command = [str(runner_program(folder)), "diffusers", "--socket", str(socket), "--name", "tiny"]
    try:
        with (
            log.open("wb") as out,
            subprocess.Popen(
                [*command, "--model", str(model), *more],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "HOME": str(folder)},
            ) as process,
        ):
            try:
                yield DiffusersRunner(process, socket, log)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def served(model: Path, more: Sequence[str] = ()) -> Iterator[DiffusersRunner]:
    """The same, once it is up."""
    with started(model, more) as runner:
        until = time.monotonic() + UP_WITHIN_S
        while not runner.is_up():
            assert runner.process.poll() is None, runner.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < until, runner.log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)
        yield runner
