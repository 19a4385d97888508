"""Becomes an inference server: looks whether it can be started at all, then is replaced by it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from hive.backends.launch import RUNTIME, STATE, launch, without_ram_cache
from hive.backends.slot_place import with_slot_place
from hive.backends.speculation import DRAFT
from hive.backends.vllm_numba import check_numba
from hive.domain import BackendKind
from hive.errors import DependencyDown
from hive.host.process import replace
from hive.settings.pool import OLLAMA
from hive.settings.table import Settings
from hive.worker.place import check, free

log = logging.getLogger("hive.worker")
OLLAMAS_OWN = 3
"""Models that an Ollama holds on one GPU if nothing is said (server/sched.go of 2026-08)."""


def for_pool(kind: str, settings: Settings, environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a server of `kind`: an Ollama holds at least as many models as the pool has of it, besides
    those that it would hold anyway. What the environment says itself goes before.

    >>> from hive.settings.pool import ModelRow
    >>> settings = Settings(models={"a": ModelRow(backend="ollama"), "b": ModelRow(file="/b.gguf")})
    >>> for_pool("ollama", settings, {}), for_pool("vllm", settings, {"A": "1"})
    ({'OLLAMA_MAX_LOADED_MODELS': '4'}, {'A': '1'})
    """
    pooled = sum(row.backend == OLLAMA for row in settings.models.values()) if settings.pool.enabled else 0
    if kind != OLLAMA or not pooled:
        return environment
    return {"OLLAMA_MAX_LOADED_MODELS": str(pooled + OLLAMAS_OWN)} | dict(environment)


def become(
    kind: str,
    settings: Settings,
    environment: Mapping[str, str],
    *,
    runtime: Path | None = None,
    state: Path | None = None,
) -> NoReturn:
    """This process goes on as the server of `kind`, with its socket in `runtime` and its caches in `state`.

    Raises DependencyDown with what to do where program or model is missing, WrongState where one serves already,
    ConfigError where the draft model does not go with the model.
    """
    settings = with_slots(kind, settings, is_installed=state is None)
    inference = without_ram_cache(settings)
    found = launch(
        kind,
        inference,
        environment,
        runtime=runtime or RUNTIME,
        state=state or STATE,
        max_rank=settings.adapters.max_rank,
    )
    check(found.needed)
    check_numba(kind, settings.inference, settings.inference.speculative)
    if settings.inference.speculative == DRAFT:
        from hive.up.service_draft import check_draft  # what the pool reads of files: other starts need none of it

        check_draft(kind, settings.inference)
    with suppress(OSError):  # llama-server starts with no directory that is not there, and says so
        (state or STATE).mkdir(parents=True, exist_ok=True)
    if found.socket is not None:
        free(found.socket)
    try:
        replace(found.command, env=found.environment)
    except OSError as error:
        raise DependencyDown(f"{found.command[0]} cannot be executed: {error.strerror}") from error


def with_slots(kind: str, settings: Settings, *, is_installed: bool) -> Settings:
    """The settings of a service of this kind. A server by itself, for a try, belongs to no daemon that would keep its
    slots; one of another kind has none."""
    if not is_installed or kind != BackendKind.LLAMA:
        inference = msgspec.structs.replace(settings.inference, llama_slot_dir="")
        return msgspec.structs.replace(settings, inference=inference)
    found, why = with_slot_place(settings, is_apart=True, is_server=True)
    if why:
        logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
        log.warning("slots_not_kept reason=%r", why)
    return found
