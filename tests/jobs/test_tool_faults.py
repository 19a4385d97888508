"""Requests with tools, and all that a server and a model may do to them: the server is a real process that does it."""

# ruff: noqa: ASYNC110 - other processes send no asyncio events

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.errors import BadRequest, NotFound
from hive.jobs.call_forms import ToolForm
from hive.jobs.exit_tools import EXIT_TOOLS, Signal
from hive.jobs.running import Tool, ToolFailed
from hive.jobs.toolloop import LoopLimits
from hive.jobs.tools import read_definition
from hive.worker.bios import STABLE, BiosForm
from hive.worker.profile import TimeoutProfile
from hive.worker.records import NotReady, RequestState
from hive.worker.worker import LlamaWorker
from tests.jobs.tool_workers import bodies, results_in, tool_worker
from tests.worker.scripted import PATIENT, Folder, OfItsOwnKind, ask, has_data, outcome, ready_again


def hurried(**times: float | None) -> TimeoutProfile:
    """PATIENT but for these times; nothing else ends anything."""
    off = dict.fromkeys(("headers_timeout_s", "prefill_liveness_timeout_s", "idle_stream_timeout_s"))
    return msgspec.structs.replace(PATIENT, **(off | times))


def echo(text: str = "") -> str:
    """Say it again."""
    return f"<{text}>"


class Gate:
    """A tool that waits until it is let go."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.begun = 0
        self.ended = 0

    async def gate(self) -> str:
        """Wait."""
        self.begun += 1
        try:
            await self.is_open.wait()
        finally:
            self.ended += 1
        return "open"

    async def has_begun(self) -> None:
        while not self.begun:
            await asyncio.sleep(0.005)


# --- a loop, well ------------------------------------------------------------------------------------------------


async def test_a_tool_is_run_and_its_result_goes_back_with_what_is_left(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], bios=BiosForm.ONE_MESSAGE, max_tokens=9) as found:
        script = 'text I_look. call echo={"text":"a"} call echo={"text":"b"} | think Hm. call echo={} | text Done.'
        asked = await found.submit("test", "Be short.", script, params={"new_knob": 1, "tools": ["mine"]})
        assert asked.request_id is not None
        ended = await outcome(found, asked.request_id)
        assert (ended.state, ended.reason, ended.answer.text) == (RequestState.COMPLETED, None, "Done.")
        assert [turn.text for turn in ended.turns] == ["I\nlook.", "", "Done."]
        status = await found.get_status(asked.request_id)
        assert (status.tool_iterations_remaining, status.output_length) == (6, len("I\nlook.Done."))
        first, second, third = bodies(tmp_path)
        assert [(body["new_knob"], body["max_tokens"], body["stream"]) for body in (first, third)] == [(1, 9, True)] * 2
        assert [one["function"]["name"] for one in first["tools"]] == ["echo"]
        system = first["messages"][0]["content"]
        assert system.startswith(STABLE)
        assert system.index("You can call tools") < system.index("Be short.") < system.index("It is 20")
        assert first["messages"] == second["messages"][: len(first["messages"])]
        assert second["messages"] == third["messages"][: len(second["messages"])]
        said, one, other = second["messages"][2:]
        assert (said["role"], said["content"], len(said["tool_calls"])) == ("assistant", "I\nlook.", 2)
        assert [(call["id"], call["function"]["arguments"]) for call in said["tool_calls"]] == [
            ("c0", '{"text":"a"}'),
            ("c1", '{"text":"b"}'),
        ]
        assert (one["tool_call_id"], other["tool_call_id"]) == ("c0", "c1")
        assert one["content"].startswith("<a>\n\n[It is ")
        assert other["content"].endswith("7 more turns with calls are permitted.]")
        assert third["messages"][-1]["content"].endswith("6 more turns with calls are permitted.]")
        assert third["messages"][-2]["reasoning_content"] == "Hm."


async def test_by_schema_calls_and_answers_are_one_object_each(tmp_path: Path) -> None:
    script = 'text {"tool":"echo","arguments":{"text":"a"}} | text {"answer":"Done."}'
    async with tool_worker(tmp_path, [echo], form=ToolForm.SCHEMA) as found:
        ended = await outcome(found, await ask(found, script))
        assert (ended.state, ended.answer.text) == (RequestState.COMPLETED, "Done.")
        first, second = bodies(tmp_path)
        assert "tools" not in first
        assert first["response_format"]["json_schema"]["schema"]["anyOf"]
        assert '"tool":"echo"' in first["messages"][0]["content"]
        assert second["messages"][-1]["role"] == "user"
        assert second["messages"][-1]["content"].startswith("Result of echo:\n<a>\n\n[It is ")


@pytest.mark.parametrize("form", list(ToolForm))
async def test_the_schema_of_an_answer_holds_without_tools(tmp_path: Path, form: ToolForm) -> None:
    """It was dropped, without a word."""
    schema = {"type": "object"}
    async with tool_worker(tmp_path, [], form=form, answer_schema=schema) as found:
        ended = await outcome(found, await ask(found, "text {}"))
        assert (ended.state, ended.answer.text) == (RequestState.COMPLETED, "{}")
        (body,) = bodies(tmp_path)
        assert "tools" not in body
        assert body["response_format"]["json_schema"]["schema"] == schema


async def test_an_answer_schema_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="JSON Schema"):
        async with tool_worker(tmp_path, [], answer_schema="x"):
            pass


async def test_a_coroutine_that_raises_what_is_no_exception_leaves_the_request_going(tmp_path: Path) -> None:
    """Its request ran for ever, and kept its slot."""

    async def odd() -> str:
        raise OfItsOwnKind

    async with tool_worker(tmp_path, [odd]) as found:
        ended = await outcome(found, await ask(found, "call odd={} | text Done."))
        assert (ended.state, ended.answer.text) == (RequestState.COMPLETED, "Done.")
        assert results_in(bodies(tmp_path)[-1]) == ['{"error":"OfItsOwnKind: "}']


async def test_in_the_form_of_the_original_specification_the_bios_is_messages_of_its_own(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], exit_tools=EXIT_TOOLS, bios=BiosForm.MESSAGES) as found:
        asked = await found.submit("test", "Be short.", "call echo={} | text Done.")
        assert asked.request_id is not None
        assert (await outcome(found, asked.request_id)).answer.text == "Done."
        first, second = bodies(tmp_path)
        stable, rules, system, runtime, prompt = first["messages"]
        assert (stable["content"], system["content"]) == (STABLE, "Be short.")
        assert "POLICY_RISK" in rules["content"]
        assert runtime["content"].startswith("It is ")
        assert prompt["role"] == "user"
        assert second["messages"][:5] == first["messages"]


async def test_a_runner_of_ones_own_is_told_its_call_and_how_much_is_kept(tmp_path: Path) -> None:
    class Runner:
        async def run(self, name: str, arguments: Mapping[str, Any], *, max_bytes: int) -> str:
            if not arguments:
                raise ToolFailed("nothing to look up")
            return f"{name} {arguments} {max_bytes}"

    look = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    tools = [Tool(read_definition(look), Runner())]
    async with tool_worker(tmp_path, tools) as found:
        await outcome(found, await ask(found, 'call look_up={"a":1} call look_up={} | text Done.'))
        first, second = bodies(tmp_path)
        assert first["tools"] == [look]
        assert results_in(second) == ["look_up {'a': 1} 65536", '{"error":"nothing to look up"}']


async def test_without_any_tool_there_is_one_turn(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, []) as found:
        asked = await ask(found, "data 1")
        assert (await outcome(found, asked)).answer.text == "0 "
        assert (await found.get_status(asked)).tool_iterations_remaining is None
        assert "tools" not in bodies(tmp_path)[0]


# --- the server's faults, within a loop --------------------------------------------------------------------------

CALL = "call echo={} | "


async def test_slow_headers_in_a_later_turn_are_waited_for_and_too_slow_ones_fail(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], profile=hurried(headers_timeout_s=1.0)) as found:
        assert (await outcome(found, await ask(found, CALL + "head 0.3 data 1"))).answer.text == "0 "
        ended = await outcome(found, await ask(found, CALL + "head 60"))
        assert (ended.state, ended.reason, len(ended.turns)) == (RequestState.FAILED, "headers_timeout", 1)


async def test_silence_and_then_a_stream_in_a_later_turn_is_no_stall(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], profile=hurried(idle_stream_timeout_s=0.3)) as found:
        asked = await ask(found, CALL + "head 0 wait 0.6 data 2")
        ended = await outcome(found, asked)
        assert (ended.state, ended.answer.text) == (RequestState.COMPLETED, "0 1 ")
        status = await found.get_status(asked)
        assert status.first_data_at is not None
        assert status.first_data_at <= status.last_progress_at


async def test_a_stall_in_a_later_turn_fails_with_what_came(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], profile=hurried(idle_stream_timeout_s=0.5)) as found:
        ended = await outcome(found, await ask(found, CALL + "data 2 wait 60"))
        assert (ended.reason, ended.answer.text, len(ended.turns)) == ("stall_timeout", "0 1 ", 1)
        assert (await found.get_worker_status()).restart_count == 0


async def test_a_disconnect_in_the_middle_of_a_call_runs_nothing(tmp_path: Path) -> None:
    run: list[str] = []

    def note(text: str) -> str:
        """Note it."""
        run.append(text)
        return ""

    async with tool_worker(tmp_path, [note]) as found:
        script = 'call note={"text":"a"} | call note={"text":"b"} cut'
        ended = await outcome(found, await ask(found, script))
        assert (ended.reason, [call.name for call in ended.answer.tool_calls]) == ("stream_incomplete", ["note"])
        assert run == ["a"]


@pytest.mark.parametrize("how", ["crash", "kill"])
async def test_a_crash_in_turn_3_fails_the_request_and_nothing_is_sent_or_run_twice(tmp_path: Path, how: str) -> None:
    run: list[int] = []

    def count() -> int:
        """Count."""
        run.append(len(run))
        return len(run)

    async with tool_worker(tmp_path, [count]) as found:
        last = "data 2 crash 7" if how == "crash" else "data 2 wait 60"
        asked = await ask(found, f"call count={{}} | call count={{}} | {last}")
        if how == "kill":
            await has_data(found, asked, length=len("0 1 "))
            pid = (await found.get_worker_status()).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        ended = await outcome(found, asked)
        assert (ended.state, ended.reason, ended.answer.text) == (RequestState.FAILED, "server_died", "0 1 ")
        assert (len(ended.turns), run) == (2, [0, 1])
        await ready_again(found)
        assert len(bodies(tmp_path)) == 3
        assert (await outcome(found, await ask(found, "call count={} | data 1"))).state is RequestState.COMPLETED
        assert run == [0, 1, 2]


async def test_a_server_that_dies_while_a_tool_runs_fails_the_request_and_ends_the_tool(tmp_path: Path) -> None:
    gate = Gate()
    async with tool_worker(tmp_path, [gate.gate]) as found:
        asked = await ask(found, "call gate={} | data 1")
        await gate.has_begun()
        pid = (await found.get_worker_status()).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await outcome(found, asked)).reason == "server_died"
        while not gate.ended:
            await asyncio.sleep(0.005)
        await ready_again(found)


async def test_the_end_of_a_worker_leaves_no_process_and_no_tool(tmp_path: Path) -> None:
    gate, place = Gate(), Folder(tmp_path)
    flags = ("--ignore-term", "--child", "fork", "--child", "setsid", "--child", "double")
    async with tool_worker(tmp_path, [gate.gate], *flags) as found:
        waits, streams = await ask(found, "call gate={} | data 1"), await ask(found, "every 0.05 data 9999")
        await gate.has_begun()
        await has_data(found, streams)
        while len(place.alive()) < 4:
            await asyncio.sleep(0.005)
        await found.stop()
        assert not place.alive()
        for asked in (waits, streams):
            assert (await outcome(found, asked)).reason == "worker_restarted"
        while not gate.ended:
            await asyncio.sleep(0.005)


# --- time --------------------------------------------------------------------------------------------------------


async def test_the_time_of_tools_is_nobodys_stall(tmp_path: Path) -> None:
    """The server owes nothing meanwhile: neither the request is late nor does the server stand still."""

    async def slow() -> str:
        """Be slow."""
        await asyncio.sleep(1.5)
        return "x"

    times = hurried(idle_stream_timeout_s=0.4, prefill_liveness_timeout_s=0.8, headers_timeout_s=0.4)
    async with tool_worker(tmp_path, [slow], profile=times) as found:
        ended = await outcome(found, await ask(found, "call slow={} | call slow={} | wait 0.3 data 1"))
        assert (ended.state, ended.reason) == (RequestState.COMPLETED, None)
        assert (await found.get_worker_status()).restart_count == 0


async def test_a_server_that_hangs_while_another_requests_tools_run_is_found(tmp_path: Path) -> None:
    gate = Gate()
    async with tool_worker(tmp_path, [gate.gate], profile=hurried(prefill_liveness_timeout_s=1.0)) as found:
        waits = await ask(found, "call gate={} | data 1")
        await gate.has_begun()
        assert (await outcome(found, await ask(found, "head 60"))).reason == "stall_timeout"
        assert (await outcome(found, waits)).reason == "stall_timeout"
        await ready_again(found)


async def test_the_absolute_time_is_that_of_all_turns_and_tools(tmp_path: Path) -> None:
    gate = Gate()
    async with tool_worker(tmp_path, [echo, gate.gate], profile=hurried(absolute_timeout_s=1.5)) as found:
        turns = await ask(found, " | ".join(f'wait 0.4 call echo={{"text":"{n}"}}' for n in range(8)))
        tool = await ask(found, "call gate={} | data 1")
        for asked in (turns, tool):
            ended = await outcome(found, asked)
            assert (ended.state, ended.reason) == (RequestState.FAILED, "absolute_timeout")
        assert (await found.get_worker_status()).restart_count == 0
        assert (await outcome(found, await ask(found, "data 1"))).state is RequestState.COMPLETED


# --- the model's faults ------------------------------------------------------------------------------------------


async def test_malformed_calls_are_told_and_two_turns_of_them_fail_with_the_raw_text(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo]) as found:
        ended = await outcome(found, await ask(found, "call echo=true | call echo={} | call rm={} | call echo={oops"))
        assert (ended.state, ended.reason) == (RequestState.FAILED, "malformed_tool_call")
        assert "The model wrote: echo({oops)" in ended.detail
        assert ended.answer.tool_calls[0].arguments == "{oops"
        asked = bodies(tmp_path)
        assert [results_in(body) for body in asked][-1] == [
            '{"error":"the arguments are no JSON object: true"}',
            "<>",
            '{"error":"there is no tool \\"rm\\"; there is: echo"}',
        ]
        assert asked[1]["messages"][-2]["tool_calls"][0]["function"]["arguments"] == "{}"


async def test_malformed_exit_calls_are_no_signals_and_fail_alike(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], exit_tools=EXIT_TOOLS) as found:
        script = 'call POLICY_RISK=true | call NEEDS_MANAGER_DECISION={"question":"x","options":["one"]}'
        ended = await outcome(found, await ask(found, script))
        assert (ended.state, ended.reason, ended.signals) == (RequestState.FAILED, "malformed_tool_call", ())
        assert results_in(bodies(tmp_path)[1]) == ['{"error":"the arguments are no JSON object: true"}']


async def test_by_schema_what_is_no_object_of_the_form_is_malformed(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], form=ToolForm.SCHEMA) as found:
        ended = await outcome(found, await ask(found, 'text {"tool": | text Sorry.'))
        assert (ended.reason, ended.answer.text) == ("malformed_tool_call", "Sorry.")
        assert "this calls no tool; there is: echo" in ended.detail


async def test_the_same_call_five_times_fails_and_is_warned_of_before(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo]) as found:
        ended = await outcome(found, await ask(found, " | ".join(['call echo={"text":"a"}'] * 9)))
        assert (ended.state, ended.reason, len(ended.turns)) == (RequestState.FAILED, "repeated_tool_call", 5)
        notes = [body["messages"][-1]["content"].rpartition("\n\n")[2] for body in bodies(tmp_path)[1:]]
        assert ["same call" in note for note in notes] == [False, False, True, True]


async def test_a_model_that_only_calls_is_ended_when_its_turns_are_spent(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], limits=LoopLimits(max_tool_iterations=2)) as found:
        asked = await ask(found, " | ".join(f'call echo={{"text":"{n}"}}' for n in range(5)))
        ended = await outcome(found, asked)
        assert (ended.reason, len(ended.turns)) == ("tool_iterations_exhausted", 3)
        assert (await found.get_status(asked)).tool_iterations_remaining == 0
        assert bodies(tmp_path)[2]["messages"][-1]["content"].endswith("No more calls are permitted: answer now.]")


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("white 8192 wait 60", "white space"),
        ('call echo={"text":"a"} | white 8192 wait 60', "white space"),
        ("think over-and-over-again_ " * 20 + "wait 60", "same line"),
        ("text over-and-over-again_ " * 20 + "wait 60", "same line"),
    ],
)
async def test_a_model_that_writes_in_circles_is_stopped(tmp_path: Path, script: str, detail: str) -> None:
    async with tool_worker(tmp_path, [echo]) as found:
        ended = await outcome(found, await ask(found, script))
        assert (ended.state, ended.reason) == (RequestState.FAILED, "repeated_line_loop")
        assert detail in ended.detail


# --- exit tools --------------------------------------------------------------------------------------------------

DECIDE = 'call NEEDS_MANAGER_DECISION={"question":"which?","options":["a","b"]}'


@pytest.mark.parametrize(
    ("exit_call", "name"), [(DECIDE, "NEEDS_MANAGER_DECISION"), ('call POLICY_RISK={"risk":"x"}', "POLICY_RISK")]
)
async def test_a_decision_and_a_risk_end_the_request_at_once(tmp_path: Path, exit_call: str, name: str) -> None:
    """Nothing else of that turn runs, and what the model would write behind it is not waited for."""
    gate = Gate()
    async with tool_worker(tmp_path, [gate.gate], exit_tools=EXIT_TOOLS) as found:
        ended = await outcome(found, await ask(found, f"call gate={{}} {exit_call} call gate={{}} wait 60"))
        assert (ended.state, ended.reason) == (RequestState.COMPLETED, None)
        assert [(signal.name, signal.has_ended) for signal in ended.signals] == [(name, True)]
        assert (gate.begun, len(ended.turns)) == (0, 1)
        assert (await outcome(found, await ask(found, "data 1"))).state is RequestState.COMPLETED


async def test_other_signals_are_noted_and_the_model_goes_on(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], exit_tools=EXIT_TOOLS, stop_on_decision_request=False) as found:
        script = f'call LOW_CONFIDENCE={{"reason":"old"}} call echo={{}} | {DECIDE} | text Done.'
        asked = await ask(found, script)
        ended = await outcome(found, asked)
        assert (ended.state, ended.answer.text) == (RequestState.COMPLETED, "Done.")
        assert ended.signals == (
            Signal("LOW_CONFIDENCE", {"reason": "old"}, 1),
            Signal("NEEDS_MANAGER_DECISION", {"question": "which?", "options": ["a", "b"]}, 2),
        )
        assert (await found.get_status(asked)).signals == ended.signals
        assert results_in(bodies(tmp_path)[2]) == ["noted", "<>", "noted"]


async def test_exit_tools_of_ones_own_are_openai_definitions(tmp_path: Path) -> None:
    mine = {"type": "function", "function": {"name": "HAND_OVER", "parameters": {"type": "object"}}}
    async with tool_worker(tmp_path, [], exit_tools=[mine]) as found:
        ended = await outcome(found, await ask(found, 'call HAND_OVER={"to":"x"} | text Done.'))
        assert ended.signals == (Signal("HAND_OVER", {"to": "x"}, 1),)
        assert bodies(tmp_path)[0]["tools"] == [mine]


async def test_signals_are_kept_when_the_request_fails_later(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], exit_tools=EXIT_TOOLS) as found:
        ended = await outcome(found, await ask(found, 'call LOW_CONFIDENCE={"reason":"x"} | data 1 cut'))
        assert (ended.reason, [signal.name for signal in ended.signals]) == ("stream_incomplete", ["LOW_CONFIDENCE"])


# --- the tools' faults -------------------------------------------------------------------------------------------


def floods() -> Any:
    """Never end."""
    while True:
        yield "spam"


def returns_much() -> str:
    """Return 10 MB."""
    return "x" * 10_000_000


def raises() -> str:
    """Raise."""
    raise ValueError("broken")


async def hangs() -> None:
    """Hang."""
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("tool", "beginning", "length"),
    [
        (floods, "spamspam", 65536 + 30),
        (returns_much, "xxxx", 65536 + 30),
        (raises, '{"error":"ValueError: broken"}', 30),
        (hangs, '{"error":"hangs gave no result within 0.5 s"}', 45),
    ],
)
async def test_whatever_a_tool_does_the_model_has_a_result_and_goes_on(
    tmp_path: Path, tool: Callable[..., Any], beginning: str, length: int
) -> None:
    async with tool_worker(tmp_path, [tool], limits=LoopLimits(tool_timeout_s=0.5)) as found:
        ended = await outcome(found, await ask(found, f"call {tool.__name__}={{}} | text Done."))
        assert (ended.state, ended.answer.text) == (RequestState.COMPLETED, "Done.")
        (result,) = results_in(bodies(tmp_path)[1])
        assert result.startswith(beginning)
        assert len(result) <= length


# --- cancel ------------------------------------------------------------------------------------------------------


async def cancelled(found: LlamaWorker, asked: int) -> None:
    assert await found.cancel(asked)
    ended = await outcome(found, asked)
    assert (ended.state, ended.reason) == (RequestState.CANCELED, "canceled")
    assert not await found.cancel(asked)
    assert (await found.get_worker_status()).slots_used == 0
    assert (await outcome(found, await ask(found, "call echo={} | data 1"))).state is RequestState.COMPLETED
    await found.release(asked)
    with pytest.raises(NotFound):
        await found.get_result(asked)


@pytest.mark.parametrize(
    ("script", "turns", "text"),
    [
        ("head 60", 0, ""),
        ("wait 60", 0, ""),
        ("data 2 wait 60", 0, "0 1 "),
        ('call echo={"text":"a"} wait 60', 0, ""),
        ("call echo={} | head 60", 1, ""),
        ("call echo={} | data 2 wait 60", 1, "0 1 "),
    ],
)
async def test_a_cancel_in_any_state_of_a_stream_keeps_what_came(
    tmp_path: Path, script: str, turns: int, text: str
) -> None:
    async with tool_worker(tmp_path, [echo], slots=1) as found:
        asked = await ask(found, script)
        while len(bodies(tmp_path)) <= turns:
            await asyncio.sleep(0.01)
        if text:
            while (await found.get_status(asked)).output_length < len(text):
                await asyncio.sleep(0.01)
        await cancelled(found, asked)


async def test_a_cancel_before_anything_was_sent(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo], slots=1) as found:
        await cancelled(found, await ask(found, "data 1"))


async def test_a_cancel_while_a_tool_runs_ends_the_tool(tmp_path: Path) -> None:
    gate = Gate()
    async with tool_worker(tmp_path, [echo, gate.gate], slots=1) as found:
        asked = await ask(found, "call gate={} call gate={} call gate={} call gate={} call gate={} | data 1")
        await gate.has_begun()
        assert await found.get_result(asked) == NotReady(asked)
        await cancelled(found, asked)
        assert (gate.begun, gate.ended) == (4, 4)


async def test_a_cancel_of_what_has_ended_changes_nothing(tmp_path: Path) -> None:
    async with tool_worker(tmp_path, [echo]) as found:
        asked = await ask(found, "call echo={} | text Done.")
        ended = await outcome(found, asked)
        assert not await found.cancel(asked)
        assert await found.get_result(asked) == ended


async def test_a_request_whose_tools_run_holds_its_slot(tmp_path: Path) -> None:
    gate = Gate()
    async with tool_worker(tmp_path, [gate.gate], slots=1) as found:
        asked = await ask(found, "call gate={} | text Done.")
        await gate.has_begun()
        assert (await found.submit("test", "", "data 1")).error == "NO_SLOT_AVAILABLE"
        gate.is_open.set()
        assert (await outcome(found, asked)).answer.text == "Done."
