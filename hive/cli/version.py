"""The version of this Hive."""

from __future__ import annotations

import platform

from hive import build
from hive.cli.call import CommandCall


def version(call: CommandCall) -> None:
    """Prints the version of this command, and its build.

    What follows the + is another one for any other code, and the same in a clone, a wheel and an installed Hive.

    Examples:
      hive version
      hive version --json
    """
    call.show(
        "version", {"hive": build.version(), "python": platform.python_version()}, lambda: f"hive {build.version()}"
    )
