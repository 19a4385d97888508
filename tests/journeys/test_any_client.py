"""One conversation through every client package before every kind of backend: what is said is the same.

journeys/matrix.py says how; docs/clients.md is the matrix that was seen, and `HIVE_WRITE_CLIENTS=1 pytest` on this file
writes it anew. No registry has an Ollama, so tests/fakes/shapes.py replays its shapes as they were seen of 0.32.15, and
what a tiny random model does not say by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import ollama
import pytest

from tests.fakes.programs import demo_backend
from tests.fakes.shapes import standin
from tests.journeys.conversation import ByOllama, ByOpenai, Heard
from tests.journeys.matrix import (
    ALLOWED,
    DOCUMENT,
    MAIN,
    REPLAYED,
    STREAMED,
    THINKING,
    Backend,
    Matrix,
    Varies,
    may_differ,
    section_of,
    table,
    turn_to,
    unexplained,
    with_section,
)
from tests.journeys.sdk import TEMPLATE
from tests.journeys.stack import Stack, stack
from tests.llama import MODEL, serve

pytestmark = pytest.mark.redis
MAKE_EYES = Path(__file__).parents[1] / "tools" / "make_tiny_mmproj.py"
THINKS = """{%- for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['reasoning_content'] %}<think>
{{ m['reasoning_content'] }}
</think>
{% endif %}{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
"""The model's answer begins inside of its thoughts, which a random model never ends."""
CONFIG = "[inference]\nswitch_health_tries = 20\nswitch_health_every_s = 0.1\n[tenant other]\n"
KINDS = {
    "llama-server": [pytest.mark.llama],
    "vLLM": [pytest.mark.vllm, pytest.mark.timeout(600)],
    "Ollama's shapes": [],
    "the demo backend": [],
}
COUNTS_NOT = "the server counts none: it is Hive's estimate, and says so"
SCHEMA_LOST = "501: {} would pass over `output_config` in its own `/v1/messages`"
IS_TRANSLATED = "; what Hive translates has it"
OWN_MESSAGES = "llama-server 0c1e570 passes over `{}` in its own `/v1/messages`; what Hive translates has it"
NO_OBJECT = Varies(
    "the random model calls with `true`, which vLLM 0.32 permits without `strict`: no object, as Anthropic's dialect "
    "wants one. vLLM refuses its own answer, Hive the model's; in a stream the package finds it"
)
NO_EMBEDDINGS = "a vLLM that generates says `Not Found`; Hive says what its model makes, and what an operator can start"
GAPS: dict[str, dict[tuple[str, str], str]] = {
    "llama-server": {
        ("JSON by a schema", "anthropic, relayed"): SCHEMA_LOST.format("llama-server 0c1e570") + IS_TRANSLATED,
        ("JSON by a schema, streamed", "anthropic, relayed"): SCHEMA_LOST.format("llama-server 0c1e570")
        + IS_TRANSLATED,
        ("thinking switched off", "anthropic, relayed"): OWN_MESSAGES.format('thinking: {"type": "disabled"}'),
    },
    "vLLM": {
        **{
            ("a tool forced by its name" + streamed, f"anthropic, {way}"): NO_OBJECT
            for streamed in ("", STREAMED)
            for way in ("relayed", "translated")
        },
        ("embeddings", "openai, relayed"): NO_EMBEDDINGS,
        ("embeddings", "ollama, translated"): NO_EMBEDDINGS,
    },
    "Ollama's shapes": {
        ("JSON by a schema", "anthropic, relayed"): SCHEMA_LOST.format("Ollama 0.32"),
        ("JSON by a schema, streamed", "anthropic, relayed"): SCHEMA_LOST.format("Ollama 0.32"),
        ("tokens counted beforehand", "anthropic, relayed"): COUNTS_NOT,
    },
    "the demo backend": {("tokens counted beforehand", "anthropic, translated"): COUNTS_NOT},
}
"""Differences that are known, with their reasons."""
REPLAYED_BY = "replayed by a stand-in: a random model {}"
PASSED_OVER = "the demo backend passes over it and says its canned text"
NOTES: dict[str, dict[str, str]] = {
    "llama-server": {
        "a tool called": REPLAYED_BY.format("calls no tool"),
        "a tool forced by its name": "its grammar lets text stand before the call, so a random model says text only",
        "a picture": "4 tokens of an encoder as random as the model (`--mmproj`)",
        "thinking": "another llama-server, whose template begins with the thoughts",
        "thinking switched off": "another llama-server, whose template begins with the thoughts",
    },
    "vLLM": {
        "a tool called": REPLAYED_BY.format("calls no tool by itself"),
        "thinking": REPLAYED_BY.format("has no thoughts that vLLM would tell apart"),
        "thinking switched off": REPLAYED_BY.format("has no thoughts that vLLM would tell apart"),
        "a picture": "the tiny model sees none: the server's own refusal",
    },
    "Ollama's shapes": {
        "a prompt that is too long": "Ollama cuts it; the stand-in takes it",
        "a tool forced by its name": "no more than a tool offered: Ollama 0.32 passes over `tool_choice`, nothing is "
        "forced, and the model says text; Hive tells it in `X-Hive-Ignored`",
        "a tool offered": "what might become a call is held back: the text comes in one piece, at the end",
        "thinking": "a model that can thinks unless it is told not to",
        "a tool called": "a stand-in whose model calls what it is offered",
    },
    "the demo backend": dict.fromkeys(
        ("a stop sequence", "a picture", "thinking", "a prompt that is too long"),
        PASSED_OVER,
    ),
}
"""Facts to be known of a row."""


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with demo_backend() as demo:
        yield demo.url


@pytest.fixture(scope="module")
def hive(demo: str) -> Iterator[Stack]:
    """One for all kinds of backend: it is switched from one to the next."""
    with stack(url=demo, config=CONFIG) as hive:
        hive.post("/api/agents", {"name": "alice", "runtime": "external", "tier": "high"})
        yield hive


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=marks) for kind, marks in KINDS.items()])
def backend(
    request: pytest.FixtureRequest, hive: Stack, demo: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    with ExitStack() as opened:
        if request.param == "the demo backend":
            ways = ("relayed", "relayed", "translated")
            yield Backend(request.param, hive, {MAIN: demo}, ByOllama, "hive-demo", ways=ways)
        elif request.param == "Ollama's shapes":
            ways = ("relayed", "relayed", "relayed")
            sites = {MAIN: opened.enter_context(standin("ollama", "tools", "vision", calls=False)).url}
            sites[THINKING] = opened.enter_context(standin("ollama", "tools", "thinking")).url
            sites[REPLAYED] = opened.enter_context(standin("ollama", "tools")).url
            yield Backend(request.param, hive, sites, ByOllama, MODEL, ways=ways)
        elif request.param == "vLLM":
            url: str = request.getfixturevalue("vllm_server").url
            replayed = _standin("vllm", opened)
            sites = {MAIN: url, THINKING: replayed, REPLAYED: replayed}
            yield Backend(request.param, hive, sites, ByOpenai, MODEL, idle=_idle(url), apart=True)
        else:
            plain, thinks = (tmp_path_factory.mktemp(name) for name in ("plain", "thinks"))
            eyes = plain / "eyes.gguf"
            subprocess.run([sys.executable, str(MAKE_EYES), str(eyes)], check=True, stdout=subprocess.DEVNULL)
            more = ["--embeddings", "--pooling", "mean", "--mmproj", str(eyes)]
            url = opened.enter_context(serve(plain, template=TEMPLATE, more=more)).url
            sites = {MAIN: url, THINKING: opened.enter_context(serve(thinks, template=THINKS)).url}
            sites[REPLAYED] = _standin("llama", opened)
            yield Backend(request.param, hive, sites, ByOpenai, MODEL, idle=_idle(url), apart=True)


def _standin(kind: str, opened: ExitStack) -> str:
    return opened.enter_context(standin(kind)).url


def _idle(url: str) -> Callable[[], bool]:
    """A question to that server itself: whether it works on nothing."""
    running = ("llamacpp:requests_processing", "vllm:num_requests_running")

    def idle() -> bool:
        lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(running)] == [0.0]

    return idle


def documented(name: str, seen: str) -> str:
    """The text of docs/clients.md in this section, after writing it where that was asked for."""
    text = DOCUMENT.read_text()
    if os.environ.get("HIVE_WRITE_CLIENTS"):
        DOCUMENT.write_text(text := with_section(text, name, seen))
    return section_of(text, name)


def test_the_document_says_what_may_differ() -> None:
    assert set(ALLOWED) - {"ids, times and durations"} <= set(Heard._fields)
    assert documented("what may differ", may_differ()) == may_differ()


def test_every_client_hears_of_every_backend_what_the_matrix_says(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is printed. `HIVE_WRITE_CLIENTS=1` writes it into docs/clients.md."""
    matrix, gaps = Matrix(backend), GAPS.get(backend.name, {})
    matrix.run()
    seen = table(matrix, gaps, NOTES.get(backend.name, {}))
    with capsys.disabled():
        print(f"\n{backend.name}\n{seen}")
    assert unexplained(matrix, gaps) == []
    assert documented(backend.name, seen) == seen


def test_what_ollamas_clients_ask_besides_is_answered(backend: Backend) -> None:
    turn_to(backend.hive, backend.sites[MAIN])
    client = ollama.Client(host=backend.hive.get("/api/agents/alice/tokens")["ollama_host"])
    assert [model.name for model in client.ps().models] == [backend.model]
    assert "completion" in (client.show(backend.model).capabilities or [])
    client._client.close()
