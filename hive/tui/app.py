"""The application of `hive top`: looks once a second, shows it, and carries out what a key asks for."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import Footer, Input, Static

from hive.control.client import path_of
from hive.errors import HiveError
from hive.tui.cells import event_line, head_lines, one_line
from hive.tui.screens.agent import AgentPage
from hive.tui.screens.backend import Backends
from hive.tui.screens.confirm import Confirm
from hive.tui.screens.keys import Keys
from hive.tui.snapshot import AgentRow, Snapshot
from hive.tui.source import Source
from hive.tui.widgets.agent_table import AgentTable

ACT_S = 600.0
"""A pause waits for a busy agent as long as the daemon's `pause_timeout_s` says."""
EVENT_LINES = 4
TINY_ROWS = 14
"""A terminal with fewer lines shows the table alone."""
QUESTIONS = {
    "stop": "Stop {name}? What it has in memory is lost.",
    "remove": "Remove {name} and its files?",
}


class Top(App[int]):
    """`first`: a look that was taken already, so that the first paint has something to show."""

    TITLE = "hive top"
    CSS = """
    Screen { layers: base; }
    #head { height: auto; padding: 0 0 1 0; text-wrap: nowrap; text-overflow: ellipsis; }
    #problems { height: auto; max-height: 3; color: #EF4444; text-style: bold; display: none; }
    #events { text-wrap: nowrap; text-overflow: ellipsis; height: 5; border-top: solid $foreground 30%; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    .tiny #events, .tiny #head { display: none; }
    .tiny #problems { max-height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    Confirm, Keys, Backends { align: center middle; }
    .box { width: 64; max-width: 95%; height: auto; max-height: 90%; border: solid $foreground 50%; padding: 0 1;
           background: $surface; }
    .row { height: auto; padding: 1 0; }
    .row Button { margin: 0 2 0 0; }
    Button.yellow { color: #EAB308; } Button.red { color: #EF4444; } Button.green { color: #22C55E; }
    #title { text-style: bold reverse; height: 1; }
    #facts { height: auto; }
    #rates { height: 1; margin: 1 0; color: #22C55E; }
    #log { height: 1fr; border-top: solid $foreground 30%; }
    #which { height: auto; max-height: 10; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter"),
        Binding("p", "verb('pause')", "Pause"),
        Binding("r", "verb('resume')", "Resume"),
        Binding("s", "verb('start')", "Start"),
        Binding("S", "verb('stop')", "Stop"),
        Binding("x", "verb('remove')", "Remove"),
        Binding("b", "backend", "Switch"),
        Binding("space", "hold", "Hold", show=False),
        Binding("question_mark", "keys", "Keys"),
        Binding("escape", "end_filter", "End the filter", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self, source: Source, first: Snapshot, *, interval_s: float = 1.0, readonly: bool = False, unicode: bool = True
    ) -> None:
        super().__init__()
        self._source = source
        self.snapshot = first
        self._interval_s = interval_s
        self._readonly = readonly
        self._unicode = unicode
        self._looking = self._held = False

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="problems", markup=False)
        yield AgentTable(unicode=self._unicode, id="agents")
        yield Input(id="filter", placeholder="part of a name, state, tenant or model; ! before it: all others")
        yield Static(id="events", markup=False)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self._table.focus()
        self._show(self.snapshot)
        self.set_interval(self._interval_s, self._tick)

    @property
    def _main(self) -> Any:
        return self.screen_stack[0]

    @property
    def _table(self) -> AgentTable:
        return self._main.query_one("#agents", AgentTable)  # type: ignore[no-any-return]

    def on_resize(self, event: Resize) -> None:
        self._main.set_class(event.size.height < TINY_ROWS, "tiny")

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
            self._show(await asyncio.to_thread(self._source.look))
        except HiveError as error:
            since = time.strftime("%H:%M:%S", time.localtime(self.snapshot.at))
            self._complain([f"{error.message}; this is how it was at {since}", error.hint])
        finally:
            self._looking = False

    def _show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        lines = [one_line(line, unicode=self._unicode) for line in head_lines(snapshot)]
        self._main.query_one("#head", Static).update("\n".join(lines))
        warning = "" if snapshot.backend is None else snapshot.backend.warning
        self._complain([*snapshot.problems, warning])
        self._table.show(snapshot.agents)
        events = [event_line(event.at, event.kind, event.text) for event in snapshot.events[-EVENT_LINES:]]
        self._main.query_one("#events", Static).update(
            "\n".join(one_line(line, unicode=self._unicode) for line in reversed(events))
        )
        for screen in self.screen_stack:
            if isinstance(screen, AgentPage) and screen.is_mounted:
                screen.show(snapshot)

    def _complain(self, problems: list[str]) -> None:
        said = self._main.query_one("#problems", Static)
        lines = [one_line(problem, unicode=self._unicode) for problem in problems if problem]
        said.display = bool(lines)
        said.update("\n".join(lines))

    # --- keys ----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        if action == "filter" and self.is_running and self.screen is not self._main:
            return False
        return not (self._readonly and action in ("verb", "backend"))

    def action_keys(self) -> None:
        self.push_screen(Keys(self.screen.active_bindings))

    def action_hold(self) -> None:
        """What is shown stays, until the next press."""
        self._held = not self._held
        self.notify("held: space goes on" if self._held else "going on")

    def action_filter(self) -> None:
        if self.screen is self._main:
            box = self._main.query_one("#filter", Input)
            box.display = True
            box.focus()

    def action_end_filter(self) -> None:
        box = self._main.query_one("#filter", Input)
        if self.screen is self._main and box.display:
            box.value = ""
            box.display = False
            self._table.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._table.filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = bool(event.value)
        self._table.focus()

    def on_agent_table_opened(self, event: AgentTable.Opened) -> None:
        page = AgentPage(event.row, self._source, unicode=self._unicode, may_act=not self._readonly)
        self.push_screen(page)

    def on_agent_page_wanted(self, event: AgentPage.Wanted) -> None:
        self.action_verb(event.verb)

    def action_backend(self) -> None:
        if not self._refused():
            self.push_screen(Backends(self._source, unicode=self._unicode))

    def action_verb(self, verb: str) -> None:
        """Of the agent whose page is open, else of the selected one; asked about first where something is lost."""
        row = self.screen.row if isinstance(self.screen, AgentPage) else self._table.selected
        if row is None or self._refused():
            return
        if verb in QUESTIONS:
            question = QUESTIONS[verb].format(name=row.name)

            def answered(yes: bool | None) -> None:
                if yes:
                    self._act(row, verb)

            self.push_screen(Confirm(question), answered)
        else:
            self._act(row, verb)

    def _refused(self) -> bool:
        if not self.snapshot.is_live:
            self.notify("the daemon is down: nothing can be changed", severity="warning")
        return not self.snapshot.is_live

    @work
    async def _act(self, row: AgentRow, verb: str) -> None:
        try:
            view = await asyncio.to_thread(self._ask_for, row, verb)
        except HiveError as error:
            self.notify(f"{error.message}\n{error.hint}".rstrip(), severity="error", markup=False)
            return
        self.notify(f"{row.name} is {view.get('status', 'removed')}", markup=False)
        self.look()

    def _ask_for(self, row: AgentRow, verb: str) -> dict[str, Any]:
        client = self._source.client
        if verb == "remove":
            return client.delete(path_of(row.id), timeout_s=ACT_S)
        return client.post(path_of(row.id, verb), {} if verb == "pause" else None, timeout_s=ACT_S)
