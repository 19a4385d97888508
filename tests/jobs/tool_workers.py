"""Workers with tools on scripted servers, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from hive.jobs import llama_worker
from hive.jobs.running import Tool
from hive.worker.bios import BiosForm
from hive.worker.worker import LlamaWorker
from tests.worker.scripted import PATIENT, Folder


@asynccontextmanager
async def tool_worker(
    folder: Path, tools: Iterable[Tool | Callable[..., Any]], *flags: str, **more: Any
) -> AsyncIterator[LlamaWorker]:
    """A worker that is ready; in the end nothing of it is left."""
    place = Folder(folder)
    told: dict[str, Any] = {"slots": 2, "profile": PATIENT, "bios": BiosForm.OFF, "exit_tools": ()} | more
    found = llama_worker(place.launch("--asked", str(folder / "asked"), *flags), tools=tools, **told)
    try:
        await found.start()
        yield found
    finally:
        await found.stop()
    assert not place.alive()
    assert not place.socket.exists()


def bodies(folder: Path) -> list[dict[str, Any]]:
    """Bodies that its servers were sent, but for those at their starts."""
    file = folder / "asked"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    asked = [msgspec.json.decode(line) for line in whole.splitlines()]
    return [body for body in asked if body["messages"][-1]["content"] != "Hi"]


def results_in(body: dict[str, Any]) -> list[str]:
    """Results of tools in a body, without what is said of the budget."""
    return [str(one["content"]).rpartition("\n\n[")[0] for one in body["messages"] if one["role"] == "tool"]
