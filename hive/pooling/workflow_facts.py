"""Facts about the workflows of a ComfyUI, which are models: read from their files before anything runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hive.pooling.entry_facts import FileFacts
from hive.runner.workflow import MOST_FILE_BYTES, MOST_WORKFLOWS, WorkflowFault, read_workflow


def read_workflow_facts(directory: Path) -> FileFacts:
    """The workflows of a directory as facts; never raises. It reads the disk: not for the loop."""
    found, faults, digest = list[str](), list[str](), hashlib.sha256()
    changed_at = 0.0
    try:
        for file in sorted(path for path in directory.iterdir() if path.suffix == ".json")[:MOST_WORKFLOWS]:
            try:
                with file.open("rb") as opened:
                    data = opened.read(MOST_FILE_BYTES + 1)
                found.append(read_workflow(file.stem, data).model)
            except WorkflowFault as fault:
                faults.append(f"{file.name}: {fault}")
                continue
            changed_at = max(changed_at, file.stat().st_mtime)
            digest.update(f"{file.name}\n{len(data)}\n".encode() + data)
    except OSError as error:
        why = f"{error.filename or directory} cannot be read: {error.strerror or error}"
        return FileFacts(can_load=False, why_not=why, is_gguf=False)
    if not found:
        why = faults[0] if faults else f"there is no workflow (NAME.json) in {directory}"
        return FileFacts(can_load=False, why_not=why, is_gguf=False)
    return FileFacts(digest=digest.hexdigest(), is_gguf=False, changed_at=changed_at, offers=tuple(found))
