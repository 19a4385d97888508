"""Which backend `hive up` serves: the one asked for, else a real one that answers on loopback, else the demo."""

from __future__ import annotations

import asyncio

from hive.domain import BackendInfo, BackendKind
from hive.errors import DependencyDown
from hive.inference.ask import parse_address
from hive.inference.recognise import CANDIDATES, find, recognise

USE_DEMO = "`hive up --backend demo` needs no model"


async def choose_backend(asked: str | None, *, configured: str | None) -> BackendInfo | None:
    """The backend to use, None for the demo backend.

    `asked`: a kind, `demo`, a URL or an address, None for whatever answers. `configured`: the address hive.conf
    names, looked at first. Raises UsageError (no address), DependencyDown (what was asked for does not answer).
    """
    candidates = (configured, *CANDIDATES) if configured is not None else CANDIDATES
    if asked is None or asked == "auto":
        found = await find(candidates)
        return None if found is not None and found.kind is BackendKind.DEMO else found
    if asked == BackendKind.DEMO:
        return None
    if asked in list(BackendKind):
        return await _of_kind(BackendKind(asked), candidates)
    address = parse_address(asked)
    found = await recognise(address)
    if found is None:
        raise DependencyDown(f"no Ollama, vLLM or llama-server answers at {address}", hint=f"start it; {USE_DEMO}")
    return found


async def _of_kind(kind: BackendKind, candidates: tuple[str, ...]) -> BackendInfo:
    found = await asyncio.gather(*(recognise(address) for address in candidates))
    for info in found:
        if info is not None and info.kind is kind:
            return info
    raise DependencyDown(
        f"no {kind} answers at {', '.join(candidates)}", hint=f"start it, or give its URL with --backend; {USE_DEMO}"
    )
