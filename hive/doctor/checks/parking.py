"""Slots of llama-servers that are kept while agents sleep: can they be, where a directory for them is named."""

from __future__ import annotations

import pwd
from pathlib import Path

from hive.backends.slot_place import place_of, why_no_slots, why_unfit, why_unfit_apart
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.host.accounts import DAEMON


def look_at_directory(subject: Subject) -> CheckVerdict:
    inference = subject.settings.inference
    directory, why = inference.llama_slot_dir, why_no_slots(inference, is_apart=subject.is_appliance)
    if directory and not why:
        why = _why_unfit(subject, Path(directory))
    return judge_directory(directory, why)


def _why_unfit(subject: Subject, directory: Path) -> str:
    if not subject.is_appliance:
        place = place_of(directory, is_apart=False)
        return next(filter(None, map(why_unfit, (place.kept, place.engine))), "")
    try:
        daemon = pwd.getpwnam(DAEMON).pw_uid
    except KeyError:
        return f"there is no user {DAEMON}"
    return why_unfit_apart(place_of(subject.layout.at(str(directory)), is_apart=True), daemon)


def judge_directory(directory: str, why: str) -> CheckVerdict:
    """`why`: the reason that nothing is kept there.

    >>> judge_directory("", "").reason, judge_directory("/d", "").reason
    ('[inference] llama_slot_dir is empty: nothing is kept', 'slots are kept in /d')
    """
    if not directory:
        return skipped("[inference] llama_slot_dir is empty: nothing is kept")
    return wrong("slots_not_kept", why=why) if why else passed(f"slots are kept in {directory}")


CHECKS = (Check("parking.directory", "What llama-servers have read for agents can be kept.", look_at_directory),)
