"""Another inference server: which one, whether really, and how far it is."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar
from urllib.parse import quote

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from hive.errors import DependencyDown, HiveError, TimedOut
from hive.tui.cells import one_line, span
from hive.tui.screens.confirm import ConfirmScreen
from hive.tui.source import Source
from hive.tui.threads import in_thread

ODD = (LookupError, TypeError, ValueError)
"""Errors raised by an answer of unexpected shape, a daemon's of another version: they do not end the screen."""
LOOK_S = 0.5
SWITCH_S = 60.0
CANCEL_S = 600.0


class BackendScreen(ModalScreen[None]):
    """A list to choose from, then the switch itself. `esc` leaves; a switch goes on, `c` ends it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Back"),
        Binding("c", "cancel", "Cancel the switch"),
    ]

    def __init__(self, source: Source, *, unicode: bool) -> None:
        super().__init__()
        self._source = source
        self._unicode = unicode
        self._found: list[dict[str, Any]] = []
        self._job = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static("Switch the inference server to", id="said", markup=False)
            yield OptionList(id="which")

    def on_mount(self) -> None:
        self._list()

    def _say(self, text: str) -> None:
        self.query_one("#said", Static).update(one_line(text, unicode=self._unicode))

    @work
    async def _list(self) -> None:
        try:
            client = self._source.client
            under_way = (await in_thread(client.get, "/api/system/inference"))["switch"]
            if under_way is not None:
                await self._follow(under_way)
                return
            self._offer((await in_thread(client.get, "/api/system/backends"))["backends"])
        except (HiveError, *ODD) as error:
            self._fail(error)

    def _offer(self, found: list[dict[str, Any]]) -> None:
        self._found = found
        which = self.query_one("#which", OptionList)
        for number, row in enumerate(self._found):
            answers = "answers" if row["answers"] else "does not answer"
            used = ", in use" if row["in_use"] else ""
            text = f"{row['backend']} at {row['unit'] or row['address']} ({answers}{used})"
            which.add_option(Option(one_line(text, unicode=self._unicode).replace("[", r"\["), id=str(number)))
        if all(row["in_use"] for row in self._found):
            self._say("no other inference server answers; `hive backend switch URL` names one")
        which.highlighted = next((number for number, row in enumerate(self._found) if not row["in_use"]), None)
        which.focus()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, HiveError):
            self._say(f"{error.message}. {error.hint}".rstrip(". "))
        else:
            self._say(f"what was answered cannot be understood ({error!r})")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        row = self._found[event.option_index]
        to = row["backend"] if row["unit"] else row["address"]  # of two of a kind the kind names either
        question = (
            f"Switch to {row['backend']} at {row['unit'] or row['address']}? What is under way at the old one"
            " finishes or is cut, others wait."
        )

        def answered(yes: bool | None) -> None:
            if yes:
                self._switch(to)

        self.app.push_screen(ConfirmScreen(question), answered)

    @work
    async def _switch(self, to: str) -> None:
        try:
            post = self._source.client.post
            await self._follow(await in_thread(post, "/api/system/inference", {"backend": to}, timeout_s=SWITCH_S))
        except (HiveError, *ODD) as error:
            self._fail(error)

    async def _follow(self, job: dict[str, Any]) -> None:
        """Says how far a switch is until it has ended, and how. A daemon that is away meanwhile carries it on."""
        self.query_one("#which").display = False
        self._job = job["id"]
        while job["state"] == "running":
            left = f" (about {span(job['eta_s'])} left)" if job["eta_s"] else ""
            self._say(f"{job['progress']}{left}. esc leaves it alone, c goes back.")
            await asyncio.sleep(LOOK_S)
            try:
                job = await in_thread(self._source.client.get, f"/api/jobs/{quote(self._job)}")
            except (DependencyDown, TimedOut) as silent:
                self._fail(silent)
                await asyncio.sleep(LOOK_S)
        self._job = ""
        self._say(ended(job))

    @work
    async def action_cancel(self) -> None:
        if self._job:
            try:
                path = f"/api/jobs/{quote(self._job)}"
                await in_thread(self._source.client.delete, path, timeout_s=CANCEL_S)
            except (HiveError, *ODD) as error:
                self._fail(error)


def ended(job: dict[str, Any]) -> str:
    """
    >>> ended({"state": "done", "result": {"changed": True, "backend": "vllm", "took_s": 31.0}})
    'vllm is in use now, after 31s'
    >>> ended({"state": "failed", "error": {"message": "it failed; demo is active again", "hint": "look there"}})
    'failed: it failed; demo is active again. look there'
    """
    if job["state"] != "done":
        return f"{job['state']}: {job['error']['message']}. {job['error']['hint']}".rstrip(". ")
    result = job["result"]
    if not result["changed"]:
        return f"{result['backend']} is in use already"
    return f"{result['backend']} is in use now, after {span(result['took_s'])}"
