"""The Docker engine, and who besides Hive may use it."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.errors import HiveError, NotPermitted
from hive.host.engine import Engine
from hive.link.server import peer_of


class SocketFacts(NamedTuple):
    """`mode`: of the socket. `group`: whose it is; `members`: of it. `server`: who listens, `NAME (pid N)`.
    `info`: what the engine says of itself; `error`: why it does not."""

    path: Path
    mode: int | None
    group: str = ""
    members: int = 0
    server: str = ""
    info: Mapping[str, Any] = MappingProxyType({})
    error: str = ""
    may_not: bool = False


async def look_at_docker(subject: Subject) -> CheckVerdict:
    path = Path(subject.settings.sandbox.docker_socket)
    facts = await asyncio.to_thread(_around, path)
    if facts.mode is None:
        return judge_docker(facts, is_root=subject.is_root)
    try:
        facts = facts._replace(info=await Engine(path).ask("GET", "/info"))
    except NotPermitted as error:
        facts = facts._replace(error=error.message, may_not=True)
    except HiveError as error:
        facts = facts._replace(error=error.message)
    return judge_docker(facts, is_root=subject.is_root)


def _around(path: Path) -> SocketFacts:
    try:
        found = path.stat()
    except OSError:
        return SocketFacts(path, None)
    try:
        group = grp.getgrgid(found.st_gid)
        primary = sum(user.pw_gid == found.st_gid for user in pwd.getpwall())
        name, members = group.gr_name, len(group.gr_mem) + primary
    except KeyError:
        name, members = str(found.st_gid), 0
    return SocketFacts(path, stat.S_IMODE(found.st_mode), name, members, _server(path))


def _server(path: Path) -> str:
    """Process that listens there; empty if that cannot be seen."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(0.5)
            sock.connect(os.fspath(path))
            pid = peer_of(sock)[0]
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
    except OSError:
        return ""


def judge_docker(facts: SocketFacts, *, is_root: bool) -> CheckVerdict:
    """
    >>> judge_docker(SocketFacts(Path("/run/docker.sock"), None), is_root=True).reason
    'no engine at /run/docker.sock: no agent can be a container'
    """
    if facts.mode is None:
        return skipped(f"no engine at {facts.path}: no agent can be a container")
    if facts.mode & stat.S_IWOTH:
        return wrong("docker_open", path=facts.path)
    if facts.may_not and not is_root:
        return unseen(facts.error, "sandbox.docker", group=facts.group)
    if facts.error:
        return wrong("docker_down", why=facts.error)
    return _judge_engine(facts)


def _judge_engine(facts: SocketFacts) -> CheckVerdict:
    info = facts.info
    version, driver = info.get("ServerVersion", "?"), info.get("CgroupDriver", "?")
    said = f"{version} by {facts.server or '?'}, cgroup {driver} v{info.get('CgroupVersion', '1')}"
    if driver == "none":
        return wrong("docker_no_cgroups", engine=said)
    if not info.get("LiveRestoreEnabled"):
        return wrong("docker_no_live_restore", engine=said)
    others = f"; {facts.members} members of group {facts.group} are as good as root" if facts.members > 1 else ""
    return passed(said + others)


CHECKS = (Check("sandbox.docker", "The Docker engine answers, and not everybody may use it.", look_at_docker),)
