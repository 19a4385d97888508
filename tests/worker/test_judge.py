"""Tables of the judge, with a clock that is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.worker.judge import FailReason, InFlight, ServerFacts, has_place, judge, left_owed
from hive.worker.profile import TimeoutProfile

PROFILE = TimeoutProfile()
STREAMS = InFlight(asked_at=0, connected_at=0, headed_at=1, data_at=1)


def looked_at(request: InFlight, *, now: float, profile: TimeoutProfile = PROFILE) -> str | None:
    """The fate of one request of a server that works."""
    facts = ServerFacts(is_alive=True, requests={7: request}, burnt_at=now, owed_since=request.asked_at)
    verdict = judge(facts, profile, now=now)
    assert verdict.end is None
    return verdict.failed.get(7)


@pytest.mark.parametrize(
    ("request_", "now", "profile", "reason"),
    [
        (InFlight(asked_at=0), 1.9, PROFILE, None),
        (InFlight(asked_at=0), 2.1, PROFILE, "connect_failed"),
        (InFlight(asked_at=0, connected_at=0, waited_for_head_s=299), 299, PROFILE, None),
        (InFlight(asked_at=0, connected_at=0, waited_for_head_s=301), 301, PROFILE, "headers_timeout"),
        # It waited 20 minutes for a place, and 10 s in it.
        (InFlight(asked_at=0, connected_at=0, waited_for_head_s=10), 1210, PROFILE, None),
        (
            InFlight(asked_at=0, connected_at=0, waited_for_head_s=9e9),
            9e9,
            TimeoutProfile(headers_timeout_s=None),
            None,
        ),
        # A prompt that is read for half an hour, on a server that sends its head at once.
        (InFlight(asked_at=0, connected_at=0, headed_at=1), 1800, PROFILE, None),
        (InFlight(asked_at=0, connected_at=0, headed_at=1), 1801, TimeoutProfile(ttft_timeout_s=1800), "ttft_timeout"),
        (STREAMS, 61, PROFILE, None),
        (STREAMS, 61.1, PROFILE, "stall_timeout"),
        (STREAMS, 9000, TimeoutProfile(idle_stream_timeout_s=None), None),
        (InFlight(asked_at=0, connected_at=0, headed_at=1, data_at=99), 100, PROFILE, None),
        (
            InFlight(asked_at=0, connected_at=0, headed_at=1, data_at=99),
            100,
            TimeoutProfile(absolute_timeout_s=99),
            "absolute_timeout",
        ),
        # Its turn is over and its tools run: nothing is late but the whole of it.
        (InFlight(asked_at=0, connected_at=0, headed_at=1, data_at=1, is_answered=True), 9000, PROFILE, None),
        (
            InFlight(asked_at=90, connected_at=90, headed_at=91, data_at=91, began_at=0, is_answered=True),
            100,
            TimeoutProfile(absolute_timeout_s=99),
            "absolute_timeout",
        ),
        (InFlight(asked_at=90, connected_at=90, began_at=0), 100, TimeoutProfile(absolute_timeout_s=101), None),
    ],
)
def test_a_request_is_late_for_its_own_reason(
    request_: InFlight, now: float, profile: TimeoutProfile, reason: str | None
) -> None:
    assert looked_at(request_, now=now, profile=profile) == reason


@pytest.mark.parametrize(
    ("facts", "now", "end"),
    [
        (ServerFacts(is_alive=True), 9e9, None),  # nothing is asked of it
        (ServerFacts(is_alive=True, requests={1: STREAMS}, owed_since=0), 121, None),
        (ServerFacts(is_alive=True, requests={1: STREAMS}, owed_since=0), 121.1, "stall_timeout"),
        # It burns CPU: its loop works, or turns in a circle. Requests fail alone.
        (ServerFacts(is_alive=True, requests={1: STREAMS}, owed_since=0, burnt_at=100), 200, None),
        # One of two requests moves: the other one is not worth the first.
        (
            ServerFacts(
                is_alive=True,
                requests={1: STREAMS, 2: InFlight(asked_at=0, connected_at=0, headed_at=1, data_at=190)},
                owed_since=0,
            ),
            200,
            None,
        ),
        # The one that moved is over.
        (ServerFacts(is_alive=True, requests={1: STREAMS}, owed_since=0, moved_at=90), 200, None),
        # A request that was given up on is owed still.
        (ServerFacts(is_alive=True, owed_since=0), 121, "stall_timeout"),
        # Connections are no sign of life: the kernel makes them for a server that is stopped.
        (
            ServerFacts(is_alive=True, requests={1: InFlight(asked_at=119, connected_at=119)}, owed_since=0),
            121,
            "stall_timeout",
        ),
        (ServerFacts(is_alive=True, is_refusing=True), 1, "connect_failed"),
        (ServerFacts(is_alive=False, is_refusing=True), 1, "server_died"),
    ],
)
def test_a_server_is_ended_only_if_nothing_of_it_moves(facts: ServerFacts, now: float, end: str | None) -> None:
    assert judge(facts, PROFILE, now=now).end == end


def test_the_limit_on_standing_still_can_be_off() -> None:
    facts = ServerFacts(is_alive=True, requests={1: STREAMS}, owed_since=0)
    profile = TimeoutProfile(prefill_liveness_timeout_s=None, idle_stream_timeout_s=None)
    assert judge(facts, profile, now=9e9) == judge(ServerFacts(is_alive=True), profile, now=0)


def test_those_in_flight_at_a_server_that_refuses_others_are_told_of_a_restart() -> None:
    facts = ServerFacts(is_alive=True, requests={1: STREAMS}, owed_since=0, is_refusing=True)
    assert judge(facts, PROFILE, now=2).failed == {1: FailReason.WORKER_RESTARTED}


TIME = st.floats(0, 1000)
MAYBE = st.none() | TIME
REQUEST = st.builds(InFlight, asked_at=TIME, connected_at=MAYBE, headed_at=MAYBE, data_at=MAYBE, waited_for_head_s=TIME)
FACTS = st.builds(
    ServerFacts,
    is_alive=st.booleans(),
    requests=st.dictionaries(st.integers(1, 5), REQUEST),
    burnt_at=MAYBE,
    owed_since=MAYBE,
    moved_at=MAYBE,
    is_refusing=st.booleans(),
)


@given(FACTS, TIME)
def test_a_server_that_is_ended_takes_all_of_its_requests_with_it(facts: ServerFacts, now: float) -> None:
    verdict = judge(facts, PROFILE, now=now)
    assert verdict.failed.keys() <= facts.requests.keys()
    if verdict.end is not None:
        assert verdict.failed.keys() == facts.requests.keys()


@given(FACTS, TIME)
def test_a_server_is_never_ended_while_it_moves(facts: ServerFacts, now: float) -> None:
    moves = [facts.burnt_at, facts.moved_at, *(request.moved_at for request in facts.requests.values())]
    if facts.is_alive and not facts.is_refusing and any(at is not None and now - at <= 120 for at in moves):
        assert judge(facts, PROFILE, now=now).end is None


def test_a_place_goes_to_the_older_ones_first() -> None:
    both = [InFlight(asked_at=1), InFlight(asked_at=2)]
    assert [has_place(request.asked_at, both, places=1) for request in both] == [True, False]


@pytest.mark.parametrize(
    ("burnt_at", "still_from", "answer"),
    [(None, None, False), (None, 1, True), (1, 1, True), (1.1, 1, False), (3, 5, True), (6, 5, False), (-1, -2, False)],
)
def test_a_server_that_worked_to_the_last_owes_nothing(
    burnt_at: float | None, still_from: float | None, answer: bool
) -> None:
    """STREAMS had data at 1. What was burnt before the last measure says nothing of the time since."""
    assert left_owed(STREAMS, burnt_at, still_from=still_from) is answer


@pytest.mark.parametrize(("burnt_at", "answer"), [(None, True), (2, True), (2.1, False)])
def test_what_was_burnt_before_it_asked_was_not_for_it(burnt_at: float | None, answer: bool) -> None:
    assert left_owed(InFlight(asked_at=2), burnt_at, still_from=1) is answer


def test_a_request_whose_tools_run_takes_no_place_and_leaves_nothing_owed() -> None:
    answered = InFlight(asked_at=0, headed_at=1, data_at=1, is_answered=True)
    assert has_place(2, [answered], places=1)
    assert not left_owed(answered, None, still_from=5)
    assert left_owed(STREAMS, None, still_from=5)
