"""The work of one request at a runner: what is expected of it, and what it has cost, for its line, its budgets and its
usage row. Pure, but for what its line learns."""

from __future__ import annotations

from hive.bodies.body import Asked
from hive.budgets import UnitPrices
from hive.domain import UNIT_OF_CATEGORY, UsageUnit
from hive.endpoints.endpoints import Endpoint
from hive.metering.cost import RequestCost, is_refusal
from hive.metering.runner_answers import ToldWork, cost_of_work, in_line, through
from hive.queue.queue import Queue


class RunnerWork:
    """Made when it is known what is asked for, and of which server; then `expected` does not change any more.

    `file_bytes`: of the file that it brings, else its size is the pixels of all the steps that it asks for.
    """

    __slots__ = ("_line", "_size", "expected")

    def __init__(self, endpoint: Endpoint, asked: Asked, file_bytes: int, line: Queue) -> None:
        self._line = line
        self._size = float(file_bytes) or asked.pixel_steps
        unit, work = UNIT_OF_CATEGORY[endpoint.category], line.guess.of(self._size)
        is_images = unit is UsageUnit.IMAGES
        self.expected = ToldWork(unit, float(asked.images), work) if is_images else ToldWork(unit, work)

    def __repr__(self) -> str:
        return f"<RunnerWork {self.expected}>"

    @property
    def expected_tokens(self) -> float:
        """Tokens that it will probably count as in its line."""
        return self._line.tokens_of(in_line(self.expected) or 0.0)

    def cost(self, told: ToldWork | None, *, status: int, cut: bool, at_server_s: float) -> RequestCost:
        """The cost of a request that was sent, `status` being its server's answer, 0 without one.

        What the server told counts, also beside an error, and is learnt of where it is whole; else what was expected,
        of a request that was cut or failed there as much as the server does of it in that time. One that the server
        refused has cost nothing.
        """
        expected = self.expected
        if status >= 500 and told is not None and told.unit is expected.unit:
            return cost_of_work(told)
        if is_refusal(status):
            return cost_of_work(ToldWork(expected.unit, 0.0, 0.0 if expected.unit is UsageUnit.IMAGES else None))
        if told is None or told.unit is not expected.unit:
            done, is_told = expected, False
        elif told.unit is UsageUnit.IMAGES and told.work is None:  # a budget counts images by their steps
            done, is_told = told._replace(work=expected.work), False
        else:
            done, is_told = told, True
        if cut or status >= 500:
            rate = self._line.rate
            done = through(done, at_server_s=at_server_s, per_s=rate.per_s if rate.is_measured else None)
            is_told = False
        if is_told and (work := in_line(done)):
            self._line.guess.learn(self._size, work)
        return cost_of_work(done, estimated=not is_told)

    def charge(self, cost: RequestCost, *, at_server_s: float) -> tuple[float | None, float | None]:
        """(tokens that it is charged in its line, the work by which the line learns its server's rate), None for what
        is not known.

        What the server told counts; without that, the time for which it was there, be it refused, cut or not whole:
        else whoever asks for what is refused late, or leaves at once, would have the server for nothing.
        """
        done = in_line(cost)
        if done is None:
            return None, None
        if not done or cost.estimated:
            return at_server_s * self._line.tokens_per_s, None
        return self._line.tokens_of(done), done


def budget_tokens(prices: UnitPrices, work: ToldWork | RequestCost) -> int:
    """The tokens that it counts as in a budget: by prices of its own, that no server's speed changes.

    >>> prices = UnitPrices(audio_s=10.0, megapixel_step=40.0)
    >>> budget_tokens(prices, ToldWork(UsageUnit.AUDIO_S, 6.02))
    61
    """
    if work.unit == UsageUnit.IMAGES:
        return prices.tokens(pixel_steps=work.work or 0.0)
    return prices.tokens(audio_ms=(work.amount or 0.0) * 1000)
