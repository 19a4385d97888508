"""The entries of the pool: every model that root has described, each with the id of its slot. Pure.

An id is made of the name (slug and 8 hex of its SHA-256), because names hold `/` and `:` and a path of a socket ends
at 107 bytes. Daemon, helper and supervisor make the same entries of the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hive.domain import BackendKind
from hive.settings.pool import ModelRow, slot_id
from hive.settings.table import Settings

GGUF = ".gguf"


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the pool as it is described. `id`: of its slot; `path`: its file or directory, of Ollama's and
    remote ones their name there; `origin`: where it is described, for people; `draft`: the files of the model that it
    drafts with."""

    id: str
    name: str
    kind: str
    path: Path
    row: ModelRow
    origin: str = ""
    draft: Path | None = None

    @property
    def at_server(self) -> str:
        """The name by which its server knows it."""
        return self.name if self.has_server_here else str(self.path)

    @property
    def is_ollamas(self) -> bool:
        """Whether it is one of the models of an Ollama."""
        return self.kind == BackendKind.OLLAMA

    @property
    def is_remote(self) -> bool:
        """Whether its server is somebody else's, at `url`: it takes no memory here."""
        return self.kind == BackendKind.REMOTE

    @property
    def has_server_here(self) -> bool:
        """Whether it has a server of its own, which the helper starts."""
        return not (self.is_ollamas or self.is_remote)


def entries_of(settings: Settings, found: Mapping[str, Path] | None = None) -> dict[str, ModelEntry]:
    """The entries by slot id: those described, then those of `found` (name -> path, files of `models_dir`) with another
    name, if `[pool] found` wants them: GGUF files for llama-server, directories for vLLM. None where the pool is not
    enabled."""
    if not settings.pool.enabled:
        return {}
    entries: dict[str, ModelEntry] = {}
    for name, row in settings.models.items():
        if row.role == "draft":  # it has no server of its own, so nobody can ask for it
            continue
        draft = settings.models.get(row.draft) if row.draft else None
        entries[slot_id(name)] = ModelEntry(
            id=slot_id(name),
            name=name,
            kind=row.backend,
            path=Path(row.file or name),
            row=row,
            origin=f"[model {name}]",
            draft=None if draft is None else Path(draft.file),
        )
    for name, path in (found or {}).items() if settings.pool.found else ():
        if name not in settings.models and slot_id(name) not in entries:
            kind = BackendKind.LLAMA if path.suffix == GGUF else BackendKind.VLLM
            row = ModelRow(backend=kind, file=str(path))
            entries[slot_id(name)] = ModelEntry(
                id=slot_id(name), name=name, kind=kind, path=path, row=row, origin=str(path)
            )
    return entries


def started_entries(entries: Mapping[str, ModelEntry]) -> dict[str, ModelEntry]:
    """Those of them with a server of their own."""
    return {id: entry for id, entry in entries.items() if entry.has_server_here}
