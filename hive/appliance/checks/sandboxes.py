"""What agents run in: virtual machines, containers, and the policy that bounds both."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import NamedTuple

from hive.appliance.checks.check import Check, Verdict, failed, passed, skipped, warned
from hive.appliance.checks.subject import Subject
from hive.errors import ConfigError, HiveError
from hive.host import policy_file
from hive.host.firecracker import ask_version, parse_version, why_not_pause, why_too_old

KVM = Path("/dev/kvm")
KVM_GET_API_VERSION = 0xAE00
KVM_API = 12
"""The only one there has been since 2007 (linux/kvm.h)."""
VHOST = Path("/dev/vhost-vsock")


# --- KVM ---------------------------------------------------------------------------------------------------------


def look_at_kvm(subject: Subject) -> Verdict:
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


def judge_kvm(number: int, api: int | None, *, has_vmm: bool, is_root: bool) -> Verdict:
    """`number`: what opening it failed with, 0 where it did not.

    >>> judge_kvm(errno.ENOENT, None, has_vmm=False, is_root=True).reason
    'no /dev/kvm: virtual machines cannot run here'
    """
    if number in (errno.EACCES, errno.EPERM) and not is_root:
        return skipped("this user may not open /dev/kvm; needs root or the group kvm", "sudo hive doctor sandbox.kvm")
    if number:
        missing = number in (errno.ENOENT, errno.ENXIO, errno.ENODEV)
        reason = "no /dev/kvm" if missing else f"/dev/kvm: {os.strerror(number)}"
        verdict = failed if has_vmm else skipped
        return verdict(f"{reason}: virtual machines cannot run here", "modprobe kvm_intel || modprobe kvm_amd")
    if api != KVM_API:
        return warned(f"/dev/kvm speaks API {api}, expected {KVM_API}")
    return passed("/dev/kvm answers; whether it boots a guest, only a guest can tell")


# --- vsock -------------------------------------------------------------------------------------------------------


def look_at_vsock(subject: Subject) -> Verdict:
    return judge_vsock(
        is_wanted=subject.settings.proxy.vsock, has_vsock=Path("/dev/vsock").exists(), has_vhost=VHOST.exists()
    )


def judge_vsock(*, is_wanted: bool, has_vsock: bool, has_vhost: bool) -> Verdict:
    """Only guests with a `cid` (QEMU) need it: Firecracker's vsock ends in a unix socket."""
    there = " and ".join(
        name for name, is_there in (("/dev/vsock", has_vsock), ("/dev/vhost-vsock", has_vhost)) if is_there
    )
    if not is_wanted:
        return skipped("not asked for: [proxy] vsock = false")
    if not has_vsock:
        return failed("no /dev/vsock, but [proxy] vsock = true: the proxy cannot listen there", "modprobe vsock")
    if not has_vhost:
        return warned("no /dev/vhost-vsock: no guest of this host reaches the proxy", "modprobe vhost_vsock")
    return passed(there)


# --- Firecracker -------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """One program of the host. `is_roots`: root's, and writable by no other. `said`: what `--version` printed."""

    path: str
    is_there: bool
    is_roots: bool = False
    said: str = ""


def look_at_firecracker(subject: Subject) -> Verdict:
    settings = subject.settings.sandbox
    jailer = _program(settings.jailer) if settings.jailer else None
    return judge_firecracker(_program(settings.firecracker), jailer)


def _program(path: str) -> Program:
    """Asked only where it is root's: else whoever may write it would choose what root runs here."""
    try:
        found = os.stat(path)
    except OSError:
        return Program(path, is_there=False)
    is_roots = found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not is_roots:
        return Program(path, is_there=True)
    try:
        return Program(path, True, True, ask_version(Path(path)))
    except HiveError as error:
        return Program(path, True, True, error.message)


def judge_firecracker(vmm: Program, jailer: Program | None) -> Verdict:
    """`jailer`: None where none is to be used."""
    if not vmm.is_there:
        return skipped(f"not installed ({vmm.path}): no agent can be a virtual machine")
    for program in (vmm, jailer):
        if program is not None and program.is_there and not program.is_roots:
            return failed(
                f"{program.path} can be replaced by others than root, who runs it",
                f"chown root: {program.path}; chmod go-w {program.path}",
            )
    version = parse_version(vmm.said)
    if version is None:
        return warned(f"{vmm.path} does not say its version: {vmm.said[:60]!r}")
    if why := why_not_pause(vmm.said, has_vsock=True):
        return failed(f"{why}; its agents stay awake")
    if why := why_too_old(vmm.said):
        return failed(f"{why}; no agent can be a virtual machine")
    return _judge_jailer(".".join(map(str, version)), jailer)


def _judge_jailer(vmm: str, jailer: Program | None) -> Verdict:
    if jailer is None:
        return warned(f"Firecracker {vmm} without a jailer: a guest that breaks out is root's guest")
    if not jailer.is_there:
        return failed(f"Firecracker {vmm}, but no jailer at {jailer.path}: no machine can start")
    version = parse_version(jailer.said)
    if version is None or ".".join(map(str, version)) != vmm:
        return warned(f"Firecracker {vmm} with another jailer: {jailer.said[:40]!r}")
    return passed(f"Firecracker and jailer {vmm}; light and deep sleep keep vsock")


# --- the policy --------------------------------------------------------------------------------------------------


def look_at_policy(subject: Subject) -> Verdict:
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
            return skipped(f"this user may not read {path}; needs root", "sudo hive doctor sandbox.policy")
        return failed(error.message, error.hint)
    owner = path.stat().st_uid
    if owner != 0 and subject.is_appliance:
        return failed(f"{path} belongs to uid {owner}, who may let the helper run anything", f"chown root: {path}")
    named_kinds = "all runtimes" if policy.runtimes is None else ", ".join(policy.runtimes)
    return passed(f"{path}: {named_kinds}")


def judge_no_policy(*, is_appliance: bool) -> Verdict:
    reason = "[sandbox] policy is empty: the helper runs whatever program an operator asks for"
    return failed(reason, "hive config set sandbox.policy /etc/hive/sandbox.toml") if is_appliance else skipped(reason)


CHECKS = (
    Check("sandbox.kvm", "/dev/kvm is there and answers, for virtual machines.", look_at_kvm),
    Check("sandbox.vsock", "AF_VSOCK, where the proxy is to listen on it.", look_at_vsock),
    Check("sandbox.firecracker", "Firecracker and jailer: root's, of a version that may pause.", look_at_firecracker),
    Check("sandbox.policy", "sandbox.toml is valid, root's, and in force.", look_at_policy),
)
