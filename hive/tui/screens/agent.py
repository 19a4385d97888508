"""One agent's page: what it is, why, what it wrote last, and what can be done with it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Button, Footer, RichLog, Sparkline, Static

from hive.control.client import path_of
from hive.domain import AT_REST, AgentStatus
from hive.errors import HiveError
from hive.tui.cells import one_line, size, span
from hive.tui.snapshot import AgentRow, Snapshot
from hive.tui.source import Source

LOG_LINES = 200
RATES = 120

_BUTTONS = {"pause": ("Pause", "yellow"), "resume": ("Resume", "green"), "stop": ("Stop", "red")}
_START = {"start": ("Start", "green")}


def verbs_of(status: str) -> tuple[str, ...]:
    """What can be done with an agent as it is: its buttons.

    >>> verbs_of("running"), verbs_of("paused"), verbs_of("error"), verbs_of("pausing")
    (('pause', 'stop'), ('resume', 'stop'), ('start',), ())
    """
    if status == AgentStatus.RUNNING:
        return ("pause", "stop")
    if status == AgentStatus.PAUSED:
        return ("resume", "stop")
    return ("start",) if status in AT_REST else ()


def facts_of(row: AgentRow, *, unicode: bool) -> str:
    """Its figures and why, a few lines."""
    state = row.status if row.depth == "awake" else f"{row.status}, {row.depth}"
    wake = "" if row.last_wake_ms is None else f", last in {row.last_wake_ms:.1f} ms by {row.last_wake_cause}"
    lines = [
        f"{state} · {row.runtime} · tenant {row.tenant} · tier {row.tier} · model {row.model or 'any'}",
        f"why: {row.why or '-'}",
        f"RAM {size(row.rss_bytes)}, saved {size(row.saved_bytes)} · idle {span(row.idle_s)}"
        f" · {row.in_flight if row.in_flight is not None else '-'} in flight",
        f"{row.requests} requests, tokens {row.tokens_in} in, {row.tokens_out} out"
        + ("" if row.wakes is None else f" · {row.wakes} wakes, {row.pauses} sleeps{wake}"),
    ]
    return "\n".join(one_line(line, unicode=unicode) for line in lines)


class AgentPage(Screen[None]):
    """Of the agent with this id, for as long as it is there."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Back")]

    class Wanted(Message):
        """A button was pressed."""

        def __init__(self, verb: str) -> None:
            super().__init__()
            self.verb = verb

    def __init__(self, row: AgentRow, source: Source, *, unicode: bool, may_act: bool) -> None:
        super().__init__()
        self.row = row
        self._source = source
        self._unicode = unicode
        self._may_act = may_act
        self._rates: deque[float] = deque(maxlen=RATES)
        self._said: list[str] = []
        self._reading = False

    def compose(self) -> ComposeResult:
        yield Static(self.row.name, id="title", markup=False)
        with Horizontal(id="verbs", classes="row"):
            for verb, (label, colour) in (_BUTTONS | _START).items():
                yield Button(label, id=verb, classes=colour, compact=True)
        yield Static(id="facts", markup=False)
        if self._unicode:
            yield Sparkline(id="rates")
        yield RichLog(id="log", wrap=False, max_lines=LOG_LINES)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self._draw(is_live=True)
        self._read_log()

    def show(self, snapshot: Snapshot) -> None:
        """The next look; an agent that is gone leaves its page as it was, and it says so."""
        row = next((row for row in snapshot.agents if row.id == self.row.id), None)
        if row is None:
            self.query_one("#title", Static).update(f"{self.row.name} (removed)")
            self._may_act = False
        else:
            self.row = row
        self._rates.append(self.row.tokens_per_s or 0.0)
        self._draw(is_live=snapshot.is_live)
        if row is not None and snapshot.is_live:
            self._read_log()

    def _draw(self, *, is_live: bool) -> None:
        can = verbs_of(self.row.status) if self._may_act and is_live else ()
        for verb in (*_BUTTONS, *_START):
            self.query_one(f"#{verb}", Button).display = verb in can
        self.query_one("#facts", Static).update(facts_of(self.row, unicode=self._unicode))
        if self._unicode:
            self.query_one("#rates", Sparkline).data = list(self._rates)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.post_message(self.Wanted(str(event.button.id)))

    @work
    async def _read_log(self) -> None:
        if self._reading:
            return
        self._reading = True
        try:
            lines = await asyncio.to_thread(self._lines)
        except HiveError as error:
            lines = [f"(its log cannot be read: {error.message})"]
        finally:
            self._reading = False
        self._write(lines)

    def _lines(self) -> list[str]:
        found = self._source.client.lines(path_of(self.row.id, "logs"), silence_s=5.0, tail=LOG_LINES)
        return [raw.decode(errors="replace").rstrip("\r\n") for raw in found]

    def _write(self, lines: list[str]) -> None:
        """Adds what is new, so that who has scrolled up stays there; another beginning is another log."""
        if lines == self._said:
            return
        log = self.query_one("#log", RichLog)
        known = new_from(self._said, lines)
        if known == 0:
            log.clear()
        for line in lines[known:]:
            log.write(Text(one_line(line, unicode=self._unicode)), scroll_end=log.is_vertical_scroll_end)
        self._said = lines


def new_from(before: list[str], after: list[str]) -> int:
    """How many lines at the beginning of `after` are the end of `before`: the longest such overlap.

    >>> new_from(["a", "b", "c"], ["b", "c", "d"]), new_from(["a"], ["x"]), new_from([], ["x"])
    (2, 0, 0)
    """
    for start in range(len(before)):
        tail = before[start:]
        if tail == after[: len(tail)]:
            return len(tail)
    return 0
