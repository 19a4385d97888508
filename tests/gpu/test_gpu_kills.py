"""Faults on a real GPU: its memory is gone when a load needs it, servers and the daemon are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.box import GpuBox, Reached, config, gpu_box
from tests.gpu.card import MIB, Card, holder, told
from tests.journeys.stack import until

pytestmark = [pytest.mark.gpu, pytest.mark.redis, pytest.mark.timeout(300)]
HAS_BEGUN_MB = 100
"""A server that has so much is loading its weights."""


@pytest.fixture
def box(card: Card, models: dict[str, Path]) -> Iterator[GpuBox]:
    with gpu_box(config({name: models[name] for name in ("alpha", "beta", "gamma")}), card) as box:
        yield box


def in_background(ask: Callable[[], Reached]) -> tuple[threading.Thread, list[Reached]]:
    answers: list[Reached] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    return thread, answers


def acts(box: GpuBox, act: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = box.hive.get("/api/audit", act=act)["rows"]
    return rows


def until_failed(box: GpuBox, times: int) -> None:
    until(lambda: len(acts(box, "model.load_failed")) >= times, within_s=60, what=f"load {times} has died")


def until_it_loads(box: GpuBox, model: str) -> int:
    """The pid of its server, once it has taken memory and is not ready."""

    def look() -> int:
        pid = box.pid(model)
        return pid if box.card.of(pid) >= HAS_BEGUN_MB and box.slot(model)["state"] == "loading" else 0

    pid: int = until(look, within_s=60, what=f"{model} is loading")
    return pid


def test_memory_that_others_took_between_decision_and_load_is_told_and_is_back_with_their_end(box: GpuBox) -> None:
    asker, before = box.asker("alice"), box.slot("beta")["need_bytes"]
    with holder() as other:
        thread, answers = in_background(lambda: asker.ask("beta"))
        until(lambda: box.slot("beta")["state"] == "loading", within_s=30, what="it was decided")
        other.order("leave 1500")
        until_failed(box, 1)
        thread.join(120)
        failed, slot = acts(box, "model.load_failed")[0], box.slot("beta")
    gone = time.monotonic()
    again = until(lambda: (got := asker.ask("beta")).is_whole and got, within_s=30, what="it is served")
    told(test="memory gone", detail=failed["detail"], why=slot["why"], error=slot["last_error"],
         answer=answers[0]._asdict(), charged_before_mb=before // MIB, charged_then_mb=slot["need_bytes"] // MIB,
         again=again._asdict(), again_s=round(time.monotonic() - gone, 2))  # fmt: skip
    print(box.hive.log[-3000:])
    assert answers[0].status == 503, answers
    assert "of others" in answers[0].text, answers
    assert slot["need_bytes"] == before, "it was not the model that took more than was thought"
    box.until_books_hold()


def test_a_model_that_dies_of_memory_twice_tells_its_last_lines(box: GpuBox) -> None:
    asker = box.asker("alice")
    for failures in range(2):
        with holder() as other:
            box.hive.post("/api/models/beta/load")
            until(lambda: box.slot("beta")["state"] == "loading", within_s=30, what="it was decided")
            other.order("leave 1500")
            until_failed(box, failures + 1)
    slot, answer = box.slot("beta"), asker.ask("beta")
    told(test="memory gone twice", slot=slot, answer=answer._asdict())
    assert slot["failures"], slot
    assert "memory" in slot["last_error"], slot


def test_a_server_killed_while_it_loads_leaves_no_memory_in_the_books(box: GpuBox) -> None:
    empty = box.card.used_mb
    box.hive.post("/api/models/beta/load")
    os.kill(until_it_loads(box, "beta"), signal.SIGKILL)
    until(lambda: acts(box, "model.load_failed"), within_s=60, what="the load has failed")
    until(lambda: not box.slot("beta")["grants"], within_s=30, what="nothing is charged for it")
    box.until_books_hold()
    account = box.account()
    told(test="killed mid-load", used_before_mb=empty, used_mb=box.card.used_mb,
         foreign_mb=account["foreign_bytes"] // MIB, free_mb=account["free_bytes"] // MIB,
         slot=box.slot("beta"))  # fmt: skip
    assert box.card.used_mb <= empty + 64
    assert box.load("beta")["failures"] == 0
    box.until_books_hold()


def test_a_server_killed_while_it_answers_cuts_that_answer_and_serves_the_next(box: GpuBox) -> None:
    asker = box.asker("alice")
    box.load("alpha")
    thread, answers = in_background(lambda: asker.ask("alpha", tokens=4000))
    until(lambda: box.slot("alpha")["in_flight"], within_s=30, what="it answers")
    time.sleep(0.5)
    killed = time.monotonic()
    os.kill(box.pid("alpha"), signal.SIGKILL)
    thread.join(60)
    after = asker.ask("alpha")
    told(test="killed mid-answer", cut=answers[0]._asdict(), again_s=round(time.monotonic() - killed, 2))
    assert not answers[0].is_whole
    assert after.is_whole, after
    box.until_books_hold()


def test_a_daemon_killed_while_models_serve_and_load_finds_the_same_memory(box: GpuBox) -> None:
    asker = box.asker("alice")
    box.load("alpha")
    serving = box.pid("alpha")
    box.hive.post("/api/models/beta/load")
    loading = until_it_loads(box, "beta")
    thread, answers = in_background(lambda: asker.ask("alpha", tokens=2000))
    box.hive.restart("daemon")
    box.until_state("beta", "ready")
    thread.join(120)
    box.until_books_hold()
    account = box.account()
    told(test="daemon killed", answer=answers[0]._asdict(), foreign_mb=account["foreign_bytes"] // MIB,
         used_mb=account["used_bytes"] // MIB, charged_mb=account["charged_bytes"] // MIB)  # fmt: skip
    assert answers[0].is_whole, answers
    assert (box.pid("alpha"), box.pid("beta")) == (serving, loading), "nothing was started anew"
    assert account["foreign_bytes"] < 1500 * MIB


def test_nothing_is_left_on_the_gpu_when_hive_ends(card: Card, models: dict[str, Path]) -> None:
    empty = card.used_mb
    with gpu_box(config({"gamma": models["gamma"]}), card) as box:
        box.load("gamma")
        assert card.used_mb > empty + 1000
    until(lambda: card.used_mb <= empty + 16, within_s=20, what="its memory is back")
