"""A worker and all that its server may do to it, one fault a test: the server is a real process that does it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.errors import BadRequest, DependencyDown, NotFound, WrongState
from hive.host.process import read_stat
from hive.worker.dialogue import Dialogue
from hive.worker.profile import TimeoutProfile
from hive.worker.records import ModelAnswer, NotReady, RequestState, ToolCallText, WorkerState
from hive.worker.worker import LlamaWorker
from tests.worker.scripted import (
    PATIENT,
    Folder,
    OfItsOwnKind,
    ask,
    has_data,
    outcome,
    ready_again,
    status_when,
    worker,
)


def hurried(**times: float | None) -> TimeoutProfile:
    """PATIENT but for these times; nothing else ends anything."""
    off = dict.fromkeys(("headers_timeout_s", "prefill_liveness_timeout_s", "idle_stream_timeout_s"))
    return msgspec.structs.replace(PATIENT, **(off | times))


# --- slow, and well ----------------------------------------------------------------------------------------------


async def test_a_slow_head_and_a_long_silence_are_waited_for(tmp_path: Path) -> None:
    """The silence before the first data is no stall, however short the limit between two pieces of data."""
    async with worker(tmp_path, profile=hurried(idle_stream_timeout_s=0.3)) as found:
        asked = await ask(found, "head 0.5 wait 0.6 data 3")
        ended = await outcome(found, asked)
        assert (ended.state, ended.answer.text) == (RequestState.COMPLETED, "0 1 2 ")
        status = await found.get_status(asked)
        assert status.first_data_at is not None
        assert status.created_at < status.first_data_at <= status.last_progress_at


async def test_cpu_time_keeps_a_silent_server_alive(tmp_path: Path) -> None:
    """A prompt that is read for long: no head, no data, and a process that works."""
    async with worker(tmp_path, profile=hurried(prefill_liveness_timeout_s=1.0)) as found:
        asked = await ask(found, "burn 2 data 1")
        assert (await outcome(found, asked)).state is RequestState.COMPLETED
        status = await found.get_status(asked)
        assert status.last_liveness_at is not None
        assert (await found.get_worker_status()).restart_count == 0


# --- late requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "times", "reason", "text"),
    [
        ("head 60", {"headers_timeout_s": 1.0}, "headers_timeout", ""),
        ("wait 60", {"ttft_timeout_s": 1.0}, "ttft_timeout", ""),
        ("data 2 wait 60", {"idle_stream_timeout_s": 1.0}, "stall_timeout", "0 1 "),
        ("data 2 pings 60", {"idle_stream_timeout_s": 1.0}, "stall_timeout", "0 1 "),
        ("every 0.01 data 9999", {"absolute_timeout_s": 1.5}, "absolute_timeout", None),
    ],
)
async def test_a_late_request_fails_alone(
    tmp_path: Path, script: str, times: dict[str, float], reason: str, text: str | None
) -> None:
    """Its neighbour is answered, and the server goes on. Pings are no data."""
    async with worker(tmp_path, profile=hurried(**times)) as found:
        late = await ask(found, script)
        ended = await outcome(found, late)
        assert (ended.state, ended.reason) == (RequestState.FAILED, reason)
        assert ended.detail
        assert text is None or ended.answer.text == text
        other = await outcome(found, await ask(found, "data 1"))
        assert (other.state, other.answer.text) == (RequestState.COMPLETED, "0 ")
        assert (await found.get_worker_status()).restart_count == 0


async def test_a_request_that_waits_for_a_place_is_not_late(tmp_path: Path) -> None:
    """The clock of the head runs only while the server has a place: here the older request has it."""
    profile = hurried(headers_timeout_s=0.6)
    async with worker(tmp_path, profile=profile, slots=2) as found:
        found._keeper._places = 1  # a server with fewer places than its worker gives away
        assert found._keeper.watch is not None
        found._keeper.watch._places = 1
        older = await ask(found, "data 1 wait 2 data 1")
        await has_data(found, older)
        younger = await ask(found, "head 1.2 data 1")
        assert (await outcome(found, younger)).state is RequestState.COMPLETED
        assert (await outcome(found, older)).state is RequestState.COMPLETED


# --- servers that are ended --------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["data 1 wait 60", "data 1 pings 60", "head 60", "wait 60", "data 1 stop wait 60"])
async def test_a_server_that_stands_still_is_started_again(tmp_path: Path, script: str) -> None:
    """No data of any request and no CPU time. A server that was stopped (SIGSTOP) takes connections all the same."""
    async with worker(tmp_path, profile=hurried(prefill_liveness_timeout_s=1.0)) as found:
        before = await found.get_worker_status()
        requests = [await ask(found, script), await ask(found, "wait 60")]
        for request in requests:
            ended = await outcome(found, request)
            assert (ended.state, ended.reason) == (RequestState.FAILED, "stall_timeout")
        after = await ready_again(found)
        assert after.pid != before.pid
        assert [restart.reason for restart in (await found.get_debug_info()).restarts] == ["stall_timeout"]
        assert (await outcome(found, await ask(found, "data 1"))).state is RequestState.COMPLETED


async def test_one_request_that_moves_saves_the_server(tmp_path: Path) -> None:
    async with worker(tmp_path, profile=hurried(prefill_liveness_timeout_s=2.0)) as found:
        stuck, moves = await ask(found, "wait 60"), await ask(found, "every 0.1 data 30")
        assert (await outcome(found, moves)).state is RequestState.COMPLETED
        assert isinstance(await found.get_result(stuck), NotReady)
        assert (await outcome(found, stuck)).reason == "stall_timeout"


async def test_a_server_that_hangs_is_ended_though_its_request_was_given_up(tmp_path: Path) -> None:
    """Its requests fail one by one before the server has stood still for long enough. It burns CPU before it hangs."""
    profile = hurried(headers_timeout_s=1.5, prefill_liveness_timeout_s=3.0, liveness_probe_interval_s=0.1)
    async with worker(tmp_path, profile=profile) as found:
        assert (await outcome(found, await ask(found, "burn 0.1 stop head 60"))).reason == "headers_timeout"
        await ready_again(found)


async def test_a_server_that_answered_to_the_last_owes_nothing_to_a_request_that_was_given_up(tmp_path: Path) -> None:
    """It stands still because it has nothing to do."""
    profile = hurried(absolute_timeout_s=1.5, prefill_liveness_timeout_s=1.0)
    async with worker(tmp_path, profile=profile) as found:
        assert (await outcome(found, await ask(found, "every 0.01 data 9999"))).reason == "absolute_timeout"
        assert found._keeper.watch is not None
        while not found._keeper.watch._is_idle:
            assert (await found.get_worker_status()).restart_count == 0
            await asyncio.sleep(0.005)


async def test_a_server_nobody_listens_for_is_started_again(tmp_path: Path) -> None:
    async with worker(tmp_path) as found:
        stays = await ask(found, "every 0.05 data 9999")
        await has_data(found, stays)
        assert (await outcome(found, await ask(found, "leave"))).state is RequestState.COMPLETED
        assert (await outcome(found, await ask(found, "data 1"))).reason == "connect_failed"
        assert (await outcome(found, stays)).reason == "worker_restarted"
        await ready_again(found)
        assert [restart.reason for restart in (await found.get_debug_info()).restarts] == ["connect_failed"]


# --- servers that end --------------------------------------------------------------------------------------------


async def test_a_crash_fails_all_in_flight_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    async with worker(tmp_path) as found:
        stays = await ask(found, "every 0.05 data 9999")
        await has_data(found, stays)
        crashes = await ask(found, "data 2 crash 7")
        for request in (stays, crashes):
            ended = await outcome(found, request)
            assert (ended.state, ended.reason) == (RequestState.FAILED, "server_died")
            assert ended.answer.text.startswith("0 ")
        assert (await ready_again(found)).last_error is not None
        debug = await found.get_debug_info()
        assert "exit code 7" in (debug.last_error or "")
        assert "scripted crash" in (debug.last_error or "")
        assert not [line for line in debug.log if "crash" in line or "9999" in line]


async def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    async with worker(tmp_path) as found:
        request = await ask(found, "every 0.05 data 9999")
        await has_data(found, request)
        pid = (await found.get_worker_status()).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await outcome(found, request)).reason == "server_died"
        assert (await ready_again(found)).pid != pid


async def test_a_warden_killed_is_a_server_died(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    async with worker(tmp_path, "--child", "double", "--child", "setsid") as found:
        first = place.pids()
        pid = (await found.get_worker_status()).pid
        assert pid is not None
        stat = read_stat(pid)
        assert stat is not None
        os.kill(stat.parent, signal.SIGKILL)
        await ready_again(found)
        assert not set(first) & set(place.alive())


async def test_a_server_that_keeps_ending_is_given_up(tmp_path: Path) -> None:
    profile = msgspec.structs.replace(PATIENT, crash_limit=3)
    async with worker(tmp_path, profile=profile) as found:
        for number in range(3):
            await ready_again(found, restarts=number)
            await outcome(found, await ask(found, "crash 4"))
            await status_when(found, lambda now: now.state is not WorkerState.READY)
        status = await status_when(found, lambda now: now.state is WorkerState.FAILED)
        assert not status.active
        assert "3 times" in (status.last_error or "")
        assert (await found.submit("test", "", "data 1")).error == "WORKER_NOT_READY"
        await found.start()  # by hand it may be tried again
        assert (await outcome(found, await ask(found, "data 1"))).state is RequestState.COMPLETED


async def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    found = LlamaWorker(Folder(tmp_path).launch("--crash-at-start", "3"), slots=1)
    with pytest.raises(DependencyDown, match=r"exit code 3(?s:.*)scripted end at start"):
        await found.start()
    assert (await found.get_worker_status()).state is WorkerState.FAILED
    assert not Folder(tmp_path).alive()
    assert (await found.get_debug_info()).log == ("scripted end at start",)
    await found.stop()


async def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    profile = msgspec.structs.replace(PATIENT, load_timeout_s=0.5)
    launch = msgspec.structs.replace(Folder(tmp_path).launch(), command=("/bin/sleep", "600"))
    found = LlamaWorker(launch, slots=1, profile=profile)
    with pytest.raises(DependencyDown, match="generated nothing within"):
        await found.start()
    assert (await found.get_worker_status()).pid is None


# --- answers that are none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason", "detail", "text"),
    [
        ("data 2 cut", "stream_incomplete", "broke off", "0 1 "),
        ("head 0 cut", "stream_incomplete", "broke off", ""),
        ("data 2 error", "backend_error", "scripted", "0 1 "),
        ("status 400", "backend_error", "400: scripted refusal", ""),
        ("data 2 finish abort", "stream_incomplete", "gave up", "0 1 "),
        ("data 2 finish repetition", "repeated_line_loop", "repeats itself", "0 1 "),
        (
            "text the_same_line_again".replace("_", "") + " data 1 cut",
            "stream_incomplete",
            "broke off",
            "thesamelineagain0 ",
        ),
    ],
)
async def test_a_disconnect_or_an_error_in_the_stream_is_told_and_what_came_is_kept(
    tmp_path: Path, script: str, reason: str, detail: str, text: str
) -> None:
    async with worker(tmp_path) as found:
        ended = await outcome(found, await ask(found, script))
        assert (ended.state, ended.reason, ended.answer.text) == (RequestState.FAILED, reason, text)
        assert detail in ended.detail
        assert (await found.get_worker_status()).restart_count == 0


async def test_a_model_that_repeats_a_line_is_stopped(tmp_path: Path) -> None:
    async with worker(tmp_path) as found:
        ended = await outcome(found, await ask(found, "text over-and-over-again_ " * 50 + "wait 60"))
        assert (ended.state, ended.reason) == (RequestState.FAILED, "repeated_line_loop")
        assert ended.answer.text == "over-and-over-again\n" * 8


# --- the end of a worker -----------------------------------------------------------------------------------------


async def test_stop_ends_the_group_and_fails_what_was_in_flight(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    flags = ("--ignore-term", "--child", "fork", "--child", "setsid", "--child", "double")
    async with worker(tmp_path, *flags) as found:
        request = await ask(found, "every 0.05 data 9999")
        await has_data(found, request)
        while len(place.alive()) < 4:  # noqa: ASYNC110 - one is forked twice
            await asyncio.sleep(0.005)
        await found.stop()
        assert not place.alive()
        assert (await outcome(found, request)).reason == "worker_restarted"
        assert (await found.submit("test", "", "data 1")).error == "WORKER_NOT_READY"
        await found.start()
        assert (await outcome(found, await ask(found, "data 1"))).request_id == 2


async def test_stop_wins_over_a_restart_that_waits(tmp_path: Path) -> None:
    profile = msgspec.structs.replace(PATIENT, backoff_first_s=600, backoff_longest_s=600)
    async with worker(tmp_path, profile=profile) as found:
        await outcome(found, await ask(found, "crash 1"))
        await status_when(found, lambda now: now.restarting)
        await found.stop()
        assert (await found.get_worker_status()).state is WorkerState.COLD


async def test_stop_wins_over_a_restart_that_somebody_asked_for(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    async with worker(tmp_path, "--chatter", "20000000") as found:
        restarting = asyncio.create_task(found.restart("new settings"))
        await status_when(found, lambda now: now.restarting and now.pid is not None)
        await found.stop()
        with pytest.raises(DependencyDown):
            await restarting
        assert not place.alive()


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    found = LlamaWorker(place.launch("--chatter", "20000000", "--child", "setsid"), slots=1)
    starting = asyncio.create_task(found.start())
    await status_when(found, lambda now: now.pid is not None)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert not place.alive()
    assert (await found.get_worker_status()).state is WorkerState.COLD


async def test_a_restart_waits_for_nothing_and_is_no_crash(tmp_path: Path) -> None:
    profile = msgspec.structs.replace(PATIENT, backoff_first_s=600, backoff_longest_s=600, crash_limit=1)
    async with worker(tmp_path, profile=profile) as found:
        request = await ask(found, "every 0.05 data 9999")
        await found.restart("new settings")
        assert (await outcome(found, request)).reason == "worker_restarted"
        status = await found.get_worker_status()
        assert (status.healthy, status.restart_count, status.last_error) == (True, 1, None)
        assert [restart.reason for restart in (await found.get_debug_info()).restarts] == ["new settings"]


async def test_what_was_not_started_has_nothing_to_restart(tmp_path: Path) -> None:
    found = LlamaWorker(Folder(tmp_path).launch(), slots=1)
    with pytest.raises(WrongState):
        await found.restart("why not")
    assert (await found.submit("test", "", "x")).error == "WORKER_NOT_READY"
    await found.stop()
    with pytest.raises(BadRequest):
        LlamaWorker(Folder(tmp_path).launch(), slots=0)


async def test_a_second_start_is_refused_and_so_is_a_socket_in_use(tmp_path: Path) -> None:
    async with worker(tmp_path) as found:
        with pytest.raises(WrongState):
            await found.start()
        other = LlamaWorker(Folder(tmp_path).launch(), slots=1)
        with pytest.raises(DependencyDown, match="listens"):
            await other.start()
        assert (await outcome(found, await ask(found, "data 1"))).state is RequestState.COMPLETED


# --- slots, results and dialogues --------------------------------------------------------------------------------


async def test_with_all_slots_in_use_a_request_is_refused_at_once(tmp_path: Path) -> None:
    async with worker(tmp_path, slots=2) as found:
        first, second = await ask(found, "wait 60"), await ask(found, "wait 60")
        refused = await found.submit("third", "", "data 1")
        assert (refused.ok, refused.request_id, refused.error) == (False, None, "NO_SLOT_AVAILABLE")
        status = await found.get_worker_status()
        assert (status.slots_used, status.slots_total) == (2, 2)
        assert status.active_requests == {first: "test", second: "test"}
        assert await found.cancel(first)
        third = await ask(found, "data 1")
        assert third == 3
        assert (await outcome(found, third)).state is RequestState.COMPLETED


async def test_a_result_is_kept_until_it_is_released(tmp_path: Path) -> None:
    async with worker(tmp_path) as found:
        request = await ask(found, "data 1 wait 0.2")
        assert await found.get_result(request) == NotReady(request)
        with pytest.raises(WrongState):
            await found.release(request)
        first = await outcome(found, request)
        assert await found.get_result(request) == first
        assert not await found.cancel(request)
        await found.release(request)
        for gone in (found.get_result, found.get_status, found.cancel, found.release):
            with pytest.raises(NotFound):
                await gone(request)


async def test_a_cancel_keeps_what_came(tmp_path: Path) -> None:
    async with worker(tmp_path) as found:
        request = await ask(found, "data 3 wait 60")
        await has_data(found, request)
        assert await found.cancel(request)
        ended = await outcome(found, request)
        assert (ended.state, ended.reason) == (RequestState.CANCELED, "canceled")
        assert ended.answer.text.startswith("0 ")


async def test_params_go_to_the_server_as_they_are(tmp_path: Path) -> None:
    async with worker(tmp_path, model="tiny", max_tokens=77) as found:
        params = {"new_knob": {"deep": [1, None]}, "stream": False, "messages": [], "temperature": 0.25}
        asked = await found.submit("test", "Be short.", "data 1", params=params)
        assert asked.request_id is not None
        await outcome(found, asked.request_id)
        await outcome(found, await ask(found, "data 1", max_completion_tokens=5, stream_options={"x": 1}))
        said = [line.removeprefix("asked ") for line in (await found.get_debug_info()).log if "asked" in line][-2:]
        first, second = (msgspec.json.decode(line) for line in said)
        assert first == {
            "model": "tiny",
            "new_knob": {"deep": [1, None]},
            "temperature": 0.25,
            "max_tokens": 77,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "data 1"}],
        }
        assert "max_tokens" not in second
        assert second["stream_options"] == {"x": 1}
        assert (await found.submit("test", "", "x", params={"bad": object()})).error == "BAD_PARAMS"


async def test_whatever_a_dialogue_raises_its_slot_is_free_again(tmp_path: Path) -> None:
    """An exception that was none of Exception left its request running for ever."""

    class Odd(TwoTurns):
        async def after(self, answer: ModelAnswer) -> bool:
            raise OfItsOwnKind

    async with worker(tmp_path, dialogues=lambda _job, _system, user: Odd(user)) as found:
        ended = await outcome(found, await ask(found, "data 5"))
        assert (ended.state, ended.reason, ended.detail) == (RequestState.FAILED, "dialogue_failed", "OfItsOwnKind")
        assert (await found.get_worker_status()).slots_used == 0


class TwoTurns:
    """A dialogue of two turns that counts."""

    signals: Sequence[Any] = ()

    def __init__(self, script: str) -> None:
        self._script = script
        self._answers: list[ModelAnswer] = []

    @property
    def iterations_remaining(self) -> int | None:
        return 2 - len(self._answers)

    def fields(self, now: datetime) -> Mapping[str, Any]:
        assert now.tzinfo is not None
        return {"messages": [{"role": "user", "content": self._script if not self._answers else "data 2"}]}

    async def after(self, answer: ModelAnswer) -> bool:
        if answer.text == "":
            raise ValueError("an empty answer")
        self._answers.append(answer)
        self.signals = [*self.signals, f"turn {len(self._answers)}"]
        return len(self._answers) < 2

    def is_enough(self, calls: Sequence[ToolCallText]) -> bool:
        return False

    def shown(self, answer: ModelAnswer) -> ModelAnswer:
        return answer


async def test_a_dialogue_decides_the_turns_and_its_fault_is_its_requests_alone(tmp_path: Path) -> None:
    def begin(job_name: str, system_prompt: str, user_prompt: str) -> Dialogue:
        return TwoTurns(user_prompt)

    async with worker(tmp_path, dialogues=begin) as found:
        request = await ask(found, "data 5")
        ended = await outcome(found, request)
        assert (ended.state, ended.answer.text, ended.signals) == (
            RequestState.COMPLETED,
            "0 1 ",
            ("turn 1", "turn 2"),
        )
        assert (ended.answer.prompt_tokens, ended.answer.completion_tokens) == (3, 5)
        assert [turn.text for turn in ended.turns] == ["0 1 2 3 4 ", "0 1 "]
        assert (await found.get_status(request)).output_length == len("0 1 2 3 4 0 1 ")
        assert (await found.get_status(request)).tool_iterations_remaining == 0
        ended = await outcome(found, await ask(found, "head 0"))
        assert (ended.reason, ended.detail) == ("dialogue_failed", "ValueError: an empty answer")
