"""Which Hive this is."""

from __future__ import annotations

import platform

from hive import __version__
from hive.cli.call import Call


def version(call: Call) -> None:
    """Prints the version of this command.

    Examples:
      hive version
      hive version --json
    """
    call.show("version", {"hive": __version__, "python": platform.python_version()}, lambda: f"hive {__version__}")
