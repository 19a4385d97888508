"""A model in the variant a tier is worth, through a whole Hive: who asked, who answered, what is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import ollama
import openai
import pytest

from tests.fakes.programs import fake_backend
from tests.journeys.sdk import HELLO, door_of
from tests.journeys.stack import Stack, stack, until

pytestmark = pytest.mark.redis
CONFIG = "[inference]\nquantization_routing = true\naliases = gpt-4 = m\n"
THERE = "m:q4_0,m:q8_0,m:f16"
OF_TIER = {"low": "m:q4_0", "medium": "m:q8_0", "high": "m:f16"}


def route(hive: Stack, *words: str) -> Any:
    command = [sys.executable, "-m", "hive", "model", "route", *words, "--state-dir", str(hive.state), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_each_tier_is_given_its_variant_and_hears_the_name_it_asked_for() -> None:
    with fake_backend("ollama", "--models", THERE) as backend, stack(url=backend.url, config=CONFIG) as hive:
        for tier, variant in OF_TIER.items():
            hive.create(f"of-{tier}", "idler.py", tier=tier)
            for asked in ("m", "gpt-4"):
                client = ollama.Client(host=hive.get(f"/api/agents/of-{tier}/tokens")["ollama_host"])
                assert client.chat(asked, HELLO).model == asked
                assert {chunk.model for chunk in client.chat(asked, HELLO, stream=True)} == {asked}
                client._client.close()
                with door_of(hive, f"of-{tier}").openai() as by_openai:
                    assert by_openai.chat.completions.create(model=asked, messages=HELLO).model == asked
                assert route(hive, asked, "--tier", tier)["model"] == variant
        models = {"m:q4_0": 6, "m:q8_0": 6, "m:f16": 6}

        def counted() -> bool:
            rows = hive.get("/api/usage", by="model")["models"]
            return {row["model"]: row["requests"] for row in rows} == models

        until(counted, within_s=10, what=f"usage by the model that answered: {hive.get('/api/usage', by='model')}")


def test_a_model_that_is_not_there_is_refused_with_what_there_is() -> None:
    with fake_backend("llama", "--models", "tiny") as backend, stack(url=backend.url) as hive:
        hive.create("alice", "idler.py")
        begun = backend.stats()["begun"]
        with door_of(hive, "alice").openai() as client, pytest.raises(openai.NotFoundError, match="there is tiny"):
            client.chat.completions.create(model="gpt-9", messages=HELLO)
        assert backend.stats()["begun"] == begun


def test_the_setting_changes_while_hive_runs() -> None:
    with fake_backend("ollama", "--models", THERE) as backend, stack(url=backend.url) as hive:
        hive.create("alice", "idler.py", tier="low")
        with door_of(hive, "alice").openai() as client, pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="m", messages=HELLO)
        hive.put_config({"inference.quantization_routing": True})
        with door_of(hive, "alice").openai() as client:
            assert client.chat.completions.create(model="m", messages=HELLO).model == "m"
