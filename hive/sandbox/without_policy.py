"""The host's files an operator may ask for where root wrote no policy file: few, and never those that are closed.

The helper, and the engine it asks, are root: what they mount or copy for an agent they do not ask the files' owner for.
Pure but for `HostFiles`, which looks.
"""

from __future__ import annotations

import os
import stat
from pathlib import PurePosixPath
from typing import Protocol

from hive.domain import DockerSpec, FirecrackerSpec
from hive.errors import NotPermitted
from hive.link.specs import SandboxSpec

BELOW = ("/media", "/mnt", "/srv")
"""Directories of data for others (hier(7)): what is below one of these may be mounted."""
READABLE = "/usr"
"""The host's programs, which every user may read: it, or what is below it, may be mounted read-only."""
HINT = "root permits more by a policy file: [sandbox] policy in hive.conf, sandbox.toml is an example"


class Looks(Protocol):
    """The questions asked of the file system."""

    def resolve(self, path: str) -> str:
        """The path, links followed."""

    def is_roots(self, directory: str) -> bool:
        """Whether only root and this user may replace its entries."""

    def is_open(self, path: str) -> bool:
        """Whether every user may read this file; true of one that is not there, which is another's error to report."""


class HostFiles:
    """This host's."""

    def resolve(self, path: str) -> str:
        return os.path.realpath(path)

    def is_roots(self, directory: str) -> bool:
        try:
            found = os.stat(directory, follow_symlinks=False)
        except OSError:
            return True
        is_sticky = found.st_mode & stat.S_ISVTX
        shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky
        return found.st_uid in (0, os.geteuid()) and not shared

    def is_open(self, path: str) -> bool:
        try:
            return bool(os.stat(path).st_mode & stat.S_IROTH)
        except OSError:
            return True


def check(spec: SandboxSpec, looks: Looks) -> None:
    """Raises NotPermitted for what takes a policy file that names it."""
    if spec.docker is not None:
        _check_mounts(spec.docker, looks)
    elif spec.firecracker is not None:
        _check_images(spec.firecracker, looks)


def _check_mounts(docker: DockerSpec, looks: Looks) -> None:
    for mount in docker.mounts:
        source, *rest = mount.split(":")
        real = looks.resolve(source)
        led = source if source == real else f"{source}, which is {real},"
        if not may_be_mounted(real, read_only=rest[-1:] == ["ro"]):
            allowed = f"without a policy only what is below {', '.join(BELOW)}, and {READABLE} as :ro"
            raise NotPermitted(f"docker: mounts: {led} is not permitted: {allowed}", hint=HINT)
        for above in PurePosixPath(real).parents:
            if not looks.is_roots(str(above)):
                whose = f"others than root may put something else in its place, in {above}"
                raise NotPermitted(f"docker: mounts: {led} is not permitted without a policy: {whose}", hint=HINT)


def may_be_mounted(real: str, *, read_only: bool) -> bool:
    """Whether a path, links followed, is on the list.

    >>> may_be_mounted("/srv/data", read_only=False), may_be_mounted("/usr/bin", read_only=True)
    (True, True)
    >>> [may_be_mounted(path, read_only=True) for path in ("/srv", "/srv2/a", "/etc/ssl", "/root", "/dev/sda", "/")]
    [False, False, False, False, False, False]
    >>> may_be_mounted("/usr", read_only=False)
    False
    """
    path = PurePosixPath(real)
    if any(path.is_relative_to(top) and path != PurePosixPath(top) for top in BELOW):
        return True
    return read_only and path.is_relative_to(READABLE)


def _check_images(machine: FirecrackerSpec, looks: Looks) -> None:
    """The guest reads its images from end to end, whatever they are: the helper would copy it any file of the host."""
    named = [("kernel", machine.kernel), ("rootfs", machine.rootfs)]
    if machine.initrd:
        named.append(("initrd", machine.initrd))
    for what, path in named:
        real = looks.resolve(path)
        below = any(PurePosixPath(real).is_relative_to(top) for top in BELOW)
        if not below and not looks.is_open(real):
            allowed = f"without a policy only a file that everybody may read, or one below {', '.join(BELOW)}"
            raise NotPermitted(f"firecracker: {what}: {path} is not permitted: {allowed}", hint=HINT)
