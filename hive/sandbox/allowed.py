"""What the helper may run: the root-owned policy file `sandbox.toml`, and whether a spec is within it.

The helper has rights the daemon has not; whoever takes over the daemon gets no more than this file names. It is a
list of what is allowed: what a list does not name is refused, and the refusal says which line would permit it.
"""

from __future__ import annotations

import difflib
import fnmatch
import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from hive.domain import DockerSpec, FirecrackerSpec, Limits, RuntimeKind
from hive.errors import ConfigError, NotPermitted
from hive.link.messages import SandboxSpec

Resolve = Callable[[str], str]


class Networks(msgspec.Struct, frozen=True, kw_only=True):
    """`[networks]`. `host`: process agents may be in the host's network; `bridge`: containers may have the engine's
    bridge; `taps`: names of tap devices for machines; `egress`: networks an agent's `egress` may be within."""

    host: bool = False
    bridge: bool = False
    taps: list[str] = []
    egress: list[str] = []


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The file. A path's pattern that ends in `/` is everything below it; else `*` and `?` stay within one name.

    `programs`, `kernels`, `rootfs`, `copied_files` (source files copied into homes): the path as asked for *and* the
    file it leads to must be named. `mounts`: host path → `ro` or `rw`; the deepest above a mount decides. `uids`:
    first and last; None for any but Hive's own. `runtimes`: None for all. `limits`: what an agent may have at most,
    and has where it asks for none.
    """

    runtimes: list[RuntimeKind] | None = None
    programs: list[str] = []
    copied_files: list[str] = []
    images: list[str] = []
    kernels: list[str] = []
    rootfs: list[str] = []
    uids: tuple[int, int] | None = None
    mounts: dict[str, Literal["ro", "rw"]] = {}
    networks: Networks = Networks()
    limits: Limits = Limits()


class Policy(Document, frozen=True, kw_only=True):
    """The document, where it was read from, and in which line each of its keys stands."""

    path: str = "sandbox.toml"
    lines: dict[str, int] = {}


# --- the decision ------------------------------------------------------------------------------------------------


def check(policy: Policy, spec: SandboxSpec, *, resolve: Resolve = os.path.realpath) -> None:
    """Raises NotPermitted that says what is not allowed and which key, in which line, would allow it.

    `resolve`: the file a path leads to, links followed.
    """
    if policy.runtimes is not None and spec.runtime not in policy.runtimes:
        raise _refused(policy, f"runtime {spec.runtime}", "runtimes")
    _check_uid(policy, spec)
    for source in spec.files:
        _check_path(policy, "copied_files", "file", source, resolve)
    if spec.docker is not None:
        _check_container(policy, spec, spec.docker, resolve)
    elif spec.firecracker is not None:
        _check_machine(policy, spec.firecracker, resolve)
    else:
        _check_process(policy, spec, resolve)
    for network in spec.egress or ():
        if not any(_is_within(network, wide) for wide in policy.networks.egress):
            raise _refused(policy, f"egress to {network}", "networks.egress")
    _check_limits(policy, _asked(spec))


def limited(policy: Policy, spec: SandboxSpec) -> SandboxSpec:
    """`spec` with the policy's limits where it asks for none; a machine's memory is bounded by its own table.

    >>> policy = Policy(limits=Limits(memory_mb=512, pids=100))
    >>> spec = SandboxSpec(name="a", command=["x"], env={}, home="/h", log="/l", limits=Limits(pids=20))
    >>> limited(policy, spec).limits
    Limits(memory_mb=512, cpu=None, pids=20, files=None)
    """
    own = msgspec.structs.asdict(spec.limits)
    filled = {name: getattr(policy.limits, name) if value is None else value for name, value in own.items()}
    if spec.firecracker is not None:
        filled["memory_mb"] = own["memory_mb"]
    return msgspec.structs.replace(spec, limits=Limits(**filled))


def matches(path: str, pattern: str) -> bool:
    """Whether a path's pattern names `path`.

    >>> matches("/usr/bin/python3.11", "/usr/bin/python3*"), matches("/srv/agents/a/b.py", "/srv/agents/")
    (True, True)
    >>> matches("/usr/bin/x/python3", "/usr/bin/*"), matches("/srv/agents", "/srv/agents/")
    (False, False)
    """
    return path.startswith(pattern) if pattern.endswith("/") else PurePosixPath(path).match(pattern)


def _check_uid(policy: Policy, spec: SandboxSpec) -> None:
    """Containers too: a container's user is that number on the host, no user namespace maps it.

    One that names no user at all gets the helper's own, which `container_spec.user_of` refuses where that is root.
    """
    if policy.uids is None:
        return
    first, last = policy.uids
    if spec.uid is None and spec.runtime is not RuntimeKind.DOCKER:
        raise NotPermitted("an agent without a uid of its own is not permitted", hint=_where(policy, "uids"))
    for kind, number in _users(spec):
        if not first <= number <= last:
            raise _refused(policy, f"{kind} {number}", "uids", f"only {first} to {last}")


def _users(spec: SandboxSpec) -> Iterator[tuple[str, int]]:
    """Every uid and gid it asks for. A name in `docker.user` is refused by its runtime."""
    if spec.uid is not None:
        yield from (("uid", spec.uid), ("gid", spec.uid if spec.gid is None else spec.gid))
    if spec.docker is not None and spec.docker.user:
        uid, _, gid = spec.docker.user.partition(":")
        numbers = (("docker: user: uid", uid), ("docker: user: gid", gid or uid))
        yield from ((kind, int(number)) for kind, number in numbers if number.isdecimal())


def _check_process(policy: Policy, spec: SandboxSpec, resolve: Resolve) -> None:
    program = spec.command[0] if spec.command else ""
    if not program.startswith("/"):
        raise NotPermitted(f"program {program!r} is not permitted: it has no full path")
    _check_path(policy, "programs", "program", program, resolve)
    if spec.egress is None and not policy.networks.host:
        raise _refused(policy, "the host's network", "networks.host", "ask for egress = []")


def _check_container(policy: Policy, spec: SandboxSpec, docker: DockerSpec, resolve: Resolve) -> None:
    if not any(fnmatch.fnmatchcase(docker.image, pattern) for pattern in policy.images):
        raise _refused(policy, f"image {docker.image}", "images")
    for mount in docker.mounts:
        _check_mount(policy, mount, resolve)
    if spec.egress != [] and not policy.networks.bridge:
        raise _refused(policy, "the engine's bridge network", "networks.bridge", "ask for egress = []")


def _check_mount(policy: Policy, mount: str, resolve: Resolve) -> None:
    """Nor may a mount for writing hold what is named as `ro` deeper in it."""
    host, *rest = mount.split(":")
    for path in (host, resolve(host)):
        above = [named for named in policy.mounts if path == named or path.startswith(named.rstrip("/") + "/")]
        if not above:
            raise _refused(policy, f"mount of {_led_to(host, path)}", "mounts")
        below = [named for named in policy.mounts if named.startswith(path.rstrip("/") + "/")]
        for named in [max(above, key=len), *below]:
            if rest[-1:] != ["ro"] and policy.mounts[named] == "ro":
                raise _refused(policy, f"writing to {_led_to(host, path)}", f"mounts.{named}", "mount it as :ro")


def _check_machine(policy: Policy, machine: FirecrackerSpec, resolve: Resolve) -> None:
    _check_path(policy, "kernels", "kernel", machine.kernel, resolve)
    _check_path(policy, "rootfs", "root file system", machine.rootfs, resolve)
    if machine.tap and not any(fnmatch.fnmatchcase(machine.tap, pattern) for pattern in policy.networks.taps):
        raise _refused(policy, f"tap device {machine.tap}", "networks.taps")


def _check_path(policy: Policy, key: str, kind: str, path: str, resolve: Resolve) -> None:
    """Both what was asked for and what it leads to: who may move a link must not choose what runs."""
    for named in (path, resolve(path)):
        if not any(matches(named, pattern) for pattern in getattr(policy, key)):
            raise _refused(policy, f"{kind} {_led_to(path, named)}", key)


def _led_to(path: str, named: str) -> str:
    return path if named == path else f"{path}, which is {named},"


def _asked(spec: SandboxSpec) -> Limits:
    """What it wants of the host; a machine's memory is what its own table gives the guest."""
    if spec.firecracker is None:
        return spec.limits
    memory_mb = max(spec.firecracker.memory_mb, spec.limits.memory_mb or 0)
    return msgspec.structs.replace(spec.limits, memory_mb=memory_mb)


def _check_limits(policy: Policy, asked: Limits) -> None:
    for name in Limits.__struct_fields__:
        most, value = getattr(policy.limits, name), getattr(asked, name)
        if most is not None and value is not None and value > most:
            raise _refused(policy, f"{name} {value:g}", f"limits.{name}", f"at most {most:g}")


def _is_within(network: str, wide: str) -> bool:
    """Whether all of `network` is in `wide`. Both are networks; one that is none is within nothing."""
    try:
        inner, outer = ipaddress.ip_network(network), ipaddress.ip_network(wide)
    except ValueError:
        return False
    return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]  # of one version


def _refused(policy: Policy, what: str, key: str, instead: str = "") -> NotPermitted:
    return NotPermitted(
        f"{what} is not permitted by the policy{f': {instead}' if instead else ''}", hint=_where(policy, key)
    )


def _where(policy: Policy, key: str) -> str:
    """Which line decides this, or which key would, were it there."""
    line = policy.lines.get(key)
    return f"{policy.path} line {line} decides this: {key}" if line else f"{policy.path} would have to set {key}"


# --- the file ----------------------------------------------------------------------------------------------------


class Allowed:
    """The policy in force; without a file everything the runtimes themselves allow."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError."""
        self._path = path
        self._policy = None if path is None else load(path)

    def __repr__(self) -> str:
        return f"<Allowed by {self._path or 'nobody: everything'}>"

    def reload(self) -> None:
        """Reads the file anew. Raises ConfigError; then the policy read before stays in force."""
        if self._path is not None:
            self._policy = load(self._path)

    def permit(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec as it may run, with the policy's limits. Raises NotPermitted."""
        if self._policy is None:
            return spec
        check(self._policy, spec)
        return limited(self._policy, spec)


def load(path: Path) -> Policy:
    """The policy at `path`. Raises ConfigError where it cannot be read, understood, or trusted: it and its directory
    must be root's or this user's, and writable by no other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"the policy {path} is no file")
        _check_trusted(path, found)
        for directory in (path.parent, path.resolve().parent):  # of the name, and where a link leads
            _check_trusted(directory, os.stat(directory))
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None
    return parse(text, path=str(path))


def _check_trusted(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} belongs to uid {found.st_uid}", hint=f"chown root: {path}")
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX  # of a file that bit means nothing
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise ConfigError(f"{path} can be written by others than its owner", hint=f"chmod go-w {path}")


def parse(text: str, *, path: str = "sandbox.toml") -> Policy:
    """The policy in a TOML document. Raises ConfigError with the line, and the nearest name of an unknown key."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no TOML: {error}") from None
    lines = {key: line for key in _keys(document) if (line := _line(text, key))}
    _check_known(document, path, lines)
    try:
        policy = msgspec.convert({**document, "path": path, "lines": lines}, Policy)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`").partition("[")[0]
        raise ConfigError(f"{_at(path, lines, key)}{key}: {reason[:1].lower()}{reason[1:]}") from None
    for key, problem in _problems(policy):
        raise ConfigError(f"{_at(path, lines, key)}{key}: {problem}")
    return policy


def _keys(document: dict[str, Any]) -> Iterator[str]:
    """Every key, those of tables as `table.key` too."""
    for key, value in document.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in value)


def _line(text: str, key: str) -> int:
    """The line that sets `key` or opens its table; 0 where that is not found. tomllib does not say."""
    table, _, name = key.rpartition(".") if key.partition(".")[0] in _TABLES else ("", "", key)
    start = 0
    if table and (opened := re.search(rf"^\s*\[\s*{table}\s*\]", text, re.MULTILINE)):
        start = opened.end()
    dotted = rf"(?:{table}\s*\.\s*)?" if table else ""
    found = re.compile(rf"^\s*(?:\[\s*)?{dotted}[\"']?{re.escape(name)}[\"']?\s*[=.\]]", re.MULTILINE).search(
        text, start
    )
    return text.count("\n", 0, found.end()) + 1 if found else 0


_TABLES: dict[str, type[msgspec.Struct] | None] = {"networks": Networks, "limits": Limits, "mounts": None}
"""Tables of the file → what may be in them; None for paths."""


def _check_known(document: dict[str, Any], path: str, lines: dict[str, int]) -> None:
    for key in _keys(document):
        table, _, name = key.partition(".")
        struct = _TABLES.get(table) if name else Document
        if struct is None or (name or table) in struct.__struct_fields__:
            continue
        known = struct.__struct_fields__
        near = difflib.get_close_matches(name or table, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"{_at(path, lines, key)}{key}: no such key", hint=hint)


def _at(path: str, lines: dict[str, int], key: str) -> str:
    return f"{path} line {lines[key]}: " if key in lines else f"{path}: "


def _problems(policy: Policy) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) beyond types."""
    for key in ("programs", "copied_files", "kernels", "rootfs", "mounts"):
        for pattern in getattr(policy, key):
            if not pattern.startswith("/"):
                yield key, f"{pattern!r} is no full path"
    for network in policy.networks.egress:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            yield "networks.egress", str(error)
    if policy.uids is not None and not 0 < policy.uids[0] <= policy.uids[1]:
        yield "uids", "expected the first and the last, both above 0"
    for name in Limits.__struct_fields__:
        value = getattr(policy.limits, name)
        if value is not None and value <= 0:
            yield f"limits.{name}", f"{value:g} is not above 0"
