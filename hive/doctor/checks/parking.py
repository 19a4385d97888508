"""Slots of llama-servers that are kept while agents sleep: can they be, where a directory for them is named."""

from __future__ import annotations

from pathlib import Path

from hive.backends.llama import ENGINE
from hive.backends.slot_place import why_no_slots, why_unfit
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject


def look_at_directory(subject: Subject) -> CheckVerdict:
    inference = subject.settings.inference
    directory, why = inference.llama_slot_dir, why_no_slots(inference, is_apart=subject.is_appliance)
    if directory and not why:
        why = next(filter(None, map(why_unfit, (Path(directory), Path(directory, ENGINE)))), "")
    return judge_directory(directory, why)


def judge_directory(directory: str, why: str) -> CheckVerdict:
    """`why`: the reason that nothing is kept there.

    >>> judge_directory("", "").reason, judge_directory("/d", "").reason
    ('[inference] llama_slot_dir is empty: nothing is kept', 'slots are kept in /d')
    """
    if not directory:
        return skipped("[inference] llama_slot_dir is empty: nothing is kept")
    return wrong("slots_not_kept", why=why) if why else passed(f"slots are kept in {directory}")


CHECKS = (Check("parking.directory", "What llama-servers have read for agents can be kept.", look_at_directory),)
