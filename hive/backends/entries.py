"""The entries of the pool: every model that root has described, each with the id of its slot. Pure.

An id is made of the name (slug and 8 hex of its SHA-256), because names hold `/` and `:` and a path of a socket ends
at 107 bytes. Daemon, helper and supervisor make the same entries of the same settings.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hive.domain import BackendKind
from hive.settings.pool import ModelRow
from hive.settings.table import Settings

SLUG_MAX = 20
GGUF = ".gguf"


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the pool as it is described. `id`: of its slot; `path`: its file or directory; `origin`: where it
    is described, for people."""

    id: str
    name: str
    kind: str
    path: Path
    row: ModelRow
    origin: str = ""


def slot_id(name: str) -> str:
    """The id of the slot of the model `name`.

    >>> slot_id("meta-llama/Llama-3.1:8b"), slot_id("qwen3-8b")
    ('meta-llama-llama-3-1-5e5b7f4f', 'qwen3-8b-f9b30c0d')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:SLUG_MAX].strip("-")
    return f"{slug or 'model'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def entries_of(settings: Settings, found: Mapping[str, Path] | None = None) -> dict[str, ModelEntry]:
    """The entries by slot id: those described, then those of `found` (name -> path, files of `models_dir`) with another
    name, if `[pool] found` wants them: GGUF files for llama-server, directories for vLLM. None where the pool is not
    enabled."""
    if not settings.pool.enabled:
        return {}
    entries: dict[str, ModelEntry] = {}
    for name, row in settings.models.items():
        entries[slot_id(name)] = ModelEntry(
            id=slot_id(name), name=name, kind=row.backend, path=Path(row.file), row=row, origin=f"[model {name}]"
        )
    for name, path in (found or {}).items() if settings.pool.found else ():
        if slot_id(name) not in entries:
            kind = BackendKind.LLAMA if path.suffix == GGUF else BackendKind.VLLM
            row = ModelRow(backend=kind, file=str(path))
            entries[slot_id(name)] = ModelEntry(
                id=slot_id(name), name=name, kind=kind, path=path, row=row, origin=str(path)
            )
    return entries
