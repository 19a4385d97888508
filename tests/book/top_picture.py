"""The moving picture of `hive top` under `hive up --demo`: `python -m tests.book.top_picture` takes it anew.

A whole `hive up --demo` with the demo backend, a state directory and ports of its own; the real `hive top` over its
socket, on a screen that is not there, is exported by Textual once a second. The frames are put into one SVG that moves
by style sheets alone: where these are not understood, or less motion is wanted, the first frame stands. Takes a minute.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hive.client.client import Client, find
from hive.demo.agents import DEMO_AGENTS
from hive.paths import api_sockets
from hive.tui.app import Top
from hive.tui.source import Source
from tests.journeys.stack import UP, until
from tests.ports import free_port
from tests.tui.test_pictures import environment, normal, words

PICTURE = Path(__file__).parents[2] / "docs/pictures/top.svg"
SIZE = (110, 20)
FRAMES = 24
EVERY_S = 1.0
WARM_S = 25.0
"""Until each agent was called twice or so: curves and counts have something to show."""
CLASS = re.compile(r"\.terminal-(r\d+) \{ (.*?) \}")
LINE = re.compile(r'<(?:text|rect)\b[^>]*? y="([\d.]+)"[^>]*?(?:/>|>[^<]*</text>)', re.DOTALL)
OF_THE_SCREEN = re.compile(
    r'(.*<g transform="translate\(9, 41\)" clip-path="[^"]*">)(.*)'
    r'<g class="terminal-matrix">(.*)</g>\s*</g>\s*</svg>\s*',
    re.DOTALL,
)


# --- the frames ----------------------------------------------------------------------------------------------------


@contextmanager
def demo() -> Iterator[Path]:
    """A `hive up --demo` of its own; yields its state directory and ends it."""
    base = Path(tempfile.mkdtemp(prefix="hive-top-", dir="/var/tmp"))
    base.chmod(0o711)
    (base / "hive.conf").write_text("")
    ports = [f"--{name}={free_port()}" for name in ("port", "ingress-port", "api-port")]
    command = [sys.executable, "-m", "hive", "up", "--demo", "--backend", "demo", "--state-dir", str(base / "state")]
    with (base / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--config", str(base / "hive.conf"), *ports], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        until(lambda: UP in (base / "log").read_bytes(), within_s=90, what="a Hive that is up")
        yield base / "state"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        shutil.rmtree(base, ignore_errors=True)


async def frames_of(state: Path) -> list[str]:
    """Takes the screen of `hive top` once a second, as SVG."""
    sockets = api_sockets(state_dir=state, uid=os.geteuid(), env={})
    client = Client(find(sockets).path)
    await asyncio.to_thread(until, lambda: _are_there(client), within_s=90, what="its agents")
    source = Source(sockets, state, uid=os.geteuid(), env={})
    app = Top(source, await asyncio.to_thread(source.look))
    async with app.run_test(size=SIZE) as pilot:
        await asyncio.sleep(WARM_S)
        frames = []
        for _ in range(FRAMES):
            began = time.monotonic()
            await pilot.pause()
            frames.append(normal(app.export_screenshot()))
            await asyncio.sleep(max(0.0, began + EVERY_S - time.monotonic()))
        return frames


def _are_there(client: Client) -> bool:
    agents = client.get("/api/agents")["agents"]
    return {agent["name"] for agent in agents if agent["requests"]} >= DEMO_AGENTS.keys()


# --- one picture of them -------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """`lines`: what stands on each line of the screen, by its place from above, with colours for classes."""

    before: str
    lines: dict[float, str]


def parsed(svg: str) -> Frame:
    """A frame as Textual exports it. Raises ValueError where Rich writes it otherwise than it did."""
    found = OF_THE_SCREEN.fullmatch(svg)
    if found is None:
        raise ValueError("this is no screen as Rich exports it")
    classes = dict(CLASS.findall(svg))
    lines: dict[float, str] = {}
    for part in (found[2], found[3]):
        for element in LINE.finditer(part):
            text = re.sub(r' clip-path="[^"]*"', "", element[0]).replace("\n", "")
            text = re.sub(r'class="terminal-(r\d+)"', lambda name: f'style="{classes[name[1]]}"', text)
            if "></text>" in text or 'fill="#121212"' in text:  # a line's end; the ground, which is drawn once
                continue
            at = _line(float(element[1]), is_text=element[0].startswith("<text"))
            lines[at] = lines.get(at, "") + text
    return Frame(found[1], lines)


def _line(y: float, *, is_text: bool) -> float:
    """The line of a place: a text stands 18.5 below its line's upper edge."""
    return round((y - (20.0 if is_text else 1.5)) / 24.4)


def moving(svgs: Sequence[str], *, every_s: float = EVERY_S) -> str:
    """One SVG of several: a line that changes is there once for each of its looks, and shown while it is one's turn.

    Colours are classes again; a line that stays is there once.
    """
    frames = [parsed(svg) for svg in svgs]
    looks: dict[tuple[float, str], list[int]] = {}
    for number, frame in enumerate(frames):
        for at, text in frame.lines.items():
            looks.setdefault((at, text), []).append(number)
    classes: dict[str, str] = {}
    turns: dict[tuple[int, ...], str] = {}

    def named(text: str) -> str:
        return re.sub(
            r'style="([^"]*)"', lambda found: f'class="{classes.setdefault(found[1], f"c{len(classes)}")}"', text
        )

    body = []
    for (_, text), shown in sorted(looks.items(), key=lambda found: (found[0][0], found[1][0])):
        if len(shown) == len(frames):
            body.append(f"<g>{named(text)}</g>")
            continue
        turn = turns.setdefault(tuple(shown), f"t{len(turns)}")
        first = "" if 0 in shown else ' visibility="hidden"'
        body.append(f'<g class="{turn}"{first}>{named(text)}</g>')
    total_s = len(frames) * every_s
    sheet = [f".{name} {{ {style} }}" for style, name in classes.items()]
    moves = []
    for taken, name in turns.items():
        moves.append(f".{name} {{ animation: {name} {total_s:g}s step-end infinite }}")
        moves.append(f"@keyframes {name} {{ {_steps(taken, len(frames))} }}")
    style = "\n".join([*sheet, "@media (prefers-reduced-motion: no-preference) {", *moves, "}"])
    return f"{_frame_around(frames[0].before, style)}\n" + "\n".join(body) + "\n</g></g></svg>\n"


def _steps(shown: tuple[int, ...], count: int) -> str:
    """The keyframes of what is shown in these of so many frames.

    >>> _steps((1,), 4)
    '0% { visibility: hidden } 25% { visibility: visible } 50% { visibility: hidden }'
    """
    found, before = [], None
    for number in range(count):
        now = number in shown
        if now is not before:
            found.append(f"{100 * number / count:g}% {{ visibility: {'visible' if now else 'hidden'} }}")
        before = now
    return " ".join(found)


def _frame_around(before: str, style: str) -> str:
    """The window of a frame: without the places of its lines, with this style and a ground of one colour."""
    before = re.sub(r'\s*<clipPath id="terminal-line-\d+">.*?</clipPath>', "", before, flags=re.DOTALL)
    before = re.sub(r"\s*\.terminal-r\d+ \{[^}]*\}", "", before).replace("    </style>", f"{style}\n    </style>")
    width, height = re.findall(r'<rect x="0" y="0" width="([\d.]+)" height="([\d.]+)" />', before)[0]
    return f'{before}\n<rect fill="#121212" width="{width}" height="{height}"/><g class="terminal-matrix">'


def first_of(picture: str) -> list[str]:
    """The lines of the first frame of a moving picture, as one reads them."""
    return words(re.sub(r'<g class="t\d+" visibility="hidden">.*?</g>', "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    with environment({}), demo() as state:
        taken = asyncio.run(frames_of(state))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(moving(taken))
    print(f"{PICTURE}: {len(taken)} frames, {PICTURE.stat().st_size // 1024} KiB")
