"""Installs, upgrades or removes again and again, killed one change of the file system later each time.

A program: `killed_install.py WHAT DIRECTORY` prints one JSON object, with how many places there were and what was not
as it should be after the same command was given again. A fork is killed, not this process: it has loaded everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hive.files import secrets
from hive.files.layout import Layout
from hive.install import install as installer
from tests.install.installation import box_of, make_root, make_version, tree

CHANGES = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.chown"),
    *("shutil.rmtree", "open"),
}
FIRST, SECOND = "0.1.0-1", "0.2.0-1"
ROTATED = "redis-daemon"
Tree = dict[str, tuple[str, int, bytes | str]]


class Killer:
    """Ends this process before its `number`-th change below `root`, or in the middle of what it writes there."""

    def __init__(self, root: Path, number: int) -> None:
        self._root = str(root)
        self._left = number
        self._write = os.write
        os.write = self._half  # type: ignore[assignment]
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not any(str(one).startswith(self._root) for one in arguments[:2]):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self._count()

    def _half(self, fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(self._root):
            self._left -= 1
            if self._left == 0:
                self._write(fd, bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return self._write(fd, data)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def in_fork(work: Callable[[], object]) -> int:
    """Runs `work` in a copy of this process; its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def do_install(root: Path, version: str) -> None:
    box = box_of(root, version)
    # The fake version has no Python that could check itself; tests/host does that with a real one.
    steps = [step for step in installer.steps_of(box) if step.name != "self-check"]
    installer.install(box, steps=steps)


def do_uninstall(root: Path, version: str, *, purge: bool) -> None:
    # An environment that is half gone has no share: the installer's own has the same files.
    box = box_of(root, version)
    box.share = root.parent / "share"
    installer.uninstall(box, purge=purge)


def prepare_install(root: Path) -> None:
    make_version(root, FIRST)


def prepare_upgrade(root: Path) -> None:
    prepare_installed(root)
    units = {"hive.target": "[Unit]\nDescription=Hive 2\n", "tmpfiles.d/hive.conf": "", "sysusers.d/hive.conf": ""}
    make_version(root, SECOND, units=units)


def prepare_installed(root: Path) -> None:
    make_version(root, FIRST)
    do_install(root, FIRST)


def prepare_secrets(root: Path) -> None:
    make_version(root, FIRST)
    secrets.generate(Layout(root))


def the_same(reference: Tree, model: Tree, killed: Tree, found: Tree) -> str:
    """Nothing says afterwards that there was a first time."""
    names = {name for name in (*found, *reference) if found.get(name) != reference.get(name)}
    return f"other than it should be: {', '.join(sorted(names))}" if names else ""


def whole_secrets(reference: Tree, model: Tree, killed: Tree, found: Tree) -> str:
    """Each is whole whenever it is there, what was there before is kept by `generate`, nothing else is left."""
    if set(found) != set(reference):
        return f"there: {sorted(set(found) ^ set(reference))}"
    for name in secrets.SECRETS:
        path = f"etc/hive/secrets/{name}"
        for tree_ in (killed, found):
            if path in tree_ and (tree_[path][1], len(tree_[path][2])) != (0o600, len(reference[path][2])):
                return f"{name} is not whole"
        if path in model and name != ROTATED and found[path] != model[path]:
            return f"{name} was overwritten"
        if path in killed and name != ROTATED and found[path] != killed[path]:
            return f"{name} was made twice"
        if (user := secrets.SECRETS[name].redis_user) and not in_acl(found, user, found[path][2]):
            return f"the ACL does not have {name}"
    return ""


def in_acl(found: Tree, user: str, password: bytes | str) -> bool:
    assert isinstance(password, bytes)
    acl = found["etc/hive/redis/users.acl"][2]
    assert isinstance(acl, bytes)
    digest = hashlib.sha256(password).hexdigest()
    return any(line.startswith(f"user {user} on #{digest} ") for line in acl.decode().splitlines())


Judge = Callable[[Tree, Tree, Tree, Tree], str]
WORK: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], Judge]] = {
    "install": (prepare_install, lambda root: do_install(root, FIRST), the_same),
    "upgrade": (prepare_upgrade, lambda root: do_install(root, SECOND), the_same),
    "uninstall": (prepare_installed, lambda root: do_uninstall(root, FIRST, purge=False), the_same),
    "purge": (prepare_installed, lambda root: do_uninstall(root, FIRST, purge=True), the_same),
    "generate": (prepare_install, lambda root: secrets.generate(Layout(root)), whole_secrets),
    "rotate": (prepare_secrets, lambda root: secrets.rotate(Layout(root), ROTATED), whole_secrets),
}


def main(what: str, directory: Path) -> dict[str, object]:
    prepare, work, judge = WORK[what]
    make_version(directory / "own", FIRST).rename(directory / "share")
    model = make_root(directory / "model")
    prepare(model)
    shutil.copytree(model, directory / "good", symlinks=True)
    work(directory / "good")
    reference, before = tree(directory / "good"), tree(model)
    wrong: list[str] = []
    number = 0
    while True:
        number += 1
        root = directory / "root"
        shutil.copytree(model, root, symlinks=True)

        def once(root: Path = root, number: int = number) -> None:
            Killer(root, number)
            work(root)

        status = in_fork(once)
        killed = tree(root)
        if status and not os.WIFSIGNALED(status):
            wrong.append(f"{number}: it failed by itself")
        if in_fork(lambda root=root: work(root)):  # type: ignore[misc]
            wrong.append(f"{number}: the second time fails")
        if complaint := judge(reference, before, killed, tree(root)):
            wrong.append(f"{number}: {complaint}")
        shutil.rmtree(root)
        if status == 0:
            return {"places": number - 1, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
