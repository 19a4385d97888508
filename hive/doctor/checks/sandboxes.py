"""Sandboxes of agents: virtual machines, containers, and the policy that bounds both."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import NamedTuple

from hive.conditions import TABLE
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.errors import ConfigError, HiveError
from hive.host import policy_file
from hive.host.firecracker import ask_version, parse_version, why_not_pause, why_too_old

KVM = Path("/dev/kvm")
KVM_GET_API_VERSION = 0xAE00
KVM_API = 12
"""The only one there has been since 2007 (linux/kvm.h)."""
VHOST = Path("/dev/vhost-vsock")


# --- KVM ---------------------------------------------------------------------------------------------------------


def look_at_kvm(subject: Subject) -> CheckVerdict:
    """Opened and asked its version, as a VMM would do first."""
    has_vmm = Path(subject.settings.sandbox.firecracker).exists()
    try:
        fd = os.open(KVM, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return judge_kvm(error.errno or errno.EIO, None, has_vmm=has_vmm, is_root=subject.is_root)
    try:
        return judge_kvm(0, fcntl.ioctl(fd, KVM_GET_API_VERSION), has_vmm=has_vmm, is_root=subject.is_root)
    except OSError as error:
        return judge_kvm(error.errno or errno.EIO, None, has_vmm=has_vmm, is_root=subject.is_root)
    finally:
        os.close(fd)


def judge_kvm(number: int, api: int | None, *, has_vmm: bool, is_root: bool) -> CheckVerdict:
    """`number`: what opening it failed with, 0 where it did not.

    >>> judge_kvm(errno.ENOENT, None, has_vmm=False, is_root=True).reason
    'no /dev/kvm: virtual machines cannot run here'
    """
    if number in (errno.EACCES, errno.EPERM) and not is_root:
        return unseen("this user may not open /dev/kvm", "sandbox.kvm", group="kvm")
    if number:
        missing = number in (errno.ENOENT, errno.ENXIO, errno.ENODEV)
        reason = "no /dev/kvm" if missing else f"/dev/kvm: {os.strerror(number)}"
        verdict = wrong("kvm_missing", why=reason)
        return verdict if has_vmm else skipped(verdict.reason, TABLE["kvm_missing"].fix)
    if api != KVM_API:
        return wrong("kvm_other_api", api=api, wanted=KVM_API)
    return passed("/dev/kvm answers; whether it boots a guest, only a guest can tell")


# --- vsock -------------------------------------------------------------------------------------------------------


def look_at_vsock(subject: Subject) -> CheckVerdict:
    return judge_vsock(
        is_wanted=subject.settings.proxy.vsock, has_vsock=Path("/dev/vsock").exists(), has_vhost=VHOST.exists()
    )


def judge_vsock(*, is_wanted: bool, has_vsock: bool, has_vhost: bool) -> CheckVerdict:
    """Only guests with a `cid` (QEMU) need it: Firecracker's vsock ends in a unix socket."""
    there = " and ".join(
        name for name, is_there in (("/dev/vsock", has_vsock), ("/dev/vhost-vsock", has_vhost)) if is_there
    )
    if not is_wanted:
        return skipped("not asked for: [proxy] vsock = false")
    if not has_vsock:
        return wrong("vsock_missing")
    if not has_vhost:
        return wrong("vhost_missing")
    return passed(there)


# --- Firecracker -------------------------------------------------------------------------------------------------


class HostProgram(NamedTuple):
    """One program of the host. `is_roots`: root's, and writable by no other. `said`: what `--version` printed."""

    path: str
    is_there: bool
    is_roots: bool = False
    said: str = ""


def look_at_firecracker(subject: Subject) -> CheckVerdict:
    settings = subject.settings.sandbox
    jailer = _program(settings.jailer) if settings.jailer else None
    return judge_firecracker(_program(settings.firecracker), jailer)


def _program(path: str) -> HostProgram:
    """Asked only where it is root's: else whoever may write it would choose what root runs here."""
    try:
        found = os.stat(path)
    except OSError:
        return HostProgram(path, is_there=False)
    is_roots = found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_roots:
        return HostProgram(path, is_there=True)
    try:
        return HostProgram(path, True, True, ask_version(Path(path)))
    except HiveError as error:
        return HostProgram(path, True, True, error.message)


def judge_firecracker(vmm: HostProgram, jailer: HostProgram | None) -> CheckVerdict:
    """`jailer`: None where none is to be used."""
    if not vmm.is_there:
        return skipped(f"not installed ({vmm.path}): no agent can be a virtual machine")
    for program in (vmm, jailer):
        if program is not None and program.is_there and not program.is_roots:
            return wrong("program_replaceable", path=program.path)
    version = parse_version(vmm.said)
    if version is None:
        return wrong("firecracker_unknown", path=vmm.path, said=vmm.said[:60])
    if why := why_not_pause(vmm.said, has_vsock=True):
        return wrong("firecracker_no_pause", why=why)
    if why := why_too_old(vmm.said):
        return wrong("firecracker_too_old", why=why)
    return _judge_jailer(".".join(map(str, version)), jailer)


def _judge_jailer(vmm: str, jailer: HostProgram | None) -> CheckVerdict:
    if jailer is None:
        return wrong("jailer_unused", version=vmm)
    if not jailer.is_there:
        return wrong("jailer_missing", version=vmm, path=jailer.path)
    version = parse_version(jailer.said)
    if version is None or ".".join(map(str, version)) != vmm:
        return wrong("jailer_differs", version=vmm, said=jailer.said[:40])
    return passed(f"Firecracker and jailer {vmm}; light and deep sleep keep vsock")


# --- the policy --------------------------------------------------------------------------------------------------


def look_at_policy(subject: Subject) -> CheckVerdict:
    named = subject.settings.sandbox.policy
    if subject.config_error:
        return skipped("the configuration that names it is wrong: see hive.config")
    if not named:
        return judge_no_policy(is_appliance=subject.is_appliance)
    path = subject.layout.at(named)
    try:
        policy = policy_file.load(path)
    except ConfigError as error:
        if isinstance(error.__cause__, PermissionError) and not subject.is_root:
            return unseen(f"this user may not read {path}", "sandbox.policy")
        return wrong("policy_wrong", why=error.message, hint=error.hint)
    owner = path.stat().st_uid
    if owner != 0 and subject.is_appliance:
        return wrong("policy_not_roots", path=path, uid=owner)
    named_kinds = "all runtimes" if policy.runtimes is None else ", ".join(policy.runtimes)
    return passed(f"{path}: {named_kinds}")


def judge_no_policy(*, is_appliance: bool) -> CheckVerdict:
    verdict = wrong("policy_empty")
    return verdict if is_appliance else skipped(verdict.reason)


CHECKS = (
    Check("sandbox.kvm", "/dev/kvm is there and answers, for virtual machines.", look_at_kvm),
    Check("sandbox.vsock", "AF_VSOCK, where the proxy is to listen on it.", look_at_vsock),
    Check("sandbox.firecracker", "Firecracker and jailer: root's, of a version that may pause.", look_at_firecracker),
    Check("sandbox.policy", "sandbox.toml is valid, root's, and in force.", look_at_policy),
)
