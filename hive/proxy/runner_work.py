"""The cost of a request to a runner, before and after it, for its line, its budgets and its usage row. Pure."""

from __future__ import annotations

from hive.bodies.body import Asked
from hive.budgets import UnitPrices
from hive.domain import UNIT_OF_CATEGORY, UsageUnit
from hive.endpoints.endpoints import Endpoint
from hive.metering.cost import RequestCost
from hive.metering.runner_answers import ToldWork, cost_of_work, through
from hive.proxy.registry import Queue


def size_of(asked: Asked | None, file_bytes: int) -> float:
    """The size by which the work is guessed: bytes of a file, or pixels of all the steps that are asked for."""
    return float(file_bytes) or (0.0 if asked is None else asked.pixel_steps)


def expected_work(endpoint: Endpoint, asked: Asked | None, file_bytes: int, line: Queue) -> ToldWork:
    """The work that a request will probably be, by the size of its file or of the images that it asks for."""
    unit, work = UNIT_OF_CATEGORY[endpoint.category], line.guess.of(size_of(asked, file_bytes))
    if unit is not UsageUnit.IMAGES:
        return ToldWork(unit, work)
    return ToldWork(unit, 1.0 if asked is None else float(asked.images), work)


def cost_of_answer(
    expected: ToldWork, told: ToldWork | None, line: Queue, *, status: int, cut: bool, at_server_s: float
) -> RequestCost:
    """The cost of a request that was sent, `status` being its server's answer, 0 without one.

    What the server told counts, also beside an error; else what was expected, of a request that was cut or failed there
    as much as the server does of it in that time. One that the server refused has cost nothing.
    """
    if status >= 500 and told is not None and told.unit is expected.unit:
        return cost_of_work(told)
    if 400 <= status < 500:
        return cost_of_work(ToldWork(expected.unit, 0.0, 0.0 if expected.unit is UsageUnit.IMAGES else None))
    if told is None or told.unit is not expected.unit:
        done, is_told = expected, False
    elif told.unit is UsageUnit.IMAGES and told.work is None:  # a budget counts images by their steps
        done, is_told = told._replace(work=expected.work), False
    else:
        done, is_told = told, True
    if cut or status >= 500:
        rate = line.rate
        done = through(done, at_server_s=at_server_s, per_s=rate.per_s if rate.is_measured else None)
        is_told = False
    return cost_of_work(done, estimated=not is_told)


def budget_tokens(prices: UnitPrices, work: ToldWork | RequestCost) -> int:
    """The tokens that it counts as in a budget.

    >>> prices = UnitPrices(audio_s=10.0, megapixel_step=40.0)
    >>> budget_tokens(prices, ToldWork(UsageUnit.AUDIO_S, 6.02))
    61
    """
    if work.unit == UsageUnit.IMAGES:
        return prices.tokens(pixel_steps=work.work or 0.0)
    return prices.tokens(audio_ms=(work.amount or 0.0) * 1000)
