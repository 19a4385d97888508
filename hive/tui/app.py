"""The application of `hive top`: looks once a second, shows it, and carries out what a key asks for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple

from textual import work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.containers import Container
from textual.events import Resize
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList

from hive.client.client import path_of
from hive.errors import HiveError
from hive.tui import panes
from hive.tui.cells import COLUMNS
from hive.tui.gpus import Drawing
from hive.tui.history import History
from hive.tui.lines import Line
from hive.tui.screens.agent import AgentScreen
from hive.tui.screens.backend import BackendScreen
from hive.tui.screens.confirm import ConfirmScreen
from hive.tui.screens.keys import Keys, told
from hive.tui.screens.leases import LeaseScreen
from hive.tui.snapshot import AgentLine, Snapshot
from hive.tui.source import Source
from hive.tui.threads import in_thread
from hive.tui.widgets.agent_table import AgentTable
from hive.tui.widgets.bars import use_whole_cells
from hive.tui.widgets.pane import Pane

ACT_S = 600.0
"""A pause waits for a busy agent as long as the daemon's `pause_timeout_s` says."""
JUMP_SHOWN_S = 60.0
"""Time for which the screen says that the clock was set."""
TINY_ROWS, LOW_ROWS, SHORT_ROWS, TALL_ROWS = 14, 20, 30, 46
"""A terminal with fewer lines shows the table alone, or not all of what is around it, or less of each."""
WIDE_COLUMNS, SLIM_COLUMNS = 150, 64
"""From so many columns on the panes stand beside each other; with fewer than these the curve of tokens has no room."""
QUESTIONS = {
    "stop": "Stop {name}? What it has in memory is lost.",
    "remove": "Remove {name} and its files?",
}


class Room(NamedTuple):
    """Lines each pane may have."""

    gpus: int
    flow: int
    events: int


def room_of(rows: int) -> Room:
    """On a terminal of so many lines.

    >>> room_of(24), room_of(40).gpus
    (Room(gpus=3, flow=2, events=3), 8)
    """
    if rows < SHORT_ROWS:
        return Room(gpus=3, flow=2, events=3)
    return Room(gpus=8, flow=4, events=4) if rows < TALL_ROWS else Room(gpus=16, flow=6, events=6)


class Top(App[int]):
    """`first`: a look that was taken already, so that the first paint has something to show."""

    TITLE = "hive top"
    CSS = """
    Screen { layers: base; }
    AgentTable, RichLog, OptionList, VerticalScroll {
        scrollbar-color: $foreground 40%; scrollbar-color-hover: $foreground 60%; scrollbar-color-active: $foreground;
        scrollbar-background: $background; scrollbar-background-hover: $background;
        scrollbar-background-active: $background; scrollbar-size-vertical: 1; }
    #problems { max-height: 4; }
    #panes { height: auto; margin: 0 0 1 0; } .short #panes { margin: 0; }
    #flow { height: auto; layout: horizontal; }
    #tokens { width: 1fr; margin: 0 1 0 0; } #queue { width: 44; }
    .wide #panes { layout: horizontal; }
    .wide #gpus { width: 1fr; margin: 0 1 0 0; } .wide #flow { width: 1fr; }
    .wide.gpus #flow { width: 68; }
    .slim #tokens { display: none; } .slim #queue { width: 1fr; }
    .low #events, .low #flow { display: none; }
    .tiny #events, .tiny #head, .tiny #panes { display: none; }
    .tiny #problems { max-height: 1; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    ConfirmScreen, Keys, BackendScreen { align: center middle; }
    .box { width: 64; max-width: 95%; height: auto; max-height: 90%; border: solid $foreground 50%; padding: 0 1;
           background: $surface; }
    .ascii .box { border: ascii $foreground 50%; }
    .row { height: auto; padding: 1 0; }
    Button { min-width: 12; margin: 0 2 0 0; background: $foreground 10%; }
    Button.yellow { color: #EAB308; } Button.red { color: #EF4444; } Button.green { color: #22C55E; }
    Button:nocolor { color: $foreground; }
    #which { height: auto; max-height: 10; border: none; padding: 0; }
    .ascii Toast, .ascii CommandPalette #--input, .ascii CommandPalette CommandList { border: none; }
    .ascii CommandPalette SearchIcon { display: none; }
    Keys .box { width: 78; } #keys { layout: horizontal; height: auto; } #keys Static { width: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("p", "verb('pause')", "Pause"),
        Binding("r", "verb('resume')", "Resume"),
        Binding("s", "verb('start')", "Start"),
        Binding("S", "verb('stop')", "Stop"),
        Binding("x", "verb('remove')", "Remove"),
        Binding("b", "backend", "Switch"),
        Binding("l", "leases", "Leases", show=False),
        Binding("y", "copy_id", "Copy the agent's id", show=False),
        Binding("space", "hold", "Hold what is shown", show=False),
        Binding("question_mark", "keys", "Keys"),
        Binding("escape", "end_filter", "End the filter"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self, source: Source, first: Snapshot, *, interval_s: float = 1.0, readonly: bool = False, unicode: bool = True
    ) -> None:
        super().__init__()
        self._source = source
        self.snapshot = first
        self.history = History()
        self._interval_s = interval_s
        self._readonly = readonly
        self._unicode = unicode
        self._looking = self._held = False
        self._said: list[str] = []
        self._looked_at = source.looked_at
        self._jump = (0.0, "")
        # Kept by name: a look that ends while the application does finds them without their screen.
        names = ("head", "problems", "gpus", "tokens", "queue", "events")
        self._panes = {name: Pane(unicode=unicode, id=name) for name in names}
        self._table = AgentTable(unicode=unicode, id="agents")
        self._filter = Input(id="filter", placeholder="part of a name, state, tenant or model; ! before it: all others")
        self._main: Screen[Any] | None = None

    def compose(self) -> ComposeResult:
        yield self._panes["head"]
        yield self._panes["problems"]
        with Container(id="panes"):
            yield self._panes["gpus"]
            with Container(id="flow"):
                yield self._panes["tokens"]
                yield self._panes["queue"]
        yield self._table
        yield self._filter
        yield self._panes["events"]
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self._main = self.screen
        self.set_class(not self._unicode, "ascii")
        self._table.focus()
        self._show(self.snapshot)
        self.set_interval(self._interval_s, self._tick)

    def on_resize(self, event: Resize) -> None:
        self._fit(event.size)
        self._draw()

    def _fit(self, size: Size) -> None:
        """Tells the style sheet the size class of the terminal: once for all of them, as it restyles everything."""
        if self._main is None:
            return
        width, height = size
        fits = {
            "tiny": height < TINY_ROWS,
            "low": height < LOW_ROWS,
            "short": height < SHORT_ROWS,
            "wide": width >= WIDE_COLUMNS,
            "slim": width < SLIM_COLUMNS,
            "gpus": bool(self.snapshot.gpus or self.snapshot.pool),
        }
        changed = {name: fit for name, fit in fits.items() if self._main.has_class(name) is not fit}
        for name, fit in changed.items():
            self._main.set_class(fit, name, update=False)
        if changed:
            self._main.update_node_styles()

    # --- looking -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._held:
            self.look()

    @work
    async def look(self) -> None:
        """One more look, unless one is under way. What goes wrong is shown above what was seen last."""
        if self._looking:
            return
        self._looking = True
        try:
            self._show(await in_thread(self._source.look, self._looked_for()))
        except HiveError as error:
            self._complain(error.message, error.hint)
        except Exception as error:  # an answer of another version, a broken record: the view stays up
            self._complain(f"what was found cannot be understood ({type(error).__name__}: {error})", "")
        finally:
            self._looking = False

    def _looked_for(self) -> set[str]:
        """The agents on the screen now: about these everything is asked anew."""
        pages = {screen.row.id for screen in self.screen_stack if isinstance(screen, AgentScreen)}
        return pages | {row.id for row in self._table.in_sight}

    def _complain(self, what: str, hint: str) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(self.snapshot.at))
        self._said = [f"{what}; this is how it was at {since}", hint]
        self._draw()

    def _show(self, snapshot: Snapshot) -> None:
        """The next look, everywhere."""
        now, looked_at = time.monotonic(), self._source.looked_at
        # By when they were taken: what lies between that and here, as the loading of this, is no jump of the clock.
        elapsed_s = None if looked_at is None or self._looked_at is None else looked_at - self._looked_at
        if elapsed_s is not None and (jump_s := panes.jumped_s(self.snapshot.at, snapshot.at, elapsed_s)):
            self._jump = (now, panes.jump_text(jump_s))
        self._looked_at = looked_at
        came_or_went = snapshot.is_live is not self.snapshot.is_live
        self.snapshot = snapshot
        if came_or_went:  # what can be done, and is offered, is another
            self.refresh_bindings()
        self.history.add(snapshot)
        self._said = panes.wrong_with(snapshot)
        if now < self._jump[0] + JUMP_SHOWN_S:
            self._said.append(self._jump[1])
        self._table.show(snapshot.agents)
        self._draw()
        for screen in self.screen_stack:
            if isinstance(screen, AgentScreen | LeaseScreen):
                screen.show(snapshot)

    def _draw(self) -> None:
        """Everything but the table, as it was seen last and as the terminal is now."""
        snapshot, room, unicode = self.snapshot, room_of(self.size.height), self._unicode
        rates = self.history.tokens_per_s()
        self._fit(self.size)
        self._panes["head"].show(panes.head_lines(snapshot, is_held=self._held))
        said = self._said
        self._panes["problems"].show(lambda width: panes.problem_lines(said, width))

        def gpus(width: int) -> list[Line]:
            drawing = Drawing(width, snapshot.backend, self.history.busy_percent_of, unicode)
            return panes.memory_lines(snapshot, room.gpus, drawing)

        self._panes["gpus"].show(gpus, title=panes.memory_title(snapshot))
        self._panes["tokens"].show(
            lambda width: panes.tokens_lines(rates, width, room.flow, unicode=unicode), title=panes.tokens_title(rates)
        )
        self._panes["queue"].show(
            lambda width: panes.waiting_lines(snapshot, width, room.flow, unicode=unicode),
            title=panes.queue_title(snapshot.queue, snapshot.backend),
        )
        self._panes["events"].show(panes.event_lines(snapshot.events, room.events), title="events")

    # --- keys ----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        # Of the table alone: no other screen says that it is held.
        if action in ("filter", "end_filter", "hold", "leases") and self.is_running and not self._is_table_in_front:
            return False
        if action in ("verb", "backend", "copy_id") and any(isinstance(one, LeaseScreen) for one in self.screen_stack):
            return False  # they are about an agent, and there is none in sight
        if action == "end_filter" and self.is_running:
            return bool(self._filter.display)
        return action not in ("verb", "backend") or (not self._readonly and self.snapshot.is_live)

    @property
    def _is_table_in_front(self) -> bool:
        """Whether the table is in front; also behind the palette, which offers what a key would do there."""
        front = [screen for screen in self.screen_stack if not isinstance(screen, CommandPalette)]
        return front[-1:] == [self._main]

    def get_key_display(self, binding: Binding) -> str:
        """The name of the key in the footer."""
        said = super().get_key_display(binding)
        return said if self._unicode or said.isascii() else binding.key

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The commands of the palette: all that a key does here, and the order of the table by each column."""
        for what, keys, found in told(screen.active_bindings):
            if found.binding.action.partition("(")[0] not in ("command_palette", "move", "move_page"):
                yield SystemCommand(what, f"key {keys}", partial(self.run_action, found.binding.action, found.node))
        if screen is self._main:
            for column in COLUMNS:
                yield SystemCommand(f"Sort by {column.head}", "keys < and >", partial(self._table.sort_by, column.head))

    def action_command_palette(self) -> None:
        if CommandPalette.is_open(self):  # type: ignore[arg-type]
            return
        palette = CommandPalette(placeholder="part of what to do", id="--command-palette")
        self.push_screen(palette)
        if not self._unicode:
            palette.call_later(lambda: use_whole_cells(palette.query_one(OptionList)))

    def action_keys(self) -> None:
        self.push_screen(Keys(self.screen.active_bindings))

    def action_hold(self) -> None:
        """Keeps the present screen until the next press."""
        self._held = not self._held
        self._draw()

    def action_copy_id(self) -> None:
        """Into the clipboard, where the terminal lets a program do that."""
        if (row := self._row) is not None:
            self.copy_to_clipboard(row.id)
            self.notify(f"copied: {row.id}", markup=False)

    def action_filter(self) -> None:
        if self.screen is self._main:
            self._filter.display = True
            self._filter.focus()
            self.refresh_bindings()

    def action_end_filter(self) -> None:
        self._filter.value = ""
        self._filter.display = False
        self._table.focus()
        self.refresh_bindings()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input is self._filter:
            self._table.filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input is not self._filter:
            return
        event.input.display = bool(event.value)
        self._table.focus()
        self.refresh_bindings()

    def on_agent_table_opened(self, event: AgentTable.Opened) -> None:
        page = AgentScreen(
            event.row,
            self.snapshot,
            self.history,
            self._source,
            unicode=self._unicode,
            may_act=not self._readonly,
            is_held=self._held,
        )
        self.push_screen(page)

    def on_agent_screen_wanted(self, event: AgentScreen.Wanted) -> None:
        self.action_verb(event.verb)

    def action_leases(self) -> None:
        page = LeaseScreen(
            self.snapshot,
            self.history,
            self._source,
            unicode=self._unicode,
            may_act=not self._readonly,
            is_held=self._held,
        )
        self.push_screen(page)

    def action_backend(self) -> None:
        self.push_screen(BackendScreen(self._source, unicode=self._unicode))

    @property
    def _row(self) -> AgentLine | None:
        """The agent of the open page, else the selected one."""
        return self.screen.row if isinstance(self.screen, AgentScreen) else self._table.selected

    def action_verb(self, verb: str) -> None:
        """Asks first where something is lost."""
        row = self._row
        if row is None or not self.snapshot.is_live:  # a button that was pressed as the daemon went
            return
        if verb in QUESTIONS:
            question = QUESTIONS[verb].format(name=row.name)

            def answered(yes: bool | None) -> None:
                if yes:
                    self._act(row, verb)

            self.push_screen(ConfirmScreen(question), answered)
        else:
            self._act(row, verb)

    @work
    async def _act(self, row: AgentLine, verb: str) -> None:
        try:
            view = await in_thread(self._ask_for, row, verb)
        except HiveError as error:
            self.notify(f"{error.message}\n{error.hint}".rstrip(), severity="error", markup=False)
            return
        self.notify(f"{row.name} is {view.get('status', 'removed')}", markup=False)
        self._tick()

    def _ask_for(self, row: AgentLine, verb: str) -> dict[str, Any]:
        client = self._source.client
        if verb == "remove":
            return client.delete(path_of(row.id), timeout_s=ACT_S)
        return client.post(path_of(row.id, verb), {} if verb == "pause" else None, timeout_s=ACT_S)
