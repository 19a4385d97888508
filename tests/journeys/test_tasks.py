"""A task on real llama-servers: an agent steps down while its first model is cold, and comes back to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.journeys.clients import python_client
from tests.journeys.pool_stack import SERVER_MB, llama_models, llama_rows, pool_config
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_pool import MESSAGES, client_of, slots

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
TASKS = """
[task plan]
models = alpha | beta
hold_s = 0.5
keep_alive_s = 30
[task strict]
models = alpha | beta
pin_primary = true
budget_s = 60
"""


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Stack]:
    """Two models, room for both, and tasks of them; one more in the room of two."""
    rows = llama_rows(llama_models(tmp_path, ("alpha", "beta", "gamma")))
    aliases = "aliases = gpt-4 = task:plan\n"
    with stack(config=pool_config(2 * SERVER_MB + 20, more=aliases) + rows + TASKS) as hive:
        yield hive


def ask(client: openai.OpenAI, model: str = "task:plan") -> tuple[str, int, str]:
    """(the model that answered, its rung, why), from the head of an answer."""
    raw = client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, max_tokens=5)
    assert raw.parse().model == model
    return raw.headers["x-hive-model"], int(raw.headers["x-hive-rung"]), raw.headers["x-hive-why"]


def load(hive: Stack, model: str) -> None:
    hive.post(f"/api/models/{model}/load")
    until(lambda: slots(hive)[model]["state"] == "ready", within_s=60, what=f"{model} is loaded")


def test_an_agent_steps_down_while_its_first_model_is_cold_and_comes_back(hive: Stack) -> None:
    """Nobody orders the first model: that the task stepped past it is a wish, and it is loaded for that."""
    hive.create("alice", "idler.py")
    load(hive, "beta")
    answers: list[tuple[str, int, str]] = []
    with client_of(hive, "alice") as client:
        assert "task:plan" in {model.id for model in client.models.list()}
        until_s = time.monotonic() + 90
        while not answers or answers[-1][0] != "alpha":
            assert time.monotonic() < until_s, answers
            answers.append(ask(client))
            time.sleep(0.2)
        assert answers[0][:2] == ("beta", 1)
        assert answers[0][2].startswith("alpha is cold")
        assert answers[0][2].endswith("; beta is ready")
        assert answers[-1] == ("alpha", 0, "alpha is ready")
        assert all(why for _, _, why in answers)
        assert ask(client, "gpt-4") == ("alpha", 0, "alpha is ready")
    told = hive.get("/api/tasks/plan/route", agent="alice")
    assert told["lines"][-1] == "takes rung 0: alpha is ready"
    rows: list[Any] = []

    def counted() -> bool:
        found = hive.get("/api/usage", by="model")
        rows[:] = found["models"]
        return bool(sum(row["requests"] for row in rows) == len(answers) + 1)

    until(counted, within_s=10, what="usage is told")
    served = {row["model"]: row["requests"] for row in rows}
    assert served["beta"] == sum(model == "beta" for model, _, _ in answers)
    assert all(row["far"] == 0 for row in rows)


def test_a_langgraph_agent_steps_down_while_its_first_model_is_cold_and_comes_back(hive: Stack) -> None:
    """The real package, and the reason in the head of every answer."""
    hive.create("alice", "idler.py")
    load(hive, "beta")
    access = hive.get("/api/agents/alice/tokens")
    told = python_client("langgraph", access["openai_base_url"], access["model"], "task:plan", FIRST_MODEL="alpha")
    answers = told["answers"]
    assert [answers[0][:2], answers[-1]] == [["beta", "1"], ["alpha", "0", "alpha is ready"]]
    assert answers[0][2].startswith("alpha is cold")
    assert all(model in ("alpha", "beta") and why for model, _, why in answers)


def server_of(model: Path) -> int:
    """Pid of the llama-server that serves this file."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"llama-server") and str(model).encode() in words:
                return int(entry.name)
    raise AssertionError(f"no server has {model}")


def test_a_server_that_is_killed_is_stepped_past_and_no_request_fails(hive: Stack, tmp_path: Path) -> None:
    hive.create("alice", "idler.py")
    for model in ("alpha", "beta"):
        load(hive, model)
    with client_of(hive, "alice") as client:
        assert ask(client)[:2] == ("alpha", 0)
        os.kill(server_of(tmp_path / "alpha.gguf"), signal.SIGKILL)
        model, rung, why = ask(client)
        assert (model, rung) == ("beta", 1)
        assert why in ("alpha: it could not be reached; beta is ready", "alpha is cold; beta is ready") or (
            why.startswith("alpha is cold, expected in ")
        )
        back: list[tuple[str, int, str]] = []

        def is_back() -> bool:
            back.append(ask(client))
            return back[-1][0] == "alpha"

        until(is_back, within_s=60, what="it comes back")


def test_a_pinned_first_model_is_loaded_for_the_request_that_asks_for_it(hive: Stack) -> None:
    hive.create("alice", "idler.py")
    load(hive, "beta")
    with client_of(hive, "alice") as client:
        model, rung, why = ask(client, "task:strict")
    assert (model, rung) == ("alpha", 0)
    assert why.startswith("alpha is cold")
    assert why.endswith("waited for")


def test_a_task_keeps_its_model_against_one_that_is_not_late(hive: Stack) -> None:
    """Without it alpha would leave at once: nobody is its audience after `audience_s`."""
    hive.create("alice", "idler.py")
    for model in ("alpha", "beta"):
        load(hive, model)
    with client_of(hive, "alice") as client:
        assert ask(client)[0] == "alpha"
    time.sleep(2)
    explained = hive.get("/api/pool/models/alpha/explain")
    assert [line for line in explained["lines"] if line.startswith("It is kept for another ")], explained["lines"]
