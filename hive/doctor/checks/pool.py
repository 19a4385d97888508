"""The pool of models: are their files there, do they fit, does somebody else hold the memory they are to share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hive.backends.entries import ModelEntry, entries_of, started_entries
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject

MIB = 1024**2
HOST = "cpu"
FOREIGN_LEAST_BYTES = 256 * MIB
"""A desktop and the driver's own contexts hold less, and nobody wants to hear of them."""

View = Mapping[str, Any]
"""The answer of `GET /api/pool`."""


# --- files -------------------------------------------------------------------------------------------------------


def look_at_files(subject: Subject) -> CheckVerdict:
    entries = [*started_entries(entries_of(subject.settings)).values()]
    return judge_files(entries, {entry.path for entry in entries if _is_there(entry.path)})


def _is_there(path: Path) -> bool:
    """Raises PermissionError where this user may not look."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def judge_files(entries: Sequence[ModelEntry], there: set[Path]) -> CheckVerdict:
    """
    >>> judge_files([], set()).reason
    'hive.conf describes no model with a file: no [model NAME]'
    """
    if not entries:
        return skipped("hive.conf describes no model with a file: no [model NAME]")
    missing = [entry for entry in entries if entry.path not in there]
    if missing:
        first = missing[0]
        return wrong("pool_file_missing", model=first.name, path=first.path, more=len(missing) - 1, where=first.origin)
    return passed(f"{len(entries)} described, and their files are there")


# --- the pool as the daemon has it -------------------------------------------------------------------------------


def _view(subject: Subject) -> View | CheckVerdict:
    """The daemon's answer; a verdict where there is no pool to look at."""
    if (client := subject.client) is None:
        return skipped("no daemon answers")
    view = client.get("/api/pool", timeout_s=subject.limit_s)
    return view if view["enabled"] else skipped(f"there is no pool: {view['why_not']}")


def look_at_failures(subject: Subject) -> CheckVerdict:
    view = _view(subject)
    return view if isinstance(view, CheckVerdict) else judge_failures(view)


def judge_failures(view: View) -> CheckVerdict:
    """
    >>> judge_failures({"slots": [{"model": "m", "state": "ready", "last_error": ""}]}).reason
    'none of 1 has failed'
    """
    failed = [slot for slot in view["slots"] if slot["state"] == "failed"]
    if failed:
        first = failed[0]
        return wrong(
            "pool_model_failed", model=first["model"], why=first["last_error"] or first["why"], more=len(failed) - 1
        )
    return passed(f"none of {len(view['slots'])} has failed")


def look_at_fit(subject: Subject) -> CheckVerdict:
    view = _view(subject)
    return view if isinstance(view, CheckVerdict) else judge_fit(view)


def judge_fit(view: View) -> CheckVerdict:
    """The most there is for one model is all GPUs together, or the host's memory: more than that never fits.

    >>> gpu = {"id": "GPU-1", "total_bytes": 20 << 30, "reserve_bytes": 0}
    >>> judge_fit({"accounts": [gpu], "slots": [{"model": "m", "need_bytes": 21 << 30}]}).reason
    'm needs 21.0 GiB, and there are 20.0 GiB for all models'
    """
    rooms = {account["id"]: account["total_bytes"] - account["reserve_bytes"] for account in view["accounts"]}
    most = max(sum(room for id, room in rooms.items() if id != HOST), rooms.get(HOST, 0))
    large = [slot for slot in view["slots"] if slot["need_bytes"] > most]
    if large and rooms:
        first = large[0]
        return wrong(
            "pool_never_fits",
            model=first["model"],
            need_bytes=first["need_bytes"],
            most_bytes=most,
            more=len(large) - 1,
        )
    return passed("each fits while it is alone") if rooms else skipped("no memory is known yet")


def look_at_memory(subject: Subject) -> CheckVerdict:
    view = _view(subject)
    return view if isinstance(view, CheckVerdict) else judge_memory(view)


def judge_memory(view: View) -> CheckVerdict:
    """
    >>> judge_memory({"accounts": [{"id": "cpu", "used_bytes": None, "foreign_bytes": 0}]}).reason
    'the pool has no GPU'
    """
    gpus = [account for account in view["accounts"] if account["id"] != HOST]
    if not gpus:
        return skipped("the pool has no GPU")
    silent = [account for account in gpus if account["used_bytes"] is None]
    if silent:
        return wrong("pool_unmeasured", gpu=silent[0]["id"], more=len(silent) - 1)
    held = [account for account in gpus if account["foreign_bytes"] >= FOREIGN_LEAST_BYTES]
    if held:
        first = max(held, key=lambda account: int(account["foreign_bytes"]))
        return wrong(
            "pool_foreign_memory",
            gpu=first["id"],
            name=first["name"],
            foreign_bytes=first["foreign_bytes"],
            more=len(held) - 1,
        )
    return passed("nobody else holds memory of its GPUs")


def look_at_leases(subject: Subject) -> CheckVerdict:
    view = _view(subject)
    return view if isinstance(view, CheckVerdict) else judge_leases(view)


def judge_leases(view: View) -> CheckVerdict:
    """
    >>> judge_leases({"leases": []}).reason
    'nobody holds a lease'
    """
    held = [lease for lease in view["leases"] if lease["grants"]]
    overdue = [lease for lease in held if lease["state"] == "overdue"]
    if overdue:
        first = overdue[0]
        return wrong(
            "lease_overdue",
            lease=first["id"],
            label=first["label"] or "without a name",
            user=first["user"],
            mb=first["need_bytes"] // MIB,
            more=len(overdue) - 1,
        )
    return passed(f"{len(held)} held, each by somebody who is there") if held else skipped("nobody holds a lease")


CHECKS = (
    Check("pool.files", "The files of the models in hive.conf are there.", look_at_files),
    Check("pool.models", "No model of the pool has failed.", look_at_failures),
    Check("pool.fit", "Each model of the pool fits into the memory there is.", look_at_fit),
    Check("pool.leases", "No lease is overdue.", look_at_leases),
    Check("pool.memory", "The pool's GPUs tell their memory, and nobody else holds it.", look_at_memory),
)
