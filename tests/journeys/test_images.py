"""Images of the real diffusers through a whole Hive, by `openai` as it is."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.diffusers_runner import pipeline, runner_program
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.diffusers, pytest.mark.timeout(300)]
PNG = b"\x89PNG\r\n"
LONG = 900
"""Steps that nobody waits for the end of."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the runner's program, readable for its user."""
    folder = tmp_path_factory.mktemp("images")
    for place in (folder, folder.parent):
        place.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def hive(folder: Path) -> Iterator[Stack]:
    config = (
        f"[inference]\ndiffusers_program = {runner_program(folder)}\n"
        "[images]\nmax_pixels = 16384\nmax_steps = 1000\n[pool]\nreserve_mb = 0\ncpu_mb = 1000\n"
        f"[model sd]\nbackend = diffusers\nfile = {pipeline('sd')}\nsteps = 2\n"
    )
    with stack(config=config, up_within_s=120) as hive:
        hive.create("alice", "idler.py")
        yield hive


def client_of(hive: Stack, agent: str) -> openai.OpenAI:
    access: Any = hive.get(f"/api/agents/{agent}/tokens")
    return openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0, timeout=120)


@pytest.fixture
def client(hive: Stack) -> Iterator[openai.OpenAI]:
    with client_of(hive, "alice") as client:
        yield client


def draw(client: openai.OpenAI, **words: Any) -> Any:
    told: dict[str, Any] = {"model": "sd", "prompt": "a bee of the hive", "size": "64x64"}
    return client.images.generate(**(told | words))


def runner_pids(folder: Path) -> list[int]:
    """Pids of the hive-runners of this Hive: their program is a file in this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(folder / "hive-runner") in words[:3]:
                found.append(int(process.pid))
    return found


def test_an_agent_gets_its_images_with_the_seed_it_asked_for(client: openai.OpenAI) -> None:
    """The first request finds the model not loaded, and waits for it."""
    assert "sd" in [model.id for model in client.models.list()]
    two = draw(client, n=2, extra_body={"seed": 5, "steps": 3})
    images = [base64.b64decode(image.b64_json) for image in two.data]
    assert all(image.startswith(PNG) for image in images)
    assert [image.seed for image in two.data] == [5, 6]
    again = draw(client, extra_body={"seed": 6, "steps": 3})
    assert base64.b64decode(again.data[0].b64_json) == images[1]
    assert base64.b64decode(draw(client, output_format="webp").data[0].b64_json).startswith(b"RIFF")


def test_a_stream_tells_the_steps_of_the_model_and_then_the_image(client: openai.OpenAI) -> None:
    """[model sd] says steps = 2, and the request does not say."""
    events = list(draw(client, stream=True))
    assert [event.type for event in events] == [*["image_generation.progress"] * 2, "image_generation.completed"]
    assert base64.b64decode(events[-1].b64_json).startswith(PNG)


def test_what_a_request_may_not_ask_is_refused_in_words(client: openai.OpenAI) -> None:
    for words, why in (
        ({"response_format": "url"}, "Hive keeps no image"),
        ({"size": "129x128"}, "more than 16384 pixels"),
        ({"size": "60x64"}, "multiples of 8, like 64x64"),
        ({"prompt": " "}, "is empty"),
        ({"extra_body": {"inputs": {"x": 1}}}, "no such input"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            draw(client, **words)
    with pytest.raises(openai.BadRequestError, match="takes models for text"):
        client.chat.completions.create(model="sd", messages=[{"role": "user", "content": "hi"}])


def test_what_is_cut_or_left_out_is_told(client: openai.OpenAI) -> None:
    told = client.images.with_raw_response.generate(model="sd", prompt="a bee", size="auto", n=11, quality="hd")
    assert told.headers["x-hive-clamped"] == "n=10"
    assert told.headers["x-hive-dropped"] == "quality"
    assert "x-hive-cost" not in told.headers
    answer: Any = told.parse()
    assert len(answer.data) == 10


def test_images_and_pixel_steps_are_counted(hive: Stack) -> None:
    hive.create("bob", "idler.py")

    def rows() -> Any:
        return [row for row in hive.get("/api/usage", since="1h", by="agent")["agents"] if row["name"] == "bob"]

    with client_of(hive, "bob") as client:
        draw(client, n=2, extra_body={"steps": 3})
        list(draw(client, stream=True, extra_body={"steps": 4}))
    until(lambda: rows() and rows()[0]["requests"] == 2, within_s=10, what="both are counted")
    assert (rows()[0]["images"], rows()[0]["pixel_steps"]) == (3, 64 * 64 * (2 * 3 + 4))


def test_a_client_that_leaves_frees_the_place_within_a_step(hive: Stack, client: openai.OpenAI) -> None:
    with draw(client, stream=True, extra_body={"steps": LONG}) as events:
        next(iter(events))
    draw(client, extra_body={"steps": 1})  # it waits for a step, not for 900

    def queue() -> Any:
        return hive.get("/api/queue")

    until(lambda: not queue()["running"], within_s=10, what="the place is free")


def test_a_runner_that_is_killed_in_the_middle_gives_no_part_as_the_whole(
    hive: Stack, client: openai.OpenAI, folder: Path
) -> None:
    """Its request is a 502, or, where it went over a connection of an earlier one, made from its beginning by the next
    server: nothing of its answer had come."""
    long = {"extra_body": {"seed": 9, "steps": LONG}}
    draw(client)
    failed: list[openai.APIStatusError] = []
    made: list[str] = []

    def ask() -> None:
        try:
            made.append(draw(client, **long).data[0].b64_json)
        except openai.APIStatusError as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()

    def states() -> list[str]:
        return [row["state"] for row in hive.get("/api/queue")["requests"]]

    until(lambda: "waiting" in states(), within_s=30, what="its server is at work on it")
    (pid,) = runner_pids(folder)
    os.kill(pid, signal.SIGKILL)
    asking.join()
    assert [error.status_code for error in failed] == [502] * (not made)
    again = draw(client, **long).data[0].b64_json
    assert made in ([], [again])
    assert base64.b64decode(again).startswith(PNG)
