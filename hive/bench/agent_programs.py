"""The agent programs of a density run by kind: what starts each, what a template of it would import, what it needs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from hive.errors import NotSupported
from hive.host.process import spawn

HERE = Path(__file__).parent / "programs"
SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534
"""Agents run as users of their own under Hive; the plain ones run as this one, so that both read the same files."""
NODE_MODULES = "HIVE_BENCH_NODE_MODULES"
"""Environment name of the directory with the package for Node."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class AgentProgram(NamedTuple):
    """An agent of one kind. `file`: its script in programs/. `packages`: what pip (or npm) installs for it. `imports`:
    what a template of it imports, `warm`: the recipe that warms it; empty where there can be no template. `said`: in
    words. `stops`: whether it takes turns before `hive.ready()`.
    """

    kind: str
    file: str
    packages: tuple[str, ...]
    imports: tuple[str, ...]
    warm: str
    said: str
    stops: bool = False


PROGRAMS: dict[str, AgentProgram] = {
    program.kind: program
    for program in (
        AgentProgram(
            "openai",
            "openai_agent.py",
            ("openai",),
            ("openai", "http.server"),
            "openai",
            "Python with openai",
            stops=True,
        ),
        AgentProgram(
            "langgraph",
            "langgraph_agent.py",
            ("langgraph", "langchain-openai"),
            ("langgraph.prebuilt", "langchain_openai", "http.server"),
            "langgraph",
            "Python with LangGraph and langchain-openai",
            stops=True,
        ),
        AgentProgram("node", "node_agent.mjs", ("openai",), (), "", "Node with openai"),
        AgentProgram(
            "data",
            "data_agent.py",
            ("numpy", "pandas", "openai"),
            ("numpy", "pandas", "openai", "http.server"),
            "openai",
            "Python with numpy, pandas, openai and a data frame of 7.4 MiB",
        ),
        AgentProgram(
            "own", "own_agent.py", (), ("http.server", "http.client"), "", "the control: 40 MiB of own random data each"
        ),
    )
}


class Chosen(NamedTuple):
    """A program and what runs it: the interpreter, and what its environment has besides."""

    program: AgentProgram
    interpreter: str
    env: dict[str, str]

    def command(self, directory: Path) -> list[str]:
        """Its command line, with the programs copied to `directory`."""
        return [self.interpreter, str(directory / self.program.file)]


def choose(kind: str, python: Path | None) -> Chosen:
    """The program of this kind and its interpreter: the one named, else the first that has the packages.

    Raises NotSupported with the line that installs what is missing.
    """
    program = PROGRAMS[kind]
    if kind == "node":
        return _node(program)
    candidates = [str(python)] if python is not None else [sys.executable, SYSTEM_PYTHON]
    for interpreter in candidates:
        why = why_not_python(interpreter, program)
        if not why:
            return Chosen(program, interpreter, {})
        if python is not None:
            raise NotSupported(f"{interpreter}: {why}", hint=_install(program, interpreter))
    raise NotSupported(
        f"no Python here runs {program.said}: {why}",
        hint=_install(program, "/srv/agents/bin/python") + ", then name it with --python",
    )


def why_not_python(interpreter: str, program: AgentProgram) -> str:
    """The reason that this Python does not run the program, tried as the user that agents are; empty where it does."""
    wanted = ", ".join(program.imports)
    reading, writing = os.pipe()
    with open(reading, errors="replace") as output:
        try:
            child = spawn(
                [interpreter, "-c", f"import {wanted}"], env=plain_env(), uid=NOBODY, cwd="/", stdout_fd=writing
            )
        except Exception as error:  # whatever it is, it is said
            return f"it cannot be started as another user than root ({error})"
        finally:
            os.close(writing)
        said = output.read().strip().splitlines()
    return "" if child.wait() == 0 else (said[-1] if said else "it does not start")


def _install(program: AgentProgram, interpreter: str) -> str:
    if not program.packages:
        return "name one that other users may run, with --python"
    where = str(Path(interpreter).parent.parent)
    return f"python3 -m venv {where} && {where}/bin/pip install {' '.join(program.packages)}"


def _node(program: AgentProgram) -> Chosen:
    """Node and a directory with the package. HIVE_BENCH_NODE_MODULES names the latter."""
    node = shutil.which("node", path=PATH)
    if node is None:
        raise NotSupported("no node here", hint="apt-get install nodejs")
    given = os.environ.get(NODE_MODULES, "")
    if not Path(given or "/nowhere", "openai").is_dir():
        raise NotSupported(
            "the package openai for Node is not there",
            hint="cd /srv/agents && npm install openai, then HIVE_BENCH_NODE_MODULES=/srv/agents/node_modules",
        )
    return Chosen(program, node, {NODE_MODULES: given})


def plain_env() -> dict[str, str]:
    """The environment that every agent has."""
    return {"PATH": PATH, "LANG": "C.UTF-8", "LANGSMITH_TRACING": "false"}


def copy_to(directory: Path) -> None:
    """Copies the programs to where agents of any user read them."""
    shutil.copytree(HERE, directory, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755)
