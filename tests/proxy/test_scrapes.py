"""The proxy's metrics for the daemon: a piece a round of the loop, and one for all that ask at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hive.endpoints.endpoints import ENDPOINTS
from hive.link.figures import MetricsAre
from hive.link.message import LinkMessage
from hive.link.messages import Failed
from hive.proxy.metrics import TABLE, TENANTS_MAX, Metrics
from hive.proxy.scrapes import Scrapes
from tests.waiting import until


class Asker:
    """One question, and what was answered."""

    def __init__(self) -> None:
        self.told: list[LinkMessage] = []

    def __call__(self, message: LinkMessage, /, descriptors: Sequence[int] = ()) -> None:
        self.told.append(message)


async def test_the_answer_is_the_exposition_of_the_admin_socket() -> None:
    metrics, asker = Metrics(), Asker()
    metrics.refused("queue_full")
    scrapes = Scrapes(metrics)
    scrapes.ask(asker)
    await until(lambda: asker.told)
    [told] = asker.told
    assert isinstance(told, MetricsAre)
    assert told.text == b"".join(metrics.exposition())
    assert repr(scrapes) == "<Scrapes 0 open>"


async def test_questions_that_came_while_it_stood_still_cost_one_exposition(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, askers = Metrics(), [Asker() for _ in range(50)]
    begun = 0
    exposition = metrics.exposition

    def counted() -> Iterator[bytes]:
        nonlocal begun
        begun += 1
        return exposition()

    monkeypatch.setattr(metrics, "exposition", counted)
    scrapes = Scrapes(metrics)
    for asker in askers:
        scrapes.ask(asker)
    await until(lambda: all(asker.told for asker in askers))
    assert begun == 1
    assert len({told.text for asker in askers for told in asker.told if isinstance(told, MetricsAre)}) == 1
    scrapes.ask(later := Asker())
    await until(lambda: later.told)
    assert begun == 2


async def test_requests_go_on_between_its_pieces() -> None:
    """A round of the loop for each metric that has something to tell."""
    metrics, asker = Metrics(), Asker()
    rounds = 0

    def count() -> None:
        nonlocal rounds
        rounds += 1
        if not asker.told:
            asyncio.get_running_loop().call_soon(count)

    Scrapes(metrics).ask(asker)
    count()
    await until(lambda: asker.told)
    assert rounds >= len(metrics._counted())


async def test_a_metric_that_cannot_be_read_is_an_answer_too_and_the_next_scrape_is_asked_anew() -> None:
    metrics, asker = Metrics(), Asker()
    row = next(row for row in TABLE if row.name == "in_flight")
    broken = True

    def reading() -> float:
        if broken:
            raise ValueError("nobody knows")
        return 3.0

    metrics.read(row.name, reading)
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    scrapes = Scrapes(metrics)
    scrapes.ask(asker)
    await until(lambda: asker.told)
    [told] = asker.told
    assert isinstance(told, Failed)
    assert "nobody knows" in told.message
    assert len(faults) == 1
    broken = False
    scrapes.ask(again := Asker())
    await until(lambda: again.told)
    assert isinstance(again.told[0], MetricsAre)


def test_no_piece_is_long_also_where_everything_is_counted() -> None:
    """With each endpoint in use and a hundred tenants one metric was 700 lines, and held requests up for 2.4 ms."""
    metrics = Metrics()
    for number in range(TENANTS_MAX + 20):
        for endpoint in {row.name for row in ENDPOINTS}:
            metrics.ended(endpoint, f"t{number}", 200, cut=False, duration_s=0.3, ttft_s=0.1, tokens_in=1, tokens_out=2)
    written = [*metrics.exposition()]
    assert max(piece.count(b"\n") for piece in written) <= 170
    text = b"".join(written).decode()
    families = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
    assert len(families) == len(set(families))
    assert len([*text_string_to_metric_families(text)]) == len(families)
