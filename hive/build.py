"""The version of this Hive, and its build, which is another one for any other code.

A clone, a wheel and an installed environment of the same code say the same, without git and without a file that a
build would write.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from hive import __version__

CODE = Path(__file__).parent
COMPILED = CODE / "_compiled.json"
"""The sources that were compiled, and their Python; there is no such file where none was (setup.py writes it)."""
COMPILE_AGAIN = "HIVE_COMPILE=1 ./install.sh"
SHARED = (
    *("systemd/*.service", "systemd/*.socket", "systemd/*.target", "systemd/sysusers.d/*", "systemd/tmpfiles.d/*"),
    "systemd/hive-model@comfyui-42233297.service.d/*.conf",
    *("conf/redis.conf", "conf/sandbox.toml", "conf/agents/*", "conf/cluster/*", "conf/guest/*", "man/*.scd"),
    *("conf/observability/*.yml", "conf/observability/*.json"),
)
"""Files that are no code and belong to Hive, as the package brings it (pyproject.toml)."""
DIGITS = 8
COMMIT = "commit"
"""File beside those that belong to an installed Hive: git's description of the clone that install.sh made it of."""
DESCRIBE = ("describe", "--tags", "--match=v[0-9]*", "--always", "--long", "--abbrev=7")
CHANGED = ("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
"""The questions to git about a clone; install.sh asks the same. `describe --dirty` would write to the clone's index."""


@lru_cache
def version() -> str:
    """The version of every part of Hive, as `0.1.0+3f2a91c4`, with a local part (PEP 440).

    Reads all of Hive's files, some 40 ms, once in a process. Where they cannot be read it is the number alone.
    """
    try:
        return f"{__version__}+{digest_of(CODE, home())[:DIGITS]}"
    except OSError:
        return __version__


def number_of(text: str) -> str:
    """
    >>> number_of("0.1.0+3f2a91c4"), number_of("0.1.0")
    ('0.1.0', '0.1.0')
    """
    return text.partition("+")[0]


def commit_of(described: str) -> str:
    """The commit, by git's answer to DESCRIBE, with `-dirty` if CHANGED has one too; empty for a release, and for what
    is no such answer.

    >>> commit_of("1a2b3c4"), commit_of("1a2b3c4-dirty"), commit_of("v0.0.1-14-g1a2b3c4")
    ('1a2b3c4', '1a2b3c4, modified', '1a2b3c4')
    >>> commit_of(f"v{__version__}-0-g1a2b3c4"), commit_of("fatal: not a git repository")
    ('', '')
    """
    found = re.fullmatch(r"(?:v(\S+)-(\d+)-g)?([0-9a-f]{7,40})(-dirty)?", described.strip())
    if found is None or (found[1] == __version__ and found[2] == "0" and not found[4]):
        return ""
    return f"{found[3]}, modified" if found[4] else found[3]


def home() -> Path:
    """Directory of systemd/, conf/ and man/ of this Hive: the checkout it runs from, else its environment's share."""
    checkout = CODE.parent
    return checkout if (checkout / "pyproject.toml").exists() else in_environment(Path(sys.prefix))


def in_environment(venv: Path) -> Path:
    return venv / "share" / "hive"


def compiled() -> str:
    """`yes` where parts of this Hive are compiled, as the version and metrics say it, else `no`."""
    return "yes" if COMPILED.exists() else "no"


def compiled_from(code: Path, sources: Iterable[str]) -> dict[str, Any]:
    """The contents of COMPILED for these files, named from the directory that `code` is in. Raises OSError."""
    digests = {name: hashlib.sha256((code.parent / name).read_bytes()).hexdigest() for name in sorted(sources)}
    return {"abi": EXTENSION_SUFFIXES[0].split(".")[1], "sources": digests}


def why_not_as_compiled(written: Path = COMPILED) -> str:
    """The difference to what was compiled; empty where all is as it was, or nothing was compiled.

    Python takes a compiled file whatever its source says by now, and passes one of another Python over in silence.
    """
    try:
        was = json.loads(written.read_bytes())
        now = compiled_from(written.parent, was["sources"])
    except FileNotFoundError as error:
        return f"{error.filename} is gone" if written.exists() else ""
    if was["abi"] != now["abi"]:
        return f"it was compiled for {was['abi']}, and this Python is {now['abi']}"
    changed = [name for name, digest in now["sources"].items() if digest != was["sources"][name]]
    return f"{changed[0]} is another than the one that was compiled" if changed else ""


def digest_of(code: Path, shared: Path) -> str:
    """The digest of the names and contents of all files of one Hive, in hex. Raises OSError."""
    found = {f"hive/{path.relative_to(code).as_posix()}": path for path in code.rglob("*.py")}
    found |= {path.relative_to(shared).as_posix(): path for glob in SHARED for path in shared.glob(glob)}
    digest = hashlib.sha256()
    for name in sorted(found):
        if found[name].is_file():
            content = found[name].read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
