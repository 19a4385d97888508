"""Switches of services, killed anywhere: a real daemon, database and proxy process; systemd is played.

The services are servers on unix sockets in this process, of which one runs at a time, as `Conflicts=` has it. With a
real systemd the helper's verbs are tested in tests/host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hive.backends.switch import Switch, SwitchStep
from hive.control import switching
from hive.control.switching import Switcher
from hive.errors import DependencyDown, NotFound, WrongState
from hive.store.database import Database
from tests.control.services_box import GETS, LLAMA, OLLAMA, VLLM, ServicesBox, with_llama
from tests.waiting import until


@pytest.fixture
async def hive(short_path: Path) -> AsyncIterator[ServicesBox]:
    """llama is chosen, and started by the daemon."""
    async with with_llama(short_path) as box:
        yield box


async def test_the_service_that_was_chosen_is_started_with_the_daemon(hive: ServicesBox) -> None:
    assert hive.units.calls == ["start llama"]
    assert await hive.who_answers() == "llama"


async def test_a_switch_stops_the_old_one_then_starts_the_new_one(hive: ServicesBox) -> None:
    job = await hive.ended(await hive.begin(VLLM))
    assert (job["state"], job["result"]["backend"], job["result"]["from"]) == ("done", "vllm", "llama")
    assert hive.units.calls == ["start llama", "stop llama", "start vllm"]
    assert await hive.who_answers() == "vllm"
    await hive.stop_daemon()
    assert await hive.recorded() == VLLM


async def test_a_default_model_that_was_changed_meanwhile_is_the_one_that_has_to_answer(
    hive: ServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new server was asked for the one of the daemon's start."""
    monkeypatch.setitem(GETS, "/v1/models", {"data": [{"id": "m"}, {"id": "other"}]})
    await hive.services.config.change({"inference.default_model": "other"}, "uid:0")
    assert (await hive.ended(await hive.begin(VLLM)))["state"] == "done"
    assert hive.units.running[VLLM].asked[0] == "other"


FAR = {"size": 196, "remote_host": "https://cloud.invalid:443", "remote_model": "gpt-oss:120b"}
STUBS = [{"name": f"helper{number}:latest", **FAR} for number in range(3)]


@pytest.mark.parametrize("default", ["", "helper0:latest"])
async def test_an_ollamas_cloud_is_not_asked_for_the_token(
    hive: ServicesBox, monkeypatch: pytest.MonkeyPatch, default: str
) -> None:
    """The three smallest models were asked. Ollama's cloud stubs are 196 bytes: the prompts went to its cloud, and with
    three of them the switch was rolled back although a local model worked."""
    monkeypatch.setitem(GETS, "/api/version", {"version": "0.32.15"})
    monkeypatch.setitem(GETS, "/api/tags", {"models": [*STUBS, {"name": "tiny:latest", "size": 656640}]})
    if default:
        await hive.services.config.change({"inference.default_model": default}, "uid:0")
    job = await hive.ended(await hive.begin(OLLAMA))
    assert (job["state"], job["result"]["note"]) == ("done", "")
    assert hive.units.running[OLLAMA].asked == ["tiny:latest"]


async def test_an_ollama_with_nothing_but_stubs_is_switched_to_and_asked_for_nothing(
    hive: ServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GETS, "/api/version", {"version": "0.32.15"})
    monkeypatch.setitem(GETS, "/api/tags", {"models": STUBS})
    job = await hive.ended(await hive.begin(OLLAMA))
    assert job["state"] == "done"
    assert job["result"]["note"] == "none of its models runs on this box, so none was asked for a token"
    assert hive.units.running[OLLAMA].asked == []


async def test_what_is_in_use_and_answers_is_done_at_once(hive: ServicesBox) -> None:
    job = await hive.switch("llama", "uid:0")
    assert (job["state"], job["result"]["changed"]) == ("done", False)
    assert hive.units.calls == ["start llama"]


async def test_what_is_in_use_and_does_not_answer_is_started_again(hive: ServicesBox) -> None:
    hive.units.running.pop(LLAMA).stop()
    await until(lambda: not hive.inference()["running"])
    job = await hive.ended(await hive.begin(LLAMA))
    assert (job["state"], job["result"]["changed"]) == ("done", True)
    assert await hive.who_answers() == "llama"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("start", "systemd: Job for vllm.service failed"),
        ("dead", "vllm.service failed (exit-code)"),
        ("token", 'it answers 500: {"error": "CUDA out of memory"}, looked at 3 times'),
    ],
)
async def test_one_that_fails_is_rolled_back_with_its_last_lines(hive: ServicesBox, what: str, said: str) -> None:
    hive.units.broken[VLLM] = what
    job = await hive.ended(await hive.begin(VLLM))
    assert (job["state"], job["error"]["code"]) == ("failed", "rolled_back")
    assert said in job["error"]["message"]
    assert job["error"]["message"].endswith("; llama is active again")
    assert job["error"]["log"] == ["the last line of vllm"]
    assert set(hive.units.running) == {LLAMA}
    assert await hive.who_answers() == "llama"
    assert hive.services.health.view()["problems"] == [
        p for p in hive.services.health.view()["problems"] if "Redis" in p
    ]


async def test_an_old_one_that_will_not_stop_is_kept(hive: ServicesBox) -> None:
    hive.units.broken[LLAMA] = "stop"
    job = await hive.ended(await hive.begin(VLLM))
    assert job["error"]["message"] == "vllm: llama.service lives 10 s after SIGKILL; llama is active again"
    assert await hive.who_answers() == "llama"


def codes(hive: ServicesBox) -> list[str]:
    return [one["code"] for one in hive.services.health.view()["conditions"]]


async def test_where_neither_comes_up_it_is_degraded_and_says_so(hive: ServicesBox) -> None:
    hive.units.broken[VLLM] = "dead"
    job = await hive.begin(VLLM)
    hive.units.broken[LLAMA] = "dead"
    found = await hive.ended(job)
    assert (found["state"], found["error"]["code"]) == ("failed", "dependency_down")
    assert "and going back failed: llama: llama.service failed" in found["error"]["message"]
    await until(lambda: "backend_down" in codes(hive))
    assert (await hive.ask()).status_code == 502
    hive.units.broken.clear()
    assert (await hive.ended(await hive.begin(VLLM)))["state"] == "done"
    assert await hive.who_answers() == "vllm"


async def test_a_second_switch_is_refused_while_one_is_under_way(hive: ServicesBox) -> None:
    job = await hive.begin(VLLM)
    with pytest.raises(WrongState, match="a switch to vllm is under way"):
        await hive.begin(OLLAMA)
    assert hive.inference()["switch"]["id"] == job
    assert (await hive.ended(job))["state"] == "done"
    assert hive.inference()["switch"] is None


def held_at(monkeypatch: pytest.MonkeyPatch, step: SwitchStep, *, back: bool, after: bool) -> asyncio.Event:
    """Switches stand still at this step, before or after it was done; set once one does."""
    reached, real = asyncio.Event(), Switcher._do

    async def do(self: Switcher, switch: Switch) -> None:
        here = (switch.step, switch.back) == (step, back)
        if after or not here:
            await real(self, switch)
        if here:
            reached.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(Switcher, "_do", do)
    return reached


FORWARD = [SwitchStep.CLOSE, SwitchStep.STOP, SwitchStep.START, SwitchStep.HEALTH, SwitchStep.RECORD, SwitchStep.OPEN]
BACK = [SwitchStep.STOP, SwitchStep.START, SwitchStep.HEALTH, SwitchStep.OPEN]
MOMENTS = [(step, False, after) for step in FORWARD for after in (False, True)] + [(step, True, True) for step in BACK]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("step", "back", "after"),
    MOMENTS,
    ids=[f"{'back ' if back else ''}{step} {'done' if after else 'not done'}" for step, back, after in MOMENTS],
)
async def test_a_daemon_that_ends_at_any_step_leaves_it_to_the_next_one(
    hive: ServicesBox, monkeypatch: pytest.MonkeyPatch, step: SwitchStep, back: bool, after: bool
) -> None:
    """Without a word written at its end, as with kill -9. Requests meanwhile are answered by the server chosen."""
    if back:
        hive.units.broken[VLLM] = "token"
    with monkeypatch.context() as patch:
        reached = held_at(patch, step, back=back, after=after)
        job = await hive.begin(VLLM)
        await asyncio.wait_for(reached.wait(), 20)
        waiting = asyncio.ensure_future(hive.ask())
        await asyncio.sleep(0.05)
        await hive.stop_daemon()
    await hive.start_daemon()
    found = await hive.ended(job)
    assert found["state"] == ("failed" if back else "done")
    chosen = LLAMA if back else VLLM
    assert set(hive.units.running) == {chosen}
    answer = await waiting
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] in {str(chosen), "llama"}
    assert await hive.who_answers() == chosen
    assert not any("switching" in problem for problem in hive.services.health.view()["problems"])
    await hive.stop_daemon()
    assert await hive.recorded() == chosen


async def test_a_daemon_that_ends_between_the_last_step_and_the_end_of_its_job_leaves_no_gate_closed(
    hive: ServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one ended the job, told the proxy to keep requests waiting for the switch, and never took that back."""
    reached = asyncio.Event()

    async def stand_still(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Switcher, "_end", stand_still)
        job = await hive.begin(VLLM)
        await asyncio.wait_for(reached.wait(), 60)
        await hive.stop_daemon()
    await hive.start_daemon()
    assert (await hive.ended(job))["state"] == "done"
    assert not any("switching" in problem for problem in hive.services.health.view()["problems"])
    assert await hive.who_answers() == VLLM


async def test_requests_wait_while_no_server_is_up(hive: ServicesBox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        reached = held_at(patch, SwitchStep.STOP, back=False, after=True)
        await hive.begin(VLLM)
        await asyncio.wait_for(reached.wait(), 20)
    assert hive.units.running == {}
    assert any("switching to vllm" in problem for problem in hive.services.health.view()["problems"])
    waiting = [asyncio.ensure_future(hive.ask()) for _ in range(5)]
    await asyncio.sleep(0.1)
    assert not any(future.done() for future in waiting)
    await hive.stop_daemon()
    await hive.start_daemon()
    assert [(await future).status_code for future in waiting] == [200] * 5
    assert hive.units.running[VLLM].served == 5


async def test_it_can_be_cancelled_and_the_old_one_is_back(hive: ServicesBox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        reached = held_at(patch, SwitchStep.START, back=False, after=False)
        job = await hive.begin(VLLM)
        await asyncio.wait_for(reached.wait(), 20)
        found = await hive.cancel_job(job)
    assert (found["state"], found["error"]["code"]) == ("cancelled", "rolled_back")
    assert found["error"]["message"] == "vllm: it was cancelled; llama is active again"
    assert await hive.who_answers() == "llama"
    with pytest.raises(WrongState, match="is cancelled"):
        await hive.cancel_job(job)
    with pytest.raises(NotFound):
        await hive.cancel_job("nonsense")


async def test_a_proxy_that_comes_in_mid_switch_keeps_the_gate_closed(
    hive: ServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real = asyncio.Event(), Switcher._do

    async def do(self: Switcher, switch: Switch) -> None:
        if switch.step is SwitchStep.START:
            await go_on.wait()
        await real(self, switch)

    monkeypatch.setattr(Switcher, "_do", do)
    job = await hive.begin(VLLM)
    await until(lambda: "stop llama" in hive.units.calls)
    await hive.kill_real_proxy()
    await hive.start_real_proxy()
    waiting = asyncio.ensure_future(hive.ask())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    go_on.set()
    assert (await waiting).status_code == 200
    assert (await hive.ended(job))["state"] == "done"


async def test_without_a_proxy_nothing_is_begun(hive: ServicesBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "PROXY_WITHIN_S", 0.2)
    await hive.kill_real_proxy()
    job = await hive.ended(await hive.begin(VLLM))
    assert job["error"]["message"] == "vllm: the proxy is not connected; llama is active as before"
    assert hive.units.calls == ["start llama"]


async def test_a_service_that_does_not_start_with_the_daemon_is_said(hive: ServicesBox) -> None:
    await hive.stop_daemon()
    hive.units.running.pop(LLAMA).stop()
    hive.units.broken[LLAMA] = "start"
    await hive.start_daemon()
    await until(lambda: "backend_not_started" in codes(hive))
    assert any(event["kind"] == "backend.not_started" for event in await hive.services.audit_log.past(50))


async def test_where_nothing_was_ever_chosen_the_first_one_is(
    hive: ServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hive.stop_daemon()
    database = Database.open(hive.paths.database)
    await database.write(lambda conn: conn.execute("DELETE FROM runtime_settings"))
    database.close()
    await hive.start_daemon()
    await until(lambda: "no_backend_installed" in codes(hive))
    job = await hive.ended(await hive.begin(VLLM))
    assert (job["state"], job["result"]["from"]) == ("done", None)
    assert await hive.who_answers() == "vllm"


async def test_a_running_job_that_nobody_knows_has_failed(hive: ServicesBox) -> None:
    job = await hive.begin(VLLM)
    await hive.ended(job)
    await hive.stop_daemon()
    database = Database.open(hive.paths.database)
    await database.write(lambda conn: conn.execute("UPDATE jobs SET state = 'running', kind = 'model.pull'"))
    database.close()
    await hive.start_daemon()
    found = await hive.job(job, wait_s=0)
    assert (found["state"], found["error"]["message"]) == ("failed", "Hive ended before it did")


async def test_the_next_hive_up_carries_nothing_on(hive: ServicesBox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        reached = held_at(patch, SwitchStep.CLOSE, back=False, after=True)
        job = await hive.begin(VLLM)
        await asyncio.wait_for(reached.wait(), 20)
        await hive.stop_daemon()
    await hive.start_daemon(run="another")
    assert (await hive.job(job, wait_s=0))["error"]["message"] == "Hive ended before it did"
    assert hive.units.calls == ["start llama"]
    assert not any("switching" in problem for problem in hive.services.health.view()["problems"])


async def test_a_full_disk_ends_it_as_it_was(hive: ServicesBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acts that cannot be written down are not done: the choice could be lost with the next crash."""
    real, calls = Database.write, 0

    async def write(self: Database, work: Callable[..., Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise DependencyDown("the disk is full")
        return await real(self, work)

    monkeypatch.setattr(Database, "write", write)
    await hive.begin(VLLM)
    await until(lambda: hive.inference()["switch"] is None)
    assert await hive.who_answers() == "llama"
