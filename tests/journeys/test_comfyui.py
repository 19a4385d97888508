"""Workflows of a ComfyUI through a whole Hive, by `openai` as it is, before a stand-in for ComfyUI."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hive.runner.pictures import size_of
from tests.journeys.stack import Stack, stack, until
from tests.runner.comfy_box import ComfyBox
from tests.runner.comfy_workflows import workflow

pytestmark = [pytest.mark.redis]
ROOM = "[pool]\nreserve_mb = 0\ncpu_mb = 500\n"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[ComfyBox]:
    """A stand-in for ComfyUI, whose steps take half a second; no runner."""
    tmp_path.chmod(0o755)
    made = ComfyBox(tmp_path, "--step-s", "0.5")
    yield made
    made.close()


@pytest.fixture
def hive(box: ComfyBox) -> Iterator[Stack]:
    told = f"[comfyui]\nurl = http://127.0.0.1:{box.port}\nworkflows_dir = {box.workflows}\nvram_mb = 100\n"
    with stack(config=told + ROOM) as hive:
        hive.create("alice", "idler.py")
        yield hive


def client_of(hive: Stack) -> openai.OpenAI:
    access: Any = hive.get("/api/agents/alice/tokens")
    return openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0)


def sent(box: ComfyBox) -> list[Any]:
    """The prompts that ComfyUI got."""
    return [json.loads(line[13:]) for line in box.asked() if line.startswith("POST /prompt ")]


def comfyui(hive: Stack) -> Any:
    (slot,) = [one for one in hive.get("/api/pool")["slots"] if one["model"] == "comfyui"]
    return slot


def test_an_agent_asks_a_workflow_for_images(hive: Stack, box: ComfyBox) -> None:
    """The first request finds it not loaded; the second asks another workflow of the same ComfyUI, which has come
    since."""
    with client_of(hive) as client:
        assert "comfy/plain" in [model.id for model in client.models.list()]
        asked: Any = client.images.with_raw_response.generate(
            model="comfy/plain",
            prompt="a bee",
            n=2,
            size="64x32",
            extra_body={"seed": 5, "steps": 1, "inputs": {}},
        )
        told, first_id = asked.parse(), asked.headers["x-request-id"]
        assert [size_of(base64.b64decode(image.b64_json)) for image in told.data] == [(64, 32)] * 2
        assert [image.seed for image in told.data] == [5, 6]
        events = client.images.generate(model="comfy/plain", prompt="a bee", stream=True, extra_body={"steps": 1})
        assert [event.type for event in events] == ["image_generation.completed"]
        with pytest.raises(openai.BadRequestError, match="comfy/plain has no such input"):
            client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"negative_prompt": "x"})
        with pytest.raises(openai.BadRequestError, match="keeps no image"):
            client.images.generate(model="comfy/plain", prompt="a bee", response_format="url")
        with pytest.raises(openai.BadRequestError, match="takes models for text"):
            client.chat.completions.create(model="comfy/plain", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.NotFoundError):
            client.images.generate(model="comfyui", prompt="a bee")
    assert sent(box)[0]["prompt_id"] == first_id
    assert box.at_comfy("/history") == {}
    slot = comfyui(hive)
    assert (slot["state"], slot["category"], slot["backend"]) == ("ready", "image", "comfyui")


@pytest.mark.wide
def test_images_are_counted_as_images(hive: Stack) -> None:
    with client_of(hive) as client:
        client.images.generate(model="comfy/plain", prompt="a bee", n=2, extra_body={"steps": 1})

    def totals() -> Any:
        return hive.get("/api/usage", since="1h", by="model")["totals"]

    until(lambda: totals()["requests"], within_s=10, what="the request is counted")
    assert (totals()["images"], totals()["pixel_steps"]) == (2, 2 * 64 * 32)


@pytest.mark.wide
def test_what_comfyui_never_began_costs_no_image(hive: Stack, box: ComfyBox) -> None:
    """Each 502 of a ComfyUI that was away was charged as an image of 25 steps: an agent that asks again and again had
    no budget left when it was back."""
    (box.workflows / "other.json").write_text(workflow(**{"4": {"class_type": "Custom", "inputs": {}}}))
    with client_of(hive) as client:
        until(lambda: "comfy/other" in [model.id for model in client.models.list()], within_s=30, what="it is found")
        client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 1})
        with pytest.raises(openai.APIStatusError, match="node Custom does not exist"):
            client.images.generate(model="comfy/other", prompt="a bee", extra_body={"steps": 1})
        box.end_comfy()
        with pytest.raises(openai.APIStatusError, match="cannot be reached"):
            client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 1})

    def totals() -> Any:
        return hive.get("/api/usage", since="1h", by="model")["totals"]

    until(lambda: totals()["requests"] == 3, within_s=10, what="all are counted")
    assert (totals()["images"], totals()["pixel_steps"]) == (1, 64 * 32)


@pytest.mark.wide
def test_a_client_that_leaves_has_its_prompt_ended_and_the_place_kept_until_then(hive: Stack, box: ComfyBox) -> None:
    with client_of(hive) as client:
        client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 1})
        with pytest.raises(openai.APITimeoutError):
            client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 900}, timeout=1.0)
        client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 1})
    left = sent(box)[1]["prompt_id"]
    interrupts = {line for line in box.asked() if line.startswith("POST /interrupt ")}
    assert interrupts == {"POST /interrupt " + json.dumps({"prompt_id": left})}
    assert box.at_comfy("/history") == {}


@pytest.mark.wide
def test_a_comfyui_that_is_killed_in_the_middle_is_told_and_served_from_again(hive: Stack, box: ComfyBox) -> None:
    with client_of(hive) as client:
        client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 1})
        failed: list[openai.APIStatusError] = []

        def ask() -> None:
            with pytest.raises(openai.APIStatusError) as error:
                client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 900})
            failed.append(error.value)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: box.at_comfy("/queue")["queue_running"], within_s=30, what="it works")
        box.end_comfy()
        asking.join(60)
        assert [error.status_code for error in failed] == [502]
        box.start_comfy()
        assert client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 1}).data


@pytest.mark.wide
def test_its_memory_is_given_back_when_the_pool_unloads_it(hive: Stack, box: ComfyBox) -> None:
    with client_of(hive) as client:
        client.images.generate(model="comfy/plain", prompt="a bee", extra_body={"steps": 1})
    assert box.at_comfy("/system_stats")["devices"][0]["torch_vram_total"] > 0
    hive.post("/api/models/comfyui/unload")
    until(lambda: comfyui(hive)["state"] == "cold", within_s=30, what="it is unloaded")
    assert 'POST /free {"unload_models": true, "free_memory": true}' in box.asked()
    until(
        lambda: not box.at_comfy("/system_stats")["devices"][0]["torch_vram_total"],
        within_s=10,
        what="it is given back",
    )


@pytest.mark.wide
def test_without_a_comfyui_its_models_are_refused_in_words(box: ComfyBox) -> None:
    (box.workflows / "plain.json").write_text(workflow()[:-1])
    told = f"[comfyui]\nurl = http://127.0.0.1:{box.port}\nworkflows_dir = {box.workflows}\nvram_mb = 100\n"
    with stack(config=told + ROOM) as hive:
        until(lambda: "plain.json: it is not JSON" in comfyui(hive)["why"], within_s=10, what="the fault is told")
