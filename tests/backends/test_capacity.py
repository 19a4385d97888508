"""The places of a cluster, look by look: down at once, up at the second look, never 0 while tokens come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hive.backends.capacity import KNOWN_FOR_S, CapacityMeter, ClusterLook
from hive.domain import ClusterNode

LOOKS = st.lists(st.tuples(st.integers(0, 6) | st.none(), st.booleans()), min_size=1, max_size=40)
EACH = 8


def look(running: int, *, wanted: int = 3, **more: object) -> ClusterLook:
    nodes = tuple(ClusterNode(f"n{number}", up=True, replicas=1) for number in range(running))
    told = {"engine": "ray", "slots_each": EACH, "places": running * EACH, "nodes": nodes} | more
    return ClusterLook(wanted=wanted, running=running, **told)  # type: ignore[arg-type]


@given(LOOKS)
def test_places_follow_down_at_the_first_look_and_up_at_the_second(looks: list[tuple[int | None, bool]]) -> None:
    meter = CapacityMeter("ray")
    held: int | None = None
    more: int | None = None
    """The number that the look before found, where that was more than is held."""
    for second, (running, tokens_come) in enumerate(looks):
        told = None if running is None else look(running)
        seen = meter.see(told, now=float(second), at=0.0, tokens_come=tokens_come)
        if running is None:
            more = None
            continue
        if held is None or running <= held:
            held, more = running, None
        elif more is None:
            more = running
        else:
            held, more = min(more, running), None
        assert held <= running
        assert seen.places == (held * EACH or (EACH if tokens_come else 0))


@given(LOOKS)
def test_there_is_always_a_place_while_tokens_come_back(looks: list[tuple[int | None, bool]]) -> None:
    meter = CapacityMeter("vllm")
    for second, (running, tokens_come) in enumerate(looks):
        seen = meter.see(None if running is None else look(running), now=float(second), at=0.0, tokens_come=tokens_come)
        if running is not None and tokens_come:
            assert seen.places is None or seen.places > 0
        if seen.places == 0:
            assert seen.cluster is not None
            assert seen.cluster.why_none


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.floats(0, 100))
def test_what_was_told_last_holds_for_ten_seconds_then_the_setting_for_one_server(
    told: list[int], silent_s: float
) -> None:
    meter = CapacityMeter("router")
    last = [meter.see(look(running), now=float(second), at=0.0) for second, running in enumerate(told)][-1]
    seen = meter.see(None, now=len(told) - 1 + silent_s, at=0.0, silent="127.0.0.1:1 does not answer")
    if silent_s <= KNOWN_FOR_S:
        assert (seen.places, seen.warning) == (last.places, "")
    else:
        assert seen.places is None
        assert seen.warning.startswith("vLLM Router does not tell how many replicas run: 127.0.0.1:1 does not answer")
        assert seen.cluster == last.cluster or last.places == 0


def test_an_engine_that_never_answered_decides_nothing_and_is_warned_of() -> None:
    seen = CapacityMeter("ray").see(None, now=0.0, at=0.0, silent="h:8265 asks for a token (401)")
    assert (seen.places, seen.cluster) == (None, None)
    assert "asks for a token (401); Hive sends as to one server" in seen.warning


def test_words_say_where_the_places_come_from() -> None:
    meter = CapacityMeter("ray")
    assert meter.see(look(2), now=0.0, at=0.0).places_from == "2 of 3 replicas x 8, told by Ray Serve"
    mixed = look(2, slots_each=0, places=12)
    assert meter.see(mixed, now=1.0, at=0.0).places_from == "2 of 3 replicas, told by Ray Serve"
    none = meter.see(look(0, why_none="OpenAiIngress runs 0 of 1 replicas"), now=2.0, at=7.0)
    assert none.cluster is not None
    assert none.cluster.why_none == "Ray Serve runs 0 of 3 replicas: OpenAiIngress runs 0 of 1 replicas"
    assert none.cluster.asked_at == 7.0


def test_a_replica_that_starts_when_it_is_asked_gets_the_request_that_asks() -> None:
    seen = CapacityMeter("ray").see(look(0, wanted=0, starts_when_asked=True), now=0.0, at=0.0)
    assert (seen.places, seen.places_from) == (
        EACH,
        "0 of 0 replicas, told by Ray Serve: one x 8 starts when it is asked",
    )


def test_a_node_that_has_gone_is_shown_as_down_until_all_replicas_run_again() -> None:
    meter = CapacityMeter("ray")
    meter.see(look(2, wanted=2), now=0.0, at=0.0)
    lost = meter.see(look(1, wanted=2), now=1.0, at=0.0).cluster
    assert lost is not None
    assert lost.nodes == (ClusterNode("n0", up=True, replicas=1), ClusterNode("n1", up=False, replicas=0))
    elsewhere = look(2, wanted=2, nodes=(ClusterNode("n0", up=True, replicas=2),))
    back = meter.see(elsewhere, now=2.0, at=0.0).cluster
    assert back is not None
    assert [node.name for node in back.nodes] == ["n0"]
