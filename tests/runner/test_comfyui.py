"""The runner before ComfyUI as a process, with a stand-in for ComfyUI that answers in the recorded shapes."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.runner.pictures import size_of
from tests.runner.comfy_box import ComfyBox, served, wait_until
from tests.runner.comfy_workflows import GRAPH, workflow


@pytest.fixture
def box(tmp_path: Path) -> Iterator[ComfyBox]:
    with served(tmp_path) as made:
        yield made


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[ComfyBox]:
    """Its steps take half a second."""
    with served(tmp_path, "--step-s", "0.5") as made:
        yield made


def test_a_workflow_is_a_model_that_makes_images(box: ComfyBox) -> None:
    status, answer, cost = box.generate(seed=255, size="32x16", steps=3)
    assert status == 200, answer
    (image,) = answer["data"]
    data = base64.b64decode(image["b64_json"])
    assert size_of(data) == (32, 16)
    assert (image["seed"], answer["size"], answer["output_format"]) == (255, "32x16", "png")
    assert cost == f"images=1; pixel_steps={32 * 16 * 3}"


def test_the_prompt_has_the_requests_id_and_nothing_of_it_stays_at_comfyui(box: ComfyBox) -> None:
    assert box.generate("req-42")[0] == 200
    (sent,) = [json.loads(line[13:]) for line in box.asked() if line.startswith("POST /prompt ")]
    assert sent["prompt_id"] == "req-42"
    assert sent["prompt"]["2"]["inputs"]["text"] == "a photo of a bee"
    assert sent["prompt"]["9"]["class_type"] == "PreviewImage"
    assert box.at_comfy("/history") == {}
    assert not [line for line in box.asked() if line.startswith("GET /history ") and "req" in line]


def test_the_graph_that_comfyui_writes_into_its_files_stays_here(box: ComfyBox) -> None:
    _, answer, _ = box.generate()
    data = base64.b64decode(answer["data"][0]["b64_json"])
    assert b"EmptyImage" not in data
    assert b"tEXt" not in data


def test_several_images_are_several_prompts(box: ComfyBox) -> None:
    _, answer, cost = box.generate(n=3, seed=7)
    assert [image["seed"] for image in answer["data"]] == [7, 8, 9]
    assert cost == f"images=3; pixel_steps={3 * 64 * 32 * 2}"
    sent = [json.loads(line[13:])["prompt_id"] for line in box.asked() if line.startswith("POST /prompt ")]
    assert sent == ["req-1", "req-1-1", "req-1-2"]


def test_another_format_is_made_by_comfyui(box: ComfyBox) -> None:
    _, answer, cost = box.generate(output_format="webp", output_compression=50)
    assert base64.b64decode(answer["data"][0]["b64_json"])[8:12] == b"WEBP"
    assert cost == f"images=1; pixel_steps={64 * 32 * 2}"
    assert any("preview=webp%3B50" in line for line in box.asked())


def test_a_stream_has_an_event_for_each_image_and_an_end(box: ComfyBox) -> None:
    connection = box.call({"stream": True, "n": 2, "seed": 1})
    answer = connection.getresponse()
    assert answer.getheader("x-hive-cost") == f"images=2; pixel_steps={2 * 64 * 32 * 2}"
    events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert [json.loads(event)["type"] for event in events[:-1]] == ["image_generation.completed"] * 2
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "comfy/none"}, 404, "model_not_found"),
        ({"steps": 1001}, 400, "bad_request"),
        ({"steps": 501, "inputs": {"steps": 9}}, 400, "invalid_input"),
        ({"size": "520x8"}, 400, "invalid_input"),
        ({"negative_prompt": "x"}, 400, "invalid_input"),
        ({"inputs": {"ckpt_name": "x"}}, 400, "invalid_input"),
        ({"response_format": "url"}, 400, "bad_request"),
        ({"prompt": ""}, 400, "bad_request"),
    ],
)
def test_what_a_workflow_does_not_take_never_reaches_comfyui(
    box: ComfyBox, body: dict[str, Any], status: int, code: str
) -> None:
    found, answer, _ = box.generate(**body)
    assert (found, answer["error"]["code"]) == (status, code), answer
    assert not [line for line in box.asked() if line.startswith("POST /prompt ")]


def test_a_caller_that_leaves_has_its_prompt_interrupted_and_nobody_elses(slow: ComfyBox) -> None:
    connection = slow.call({"steps": 1000})
    wait_until(lambda: slow.at_comfy("/queue")["queue_running"])
    connection.close()
    wait_until(lambda: not slow.at_comfy("/queue")["queue_running"])
    wait_until(lambda: 'POST /history {"delete": ["req-1"]}' in slow.asked())
    assert slow.at_comfy("/history") == {}
    interrupts = [line for line in slow.asked() if line.startswith("POST /interrupt ")]
    assert set(interrupts) == {'POST /interrupt {"prompt_id": "req-1"}'}


def test_a_half_closed_connection_is_closed_when_the_prompt_has_ended(slow: ComfyBox) -> None:
    connection = slow.call({"steps": 1000})
    wait_until(lambda: slow.at_comfy("/queue")["queue_running"])
    connection.sock.shutdown(1)
    assert connection.sock.recv(1) == b""
    assert slow.at_comfy("/queue") == {"queue_running": [], "queue_pending": []}


def test_a_caller_that_waits_in_line_leaves_without_a_trace(slow: ComfyBox) -> None:
    first = slow.call({"steps": 1000}, "first")
    wait_until(lambda: slow.at_comfy("/queue")["queue_running"])
    second = slow.call({"steps": 1}, "second")
    time.sleep(0.3)  # it is in line by then, or comes into it and finds its caller gone
    second.close()
    first.close()
    wait_until(lambda: not slow.at_comfy("/queue")["queue_running"])
    assert slow.generate("third", steps=1)[0] == 200
    sent = [json.loads(line[13:])["prompt_id"] for line in slow.asked() if line.startswith("POST /prompt ")]
    assert sent == ["first", "third"]


def test_a_comfyui_that_is_killed_is_told_as_such_and_served_from_when_it_is_back(slow: ComfyBox) -> None:
    connection = slow.call({"steps": 1000})
    wait_until(
        lambda: any(line.startswith("GET /history/") for line in slow.asked())
    )  # the runner knows that it has it
    slow.end_comfy()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (502, "comfyui_restarted")
    status, told, cost = slow.generate()
    assert (status, told["error"]["code"], cost) == (502, "comfyui_unreachable", "images=0; pixel_steps=0")
    assert slow.ask("GET", "/comfyui/state")[1] == {"up": False, "version": ""}
    slow.start_comfy()
    assert slow.generate(steps=1)[0] == 200


def test_a_comfyui_that_is_restarted_in_the_middle_has_lost_the_prompt(slow: ComfyBox) -> None:
    connection = slow.call({"steps": 1000})
    wait_until(lambda: slow.at_comfy("/queue")["queue_running"])
    slow.end_comfy()
    slow.start_comfy()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (502, "comfyui_restarted")


def test_a_failing_node_is_told_in_its_words(box: ComfyBox) -> None:
    broken = {"4": {"class_type": "StandInError", "inputs": {"images": ["1", 0]}}}
    (box.workflows / "broken.json").write_text(workflow(**broken))
    status, answer, _ = box.generate(model="comfy/broken")
    assert status == 502
    assert "StandInError (node 4): ValueError: mat1 and mat2 shapes" in answer["error"]["message"]
    assert box.at_comfy("/history") == {}


def test_a_node_that_is_not_installed_is_told_in_comfyuis_words(box: ComfyBox) -> None:
    (box.workflows / "other.json").write_text(workflow(**{"4": {"class_type": "Custom", "inputs": {}}}))
    status, answer, cost = box.generate(model="comfy/other")
    assert (status, answer["error"]["code"], cost) == (502, "workflow_refused", "images=0; pixel_steps=0")
    assert "node Custom does not exist" in answer["error"]["message"]


def test_a_lack_of_memory_is_told_and_ends_the_runner(box: ComfyBox) -> None:
    full = {"4": {"class_type": "StandInOutOfMemory", "inputs": {"images": ["1", 0]}}}
    (box.workflows / "full.json").write_text(workflow(**full))
    status, answer, _ = box.generate(model="comfy/full")
    assert (status, answer["error"]["code"]) == (503, "out_of_memory")
    assert box.runner is not None
    assert box.runner.wait(60) == 77


def test_what_a_killed_runner_left_is_removed_when_the_next_one_begins(slow: ComfyBox) -> None:
    slow.call({"steps": 1000})
    wait_until(lambda: slow.at_comfy("/queue")["queue_running"])
    assert slow.runner is not None
    slow.runner.kill()
    slow.runner.wait()
    slow.start()
    assert slow.at_comfy("/queue") == {"queue_running": [], "queue_pending": []}
    assert slow.at_comfy("/history") == {}
    assert "removed from ComfyUI: 1 of an earlier runner's prompts" in slow.said()


def test_a_workflow_that_tells_no_steps_tells_no_cost_of_them(box: ComfyBox) -> None:
    told = json.loads(workflow())
    del told["workflow"]["3"], told["inputs"]["steps"]
    (box.workflows / "stepless.json").write_text(json.dumps(told))
    assert box.generate(model="comfy/stepless")[2] == "images=1"


def test_its_memory_is_told_and_given_back_when_the_runner_ends(box: ComfyBox) -> None:
    assert box.ask("GET", "/comfyui/state")[1]["held_bytes"] == 0
    box.generate()
    state = box.ask("GET", "/comfyui/state")[1]
    assert (state["held_bytes"], state["device"], state["queue"]) == (3000 << 20, "cuda", 0)
    assert box.end_runner() == 0
    assert box.at_comfy("/system_stats")["devices"][0]["torch_vram_total"] == 0
    assert not box.socket.exists()


def test_what_is_at_work_is_ended_when_the_runner_ends(slow: ComfyBox) -> None:
    slow.call({"steps": 1000})
    wait_until(lambda: slow.at_comfy("/queue")["queue_running"])
    assert slow.end_runner() == 0
    wait_until(lambda: not slow.at_comfy("/queue")["queue_running"])


def test_workflows_come_and_go_while_it_runs_and_a_broken_one_is_told(box: ComfyBox) -> None:
    def names() -> list[str]:
        return [row["id"] for row in box.ask("GET", "/v1/models")[1]["data"]]

    assert names() == ["comfy/plain"]
    (box.workflows / "another.json").write_text(workflow())
    (box.workflows / "bad.json").write_text(json.dumps(GRAPH))
    assert names() == ["comfy/another", "comfy/plain"]
    status, answer, _ = box.generate(model="comfy/bad")
    assert status == 404
    assert "cannot be used: this is a graph alone" in answer["error"]["message"]
    (box.workflows / "plain.json").unlink()
    assert names() == ["comfy/another"]
    assert box.generate()[0] == 404


def test_the_models_tell_their_inputs(box: ComfyBox) -> None:
    (row,) = box.ask("GET", "/v1/models")[1]["data"]
    assert row["description"] == "One colour."
    assert row["inputs"]["steps"] == {"type": "integer", "expects": "an integer from 1 to 1000", "default": 2}


def test_a_runner_without_a_workflow_does_not_begin(tmp_path: Path) -> None:
    box = ComfyBox(tmp_path)
    try:
        (box.workflows / "plain.json").write_text("{")
        assert box.start(serves=False).wait(60) == 1
        assert "workflow plain.json is left out: it is not JSON" in box.said()
        assert "there is no workflow in" in box.said()
    finally:
        box.close()
