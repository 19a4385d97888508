"""Responses through a whole Hive: the real `openai` package, and the packages that speak it by default, before the demo
backend, a real llama-server and a real vLLM.

The others than `openai` need versions of packages that Hive's own tests have otherwise, so they have a place of their
own (journeys/clients.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.fakes.programs import demo_backend
from tests.fakes.shapes import standin
from tests.journeys.clients import node_client, python_client
from tests.journeys.matrix import turn_to
from tests.journeys.sdk import CITY, HELLO, TEMPLATE, Door, door_of, totals
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, serve

pytestmark = [pytest.mark.redis, pytest.mark.timeout(600)]
SAID: Any = HELLO[0]["content"]
TOOLS: Any = [{"type": "function", "name": "look_up", "description": "A city.", "parameters": CITY}]
LONG: Any = {"max_output_tokens": 400, "temperature": 0}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edits a file."}
CONFIG = "[inference]\nswitch_health_tries = 20\nswitch_health_every_s = 0.1\n"
SHAPES = Path(__file__).parents[1] / "fakes" / "codex"


class Backend(NamedTuple):
    """`is_random`: whether what it says has no sense, and no end but its limit; it calls no tool, or not to its end."""

    hive: Stack
    name: str
    url: str
    model: str
    is_random: bool = True


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with demo_backend() as demo:
        yield demo.url


@pytest.fixture(scope="module")
def hive(demo: str) -> Iterator[Stack]:
    """One for all kinds of backend: it is switched from one to the next."""
    with stack(url=demo, config=CONFIG) as hive:
        hive.create("alice", "idler.py", tier="high")
        yield hive


@pytest.fixture(
    scope="module",
    params=[
        *("demo", "llama-shapes", "vllm-shapes"),
        pytest.param("llama", marks=pytest.mark.llama),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def site(
    request: pytest.FixtureRequest, hive: Stack, demo: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    """A backend that runs, whichever is in use."""
    name: str = request.param
    if name == "demo":
        yield Backend(hive, name, demo, "hive-demo", is_random=False)
    elif "shapes" in name:
        with standin(name.partition("-")[0]) as shown:
            yield Backend(hive, name, shown.url, MODEL, is_random=False)
    elif name == "llama":
        with serve(tmp_path_factory.mktemp("llama-responses"), template=TEMPLATE) as server:
            yield Backend(hive, name, server.url, MODEL)
    else:
        yield Backend(hive, name, request.getfixturevalue("vllm_server").url, MODEL)


@pytest.fixture
def backend(site: Backend) -> Backend:
    turn_to(site.hive, site.url)
    return site


@pytest.fixture
def door(backend: Backend) -> Door:
    return door_of(backend.hive, "alice")


def test_an_answer_and_its_stream_are_the_same_and_counted(backend: Backend) -> None:
    agent = f"counted-{backend.name}"
    backend.hive.create(agent, "idler.py", tier="high")
    door = door_of(backend.hive, agent)
    wanted: Any = {"model": backend.model, "input": SAID, "instructions": "Be short.", "max_output_tokens": 16}
    with door.openai() as client:
        whole = client.responses.create(**wanted, temperature=0)
        assert (whole.status, whole.model) in (("completed", backend.model), ("incomplete", backend.model))
        assert whole.usage is not None
        assert whole.output_text
        with client.responses.stream(**wanted, temperature=0) as stream:
            events = list(stream)
        assert events[-1].type in ("response.completed", "response.incomplete")
        final = events[-1].response
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", f"response.{final.status}")
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert deltas == final.output_text == whole.output_text
        assert final.usage is not None
        assert (final.usage.input_tokens, final.usage.output_tokens) == (
            whole.usage.input_tokens,
            whole.usage.output_tokens,
        )
    counted = (2 * whole.usage.input_tokens, 2 * whole.usage.output_tokens)
    until(lambda: totals(backend.hive, agent) == counted, within_s=20, what="both are counted")
    assert counted[0] > 0
    assert counted[1] > 0


LOOK: Any = {"role": "user", "content": "Please look up Paris."}
LOOKED: Any = [
    {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"city":"Paris"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "The capital of France."},
]


def test_a_tool_is_offered_and_its_answer_taken(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        wanted: Any = {"model": backend.model, "tools": TOOLS, "max_output_tokens": 16}
        assert client.responses.create(input=[LOOK], **wanted).output
        assert client.responses.create(input=[LOOK, *LOOKED], **wanted).output_text


@pytest.mark.parametrize("kind", ["demo", "llama", "vllm", "ollama"])
def test_a_tool_is_called_and_thoughts_are_told(hive: Stack, demo: str, kind: str) -> None:
    """Random models call nothing: stand-ins write a call as the servers do, and the demo backend makes its own."""
    with contextlib.ExitStack() as opened:
        url = demo if kind == "demo" else opened.enter_context(standin(kind, "tools", "thinking")).url
        turn_to(hive, url)
        client = opened.enter_context(door_of(hive, "alice").openai())
        wanted: Any = {"model": "hive-demo" if kind == "demo" else MODEL, "tools": TOOLS, "parallel_tool_calls": False}
        called = client.responses.create(input=[LOOK], **wanted)
        call = _only_call(called)
        assert json.loads(call.arguments) == {"city": "Paris"}
        with client.responses.stream(input=[LOOK], **wanted) as stream:
            written = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
            streamed = _only_call(stream.get_final_response())
        assert (json.loads(written), written) == ({"city": "Paris"}, streamed.arguments)
        items: Any = [LOOK, *(item.to_dict() for item in called.output)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "The capital of France."})
        after = client.responses.create(input=items, **wanted)
        assert after.output_text
        if kind == "ollama":
            [thought] = [item for item in after.output if item.type == "reasoning"]
            assert thought.content
            assert thought.content[0].text == "Let me see."


def _only_call(response: Response) -> ResponseFunctionToolCall:
    [call] = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    assert call.name == "look_up"
    return call


def test_a_custom_tool_is_called_with_a_text(backend: Backend, door: Door) -> None:
    given: Any = [
        {"role": "user", "content": "Please patch it."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    with door.openai() as client:
        wanted: Any = {"model": backend.model, "max_output_tokens": 16}
        assert client.responses.create(input=given, tools=[PATCH], **wanted).output
        held: Any = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{1,9}|d+"}}
        assert client.responses.create(input=given, tools=[held], **wanted).output
        if backend.model == "hive-demo":  # the others call nothing, or one tool alone
            by_name: Any = {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "patch"}}
            answer = client.responses.create(model=backend.model, input="Please patch it.", **by_name)
            [call] = [item for item in answer.output if item.type == "custom_tool_call"]
            assert call.name == "patch"
            assert call.input
            assert "input" not in call.input


class City(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


def test_an_answer_is_held_to_a_schema(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        wanted: Any = {"model": backend.model, "input": "Which city?", **LONG}
        parsed = client.responses.parse(**wanted, text_format=City)
        assert parsed.output_parsed is not None
        assert parsed.output_parsed.city in ("Paris", "Rome")


def test_a_conversation_is_stored_nowhere_and_that_is_said(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        answer = client.responses.create(model=backend.model, input=SAID, max_output_tokens=4)
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="responses_kept_mb"):
            client.responses.create(model=backend.model, input="And?", previous_response_id=answer.id)
        with pytest.raises(openai.InternalServerError, match="nothing leaves this box") as refused:
            client.responses.create(model=backend.model, input=SAID, tools=[{"type": "web_search"}])
        assert refused.value.status_code == 501


@pytest.mark.parametrize("name", sorted(path.name for path in SHAPES.glob("*.json")))
def test_what_codex_sends_is_answered(backend: Backend, door: Door, name: str) -> None:
    """Bodies of the shape its public source has."""
    body = {**json.loads((SHAPES / name).read_bytes()), "model": backend.model, "max_output_tokens": 16}
    got = door.post("/v1/responses", body)
    assert got.status_code == 200, got.text
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    kinds = [line.removeprefix("event: ") for line in got.text.split("\n") if line.startswith("event: ")]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    last = json.loads(got.text.strip().rpartition("data: ")[2])["response"]
    assert last["id"]
    assert {"input_tokens", "output_tokens", "total_tokens"} <= last["usage"].keys()
    assert "tools[web_search]" in got.headers["x-hive-dropped"]


PYTHON_CLIENTS = ["openai-agents", "pydantic-ai"]
NODE_CLIENTS = ["openai", "@ai-sdk/openai"]


@pytest.mark.wide
@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", PYTHON_CLIENTS + NODE_CLIENTS)
def test_a_client_that_speaks_it_by_default_runs_its_loop(backend: Backend, door: Door, name: str) -> None:
    """An answer, a stream, an answer by a schema, and a loop with a tool, each as the package's own README shows it."""
    run = python_client if name in PYTHON_CLIENTS else node_client
    told = run(name, f"{door.root}/v1", door.token, backend.model, is_random=backend.is_random)
    assert told["streamed"]
    assert told["city"] in ("Paris", "Rome")
    if not (backend.is_random and name == "openai-agents"):  # it takes an answer that met its limit for none
        assert told["answer"]
    if not backend.is_random:
        assert told["called"] == ["Paris"]
        assert told["after"]
