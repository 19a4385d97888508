"""Questions to the server of a slot, once it serves."""

from __future__ import annotations

import asyncio

from hive.backends.backend import open_backend
from hive.backends.concurrency import choose_places, named_slots
from hive.backends.described import takes_priority
from hive.backends.entries import ModelEntry
from hive.backends.kinds import spec_of
from hive.domain import BackendInfo, ModelInfo
from hive.settings.pool import as_ollama
from hive.settings.table import Settings


async def describe(entry: ModelEntry, address: str, settings: Settings) -> tuple[BackendInfo, ModelInfo | None]:
    """The server of this entry at `address`, and its model as it lists it. Raises BackendDown, BackendTimeout."""
    if entry.is_remote:
        return remote_info(entry, address), None
    control = open_backend(entry.kind, address)
    version, models, capabilities, busy = await asyncio.gather(
        control.version(), control.models(), control.capabilities(), control.busy()
    )
    places, places_from = choose_places(entry.kind, busy.places, settings)
    if entry.row.parallel:
        places, places_from = entry.row.parallel, f"parallel in {entry.origin}"
    backend = BackendInfo(
        kind=entry.kind,
        address=address,
        label=f"{spec_of(entry.kind).label} with {entry.name}",
        version=version,
        up=True,
        places=places,
        places_from=places_from,
        priority=takes_priority(entry.kind, settings, capabilities),
        capabilities=capabilities,
        id_slots=named_slots(entry.kind, busy.places, settings),
    )
    if entry.is_ollamas:
        wanted = as_ollama(entry.at_server)
        return backend, next((model for model in models if as_ollama(model.name) == wanted), None)
    return backend, next((model for model in models if model.name == entry.name), None)


def remote_info(entry: ModelEntry, address: str) -> BackendInfo:
    """The server of a remote entry. It is asked nothing: what is far hears of no request that nobody made, and OpenAI's
    schema alone is taken for granted."""
    spec, places = spec_of(entry.kind), entry.row.parallel or None
    return BackendInfo(
        kind=entry.kind,
        address=address,
        label=f"{spec.label} with {entry.name}",
        up=True,
        places=places,
        places_from=f"parallel in {entry.origin}" if places else "a remote server does not tell",
        capabilities=spec.asking.assumed,
    )
