"""The build of the Python that runs this.

install.sh runs this file with each Python that it finds: the standard library only, and nothing of Hive.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

OLDEST = (3, 11)


def has_profile(variables: Mapping[str, Any]) -> bool:
    """Whether it was built with the profile of an earlier run of itself (PGO). `variables`: of sysconfig.

    Upstream's Makefile holds the flag for it whether it was used or not. Debian and Ubuntu use it always, and take it
    out of the variables afterwards, so that no extension is built with it: one that is there and empty is theirs.

    >>> made = {"CONFIG_ARGS": "'--enable-shared'", "PGO_PROF_USE_FLAG": "-fprofile-use"}
    >>> has_profile(made), has_profile(made | {"CONFIG_ARGS": "'--enable-optimizations'"})
    (False, True)
    >>> has_profile(made | {"PY_CFLAGS_NODIST": "-fprofile-use"}), has_profile(made | {"PGO_PROF_USE_FLAG": ""})
    (True, True)
    """
    return (
        _has(variables, "--enable-optimizations", "-fprofile-use", "-fprofile-instr-use")
        or variables.get("PGO_PROF_USE_FLAG") == ""
    )


def has_lto(variables: Mapping[str, Any]) -> bool:
    """Whether it says that it was linked as a whole (LTO); Debian's does not say.

    >>> has_lto({"CONFIG_ARGS": "'--with-lto'"}), has_lto({"PY_LDFLAGS_NODIST": "-flto"}), has_lto({})
    (True, True, False)
    """
    return _has(variables, "--with-lto", "-flto")


def _has(variables: Mapping[str, Any], *words: str) -> bool:
    names = ("CONFIG_ARGS", "PY_CFLAGS_NODIST", "PY_LDFLAGS_NODIST")
    flags = " ".join(str(variables.get(name) or "") for name in names)
    return any(word in flags for word in words)


def main() -> int:
    """Prints how well it suits: 1, it is new enough; 2, it makes environments, too; 3, and was built with a profile."""
    if sys.version_info < OLDEST:
        return 1
    makes_environments = all(find_spec(name) for name in ("ensurepip", "venv"))
    sys.stdout.write(f"{1 + makes_environments + (makes_environments and has_profile(sysconfig.get_config_vars()))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
