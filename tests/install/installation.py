"""A small version of Hive and a root to install it into, for tests that need neither systemd nor root."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hive.files.layout import Layout
from hive.install.steps import Box

TREE = ("etc", "opt", "usr/local/bin", "usr/local/share/man", "var/lib")
"""Directories that every Debian has."""
UNITS = {
    "hive.target": "[Unit]\nDescription=Hive\n[Install]\nWantedBy=multi-user.target\nAlso=hive-thaw.service\n",
    "hive-daemon.service": "[Service]\nExecStart=/opt/hive/current/bin/hive daemon\n",
    "hive-thaw.service": "[Service]\nType=oneshot\n[Install]\nRequiredBy=hive.target\n",
    "hive-daemon.service.d/limits.conf": "[Service]\nLimitNOFILE=1024\n",
    "sysusers.d/hive.conf": "u hive - Hive\ng hive-admin -\n",
    "tmpfiles.d/hive.conf": "d /var/lib/hive/daemon 0700 hive hive -\n",
}


def make_root(root: Path) -> Path:
    for name in TREE:
        (root / name).mkdir(parents=True)
    return root


def make_version(root: Path, name: str, *, units: dict[str, str] | None = None) -> Path:
    """An environment without a Python: what an installer finds in one. Returns its share."""
    venv = root / "opt/hive/versions" / name
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/hive").write_text("#!/bin/sh\n")
    share = venv / "share/hive"
    for unit, text in (UNITS if units is None else units).items():
        (share / "systemd" / unit).parent.mkdir(parents=True, exist_ok=True)
        (share / "systemd" / unit).write_text(text)
    (share / "conf").mkdir()
    (share / "conf/redis.conf").write_text("port 0\n")
    (share / "conf/sandbox.toml").write_text("uids = [70000, 79999]\n")
    (share / "man").mkdir()
    return share


def box_of(root: Path, version: str, said: list[str] | None = None) -> Box:
    share = root / "opt/hive/versions" / version / "share/hive"
    return Box(Layout(root), version=version, share=share, say=([] if said is None else said).append)


def tree(root: Path) -> dict[str, tuple[str, int, bytes | str]]:
    """Everything below `root` but Hive's own code: kind, mode, content or target."""
    found: dict[str, tuple[str, int, bytes | str]] = {}
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            content: bytes | str = b""
            if stat.S_ISLNK(mode):
                content = os.readlink(path)
            elif stat.S_ISREG(mode):
                content = path.read_bytes()
            found[path.relative_to(root).as_posix()] = (stat.filemode(mode)[0], stat.S_IMODE(mode), content)
    return found
