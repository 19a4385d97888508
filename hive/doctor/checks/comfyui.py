"""The workflow files of `[comfyui]`: is each of them a model, and are there any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.runner.workflow import MOST_FILE_BYTES, WorkflowFault, read_workflow


def look_at_workflows(subject: Subject) -> CheckVerdict:
    section = subject.settings.comfyui
    return judge_workflows(section.workflows_dir, read_faults(Path(section.workflows_dir)) if section.url else None)


def read_faults(directory: Path) -> dict[str, str]:
    """The workflow files by name, each with its fault, empty where it has none. One that may not be read is told by
    what is raised: PermissionError."""
    found = {}
    if not directory.is_dir():
        return {}
    for file in sorted(path for path in directory.iterdir() if path.suffix == ".json"):
        with file.open("rb") as opened:
            data = opened.read(MOST_FILE_BYTES + 1)
        try:
            read_workflow(file.stem, data)
            found[file.name] = ""
        except WorkflowFault as fault:
            found[file.name] = str(fault)
    return found


def judge_workflows(directory: str, found: Mapping[str, str] | None) -> CheckVerdict:
    """
    >>> judge_workflows("/w", None).reason, judge_workflows("/w", {"a.json": ""}).reason
    ('no ComfyUI is named in [comfyui] url', 'all of 1 are models')
    """
    if found is None:
        return skipped("no ComfyUI is named in [comfyui] url")
    if not found:
        return wrong("comfyui_no_workflow", path=directory)
    broken = {name: why for name, why in found.items() if why}
    if broken:
        first = next(iter(broken))
        return wrong("comfyui_workflow_broken", path=f"{directory}/{first}", why=broken[first], more=len(broken) - 1)
    return passed(f"all of {len(found)} are models")


CHECKS = (Check("comfyui.workflows", "The workflow files of [comfyui] are models.", look_at_workflows),)
