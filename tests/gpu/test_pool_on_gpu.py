"""The pool on a real GPU: what loads take, swaps, orders of an operator, what a program takes, and traffic."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.box import MODELS, TINY, WORDS, GpuBox, config, gpu_box
from tests.gpu.card import MIB, Card, Watch, holder, told
from tests.journeys.stack import until

pytestmark = [pytest.mark.gpu, pytest.mark.redis, pytest.mark.timeout(300)]
RESERVE_MB = 512
CLIENTS, TRAFFIC_S, THINKS_S = 6, 20.0, 0.3


@pytest.fixture(scope="module")
def box(card: Card, models: dict[str, Path]) -> Iterator[GpuBox]:
    with gpu_box(config(models), card) as box:
        yield box


def hive(box: GpuBox, *words: str) -> str:
    """Output of a command line of `hive`."""
    command = [sys.executable, "-m", "hive", *words, "--state-dir", str(box.hive.state)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


# --- with the whole GPU ------------------------------------------------------------------------------------------


def test_no_first_load_takes_more_than_its_estimate_and_the_next_is_charged_what_it_took(box: GpuBox) -> None:
    missed = []
    for model in (*MODELS, TINY):
        estimated = box.slot(model)["need_bytes"]
        box.load(model)
        box.until_books_hold()
        took = box.card.of(box.pid(model))
        learnt = box.slot(model)
        box.unload(model)
        again = box.load(model)
        box.until_books_hold()
        second = box.card.of(box.pid(model))
        box.direct(model).ask(model, "One two three" if model == TINY else f"{WORDS} " * 22, tokens=2)
        after_use = box.card.of(box.pid(model))
        told(test="footprint", model=model, estimated_mb=estimated // MIB, took_mb=took, took_again_mb=second,
             used_mb=after_use, learnt_mb=learnt["need_bytes"] // MIB, load_s=round(again["load_s"], 2))  # fmt: skip
        if took * MIB > estimated:
            missed.append(f"{model}: {estimated // MIB} MiB were thought, {took} MiB taken")
        if after_use * MIB > estimated:
            missed.append(f"{model}: {estimated // MIB} MiB were thought, {after_use} MiB taken after a long prompt")
        if abs(learnt["need_bytes"] // MIB - second) > max(16, second // 100):
            missed.append(f"{model}: {learnt['need_bytes'] // MIB} MiB were learnt, {second} MiB taken")
    box.empty()
    assert not missed, missed


def test_what_people_look_at_names_the_card_and_its_memory(box: GpuBox) -> None:
    box.load("gamma")
    box.until_books_hold()
    shown = {" ".join(words): hive(box, *words) for words in (("pool",), ("pool", "explain", "beta"), ("top", "--once"),
             ("doctor",), ("status",))}  # fmt: skip
    metrics = b"\n".join(box.hive.client().lines("/metrics")).decode().splitlines()
    shown["metrics"] = "\n".join(line for line in metrics if line.startswith(("hive_gpu", "hive_pool")))
    for what, text in shown.items():
        print(f"--- {what}\n{text}")
    name = box.card.now().name.removeprefix("NVIDIA ")
    assert name in shown["pool"]
    assert "gamma" in shown["top --once"]
    assert "hive_gpu_up" in shown["metrics"]
    assert f'pid="{box.pid("gamma")}"' in shown["metrics"]
    assert "driver" in shown["doctor"]


def test_a_warm_model_answers_an_agent_and_what_hive_adds_is_told(box: GpuBox) -> None:
    for model in (TINY, "alpha"):
        box.load(model)
        through, past = box.asker(f"warm-{model}"), box.direct(model)
        for asker in (through, past):
            asker.once(model)
        pairs = [(through.once(model), past.once(model)) for _ in range(150 if model == TINY else 40)]
        ours, theirs = (statistics.median(took) * 1000 for took in zip(*pairs, strict=True))
        told(
            test="warm",
            model=model,
            hive_ms=round(ours, 2),
            direct_ms=round(theirs, 2),
            added_ms=round(ours - theirs, 2),
        )
    box.unload(TINY)


def test_a_prompt_of_512_tokens_is_answered(box: GpuBox) -> None:
    for model in ("alpha", "beta"):
        box.load(model)
        through, past = box.asker(f"reader-{model}"), box.direct(model)
        told_s: dict[str, list[float]] = {"hive": [], "direct": []}
        for number in range(12):
            for name, asker in (("hive", through), ("direct", past)):
                start = f"{chr(97 + number)}{name[0]}{number} "
                answer = asker.ask(model, start + f"{WORDS} " * 22 + "One two three", tokens=2)
                assert answer.is_whole, answer
                assert answer.prompt >= 512, answer
                told_s[name].append(answer.first_s)
        long = through.ask(model, f"{WORDS}", tokens=200)
        beside = past.ask(model, f"{WORDS}", tokens=200)
        told(test="first token", model=model, prompt_tokens=answer.prompt,
             hive_ms=round(statistics.median(told_s["hive"][1:]) * 1000, 1),
             hive_most_ms=round(max(told_s["hive"][1:]) * 1000, 1),
             direct_ms=round(statistics.median(told_s["direct"][1:]) * 1000, 1),
             tokens_per_s=round(long.tokens / (long.all_s - long.first_s)),
             direct_tokens_per_s=round(beside.tokens / (beside.all_s - beside.first_s)))  # fmt: skip
        assert (long.tokens, beside.tokens) == (200, 200)


# --- in a part of it ---------------------------------------------------------------------------------------------


def test_two_models_take_turns_in_the_room_of_one(box: GpuBox) -> None:
    box.empty()
    pair = ("alpha", "omega")
    asker = box.asker("swapper")
    need_mb = max(box.slot(model)["need_bytes"] for model in pair) // MIB
    with holder(f"leave {need_mb + RESERVE_MB + 300}"):
        until(lambda: box.account()["free_bytes"] < 2 * need_mb * MIB, within_s=30, what="others are seen")
        with Watch(box.card) as watch:
            took = [asker.ask(pair[number % 2]) for number in range(8)]
        told(test="swap", first_token_s=[round(answer.first_s, 2) for answer in took], most_used_mb=watch.most_mb,
             total_mb=box.card.total_mb, looks=watch.looks, slowest_look_s=round(watch.slowest_s, 3),
             unload=[slot["load_s"] for slot in map(box.slot, pair)])  # fmt: skip
        assert all(answer.status == 200 and answer.is_whole for answer in took), took
        assert watch.most_mb <= box.card.total_mb - RESERVE_MB, "the next load began before the memory was back"
        box.until_books_hold()
        print(hive(box, "pool"))


def test_six_clients_ask_for_six_models_in_the_room_of_three_and_none_fails(
    card: Card, models: dict[str, Path]
) -> None:
    with gpu_box(config(models), card) as box, holder() as others:
        room_mb = sum(box.slot(model)["need_bytes"] for model in models) // MIB // 2 + RESERVE_MB
        others.order(f"leave {room_mb}")
        until(lambda: box.account()["free_bytes"] < room_mb * MIB, within_s=30, what="others are seen")
        answers, ends = list[tuple[str, object]](), time.monotonic() + TRAFFIC_S

        def one(number: int) -> None:
            dice, names = random.Random(number), list(models)
            asker = box.asker(f"client{number}")
            while time.monotonic() < ends:
                model = names[number % len(names)] if dice.random() < 0.7 else dice.choice(names)
                answers.append((model, asker.ask(model, tokens=16)))
                time.sleep(dice.expovariate(1 / THINKS_S))

        clients = [threading.Thread(target=one, args=(number,)) for number in range(CLIENTS)]
        with Watch(card) as watch:
            for client in clients:
                client.start()
            for client in clients:
                client.join()
        failed = [told for told in answers if not told[1].is_whole]  # type: ignore[attr-defined]
        waits = sorted(answer.first_s for _, answer in answers if answer.is_whole)  # type: ignore[attr-defined]
        loads = [line for line in box.hive.client().lines("/metrics") if line.startswith(b"hive_pool_loads_total")]
        told(test="traffic", served=len(waits), failed=len(failed), first_token_p50_s=round(waits[len(waits) // 2], 3),
             p95_s=round(waits[int(len(waits) * 0.95)], 2), most_s=round(waits[-1], 2), most_used_mb=watch.most_mb,
             loads=[line.decode() for line in loads])  # fmt: skip
        print(hive(box, "pool"))
        assert not failed, failed[:3]
        assert watch.most_mb <= card.total_mb - RESERVE_MB
        box.until_books_hold()
