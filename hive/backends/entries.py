"""The entries of the pool: every model that root has described, each with the id of its slot. Pure.

An id is made of the name (slug and 8 hex of its SHA-256), because names hold `/` and `:` and a path of a socket ends
at 107 bytes. Daemon, helper and supervisor make the same entries of the same settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from hive.adapters.record import GGUF as GGUF_FORMAT
from hive.adapters.record import AdapterRecord
from hive.domain import BackendKind
from hive.settings.comfyui import NAME as COMFYUI
from hive.settings.comfyui import ComfyuiSection
from hive.settings.pool import ModelRow, slot_id
from hive.settings.table import Settings

GGUF = ".gguf"


MIB = 1 << 20
FILE_OF_KIND = {BackendKind.WHISPER: "model.bin", BackendKind.DIFFUSERS: "model_index.json"}
"""The file in a model's directory by which it is known whose it is: CTranslate2's weights are Whisper's."""


class EntryAdapter(msgspec.Struct, frozen=True):
    """The adapter of an entry that is a model with it, as llama-server loads them. `name`: by which requests ask for
    it; `base`: the model of the pool that it is on; `path`: its GGUF file, of `bytes`; `digest`: of its files."""

    name: str
    base: str
    path: Path
    digest: str
    bytes: int = 0


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the pool as it is described. `id`: of its slot; `path`: its file or directory, of Ollama's and
    remote ones their name there; `origin`: where it is described, for people; `draft`: the files of the model that it
    drafts with; `adapter`: the one with which its server starts."""

    id: str
    name: str
    kind: str
    path: Path
    row: ModelRow
    origin: str = ""
    draft: Path | None = None
    adapter: EntryAdapter | None = None

    @property
    def approved_as(self) -> str:
        """The id under which a signed load of its weights is on record: with an adapter, the base's."""
        return self.id if self.adapter is None else slot_id(self.adapter.base)

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
    name, if `[pool] found` wants them: GGUF files for llama-server, directories for vLLM, or for a runner where their
    files are its (`kind_at`). None where the pool is not enabled."""
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
            kind = kind_at(path)
            row = ModelRow(backend=kind, file=str(path))
            entries[slot_id(name)] = ModelEntry(
                id=slot_id(name), name=name, kind=kind, path=path, row=row, origin=str(path)
            )
    if settings.comfyui.url:
        comfy = comfyui_entry(settings.comfyui)
        entries[comfy.id] = comfy
    return entries


def comfyui_entry(section: ComfyuiSection) -> ModelEntry:
    """The one entry of a ComfyUI: it is one program, with one queue and one memory for all of its workflows, each of
    which is a model.

    >>> comfyui_entry(ComfyuiSection(url="http://127.0.0.1:8188", gpus="cpu")).row.vram_mb
    8192
    """
    row = ModelRow(
        backend=BackendKind.COMFYUI,
        url=section.url,
        file=section.workflows_dir,
        vram_mb=section.vram_mb,
        gpus=section.gpus,
        parallel=1,
    )
    id, path = slot_id(COMFYUI), Path(section.workflows_dir)
    return ModelEntry(id=id, name=COMFYUI, kind=row.backend, path=path, row=row, origin="[comfyui]")


def kind_at(path: Path) -> BackendKind:
    """The kind of server for what lies at a path of `models_dir`, by the names of its files."""
    if path.suffix == GGUF:
        return BackendKind.LLAMA
    return next((kind for kind, file in FILE_OF_KIND.items() if (path / file).is_file()), BackendKind.VLLM)


def adapter_entries(
    entries: Mapping[str, ModelEntry], adapters: Iterable[tuple[AdapterRecord, Path]]
) -> dict[str, ModelEntry]:
    """The entries by slot id that GGUF adapters on entries of llama-server make: each a server of its own, of its base
    with that one adapter (decision 045). An adapter on what is no such entry makes none, nor do two with one id: whose
    weights its server would have is not known then.

    It is started as its base is, but for what would make of it more than that: it is pinned by nobody, and drafts
    nothing: whether a draft helps an adapter is not known.
    """
    by_name = {entry.name: entry for entry in entries.values()}
    found: dict[str, ModelEntry] = {}
    shared = set(entries)
    for record, path in adapters:
        base = by_name.get(record.base)
        id = slot_id(record.engine_name)
        if base is None or base.kind != BackendKind.LLAMA or record.format != GGUF_FORMAT:
            continue
        if id in found:
            shared.add(id)
        more_mb = -(-record.bytes // MIB) if base.row.vram_mb else 0
        row = msgspec.structs.replace(
            base.row,
            pin=False,
            speculative="none",
            draft="",
            vram_mb=base.row.vram_mb + more_mb,
        )
        found[id] = ModelEntry(
            id=id,
            name=record.engine_name,
            kind=base.kind,
            path=base.path,
            row=row,
            origin=base.origin,
            adapter=EntryAdapter(record.name, record.base, path, record.digest, record.bytes),
        )
    return {id: entry for id, entry in found.items() if id not in shared}


def started_entries(entries: Mapping[str, ModelEntry]) -> dict[str, ModelEntry]:
    """Those of them with a server of their own."""
    return {id: entry for id, entry in entries.items() if entry.has_server_here}
