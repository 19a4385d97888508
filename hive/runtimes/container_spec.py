"""The configuration of a container: decided from the agent's spec and from its engine's description of itself.

No I/O but one: where the source of a mount really is.

Every container: no privilege and no way to get one, a root file system it cannot write to (unless it asks for that),
a user of its own that is never root, a network of its own or none, the agent's home, and one socket: Hive's.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from hive.domain import MOUNTED_SOCKET, Limits
from hive.errors import BadRequest, NotPermitted, NotSupported
from hive.link.specs import SandboxSpec
from hive.runtimes import home
from hive.settings.table import Paths

HOME = "/home/agent"
SOCKET_DIRECTORY, SOCKET_NAME = os.path.split(MOUNTED_SOCKET)
ENGINES = ("/var/lib/docker", "/var/lib/containerd", "/run/docker", "/run/containerd", "/etc/docker")
HIVES = ("/etc/hive", "/opt/hive")
KERNELS = ("/proc", "/sys", "/dev", "/root")
"""Never mounted, nor anything in them: the kernel's own, devices, and what is root's alone."""
MIB = 1024 * 1024
_USER = re.compile(r"(\d{1,10})(?::(\d{1,10}))?")


NO_LISTS = "docker agents cannot be limited to some networks"


class NetworkKind(StrEnum):
    NONE = "none"
    BRIDGE = "bridge"


def network_of(spec: SandboxSpec) -> NetworkKind:
    """Raises NotSupported for a list of networks: the engine has no such filter, and Hive writes no firewall rules.

    >>> str(network_of(SandboxSpec(name="a", command=[], env={}, home="/h", log="/l", egress=[])))
    'none'
    """
    if spec.egress:
        raise NotSupported(NO_LISTS, hint="egress = [] is nowhere; without it, everywhere")
    return NetworkKind.BRIDGE if spec.egress is None else NetworkKind.NONE


def user_of(spec: SandboxSpec, own: tuple[int, int]) -> tuple[int, int]:
    """(uid, gid) inside and outside: the spec's `user`, else the agent's own, else the helper's (`own`).

    A name would be the image's own: its uid is not known here, nor its rights on home and socket.
    Raises BadRequest for a name, NotPermitted for root.
    """
    uid, gid = own[0] if spec.uid is None else spec.uid, own[1] if spec.gid is None else spec.gid
    if spec.docker is not None and spec.docker.user:
        if (found := _USER.fullmatch(spec.docker.user)) is None:
            raise BadRequest(f"docker: user: {spec.docker.user[:40]!r} is no number", hint='like user = "1000:1000"')
        uid, gid = int(found[1]), int(found[2] or found[1])
    if 0 in (uid, gid):
        raise NotPermitted("an agent runs as a user of its own, never as root", hint='docker: user = "1000:1000"')
    return uid, gid


def check(agent: str, spec: SandboxSpec, paths: Paths, *, engine: Path, own: tuple[int, int]) -> None:
    """Raises BadRequest, NotPermitted, NotSupported for what this helper does not run."""
    if spec.docker is None:
        raise BadRequest("docker: missing", hint='runtime = "docker" needs a table [docker]')
    home.check_places(agent, spec, paths)
    network_of(spec)
    uid, _ = user_of(spec, own)
    if own[0] not in (0, uid):
        raise NotPermitted(f"only root can run agents as other users, here uid {uid}")
    check_mounts(spec, paths, engine=engine)


def check_mounts(spec: SandboxSpec, paths: Paths, *, engine: Path, engine_state: str = "") -> None:
    """Before every start too: a link may lead elsewhere than when the agent was defined. `engine_state`: where the
    engine says its own files are. Raises NotPermitted."""
    kept = [paths.state, paths.runtime, engine, *map(Path, (*ENGINES, *HIVES, *KERNELS))]
    if engine_state:
        kept.append(Path(engine_state))
    for mount in spec.docker.mounts if spec.docker is not None else ():
        _check_mount(mount, kept)


def _check_mount(mount: str, private: list[Path]) -> None:
    """Refuses to mount what is of Hive, of the engine or of the kernel, or holds such a path, under any name."""
    source = mount.split(":", 1)[0]
    real = Path(os.path.realpath(source))
    for kept in private:
        inside = Path(os.path.realpath(kept))
        if real.is_relative_to(inside) or inside.is_relative_to(real):
            raise NotPermitted(f"docker: mounts: {source} is, holds, or is part of {kept}")


def create_body(
    spec: SandboxSpec,
    *,
    labels: dict[str, str],
    mark: str,
    network: str,
    place: Path,
    image: dict[str, Any],
    info: dict[str, Any],
    user: tuple[int, int],
    log_max_bytes: int,
) -> dict[str, Any]:
    """The body of `POST /containers/create`. `place`: the directory of the agent's socket on the host; `image`,
    `info`: as the engine tells of the image and of itself; `mark`: `NAME=value`."""
    docker = spec.docker
    assert docker is not None, "check() has seen it"
    env = {**spec.env, "HOME": HOME, "HIVE_PROXY_SOCKET": MOUNTED_SOCKET}
    body: dict[str, Any] = {
        "Image": docker.image,
        "Env": [f"{name}={value}" for name, value in env.items()] + [mark],
        "User": f"{user[0]}:{user[1]}",
        "Labels": labels,
        "WorkingDir": (image.get("Config") or {}).get("WorkingDir") or HOME,
        "HostConfig": {
            "Init": True,
            "RestartPolicy": {"Name": "no"},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "UsernsMode": "host",  # its uid is Hive's choice; mapped, it could open neither its home nor its socket
            "ReadonlyRootfs": docker.read_only,
            "Tmpfs": dict(_tmpfs(entry, user) for entry in docker.tmpfs),
            "NetworkMode": network,
            "Mounts": [
                _bind(spec.home, HOME),
                _bind(str(place), SOCKET_DIRECTORY, read_only=True),
                *(_mount(entry) for entry in docker.mounts),
            ],
            "LogConfig": _log_config(log_max_bytes),
            **_limits(spec.limits, info),
        },
    }
    if spec.command:
        body["Cmd"] = spec.command
    return body


def _log_config(log_max_bytes: int) -> dict[str, Any]:
    """The engine's own copy of what it prints: at most the bound. Not less: an engine that begins a new file loses some
    of what is read from it meanwhile (seen with 20.10), so it should do so seldom.

    >>> _log_config(8192)["Config"]
    {'max-size': '4096', 'max-file': '2'}
    """
    return {"Type": "json-file", "Config": {"max-size": str(log_max_bytes // 2), "max-file": "2"}}


def own_log_max_bytes(log_max_bytes: int) -> int:
    """The bound of the log Hive copies it to: at most the whole with the half beside it while it is cut back.

    >>> own_log_max_bytes(9000)
    6000
    """
    return log_max_bytes * 2 // 3


def _tmpfs(entry: str, user: tuple[int, int]) -> tuple[str, str]:
    """The agent's own: before runc 1.2 a `mode` does not count where the image has that directory."""
    path, _, options = entry.partition(":")
    return path, ",".join(part for part in (f"uid={user[0]},gid={user[1]},mode=1777", options) if part)


def _mount(entry: str) -> dict[str, Any]:
    """
    >>> _mount("/srv/data:/data:ro")
    {'Type': 'bind', 'Source': '/srv/data', 'Target': '/data', 'ReadOnly': True}
    """
    source, target, *how = entry.split(":")
    return _bind(os.path.realpath(source), target, read_only=how == ["ro"])


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def _limits(limits: Limits, info: dict[str, Any]) -> dict[str, Any]:
    """Docker's limits. Swap is as much as memory (Docker counts both together): all of a deep sleeper fits into it.

    More cores than there are is no limit; Docker calls it an error.
    """
    found: dict[str, Any] = {}
    if limits.memory_mb is not None:
        found |= {"Memory": limits.memory_mb * MIB, "MemorySwap": 2 * limits.memory_mb * MIB}
    if limits.cpu is not None and limits.cpu < info.get("NCPU", 0):
        found["NanoCpus"] = round(limits.cpu * 1e9)
    if limits.pids is not None:
        found["PidsLimit"] = limits.pids
    if limits.files is not None:
        found["Ulimits"] = [{"Name": "nofile", "Soft": limits.files, "Hard": limits.files}]
    return found


_ENFORCED = (("memory", "memory_mb", "MemoryLimit"), ("cpu", "cpu", "CpuCfsQuota"), ("pids", "pids", "PidsLimit"))
"""The word of our messages, the field of `Limits`, the key of the engine's `/info`."""


def lacking(info: dict[str, Any], limits: Limits | None) -> str:
    """The parts of `limits` (None: of all there are) that this engine does not enforce, in words.

    >>> lacking({"MemoryLimit": True, "CpuCfsQuota": False, "PidsLimit": False}, Limits(cpu=1.0))
    'not enforced: cpu'
    >>> lacking({"MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True}, None)
    ''
    """
    missing = [
        word
        for word, field, key in _ENFORCED
        if info.get(key) is False and (limits is None or getattr(limits, field) is not None)
    ]
    return f"not enforced: {', '.join(missing)}" if missing else ""


def why_not_freeze(info: dict[str, Any]) -> str:
    """A rootless engine without cgroups cannot pause.

    >>> why_not_freeze({"CgroupDriver": "none"})
    'the engine manages no cgroups here, so it cannot pause'
    """
    return "the engine manages no cgroups here, so it cannot pause" if info.get("CgroupDriver") == "none" else ""


def address_of(told: dict[str, Any], port: int | None) -> str:
    """The address of the port of an inspected container: `host:port`, empty without a port or a network.

    >>> address_of({"NetworkSettings": {"Networks": {"hive-a1": {"IPAddress": "172.18.0.2"}}}}, 8080)
    '172.18.0.2:8080'
    """
    networks = told["NetworkSettings"]["Networks"].values()
    found = next((one["IPAddress"] for one in networks if one.get("IPAddress")), "")
    return f"{found}:{port}" if found and port is not None else ""
