"""The backend for `hive up`: the one asked for, else a real one that answers on loopback, else the demo."""

from __future__ import annotations

import asyncio

from hive.backends.ask import parse_address
from hive.backends.kinds import SPECS, spec_of
from hive.backends.recognise import CANDIDATES, find, recognise, why_unknown
from hive.domain import BackendInfo
from hive.errors import DependencyDown
from hive.host.access import NO_ACCESS, RemoteAccess

USE_DEMO = "`hive up --backend demo` needs no model"


async def choose_backend(
    asked: str | None, *, configured: str | None, url: str = "", access: RemoteAccess = NO_ACCESS
) -> BackendInfo | None:
    """The backend to use, None for the demo backend.

    `asked`: a kind, `demo`, a URL or an address, None for whatever answers. `configured`: the address hive.conf
    names, looked at first; `url`: the one it names as `backend_url`, which counts where nothing else is asked for.
    `access`: the key and the authorities for a server that was named.

    Raises UsageError (no address), DependencyDown (what was asked for does not answer), ConfigError.
    """
    spec = SPECS.get(asked or "")
    if url and (asked in (None, "auto") or (spec is not None and spec.is_remote)):
        asked, spec = url, None
    candidates = (configured, *CANDIDATES) if configured is not None else CANDIDATES
    if asked is None or asked == "auto":
        found = await find(candidates)
        return None if found is not None and spec_of(found.kind).is_canned else found
    if spec is not None:
        return None if spec.is_canned else await _of_kind(spec.kind, candidates)
    address = parse_address(asked)
    found = await recognise(address, access)
    if found is None:
        why = await why_unknown(address, access)
        raise DependencyDown(f"no inference server answers at {address}: {why}", hint=f"start it; {USE_DEMO}")
    return found


async def _of_kind(kind: str, candidates: tuple[str, ...]) -> BackendInfo:
    found = await asyncio.gather(*(recognise(address) for address in candidates))
    for info in found:
        if info is not None and info.kind == kind:
            return info
    raise DependencyDown(
        f"no {kind} answers at {', '.join(candidates)}", hint=f"start it, or give its URL with --backend; {USE_DEMO}"
    )
