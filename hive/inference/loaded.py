"""Which of its models a server has in memory, as far as it tells, and having it look for files that are new."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from hive.domain import BackendKind
from hive.errors import HiveError
from hive.inference import ask


class _Status(msgspec.Struct):
    value: str = ""


class _Row(msgspec.Struct):
    id: str = ""
    name: str = ""
    status: _Status | None = None


class _OpenAiList(msgspec.Struct):
    data: list[_Row]


class _OllamaList(msgspec.Struct):
    models: list[_Row] | None = None


async def loaded(kind: BackendKind, address: str) -> frozenset[str] | None:
    """By the server's names; None where it does not tell or does not answer within 2 s. Nothing is loaded or woken.

    vLLM and a llama-server with one model have in memory whatever they list; a router says of each.
    """
    try:
        if kind is BackendKind.OLLAMA:
            running = await ask.get_shape(address, "/api/ps", _OllamaList)
            return frozenset(row.name for row in running.models or [])
        if kind not in (BackendKind.VLLM, BackendKind.LLAMA):
            return None
        listed = await ask.get_shape(address, "/v1/models", _OpenAiList)
    except HiveError:
        return None
    return frozenset(row.id for row in listed.data if row.status is None or row.status.value == "loaded")


async def look_for_files(kind: BackendKind, address: str) -> None:
    """A router of llama-server lists what was in its directory when it started, until it is told to look again (seen,
    commit 0c1e570); others do so whenever they are asked. Never raises."""
    if kind is BackendKind.LLAMA:
        with suppress(HiveError):
            await ask.get(address, "/models?reload=1")
