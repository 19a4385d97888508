"""The switch of the inference server: every way it can go, killed anywhere, ends in one of three states. Pure."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hive.backends.switch import (
    RESUMED_MAX,
    Failure,
    Switch,
    SwitchEnd,
    SwitchStep,
    Target,
    active_after,
    begun,
    cancelled,
    end_of,
    failed,
    longest_s,
    models_to_probe,
    outcome,
    resumed,
    sentence,
    succeeded,
    way,
)
from hive.domain import BackendKind, ModelInfo
from hive.settings.table import InferenceSection
from tests.examples import examples

VLLM = Target(BackendKind.VLLM, "/run/vllm.sock", "vllm.service")
LLAMA = Target(BackendKind.LLAMA, "/run/llama.sock", "llama.service")
OTHER = Target(BackendKind.LLAMA, "127.0.0.1:8080")
DEMO = Target(BackendKind.DEMO, "/run/demo.sock")
WHY = Failure("backend_timeout", "it did not answer within 60 s", "look", ["out of memory"])
THEN = Failure("not_found", "its program is gone", "", ["no such file"])
UNITS = begun(VLLM, LLAMA)
FOREIGN = begun(OTHER, DEMO)


def carried_out(switch: Switch, faults: dict[tuple[bool, SwitchStep], Failure]) -> tuple[list[str], Switch]:
    """The steps it takes where these fail, by way; `<` is before those of the way back."""
    steps = []
    while not switch.ended:
        steps.append(("<" if switch.back else "") + switch.step)
        fault = faults.get((switch.back, switch.step))
        switch = succeeded(switch) if fault is None else failed(switch, fault)
    return steps, switch


@pytest.mark.parametrize(
    ("switch", "faults", "steps", "end"),
    [
        (UNITS, {}, "close stop free start health record open", SwitchEnd.SWITCHED),
        (FOREIGN, {}, "health close record open", SwitchEnd.SWITCHED),
        (begun(VLLM, None), {}, "close start health record open", SwitchEnd.SWITCHED),
        (UNITS, {(False, SwitchStep.CLOSE): WHY}, "close <open", SwitchEnd.ROLLED_BACK),
        (FOREIGN, {(False, SwitchStep.HEALTH): WHY}, "health <open", SwitchEnd.ROLLED_BACK),
        (
            UNITS,
            {(False, SwitchStep.STOP): WHY},
            "close stop <stop <free <start <health <open",
            SwitchEnd.ROLLED_BACK,
        ),
        (
            UNITS,
            {(False, SwitchStep.START): WHY},
            "close stop free start <stop <free <start <health <open",
            SwitchEnd.ROLLED_BACK,
        ),
        (
            UNITS,
            {(False, SwitchStep.RECORD): WHY, (True, SwitchStep.STOP): THEN},
            "close stop free start health record <stop <free <start <health <open",
            SwitchEnd.ROLLED_BACK,
        ),
        (
            UNITS,
            {(False, SwitchStep.HEALTH): WHY, (True, SwitchStep.START): THEN},
            "close stop free start health <stop <free <start <open",
            SwitchEnd.DEGRADED,
        ),
        (
            UNITS,
            {(False, SwitchStep.HEALTH): WHY, (True, SwitchStep.HEALTH): THEN},
            "close stop free start health <stop <free <start <health <open",
            SwitchEnd.DEGRADED,
        ),
        (
            msgspec.structs.replace(UNITS, old_answered=False),
            {(False, SwitchStep.HEALTH): WHY},
            "close stop free start health <stop <free <start <open",
            SwitchEnd.ROLLED_BACK,
        ),
        (
            begun(VLLM, None),
            {(False, SwitchStep.HEALTH): WHY},
            "close start health <stop <free <open",
            SwitchEnd.ROLLED_BACK,
        ),
        (
            begun(VLLM, None),
            {(False, SwitchStep.HEALTH): WHY, (True, SwitchStep.STOP): THEN},
            "close start health <stop <free <open",
            SwitchEnd.DEGRADED,
        ),
    ],
)
def test_the_way_it_takes(
    switch: Switch, faults: dict[tuple[bool, SwitchStep], Failure], steps: str, end: SwitchEnd
) -> None:
    taken, ended = carried_out(switch, faults)
    assert " ".join(taken) == steps
    assert end_of(ended) is end
    assert active_after(ended) == (switch.new if end is SwitchEnd.SWITCHED else switch.old)


def test_a_successful_switch_has_nothing_to_complain_of() -> None:
    assert outcome(carried_out(UNITS, {})[1]) is None


@pytest.mark.parametrize(
    ("switch", "faults", "code", "words"),
    [
        (
            UNITS,
            {(False, SwitchStep.HEALTH): WHY},
            "rolled_back",
            "vllm: it did not answer within 60 s; llama is active again",
        ),
        (
            begun(VLLM, None),
            {(False, SwitchStep.HEALTH): WHY, (True, SwitchStep.STOP): THEN},
            "dependency_down",
            f"vllm: it did not answer within 60 s; no inference server is active, and vllm could not be stopped: "
            f"{THEN.message}",
        ),
        (UNITS, {(False, SwitchStep.CLOSE): WHY}, "rolled_back", "llama is active as before"),
        (FOREIGN, {(False, SwitchStep.HEALTH): WHY}, "rolled_back", "llama at 127.0.0.1:8080: it did not answer"),
        (
            begun(VLLM, None),
            {(False, SwitchStep.START): WHY},
            "rolled_back",
            "no inference server is active, as before",
        ),
        (
            msgspec.structs.replace(UNITS, old_answered=False),
            {(False, SwitchStep.START): WHY},
            "rolled_back",
            "llama is chosen again; it did not answer before, either",
        ),
        (
            UNITS,
            {(False, SwitchStep.HEALTH): WHY, (True, SwitchStep.START): THEN},
            "dependency_down",
            "and going back failed: llama: its program is gone",
        ),
    ],
)
def test_what_failed_is_said_with_what_is_active_now(
    switch: Switch, faults: dict[tuple[bool, SwitchStep], Failure], code: str, words: str
) -> None:
    found = outcome(carried_out(switch, faults)[1])
    assert found is not None
    assert found.code == code
    assert words in found.message
    assert "out of memory" in found.log


def test_where_neither_came_up_both_wrote_their_last_lines() -> None:
    _, ended = carried_out(UNITS, {(False, SwitchStep.HEALTH): WHY, (True, SwitchStep.HEALTH): THEN})
    found = outcome(ended)
    assert found is not None
    assert found.log == ["out of memory", "no such file"]
    assert found.hint == "`hive backend logs llama` says why"


def reached(switch: Switch, step: SwitchStep, *, back: bool) -> Switch:
    """The switch as it is written down before this step."""
    while (switch.back, switch.step) != (back, step):
        turn = back and not switch.back and switch.step is SwitchStep.HEALTH
        switch = failed(switch, WHY) if turn else succeeded(switch)
    return switch


@pytest.mark.parametrize("step", way(UNITS))
def test_killed_before_any_step_the_next_daemon_finishes_it(step: SwitchStep) -> None:
    found = resumed(reached(UNITS, step, back=False))
    assert found.step is (SwitchStep.OPEN if step is SwitchStep.OPEN else SwitchStep.CLOSE)
    assert end_of(carried_out(found, {})[1]) is SwitchEnd.SWITCHED


@pytest.mark.parametrize("step", way(msgspec.structs.replace(UNITS, back=True))[1:])
def test_killed_on_the_way_back_the_next_daemon_goes_back(step: SwitchStep) -> None:
    found = resumed(reached(UNITS, step, back=True))
    steps, ended = carried_out(found, {})
    assert end_of(ended) is SwitchEnd.ROLLED_BACK
    assert steps == (
        ["<open"] if step is SwitchStep.OPEN else ["<close", "<stop", "<free", "<start", "<health", "<open"]
    )


@pytest.mark.parametrize("step", way(FOREIGN))
def test_a_switch_between_running_servers_is_finished_as_well(step: SwitchStep) -> None:
    found = resumed(reached(FOREIGN, step, back=False))
    assert found.step is (SwitchStep.OPEN if step is SwitchStep.OPEN else SwitchStep.HEALTH)
    assert end_of(carried_out(found, {})[1]) is SwitchEnd.SWITCHED


def test_a_switch_over_which_hive_ends_again_and_again_goes_back() -> None:
    switch = reached(UNITS, SwitchStep.START, back=False)
    for _ in range(RESUMED_MAX):
        switch = resumed(switch)
        assert not switch.back
    switch = resumed(switch)
    assert switch.back
    assert switch.why is not None
    assert "ended 3 times over it" in switch.why.message


def test_with_a_stopped_server_and_no_proxy_it_goes_on() -> None:
    found = resumed(reached(UNITS, SwitchStep.FREE, back=False))
    assert failed(found, WHY).step is SwitchStep.STOP


def test_it_can_be_cancelled_until_the_choice_is_recorded() -> None:
    for step in way(UNITS):
        switch = reached(UNITS, step, back=False)
        assert switch.can_be_cancelled is (step not in (SwitchStep.RECORD, SwitchStep.OPEN))
    back = cancelled(reached(UNITS, SwitchStep.START, back=False), WHY)
    assert (back.step, back.can_be_cancelled) == (SwitchStep.STOP, False)
    assert cancelled(reached(UNITS, SwitchStep.CLOSE, back=False), WHY).step is SwitchStep.OPEN


def test_every_step_has_its_sentence_either_way() -> None:
    forward = [sentence(reached(UNITS, step, back=False)) for step in way(UNITS)]
    assert forward == [
        "closing the gate: requests at llama finish, others wait",
        "stopping llama",
        "waiting until its memory is free",
        "starting vllm",
        "vllm: waiting until it answers",
        "recording vllm",
        "opening the gate",
    ]
    assert sentence(reached(UNITS, SwitchStep.STOP, back=True)) == (
        "going back, because it did not answer within 60 s: stopping vllm"
    )


def test_of_many_models_few_are_asked_and_a_request_waits_as_long_as_one_way_takes() -> None:
    assert models_to_probe([ModelInfo(name=f"m{size}", size_bytes=size) for size in range(9)], "m7") == [
        "m7",
        "m0",
        "m1",
    ]
    assert (
        longest_s(InferenceSection(switch_drain_s=1, switch_free_s=2, switch_health_tries=3, switch_health_every_s=4))
        == 30
    )


class Box(RuleBasedStateMachine):
    """Two units, a gate and a record; faults and kills anywhere. What is not written down is lost with the daemon."""

    @initialize(old_answered=st.booleans(), none_before=st.booleans())
    def begin(self, old_answered: bool, none_before: bool) -> None:
        old = None if none_before else LLAMA
        self.running = {LLAMA.unit} if old is not None and old_answered else set[str]()
        self.written = begun(VLLM, old, old_answered=old_answered)
        self.gate_closed = False
        self.let_through: Target | None = old
        self.kills = 0

    @precondition(lambda self: not self.written.ended)
    @rule()
    def the_step_succeeds(self) -> None:
        self._act(self.written, broken=False)
        self.written = succeeded(self.written)

    @precondition(lambda self: not self.written.ended and self.written.step is not SwitchStep.OPEN)
    @rule(half_done=st.booleans())
    def the_step_fails(self, half_done: bool) -> None:
        if half_done:
            self._act(self.written, broken=True)
        self.written = failed(self.written, WHY)

    @precondition(lambda self: not self.written.ended and self.kills < 6)
    @rule(done=st.booleans())
    def the_daemon_is_killed(self, done: bool) -> None:
        """Before or after the step was done, and never after that was written down."""
        if done:
            self._act(self.written, broken=False)
        self.kills += 1
        self.written = resumed(msgspec.json.decode(msgspec.json.encode(self.written), type=Switch))

    @precondition(lambda self: self.written.can_be_cancelled)
    @rule()
    def somebody_cancels(self) -> None:
        self.written = cancelled(self.written, WHY)

    @precondition(lambda self: self.written.ended)
    @rule()
    def another_switch_begins(self) -> None:
        old = active_after(self.written)
        new = LLAMA if old == VLLM else VLLM
        self.written = begun(new, old, old_answered=old is not None and old.unit in self.running)

    def _act(self, switch: Switch, *, broken: bool) -> None:
        goes, comes = switch.goes, switch.comes
        if switch.step is SwitchStep.CLOSE:
            self.gate_closed = True
        elif switch.step is SwitchStep.STOP:
            assert goes is not None
            self.running.discard(goes.unit)
        elif switch.step is SwitchStep.START:
            assert comes is not None
            self.running = set() if broken else {comes.unit}  # Conflicts= of the units
        elif switch.step is SwitchStep.OPEN:
            self.gate_closed = False
            self.let_through = comes

    @invariant()
    def one_server_at_most_is_up(self) -> None:
        assert len(getattr(self, "running", ())) <= 1

    @invariant()
    def it_ends_as_documented(self) -> None:
        written = getattr(self, "written", None)
        if written is None or not written.ended:
            return
        end = end_of(written)
        assert not self.gate_closed
        assert self.let_through == active_after(written)
        assert (outcome(written) is None) == (end is SwitchEnd.SWITCHED)
        active = active_after(written)
        if end is SwitchEnd.SWITCHED or (end is SwitchEnd.ROLLED_BACK and written.old_answered):
            assert self.running == (set() if active is None else {active.unit})

    def teardown(self) -> None:
        written = getattr(self, "written", None)
        if written is not None:
            assert len(carried_out(written, {})[0]) <= 2 * len(SwitchStep)


Box.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=30, deadline=None)
TestBox = Box.TestCase
