"""Several models behind one port: real llama-servers, loaded when they are asked for, in less memory than all take."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.journeys.pool_stack import LLAMAS, ON_VLLM, SERVER_MB, llama_models, llama_rows, pool_config, vllm_row
from tests.journeys.stack import PROCESSES, Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
MESSAGES: Any = [{"role": "user", "content": "Hello, how are you today?"}]
KILLS = int(os.environ.get("HIVE_CHAOS_KILLS", "20"))
AGENTS = 20


@pytest.fixture
def two_of_three(tmp_path: Path) -> Iterator[Stack]:
    """Three models, room for two."""
    with stack(config=pool_config(2 * SERVER_MB + 20) + llama_rows(llama_models(tmp_path))) as hive:
        yield hive


def slots(hive: Stack) -> dict[str, Any]:
    return {slot["model"]: slot for slot in hive.get("/api/pool")["slots"]}


def client_of(hive: Stack, name: str) -> openai.OpenAI:
    access = hive.get(f"/api/agents/{name}/tokens")
    return openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0, timeout=120)


def test_each_model_that_is_asked_for_is_loaded_and_answers_as_itself(two_of_three: Stack) -> None:
    hive = two_of_three
    hive.create("alice", "idler.py")
    with client_of(hive, "alice") as client:
        assert {model.id for model in client.models.list()} >= set(LLAMAS)
        answers: dict[str, str | None] = {}
        for model in (*LLAMAS, *LLAMAS):
            answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=5, temperature=0)
            assert answer.model == model
            said = answer.choices[0].message.content
            assert answers.setdefault(model, said) == said  # after an eviction and a load too
    assert len(set(answers.values())) == len(LLAMAS)
    found = slots(hive)
    assert sorted(slot["state"] for slot in found.values()) == ["cold", "ready", "ready"]
    assert all(slot["need_from"] == "learnt" for slot in found.values())
    (account,) = hive.get("/api/pool")["accounts"]
    assert account["charged_bytes"] <= account["total_bytes"]


def test_the_packages_of_three_dialects_ask_for_models_in_turn(two_of_three: Stack) -> None:
    hive = two_of_three
    hive.create("alice", "idler.py")
    access = hive.get("/api/agents/alice/tokens")
    of_ollama = ollama.Client(host=access["ollama_host"])
    of_anthropic = anthropic.Anthropic(
        base_url=access["openai_base_url"].removesuffix("/v1"), auth_token=access["model"], api_key=None, max_retries=0
    )
    with client_of(hive, "alice") as of_openai, of_anthropic:
        for model in LLAMAS:
            chunks = list(of_openai.chat.completions.create(model=model, messages=MESSAGES, max_tokens=5, stream=True))
            assert {chunk.model for chunk in chunks} == {model}
            told = of_ollama.chat(model=model, messages=MESSAGES, options={"num_predict": 4})
            assert told.model == model
            assert told.eval_count == 4
            message = of_anthropic.messages.create(model=model, messages=MESSAGES, max_tokens=6)
            assert message.model == model
            assert message.usage.output_tokens <= 6
    of_ollama._client.close()


def test_orders_of_an_operator_load_unload_and_pin(two_of_three: Stack) -> None:
    hive = two_of_three
    job = hive.post("/api/models/alpha/load")
    until(lambda: slots(hive)["alpha"]["state"] == "ready", within_s=60, what="alpha is loaded")
    until(lambda: hive.get(f"/api/jobs/{job['id']}")["state"] == "done", within_s=10, what="the job is done")
    hive.post("/api/models/alpha/pin")
    hive.post("/api/models/beta/load")
    until(lambda: slots(hive)["beta"]["state"] == "ready", within_s=60, what="beta is loaded")
    hive.post("/api/models/gamma/load")
    until(lambda: slots(hive)["gamma"]["state"] == "ready", within_s=60, what="gamma is loaded")
    assert slots(hive)["alpha"]["state"] == "ready"  # pinned: beta had to go
    assert slots(hive)["beta"]["state"] == "cold"
    hive.post("/api/models/gamma/unload")
    until(lambda: slots(hive)["gamma"]["state"] == "cold", within_s=60, what="gamma is unloaded")


def test_pinned_models_are_loaded_unasked_and_survive_kill_9_of_daemon_and_helper(tmp_path: Path) -> None:
    config = pool_config(3 * SERVER_MB + 20) + llama_rows(llama_models(tmp_path), more="pin = true")
    with stack(config=config) as hive:
        all_ready = lambda: {slot["state"] for slot in slots(hive).values()} == {"ready"}  # noqa: E731
        until(all_ready, within_s=120, what="all are loaded")
        before = hive.servers()
        for victim in ("daemon", "sandbox"):
            hive.restart(victim)
            until(all_ready, within_s=120, what=f"all are ready after the {victim} was killed")
            assert hive.servers() == before, victim  # nothing was started anew


def test_nothing_of_the_pool_is_left_when_hive_ends(tmp_path: Path) -> None:
    with stack(config=pool_config(2 * SERVER_MB + 20) + llama_rows(llama_models(tmp_path))) as hive:
        hive.create("alice", "idler.py")
        with client_of(hive, "alice") as client:
            client.chat.completions.create(model="alpha", messages=MESSAGES, max_tokens=3)
        mine = hive.servers()
        assert mine
    assert not mine & hive.servers()


@pytest.mark.chaos  # another start of vLLM: 30 s of CPU
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_vllm_and_three_llama_servers_are_one_pool(tmp_path: Path) -> None:
    inference, row = vllm_row(tmp_path)
    config = pool_config(2 * SERVER_MB + 20 + 1800, more=inference) + llama_rows(llama_models(tmp_path)) + row
    with stack(config=config) as hive:
        hive.create("alice", "idler.py")
        with client_of(hive, "alice") as client:
            for model in (ON_VLLM, *LLAMAS, ON_VLLM):
                answer = client.with_options(timeout=300).chat.completions.create(
                    model=model, messages=MESSAGES, max_tokens=5
                )
                assert (answer.model, answer.usage.completion_tokens if answer.usage else 0) == (model, 5)


# --- under load ---


def received(hive: Stack) -> list[dict[str, Any]]:
    """All answers that the agents received, whole or not."""
    lines = [line for number in range(AGENTS) for line in hive.agent_lines(f"chooser-{number}")]
    return [line for line in lines if "asked" in line]


def check_answers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were answered; each by the model it had asked for, with as many tokens as it wanted."""
    whole = [line for line in lines if "tokens_out" in line]
    assert [line for line in whole if line["model"] != line["asked"] or line["tokens_out"] != line["wanted"]] == []
    return whole


def recorded(hive: Stack) -> tuple[int, int, int]:
    """(rows, tokens in, tokens out) of answers that were not cut, read past the daemon."""
    with sqlite3.connect(f"file:{hive.state / 'hive.db'}?mode=ro", uri=True) as database:
        query = (
            "SELECT count(*), total(tokens_in), total(tokens_out) FROM inference_usage WHERE cut = 0 AND status = 200"
        )
        rows, tokens_in, tokens_out = database.execute(query).fetchone()
    database.close()
    return int(rows), int(tokens_in), int(tokens_out)


def test_twenty_agents_asleep_and_awake_none_fails_and_usage_is_exact(two_of_three: Stack) -> None:
    hive = two_of_three
    names = [f"chooser-{number}" for number in range(AGENTS)]
    for name in names:
        hive.create(name, "chooser.py", "0.5", *LLAMAS)
    chance, end = random.Random(1), time.monotonic() + 25
    while time.monotonic() < end:
        name = chance.choice(names)
        hive.post(f"/api/agents/{name}/pause")
        time.sleep(0.3)
        hive.post(f"/api/agents/{name}/resume")
    for name in names:
        hive.post(f"/api/agents/{name}/stop")
    lines = received(hive)
    whole = check_answers(lines)
    refused = [line for line in lines if "tokens_out" not in line]
    assert [line for line in refused if "the agent is stopping" not in line["text"]] == []
    assert {line["asked"] for line in whole} == set(LLAMAS)
    told = (len(whole), sum(line["tokens_in"] for line in whole), sum(line["tokens_out"] for line in whole))
    until(lambda: recorded(hive) == told, within_s=20, what=f"{told} is recorded, not {recorded(hive)}")


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_kill_9_of_anything_under_load_answers_nothing_wrongly_and_counts_exactly(two_of_three: Stack) -> None:
    hive, chance = two_of_three, random.Random(7)
    for number in range(AGENTS):
        hive.create(f"chooser-{number}", "chooser.py", "0.5", *LLAMAS)
    for _ in range(KILLS):
        time.sleep(chance.uniform(3.2, 3.8))
        victim = chance.choice([*PROCESSES[1:], "server"])
        if victim == "server":
            if pids := sorted(hive.servers()):
                os.kill(chance.choice(pids), signal.SIGKILL)
        else:
            hive.kill(victim)
    until(hive.is_whole, within_s=60, what="all are back")
    before = len(check_answers(received(hive)))
    until(lambda: len(check_answers(received(hive))) > before + AGENTS, within_s=60, what="answers come again")
    for number in range(AGENTS):
        hive.post(f"/api/agents/chooser-{number}/stop")
    whole = check_answers(received(hive))
    told = (len(whole), sum(line["tokens_in"] for line in whole), sum(line["tokens_out"] for line in whole))
    # An answer that reached the proxy whole, and not the agent, is counted and was not received.
    until(lambda: all(a >= b for a, b in zip(recorded(hive), told, strict=True)), within_s=20, what="all is recorded")
    rows, _, _ = recorded(hive)
    assert rows - len(whole) <= 2 * KILLS * AGENTS // 4
    (account,) = hive.get("/api/pool")["accounts"]
    held = [slot for slot in slots(hive).values() if slot["grants"]]
    assert account["charged_bytes"] == sum(grant["charged_bytes"] for slot in held for grant in slot["grants"])
    assert len(hive.servers()) == len(held)
