"""The tutorial and the how-tos with commands are true: they are followed as a reader would, on a Hive of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.followed_page import ROOT, Typed, Written, reader, steps_of
from tests.journeys.clients import folder
from tests.journeys.stack import PYTHON
from tests.ports import free_port

DOCS = ROOT / "docs"
PAGES = [
    "tutorial.md",
    *(f"how-to/{name}.md" for name in ("agent-with-tools", "agent-frameworks", "coding-agents")),
    *(f"how-to/{name}.md" for name in ("docker-agents", "firecracker-agents", "templates")),
    *(f"concepts/{name}.md" for name in ("sleep-and-wake", "gates", "isolation")),
]
"""The pages this file keeps."""
PICTURES = ["sleep", "gates", "isolation"]
SVG_MAX_BYTES = 30 * 1024
TYPICAL_LINES = 120
"""A how-to, at most."""
AGENT_LINES = 40


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def here(page: str) -> dict[str, str]:
    """Ports and places of the page → those of this run."""
    ports = sorted(set(re.findall(r"\b93\d\d\b", text_of(page))))
    return {"/var/tmp/first-agent": "BASE/agents", **{port: str(free_port()) for port in ports}}


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="these pages call agents with curl")


@needs_curl
@pytest.mark.redis
@pytest.mark.timeout(600)
def test_the_tutorial_is_true_from_its_first_command_to_its_last() -> None:
    with reader(here("tutorial.md")) as somebody:
        somebody.follow(text_of("tutorial.md"))


@pytest.mark.wide
@needs_curl
@pytest.mark.redis
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["how-to/agent-with-tools.md", "how-to/agent-frameworks.md"])
def test_a_how_to_with_packages_is_true(page: str) -> None:
    with reader({**here(page), "/srv/venvs/agents": "BASE/venv"}) as somebody:
        make_environment(somebody.base / "venv")
        somebody.up()
        somebody.follow(text_of(page))


def make_environment(venv: Path) -> None:
    """The page's environment, with the packages that tests/tools/setup_clients.sh has installed. Skipped without them.

    By the system's Python: that of the tests may be in a home that no agent may enter.
    """
    packages = list((folder() / "venv" / "lib").glob("python3.*/site-packages"))
    if not packages:
        pytest.skip("no client packages: run tests/tools/setup_clients.sh or set HIVE_CLIENTS")
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(venv)], check=True)
    (own,) = (venv / "lib").glob("python3.*/site-packages")
    if own.parent.name != packages[0].parent.name:
        pytest.skip(f"the client packages are for {packages[0].parent.name}, the system has {own.parent.name}")
    (own / "clients.pth").write_text(f"{packages[0]}\n")


@pytest.mark.parametrize("shown", ["three", "two\nthree", "…three", ""])
def test_a_page_that_shows_something_else_than_comes_fails(shown: str) -> None:
    block = "\n".join(["```console", "$ echo two", *shown.splitlines(), "```", ""])
    with reader({}) as somebody, pytest.raises(AssertionError, match=r"`echo two` shows\s+two"):
        somebody.follow(block)


# --- what holds for every page -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_read_at_one_go(page: str) -> None:
    length = len(text_of(page).splitlines())
    assert length <= TYPICAL_LINES * (3 if page == "tutorial.md" else 1)


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_repository_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(r"`((?:conf|tests|benchmarks|systemd|man|hive)/[\w./-]+\.\w+)`", text_of(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_agent_of_the_tutorial_fits_on_a_screen() -> None:
    files = [step for step in steps_of(text_of("tutorial.md")) if isinstance(step, Written)]
    assert [file.name for file in files] == ["greeter.py"]
    assert len(files[0].content.splitlines()) <= AGENT_LINES


def test_the_tutorial_shows_what_comes_of_nearly_every_command() -> None:
    typed = [step for step in steps_of(text_of("tutorial.md")) if isinstance(step, Typed)]
    assert len(typed) > 20
    assert sum(bool(step.shown) for step in typed) > len(typed) / 2


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_stands_alone_and_is_small(name: str) -> None:
    """It has a background of its own, words for who cannot see it, and asks nobody for anything."""
    path = DOCS / "pictures" / f"{name}.svg"
    assert path.stat().st_size <= SVG_MAX_BYTES
    root = ElementTree.fromstring(path.read_bytes())
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert root.find(f"{space}title") is not None
    assert root.find(f"{space}rect") is not None
    text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|url\((?!#)|@import|<image|<script|font-face", text)
    assert any(f"pictures/{name}.svg" in text_of(page) for page in PAGES)


def test_the_pages_are_all_there() -> None:
    assert [page for page in PAGES if not Path(DOCS, page).is_file()] == []
