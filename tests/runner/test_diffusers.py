"""The real diffusers behind `hive-runner`, with tiny random pipelines of each class."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.diffusers_runner import CLASSES, DiffusersRunner, pipeline, served, started

pytestmark = pytest.mark.diffusers
IMAGES = "/v1/images/generations"
BEE = {"prompt": "a bee of the hive", "size": "64x64", "steps": 3, "seed": 5}
MAGIC = {"png": b"\x89PNG\r\n", "webp": b"RIFF", "jpeg": b"\xff\xd8\xff"}


@pytest.fixture(scope="module")
def runner() -> Iterator[DiffusersRunner]:
    with served(pipeline("sd")) as found:
        yield found


@pytest.fixture
def client(runner: DiffusersRunner) -> Iterator[httpx.Client]:
    with runner.client() as found:
        yield found


def images(answer: httpx.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(row["b64_json"]) for row in answer.json()["data"]]


def size_of_png(data: bytes) -> tuple[int, int]:
    assert data.startswith(MAGIC["png"])
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def metric(client: httpx.Client, name: str) -> float:
    lines = dict(line.split(" ", 1) for line in client.get("/metrics").text.splitlines())
    return float(lines[f"hive_runner_{name}"])


# answers --------------------------------------------------------------------------------------------------------------


OTHERS = ("sdxl", "sd3")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.wide] * (kind in OTHERS)) for kind in CLASSES])
def test_every_class_makes_images_also_split_over_two_devices(kind: str) -> None:
    """The same image comes of a pipeline in one piece and of one whose parts lie on two devices (both the CPU here)."""
    found = []
    for more in ((), ("--device", "cpu=2", "--device", "cpu=2")):
        with served(pipeline(kind), more) as runner, runner.client() as client:
            model = client.get("/v1/models").json()["data"][0]
            assert (model["id"], model["meta"]["pipeline"]) == ("tiny", CLASSES[kind])
            answer = client.post(IMAGES, json=BEE)
            assert answer.headers["x-hive-cost"] == "images=1; pixel_steps=12288"
            found += images(answer)
    assert found[0] == found[1]
    assert size_of_png(found[0]) == (64, 64)


def test_one_seed_is_one_image_and_the_next_another(client: httpx.Client) -> None:
    three = client.post(IMAGES, json={**BEE, "n": 3})
    assert three.headers["x-hive-cost"] == "images=3; pixel_steps=36864"
    first, second, third = images(three)
    assert len({first, second, third}) == 3
    assert [row["seed"] for row in three.json()["data"]] == [5, 6, 7]
    assert images(client.post(IMAGES, json={**BEE, "seed": 6})) == [second]
    assert images(client.post(IMAGES, json={**BEE, "prompt": "honey"})) != [first]


@pytest.mark.parametrize("form", MAGIC)
def test_an_image_has_the_form_that_was_asked_for(client: httpx.Client, form: str) -> None:
    answer = client.post(IMAGES, json={**BEE, "output_format": form, "output_compression": 50})
    assert images(answer)[0].startswith(MAGIC[form])
    assert answer.json()["output_format"] == form


def test_an_image_has_the_size_that_was_asked_for_or_the_models_own(client: httpx.Client) -> None:
    assert size_of_png(images(client.post(IMAGES, json={**BEE, "size": "96x32"}))[0]) == (96, 32)
    own = client.post(IMAGES, json={**BEE, "size": "auto"})
    assert (size_of_png(images(own)[0]), own.json()["size"]) == ((64, 64), "64x64")


def test_the_plain_question_is_answered(client: httpx.Client) -> None:
    asked = {"prompt": BEE["prompt"], "width": 64, "height": 64, "num_inference_steps": 3, "seed": 5}
    told = client.post("/generate", json=asked).json()
    assert told["seeds"] == [5]
    assert [base64.b64decode(told["images"][0])] == images(client.post(IMAGES, json=BEE))


def events(client: httpx.Client, body: dict[str, Any]) -> tuple[httpx.Headers, list[tuple[str, str]]]:
    with client.stream("POST", IMAGES, json={**body, "stream": True}) as answer:
        blocks = "".join(answer.iter_text()).strip().split("\n\n")
    found = []
    for block in blocks:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("event", ""), lines["data"]))
    return answer.headers, found


def test_a_stream_tells_each_step_then_each_image(client: httpx.Client) -> None:
    headers, told = events(client, {**BEE, "n": 2})
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-hive-cost"] == "images=2; pixel_steps=24576"
    steps = ["image_generation.progress"] * 3
    assert [name for name, _ in told] == [
        *steps,
        "image_generation.completed",
        *steps,
        "image_generation.completed",
        "",
    ]
    assert told[-1][1] == "[DONE]"
    parsed = [json.loads(data) for name, data in told if name]
    assert [(row["image_index"], row["step"], row["steps"]) for row in parsed if row["type"].endswith("progress")] == [
        *((image, step, 3) for image in (0, 1) for step in (1, 2, 3))
    ]
    whole = images(client.post(IMAGES, json={**BEE, "n": 2}))
    assert [base64.b64decode(row["b64_json"]) for row in parsed if "b64_json" in row] == whole


# refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"size": "60x64"}, "multiples of 8, like 64x64"),
        ({"response_format": "url"}, "there is none to fetch"),
        ({"prompt": ""}, "prompt is missing"),
        ({"n": 11}, "from 1 to 10"),
        ({"image": "x"}, "image is not known"),
        ({"steps": 1000}, "takes no 64x64 in 1000 steps"),  # DDIM's timesteps begin at 1 (diffusers 0.42.1)
    ],
)
def test_what_it_cannot_make_is_refused_before_any_work(client: httpx.Client, more: dict[str, Any], why: str) -> None:
    before = metric(client, "steps_total")
    answer = client.post(IMAGES, json={**BEE, **more})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert metric(client, "steps_total") == before


def test_nothing_of_a_prompt_is_in_the_runners_log(runner: DiffusersRunner, client: httpx.Client) -> None:
    """diffusers warns with what a prompt has beyond the 77 tokens of CLIP, and an operator reads the log."""
    assert len(images(client.post(IMAGES, json=BEE | {"prompt": "a secretword and more " * 100}))) == 1
    assert "secretword" not in runner.log.read_text()


def test_a_pipeline_without_negative_prompts_says_so() -> None:
    with served(pipeline("flux")) as runner, runner.client() as client:
        answer = client.post(IMAGES, json={**BEE, "negative_prompt": "a wasp"})
        assert answer.status_code == 400
        assert "FluxPipeline takes none" in answer.json()["error"]["message"]


# ends -----------------------------------------------------------------------------------------------------------------


def asked(runner: DiffusersRunner, body: dict[str, Any]) -> socket.socket:
    """A request that was sent, whose answer nobody has read yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(60)
    connection.connect(str(runner.socket))
    data = json.dumps(body).encode()
    connection.sendall(
        b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (IMAGES.encode(), len(data), data)
    )
    return connection


@pytest.mark.parametrize("way", ["half-close", "close"])
def test_a_client_that_leaves_ends_the_work_within_a_step(
    runner: DiffusersRunner, client: httpx.Client, way: str
) -> None:
    """The next one waits for that step, and for no more: not one of the other steps is done."""
    before, made = metric(client, "steps_total"), metric(client, "images_total")
    connection = asked(runner, {**BEE, "steps": 900, "stream": True})
    came = b""
    while b'"step": 2,' not in came:
        came += (piece := connection.recv(65536))
        assert piece
    if way == "close":
        connection.close()
    else:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):  # what was under way; then the runner closes
            pass
        connection.close()
    assert images(client.post(IMAGES, json=BEE))
    assert metric(client, "steps_total") - before < 900
    assert metric(client, "images_total") - made == 1


def test_a_client_that_leaves_while_it_waits_is_never_worked_for(runner: DiffusersRunner, client: httpx.Client) -> None:
    made = metric(client, "images_total")
    first = asked(runner, {**BEE, "steps": 900, "stream": True})
    assert first.recv(65536).startswith(b"HTTP/1.1 200")
    second = asked(runner, {**BEE, "n": 10})
    while metric(client, "waiting") < 1:
        pass
    second.close()
    first.close()
    assert images(client.post(IMAGES, json=BEE))
    assert metric(client, "images_total") - made == 1


def test_calls_are_worked_on_one_at_a_time(runner: DiffusersRunner) -> None:
    found: list[list[bytes]] = []

    def ask() -> None:
        with runner.client() as client:
            found.append(images(client.post(IMAGES, json=BEE)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({one[0] for one in found}) == 1


def test_without_memory_it_says_so_and_ends_with_77() -> None:
    """Within a limit of the address space a small image is made, and what a large one takes is not there."""
    with served(pipeline("sd")) as runner:
        import resource

        status = Path(f"/proc/{runner.process.pid}/status").read_text()
        now = int(status.split("VmSize:")[1].split()[0]) * 1024
        resource.prlimit(runner.process.pid, resource.RLIMIT_AS, (now + (32 << 20), now + (32 << 20)))
        with runner.client() as client:
            answer = client.post(IMAGES, json={**BEE, "size": "1536x1536", "steps": 1})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
        assert runner.process.wait(60) == 77


# loading --------------------------------------------------------------------------------------------------------------


def broken(tmp_path: Path, change: dict[str, Any]) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(pipeline("sd"), copy)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | change))
    return copy


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"_class_name": "StableDiffusionImg2ImgPipeline"}, "makes no image of a text alone"),
        ({"unet": ["my_unet", "MyUnet"]}, "unet is a my_unet.MyUnet: neither diffusers nor transformers has it"),
    ],
)
def test_a_directory_that_is_no_pipeline_of_diffusers_ends_the_runner(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    with started(broken(tmp_path, change)) as runner:
        assert runner.process.wait(120) == 1
        assert why in runner.log.read_text()


def test_a_pipeline_that_two_accounts_do_not_hold_is_not_loaded() -> None:
    with started(pipeline("sd"), ("--device", "cpu=1", "--device", "cpu=0")) as runner:
        assert runner.process.wait(120) == 1
        assert "fits on no device" in runner.log.read_text()
