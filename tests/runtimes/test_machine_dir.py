"""The files of a machine, and what its user may have put in their place."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hive.errors import NotFound, NotPermitted, WrongState
from hive.host.process import ProcessTable
from hive.runtimes.machine_dir import DISK, KERNEL, MachineDir, Note, all_in

ROOT = os.geteuid() == 0
OWNER = (71801, 71801) if ROOT else None
NOBODY = (1 << 40, 1 << 40)
"""No uid: the kernel has 32 bits for it."""
NOTE = Note(state="/var/lib/hive", agent="a1")


@pytest.fixture
def top() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hive-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def found(top: Path) -> MachineDir:
    return MachineDir(top / "a1", jailed=True)


@pytest.fixture
def image(top: Path) -> Callable[..., Path]:
    def make(content: bytes, *, mode: int = 0o644, name: str = "image") -> Path:
        path = top / name
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return make


Image = Callable[..., Path]


def test_it_is_new_once_and_the_machines_directories_are_its_users(found: MachineDir) -> None:
    assert found.make(NOTE, OWNER)
    assert not found.make(NOTE, OWNER)
    assert found.note() == NOTE
    assert found.top.stat().st_uid == os.geteuid()
    for directory in (found.root, found.run):
        made = directory.stat()
        assert stat.S_IMODE(made.st_mode) == 0o700
        assert made.st_uid == (OWNER[0] if OWNER else os.geteuid())


@pytest.mark.parametrize("other", [Note(state="/other", agent="a1"), Note(state=NOTE.state, agent="a2")])
def test_one_that_is_another_hives_or_agents_is_not_taken(found: MachineDir, other: Note) -> None:
    found.make(other, OWNER)
    with pytest.raises(WrongState, match="is taken by agent"):
        found.make(NOTE, OWNER)
    assert found.note() == other


def test_one_that_is_nobodys_is_not_taken_unless_it_is_empty(found: MachineDir) -> None:
    """Empty is what a helper leaves that was killed in the middle."""
    found.top.mkdir()
    assert found.make(NOTE, OWNER)
    shutil.rmtree(found.top)
    (found.top / "theirs").mkdir(parents=True)
    with pytest.raises(WrongState, match="nobody Hive knows"):
        found.make(NOTE, OWNER)
    found.remove()
    assert (found.top / "theirs").exists()


def test_a_link_in_the_place_of_a_directory_is_not_followed(found: MachineDir, top: Path) -> None:
    found.make(NOTE, OWNER)
    found.run.rmdir()
    (top / "victim").mkdir(mode=0o755)
    found.run.symlink_to(top / "victim")
    with pytest.raises(NotPermitted, match="link"):
        found.make(NOTE, OWNER)
    with pytest.raises(NotPermitted, match="link"):
        found.clear("firecracker")
    assert (top / "victim").stat().st_uid == os.geteuid()
    assert stat.S_IMODE((top / "victim").stat().st_mode) == 0o755


def test_what_could_not_be_made_whole_is_not_left(found: MachineDir) -> None:
    """A file that cannot be given to its user shows that only once it is there."""
    with pytest.raises(OverflowError):
        found.make(NOTE, NOBODY)
    assert not found.top.exists()


# --- kernel and disk ---------------------------------------------------------------------------------------------


def test_a_kernel_all_may_read_is_linked_and_takes_no_room(found: MachineDir, image: Image) -> None:
    kernel = image(b"kernel")
    found.make(NOTE, OWNER)
    found.provide(KERNEL, kernel)
    found.provide(KERNEL, kernel)
    assert (found.root / KERNEL).stat().st_ino == kernel.stat().st_ino
    assert kernel.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_kernel_that_is_private_or_open_to_all_is_copied(found: MachineDir, image: Image, mode: int) -> None:
    kernel = image(b"kernel", mode=mode)
    found.make(NOTE, OWNER)
    found.provide(KERNEL, kernel)
    copy = found.root / KERNEL
    assert copy.read_bytes() == b"kernel"
    assert copy.stat().st_ino != kernel.stat().st_ino
    assert (copy.stat().st_uid, stat.S_IMODE(copy.stat().st_mode)) == (os.geteuid(), 0o444)
    before = copy.stat().st_ino
    found.provide(KERNEL, kernel)
    assert copy.stat().st_ino == before


def test_a_changed_kernel_takes_the_place_of_the_old_one(found: MachineDir, image: Image) -> None:
    found.make(NOTE, OWNER)
    found.provide(KERNEL, image(b"old", mode=0o600))
    found.provide(KERNEL, image(b"new one", mode=0o600))
    assert (found.root / KERNEL).read_bytes() == b"new one"
    assert sorted(path.name for path in found.root.iterdir()) == [KERNEL, "run"]


def test_a_file_its_user_put_in_the_kernels_place_is_replaced_not_written_to(found: MachineDir, image: Image) -> None:
    kernel, victim = image(b"kernel", mode=0o600), image(b"secret", name="victim")
    found.make(NOTE, OWNER)
    (found.root / KERNEL).symlink_to(victim)
    found.provide(KERNEL, kernel)
    assert (found.root / KERNEL).read_bytes() == b"kernel"
    assert not (found.root / KERNEL).is_symlink()
    assert victim.read_bytes() == b"secret"


def test_a_disk_is_a_copy_of_its_own_and_what_is_written_stays(found: MachineDir, image: Image) -> None:
    rootfs, disk = image(b"image"), found.root / DISK
    found.make(NOTE, OWNER)
    found.provide_disk(rootfs, OWNER, NOTE)
    assert stat.S_IMODE(disk.stat().st_mode) == 0o600
    assert disk.stat().st_uid == (OWNER[0] if OWNER else os.geteuid())
    disk.write_bytes(b"diary")
    rootfs.write_bytes(b"a newer image")
    found.make(NOTE, OWNER)
    found.provide_disk(rootfs, OWNER, NOTE)
    assert disk.read_bytes() == b"diary"
    found.provide_disk(image(b"another", name="other"), OWNER, NOTE)
    assert disk.read_bytes() == b"another"


def test_holes_are_not_filled(found: MachineDir, image: Image) -> None:
    rootfs = image(b"")
    with rootfs.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(16 << 20)
        file.write(b"in the middle")
        file.seek((64 << 20) - 4)
        file.write(b"last")
    found.make(NOTE, OWNER)
    found.provide_disk(rootfs, OWNER, NOTE)
    disk = found.root / DISK
    assert disk.stat().st_size == 64 << 20
    assert disk.stat().st_blocks * 512 < 4 << 20
    assert disk.read_bytes() == rootfs.read_bytes()


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe"])
def test_an_image_that_is_no_file_is_not_found(found: MachineDir, top: Path, kind: str) -> None:
    path = top / "image"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    found.make(NOTE, OWNER)
    with pytest.raises(NotFound, match=str(path)):
        found.provide(KERNEL, path)
    with pytest.raises(NotFound, match=str(path)):
        found.provide_disk(path, OWNER, NOTE)
    assert [entry.name for entry in found.root.iterdir()] == ["run"]


def test_half_a_copy_is_not_left(found: MachineDir, image: Image) -> None:
    found.make(NOTE, OWNER)
    with pytest.raises(OverflowError):
        found.provide_disk(image(b"image"), NOBODY, NOTE)
    assert [entry.name for entry in found.root.iterdir()] == ["run"]
    assert found.note() == NOTE


# --- before a start, and after the end ---------------------------------------------------------------------------


def test_what_a_jailer_would_stumble_over_is_cleared_and_nothing_else(found: MachineDir, image: Image) -> None:
    found.make(NOTE, OWNER)
    found.provide_disk(image(b"image"), OWNER, NOTE)
    (found.root / "dev" / "net").mkdir(parents=True)
    (found.root / "old_root").mkdir()
    for path in ("firecracker", "firecracker.pid", "dev/kvm", "dev/net/tun", "run/api.sock", "run/v.sock"):
        (found.root / path).touch()
    found.listener.touch()
    for _ in range(2):
        found.clear("firecracker")
    left = sorted(str(path.relative_to(found.root)) for path in found.root.rglob("*"))
    assert left == [DISK, "run", "run/v.sock_11434"]


def test_it_is_removed_whole_whatever_is_in_it(found: MachineDir, top: Path) -> None:
    found.make(NOTE, OWNER)
    (top / "victim").touch()
    (found.root / "link").symlink_to(top / "victim")
    (found.root / "a" / "b").mkdir(parents=True)
    (found.root / "a" / "b" / "file").touch()
    found.remove()
    assert [path.name for path in top.iterdir()] == ["victim"]
    found.remove()


def test_only_the_machines_of_this_hive_are_its(top: Path) -> None:
    for name, state in (("a1", "/one"), ("a2", "/two"), ("a3", "/one")):
        MachineDir(top / name, jailed=True).make(Note(state=state, agent=name), OWNER)
    (top / "a4").mkdir()
    (top / "file").touch()
    assert [agent for agent, _ in all_in(top, jailed=True, state=Path("/one"))] == ["a1", "a3"]
    assert all_in(top / "nowhere", jailed=True, state=Path("/one")) == []


# --- its processes -----------------------------------------------------------------------------------------------

SLEEP = "import sys, time; print(flush=True); time.sleep(100)"


def test_a_process_is_known_by_its_working_directory_without_a_jail(found: MachineDir) -> None:
    direct = MachineDir(found.top, jailed=False)
    direct.make(NOTE, None)
    with subprocess.Popen([sys.executable, "-S", "-c", SLEEP], cwd=direct.root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert direct.residents(ProcessTable()) == [process.pid]
        assert found.residents(ProcessTable()) == []
        process.kill()
    assert direct.residents(ProcessTable()) == []


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="a chroot needs root")
def test_a_process_is_known_by_its_root_in_a_jail(found: MachineDir) -> None:
    found.make(NOTE, OWNER)
    program = f"import os, sys; os.chroot({str(found.root)!r}); os.chdir('/'); {SLEEP}"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert found.residents(ProcessTable()) == [process.pid]
        process.kill()
    assert found.residents(ProcessTable()) == []
