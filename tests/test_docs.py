"""Things that are documented exist: commands, promises, dependencies."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTED = re.compile(r"`((?:tests|benchmarks)/[\w/.-]+\.py)(?:::(\w+))?`")
REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


# --- promises ----------------------------------------------------------------------------------------------------


def promises() -> list[tuple[str, str]]:
    """Promise and keeper of every row of SPECIFICATION.md."""
    rows = [line.strip("|").split("|") for line in text_of("SPECIFICATION.md").splitlines() if line.startswith("| ")]
    return [(cells[0].strip(), cells[1].strip()) for cells in rows if cells[0].strip() != "promise"]


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse(text_of(path), path)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions)


@pytest.mark.parametrize(("promise", "keeper"), promises(), ids=[promise[:60] for promise, _ in promises()])
def test_every_promise_names_a_test_that_exists_or_says_pending(promise: str, keeper: str) -> None:
    named = TESTED.findall(keeper)
    assert named or keeper == "pending", f"{promise}: kept by {keeper!r}?"
    for path, test in named:
        assert (ROOT / path).is_file(), f"{promise}: no {path}"
        assert not test or test in functions_of(path), f"{promise}: {path} has no {test}"


def test_there_are_promises() -> None:
    assert len(promises()) > 10


# --- dependencies ------------------------------------------------------------------------------------------------


def dependencies() -> list[str]:
    """Every package pyproject.toml names, as it writes it without its version."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [re.split(r"[<>=!~ ;]", requirement)[0] for requirements in lists for requirement in requirements]


def normal(name: str) -> str:
    """PEP 503: how two spellings of a package are compared; extras apart."""
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()


@pytest.mark.parametrize("name", dependencies())
def test_every_dependency_has_its_line_and_its_pin(name: str) -> None:
    rows = [line.split("|") for line in text_of("docs/decisions/001-dependencies.md").splitlines()]
    lines = [cells for cells in rows if len(cells) > 4 and cells[1].strip() == name]
    assert len(lines) == 1, f"{name}: {len(lines)} lines in 001-dependencies.md"
    assert all(cell.strip() for cell in lines[0][1:5]), f"{name}: an empty cell"
    pins = {normal(line.partition("==")[0]) for line in text_of("constraints.txt").splitlines()}
    assert normal(name) in pins, f"{name} is not in constraints.txt"


def test_constraints_are_exact_versions_and_no_addresses() -> None:
    lines = [line for line in text_of("constraints.txt").splitlines() if line and not line.startswith("#")]
    wrong = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)]
    assert lines
    assert not wrong


# --- commands ----------------------------------------------------------------------------------------------------


def commands(document: str) -> list[str]:
    """Lines of its code blocks that type `hive …`, `./install.sh …` or a path of ours, without a prompt and comment."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ").partition("  #")[0] for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(hive|\./install\.sh|\.ci/run|\.venv/bin/hive)\b", line)]


DOCUMENTED = [(name, line) for name in ("README.md", "CONTRIBUTING.md") for line in commands(name)]


@pytest.mark.parametrize(("document", "line"), DOCUMENTED, ids=[line for _, line in DOCUMENTED])
def test_every_command_of_the_documents_exists(document: str, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    if not program.endswith("hive"):
        assert (ROOT / program).stat().st_mode & 0o111, f"{program} is not executable"
        assert (
            program != "./install.sh" or not words or words[0] in ("up", "test", "--dry-run", "--prefix", "--uninstall")
        )
        return
    verbs = []
    for word in words:
        if not re.fullmatch(r"[a-z][a-z-]*", word):
            break
        verbs.append(word)
    flags = {
        word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None] if word[:2] == "--"
    }
    # Names among the words do no harm: --help is answered before they are looked at.
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "hive", *verbs, "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert shown.returncode == 0, f"{document}: `{line}`: {shown.stderr}"
    missing = {flag for flag in flags if flag not in shown.stdout}
    assert not missing, f"{document}: `{line}`: no such flag: {missing}"


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(text_of("README.md").splitlines()) <= 120


def test_the_page_for_contributors_is_one_page() -> None:
    assert len(text_of("CONTRIBUTING.md").splitlines()) <= 70


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "SPECIFICATION.md"])
def test_links_inside_the_repository_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(document))
    broken = [link for link in links if not (ROOT / link).exists()]
    assert not broken
