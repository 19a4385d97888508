"""The moving picture of `hive top` is of the program as it is.

It was taken of a real `hive up --demo`, so what it says differs each time. What does not is held here against the
program itself, drawn anew over a look that never changes, on a screen of the same size: the head of the table and the
footer, with their places and colours; the titles of the panes; version, demo agents and the words of their states.
Where one of these is another, the picture is stale: `python -m tests.book.top_picture`, and look at it.
"""

from __future__ import annotations

import html
import re
from typing import NamedTuple

import msgspec
import pytest

from hive import __version__
from hive.demo.agents import DEMO_AGENTS
from tests.book import top_picture
from tests.book.top_picture import FRAMES, PICTURE, SIZE
from tests.tui import frozen
from tests.tui.test_pictures import Picture, taken

STALE = "type: python -m tests.book.top_picture"
DEMO = msgspec.structs.replace(frozen.VLLM, kind="demo", label="demo", address="", version="")
LOOK = frozen.look(
    backend=DEMO, gpus_why_not="", agents=[frozen.row(name, "paused", depth="light") for name in DEMO_AGENTS]
)


class Word(NamedTuple):
    x: str
    text: str
    style: str


def styled(picture: str) -> list[list[Word]]:
    """The words of each line, with their place and colour; of a moving picture those of the first frame."""
    picture = re.sub(r'<g class="t\d+" visibility="hidden">.*?</g>', "", picture, flags=re.DOTALL)
    styles = dict(re.findall(r"\.(?:terminal-)?([cr]\d+) \{ (.*?) \}", picture))
    lines: dict[float, list[Word]] = {}
    for name, x, y, text in re.findall(
        r'<text class="(?:terminal-)?([cr]\d+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<\n]+)</text>', picture
    ):
        lines.setdefault(float(y), []).append(Word(x, html.unescape(text).replace("\xa0", " "), styles[name]))
    return [sorted(lines[y], key=lambda word: float(word.x)) for y in sorted(lines)]


def text(line: list[Word]) -> str:
    return "".join(word.text for word in line)


def titles(lines: list[list[Word]]) -> list[str]:
    """The first word of each pane's title."""
    return [found[1] for line in lines for found in re.finditer(r"─ ([a-zA-Z/]+)", text(line))]


@pytest.fixture(scope="module")
def picture() -> str:
    return PICTURE.read_text()


async def program() -> list[list[Word]]:
    return styled(await taken(Picture(LOOK, SIZE)))


async def test_the_head_of_the_table_is_that_of_the_program(picture: str) -> None:
    [shown] = [line for line in styled(picture) if text(line).startswith("AGENT")]
    [real] = [line for line in await program() if text(line).startswith("AGENT")]
    assert shown == real, STALE


async def test_the_footer_is_that_of_the_program(picture: str) -> None:
    assert styled(picture)[-1] == (await program())[-1], STALE


async def test_the_panes_are_those_of_the_program(picture: str) -> None:
    assert titles(styled(picture)) == titles(await program()), STALE


def test_it_is_of_this_version_and_of_the_demo_agents(picture: str) -> None:
    lines = [text(line) for line in styled(picture)]
    assert lines[0].startswith(f"Hive {__version__} · backend up: "), STALE
    assert {name for name in DEMO_AGENTS if any(line.startswith(f"{name} ") for line in lines)} == DEMO_AGENTS.keys()


def test_it_moves_and_shows_agents_asleep_and_awake(picture: str) -> None:
    assert len(re.findall("@keyframes", picture)) >= FRAMES / 2
    assert {state for state in ("● paused", "● running") if state.replace(" ", "&#160;") in picture} == {
        "● paused",
        "● running",
    }


def test_frames_become_one_picture_in_which_only_what_changes_is_there_twice() -> None:
    def frame(*lines: str) -> str:
        texts = "".join(
            f'<text class="terminal-r1" x="0" y="{20 + 24.4 * number:g}" clip-path="url(#l)">{line}</text>'
            for number, line in enumerate(lines)
        )
        return (
            '<svg>\n<style>\n.terminal-r1 { fill: #e0e0e0 }\n    </style>\n<rect x="0" y="0" width="9" height="9" />'
            f'<g transform="translate(9, 41)" clip-path="url(#t)">\n<g class="terminal-matrix">{texts}</g>\n'
            "</g>\n</svg>\n"
        )

    found = top_picture.moving([frame("stays", "one"), frame("stays", "two"), frame("stays", "one")])
    assert [found.count(word) for word in (">stays<", ">one<", ">two<")] == [1, 1, 1]
    assert top_picture.first_of(found) == ["stays", "one"]
