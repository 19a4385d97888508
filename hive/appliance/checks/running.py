"""Hive as it runs: does it answer, is it the installed one, are its settings right, are its ports its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import hive
from hive.appliance.checks.check import Check, Verdict, failed, passed, skipped, warned
from hive.appliance.checks.subject import Kind, Subject
from hive.appliance.layout import CURRENT
from hive.build import number_of, version
from hive.places import default_state_dir

LISTENING = "0A"
"""State of a socket in /proc/net/tcp (TCP_LISTEN)."""
SYSTEMD = "systemd (pid 1)"
"""Holds an appliance's ports for the proxy (socket units)."""
UNSEEN = "another user's process"
NET_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


# --- the daemon --------------------------------------------------------------------------------------------------


def look_at_answers(subject: Subject) -> Verdict:
    return judge_answers(subject)


def judge_answers(subject: Subject) -> Verdict:
    """
    >>> judge_answers(Subject(kind=Kind.NONE)).reason
    'no Hive runs here, and none is installed'
    """
    health = subject.health
    if health is None:
        return _judge_silence(subject)
    named = f"{subject.kind} at {subject.socket}"
    problems = [str(problem) for problem in health.get("problems", ())]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return warned(f"{named}: {problems[0]}{more}", "hive status")
    return passed(named)


def _judge_silence(subject: Subject) -> Verdict:
    if subject.may_not:
        return skipped(f"{subject.silence}; needs root or the group hive", "sudo hive doctor")
    if subject.kind is Kind.NONE:
        return skipped("no Hive runs here, and none is installed", "hive up --demo")
    hangs = subject.socket is not None
    if subject.is_appliance:
        return failed(
            subject.silence, f"{subject.may_fix}systemctl restart {'hive-daemon' if hangs else 'hive.target'}"
        )
    if hangs:
        return failed(subject.silence, "end that `hive up` and start it again")
    if subject.named:
        return failed(subject.silence, _up(subject))
    return skipped(f"{subject.silence}; its state is in {subject.paths and subject.paths.state}", "hive up")


def _up(subject: Subject) -> str:
    """The command that starts the `hive up` that is meant."""
    state = None if subject.paths is None else subject.paths.state
    is_default = state in (None, default_state_dir(subject.uid, subject.env))
    return "hive up" if is_default else f"hive up --state-dir {quote(str(state))}"


def look_at_version(subject: Subject) -> Verdict:
    current = subject.layout.at(CURRENT)
    installed = current.resolve().name if current.exists() else ""
    running = (subject.health or {}).get("version")
    return judge_version(
        str(running or ""), version(), installed, is_appliance=subject.is_appliance, own=Path(hive.__file__)
    )


def judge_version(running: str, mine: str, installed: str, *, is_appliance: bool, own: Path = Path()) -> Verdict:
    """`running`: the daemon's, empty where none answers. `installed`: name of the current installed version, like
    `0.1.0-3`; empty for none. Another build of the same number is another version. `own`: a file of this command's.

    >>> judge_version("0.2.0", "0.2.0", "0.2.0-1", is_appliance=True, own=Path("/opt/hive/versions/0.2.0-1/x")).reason
    '0.2.0 runs, 0.2.0-1 is installed'
    """
    if not running:
        return skipped(f"this command is {mine}; no daemon says what it is")
    restart = "sudo systemctl restart hive.target" if is_appliance else "end that `hive up` and start it again"
    if is_appliance and installed and installed.rpartition("-")[0] != number_of(running):
        return warned(f"{running} runs, but {installed} is installed", restart)
    if is_appliance and installed and installed not in own.parts:
        return warned(f"this command is not the installed one ({own.parent})", "type /usr/local/bin/hive")
    if running != mine:
        return warned(f"{running} runs, this command is {mine}", restart)
    return passed(f"{running} runs, {installed} is installed" if installed else f"{running} runs, and is this one")


# --- settings ----------------------------------------------------------------------------------------------------


def look_at_config(subject: Subject) -> Verdict:
    return judge_config(subject.config_file, subject.config_error, is_appliance=subject.is_appliance)


def judge_config(file: Path | None, error: str, *, is_appliance: bool) -> Verdict:
    """
    >>> judge_config(Path("/etc/hive/hive.conf"), "", is_appliance=True).reason
    '/etc/hive/hive.conf is valid, and so is the environment'
    """
    if error:
        first, *rest = error.splitlines()
        more = f" (and {len(rest)} more)" if rest else ""
        return failed(f"{first}{more}; a Hive that starts now refuses to", f"hive config check {file or ''}".strip())
    if file is None and is_appliance:
        return warned("there is no /etc/hive/hive.conf: defaults are in force", "sudo hive install")
    return passed(f"{file} is valid, and so is the environment" if file else "defaults are in force")


# --- ports -------------------------------------------------------------------------------------------------------


class Port(NamedTuple):
    """`what` goes through it. `ours`: the port Hive says it has, None where no Hive does. `owner`: the process that
    listens at `wanted`: `NAME (pid N)`, `UNSEEN` where that cannot be seen, empty for none."""

    what: str
    wanted: int
    ours: int | None
    owner: str = ""


def look_at_ports(subject: Subject) -> Verdict:
    health = subject.health or {}
    found: dict[str, Any] = health.get("proxy") or {}
    proxy = found if found.get("connected") else {}
    api: dict[str, Any] = health.get("api") or {}
    settings, listening = subject.settings, _listening()
    ports = [
        Port(what, wanted, ours, _owner(listening.get(wanted, ())))
        for what, wanted, ours in (
            ("agents", settings.proxy.port, proxy.get("port")),
            ("callers", settings.proxy.ingress_port, proxy.get("ingress_port")),
            *([("the API", settings.api.port, api.get("port"))] if settings.api.port else []),
        )
    ]
    return judge_ports(ports, is_appliance=subject.is_appliance, is_root=os.geteuid() == 0)


def _listening() -> dict[int, list[str]]:
    """Port → inodes of the sockets that listen there, IPv4 and IPv6."""
    found: dict[int, list[str]] = {}
    for table in NET_TABLES:
        try:
            text = Path(table).read_text()
        except OSError:
            continue
        for port, inode in parse_listening(text):
            found.setdefault(port, []).append(inode)
    return found


def parse_listening(text: str) -> list[tuple[int, str]]:
    """(port, inode) of each listening socket in a /proc/net/tcp.

    >>> parse_listening("  sl\\n 0: 0100007F:2CAB 00000000:0000 0A 0:0 00:0 0 0 0 4242 1\\n")
    [(11435, '4242')]
    """
    rows = [line.split() for line in text.splitlines()[1:]]
    return [(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if len(row) > 9 and row[3] == LISTENING]


def _owner(inodes: Sequence[str]) -> str:
    """Found only among processes this user may look into."""
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _has_open(entry / "fd", wanted):
            try:
                return f"{(entry / 'comm').read_text().strip()} (pid {entry.name})"
            except OSError:
                break
    return UNSEEN


def _has_open(directory: Path, wanted: set[str]) -> bool:
    try:
        return any(os.readlink(link) in wanted for link in directory.iterdir())
    except OSError:
        return False


def judge_ports(ports: Sequence[Port], *, is_appliance: bool, is_root: bool = False) -> Verdict:
    """`is_root`: this user sees the owner of every socket.

    >>> judge_ports([Port("agents", 11435, None), Port("callers", 8480, None)], is_appliance=False).reason
    '11435 for agents and 8480 for callers are free'
    """
    for port in ports:
        look = f"ss -ltnp 'sport = :{port.wanted}'"
        if port.ours not in (None, port.wanted) and port.owner:
            return warned(f"{port.ours} is for {port.what}: {port.owner} has {port.wanted}", look)
        if port.ours is None and port.owner == UNSEEN and not is_root:
            return warned(
                f"{port.wanted} for {port.what} is in use, by Hive or by another program: only root sees which",
                "sudo hive doctor hive.ports",
            )
        if port.ours is None and port.owner and not (is_appliance and port.owner == SYSTEMD):
            reason = f"{port.wanted} for {port.what} is taken by {port.owner}"
            if is_appliance:
                return failed(f"{reason}: Hive cannot listen there", look)
            return warned(f"{reason}: hive up takes the next free one", look)
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
