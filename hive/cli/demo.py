"""`hive demo`: the guided tour as a person at a terminal, a pipe or a program sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hive.cli import demo_tables
from hive.cli.call import Answer, CommandCall, flush, out
from hive.cli.terminal import fitted
from hive.cli.text import one_line
from hive.terminal_text import wants_colour

if TYPE_CHECKING:
    from hive.tour.steps import TourStep
    from hive.tour.tour import TourChoice

WIDTH_MAX = 100
"""Columns of a sentence, however wide the terminal."""
PROMPT = "[Enter] go on   [s] skip   [q] end"
END_OF_INPUT = "\x04"
"""Ctrl-D, and what is told where the terminal is gone."""
KEYS: Mapping[str, str] = {
    "\n": "go",
    "\r": "go",
    "s": "skip",
    "S": "skip",
    "q": "quit",
    "Q": "quit",
    END_OF_INPUT: "quit",
}
"""Key → the choice it makes. Any other key does nothing."""
NEXT = "A Hive that stays: `hive up --demo`. Your first agent: docs/tutorial.md"


def demo(
    call: CommandCall,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Go on without asking.")] = False,
    step: Annotated[
        list[int] | None, typer.Option("--step", metavar="N", help="This step alone; may be repeated.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the steps, and do none of them.")] = False,
) -> int:
    """Shows what Hive does: a guided tour of a minute, on a Hive of its own.

    Agents that start, sleep and wake; two tenants that share a model fairly; a model's server that is killed; and the
    books. No model is needed. Each step says what to look at and waits: Enter goes on, s skips a step, also in its
    middle, q ends the tour. Without a terminal, or with --yes, it goes through by itself. Everything it shows is
    measured while you look. At the end nothing is left of it, also after Ctrl-C.

    Examples:
      hive demo
      hive demo --list
      hive demo --step 2 --step 3
      hive demo --yes
      hive demo --json | jq .figures
    """
    from hive.tour.steps import STEPS, choose
    from hive.tour.tour import take

    steps = choose(step or [])
    if list_:
        answer = {"steps": [{"number": number, **each._asdict()} for number, each in steps]}
        rows = [[str(number), each.title, each.sentence] for number, each in steps]
        call.show("demo", answer, lambda: fitted(["N", "STEP", "WHAT HAPPENS"], rows, prose="WHAT HAPPENS"))
        return 0
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    stage = TourStage(call, count=len(STEPS), asks=is_terminal and not yes and not call.as_json)

    async def toured() -> int:
        with stage.keys():
            return await take(steps, stage)

    return asyncio.run(toured())


class TourStage:
    """The audience of a tour: text on a terminal or in a pipe, or a JSON object for each step; a `TourAudience`."""

    def __init__(self, call: CommandCall, *, count: int, asks: bool) -> None:
        from hive.tour.tour import TourChoice

        self._call = call
        self._count = count
        self._asks = asks
        self._choices = TourChoice
        self._width = min(WIDTH_MAX, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH_MAX
        self._coloured = wants_colour(is_terminal=sys.stdout.isatty(), env=os.environ)
        self._draws = not call.as_json and wants_colour(is_terminal=sys.stderr.isatty(), env=os.environ)
        self._is_drawn = False
        self._pressed = asyncio.Event()
        self.stopped = asyncio.Event()
        self.choice: TourChoice = TourChoice.GO

    def __repr__(self) -> str:
        return f"<TourStage {'asks' if self._asks else 'goes on by itself'}>"

    def keys(self) -> contextlib.AbstractContextManager[object]:
        """As long as it is entered, a person's keys count."""
        if not self._asks:
            return contextlib.nullcontext()
        return TerminalKeys(sys.stdin.fileno(), self.press)

    def press(self, key: str) -> None:
        """A person has pressed this key."""
        if (meant := KEYS.get(key)) is None or self.choice is self._choices.QUIT:
            return
        self.choice = self._choices(meant)
        self._pressed.set()
        if self.choice is not self._choices.GO:
            self.stopped.set()

    # what the tour tells -------------------------------------------------------------------------------------------

    def begins(self, number: int, step: TourStep) -> None:
        if self._call.as_json:
            return
        self._wipe()
        title = demo_tables.heading(number, self._count, step.title)
        said = [demo_tables.wrapped(text, self._width, indent="     ") for text in (step.sentence, step.look)]
        by_hand = f"     In a Hive of yours: {step.command}"
        out("\n".join(["", self._sgr("1", title), said[0], self._sgr("36", said[1]), self._sgr("2", by_hand)]))
        flush()

    async def choose(self) -> TourChoice:
        if not self._asks:
            return self._choices.GO
        if self.choice is not self._choices.QUIT:
            self._pressed.clear()
            self._line(PROMPT)
            await self._pressed.wait()
            self._wipe()
        self.stopped.clear()
        return self.choice

    def goes_on(self, text: str) -> None:
        if self._draws:
            self._line(f"{text} …")

    def is_up(self, health: Answer, took_s: float) -> None:
        if self._call.as_json:
            return
        self._wipe()
        out(demo_tables.wrapped(demo_tables.up_line(health, took_s), self._width))
        flush()

    def ended(self, number: int, step: TourStep, figures: Answer | None, took_s: float) -> None:
        self._wipe()
        answer = {
            "step": step.name,
            "number": number,
            "skipped": figures is None,
            "took_s": round(took_s, 2),
            "figures": figures,
        }
        self._call.line("demo", answer, lambda: self._told(step, figures))

    def _told(self, step: TourStep, figures: Answer | None) -> str:
        return "     skipped" if figures is None else "\n" + demo_tables.shown(step.name, figures, width=self._width)

    def says(self, text: str) -> None:
        self._wipe()
        with contextlib.suppress(OSError):
            self._call.say(text)

    def leaves(self) -> None:
        self.goes_on("the Hive of the tour ends, and what it made is removed")

    def is_over(self, took_s: float) -> None:
        if self._call.as_json:
            return
        self._wipe()
        out("\n" + demo_tables.wrapped(demo_tables.over_line(took_s), self._width) + "\n" + NEXT)
        flush()

    # the terminal --------------------------------------------------------------------------------------------------

    def _sgr(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._coloured else text

    def _line(self, text: str) -> None:
        """A line that the next one takes the place of; a terminal that cannot do that gets prompts alone."""
        with contextlib.suppress(OSError):
            if self._draws:
                sys.stderr.write("\r\x1b[K" + one_line(text)[: self._width - 1])
                self._is_drawn = True
            else:
                sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _wipe(self) -> None:
        if not self._is_drawn:
            return
        self._is_drawn = False
        with contextlib.suppress(OSError):
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


# single keys of a terminal, without Enter behind them -----------------------------------------------------------------


class TerminalKeys:
    """Tells each key, on the running loop, as long as it is entered; the terminal is afterwards as it was."""

    def __init__(self, descriptor: int, on_key: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._on_key = on_key
        self._before: list[Any] = []

    def __enter__(self) -> TerminalKeys:
        self._before = termios.tcgetattr(self._descriptor)
        loop = asyncio.get_running_loop()
        self._single()
        loop.add_reader(self._descriptor, self._read)
        loop.add_signal_handler(signal.SIGCONT, self._single)  # after Ctrl-Z the shell has set the terminal its own way
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        loop.remove_signal_handler(signal.SIGCONT)
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def _single(self) -> None:
        with contextlib.suppress(termios.error, OSError):
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)

    def _read(self) -> None:
        try:
            typed = os.read(self._descriptor, 64).decode(errors="replace")
        except OSError:
            typed = ""
        if not typed:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        for key in typed or END_OF_INPUT:
            self._on_key(key)
