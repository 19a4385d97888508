"""Compiles the modules of `[tool.hive] compiled` in pyproject.toml where HIVE_COMPILE=1; else there is nothing to do.

Only a wheel has compiled files, or a copy of the tree (`python setup.py build_ext --inplace`): never the checkout,
where Python would take an old one before the source beside it (docs/decisions/072).
"""

import json
import os
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())
SOURCES = PROJECT["tool"]["hive"]["compiled"]


class Compiling(build_ext):
    """Writes beside what it compiles what that was made of (hive/build.py)."""

    def run(self) -> None:
        super().run()
        sys.path.insert(0, ".")
        from hive import build

        found = build.compiled_from(Path("hive"), SOURCES)
        at = Path("." if self.inplace else self.build_lib, "hive", build.COMPILED.name)
        at.write_text(json.dumps(found, indent=1) + "\n")


def extensions() -> list[Extension]:
    """What mypyc makes; nothing while pip only asks what is needed to build."""
    if not {"build_ext", "bdist_wheel"} & set(sys.argv):
        return []
    from mypyc.build import mypycify

    return mypycify(SOURCES, opt_level="3", debug_level="0", group_name="hive")


if os.environ.get("HIVE_COMPILE") == "1":
    # mypy reads all that these modules import, so those packages are there, too.
    tools = [tool for tool in PROJECT["project"]["optional-dependencies"]["dev"] if not tool.startswith("ruff")]
    needed = [*PROJECT["project"]["dependencies"], *tools]
    setup(setup_requires=needed, ext_modules=extensions(), cmdclass={"build_ext": Compiling})
else:
    setup()
