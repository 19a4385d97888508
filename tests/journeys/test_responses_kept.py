"""Conversations that Hive keeps: the real `openai` package through a whole Hive, before the demo backend and a real
llama-server, with kills and restarts in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.journeys.clients import node_client
from tests.journeys.sdk import TEMPLATE, Door, door_of
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, serve

pytestmark = [pytest.mark.redis, pytest.mark.timeout(600)]
SECRET = "the-word-nobody-else-says"


class Backend(NamedTuple):
    hive: Stack
    model: str


@pytest.fixture(scope="module", params=["demo", pytest.param("llama", marks=pytest.mark.llama)])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    if request.param == "demo":
        with stack() as hive:
            yield _ready(Backend(hive, "hive-demo"))
    else:
        with serve(tmp_path_factory.mktemp("llama-kept"), template=TEMPLATE) as server, stack(url=server.url) as hive:
            yield _ready(Backend(hive, MODEL))


def _ready(backend: Backend) -> Backend:
    for name in ("alice", "bob"):
        backend.hive.create(name, "idler.py", tier="high")
    return backend


@pytest.fixture(autouse=True)
def _keeping(backend: Backend) -> None:
    _set(backend.hive, 4)


def _set(hive: Stack, mb: int) -> None:
    """Returns when the proxy has heard of it."""
    hive.put_config({"proxy.responses_kept_mb": mb})
    door = door_of(hive, "alice")

    def is_on() -> bool:
        head = {"authorization": f"Bearer {door.token}"}
        told = httpx.get(f"{door.root}/v1/responses/resp_none", headers=head, trust_env=False).text
        return "proxy.responses_kept_mb" not in told

    until(lambda: is_on() is bool(mb), within_s=20, what="the proxy has heard")


@pytest.fixture
def door(backend: Backend) -> Door:
    return door_of(backend.hive, "alice")


def _asks(client: openai.OpenAI, backend: Backend, text: str, **more: Any) -> Any:
    return client.responses.create(model=backend.model, input=text, max_output_tokens=12, temperature=0, **more)


@pytest.mark.wide
def test_three_turns_are_one_conversation(backend: Backend, door: Door) -> None:
    """The model is given the same as where the client sends everything itself."""
    with door.openai() as client:
        first = _asks(client, backend, "Hello, who are you?", store=True)
        second = _asks(client, backend, "And where are you?", previous_response_id=first.id)
        with client.responses.stream(
            model=backend.model, input="And why?", previous_response_id=second.id, max_output_tokens=12
        ) as stream:
            third: Any = list(stream)[-1]
        third = third.response
        assert [one.store for one in (first, second, third)] == [True] * 3
        assert [one.previous_response_id for one in (first, second, third)] == [None, first.id, second.id]
        said: list[Any] = [{"role": "user", "content": "Hello, who are you?"}]
        said += [item.to_dict() for item in first.output]
        said += [{"role": "user", "content": "And where are you?"}]
        said += [item.to_dict() for item in second.output]
        said += [{"role": "user", "content": "And why?"}]
        whole = client.responses.create(model=backend.model, input=said, max_output_tokens=12, store=False)
        assert whole.store is False  # type: ignore[attr-defined]
        assert whole.usage is not None
        assert third.usage is not None
        assert third.usage.input_tokens == whole.usage.input_tokens
        fourth = _asks(client, backend, "Go on.", previous_response_id=third.id)
        assert fourth.usage.input_tokens > third.usage.input_tokens
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)


def test_what_is_kept_is_read_listed_and_deleted(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        first = _asks(client, backend, "Hello", metadata={"a": "b"})
        second = _asks(client, backend, "And?", previous_response_id=first.id)
        assert client.responses.retrieve(first.id) == first
        items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
        assert [getattr(item, "role", item.type) for item in items][:1] == ["user"]
        assert [item.content[0].text for item in (items[0], items[-1])] == ["Hello", "And?"]  # type: ignore[union-attr,index]
        assert {item.id for item in first.output} <= {item.id for item in items}
        newest = client.responses.input_items.list(second.id)
        assert [item.id for item in newest.data] == [item.id for item in reversed(items)]
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            client.responses.cancel(first.id)
        client.responses.delete(first.id)
        for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not found"):
                gone(first.id)
        assert client.responses.retrieve(second.id).id == second.id
        with pytest.raises(openai.BadRequestError, match="Previous response with id") as caught:
            _asks(client, backend, "And?", previous_response_id=second.id)
        assert caught.value.code == "previous_response_not_found"


def test_another_agent_finds_nothing(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        hers = _asks(client, backend, "Hello")
    with door_of(backend.hive, "bob").openai() as client:
        for asked in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not found"):
                asked(hers.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(hers.id)
        with pytest.raises(openai.BadRequestError, match="Previous response with id"):
            _asks(client, backend, "And?", previous_response_id=hers.id)
        reference: Any = [{"type": "item_reference", "id": hers.output[0].id}]
        with pytest.raises(openai.NotFoundError, match="Item with id"):
            client.responses.create(model=backend.model, input=reference)


def test_items_that_were_seen_may_be_named(backend: Backend, door: Door) -> None:
    """As @ai-sdk/openai does it, unasked, from the second turn on."""
    with door.openai() as client:
        first = _asks(client, backend, "Hello")
        named: list[Any] = [{"role": "user", "content": "Hello"}]
        named += [{"type": "item_reference", "id": item.id} for item in first.output]
        named += [{"role": "user", "content": "And?"}]
        second = client.responses.create(model=backend.model, input=named, max_output_tokens=12)
        sent: list[Any] = [named[0], *(item.to_dict() for item in first.output), named[-1]]
        whole = client.responses.create(model=backend.model, input=sent, max_output_tokens=12)
        assert second.usage is not None
        assert whole.usage is not None
        assert second.usage.input_tokens == whole.usage.input_tokens
        third = _asks(client, backend, "Go on.", previous_response_id=second.id)
        assert third.usage.input_tokens > second.usage.input_tokens


def test_a_client_that_names_what_it_believes_stored_works_unmodified(backend: Backend, door: Door) -> None:
    """@ai-sdk/openai does, wherever it is not told otherwise."""
    is_random = backend.model == MODEL
    told = node_client(
        "@ai-sdk/openai", f"{door.root}/v1", door.token, backend.model, is_random=is_random, which="_kept"
    )
    assert told["named"] == 3
    assert [bool(told[turn]) for turn in ("first", "second", "third")] == [True] * 3
    assert is_random or told["after"]


def test_a_tools_answer_goes_on_from_its_call(backend: Backend, door: Door) -> None:
    """The way in which every agent loop that keeps nothing itself calls tools."""
    tools: Any = [{"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}]
    with door.openai() as client:
        given: Any = {"model": backend.model, "tools": tools, "max_output_tokens": 60}
        called = client.responses.create(input="Look it up.", tool_choice="required", **given)
        call = next((item for item in called.output if item.type == "function_call"), None)
        if backend.model != "hive-demo":
            return  # a random model calls nothing
        assert call is not None
        answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        last = client.responses.create(input=answer, previous_response_id=called.id, **given)
        assert last.output_text


def test_a_killed_daemon_and_proxy_lose_nothing_that_was_read(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        first = _asks(client, backend, "Hello")
        client.responses.retrieve(first.id)
        for name in ("daemon", "proxy"):
            backend.hive.restart(name)
        with door_of(backend.hive, "alice").openai() as again:
            patient = again.with_options(max_retries=8)
            assert patient.responses.retrieve(first.id) == first
            second = _asks(patient, backend, "And?", previous_response_id=first.id)
            assert second.previous_response_id == first.id


def test_what_a_killed_daemon_had_not_written_is_not_found(backend: Backend, door: Door) -> None:
    """It was told and not read: the answer is the client's all the same, and the next turn says what is so."""
    hive = backend.hive
    with door.openai() as client:
        os.kill(hive.pid_of("daemon"), signal.SIGSTOP)
        first = _asks(client, backend, "Hello")
        assert first.output
        hive.restart("daemon")
        with pytest.raises(openai.BadRequestError, match="Previous response with id"):
            _asks(client.with_options(max_retries=8), backend, "And?", previous_response_id=first.id)


def test_while_the_daemon_is_away_only_who_names_something_stored_hears_of_it(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        first = _asks(client, backend, "Hello")
        client.responses.retrieve(first.id)
        pid = backend.hive.pid_of("daemon")
        os.kill(pid, signal.SIGSTOP)  # it is there, and answers nobody: nothing it is told is lost
        try:
            second = _asks(client, backend, "On my own.")
            assert second.output
            with pytest.raises(openai.InternalServerError, match="what is kept of responses"):
                client.with_options(max_retries=0, timeout=60).responses.retrieve(first.id)
        finally:
            os.kill(pid, signal.SIGCONT)
        patient = client.with_options(max_retries=8)
        assert patient.responses.retrieve(second.id) == second


def test_off_is_said_in_words_and_deletes(backend: Backend, door: Door) -> None:
    path = backend.hive.state / "responses.db"
    with door.openai() as client:
        kept = _asks(client, backend, SECRET)
        client.responses.retrieve(kept.id)
        assert SECRET.encode() in _on_disk(path)
        _set(backend.hive, 0)
        until(lambda: SECRET.encode() not in _on_disk(path), within_s=20, what="it is deleted")
        answer = _asks(client, backend, "Hello")
        assert answer.store is False
        for asked in (True, False):
            assert _asks(client, backend, "Hello", store=asked).store is False
        with pytest.raises(openai.BadRequestError, match=r"proxy\.responses_kept_mb"):
            _asks(client, backend, "And?", previous_response_id=kept.id)
        with pytest.raises(openai.NotFoundError, match=r"proxy\.responses_kept_mb"):
            client.responses.retrieve(kept.id)


def test_the_oldest_go_where_there_is_no_room(backend: Backend, door: Door) -> None:
    if backend.model == MODEL:
        pytest.skip("its context is shorter than what fills a megabyte")
    _set(backend.hive, 1)
    with door.openai() as client:
        first = _asks(client, backend, "Hello")
        client.responses.retrieve(first.id)
        long = "x " * 150_000
        later = [_asks(client, backend, long) for _ in range(4)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        assert client.responses.retrieve(later[-1].id).id == later[-1].id
        with pytest.raises(openai.BadRequestError, match="Previous response with id"):
            _asks(client, backend, "And?", previous_response_id=first.id)


def test_a_removed_agents_responses_are_nowhere(backend: Backend) -> None:
    hive, path = backend.hive, backend.hive.state / "responses.db"
    hive.create("carl", "idler.py", tier="high")
    with door_of(hive, "carl").openai() as client:
        kept = _asks(client, backend, SECRET)
        client.responses.retrieve(kept.id)
    assert SECRET.encode() in _on_disk(path)
    assert hive.get("/api/agents/carl/responses")["responses"] == 1
    hive.client().delete("/api/agents/carl")
    assert SECRET.encode() not in _on_disk(path)


@pytest.mark.wide
def test_paths_under_a_token_are_the_same(backend: Backend, door: Door) -> None:
    with door.openai() as client:
        kept = _asks(client, backend, "Hello")
    found = httpx.get(f"{door.root}/a/{door.token}/v1/responses/{kept.id}", trust_env=False)
    assert (found.status_code, found.json()["id"]) == (200, kept.id)


def _on_disk(path: Path) -> bytes:
    files = [path, path.with_name("responses.db-wal")]
    return b"".join(file.read_bytes() for file in files if file.exists())
