"""One agent's page: what it is, why, what it wrote last, and what can be done with it."""

from __future__ import annotations

import asyncio
import math
import time
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.events import Resize
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Button, Footer, RichLog

from hive.agent_orders import orders_of
from hive.client.client import path_of
from hive.errors import HiveError
from hive.terminal_text import counted
from hive.tui.cells import count, one_line, size, span, state
from hive.tui.history import History
from hive.tui.lines import ROLES, Line, LinePart, joined, line, rule, wrapped
from hive.tui.panes import tokens_lines, tokens_title
from hive.tui.snapshot import AgentLine, Answer, Snapshot
from hive.tui.source import Source
from hive.tui.threads import in_thread
from hive.tui.usage import Use, hours_lines, hours_title, model_lines, use_of
from hive.tui.widgets.bars import use_whole_cells
from hive.tui.widgets.pane import Pane

LOG_LINES = 200
LINE_MAX = 2000
"""Of a line of the log so much is shown, bytes and then columns: an agent may write megabytes without a line's end, and
what is drawn holds up the keys. `hive agent logs` has the whole of it."""
AT_ONCE = 20
"""Lines that are drawn before a key is heard again."""
LOW_ROWS = 18
"""A terminal with fewer lines shows no charts."""
USE_EVERY_S = 10.0

_BUTTONS = {"pause": ("Pause", "yellow"), "resume": ("Resume", "green"), "stop": ("Stop", "red")}
_START = {"start": ("Start", "green")}


def verbs_of(status: str) -> tuple[str, ...]:
    """The orders that its status permits and that have a button.

    >>> verbs_of("running"), verbs_of("paused"), verbs_of("error"), verbs_of("pausing")
    (('pause', 'stop'), ('resume', 'stop'), ('start',), ())
    """
    return tuple(order for order in orders_of(status) if order in _BUTTONS | _START)


def facts_of(row: AgentLine, view: Answer, *, now: float) -> list[Line]:
    """Its figures. `view`: what the API says of it beside; empty where it was not asked, or of another state."""
    in_state = span(max(0.0, now - row.since))
    depth = "" if row.depth in ("", "awake") else f", {row.depth}"
    lines = [
        joined(
            [
                line(LinePart(state(row.status), ROLES.get(row.status, "going")), f"{depth} for {in_state}"),
                line(row.runtime),
                line(f"tenant {row.tenant}"),
                line(f"tier {row.tier}"),
                line(f"model {row.model or 'any'}"),
            ]
        ),
        line(
            f"RAM {size(row.rss_bytes)}{_age(row, now)}, saved {size(row.saved_bytes)} · idle {span(row.idle_s)} · "
            f"{count(row.in_flight)} in flight, {count(row.parked)} parked · {count(row.tokens_per_s)} tokens/s"
        ),
        line(
            f"{counted(row.requests, 'request')}, tokens {row.tokens_in} in, {row.tokens_out} out since it was created"
        ),
    ]
    more = [*_wakes(row), *beside(view)]
    return [*lines, joined(line(said) for said in more)] if more else lines


def _age(row: AgentLine, now: float) -> str:
    """Told of a PSS: of a charge there is nothing to tell, it is of now."""
    return "" if row.held_at is None else f" (PSS, {span(max(0.0, now - row.held_at))} old)"


def _wakes(row: AgentLine) -> list[str]:
    if row.wakes is None:
        return []
    last = "" if row.last_wake_ms is None else f", last {row.last_wake_ms:.1f} ms by {row.last_wake_cause}"
    return [f"{counted(row.wakes, 'wake')}{last}", f"{counted(row.pauses or 0, 'sleep')} since start"]


def why_of(row: AgentLine, view: Answer) -> str:
    return f"why: {view.get('why') or row.why or '-'}"


def beside(view: Answer) -> list[str]:
    """Facts that are worth a word only where they hold.

    >>> beside({"messages_waiting": 2, "next_wake_at": None, "limits_not_enforced": "no memory controller"})
    ['messages waiting: 2', 'limits do not hold: no memory controller']
    """
    said = []
    if view.get("messages_waiting"):
        said.append(f"messages waiting: {view['messages_waiting']}")
    if view.get("next_wake_at"):
        said.append(f"next wake {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(view['next_wake_at']))}")
    if view.get("kept_awake_until"):
        said.append(f"kept awake until {time.strftime('%H:%M:%S', time.localtime(view['kept_awake_until']))}")
    if view.get("limits_not_enforced"):
        said.append(f"limits do not hold: {view['limits_not_enforced']}")
    return said


class AgentScreen(Screen[None]):
    """The page of the agent with this id, for as long as it is there."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Back")]
    DEFAULT_CSS = """
    AgentScreen #verbs { height: auto; padding: 1 0; }
    AgentScreen #charts { height: auto; layout: horizontal; margin: 1 0 0 0; }
    AgentScreen #rates { width: 1fr; margin: 0 1 0 0; }
    AgentScreen #hours { width: 1fr; }
    AgentScreen #log { height: 1fr; background: $background; overflow-y: auto; }
    AgentScreen.low #verbs { padding: 0; }
    AgentScreen.low #charts, AgentScreen.low #models { display: none; }
    """

    AUTO_FOCUS = "#log"
    """Focus on no button: a user who holds Enter down a moment too long opens a page, and puts no agent to sleep."""

    class Wanted(Message):
        """A button was pressed."""

        def __init__(self, verb: str) -> None:
            super().__init__()
            self.verb = verb

    def __init__(
        self,
        row: AgentLine,
        snapshot: Snapshot,
        history: History,
        source: Source,
        *,
        unicode: bool,
        may_act: bool,
        is_held: bool = False,
    ) -> None:
        """`snapshot`: the look `row` is of. `is_held`: there will be no other while this page is open."""
        super().__init__()
        self.row = row
        self._source = source
        self._history = history
        self._unicode = unicode
        self._may_act = may_act
        self._is_held = is_held
        self._at, self._is_live, self._is_there = snapshot.at, snapshot.is_live, True
        self._view: Answer = {}
        self._use: Use | None = None
        self._use_at = -math.inf
        self._said: list[str] = []
        self._reading = False
        # Kept by name: a look may come before they are mounted, or after.
        names = ("title", "facts", "rates", "hours", "models", "logs")
        self._panes = {name: Pane(unicode=unicode, id=name) for name in names}
        self._buttons = {
            verb: Button(label, id=verb, classes=colour, compact=True)
            for verb, (label, colour) in (_BUTTONS | _START).items()
        }
        self._verbs = Horizontal(id="verbs")
        self._log = RichLog(id="log", wrap=False, max_lines=LOG_LINES)

    def compose(self) -> ComposeResult:
        yield self._panes["title"]
        with self._verbs:
            yield from self._buttons.values()
        yield self._panes["facts"]
        with Container(id="charts"):
            yield self._panes["rates"]
            yield self._panes["hours"]
        yield self._panes["models"]
        yield self._panes["logs"]
        yield self._log
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        if not self._unicode:
            use_whole_cells(self._log)
        self._draw()
        self._read()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.height < LOW_ROWS, "low")
        self._draw()

    def show(self, snapshot: Snapshot) -> None:
        """The next look; an agent that is gone leaves its page as it was, and it says so."""
        row = next((row for row in snapshot.agents if row.id == self.row.id), None)
        self._at, self._is_live, self._is_there = snapshot.at, snapshot.is_live, row is not None
        if row is not None:
            self.row = row
        self._draw()
        if self._is_there and self._is_live:
            self._read()

    def _draw(self) -> None:
        row, unicode = self.row, self._unicode
        can = verbs_of(row.status) if self._may_act and self._is_live and self._is_there else ()
        for verb, button in self._buttons.items():
            button.display = verb in can
        self._verbs.display = bool(can)
        how = "" if self._is_there else " (removed)"
        how += " (held: esc and space go on)" if self._is_held else ""
        self._panes["title"].show(lambda width: [line(LinePart(f"{f' {row.name}{how}':<{width}}", "mark"))])
        # What the API said of another state explains the present one wrongly.
        view = self._view if self._view.get("status") == row.status and self._is_live else {}

        def facts(width: int) -> list[Line]:
            why = wrapped(one_line(why_of(row, view)), width, role="", most=2)
            return [*facts_of(row, view, now=self._at), *why]

        self._panes["facts"].show(facts)
        rates = self._history.tokens_per_s_of(row.id)
        height = 2 if self.app.size.height < 30 else 4
        self._panes["rates"].show(
            lambda width: tokens_lines(rates, width, height, unicode=unicode), title=tokens_title(rates)
        )
        use = self._use
        self._panes["hours"].show(
            lambda width: hours_lines(use, width, height, unicode=unicode), title=hours_title(use)
        )
        self._panes["models"].show(
            lambda width: model_lines(use, width, height, unicode=unicode), title="by model, 24 h"
        )
        self._panes["logs"].show(lambda width: [rule("log", width, unicode=unicode)])

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.post_message(self.Wanted(str(event.button.id)))

    @work
    async def _read(self) -> None:
        """Its log, what the API says of it, and now and then what it used. What cannot be had now is so next time."""
        if self._reading:
            return
        self._reading = True
        try:
            try:
                lines = await in_thread(self._lines)
                self._view = await in_thread(lambda: self._source.client.get(path_of(self.row.id)))
                if time.monotonic() > self._use_at + USE_EVERY_S:
                    self._use = await in_thread(self._used)
                    self._use_at = time.monotonic()
            except (HiveError, LookupError, TypeError, ValueError) as error:  # the last three: of another version
                lines = self._said or [one_line(f"(its log cannot be read: {error})", unicode=self._unicode)]
            if self.is_mounted:
                await self._write(lines)
                self._draw()
        finally:
            self._reading = False

    def _lines(self) -> list[str]:
        found = self._source.client.lines(path_of(self.row.id, "logs"), silence_s=5.0, tail=LOG_LINES)
        return [log_line(raw, unicode=self._unicode) for raw in found]

    def _used(self) -> Use:
        hours, models = (
            self._source.client.get("/api/usage", by=by, agent=self.row.id, since="24h") for by in ("hour", "model")
        )
        return use_of(hours, models, self._at)

    async def _write(self, lines: list[str]) -> None:
        """Adds the new lines, so that a user who has scrolled up stays there; another beginning is another log."""
        if lines == self._said:
            return
        log = self._log
        known = new_from(self._said, lines)
        if known == 0:
            log.clear()
        self._said = lines
        for number, text in enumerate(lines[known:], 1):
            log.write(Text(text), scroll_end=log.is_vertical_scroll_end)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)


def log_line(raw: bytes, *, unicode: bool) -> str:
    r"""A line of the log as it is shown, LINE_MAX columns of it at most; so what follows it costs nothing.

    >>> log_line(b"a\tb\x1b[2J\r\n", unicode=True), log_line(b"x" * 9_000_000, unicode=True)[-3:]
    ('a b\\x1b[2J', 'xx…')
    """
    text = one_line(raw[:LINE_MAX].decode(errors="replace").rstrip("\r\n"), unicode=unicode)
    if len(raw) <= LINE_MAX and len(text) <= LINE_MAX:
        return text
    return text[: LINE_MAX - 1].rstrip("\ufffd") + ("…" if unicode else "~")


def new_from(before: list[str], after: list[str]) -> int:
    """Number of lines at the beginning of `after` that are the end of `before`: the longest such overlap.

    >>> new_from(["a", "b", "c"], ["b", "c", "d"]), new_from(["a"], ["x"]), new_from([], ["x"])
    (2, 0, 0)
    """
    for start in range(len(before)):
        tail = before[start:]
        if tail == after[: len(tail)]:
            return len(tail)
    return 0
