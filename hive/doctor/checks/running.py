"""Hive as it runs: does it answer, is it the installed one, are its settings right, are its ports its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hive
from hive.backends.ask import get
from hive.backends.conversation import object_in
from hive.backends.recognise import is_hive
from hive.build import compiled, number_of, version
from hive.conditions import condition, conditions_in
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, told, unseen, wrong
from hive.doctor.checks.target import Subject, TargetKind
from hive.errors import BackendDown, BackendTimeout
from hive.files.layout import CURRENT
from hive.host.listener import holders_of, listening_inodes

SYSTEMD = "systemd (pid 1)"
"""Holds an appliance's ports for the proxy (socket units)."""
UNSEEN = "another user's process"
OF_DAEMON = (
    "restore_cut_short",
    "not_running",
    "not_running_as_seen",
    "daemon_stopped",
    "daemon_ended",
    "unit_not_active",
)
"""Conditions of a Hive that does not answer which say why; its other ones have checks of their own."""
ASKED_S = 0.3


# --- the daemon --------------------------------------------------------------------------------------------------


def look_at_answers(subject: Subject) -> CheckVerdict:
    return judge_answers(subject)


def judge_answers(subject: Subject) -> CheckVerdict:
    """
    >>> judge_answers(Subject(kind=TargetKind.NONE)).reason
    'no Hive runs here, and none is installed'
    """
    health = subject.health
    if health is None:
        return _judge_silence(subject)
    named = f"{subject.kind} at {subject.socket}"
    if found := conditions_in(health):
        codes = [one.code for one in found]
        return wrong("degraded", named=named, first=found[0].text, more=len(found) - 1, codes=codes)
    return passed(named)


def _judge_silence(subject: Subject) -> CheckVerdict:
    if subject.may_not:
        return unseen(subject.silence, "", group="hive")
    if subject.kind is TargetKind.NONE:
        none = condition("no_hive")
        return skipped(none.text, none.fix)
    if subject.socket is not None:
        return wrong("daemon_hangs", why=subject.silence)
    if subject.is_missing:
        return wrong("no_state_directory", path=subject.state_dir)
    why = next((one for one in subject.offline if one.code in OF_DAEMON), None)
    # Who has ended his own `hive up` in order may look at the host alone: nothing of it is wrong.
    is_in_order = why is None or subject.offline == [condition("not_running", why="")]
    if is_in_order and not (subject.is_appliance or subject.named):
        return skipped(f"{subject.silence}; its state is in {subject.paths and subject.paths.state}", "{start}")
    if why is None or (why.code == "not_running" and not why.facts["why"]):
        return wrong("not_running", why=subject.silence)
    return told(why)


def look_at_version(subject: Subject) -> CheckVerdict:
    current = subject.layout.at(CURRENT)
    installed = current.resolve().name if current.exists() else ""
    running = (subject.health or {}).get("version")
    return judge_version(
        str(running or ""), version(), installed, is_appliance=subject.is_appliance, own=Path(hive.__file__)
    )


def judge_version(running: str, mine: str, installed: str, *, is_appliance: bool, own: Path = Path()) -> CheckVerdict:
    """`running`: the daemon's, empty where none answers. `installed`: name of the current installed version, like
    `0.1.0-3`; empty for none. Another build of the same number is another version. `own`: a file of this command's.

    >>> own = Path("/opt/hive/versions/0.2.0-1/x")
    >>> judge_version("0.2.0", "0.2.0", "0.2.0-1", is_appliance=True, own=own).reason.partition(";")[0]
    '0.2.0 runs, 0.2.0-1 is installed'
    """
    if not running:
        return skipped(f"this command is {mine}; no daemon says what it is")
    if is_appliance and installed and installed.rpartition("-")[0] != number_of(running):
        return wrong("version_not_installed", running=running, installed=installed)
    if is_appliance and installed and installed not in own.parts:
        return wrong("command_not_installed", own=own.parent)
    if running != mine:
        return wrong("version_differs", running=running, mine=mine)
    same = f"{installed} is installed" if installed else "and is this one"
    return passed(f"{running} runs, {same}; compiled={compiled()}")


# --- settings ----------------------------------------------------------------------------------------------------


def look_at_config(subject: Subject) -> CheckVerdict:
    return judge_config(subject.config_file, subject.config_error, is_appliance=subject.is_appliance)


def judge_config(file: Path | None, error: str, *, is_appliance: bool) -> CheckVerdict:
    """
    >>> judge_config(Path("/etc/hive/hive.conf"), "", is_appliance=True).reason
    '/etc/hive/hive.conf is valid, and so is the environment'
    """
    if error:
        first, *rest = error.splitlines()
        return wrong("config_wrong", why=first, more=len(rest), file=file or "")
    if file is None and is_appliance:
        return wrong("config_missing")
    return passed(f"{file} is valid, and so is the environment" if file else "defaults are in force")


# --- ports -------------------------------------------------------------------------------------------------------


class Port(NamedTuple):
    """`what` goes through it. `ours`: the port Hive says it has, None where no Hive does. `owner`: the process that
    listens at `wanted`: `NAME (pid N)`, `UNSEEN` where that cannot be seen, empty for none."""

    what: str
    wanted: int
    ours: int | None
    owner: str = ""


async def look_at_ports(subject: Subject) -> CheckVerdict:
    ports = await asyncio.to_thread(_ports, subject)
    if os.geteuid() != 0:
        ports = await asyncio.gather(*map(asked, ports))
    return judge_ports(ports, is_appliance=subject.is_appliance, is_root=os.geteuid() == 0)


async def asked(port: Port) -> Port:
    """The same, ours where a Hive answers at it: this user may see neither its owner nor ask the daemon."""
    if port.ours is not None or port.owner != UNSEEN:
        return port
    try:
        answer = await get(f"127.0.0.1:{port.wanted}", "/api/health", within_s=ASKED_S)
    except (BackendDown, BackendTimeout):
        return port
    # The proxy says whose refusal it is; the API's is a problem with a code and a hint.
    ours = is_hive(answer) or {"code", "hint", "detail"} <= object_in(answer.body).keys()
    return port._replace(ours=port.wanted) if ours else port


def _ports(subject: Subject) -> list[Port]:
    health = subject.health or {}
    found: dict[str, Any] = health.get("proxy") or {}
    proxy = found if found.get("connected") else {}
    api: dict[str, Any] = health.get("api") or {}
    settings, listening = subject.settings, listening_inodes()
    return [
        Port(what, wanted, ours, _owner(listening.get(wanted, ())))
        for what, wanted, ours in (
            ("agents", settings.proxy.port, proxy.get("port")),
            ("callers", settings.proxy.ingress_port, proxy.get("ingress_port")),
            *([("the API", settings.api.port, api.get("port"))] if settings.api.port else []),
        )
    ]


def _owner(inodes: Sequence[str]) -> str:
    """Found only among processes this user may look into."""
    for pid in holders_of(inodes):
        try:
            return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
        except OSError:
            break
    return UNSEEN if inodes else ""


def judge_ports(ports: Sequence[Port], *, is_appliance: bool, is_root: bool = False) -> CheckVerdict:
    """`is_root`: this user sees the owner of every socket.

    >>> judge_ports([Port("agents", 11435, None), Port("callers", 8480, None)], is_appliance=False).reason
    '11435 for agents and 8480 for callers are free'
    """
    for port in ports:
        facts: dict[str, Any] = {"port": port.wanted, "what": port.what, "owner": port.owner}
        if port.ours not in (None, port.wanted) and port.owner:
            return wrong("port_moved", ours=port.ours, **facts)
        if port.ours is None and port.owner == UNSEEN and not is_root:
            return wrong("port_unseen", **facts)
        if port.ours is None and port.owner and not (is_appliance and port.owner == SYSTEMD):
            return wrong("port_taken" if is_appliance else "port_taken_here", **facts)
    *others, last = (f"{port.ours or port.wanted} for {port.what}" for port in ports)
    said = " and ".join(part for part in (", ".join(others), last) if part)
    if all(port.ours is not None for port in ports):
        return passed(f"{said} are Hive's")
    return passed(f"{said} are {'free, or held by systemd for Hive' if any(port.owner for port in ports) else 'free'}")


CHECKS = (
    Check("hive.answers", "The daemon answers and has nothing to complain about.", look_at_answers),
    Check("hive.version", "What runs is what is installed.", look_at_version),
    Check("hive.config", "hive.conf and the environment are valid.", look_at_config),
    Check("hive.ports", "Hive's TCP ports are free, or its own.", look_at_ports),
)
