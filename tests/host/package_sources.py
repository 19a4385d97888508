"""This machine's package sources, given to a Debian root: apt's list is there already, pip's settings are not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
AUTHORITIES_THERE = "/etc/this-machines-authorities.crt"


def give(root: Path) -> list[str]:
    """Writes pip's settings, the resolver's and the authorities into `root`; returns the folders to mount there."""
    folders = _pip_folders()
    for folder in folders:
        (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    text = "\n".join(path.read_text() for path in _pip_files())
    options = [line for line in text.splitlines() if ("=" in line or line[:1].isspace()) and "cert" not in line]
    (root / "etc/pip.conf").write_text("[global]\n" + "\n".join(dict.fromkeys(options)) + "\n")
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    # Under a name of its own: apt installs ca-certificates, which writes the usual file anew.
    shutil.copy(AUTHORITIES, root / AUTHORITIES_THERE.lstrip("/"))
    return folders


def environment() -> dict[str, str]:
    """Variables that `pip` must have in its environment there."""
    given = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    return {**given, "PIP_CERT": AUTHORITIES_THERE}


def listed() -> list[str]:
    """Files that a clean clone of the working tree would hold: no build products, nothing that git ignores."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted(name for name in found if name and (REPOSITORY / name).is_file())


def clone(target: Path) -> None:
    """Copies them."""
    for name in listed():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target / name)


def _pip_files() -> list[Path]:
    named = (Path("/etc/pip.conf"), Path("~/.config/pip/pip.conf").expanduser())
    return [path for path in named if path.is_file()]


def _pip_folders() -> list[str]:
    """Local folders pip's settings name: they are part of this machine's package sources."""
    texts = [path.read_text() for path in _pip_files()]
    texts += [value for name, value in os.environ.items() if name.startswith("PIP_")]
    named = re.findall(r"(?:file://|(?<=[=\s])|^)(/[\w./-]+)", "\n".join(texts), re.MULTILINE)
    tops = {"/".join(path.split("/")[:3]) for path in named if Path(path).is_dir()}
    return sorted(top for top in tops if top.startswith("/opt/"))
