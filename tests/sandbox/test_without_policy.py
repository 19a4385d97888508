"""Files of the host that an agent is given where root wrote no policy file."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from hive.domain import DockerSpec, FirecrackerSpec, RuntimeKind
from hive.errors import NotPermitted
from hive.link.specs import SandboxSpec
from hive.runtimes.docker import DockerRuntime
from hive.sandbox.allowed import Allowed
from hive.sandbox.server import HelperServer
from hive.sandbox.without_policy import HostFiles, check
from hive.settings.table import Paths, Sandbox
from tests.sandbox.harness import PYTHON, A, Daemon, spec

Connect = Callable[..., Awaitable[Daemon]]
PLAIN = SandboxSpec(name="a", command=[], env={}, home="/h", log="/l", uid=70001)


def container(*mounts: str) -> SandboxSpec:
    docker = DockerSpec(image="debian:12", mounts=list(mounts))
    return msgspec.structs.replace(PLAIN, runtime=RuntimeKind.DOCKER, docker=docker)


def machine(kernel: str, rootfs: str) -> SandboxSpec:
    images = FirecrackerSpec(kernel=kernel, rootfs=rootfs)
    return msgspec.structs.replace(PLAIN, runtime=RuntimeKind.FIRECRACKER, firecracker=images)


class Host:
    """A host whose links, shared directories and closed files are these."""

    def __init__(self, *, links: dict[str, str] | None = None, shared: str = "", closed: str = "") -> None:
        self._links = links or {}
        self._shared = shared
        self._closed = closed

    def resolve(self, path: str) -> str:
        path = os.path.normpath(path)
        for link, target in self._links.items():
            if path == link or path.startswith(f"{link}/"):
                return target + path.removeprefix(link)
        return path

    def is_roots(self, directory: str) -> bool:
        return directory != self._shared

    def is_open(self, path: str) -> bool:
        return path != self._closed


@pytest.mark.parametrize("mount", ["/srv/data:/d", "/srv/a/b:/d:ro", "/mnt/x:/d", "/media/x:/d", "/usr:/usr:ro"])
def test_what_is_below_the_places_for_data_is_mounted(mount: str) -> None:
    check(container(mount), Host())


@pytest.mark.parametrize(
    "mount",
    [
        *("/etc:/d:ro", "/etc/shadow:/d:ro", "/dev:/d", "/dev/sda:/d", "/root:/d:ro", "/root/.ssh:/d:ro", "/:/d:ro"),
        *("/proc:/d", "/sys:/d", "/run:/d", "/var/run/docker.sock:/d", "/home/ann:/d", "/var/lib:/d", "/boot:/d:ro"),
        *("/srv:/d", "/mnt:/d", "/srv2/x:/d", "/usr:/usr", "/usr/bin:/d", "/srv/../etc:/d:ro", "//etc:/d:ro"),
    ],
)
def test_anything_else_takes_a_policy_file(mount: str) -> None:
    """Without one /etc, /dev and /root were mounted for every user that may create agents, with a gid of his choice."""
    with pytest.raises(NotPermitted, match=r"mounts: .*not permitted: without a policy only") as caught:
        check(container("/srv/data:/x", mount), Host())
    assert "sandbox.toml" in caught.value.hint


def test_a_link_is_what_it_leads_to() -> None:
    with pytest.raises(NotPermitted, match=r"/srv/innocent/x, which is /etc/x, is not permitted"):
        check(container("/srv/innocent/x:/d:ro"), Host(links={"/srv/innocent": "/etc"}))
    check(container("/home/link:/d"), Host(links={"/home/link": "/srv/data"}))


def test_a_place_that_others_may_change_is_none() -> None:
    """Between the look and the mount somebody could have a link there."""
    with pytest.raises(NotPermitted, match="others than root may put something else in its place, in /srv/team"):
        check(container("/srv/team/data:/d"), Host(shared="/srv/team"))
    check(container("/srv/team:/d"), Host(shared="/srv/team"))


def test_an_image_is_what_everybody_may_read() -> None:
    """A machine with rootfs = "/etc/shadow" had a copy of it for a disk, made by root."""
    check(machine("/boot/vmlinux", "/images/a.ext4"), Host())
    check(machine("/boot/vmlinux", "/srv/images/a.ext4"), Host(closed="/srv/images/a.ext4"))
    asked = machine("/srv/k", "/srv/a").firecracker
    assert asked is not None
    initrd = msgspec.structs.replace(asked, initrd="/etc/shadow")
    with pytest.raises(NotPermitted, match="firecracker: initrd: /etc/shadow"):
        check(msgspec.structs.replace(machine("/srv/k", "/srv/a"), firecracker=initrd), Host(closed="/etc/shadow"))
    for kernel, rootfs in (("/etc/shadow", "/srv/a"), ("/srv/k", "/etc/shadow"), ("/srv/k", "/srv/link")):
        with pytest.raises(NotPermitted, match=r"firecracker: (kernel|rootfs): .* everybody may read"):
            check(machine(kernel, rootfs), Host(links={"/srv/link": "/etc/shadow"}, closed="/etc/shadow"))


def test_how_this_host_is_looked_at(tmp_path: Path) -> None:
    looks = HostFiles()
    (tmp_path / "link").symlink_to("/etc")
    assert looks.resolve(str(tmp_path / "link" / ".." / "etc" / "hosts")) == "/etc/hosts"
    assert looks.is_roots(str(tmp_path))
    assert looks.is_roots("/tmp")  # sticky
    tmp_path.chmod(0o770)
    assert not looks.is_roots(str(tmp_path))
    file = tmp_path / "image"
    file.touch(mode=0o600)
    assert not looks.is_open(str(file))
    file.chmod(0o644)
    assert looks.is_open(str(file))
    assert looks.is_open(str(tmp_path / "nothing"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_of_another_user_is_not_roots(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 65534, 65534)
    assert not HostFiles().is_roots(str(tmp_path))


async def test_the_helper_asks_before_it_defines_and_before_it_starts(
    paths: Paths, connect: Connect, tmp_path: Path
) -> None:
    """A link that leads elsewhere since the agent was defined is found at its start. No engine is asked for that."""
    policy = tmp_path / "sandbox.toml"
    policy.write_text(f"images = ['*']\n[mounts]\n'{tmp_path}' = 'rw'\n")
    policy.chmod(0o644)
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    runtime = DockerRuntime(paths, Sandbox(docker_socket=str(tmp_path / "none")), log_max_bytes=4096)
    allowed = Allowed(policy)
    helper = HelperServer(paths, {RuntimeKind.DOCKER: runtime}, allowed=allowed)
    await helper.open()
    daemon = await connect()
    docker = DockerSpec(image="i", user="70001", mounts=[f"{tmp_path}/link:/d"])
    asked = spec(paths, A, [PYTHON], runtime=RuntimeKind.DOCKER, docker=docker, egress=[])
    await daemon.client.define(A, asked)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(NotPermitted, match=r"which is /etc,"):
        await daemon.client.start(A)
    allowed._policy = None
    with pytest.raises(NotPermitted, match="without a policy"):
        await daemon.client.start(A)
    with pytest.raises(NotPermitted, match="without a policy"):
        await daemon.client.define(A, asked)
    await helper.leave()
