"""The number of requests a backend works on at once: its source, and what contradicts it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.backends.backend import open_backend
from hive.backends.concurrency import (
    CALM_AFTER,
    OwnQueue,
    choose_places,
)
from hive.backends.counters import ReportedLimits, gauge
from hive.domain import BackendKind
from hive.settings.table import Settings
from tests.fakes.programs import demo_backend, fake_backend

PLAIN = Settings()


def with_(section: str, **values: object) -> Settings:
    struct = msgspec.structs.replace(getattr(PLAIN, section), **values)
    return msgspec.structs.replace(PLAIN, **{section: struct})


@pytest.mark.parametrize(
    ("kind", "told", "places", "source"),
    [
        (BackendKind.LLAMA, 4, 4, "/props total_slots"),
        (BackendKind.LLAMA, None, None, "it does not tell; [proxy] backend_concurrency sets a limit"),
        (BackendKind.VLLM, None, 64, "vllm_max_sequences in hive.conf"),
        (
            BackendKind.OLLAMA,
            None,
            1,
            "Ollama's default, it does not tell; [proxy] backend_concurrency overrides it",
        ),
        (BackendKind.DEMO, None, None, "no limit"),
    ],
)
def test_the_limit_and_where_it_comes_from(
    kind: BackendKind, told: int | None, places: int | None, source: str
) -> None:
    assert choose_places(kind, told, PLAIN) == (places, source)


@pytest.mark.parametrize("kind", BackendKind)
def test_the_operators_number_goes_before_all_others(kind: BackendKind) -> None:
    mine = with_("proxy", backend_concurrency=7)
    assert choose_places(kind, 4, mine) == (7, "backend_concurrency in hive.conf")


def test_vllm_has_what_its_own_setting_says() -> None:
    assert choose_places(BackendKind.VLLM, None, with_("inference", vllm_max_sequences=8))[0] == 8


def test_a_gauge_is_summed_over_its_labels_and_not_mistaken_for_a_longer_name() -> None:
    shown = (
        b"# HELP vllm:num_requests_waiting x\n# TYPE vllm:num_requests_waiting gauge\n"
        b'vllm:num_requests_waiting{engine="0",model_name="a } b"} 2.0\n'
        b'vllm:num_requests_waiting{engine="1",model_name="t"} 1.0\n'
        b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 40.0\n'
    )
    assert gauge(shown, "vllm:num_requests_waiting") == 3
    assert gauge(b"llamacpp:requests_deferred 5\n", "llamacpp:requests_deferred") == 5
    assert gauge(b"llamacpp:requests_deferred NaN\n", "llamacpp:requests_deferred") is None
    assert gauge(b"", "llamacpp:requests_deferred") is None


@given(st.binary(max_size=200))
def test_no_exposition_breaks_a_gauge(shown: bytes) -> None:
    found = gauge(b"x " + shown + b"\nx{" + shown, "x")
    assert found is None or isinstance(found, int)


def test_a_queue_seen_once_is_no_contradiction() -> None:
    queue = OwnQueue()
    assert [queue.see(waiting, places=4) for waiting in (5, 0, 5, None, 5)] == [""] * 5


def test_a_queue_seen_twice_in_a_row_is_told_with_the_most_that_waited_until_it_is_calm() -> None:
    queue = OwnQueue()
    queue.see(3, places=4)
    warning = queue.see(2, places=4)
    assert warning == (
        "the backend queues 3 requests itself although Hive sends at most 4 at once: someone else uses it, or its own "
        "limit is lower; set [proxy] backend_concurrency"
    )
    assert [queue.see(0, places=4) for _ in range(CALM_AFTER - 1)] == [warning] * (CALM_AFTER - 1)
    assert queue.see(0, places=4) == ""
    assert queue.see(1, places=4) == ""


def test_a_queue_without_a_limit_is_told_too() -> None:
    queue = OwnQueue()
    queue.see(1, places=None)
    assert queue.see(1, places=None) == (
        "the backend queues 1 request itself and Hive sends without a limit: set [proxy] backend_concurrency"
    )


async def test_fakes_tell_what_the_real_ones_tell() -> None:
    with fake_backend("llama") as llama, fake_backend("ollama") as ollama, demo_backend() as demo:
        assert (await open_backend(BackendKind.LLAMA, llama.address).busy()).places == 4
        assert await open_backend(BackendKind.OLLAMA, ollama.address).busy() == ReportedLimits()
        assert await open_backend(BackendKind.DEMO, demo.address).busy() == ReportedLimits()


@pytest.mark.parametrize("kind", BackendKind)
async def test_a_backend_that_is_gone_tells_nothing(kind: BackendKind) -> None:
    assert await open_backend(kind, "/nonexistent.sock").busy() == ReportedLimits()
