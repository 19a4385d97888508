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

    >>> made = {"CONFIG_ARGS": "'--enable-shared'", "PGO_PROF_USE_FLAG": "-fprofile-use"}
    >>> has_profile(made), has_profile(made | {"CONFIG_ARGS": "'--enable-optimizations'"})
    (False, True)
    >>> has_profile(made | {"PY_CFLAGS_NODIST": "-fprofile-use"}), has_profile(made | {"PGO_PROF_USE_FLAG": ""})
    (True, True)
    """
    return _has(variables, "--enable-optimizations", "-fprofile-use", "-fprofile-instr-use") or _is_debians(variables)


def has_lto(variables: Mapping[str, Any]) -> bool:
    """Whether it was optimised as a whole when it was linked (LTO).

    >>> has_lto({"CONFIG_ARGS": "'--with-lto'"}), has_lto({"PY_LDFLAGS_NODIST": "-flto"}), has_lto({})
    (True, True, False)
    """
    return _has(variables, "--with-lto", "-flto") or _is_debians(variables)


def _has(variables: Mapping[str, Any], *words: str) -> bool:
    names = ("CONFIG_ARGS", "PY_CFLAGS_NODIST", "PY_LDFLAGS_NODIST")
    flags = " ".join(str(variables.get(name) or "") for name in names)
    return any(word in flags for word in words)


def _is_debians(variables: Mapping[str, Any]) -> bool:
    """Whether it is Debian's or Ubuntu's: built with both where there are many users of it (amd64, arm64 and six more).

    Their debian/rules take the flags out of the variables afterwards, so that no extension is built with them. This one
    is empty then; upstream's configure fills it for every build.
    """
    return variables.get("PGO_PROF_USE_FLAG") == ""


def main() -> int:
    """Prints how well it suits: 1, it is new enough; 2, it makes environments, too; 3, and was built with a profile."""
    if sys.version_info < OLDEST:
        return 1
    makes_environments = all(find_spec(name) for name in ("ensurepip", "venv"))
    sys.stdout.write(f"{1 + makes_environments + (makes_environments and has_profile(sysconfig.get_config_vars()))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
