"""Ollama's pull and delete, against a stand-in that replays its published shapes (fakes/fake_ollama.py)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hive.backends.backend import open_backend
from hive.backends.pulling import PullProgress, delete, pull
from hive.domain import BackendKind
from hive.errors import BackendDown, NotFound

FAKE = Path(__file__).parents[1] / "fakes" / "fake_ollama.py"


@contextmanager
def ollama(*flags: str) -> Iterator[str]:
    """Its address."""
    with subprocess.Popen([sys.executable, str(FAKE), *flags], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.kill()


def pulls(address: str) -> list[str]:
    found = httpx.get(f"http://{address}/fake/pulls", trust_env=False).json()["pulls"]
    return [pull["state"] for pull in found]


async def test_a_pull_is_told_as_it_goes_and_the_model_is_there() -> None:
    with ollama("old", "--layer-bytes", "1000") as address:
        steps: list[PullProgress] = []
        await pull(address, "llama3.2", steps.append)
        assert [step.says for step in (steps[0], steps[-1])] == ["pulling manifest", "success"]
        assert (steps[0].total, steps[-1].completed, steps[-1].total) == (0, 2000, 2000)
        assert [step.completed for step in steps] == sorted(step.completed for step in steps)
        backend = open_backend(BackendKind.OLLAMA, address)
        assert [model.name for model in await backend.models()] == ["old:latest", "llama3.2:latest"]
        assert await open_backend(BackendKind.OLLAMA, address).loaded() == frozenset()
        await delete(address, "old")
        assert [model.name for model in await backend.models()] == ["llama3.2:latest"]
        with pytest.raises(NotFound):
            await delete(address, "old")
        with pytest.raises(NotFound, match="file does not exist"):
            await pull(address, "nonexistent", steps.append)


async def test_whoever_cancels_it_ends_it_at_the_server() -> None:
    with ollama("--delay", "0.05", "--pieces", "1000") as address:
        begun = asyncio.Event()
        pulling = asyncio.ensure_future(pull(address, "big", lambda _: begun.set()))
        await begun.wait()
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        for _ in range(500):
            if pulls(address) == ["gone"]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(pulls(address))


async def test_an_error_in_the_stream_is_no_success() -> None:
    with ollama("--fail", "dial tcp: lookup registry.ollama.ai: no such host") as address:
        with pytest.raises(BackendDown, match="no such host") as failed:
            await pull(address, "x", lambda _: None)
        assert "no network" in failed.value.hint
    with pytest.raises(BackendDown):
        await pull(address, "x", lambda _: None)
