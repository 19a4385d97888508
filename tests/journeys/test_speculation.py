"""Speculation in a whole Hive: a model of the pool that drafts with a small one, beside the same model without."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.journeys.pool_stack import CONTEXT, SERVER_MB, llama_models, pool_config
from tests.journeys.sdk import door_of
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(300)]
PLAIN, FAST, DRAFT = "plain", "fast", "draft"
TOKENS = 48


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`fast` has the weights of `plain`, and a draft with the same ones: all of its guesses are good."""
    folder = tmp_path_factory.mktemp("models")
    [plain] = llama_models(folder, [PLAIN]).values()
    config = pool_config(4 * SERVER_MB)
    for name in (PLAIN, FAST, DRAFT):
        file = shutil.copyfile(plain, folder / f"{name}.gguf") if name != PLAIN else plain
        config += f"[model {name}]\nfile = {file}\n"
        if name == DRAFT:
            config += "role = draft\n"
            continue
        config += f"context = {CONTEXT}\nparallel = 1\nvram_mb = {SERVER_MB}\n"
        config += f"speculative = draft\ndraft = {DRAFT}\n" if name == FAST else ""
    with stack(config=config) as hive:
        hive.post("/api/agents", {"name": "one", "command": ["/bin/sleep", "1000"]})
        yield hive


def said(hive: Stack, model: str) -> str:
    with door_of(hive, "one").openai() as client:
        answer = client.completions.create(model=model, prompt="Once upon a time", max_tokens=TOKENS, temperature=0)
    return answer.choices[0].text


def slot(hive: Stack, model: str) -> Any:
    return next(slot for slot in hive.get("/api/pool")["slots"] if slot["model"] == model)


def test_it_answers_the_same_and_what_was_accepted_is_shown(hive: Stack) -> None:
    assert said(hive, FAST) == said(hive, PLAIN) != ""
    until(lambda: slot(hive, FAST)["speculation"]["drafted"] > 0, within_s=60, what="drafted tokens are counted")
    shown = slot(hive, FAST)["speculation"]
    assert shown["accepted"] >= 0.9 * shown["drafted"]
    assert slot(hive, PLAIN)["speculation"] is None
    metrics = b"\n".join(hive.client().lines("/metrics")).decode()
    counted = re.findall(r'hive_speculation_(\w+)_tokens_total\{[^}]*model="fast"[^}]*\} (\d+)', metrics)
    assert {name: int(number) > 0 for name, number in counted} == {"drafted": True, "accepted": True}


def test_nobody_can_ask_for_the_draft_itself(hive: Stack) -> None:
    assert DRAFT not in {slot["model"] for slot in hive.get("/api/pool")["slots"]}
    with door_of(hive, "one").openai() as client:
        assert DRAFT not in {model.id for model in client.models.list()}
