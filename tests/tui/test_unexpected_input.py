"""Acts of an agent, a daemon or a clock against the viewer: each of these ended the view, froze it or misled it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.command import CommandPalette
from textual.widgets import OptionList, RichLog, Static

from hive.client.client import NO_HEADERS, Client
from hive.errors import TimedOut
from hive.tui import panes
from hive.tui.app import Top
from hive.tui.cells import one_line, size
from hive.tui.charts import short
from hive.tui.screens import agent as page_module
from hive.tui.screens import backend as backend_module
from hive.tui.screens.agent import LINE_MAX, AgentScreen
from hive.tui.screens.backend import BackendScreen
from hive.tui.snapshot import EventLine, MemoryLine, Snapshot
from hive.tui.source import Source
from hive.tui.usage import use_of
from tests.control.box import Box
from tests.tui import frozen
from tests.tui.driving import is_in_front, is_main, over, pane, problems, recorded, shown
from tests.tui.frozen import Frozen, FrozenClient
from tests.tui.test_opening import terminal
from tests.waiting import until


class Answering(Frozen):
    """Over a client whose answers a test chooses: path → what it says, or raises."""

    def __init__(self, *looks: Snapshot, answers: dict[str, Any] | None = None, log: list[bytes] | None = None) -> None:
        super().__init__(*looks)
        self.answers = answers or {}
        self.log = log or []
        self.let_go = threading.Event()
        self.posted = 0

    @property
    def client(self) -> Client:
        return _Answering(self)


class _Answering(FrozenClient):
    def __init__(self, source: Answering) -> None:
        super().__init__(Path("/nowhere"))
        self._source = source

    def lines(self, path: str, **query: Any) -> Generator[bytes, None, None]:
        yield from self._source.log

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        if path not in self._source.answers:
            return super().get(path, **query)
        answer = self._source.answers[path]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def post(
        self,
        path: str,
        body: object = None,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        op_token: str = "",
    ) -> dict[str, Any]:
        self._source.posted += 1
        if path in self._source.answers:
            return self.get(path)
        self._source.let_go.wait()
        return {"status": "paused"}


# --- the log -----------------------------------------------------------------------------------------------------


async def test_a_log_without_a_lines_end_is_cut_before_it_is_drawn_and_the_keys_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megabytes in one line went through Rich on the screen's own thread, at every look: 4 MB of them took 8 s, and
    neither esc nor q was heard."""
    cleaned: list[tuple[int, bool]] = []

    def noted(text: str, **named: Any) -> str:
        cleaned.append((len(text), threading.current_thread() is threading.main_thread()))
        return one_line(text, **named)

    monkeypatch.setattr(page_module, "one_line", noted)
    source = Answering(frozen.look(), log=[b"first\n", b"\x01" * 1_000_000])
    async with shown(source) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        log = app.screen.query_one(RichLog)
        await until(lambda: len(log.lines) == 2)
        assert log.lines[0].text.strip() == "first"
        assert log.lines[1].text.startswith(r"\x01\x01")
        assert len(log.lines[1].text) == LINE_MAX
        await pilot.press("escape")
        await is_main(app)
    assert max(length for length, _ in cleaned) <= LINE_MAX
    assert (LINE_MAX, False) in cleaned


# --- verbs -------------------------------------------------------------------------------------------------------


async def test_verbs_that_wait_for_busy_agents_keep_no_look_from_being_taken() -> None:
    """Each took one of the loop's few threads, for as long as its agent was busy; then nothing was looked at."""
    source = Answering(frozen.look())
    async with shown(source) as (app, pilot):
        try:
            for _ in range(40):
                await pilot.press("p")
            await until(lambda: source.posted == 40)
            before = source.taken
            await until(lambda: source.taken > before + 3)
            assert app.is_running
        finally:
            source.let_go.set()


async def test_q_does_not_wait_for_a_verb_that_is_under_way(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the loop waited for its threads: a pause of a busy agent held the shell up for half a minute."""
    await box.create("ann")
    is_asked, let_go = asyncio.Event(), asyncio.Event()

    async def pause(*_: Any, **__: Any) -> None:
        is_asked.set()
        await let_go.wait()

    monkeypatch.setattr(box.life("ann"), "pause", pause)
    with terminal(box.paths.api_socket) as top:
        await asyncio.to_thread(top.until, b"Quit")
        top.press(b"p")
        await asyncio.wait_for(is_asked.wait(), 20)
        top.press(b"q")
        ending = asyncio.ensure_future(asyncio.to_thread(top.ended))
        done, _ = await asyncio.wait({ending}, timeout=15)
        let_go.set()
        assert await ending == 0
        assert done, "it ended only once the pause had"


# --- a daemon of another version, a kernel that says little --------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (MemoryLine(None, None, None, None), "saved"),
        (MemoryLine(64 << 30, None, 16 << 30, None), "saved"),
        (MemoryLine(64 << 30, 32 << 30, None, None), "RAM 32G/64G · saved"),
        (MemoryLine(None, 1, 16 << 30, 8 << 30), "swap 8.0G/16G · saved"),
    ],
)
def test_what_the_kernel_does_not_say_of_memory_is_left_out(memory: MemoryLine, said: str) -> None:
    """None less None: hive top ended where /proc/meminfo lacks a line."""
    text = panes.plain(frozen.look(memory=memory), 100, unicode=True).split("\n")[1]
    assert text.startswith(said)


BACKENDS, INFERENCE, JOB = "/api/system/backends", "/api/system/inference", "/api/jobs/j1"
GOING = {"id": "j1", "state": "running", "progress": "closing the gate", "eta_s": 20}
DONE = {"id": "j1", "state": "done", "result": {"changed": True, "backend": "vllm", "took_s": 31.0}}
ROW = {"backend": "vllm", "address": "http://elsewhere", "unit": "", "in_use": False, "answers": True}


async def says(app: Top, what: str) -> None:
    await until(lambda: what in str(app.screen.query_one("#said", Static).content))


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({INFERENCE: {"switch": None}, BACKENDS: {"backends": [{"backend": "vllm", "answers": True}]}}, "'in_use'"),
        ({INFERENCE: {}}, "'switch'"),
        ({INFERENCE: {"switch": None}, BACKENDS: {"backends": None}}, "TypeError"),
        ({INFERENCE: {"switch": GOING}, JOB: {"id": "j1", "state": "done"}}, "'result'"),
    ],
)
async def test_an_answer_about_backends_that_is_not_understood_is_said(answers: dict[str, Any], said: str) -> None:
    """A name that an answer lacked ended hive top."""
    async with shown(Answering(frozen.look(), answers=answers)) as (app, pilot):
        await pilot.press("b")
        await is_in_front(app, BackendScreen)
        await says(app, "what was answered cannot be understood")
        await says(app, said)
        await pilot.press("escape")
        await is_main(app)


async def test_a_daemon_that_answers_a_switch_oddly_is_said() -> None:
    answers = {INFERENCE: [{"switch": None}, {"job": 7}], BACKENDS: {"backends": [ROW]}}
    async with shown(Answering(frozen.look(), answers=answers)) as (app, pilot):
        await pilot.press("b")
        await is_in_front(app, BackendScreen)
        await until(lambda: app.screen.query_one("#which", OptionList).option_count == 1)
        await pilot.pause()
        await pilot.press("enter", "y")
        await says(app, "what was answered cannot be understood (KeyError('id'))")


async def test_a_switch_is_followed_over_a_daemon_that_hangs_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer that was late ended the following; the switch went on unseen."""
    monkeypatch.setattr(backend_module, "LOOK_S", 0.01)
    answers = {INFERENCE: {"switch": GOING}, JOB: [GOING, TimedOut("Hive did not answer in time"), GOING, DONE]}
    async with shown(Answering(frozen.look(), answers=answers)) as (app, pilot):
        await pilot.press("b")
        await is_in_front(app, BackendScreen)
        await says(app, "vllm is in use now, after 31s")


@pytest.mark.parametrize("number", [1e15, 1e18, 1e30, float("inf")])
def test_no_number_is_too_large_to_be_said(number: float) -> None:
    """StopIteration, from 1e15 tokens and 2^60 bytes on."""
    assert short(number).endswith(("P", "E"))
    assert number == float("inf") or size(int(number) << 10)[-1] in "PE"


# --- holding -----------------------------------------------------------------------------------------------------


async def test_a_page_is_not_held_by_space_and_says_where_the_table_is(box: Box) -> None:
    """Space on a page held what was behind it, and nothing said so."""
    await box.create("ann")
    async with over(box) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        await pilot.press("space")
        seen = app.snapshot
        await until(lambda: app.snapshot is not seen)
        assert "held" not in pane(app, "title", app.screen).text
        await pilot.press("escape")
        await is_main(app)
        await pilot.press("space", "enter")
        await is_in_front(app, AgentScreen)
        assert "ann (held" in pane(app, "title", app.screen).text


async def test_the_palette_over_the_table_holds_it_and_over_a_page_does_not(box: Box) -> None:
    await box.create("ann")
    async with over(box) as (app, pilot):
        for opens, offered in ((), ["Hold what is shown"]), (("enter",), []):
            await pilot.press(*opens, "ctrl+p")
            await until(lambda: isinstance(app.screen, CommandPalette))
            found = [command.title for command in app.get_system_commands(app.screen_stack[-2])]
            assert [title for title in found if title.startswith("Hold")] == offered
            await pilot.press("escape")
            await until(lambda: not isinstance(app.screen, CommandPalette))


async def test_a_verb_leaves_a_held_screen_as_it_is(box: Box) -> None:
    """The look after a verb was taken and shown all the same."""
    await box.create("ann")
    async with over(box) as (app, pilot):
        await pilot.press("space")
        await pilot.pause(0.3)
        seen = app.snapshot
        await pilot.press("p")
        await until(lambda: any("ann is paused" in str(note.message) for note in app._notifications))
        assert recorded(box) == {"ann": "paused"}
        await pilot.pause(0.5)
        assert app.snapshot is seen


# --- the clock ---------------------------------------------------------------------------------------------------


class Slept(Source):
    """Between its looks as much time goes by as `elapsed_s` says, for the clock of the wall and the one since boot."""

    def __init__(self, elapsed_s: float) -> None:
        super().__init__([], None, uid=0, env={})
        self._elapsed_s = elapsed_s
        self.taken = 0

    def look(self, shown: Collection[str] | None = None) -> Snapshot:
        at = self.taken * self._elapsed_s
        self.taken += 1
        self.looked_at = 5_000.0 + at
        return frozen.look(at=frozen.AT + at)


async def test_a_host_that_was_suspended_and_a_load_that_took_long_set_no_clock() -> None:
    """A monotonic clock stands still meanwhile, and the first look is older than the application: both were called a
    clock that was set."""
    source = Slept(elapsed_s=600.0)
    first = source.look()
    app = Top(source, first, interval_s=0.02)
    async with app.run_test(size=(120, 40)):
        await until(lambda: source.taken > 4)
        assert "clock" not in problems(app)


def test_a_look_notes_when_it_was_taken_by_a_clock_that_goes_on_while_the_host_sleeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Source, "_ask", lambda *_: frozen.look())
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 42.0}.__getitem__)
    source = Source([tmp_path / "hive.sock"], None, uid=0, env={})
    assert source.looked_at is None
    source.look()
    assert source.looked_at == 42.0


# --- what is shown -----------------------------------------------------------------------------------------------


def test_letters_that_are_hidden_or_turned_round_are_shown_as_what_they_are() -> None:
    """They reached the terminal: a name could be written backwards."""
    assert one_line("a\u202eb\u200bc\u2066d\ufeff") == r"a\u202eb\u200bc\u2066d\ufeff"
    text = panes.plain(frozen.look(**frozen.wrong("the disk of \u202e/gpj.x")), 80, unicode=True)
    assert r"the disk of \u202e/gpj.x" in text


def test_an_event_hides_the_beginning_only_of_what_it_ends() -> None:
    """An agent on its way was hidden by whatever else happened to it."""
    going = EventLine(1.0, "agent.resuming", "ann paused → resuming")

    def kinds(*kinds: str) -> list[str]:
        events = [going, *(EventLine(2.0, kind, "ann") for kind in kinds)]
        return [part[1].text.strip() for part in panes.event_lines(events, 9)]

    assert kinds("agent.changed") == ["agent.changed", "agent.resuming"]
    assert kinds("agent.port_moved") == ["agent.port_moved", "agent.resuming"]
    for end in ("agent.running", "agent.error", "agent.stayed_awake", "agent.removed"):
        assert kinds(end) == [end]


def test_what_the_backend_warns_of_is_in_the_text_as_on_the_screen() -> None:
    """`--once` and the first picture left it out."""
    backend = msgspec.structs.replace(frozen.VLLM, warning="it queues 3 requests itself")
    lines = panes.plain(frozen.look(backend=backend, **frozen.wrong("one thing")), 80, unicode=True).split("\n")
    assert lines[2:4] == ["one thing; fix: hive doctor", "it queues 3 requests itself"]


@pytest.mark.parametrize("minutes", [0, 1, 30, 59])
def test_the_hours_of_a_page_add_up_to_its_models(minutes: int) -> None:
    """The models are of 24 h, the curve was of 24 hours of the clock, of which the present one is not over."""
    now = 1_800_000_000.0 + 60 * minutes
    asked = [now - 60 * ago for ago in range(0, 24 * 60, 7)]
    hours: dict[float, int] = {}
    for at in asked:
        hours[at // 3600 * 3600] = hours.get(at // 3600 * 3600, 0) + 5
    by_hour = {
        "token_tracking": True,
        "hours": [{"hour": hour, "tokens_in": tokens, "tokens_out": 0} for hour, tokens in hours.items()],
    }
    by_model = {"models": [{"model": "m", "requests": 1, "tokens_in": 5 * len(asked), "tokens_out": 0}]}
    use = use_of(by_hour, by_model, now)
    assert sum(use.hours) == sum(model.tokens for model in use.models)
