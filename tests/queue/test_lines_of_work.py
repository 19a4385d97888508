"""Lines whose work is no tokens: they are charged by the seconds that it takes, in the unit of all lines."""

from __future__ import annotations

import random

import pytest

from hive.domain import Band, UsageUnit
from hive.queue.queue import FairQueue, FairShares, Flow
from hive.queue.work_rate import KEPT_S, TOKENS, UNMEASURED_PER_S, WORK_UNITS, WorkGuess, WorkRate

AUDIO, IMAGES = WORK_UNITS[UsageUnit.AUDIO_S], WORK_UNITS[UsageUnit.IMAGES]


class Box:
    """One server each of text, ears and eyes, of one place, whose speeds are known: work in a second."""

    def __init__(self) -> None:
        self.shares: FairShares[str] = FairShares()
        self.lines = {name: FairQueue(self.shares, depth=1000, places=1) for name in ("text", "ears", "eyes")}
        self.lines["ears"].use_unit(AUDIO)
        self.lines["eyes"].use_unit(IMAGES)
        self.per_s = {"text": 300.0, "ears": 30.0, "eyes": 5e6}
        for name, line in self.lines.items():
            line.rate.did(self.per_s[name] * 10, 0.0, 10.0)
        self.shares.look_at_rates()
        self.now = 10.0

    def flow(self, name: str) -> Flow:
        return self.shares.flow(name, name, limit=1000)

    def ask(self, waiter: str, line: str, seconds: float) -> str:
        queue = self.lines[line]
        expected = queue.tokens_of(self.per_s[line] * seconds)
        return queue.ask(waiter, self.flow(waiter.split("-")[0]), expected=expected, now=self.now).value

    def leave(self, waiter: str, line: str, seconds: float) -> list[str]:
        self.now += seconds
        queue, work = self.lines[line], self.per_s[line] * seconds
        told = None if queue.unit is TOKENS else work
        flow = self.flow(waiter.split("-")[0])
        return queue.leave(waiter, flow, now=self.now, cost=queue.tokens_of(work), work=told)


def test_a_second_counts_the_same_in_every_line() -> None:
    box = Box()
    charged = {name: line.tokens_of(box.per_s[name]) for name, line in box.lines.items()}
    assert charged == pytest.approx(dict.fromkeys(charged, 300.0))
    assert box.shares.tokens_per_gpu_s == 300.0


def test_with_no_server_of_text_measured_a_second_is_as_many_tokens_as_are_taken_of_one() -> None:
    shares: FairShares[str] = FairShares()
    ears = FairQueue(shares, depth=1, places=1)
    ears.use_unit(AUDIO)
    assert (shares.tokens_per_gpu_s, ears.tokens_of(AUDIO.per_s)) == (UNMEASURED_PER_S, UNMEASURED_PER_S)


def test_two_tenants_share_a_server_of_ears_by_seconds_not_by_requests() -> None:
    """One sends files of a minute, the other of six seconds: in ten minutes each has half of them."""
    box = Box()
    size = {"long": 2.0, "short": 0.2}
    for name in size:
        for no in range(400):
            box.ask(f"{name}-{no}", "ears", size[name])
    served = dict.fromkeys(size, 0.0)
    running = "long-0"
    for _ in range(300):
        name = running.split("-")[0]
        served[name] += size[name]
        running, *_ = box.leave(running, "ears", size[name])
    assert abs(served["long"] - served["short"]) <= 2 * size["long"]


def test_who_draws_all_the_time_waits_longer_for_text_than_who_asks_for_little() -> None:
    """A tenant's seconds at one server count at the next where it waits there meanwhile (decision 033)."""
    box = Box()
    assert [box.ask("other-0", "text", 1.0), box.ask("draws-0", "eyes", 3.0)] == ["go", "go"]
    assert [box.ask("draws-1", "text", 1.0), box.ask("quiet-0", "text", 1.0)] == ["wait", "wait"]
    box.leave("draws-0", "eyes", 3.0)
    assert box.leave("other-0", "text", 1.0) == ["quiet-0"]


@pytest.mark.parametrize("seed", range(20))
def test_another_worth_of_a_second_changes_no_order(seed: int) -> None:
    """Seen: loads charged while a second was worth 6,900 tokens kept an agent waiting for minutes once it was worth
    290. The same requests, with a server of text whose measured rate jumps in between, and without one."""

    def order(rates: list[float]) -> list[str]:
        box, chance = Box(), random.Random(seed)
        box.lines["ears"].resize(1)
        running, served = "", []
        for no in range(200):
            if no % 40 == 20 and rates:
                rate, text = rates.pop(), box.lines["text"]
                text.rate = WorkRate()
                text.rate.did(rate * 20.0, 0.0, 20.0)
            name, seconds = chance.choice("aaabbc"), chance.uniform(0.1, 3.0)
            if box.ask(f"{name}-{no}", "ears", seconds) == "go":
                running = f"{name}-{no}"
            if chance.random() < 0.1:
                box.shares.charge_load(box.lines["ears"], name, name, Band.NORMAL, chance.uniform(1, 9))
            if running and chance.random() < 0.8:
                box.now += 0.1
                served.append(running)
                following = box.leave(running, "ears", chance.uniform(0.1, 3.0))
                running = following[0] if following else ""
        return served

    steady, jumping = order([]), order([30.0, 9000.0, 20.0, 3000.0, 100.0])
    assert steady == jumping
    assert len(steady) > 100


def test_what_counts_of_a_line_of_text_stays_when_a_second_is_worth_more() -> None:
    box = Box()
    ears, text = box.lines["ears"], box.lines["text"]
    assert [box.ask("a-0", "ears", 1.0), box.ask("b-0", "text", 1.0)] == ["go", "go"]
    assert [box.ask("b-1", "ears", 1.0), box.ask("a-1", "text", 1.0)] == ["wait", "wait"]
    shares = [box.flow(name).standings[line._line].normal for name in "ab" for line in (ears, text)]
    assert all(share.siblings for share in shares)
    box.leave("b-0", "text", 3.0)
    before = [share.carried()[0] for share in shares]
    assert any(before)
    text.rate = WorkRate()
    text.rate.did(60_000.0, 0.0, 20.0)
    box.shares.look_at_rates()
    assert box.shares.tokens_per_gpu_s == pytest.approx(3000.0)
    assert [share.carried()[0] for share in shares] == pytest.approx(before)


def test_what_is_charged_for_a_load_of_ears_is_its_seconds() -> None:
    box = Box()
    box.ask("a-0", "ears", 1.0)
    box.shares.charge_load(box.lines["ears"], "a", "a", Band.NORMAL, 9.0)
    (ahead,) = (row.tokens_ahead for row in box.lines["ears"].view(box.now).tenants if row.name == "a")
    assert ahead == 0.0, "nobody else is there"
    box.ask("b-0", "ears", 1.0)
    rows = {row.name: row.tokens_ahead for row in box.lines["ears"].view(box.now).tenants}
    assert rows["a"] - rows["b"] == pytest.approx(9.0 * 300.0 + 300.0)


def test_a_request_whose_work_was_not_told_teaches_nothing() -> None:
    box = Box()
    line = box.lines["ears"]
    before = line.rate.measured
    assert box.ask("a-0", "ears", 1.0) == "go"
    line.leave("a-0", box.flow("a"), now=box.now + 100.0, cost=1e6)
    assert line.rate.measured == before


def test_a_line_of_text_is_ordered_as_ever_whatever_its_neighbours_do() -> None:
    """The same random requests for text, alone and beside a server of ears that nobody of them asks: the same order."""

    def order(*, beside: bool) -> list[str]:
        shares: FairShares[str] = FairShares()
        text = FairQueue(shares, depth=100, places=2)
        ears = FairQueue(shares, depth=100, places=1) if beside else None
        if ears is not None:
            ears.use_unit(AUDIO)
        chance, now, running, served = random.Random(7), 0.0, [], []
        flows = {name: shares.flow(name, name, limit=5) for name in "abc"}
        for no in range(300):
            now += chance.random()
            name = chance.choice("aab" if no % 2 else "bc")
            waiter = f"{name}-{no}"
            if text.ask(waiter, flows[name], expected=chance.uniform(1, 500), now=now).value == "go":
                running.append(waiter)
            if ears is not None and ears.ask(f"other-{no}", shares.flow("o", "o", limit=1), expected=5.0, now=now):
                ears.leave(f"other-{no}", shares.flow("o", "o", limit=1), now=now, cost=5.0, work=1.0)
            if running and chance.random() < 0.9:
                done = running.pop(0)
                served.append(done)
                running += text.leave(done, flows[done[0]], now=now, cost=chance.uniform(1, 500))
        return served

    assert order(beside=True) == order(beside=False)


def test_a_server_of_another_kind_begins_anew_what_is_known_of_its_speed() -> None:
    box = Box()
    line = box.lines["ears"]
    line.use_unit(AUDIO)
    assert line.rate.is_measured
    line.use_unit(IMAGES)
    assert (line.rate.is_measured, line.rate.per_s, line.guess.of(7.0)) == (False, IMAGES.per_s, 7.0)


def test_a_rate_forgets_what_is_old_whatever_its_unit() -> None:
    rate = WorkRate(AUDIO)
    rate.did(10 * KEPT_S, 0.0, KEPT_S)
    for second in range(int(KEPT_S), int(8 * KEPT_S)):
        rate.did(30.0, float(second), second + 1.0)
    assert rate.per_s == pytest.approx(30.0, rel=0.01)


def test_a_size_of_nothing_teaches_no_ratio() -> None:
    guess = WorkGuess(AUDIO)
    guess.learn(0.0, 100.0)
    assert guess.of(16_000.0) == 1.0
