"""Pictures of the screen, as SVG, over looks that never change: tests/tui/pictures holds how it is meant to be.

After a change that is wanted, `python -m tests.tui.test_pictures` takes them anew; look at them (any browser shows
them) before they are committed. What differs in a test run is left beside the words of the failure.

Not pytest-textual-snapshot: its 1.1.0 wants syrupy 4.8.0, which wants pytest below 9.
"""

from __future__ import annotations

import asyncio
import difflib
import html
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from hive.tui.app import Top
from hive.tui.snapshot import Snapshot
from tests.tui import frozen

PICTURES = Path(__file__).parent / "pictures"
SMALL, LARGE, WIDE = (80, 24), (120, 40), (200, 50)


class Picture(NamedTuple):
    """`keys`: pressed before it is taken. `env`: set while it is. `leases`: there are."""

    look: Snapshot
    size: tuple[int, int]
    keys: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 - read only
    env: dict[str, str] = {}  # noqa: RUF012
    leases: Sequence[dict[str, Any]] = ()


ONE = frozen.look(gpus=frozen.one_gpu())
EIGHT = frozen.look(gpus=frozen.eight_gpus())
BUSY = [frozen.row(f"agent-{number:03}", tokens_per_s=number / 4) for number in range(200)]
POOLED = frozen.look(gpus=frozen.one_gpu(), pool=frozen.pool(frozen.one_gpu()))
SOME = frozen.leases(POOLED.gpus[0].uuid)
MANY = [frozen.lease(number) for number in range(1, 51)]
EVERY = {
    "small": Picture(ONE, SMALL),
    "large": Picture(ONE, LARGE),
    "wide_8_gpus": Picture(EIGHT, WIDE),
    "small_8_gpus": Picture(EIGHT, SMALL),
    "large_8_gpus": Picture(EIGHT, LARGE),
    "small_pool": Picture(frozen.look(gpus=frozen.one_gpu(), pool=frozen.pool(frozen.one_gpu())), SMALL),
    "large_pool": Picture(frozen.look(gpus=frozen.one_gpu(), pool=frozen.pool(frozen.one_gpu())), LARGE),
    "wide_pool_8_gpus": Picture(frozen.look(gpus=frozen.eight_gpus(), pool=frozen.pool(frozen.eight_gpus())), WIDE),
    "small_pool_ascii": Picture(frozen.look(pool=frozen.pool()), SMALL, options={"unicode": False}),
    "small_no_gpu": Picture(frozen.look(), SMALL),
    "small_cluster": Picture(frozen.short_cluster(), SMALL),
    "wide_cluster": Picture(frozen.short_cluster(), (160, 50)),
    "small_mig": Picture(frozen.look(gpus=frozen.mig()), SMALL),
    "large_mig": Picture(frozen.look(gpus=frozen.mig()), LARGE),
    "small_lost_gpu": Picture(frozen.look(gpus=frozen.lost()), SMALL),
    "small_no_colour": Picture(ONE, SMALL, env={"NO_COLOR": "1"}),
    "small_ascii": Picture(ONE, SMALL, options={"unicode": False}),
    "small_down": Picture(frozen.down(), SMALL),
    "small_many": Picture(frozen.look(agents=BUSY), SMALL, keys=("greater_than_sign",) * 4 + ("pagedown", "down")),
    "small_filter": Picture(ONE, SMALL, keys=("slash", *"!running")),
    "small_page": Picture(ONE, SMALL, keys=("down", "enter")),
    "large_page": Picture(ONE, LARGE, keys=("down", "down", "enter")),
    "large_page_down": Picture(frozen.down(), LARGE, keys=("down", "down", "enter")),
    "small_page_no_colour": Picture(ONE, SMALL, keys=("down", "enter"), env={"NO_COLOR": "1"}),
    "small_keys": Picture(ONE, SMALL, keys=("question_mark",)),
    "small_question": Picture(ONE, SMALL, keys=("down", "S")),
    "small_leases": Picture(POOLED, SMALL, keys=("l", "down", "down"), leases=SOME),
    "small_no_leases": Picture(frozen.look(), SMALL, keys=("l",)),
    "small_leases_down": Picture(frozen.down(), SMALL, keys=("l",)),
    "small_many_leases": Picture(POOLED, SMALL, keys=("l", "G"), leases=MANY),
    "small_leases_question": Picture(POOLED, SMALL, keys=("l", "x"), leases=SOME),
    "large_leases_ascii": Picture(POOLED, (160, 50), keys=("l",), leases=SOME, options={"unicode": False}),
    "tiny": Picture(ONE, (20, 5)),
    "nobody": Picture(frozen.look(agents=[], queue=None, events=[]), SMALL),
}


@contextmanager
def environment(given: dict[str, str]) -> Iterator[None]:
    """Times in UTC; no wish for colours but the given one."""
    before = dict(os.environ)
    os.environ.pop("NO_COLOR", None)
    os.environ.update({"TZ": "UTC", **given})
    time.tzset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        time.tzset()


async def taken(picture: Picture) -> str:
    """As SVG, without what is of this one run."""
    with environment(picture.env):
        source = frozen.Frozen(picture.look)
        source.leases = picture.leases
        app = Top(source, picture.look, interval_s=1e6, **picture.options)
        for look in earlier(picture.look):
            app.history.add(look)
        async with app.run_test(size=picture.size) as pilot:
            await pilot.pause()
            await pilot.press(*picture.keys)
            await app.workers.wait_for_complete()
            if (focused := app.focused) is not None and hasattr(focused, "cursor_blink"):
                focused.cursor_blink = False
            await pilot.pause()
            return normal(app.export_screenshot())


def earlier(look: Snapshot) -> Iterator[Snapshot]:
    """A minute before: rates that rise and fall."""
    for number in range(60):
        share = abs((number * 7) % 60 - 30) / 30
        agents = [
            msgspec.structs.replace(row, tokens_per_s=None if row.tokens_per_s is None else row.tokens_per_s * share)
            for row in look.agents
        ]
        gpus = [
            msgspec.structs.replace(
                gpu, busy_percent=None if gpu.busy_percent is None else int(gpu.busy_percent * share)
            )
            for gpu in look.gpus
        ]
        yield msgspec.structs.replace(look, agents=agents, gpus=gpus)


def normal(svg: str) -> str:
    """Without the number Rich makes for each picture, and without fonts from elsewhere."""
    svg = re.sub(r"terminal-\d+-", "terminal-", svg)
    return re.sub(r"\s*@font-face \{.*?\}\n", "\n", svg, flags=re.DOTALL).rstrip() + "\n"


def words(svg: str) -> list[str]:
    """The text of a picture, line by line: what a difference is told with."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', svg):
        lines.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    return ["".join(text for _, text in sorted(parts)).rstrip() for _, parts in sorted(lines.items())]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", EVERY)
async def test_it_looks_as_it_is_meant_to(name: str, tmp_path: Path) -> None:
    found = await taken(EVERY[name])
    meant = (PICTURES / f"{name}.svg").read_text()
    if found != meant:
        seen = tmp_path / f"{name}.svg"
        seen.write_text(found)
        changed = "\n".join(difflib.unified_diff(words(meant), words(found), "meant", "found", lineterm="", n=0))
        pytest.fail(f"{seen} is not {PICTURES / name}.svg:\n{changed or 'only its colours are others'}", pytrace=False)


def test_there_is_no_picture_of_nothing() -> None:
    assert {path.stem for path in PICTURES.glob("*.svg")} == EVERY.keys()


async def test_a_picture_is_the_same_each_time() -> None:
    assert await taken(EVERY["large_page"]) == await taken(EVERY["large_page"])


def test_what_differs_is_told_in_words() -> None:
    assert any(line.startswith("Hive 0.1.0 · backend up") for line in words((PICTURES / "small.svg").read_text()))


def take_all() -> None:
    PICTURES.mkdir(exist_ok=True)
    for path in PICTURES.glob("*.svg"):
        path.unlink()
    for name, picture in EVERY.items():
        (PICTURES / f"{name}.svg").write_text(asyncio.run(taken(picture)))


if __name__ == "__main__":
    take_all()
