"""The appliance's systemd units: as this version has them, running, and locked up as far as promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hive.doctor.checks.check import STOPPED, Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.errors import HiveError
from hive.files import share
from hive.files.layout import UNITS
from hive.host import program, systemd
from hive.terminal_text import counted

NEEDED = (
    "hive-proxy.service",
    "hive-daemon.service",
    "hive-sandbox.service",
    "hive-redis.service",
    "hive-proxy-jobs.socket",
    "hive-jobs.socket",
)
SHOWN = ("Id", "ActiveState", "SubState", "Result", "NRestarts", "NeedDaemonReload")
SHOW_S = 0.7
ANALYZE_S = 20.0
EXPOSURE = {
    "hive-proxy.service": 1.3,
    "hive-daemon.service": 1.5,
    "hive-redis.service": 1.5,
    "hive-jobs.service": 1.5,
    "hive-inference.service": 2.0,
    "hive-inference-vllm.service": 2.0,
    "hive-inference-llama.service": 2.0,
    "hive-inference-demo.service": 2.0,
    "hive-model@.service": 2.0,
}
"""Highest exposure that `systemd-analyze security` may report (SPECIFICATION.md)."""
NOT_INSTALLED = "Hive is not installed as a service here"


# --- as this version has them ------------------------------------------------------------------------------------


class PackagedUnit(NamedTuple):
    """One file of the package's. `there`: what is installed under its name; None where nothing is, or nobody may look.
    `drop_ins`: names of files beside it that change it."""

    path: str
    meant: bytes
    there: bytes | None
    drop_ins: Sequence[str] = ()


def look_at_drift(subject: Subject) -> CheckVerdict:
    if not subject.is_appliance:
        return skipped(NOT_INSTALLED)
    try:
        managed = share.units(share.directory())
    except HiveError as error:
        return wrong("units_not_found", why=error.message, hint=error.hint)
    return judge_drift([_unit(subject, one, [other.path for other in managed]) for one in managed])


def _unit(subject: Subject, managed: share.Managed, own: Sequence[str]) -> PackagedUnit:
    """`own`: the paths of all files of the package, its own drop-ins among them."""
    path = subject.layout.at(managed.path)
    try:
        there: bytes | None = path.read_bytes()
    except OSError:
        there = None
    brought = {Path(other).name for other in own if Path(other).parent.name == f"{path.name}.d"}
    beside = sorted(other.name for other in path.with_name(f"{path.name}.d").glob("*.conf"))
    return PackagedUnit(managed.path, managed.content, there, [name for name in beside if name not in brought])


def judge_drift(units: Sequence[PackagedUnit]) -> CheckVerdict:
    """
    >>> judge_drift([PackagedUnit("/u/a.service", b"x", b"y")]).reason
    '/u/a.service is not what this version brings'
    """
    for code, found in (
        ("unit_missing", [unit for unit in units if unit.there is None]),
        ("unit_changed", [unit for unit in units if unit.there not in (None, unit.meant)]),
    ):
        if found:
            return wrong(code, path=found[0].path, more=len(found) - 1)
    changed = [f"{Path(unit.path).name} ({', '.join(unit.drop_ins)})" for unit in units if unit.drop_ins]
    said = f"{counted(len(units), 'file')} as this version brings them"
    return passed(f"{said}; changed by drop-ins: {'; '.join(changed)}" if changed else said)


# --- running -----------------------------------------------------------------------------------------------------


def look_at_active(subject: Subject) -> CheckVerdict:
    if not subject.is_appliance:
        return skipped(NOT_INSTALLED)
    if not systemd.is_booted():
        return skipped("systemd is not PID 1 here")
    ran = program.run(["systemctl", "show", *NEEDED, *(f"--property={name}" for name in SHOWN)], limit_s=SHOW_S)
    if ran.code != 0:
        return skipped(f"systemd cannot be asked: {ran.last_line[:80]}", "{sudo}hive doctor units.active")
    shown = [systemd.parse_show(block) for block in ran.text.split("\n\n")]
    return judge_active(shown, is_stopped=subject.is_stopped)


def judge_active(shown: Sequence[Mapping[str, str]], *, is_stopped: bool = False) -> CheckVerdict:
    """`shown`: properties of each unit. `is_stopped`: those that only do not run are started with all of it.

    >>> judge_active([{"Id": "a.service", "ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}]).reason
    'a.service is failed (exit-code)'
    """
    for unit in shown:
        name, state = unit.get("Id", "?"), unit.get("ActiveState", "unknown")
        if state != "active" and not (is_stopped and state == "inactive"):
            why = unit.get("Result") if unit.get("Result") not in ("success", None) else unit.get("SubState")
            return wrong("unit_not_active", unit=name, name=name.removesuffix(".service"), state=state, why=why)
    stale = [unit["Id"] for unit in shown if unit.get("NeedDaemonReload") == "yes"]
    if stale:
        return wrong("unit_not_reloaded", unit=stale[0])
    if is_stopped:
        return skipped(STOPPED)
    restarted = [
        f"{unit['Id']} {counted(int(unit['NRestarts']), 'time')}" for unit in shown if unit.get("NRestarts", "0") != "0"
    ]
    if restarted:
        return wrong("unit_restarted", units=restarted, unit=restarted[0].split()[0])
    return passed(f"{len(shown)} run, none was restarted")


# --- locked up ---------------------------------------------------------------------------------------------------


def look_at_exposure(subject: Subject) -> CheckVerdict:
    """Of the installed files where there are any, else of those this version brings."""
    directory = subject.layout.at(UNITS) if subject.is_appliance else share.directory() / "systemd"
    scores: dict[str, float | None] = {}
    for name in EXPOSURE:
        if (directory / name).exists():
            command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(directory / name)]
            scores[name] = systemd.parse_exposure(program.run(command, limit_s=ANALYZE_S).text)
    return judge_exposure(scores)


def judge_exposure(scores: Mapping[str, float | None]) -> CheckVerdict:
    """
    >>> judge_exposure({"hive-proxy.service": 2.4}).reason
    'hive-proxy.service has exposure 2.4, at most 1.3 was promised'
    """
    if not scores:
        return skipped("there are no units to look at")
    for name, score in scores.items():
        if score is None:
            return wrong("unit_not_rated", unit=name)
        if score > EXPOSURE[name]:
            return wrong("unit_exposed", unit=name, score=score, most=EXPOSURE[name])
    return passed(", ".join(f"{name.removesuffix('.service')} {score:g}" for name, score in scores.items()))


CHECKS = (
    Check("units.drift", "The installed units are those of this version.", look_at_drift),
    Check("units.active", "Every service runs, and was not restarted.", look_at_active),
    Check("units.exposure", "The units' hardening scores (slow).", look_at_exposure, by_default=False),
)
