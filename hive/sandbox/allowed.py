"""The limits of the helper: the root-owned policy file `sandbox.toml`, and the check of a spec against it.

The helper has rights that the daemon has not; a program that takes over the daemon gets no more than this file names.
It is a list of what is allowed: what a list does not name is refused, and the refusal says which line would permit it.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import msgspec

from hive.domain import DockerSpec, FirecrackerSpec, Limits, RuntimeKind
from hive.errors import NotPermitted
from hive.host.policy_file import Policy, load
from hive.link.script_form import exec_of
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.sandbox import without_policy

ETC = "/etc"
FIRST_UID, UIDS_MAX = 1000, 256
"""The least uid a block may begin with, which is that of `[agents] first_uid`, and the most there are in one."""
NO_NETWORK = "create it with --no-network (egress = [] in its description)"
Resolve = Callable[[str], str]


# --- the decision ------------------------------------------------------------------------------------------------


def check(
    policy: Policy, spec: SandboxSpec, *, own_networks: bool = False, resolve: Resolve = os.path.realpath
) -> None:
    """Raises NotPermitted that says what is not allowed and which key, in which line, would allow it.

    `own_networks`: process agents that name no networks have one of their own here, not the host's. `resolve`: the file
    a path leads to, links followed.
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
        _check_process(policy, spec, own_networks, resolve)
    for network in spec.egress or ():
        if not any(_is_within(network, wide) for wide in policy.networks.egress):
            raise _refused(policy, f"egress to {network}", "networks.egress")
    if spec.template is not None:
        _check_template(policy, spec.template, resolve)
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


def _check_process(policy: Policy, spec: SandboxSpec, own_networks: bool, resolve: Resolve) -> None:
    command = spec.command if spec.template is None else exec_of(spec.command, spec.template.python)
    program = command[0] if command else ""
    if not program.startswith("/"):
        raise NotPermitted(f"program {program!r} is not permitted: it has no full path")
    _check_path(policy, "programs", "program", program, resolve)
    if spec.egress is None and not own_networks and not policy.networks.host:
        raise _refused(policy, "the host's network", "networks.host", NO_NETWORK)


def _check_template(policy: Policy, template: TemplateSpec, resolve: Resolve) -> None:
    """The template runs its own interpreter, whatever its agent runs, and a script where it has one, and maps the users
    of its block: all of them must be agents'."""
    if not template.python.startswith("/"):
        raise NotPermitted(f"template {template.name}: {template.python!r} is not permitted: it has no full path")
    _check_path(policy, "programs", f"template {template.name}: program", template.python, resolve)
    if template.script:
        _check_path(policy, "programs", f"template {template.name}: script", template.script, resolve)
    if policy.uids is None:
        return
    if template.first_uid is None:
        raise NotPermitted(
            f"template {template.name} without a block of uids is not permitted", hint=_where(policy, "uids")
        )
    last_uid = template.first_uid + template.uids - 1
    if not policy.uids[0] <= template.first_uid <= last_uid <= policy.uids[1]:
        of = f"the block of uids {template.first_uid} to {last_uid} of template {template.name}"
        raise _refused(policy, of, "uids", f"only {policy.uids[0]} to {policy.uids[1]}")


def check_block(spec: SandboxSpec, template: TemplateSpec) -> None:
    """Raises NotPermitted where its block holds users of the host, or where the agent's is none of it but the
    template's own; with a policy or without.

    >>> spec = SandboxSpec(name="a", command=["/a.py"], env={}, home="/h", log="/l", uid=0)
    >>> check_block(spec, TemplateSpec(name="t", python="/venv/bin/python", first_uid=0))
    Traceback (most recent call last):
    hive.errors.NotPermitted: template t: its block of uids begins below 1000
    """
    if template.first_uid is None:
        if spec.uid is not None:
            raise NotPermitted(f"template {template.name}: an agent with a uid needs a block of them")
        return
    if template.first_uid < FIRST_UID:
        raise NotPermitted(f"template {template.name}: its block of uids begins below {FIRST_UID}")
    if not 2 <= template.uids <= UIDS_MAX:
        raise NotPermitted(f"template {template.name}: a block of {template.uids} uids")
    for number in (spec.uid, spec.gid if spec.gid is not None else spec.uid):
        if number is None or not template.first_uid < number < template.first_uid + template.uids:
            raise NotPermitted(f"template {template.name}: uid {number} is none of its agents'")


def _check_container(policy: Policy, spec: SandboxSpec, docker: DockerSpec, resolve: Resolve) -> None:
    if not any(fnmatch.fnmatchcase(docker.image, pattern) for pattern in policy.images):
        raise _refused(policy, f"image {docker.image}", "images")
    for mount in docker.mounts:
        _check_mount(policy, mount, resolve)
    if spec.egress != [] and not policy.networks.bridge:
        raise _refused(policy, "the engine's bridge network", "networks.bridge", NO_NETWORK)


def _check_mount(policy: Policy, mount: str, resolve: Resolve) -> None:
    """Nor may a mount for writing hold what is named as `ro` deeper in it.

    Of /etc, where passwords and keys are, only exactly what is named, read-only. (What is never mounted, whatever the
    policy names, `hive/runtimes/container_spec.py` says.)
    """
    host, *rest = mount.split(":")
    for path in (host, resolve(host)):
        if path == ETC or path.startswith(f"{ETC}/"):
            if path not in policy.mounts or path == ETC:
                raise _refused(policy, f"mount of {_led_to(host, path)}", "mounts", f"below {ETC} only paths it names")
            if rest[-1:] != ["ro"]:
                raise _refused(policy, f"writing to {_led_to(host, path)}", f"mounts.{path}", "mount it as :ro")
        above = [named for named in policy.mounts if path == named or path.startswith(named.rstrip("/") + "/")]
        if not above:
            raise _refused(policy, f"mount of {_led_to(host, path)}", "mounts")
        below = [named for named in policy.mounts if named.startswith(path.rstrip("/") + "/")]
        for named in [max(above, key=len), *below]:
            if rest[-1:] != ["ro"] and policy.mounts[named] == "ro":
                raise _refused(policy, f"writing to {_led_to(host, path)}", f"mounts.{named}", "mount it as :ro")


def _check_machine(policy: Policy, machine: FirecrackerSpec, resolve: Resolve) -> None:
    _check_path(policy, "kernels", "kernel", machine.kernel, resolve)
    if machine.initrd:
        _check_path(policy, "kernels", "initrd", machine.initrd, resolve)
    _check_path(policy, "rootfs", "root file system", machine.rootfs, resolve)
    if machine.tap and not any(fnmatch.fnmatchcase(machine.tap, pattern) for pattern in policy.networks.taps):
        raise _refused(policy, f"tap device {machine.tap}", "networks.taps")


def _check_path(policy: Policy, key: str, kind: str, path: str, resolve: Resolve) -> None:
    """Checks the path asked for and its target: a user that may move a link must not choose what runs."""
    for named in (path, resolve(path)):
        if not any(matches(named, pattern) for pattern in getattr(policy, key)):
            raise _refused(policy, f"{kind} {_led_to(path, named)}", key)


def _led_to(path: str, named: str) -> str:
    return path if named == path else f"{path}, which is {named},"


def _asked(spec: SandboxSpec) -> Limits:
    """The limits asked of the host; a machine's memory is what its own table gives the guest."""
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
    """Whether all of `network` is in `wide`. Both are networks; one that is none is within nothing.

    The loopback is no part of wider networks: `0.0.0.0/0` permits other hosts only, as in an agent's list.

    >>> _is_within("10.1.0.0/16", "0.0.0.0/0"), _is_within("127.0.0.0/8", "0.0.0.0/0")
    (True, False)
    >>> _is_within("127.0.0.53/32", "127.0.0.0/8")
    True
    """
    try:
        inner, outer = ipaddress.ip_network(network), ipaddress.ip_network(wide)
    except ValueError:
        return False
    if inner.version != outer.version or inner.is_loopback != outer.is_loopback:
        return False
    return inner.subnet_of(outer)  # type: ignore[arg-type]  # of one version


def _refused(policy: Policy, what: str, key: str, instead: str = "") -> NotPermitted:
    return NotPermitted(
        f"{what} is not permitted by the policy{f': {instead}' if instead else ''}", hint=_where(policy, key)
    )


def _where(policy: Policy, key: str) -> str:
    """The line that decides this, or the key that would, were it there."""
    line = policy.lines.get(key)
    return f"{policy.path} line {line} decides this: {key}" if line else f"{policy.path} would have to set {key}"


def why_replaceable(program: str) -> str:
    """Says who else than root may put another program in the place of this one; empty where nobody may, or where it is
    not there, which is another's error to report."""
    for path in dict.fromkeys((program, os.path.realpath(program))):
        for place in (path, os.path.dirname(path)):
            try:
                found = os.stat(place)
            except OSError:
                return ""
            if found.st_uid not in (0, os.geteuid()):
                return f"{place} belongs to uid {found.st_uid}"
            is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
                return f"{place} can be written by others than its owner"
    return ""


# --- the file ----------------------------------------------------------------------------------------------------


class Allowed:
    """The policy in force; without a file what the runtimes themselves allow, and of the host's files little."""

    def __init__(self, path: Path | None, *, own_networks: bool = False) -> None:
        """`own_networks`: as in `check`. Raises ConfigError."""
        self._path = path
        self._own_networks = own_networks
        self._policy = None if path is None else load(path)

    def __repr__(self) -> str:
        return f"<Allowed by {self._path or 'nobody: what is on the built-in list'}>"

    def reload(self) -> None:
        """Reads the file anew. Raises ConfigError; then the policy read before stays in force."""
        if self._path is not None:
            self._policy = load(self._path)

    def permit(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec as it may run, with the policy's limits. Raises NotPermitted."""
        if spec.template is not None:
            check_block(spec, spec.template)
        if self._policy is None:
            without_policy.check(spec, without_policy.HostFiles())
            return spec
        check(self._policy, spec, own_networks=self._own_networks)
        of = spec.template
        for path in (of.python, of.script) if of is not None else ():
            if of is not None and path and (wrong := why_replaceable(path)):
                raise NotPermitted(f"template {of.name}: {wrong}", hint="it has to be root's, as its directory")
        return limited(self._policy, spec)
