"""The stand-ins of Ollama say what Ollama 0.32.15 said over a socket, where they once said something more convenient.

Rows of docs/clients.md rested on what no Ollama does: a tool forced by its name was called.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.fakes.programs import fake_backend, started
from tests.fakes.shapes import CALL, THOUGHTS, WORDS, standin

HELLO: Any = [{"role": "user", "content": "Hello, how are you today?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
FORCED: Any = {"type": "function", "function": {"name": "look_up"}}
STORE = Path(__file__).with_name("fake_ollama.py")


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json={"model": "tiny", **body}, trust_env=False)


def events(answer: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def deltas(answer: httpx.Response) -> list[Any]:
    return [event["choices"][0]["delta"] for event in events(answer) if event["choices"]]


@contextmanager
def store(*models: str) -> Iterator[str]:
    with started([sys.executable, str(STORE), *models], stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        yield "http://" + json.loads(process.stdout.readline())["address"]


def test_a_call_is_one_delta_with_an_index_also_in_whole_answers() -> None:
    function = {"name": CALL[0], "arguments": '{"city":"Paris"}'}
    call = {"id": "call_x1", "index": 0, "type": "function", "function": function}
    with standin("ollama", "tools") as server:
        asked = {"messages": HELLO, "tools": TOOLS}
        stream = post(server.url, "/v1/chat/completions", **asked, stream=True)
        whole = post(server.url, "/v1/chat/completions", **asked).json()
    assert deltas(stream) == [{"role": "assistant", "content": "", "tool_calls": [call]}, {}]
    assert events(stream)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"]["tool_calls"] == [call]


def test_nothing_is_forced() -> None:
    """`tool_choice`, and Anthropic's JSON by a schema, do nothing."""
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    with standin("ollama", "tools", calls=False) as server:
        forced = post(server.url, "/v1/chat/completions", messages=HELLO, tools=TOOLS, tool_choice=FORCED).json()
        by_schema = post(server.url, "/v1/messages", messages=HELLO, max_tokens=9, output_config={"format": schema})
        by_format = post(server.url, "/api/chat", messages=HELLO, format={"type": "object"}, stream=False).json()
    assert forced["choices"][0]["message"] == {"role": "assistant", "content": "".join(WORDS)}
    assert by_schema.json()["content"] == [{"type": "text", "text": "".join(WORDS)}]
    assert by_format["message"]["content"] == '{"city":"Paris"}'


@pytest.mark.parametrize(
    ("path", "off", "said"),
    [
        ("/api/chat", {"think": False}, lambda told: told["message"].get("thinking")),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "none"},
            lambda told: told["choices"][0]["message"].get("reasoning"),
        ),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, lambda told: told["content"][0].get("thinking")),
    ],
)
def test_a_model_that_can_thinks_unless_it_is_told_not_to(path: str, off: dict[str, Any], said: Any) -> None:
    with standin("ollama", "thinking") as server:
        asked = {"messages": HELLO, "max_tokens": 99, "stream": False}
        assert said(post(server.url, path, **asked).json()) == "".join(THOUGHTS)
        assert said(post(server.url, path, **asked, **off).json()) is None


@contextmanager
def either(*capabilities: str) -> Iterator[list[str]]:
    with (
        standin("ollama", *capabilities) as server,
        fake_backend("ollama", "--capabilities", ",".join(("completion", *capabilities))) as fake,
    ):
        yield [server.url, fake.url]


def test_what_a_model_cannot_is_400_in_ollamas_words() -> None:
    no_tools, no_thoughts = (
        "registry.ollama.ai/library/tiny:latest does not support tools",
        '"tiny" does not support thinking',
    )
    picture = [{"role": "user", "content": "", "images": ["aGk="]}]
    with either() as urls:
        for url in urls:
            tools = post(url, "/api/chat", messages=HELLO, tools=TOOLS)
            thinks = post(url, "/api/chat", messages=HELLO, think=True)
            effort = post(url, "/v1/chat/completions", messages=HELLO, reasoning_effort="high")
            blind = post(url, "/api/chat", messages=picture)
            assert [each.status_code for each in (tools, thinks, effort, blind)] == [400] * 4
            assert (tools.json()["error"], thinks.json()["error"]) == (no_tools, no_thoughts)
            assert effort.json()["error"]["message"] == no_thoughts
            assert "image input" in json.loads(blind.json()["error"])["error"]["message"]


def test_the_role_is_told_once_and_the_fingerprint_always() -> None:
    with either() as urls:
        for url in urls:
            stream = post(url, "/v1/chat/completions", messages=HELLO, stream=True)
            assert ["role" in delta for delta in deltas(stream)] == [True] + [False] * (len(deltas(stream)) - 1)
            assert {event["system_fingerprint"] for event in events(stream)} == {"fp_ollama"}
            assert "logprobs" not in stream.text + post(url, "/v1/chat/completions", messages=HELLO).text


def test_a_dead_runner_ends_openais_stream_as_if_nothing_were_wrong() -> None:
    with fake_backend("ollama", "--error-mid-stream", "2") as fake:
        own = post(fake.url, "/api/chat", messages=HELLO).text.splitlines()
        stream = post(fake.url, "/v1/chat/completions", messages=HELLO, stream=True)
    died = "an error was encountered while running the model: unexpected EOF"
    assert json.loads(own[-1]) == {"error": died}
    assert (events(stream)[-1]["model"], deltas(stream)[-1]["content"]) == ("", "")
    assert "DONE" not in stream.text


def test_anthropics_dialect_lacks_what_is_empty() -> None:
    with standin("ollama", "thinking") as server:
        whole = post(server.url, "/v1/messages", messages=HELLO, max_tokens=9, stop_sequences=["there"])
        stream = post(server.url, "/v1/messages", messages=HELLO, max_tokens=9, stream=True)
    assert whole.json()["stop_reason"] == "end_turn"
    for word in ("stop_sequence", "signature"):
        assert word not in whole.text + stream.text
    begun, end = events_of_anthropic(stream, "message_start"), events_of_anthropic(stream, "message_delta")
    assert begun["message"]["usage"]["input_tokens"] < end["usage"]["input_tokens"], "an estimate"


def events_of_anthropic(answer: httpx.Response, kind: str) -> Any:
    found = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return next(event for event in found if event["type"] == kind)


def test_with_tools_offered_text_comes_with_the_end() -> None:
    with standin("ollama", "tools", calls=False) as server, fake_backend("ollama") as fake:
        for url in (server.url, fake.url):
            lines = post(url, "/api/chat", messages=HELLO, tools=TOOLS, stream=True).text.splitlines()
            assert len(lines) == 1
            assert json.loads(lines[0])["message"]["content"]


def test_lists_tell_details_and_capabilities() -> None:
    with standin("ollama", "tools") as server, fake_backend("ollama") as fake, store("tiny", "--stub", "far") as url:
        for each in (server.url, fake.url, url):
            row, *stubs = sorted(httpx.get(f"{each}/api/tags").json()["models"], key=lambda row: "remote_host" in row)
            assert (row["details"]["context_length"], row["details"]["embedding_length"]) == (4096, 64)
            assert row["capabilities"] == ["completion", "tools"]
        assert (stubs[0]["size"], stubs[0]["remote_model"]) == (196, "gpt-oss:120b")
        assert (stubs[0]["details"]["format"], stubs[0]["details"]["families"]) == ("", None)
        post(url, "/api/generate")
        for each in (server.url, fake.url, url):
            (loaded,) = httpx.get(f"{each}/api/ps").json()["models"]
            assert (loaded["size_vram"], loaded["context_length"] < 4096) == (0, True)
            assert loaded["size"]
            assert loaded["expires_at"]
    with fake_backend("ollama", "--models", "") as fake, store() as url:
        for each in (fake.url, url):
            assert httpx.get(f"{each}/api/tags").json() == {"models": []}
            assert httpx.get(f"{each}/v1/models").json() == {"object": "list", "data": None}


def test_an_unknown_model_is_told_as_each_path_does() -> None:
    with standin("ollama") as server, fake_backend("ollama") as fake, store("tiny") as url:
        for each in (server.url, fake.url, url):
            for path, said in (
                ("/api/chat", "model 'nope' not found"),
                ("/api/generate", "model 'nope' not found"),
                ("/api/show", "model 'nope:latest' not found"),
                ("/api/embed", 'model "nope" not found, try pulling it first'),
            ):
                answer = post(each, path, model="nope", prompt="x", messages=HELLO, input="x")
                assert (answer.status_code, answer.json()) == (404, {"error": said})


def test_what_cannot_be_read_or_run_is_500() -> None:
    with standin("ollama") as server, fake_backend("ollama") as fake, store("tiny") as url:
        for each in (server.url, fake.url, url):
            assert post(each, "/api/chat", messages=HELLO, options={"temperature": "hot"}).status_code == 500
            assert post(each, "/api/chat", messages=HELLO, format="xml").status_code == 500
            assert post(each, "/api/chat", messages=HELLO, format="json", options={"temperature": 0}).status_code == 200
    with fake_backend("ollama", "--broken") as fake:
        answer = post(fake.url, "/api/chat", messages=HELLO)
        assert answer.status_code == 500
        assert answer.json()["error"].startswith("llama-server process has terminated: exit status 1: ")


def test_another_host_is_403_and_empty() -> None:
    with standin("ollama") as server, fake_backend("ollama") as fake, store("tiny") as url:
        for each in (server.url, fake.url, url):
            for host, status in (("ollama.example", 403), ("localhost", 200), ("box.local:11434", 200)):
                answer = httpx.get(f"{each}/api/version", headers={"Host": host}, trust_env=False)
                assert answer.status_code == status
                assert bool(answer.content) == (status == 200)


def test_no_limit_is_none_and_another_name_for_it_is_passed_over() -> None:
    with fake_backend("ollama", "--tokens", "9") as fake:
        for options, tokens in (({"num_predict": 0}, 9), ({"num_predict": -1}, 9), ({"num_predict": 3}, 3)):
            told = post(fake.url, "/api/chat", messages=HELLO, options=options, stream=False).json()
            assert told["eval_count"] == tokens
        told = post(fake.url, "/v1/chat/completions", messages=HELLO, max_completion_tokens=3).json()
        assert told["usage"]["completion_tokens"] == 9


def test_a_pull_says_what_ollamas_does() -> None:
    with store() as url:
        said = [json.loads(line) for line in post(url, "/api/pull", model="new").text.splitlines()]
    assert said[0] == {"status": "pulling manifest"}
    layer = said[1]
    assert layer["status"] == f"pulling {layer['digest'].removeprefix('sha256:')[:12]}"
    assert said[2].keys() == {"status", "digest", "total", "completed"}
    assert [line["status"] for line in said[-3:]] == ["verifying sha256 digest", "writing manifest", "success"]


def test_the_packages_take_all_of_it() -> None:
    with standin("ollama", "tools", "thinking") as server:
        own = ollama.Client(server.url)
        stream = list(own.chat("tiny", HELLO, tools=TOOLS, stream=True))
        assert [call.function.name for part in stream for call in part.message.tool_calls or []] == [CALL[0]]
        own._client.close()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            said = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
            assert [call.id for call in said.choices[0].message.tool_calls or []] == ["call_x1"]
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as anthropics:
            with anthropics.messages.stream(model="tiny", messages=HELLO, max_tokens=99) as events_:
                message = events_.get_final_message()
            assert [block.type for block in message.content] == ["thinking", "text"]
            assert message.stop_reason == "end_turn"
