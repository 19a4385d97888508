"""The check of a version that was just put there, before anything of it is used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from hive.errors import HiveError
from hive.files import layout, share
from hive.host import program, systemd
from hive.host.files import translated
from hive.install.steps import Box, QuietStep

VERIFY = "/run/hive-verify"
"""The units as they would be with this version, while systemd looks at them."""
LIMIT_S = 120.0
IMPORT_ALL = (
    "import importlib, pkgutil, hive\n"
    "from hive.jobs.mcp_extra import has_mcp\n"
    "without = {'hive.__main__', 'hive.runner.diffusers'}\n"
    "if not has_mcp(): without |= {'hive.jobs.mcp_tools', 'hive.jobs.mcp_transports'}\n"
    "for found in pkgutil.walk_packages(hive.__path__, 'hive.'):\n"
    "    if found.name not in without: importlib.import_module(found.name)\n"
)
"""All but those that need an extra which is not there; the engine of diffusers is in an environment of its own."""


class SelfCheckCommand(NamedTuple):
    name: str
    command: list[str]


class SelfCheck(QuietStep):
    """The new version answers, takes the configuration that is there, imports, and systemd takes its units."""

    name = "self-check"

    def __init__(self, box: Box) -> None:
        self._box = box
        self._passed = False

    def plan(self) -> list[str]:
        if self._passed:
            return []
        checks = [f"run {check.name} of {self._box.version}" for check in self._checks]
        return (
            [*checks, f"run systemd-analyze verify on the units of {self._box.version}"] if self._verifies else checks
        )

    def do(self) -> None:
        """Raises HiveError with the last thing the failing check said."""
        for check in self._checks:
            ran = program.run(check.command, limit_s=LIMIT_S)
            if ran.code != 0:
                raise self._failed(check.name, ran.last_line)
        if self._verifies:
            self._verify_units()
        self._passed = True

    @property
    def _checks(self) -> list[SelfCheckCommand]:
        # -P: nothing of the working directory is imported.
        python = [str(self._box.venv / "bin" / "python"), "-P"]
        conf = self._box.at(layout.CONF_FILE)
        return [
            SelfCheckCommand("hive version", [*python, "-m", "hive", "version"]),
            SelfCheckCommand(
                "hive config check", [*python, "-m", "hive", "config", "check", *([str(conf)] if conf.exists() else [])]
            ),
            SelfCheckCommand("an import of every module", [*python, "-c", IMPORT_ALL]),
        ]

    @property
    def _verifies(self) -> bool:
        return self._box.layout.live and systemd.is_booted()

    def _verify_units(self) -> None:
        """The units name /opt/hive/current, which is not this version yet: a copy names the version itself."""
        directory = Path(VERIFY)
        shutil.rmtree(directory, ignore_errors=True)
        version = self._box.layout.version(self._box.version)
        try:
            with translated(directory):
                directory.mkdir(mode=0o700)
                for unit in share.units(self._box.share):
                    if unit.path.startswith(layout.UNITS):
                        copy = directory / Path(unit.path).relative_to(layout.UNITS)
                        copy.parent.mkdir(exist_ok=True)
                        copy.write_bytes(unit.content.replace(layout.CURRENT.encode(), version.encode()))
            names = [str(path) for path in sorted(directory.iterdir()) if path.is_file()]
            ran = program.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *names])
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if ran.code != 0:
            raise self._failed("systemd-analyze verify", ran.text.strip())

    def _failed(self, what: str, said: str) -> HiveError:
        return HiveError(
            f"version {self._box.version} does not pass its self-check, nothing was changed: {what}: {said}",
            hint="what is installed goes on as it was",
        )
