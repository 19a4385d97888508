"""A fake jailer: what Firecracker's does to the host, step by step, then the fake Firecracker inside.

Each behaviour with where it is written (src/jailer/src in firecracker 1.17.0-dev, 81b38b9):
- `<chroot base>/<name of the executable's real file>/<id>/root`; both paths are resolved first (env.rs `Env::new`)
- the environment is cleared, everything but the three standard descriptors closed (main.rs `sanitize_process`)
- the executable is copied in, not linked, over an older one without cutting it back; a copy with a second link is
  refused (env.rs `copy_exec_to_chroot`)
- 2048 open files unless `--resource-limit no-file=` says otherwise (resource_limits.rs)
- with `--cgroup-version 2` and `--cgroup k=v`: a group `<parent or name>/<id>`; `k=v` has one `=` (env.rs, cgroup.rs)
- a mount namespace of its own, the jail becomes `/` by pivot_root, which takes a directory `old_root` (chroot.rs)
- `/`, `/dev`, `/dev/net`, `/run` are made and given to the uid, 0700, what is in them stays (env.rs
  `setup_jailed_folder`)
- device nodes and `/<name>.pid` must not exist yet (env.rs `mknod_and_own_dev`, `save_exec_file_pid`)
- it does not fork: the VMM has its pid and its standard output (env.rs `run`; with `--daemonize` and `--new-pid-ns` it
  would, which this one refuses)

Other than in the real one: the last step is no exec, for there is no Python in the jail; and where this user may not
unshare or make nodes (a container), a chroot has to do, and the nodes are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import shutil
import stat
import sys
from typing import NoReturn

import fake_firecracker

CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
MNT_DETACH = 2
SYS_PIVOT_ROOT = 155
DEVICES = {"/dev/net/tun": (10, 200), "/dev/kvm": (10, 232), "/dev/urandom": (1, 9)}
FOLDERS = ("/", "/dev", "/dev/net", "/run")
NO_FILE = 2048
_libc = ctypes.CDLL(None, use_errno=True)


def fail(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    sys.exit(1)


def because(error: OSError) -> str:
    return f"{error.strerror} (os error {error.errno})"


def run(arguments: list[str], *, version: str, faults: str) -> int:
    """`jailer` with these arguments, then `firecracker` in its jail; the exit code."""
    if "--version" in arguments:
        print(f"Jailer v{version}\n")
        return 0
    with open("/proc/self/environ", "rb") as environ:
        if environ.read():
            os.closerange(3, 4096)
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {})
    split = arguments.index("--") if "--" in arguments else len(arguments)
    own, its = arguments[:split], arguments[split + 1 :]
    if unknown := {"--daemonize", "--new-pid-ns", "--netns"} & set(own):
        fail(f"the fake jailer does not do that: {unknown}")
    given: dict[str, list[str]] = {}
    for name, value in zip(own[::2], own[1::2], strict=True):
        given.setdefault(name, []).append(value)
    for name in ("--id", "--exec-file", "--uid", "--gid"):
        if name not in given:
            fail(f"Failed to parse arguments: Argument '{name.removeprefix('--')}' required, but not found.")
    id_, uid, gid = given["--id"][0], int(given["--uid"][0]), int(given["--gid"][0])
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", id_):
        fail(f"Invalid instance ID: {id_}")
    program, base = real(given["--exec-file"][0]), real(given.get("--chroot-base-dir", ["/srv/jailer"])[0])
    name = os.path.basename(program)
    jail = f"{base}/{name}/{id_}/root"
    os.makedirs(jail, exist_ok=True)
    copy_program(program, f"{jail}/{name}", uid, gid)
    limit_files(given.get("--resource-limit", []))
    make_cgroup(given, name, id_)
    faults_fd = os.open(faults, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    enter(jail)
    make_folders(uid, gid)
    make_devices(uid, gid)
    write_pid(f"/{name}.pid")
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    return int(fake_firecracker.run(["--id", id_, *its], version=version, faults=faults_fd))


def real(path: str) -> str:
    try:
        return os.path.realpath(path, strict=True)
    except OSError as error:
        fail(f"Failed to canonicalize path {path}: {because(error)}")


def copy_program(program: str, copy: str, uid: int, gid: int) -> None:
    mode = stat.S_IMODE(os.stat(program).st_mode)
    target = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, mode)
    if os.fstat(target).st_nlink > 1:
        fail(f"Detected hard link at: {copy}")
    os.fchown(target, uid, gid)
    with open(program, "rb") as source, os.fdopen(target, "wb") as file:
        shutil.copyfileobj(source, file)


def limit_files(limits: list[str]) -> None:
    files = next((int(limit.removeprefix("no-file=")) for limit in limits if limit.startswith("no-file=")), NO_FILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def make_cgroup(given: dict[str, list[str]], name: str, id_: str) -> None:
    if given.get("--cgroup-version", ["1"])[0] != "2" or "--cgroup" not in given:
        return
    with open("/proc/mounts", encoding="ascii") as mounts:
        mount = next((line.split()[1] for line in mounts if line.split()[2] == "cgroup2"), None)
    if mount is None:
        fail("Hierarchy not found: No hierarchy found for this cgroup version.")
    group = f"{mount}/{given.get('--parent-cgroup', [name])[0]}/{id_}"
    os.makedirs(group, exist_ok=True)
    for setting in given["--cgroup"]:
        file, *values = setting.split("=")
        if len(values) != 1 or not values[0]:
            fail(f"Invalid format for cgroups: {setting}")
        if not os.path.exists(f"{group}/{file}"):
            fail(f"Controller {file.split('.')[0]} is unavailable")
        with open(f"{group}/{file}", "w", encoding="ascii") as opened:
            opened.write(values[0])
    with open(f"{group}/cgroup.procs", "w", encoding="ascii") as procs:
        procs.write("0")


def enter(jail: str) -> None:
    if _libc.unshare(CLONE_NEWNS) != 0:
        os.chroot(jail)
        os.chdir("/")
        return
    here = os.fsencode(jail)
    check(_libc.mount(None, b"/", None, MS_SLAVE | MS_REC, None), "change the propagation type to slave")
    check(_libc.mount(here, here, None, MS_BIND | MS_REC, None), "bind mount the jail root directory")
    os.chdir(jail)
    try:
        os.mkdir("old_root", 0o600)
    except OSError as error:
        fail(f"Failed to create the jail root directory before pivoting root: {because(error)}")
    check(_libc.syscall(SYS_PIVOT_ROOT, b".", b"old_root"), "pivot root")
    os.chdir("/")
    check(_libc.umount2(b"old_root", MNT_DETACH), "unmount the old jail root")
    os.rmdir("old_root")


def check(returned: int, what: str) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        fail(f"Failed to {what}: {because(OSError(number, os.strerror(number)))}")


def make_folders(uid: int, gid: int) -> None:
    for folder in FOLDERS:
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o700)
        os.chown(folder, uid, gid)


def make_devices(uid: int, gid: int) -> None:
    for path, (major, minor) in DEVICES.items():
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(major, minor))
            os.chown(path, uid, gid)
        except OSError as error:
            if error.errno != errno.EPERM:
                fail(f"Failed to create {path} via mknod inside the jail: {because(error)}")


def write_pid(path: str) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        fail(f"Failed to open file {path}: {because(error)}")
    with contextlib.closing(os.fdopen(file, "w")) as opened:
        opened.write(str(os.getpid()))
