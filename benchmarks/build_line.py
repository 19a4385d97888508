"""The first line of a benchmark: what its figures depend on beside Hive's own code."""

from __future__ import annotations

import os
import platform
import sysconfig
from importlib.metadata import version

from hive.host import python_build


def build_line() -> str:
    """The Python and its build, the compiled packages, and how busy the machine is."""
    variables = sysconfig.get_config_vars()
    profile = "PGO" if python_build.has_profile(variables) else "no PGO"
    lto = "LTO" if python_build.has_lto(variables) else "no LTO"
    packages = ", ".join(f"{name} {version(name)}" for name in ("msgspec", "httptools", "uvloop"))
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return f"Python {platform.python_version()} ({profile}, {lto}), {packages}; {load}"
