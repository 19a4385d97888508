"""The page of leases: what holds the memory of each GPU, which leases hold some and which wait, and ending one."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import quote

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Footer, OptionList
from textual.widgets.option_list import Option

from hive.errors import HiveError
from hive.tui.cells import one_line
from hive.tui.gpus import Drawing
from hive.tui.history import History
from hive.tui.leases import (
    LeaseLine,
    end_question,
    heads,
    holder_lines,
    lease_cells,
    lease_facts,
    lease_title,
    leases_of,
    numbers_of,
)
from hive.tui.lines import Line, LinePart, line, text_of
from hive.tui.screens.confirm import ConfirmScreen
from hive.tui.snapshot import Answer, Snapshot
from hive.tui.source import Source
from hive.tui.threads import in_thread
from hive.tui.widgets.bars import use_whole_cells
from hive.tui.widgets.colours import styles
from hive.tui.widgets.pane import Pane

LEASES = "/api/leases"
END_S = 60.0
LOW_ROWS = 18
"""A terminal with fewer lines shows no memory."""
NOBODY = "nobody holds a lease, and nobody waits for one"
ODD = (LookupError, TypeError, ValueError)
"""Errors raised by an answer of unexpected shape, a daemon's of another version: they do not end the page."""


class LeaseTable(OptionList):
    """The leases, one selected by its id: it stays selected while others come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "cursor_up", "Up", show=False),
        Binding("down,j", "cursor_down", "Down", show=False),
        Binding("home,g", "first", "First", show=False),
        Binding("end,G", "last", "Last", show=False),
    ]


class LeaseScreen(Screen[None]):
    """Shows the leases at each look; what a daemon that is away said last stays, and the page says that it is old."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "end", "End the lease"),
        Binding("escape", "app.pop_screen", "Back"),
    ]
    DEFAULT_CSS = """
    LeaseScreen #memory { margin: 1 0; }
    LeaseScreen.low #memory { display: none; }
    LeaseScreen LeaseTable, LeaseScreen LeaseTable:focus { height: 1fr; border: none; padding: 0;
        background: $background; overflow-x: hidden; text-wrap: nowrap; }
    LeaseScreen LeaseTable > .option-list--option { padding: 0; }
    LeaseScreen #lease { margin: 1 0 0 0; }
    LeaseScreen.low #lease { margin: 0; }
    """
    AUTO_FOCUS = "#leases"

    def __init__(
        self,
        snapshot: Snapshot,
        history: History,
        source: Source,
        *,
        unicode: bool,
        may_act: bool,
        is_held: bool = False,
    ) -> None:
        """`is_held`: there will be no other look while this page is open."""
        super().__init__()
        self._snapshot = snapshot
        self._history = history
        self._source = source
        self._unicode = unicode
        self._may_act = may_act
        self._is_held = is_held
        self._leases: list[LeaseLine] | None = None
        self._wrong = ""
        self._reading = False
        # Kept by name: a look may come before they are mounted, or after.
        self._panes = {name: Pane(unicode=unicode, id=name) for name in ("title", "memory", "heads", "lease")}
        self._table = LeaseTable(id="leases")
        self._drawn: list[tuple[str, str]] = []

    def compose(self) -> ComposeResult:
        yield self._panes["title"]
        yield self._panes["memory"]
        yield self._panes["heads"]
        yield self._table
        yield self._panes["lease"]
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        if not self._unicode:
            use_whole_cells(self._table)
        self._draw()
        self._read()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.height < LOW_ROWS, "low")
        self._draw()

    @property
    def selected(self) -> LeaseLine | None:
        """The lease that is selected; None where there is none."""
        at, leases = self._table.highlighted, self._leases or []
        if at is None or at >= len(self._drawn):
            return None
        return next((lease for lease in leases if lease.id == self._drawn[at][0]), None)

    def show(self, snapshot: Snapshot) -> None:
        """The next look."""
        came_or_went = snapshot.is_live is not self._snapshot.is_live
        self._snapshot = snapshot
        if came_or_went:
            self.refresh_bindings()
        self._draw()
        if snapshot.is_live:
            self._read()

    @work
    async def _read(self) -> None:
        """Asks for the leases; what cannot be had now is so next time."""
        if self._reading:
            return
        self._reading = True
        try:
            self._leases, self._wrong = leases_of(await in_thread(self._source.client.get, LEASES)), ""
        except HiveError as error:
            self._wrong = error.message
        except ODD as error:
            self._wrong = f"what was answered cannot be understood ({error!r})"
        finally:
            self._reading = False
        if self.is_mounted:
            self.refresh_bindings()
            self._draw()

    # --- drawing -------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        snapshot, unicode, height = self._snapshot, self._unicode, self.app.size.height
        is_away = not snapshot.is_live or bool(self._wrong)
        title = lease_title(self._leases, is_held=self._is_held, is_away=is_away)
        self._panes["title"].show(lambda width: [line(LinePart(f" {title:<{width - 1}}", "mark"))])

        def memory(width: int) -> list[Line]:
            wrong = self._wrong or ("" if snapshot.is_live else "the daemon is away")
            told = [line(LinePart(f"! {wrong}", "bad"))] if wrong else []
            if not snapshot.is_live:
                return told
            drawing = Drawing(width, snapshot.backend, self._history.busy_percent_of, unicode)
            return [*told, *holder_lines(snapshot.pool, snapshot.gpus, max(2, height // 4), drawing)]

        self._panes["memory"].show(memory)
        self._panes["heads"].show(lambda width: [line(LinePart(heads(width), "bold"))])
        self._list()
        self._tell()

    def _list(self) -> None:
        """Only what changed is drawn anew, and where the rows are others the selected one is found again."""
        width, numbers = max(20, (self._table.size.width or self.app.size.width) - 1), self._numbers
        rows = [(lease.id, lease_cells(lease, numbers, width, unicode=self._unicode)) for lease in self._leases or ()]
        if not rows:
            rows = [("", line(NOBODY if self._leases is not None else ""))]
        drawn = [(id, text_of([parts])) for id, parts in rows]
        if drawn == self._drawn:
            return
        chosen, before, at = self.selected, self._drawn, self._table.highlighted or 0
        self._drawn = drawn
        ids = [id for id, _ in drawn]
        if ids == [id for id, _ in before]:
            for number, (_, parts) in enumerate(rows):
                if before[number] != drawn[number]:
                    self._table.replace_option_prompt_at_index(number, self._text(parts))
            return
        self._table.clear_options()
        self._table.add_options([Option(self._text(parts), disabled=not id) for id, parts in rows])
        if ids[0]:
            is_there = chosen is not None and chosen.id in ids
            self._table.highlighted = ids.index(chosen.id) if chosen and is_there else min(at, len(ids) - 1)

    @property
    def _numbers(self) -> dict[str, str]:
        return numbers_of(self._snapshot.gpus)

    def _text(self, parts: Line) -> Text:
        of = styles(with_colours=not self.app.no_color)
        return Text.assemble(*((text, of[role]) for text, role in parts), no_wrap=True, overflow="crop")

    def _tell(self) -> None:
        lease, now = self.selected, self._snapshot.at
        most = 2 if self.app.size.height < LOW_ROWS else 3

        def told(width: int) -> list[Line]:
            if lease is None:
                return []
            lines = lease_facts(lease, width, now=now, most=most)
            return [*lines, *([line()] * (most - len(lines)))]  # of one height, so that no selected row is pushed out

        self._panes["lease"].show(told)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        self._tell()

    # --- keys ----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        return action != "end" or (self._may_act and self._snapshot.is_live and self.selected is not None)

    def action_end(self) -> None:
        """Asks first."""
        lease = self.selected
        if lease is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._end(lease)

        self.app.push_screen(ConfirmScreen(end_question(lease)), answered)

    @work
    async def _end(self, lease: LeaseLine) -> None:
        try:
            answer: Answer = await in_thread(lambda: self._ask_to_end(lease.id))
        except HiveError as error:
            said = [one_line(part) for part in (error.message, error.hint) if part]
            self.notify("\n".join(said), severity="error", markup=False)
            return
        self.notify(f"{lease.id} is {answer.get('state', 'ended')}", markup=False)
        self._read()

    def _ask_to_end(self, id: str) -> Answer:
        return self._source.client.delete(f"{LEASES}/{quote(id, safe='')}", timeout_s=END_S, end=1)
