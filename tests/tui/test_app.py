"""The view of `hive top`, over a real daemon, helper and database: an agent's page, panes, colours, what is ASCII."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from textual.widgets import Button, OptionList, RichLog

from hive.demo import server
from hive.domain import BackendKind, Tier
from hive.host.nvml import Nvml, SeenGpus
from hive.settings.table import InferenceSection, Settings
from hive.tui.screens.agent import AgentScreen
from hive.tui.widgets.bars import WholeCells
from tests.control.box import AWAKE, Box
from tests.fakes.fake_nvml import GIB, Gpu, Library, in_place_of
from tests.tui.driving import buttons, each_size, is_in_front, is_main, over, pane, recorded, screen_text, table_of, top
from tests.tui.frozen import PROGRAMS
from tests.waiting import until


@each_size
async def test_an_agents_page_says_why_shows_its_log_as_it_grows_and_its_state(box: Box, size: tuple[int, int]) -> None:
    await box.create("ann", ["/bin/sh", "-c", "echo up; while [ ! -e more ]; do sleep 0.05; done; echo more; sleep 99"])
    async with over(box, size) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        log = app.screen.query_one(RichLog)
        await until(lambda: [line.text.strip() for line in log.lines] == ["up"])
        (box.paths.home(box.life("ann").agent.id) / "more").touch()
        await until(lambda: [line.text.strip() for line in log.lines] == ["up", "more"])
        await until(lambda: "why: awake: " in pane(app, "facts", app.screen).text)
        assert "● running for" in pane(app, "facts", app.screen).text
        await pilot.press("p")
        await until(lambda: recorded(box)["ann"] == "paused")
        await until(lambda: "● paused" in pane(app, "facts", app.screen).text)
        await until(lambda: "why: asleep since" in pane(app, "facts", app.screen).text)


async def test_a_button_is_reached_with_tab_and_pressed_with_enter_and_none_by_holding_enter(box: Box) -> None:
    await box.create("ann")
    async with over(box) as (app, pilot):
        await pilot.press("enter", "enter", "enter")
        await is_in_front(app, AgentScreen)
        await pilot.pause(0.2)
        assert recorded(box)["ann"] == "running"
        await pilot.press("tab")
        await until(lambda: isinstance(app.focused, Button))
        await pilot.press("enter")
        await until(lambda: recorded(box)["ann"] == "paused")
        await until(lambda: buttons(app) == [("Resume", "green"), ("Stop", "red")])


async def test_the_page_of_an_agent_that_goes_says_so(box: Box) -> None:
    await box.create("ann")
    async with over(box) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        await box.services.agents.remove("ann", "uid:0")
        await until(lambda: pane(app, "title", app.screen).text.strip() == "ann (removed)")
        assert buttons(app) == []
        await pilot.press("p")
        await until(lambda: any("there is no agent" in str(note.message) for note in app._notifications))
        await pilot.press("escape")
        await is_main(app)


@pytest.mark.parametrize("set_no_color", [False, True])
async def test_states_have_the_seeds_colours_and_are_told_without_any(
    box: Box, monkeypatch: pytest.MonkeyPatch, set_no_color: bool
) -> None:
    if set_no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    await box.create("ann")
    await box.create("bob")
    await box.pause("bob", timeout_s=10, now=False, deep=False, actor="uid:0")
    async with over(box, size=(120, 40)) as (app, pilot):
        await pilot.pause()
        badge = list(table_of(app).render_line(2))[1]
        assert badge.text.startswith("● paused")
        assert badge.style is not None
        if not set_no_color:
            assert badge.style.color is not None
            assert badge.style.color.name == "#eab308"
            assert badge.style.bgcolor is not None
        colours = {colour.lower() for colour in re.findall("#[0-9a-fA-F]{6}", app.export_screenshot())}
        window = {"#ff5f57", "#febc2e", "#28c840", "#c5c8c6"}
        greys = {colour for colour in colours if colour[1:3] == colour[3:5] == colour[5:7]}
        assert (colours - greys <= window) is set_no_color
        assert "paused" in screen_text(app)


async def test_ascii_only_is_ascii_only_on_every_screen(box: Box) -> None:
    await box.create("ann")
    async with over(box, unicode=False) as (app, pilot):
        for keys in (
            (),
            ("enter",),
            ("S",),
            ("n", "escape", "?"),
            ("escape", "b"),
            ("escape", "ctrl+p"),
            ("escape", "y"),
            ("/", "x"),
        ):
            await pilot.press(*keys)
            await pilot.pause(0.3)
            strips = app.screen._compositor.render_strips(app.size)
            text = "\n".join(strip.text for strip in strips)
            assert [sign for sign in text if not sign.isascii()] == [], keys
            assert keys or "* running" in screen_text(app)
            if "ctrl+p" in keys:  # where it scrolls, its bar is of whole cells, whatever share of it is seen
                assert app.screen.query_one(OptionList).vertical_scrollbar.renderer is WholeCells
        assert "none of 1 matches x" in screen_text(app)


async def test_what_an_agent_wrote_does_not_steer_the_terminal(box: Box) -> None:
    await box.create("ann", ["/bin/sh", "-c", r"printf 'a\033[2Jb [red]\n'; exec sleep 1000"])
    async with over(box) as (app, pilot):
        await pilot.press("enter")
        await is_in_front(app, AgentScreen)
        log = app.screen.query_one(RichLog)
        await until(lambda: [line.text.strip() for line in log.lines] == [r"a\x1b[2Jb [red]"])


async def test_whoever_does_not_run_is_not_awake(box: Box) -> None:
    """Stopped agents, and such as were never started, had `awake` in the column DEPTH, also with the daemon down."""
    await box.create("ann")
    await box.create("bob")
    await box.stop("bob", "uid:0")
    async with over(box) as (app, _pilot):
        for is_live in (True, False):
            await until(lambda is_live=is_live: app.snapshot.is_live is is_live)  # type: ignore[misc]
            assert {row.name: row.depth for row in app.snapshot.agents} == {"ann": "awake", "bob": ""}
            lines = {line.split()[0]: line for line in screen_text(app).splitlines() if line[:3] in ("ann", "bob")}
            assert ("awake" in lines["ann"], "awake" in lines["bob"]) == (True, False)
            if is_live:
                await box.stop_daemon()


async def test_the_queue_of_each_tenant_and_tokens_come_from_what_is_asked_through_the_proxy(
    short_path: Path, redis_server: Any
) -> None:
    """Two at once of a low tier: of three requests one waits. What they used is on the agent's page."""
    box = Box(short_path)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    box.paths.redis_socket.symlink_to(redis_server.socket)
    backend = short_path / "demo.sock"
    serving = asyncio.ensure_future(
        server.serve(server.listen(socket=backend, port=None), tokens_per_s=25.0, handle_signals=False)
    )
    settings = Settings(
        inference=InferenceSection(auto_sleep_enabled=False),
        sleep=AWAKE.sleep,
        agents=AWAKE.agents,
        daemon=AWAKE.daemon,
    )
    await box.start_helper()
    await box.start_daemon(settings, backend=(BackendKind.DEMO, str(backend)))
    await box.start_real_proxy()
    try:
        agent = await box.create("ann", tenant="acme", tier=Tier.LOW)
        url = box.tokens("ann")["ollama_host"]
        async with over(box, (120, 40)) as (app, pilot), httpx.AsyncClient(trust_env=False, timeout=30) as client:
            body = {"model": "hive-demo", "stream": False, "messages": [{"role": "user", "content": "tell a story"}]}
            asking = [asyncio.ensure_future(client.post(f"{url}/api/chat", json=body)) for _ in range(3)]
            await until(lambda: "acme" in pane(app, "queue").text)
            await until(lambda: pane(app, "queue").title.startswith("queue: 1 waiting, 2"))
            assert " 2 running  1 waiting" in pane(app, "queue").text
            # It has no model of its own: MODEL was `-` while it used one.
            await until(lambda: app.snapshot.agents[0].model == "hive-demo")
            assert "hive-demo" in screen_text(app)
            for answer in await asyncio.gather(*asking):
                assert answer.status_code == 200
            await until(lambda: "nobody waits" in pane(app, "queue").text)
            await until(lambda: float(pane(app, "tokens").title.removeprefix("tokens/s: ")) > 0)
            assert any(app.history.tokens_per_s_of(agent["id"]))
            await pilot.press("enter")
            await is_in_front(app, AgentScreen)
            await until(lambda: "hive-demo" in pane(app, "models", app.screen).text)
            assert "3 requests, tokens" in pane(app, "models", app.screen).text
            view = await box.view("ann")
            used = f"3 requests, tokens {view['tokens_in']} in, {view['tokens_out']} out"
            await until(lambda: used in pane(app, "facts", app.screen).text)
    finally:
        await box.end()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def test_gpus_come_and_go_with_what_the_driver_says(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through NVIDIA's wrapper, the API and the client: a GPU that is lost while somebody looks."""
    library = Library(Gpu(used=93 * GIB, busy=87, processes=[(4711, 92 * GIB)]))

    async def seen() -> SeenGpus:
        with in_place_of(library):
            return Nvml(load=lambda: __import__("pynvml")).look()

    monkeypatch.setattr(box.services.gpus, "seen", seen)
    monkeypatch.setattr("hive.api.system.program_of", lambda pid: PROGRAMS.get(pid, ""))
    async with top(box.paths.api_socket, None, (120, 40)) as (app, pilot):
        await until(lambda: "93G/140G  87%" in pane(app, "gpus").text)
        assert "VLLM::EngineCor 4711 92G" in pane(app, "gpus").text
        library.gpus[0].is_lost = True
        await until(lambda: pane(app, "gpus").text == "GPU 0 ! GPU is lost")
        library.gpus.clear()
        await until(lambda: pane(app, "gpus").text == "")
        await pilot.pause()
        assert not pane(app, "gpus").display
