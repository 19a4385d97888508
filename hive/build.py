"""The version of this Hive, and its build, which is another one for any other code.

A clone, a wheel and an installed environment of the same code say the same, without git and without a file that a
build would write.
"""

from __future__ import annotations

import hashlib
import re
import sys
from functools import lru_cache
from pathlib import Path

from hive import __version__

CODE = Path(__file__).parent
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
