"""The tool loop's decider: tables, and any conversation at all."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest
from hive.jobs.exit_tools import EXIT_TOOLS, ending_names
from hive.jobs.toolloop import CALLS_A_TURN, FAIL_AT, Fate, LoopFailure, LoopLimits, LoopStep, ToolLoop
from hive.jobs.tools import ToolTable, define
from hive.worker.records import ToolCallText

ADD = define(
    "add",
    "",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
)
TABLE = ToolTable([ADD, define("now", "", {"type": "object"})], EXIT_TOOLS)
DECIDE = '{"question": "which?", "options": ["a", "b"]}'


def call(name: str, arguments: str = "{}") -> ToolCallText:
    return ToolCallText("", name, arguments)


def loop(iterations: int = 8, **more: bool) -> ToolLoop:
    return ToolLoop(TABLE, iterations=iterations, ending=ending_names(**more))


def fates(step: LoopStep) -> list[str]:
    return [one.fate.value for one in step.calls]


def test_the_defaults_are_those_decided() -> None:
    limits = LoopLimits()
    assert (limits.max_tool_iterations, limits.tool_timeout_s, limits.result_max_bytes, limits.parallel) == (
        8,
        30,
        65536,
        4,
    )


@pytest.mark.parametrize("wrong", [{"max_tool_iterations": 0}, {"parallel": True}, {"result_max_bytes": 1.5}])
def test_limits_that_are_none_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        LoopLimits(**wrong)
    with pytest.raises(BadRequest, match="tool_timeout_s"):
        LoopLimits(tool_timeout_s=0)


@pytest.mark.parametrize(
    ("name", "arguments", "fate", "why"),
    [
        ("add", '{"a": 1}', "run", ""),
        ("now", "", "run", ""),
        ("now", "  ", "run", ""),
        ("add", "true", "refuse", "the arguments are no JSON object: true"),
        ("add", "[1]", "refuse", "the arguments are no JSON object: [1]"),
        ("add", '{"a": 1', "refuse", 'the arguments are no JSON object: {"a": 1'),
        ("add", '{"a":' + "[" * 100_000, "refuse", 'the arguments are no JSON object: {"a":' + "[" * 195),
        ("add", '"\ud83d"', "refuse", 'the arguments are no JSON object: "\ud83d"'),
        ("add", '{"a": "1"}', "refuse", 'the arguments do not match the schema: a: "1" is no integer'),
        ("add", "{}", "refuse", 'the arguments do not match the schema: "a" is missing'),
        ("add", '{"a": 1, "c": 2}', "refuse", 'the arguments do not match the schema: there is no "c"'),
        ("LOW_CONFIDENCE", '{"reason": "old data"}', "note", ""),
        ("LOW_CONFIDENCE", '{"reason": 1}', "refuse", "the arguments do not match the schema: reason: 1 is no string"),
        ("NEEDS_MANAGER_DECISION", '{"question": "x", "options": ["one"]}', "refuse", None),
    ],
)
def test_a_call_is_run_noted_or_refused_with_the_reason(name: str, arguments: str, fate: str, why: str | None) -> None:
    (judged,) = loop().take([call(name, arguments)]).calls
    assert judged.fate.value == fate
    assert why is None or judged.why == why


def test_an_unknown_tool_is_refused_and_told_what_there_is() -> None:
    (judged,) = loop().take([call("rm")]).calls
    assert judged.why.startswith('there is no tool "rm"; there is: add, now, LOW_CONFIDENCE')
    (judged,) = loop().take([call("")]).calls
    assert judged.why.startswith("this calls no tool; there is:")


def test_two_turns_of_nothing_but_malformed_calls_fail_with_the_raw_text() -> None:
    found = loop()
    assert found.take([call("add", "true")]).failure is None
    step = found.take([call("add", '{"a": oops'), call("rm", "{}")])
    assert step.failure is LoopFailure.MALFORMED_TOOL_CALL
    assert 'add({"a": oops); rm({})' in step.detail


def test_a_call_that_was_cut_off_is_told_that_it_was() -> None:
    """The model read "this calls no tool" about an answer that had come to its last permitted token."""
    step = loop().take([call("", '{"answer": "on and on')], is_cut=True)
    assert step.calls[0].why.startswith("what you wrote was too long and was cut off, so this calls no tool")
    step = loop().take([call("now", "{}"), call("now", '{"a')], is_cut=True)
    assert [one.why.startswith("what you wrote was too long") for one in step.calls] == [False, True]


def test_one_good_call_between_them_begins_anew() -> None:
    found = loop()
    for calls in ([call("rm")], [call("rm"), call("now")], [call("rm")]):
        assert found.take(calls).failure is None
    assert found.take([call("rm", "1")]).failure is LoopFailure.MALFORMED_TOOL_CALL


def test_the_same_batch_is_warned_of_at_the_third_time_and_fails_at_the_fifth() -> None:
    found = loop()
    texts = ['{"a":1,"b":2}', '{"b": 2, "a": 1}', '{ "a":1, "b":2 }', '{"a":1,"b":2}', '{"a":1,"b":2}']
    steps = [found.take([call("add", text)]) for text in texts]
    assert [bool(step.warning) for step in steps] == [False, False, True, True, False]
    assert [step.failure for step in steps] == [None] * 4 + [LoopFailure.REPEATED_TOOL_CALL]


def test_another_batch_between_them_begins_anew() -> None:
    found = loop(iterations=20)
    for number in range(16):
        step = found.take([call("add", f'{{"a": {number // 4}}}')])
        assert step.failure is None
        assert bool(step.warning) is (number % 4 >= 2)


def test_numbers_of_any_size_are_compared() -> None:
    found = loop()
    for _ in range(4):
        assert found.take([call("now", '{"n": 123456789012345678901234567890, "x": 1e300}')]).failure is None


def test_after_the_last_turn_with_calls_an_answer_is_wanted() -> None:
    found = loop(iterations=1)
    assert found.take([call("now")]).failure is None
    assert found.left == 0
    assert found.take([call("add", '{"a": 1}')]).failure is LoopFailure.TOOL_ITERATIONS_EXHAUSTED
    found = loop(iterations=1)
    found.take([call("now")])
    assert found.take([]).is_last


def test_a_signal_after_the_last_turn_with_calls_is_kept_and_is_the_end() -> None:
    found = loop(iterations=1)
    found.take([call("now")])
    step = found.take([call("LOW_CONFIDENCE", '{"reason": "x"}')])
    assert (step.is_last, step.failure, len(found.signals)) == (True, None, 1)


@pytest.mark.parametrize(
    ("name", "arguments", "stop", "ends"),
    [
        ("LOW_CONFIDENCE", '{"reason": "x"}', True, False),
        ("NEEDS_EXTERNAL_INFO", '{"missing": "x"}', True, False),
        ("NEEDS_HIGHER_REASONER", '{"reason": "x"}', True, False),
        ("NEEDS_MANAGER_DECISION", DECIDE, True, True),
        ("NEEDS_MANAGER_DECISION", DECIDE, False, False),
        ("POLICY_RISK", '{"risk": "x"}', True, True),
        ("POLICY_RISK", '{"risk": "x"}', False, True),
    ],
)
def test_exit_tools_are_signals_and_some_end_at_once(name: str, arguments: str, stop: bool, ends: bool) -> None:
    """Nothing else of that turn runs, whether it stands before or behind."""
    found = loop(stop_on_decision_request=stop)
    calls = [call("now"), call(name, arguments), call("now"), call("LOW_CONFIDENCE", '{"reason": "later"}')]
    assert found.ends_with(calls[:1]) is False
    assert found.ends_with(calls[:2]) is ends
    assert not found.signals
    step = found.take(calls)
    assert step.is_last is ends
    assert [signal.name for signal in found.signals] == ([name] if ends else [name, "LOW_CONFIDENCE"])
    (first, *_) = found.signals
    assert (first.arguments, first.turn, first.has_ended) == (msgspec.json.decode(arguments), 1, ends)
    assert len(step.calls) == (2 if ends else 4)


def test_more_calls_than_a_turn_may_have_are_refused() -> None:
    step = loop().take([call("now")] * (CALLS_A_TURN + 2))
    assert fates(step) == ["run"] * CALLS_A_TURN + ["refuse"] * 2


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(BadRequest, match="two tools of the name add"):
        ToolTable([ADD, ADD])
    with pytest.raises(BadRequest, match="two tools of the name POLICY_RISK"):
        ToolTable([define("POLICY_RISK", "", {})], EXIT_TOOLS)


# --- any conversation --------------------------------------------------------------------------------------------

NAMES = st.sampled_from([*TABLE.by_name, "rm", ""])
ARGUMENTS = st.one_of(
    st.sampled_from(["{}", "", "true", '{"a": 1}', '{"a": 2, "b": 1}', '{"reason": "x"}', '{"risk": "x"}', DECIDE]),
    st.text(max_size=20),
)
TURNS = st.lists(st.lists(st.builds(call, NAMES, ARGUMENTS), max_size=4), max_size=30)


@given(TURNS, st.integers(1, 8), st.booleans())
def test_any_conversation_comes_to_an_end_and_every_call_to_a_fate(
    turns: Sequence[Sequence[ToolCallText]], iterations: int, stop: bool
) -> None:
    found = loop(iterations, stop_on_decision_request=stop)
    faulty, before, signals = 0, found.left, 0
    for number, calls in enumerate(turns):
        cut = found.ends_with(calls)
        step = found.take(calls)
        assert len(found.signals) >= signals
        signals = len(found.signals)
        is_over = step.is_last or step.failure is not None
        assert is_over or number < iterations
        assert found.left == before - (not is_over)
        before = found.left
        if is_over:
            assert not calls or cut or step.failure is not None or not found.left
            assert not (step.is_last and step.failure is not None)
            return
        assert not cut
        assert [one.call for one in step.calls] == list(calls)
        for one in step.calls:
            assert bool(one.why) is (one.fate is Fate.REFUSE)
            assert one.fate is Fate.REFUSE or one.call.name in TABLE.by_name
        faulty = faulty + 1 if all(one.fate is Fate.REFUSE for one in step.calls) else 0
        assert faulty < 2


@given(TURNS, st.integers(1, 8))
def test_what_ends_a_request_ends_it_wherever_the_answer_is_cut_behind_it(
    turns: Sequence[Sequence[ToolCallText]], iterations: int
) -> None:
    """The worker cuts an answer when a whole call ends the request: the outcome is that of the whole answer."""
    whole, cut = loop(iterations), loop(iterations)
    for calls in turns:
        shorter = next((calls[: at + 1] for at in range(len(calls)) if cut.ends_with(calls[: at + 1])), calls)
        step = whole.take(calls)
        assert cut.take(shorter) == step
        assert whole.signals == cut.signals
        if step.is_last or step.failure is not None:
            return


@given(st.lists(st.integers(0, 2), min_size=5, max_size=40))
def test_five_identical_batches_in_a_row_are_the_end_and_four_are_not(numbers: list[int]) -> None:
    found = loop(iterations=100)
    row = 0
    for at, number in enumerate(numbers):
        row = row + 1 if at and numbers[at - 1] == number else 1
        step = found.take([call("add", f'{{"a": {number}}}')])
        assert (step.failure is not None) is (row == FAIL_AT)
        if step.failure is not None:
            return
