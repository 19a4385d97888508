"""The files of one virtual machine on the host: its jail or directory, its kernel and disk, its sockets.

`top` is Hive's. `root` is the machine's user's, who may write, rename and plant links there at any moment if he breaks
out of the VMM: nothing below it is believed, and each name is opened from the directory it is in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hive.errors import HiveError, NotFound, NotPermitted, WrongState
from hive.host.process import ProcessTable
from hive.runtimes.home import remove_tree

ROOT, RUN, API, VSOCK = "root", "run", "api.sock", "v.sock"
KERNEL, INITRD, ROOTFS, DISK = "kernel", "initrd", "rootfs", "disk"
NOTE = "hive.json"
"""The note in `top` of the machine's owner. Another Hive may share the directory all jails are in."""
PROXY_PORT = 11434
"""The port at which a guest reaches Hive: of CID 2 for it, `v.sock_11434` on the host."""
FICLONE = 0x40049409
"""ioctl(2) that shares the blocks of a file, where the file system can (linux/fs.h)."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Owner = tuple[int, int]


class Note(msgspec.Struct, frozen=True):
    """The machine's Hive (by its state directory) and agent, and the image its own disk was copied from."""

    state: str
    agent: str
    rootfs: str = ""


class MachineDir(NamedTuple):
    """`top` on the host. `jailed`: the VMM sees `top/root` as `/`; else that is its working directory."""

    top: Path
    jailed: bool

    @property
    def root(self) -> Path:
        return self.top / ROOT

    @property
    def run(self) -> Path:
        return self.root / RUN

    @property
    def api(self) -> Path:
        return self.run / API

    @property
    def vsock(self) -> Path:
        """The socket for calls of the guest (`CONNECT <port>`)."""
        return self.run / VSOCK

    @property
    def listener(self) -> Path:
        """The socket to which the VMM connects when its guest calls Hive."""
        return self.run / f"{VSOCK}_{PROXY_PORT}"

    def inside(self, path: Path) -> str:
        """The VMM's name of a path below `root`. Without a jail that is relative: a socket's path may be too long.

        >>> top = Path("/srv/jailer/firecracker/a1")
        >>> MachineDir(top, True).inside(top / "root/run/v.sock"), MachineDir(top, False).inside(top / "root/kernel")
        ('/run/v.sock', 'kernel')
        """
        return f"{'/' if self.jailed else ''}{path.relative_to(self.root)}"

    # --- made and removed --------------------------------------------------------------------------------------

    def note(self) -> Note | None:
        """The note of its owner; None where it has none, or none that can be read."""
        try:
            return msgspec.json.decode((self.top / NOTE).read_bytes(), type=Note)
        except (OSError, msgspec.MsgspecError):
            return None

    def make(self, note: Note, owner: Owner | None) -> bool:
        """`top`, and in it the machine's own directories, 0700 and `owner`'s. Whether `top` is new.

        Raises WrongState where it is another Hive's or agent's, NotPermitted where a directory in it is a link or
        somebody else's; OSError.
        """
        with contextlib.suppress(FileExistsError):
            self.top.mkdir(mode=0o711)
        new = not set(os.listdir(self.top)) - {f".{NOTE}"}  # one a helper was killed in the middle of is, too
        if new:
            self._write(note)
        found = self.note()
        if found is None or (found.state, found.agent) != (note.state, note.agent):
            whose = "nobody Hive knows" if found is None else f"agent {found.agent} of the Hive in {found.state}"
            raise WrongState(f"{self.top} is taken by {whose}")
        try:
            with (
                _directory(self.top) as top,
                _own_directory(top, ROOT, owner) as root,
                _own_directory(root, RUN, owner),
            ):
                return new
        except BaseException:
            if new:
                self.remove()
            raise

    def _write(self, note: Note) -> None:
        beside = self.top / f".{NOTE}"
        beside.write_bytes(msgspec.json.encode(note))
        beside.rename(self.top / NOTE)

    def provide(self, name: str, source: Path) -> None:
        """Has the file `source` as `name` in `root`, for reading: linked where that lets no user write, else copied.

        Raises NotFound where there is no such file, OSError.
        """
        with _directory(self.root) as root, _image(source) as image:
            wanted, found = os.fstat(image), _look(root, name)
            if found is not None and (_is_same(found, wanted) or _is_copy(found, wanted)):
                return
            beside = f".{name}.{os.urandom(8).hex()}"
            if not _link(image, wanted, root, beside):
                _copy(image, root, beside, mode=0o444, owner=None)
                os.utime(beside, ns=(wanted.st_atime_ns, wanted.st_mtime_ns), dir_fd=root, follow_symlinks=False)
            os.rename(beside, name, src_dir_fd=root, dst_dir_fd=root)

    def provide_disk(self, source: Path, owner: Owner | None, note: Note) -> None:
        """Has a copy of the image `source` as the machine's own `disk` in `root`, writable by `owner` only.

        Made once, and again only where the image is another one than last time: what the guest wrote stays. Raises as
        `provide`.
        """
        before = self.note()
        with _directory(self.root) as root, _image(source) as image:
            if before is not None and before.rootfs == str(source) and _look(root, DISK) is not None:
                return
            beside = f".{DISK}.{os.urandom(8).hex()}"
            _copy(image, root, beside, mode=0o600, owner=owner)
            os.rename(beside, DISK, src_dir_fd=root, dst_dir_fd=root)
        self._write(msgspec.structs.replace(note, rootfs=str(source)))

    def clear(self, program: str) -> None:
        """Deletes what an earlier VMM left and a new one would stumble over.

        A jailer makes its copy of the VMM without cutting an older one back, and its pid file and device nodes only
        where there are none (env.rs, `copy_exec_to_chroot`, `save_exec_file_pid`, `mknod_and_own_dev`); a VMM binds its
        sockets only where there are none. Raises OSError, NotPermitted.
        """
        with _directory(self.root) as root:
            for name in (program, f"{program}.pid"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=root)
            with _directory(RUN, dir_fd=root) as run:
                for name in (API, VSOCK):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=run)
            for name in ("dev", "old_root"):
                remove_tree(self.root / name)

    def remove(self) -> None:
        """Deletes all of it, where it has a note; nothing outside is touched. Its VMM must be gone."""
        if self.note() is not None:
            remove_tree(self.top)

    # --- its processes -------------------------------------------------------------------------------------------

    def residents(self, snapshot: ProcessTable) -> list[int]:
        """Pids of live processes with this as `/` (without a jail: as working directory); by the inode, which no mount
        namespace changes. Oldest first."""
        try:
            here = os.stat(self.root, follow_symlinks=False)
        except OSError:
            return []
        link = "root" if self.jailed else "cwd"
        found = [stat for stat in snapshot.processes.values() if stat.alive and _leads_to(stat.pid, link, here)]
        return [stat.pid for stat in sorted(found, key=lambda stat: stat.start_ticks)]


def all_in(directory: Path, *, jailed: bool, state: Path) -> list[tuple[str, MachineDir]]:
    """(agent, its directory) of every machine the Hive of this state directory has in `directory`."""
    try:
        tops = sorted(directory.iterdir())
    except OSError:
        return []
    noted = [(found, MachineDir(top, jailed)) for top in tops if (found := MachineDir(top, jailed).note()) is not None]
    return [(note.agent, place) for note, place in noted if note.state == str(state)]


def check_image(what: str, path: Path) -> None:
    """Raises NotFound where there is no regular file at `path`."""
    if not path.is_file():
        raise NotFound(f"no {what} at {path}")


# --- steps -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _directory(path: Path | str, *, dir_fd: int | None = None) -> Iterator[int]:
    try:
        descriptor = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    except NotADirectoryError:
        raise NotPermitted(f"{path} in a machine's directory is a link or no directory") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPermitted(f"{path} in a machine's directory is a link") from None
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _own_directory(above: int, name: str, owner: Owner | None) -> Iterator[int]:
    """The directory `name` in `above`, made where missing, given to `owner`."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=above)
    with _directory(name, dir_fd=above) as descriptor:
        uid = os.fstat(descriptor).st_uid
        if uid not in (os.geteuid(), None if owner is None else owner[0]):
            raise NotPermitted(f"{name} in a machine's directory belongs to uid {uid}")
        if owner is not None:
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, 0o700)
        yield descriptor


@contextlib.contextmanager
def _image(source: Path) -> Iterator[int]:
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotFound(f"cannot read {source}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotFound(f"{source} is no file")
        yield descriptor
    finally:
        os.close(descriptor)


def _look(directory: int, name: str) -> os.stat_result | None:
    """The regular file `name`, None where there is none."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _is_same(found: os.stat_result, wanted: os.stat_result) -> bool:
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def _is_copy(found: os.stat_result, wanted: os.stat_result) -> bool:
    """A copy made here: Hive's, nobody else may write it, of the same size and time."""
    ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return ours and (found.st_size, found.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns)


def _link(source: int, wanted: os.stat_result, directory: int, name: str) -> bool:
    """Whether a hard link could be made: on one file system, of a file all may read and only its owner write."""
    if not wanted.st_mode & stat.S_IROTH or wanted.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    try:
        os.link(f"/proc/self/fd/{source}", name, dst_dir_fd=directory, follow_symlinks=True)
    except OSError:
        return False
    return True


def _copy(source: int, directory: int, name: str, *, mode: int, owner: Owner | None) -> None:
    """Shares the blocks where the file system can, else copies what is no hole. Half a copy is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        try:
            fcntl.ioctl(target, FICLONE, source)
        except OSError:
            _copy_data(source, target)
        if owner is not None:
            os.fchown(target, *owner)
        os.fchmod(target, mode)
    except BaseException:
        os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(target)


def _copy_data(source: int, target: int) -> None:
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        until = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(target, at, os.SEEK_SET)
        while at < until:
            if not (sent := os.sendfile(target, source, at, until - at)):
                raise HiveError("an image was cut while it was copied")
            at += sent


def _leads_to(pid: int, link: str, here: os.stat_result) -> bool:
    try:
        return _is_same(os.stat(f"/proc/{pid}/{link}"), here)
    except OSError:
        return False
