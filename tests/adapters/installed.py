"""Adapters that are installed without having been brought: for tests of what comes after."""

from __future__ import annotations

import hashlib

from hive.adapters.directory import AdapterDirectory
from hive.adapters.record import GGUF, SAFETENSORS, UNSIGNED, AdapterFile, AdapterRecord, digest_of


def install_weights(
    directory: AdapterDirectory, name: str, base: str, weights: bytes = b"one", *, is_gguf: bool = True, key: str = ""
) -> AdapterRecord:
    """Installs a file of these bytes as an adapter; the one that is installed last is the newest."""
    file = "a.gguf" if is_gguf else "adapter_model.safetensors"
    files = (AdapterFile(file, len(weights), hashlib.sha256(weights).hexdigest()),)
    record = AdapterRecord(
        name=name,
        digest=digest_of(files),
        base=base,
        format=GGUF if is_gguf else SAFETENSORS,
        rank=8,
        bytes=3 << 20,
        files=files,
        signature=UNSIGNED,
        key_id=key,
        installed_at=float(len(directory.records())),
    )
    with directory.workplace() as work:
        (work / file).write_bytes(weights)
        directory.put(work, record)
    return record
