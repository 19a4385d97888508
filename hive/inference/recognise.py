"""Which inference server listens at an address, told by its answers to harmless GETs; no prompt is ever sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hive.domain import BackendInfo, BackendKind
from hive.errors import BackendDown, BackendTimeout
from hive.inference.ask import Answer, get
from hive.inference.canned import SERVER

CANDIDATES = ("127.0.0.1:11434", "127.0.0.1:8000", "127.0.0.1:8080", "127.0.0.1:9931")
"""Default loopback ports: Ollama, vLLM, llama-server of old and of 2026. Servers on unix sockets have no default."""

QUESTIONS = ("/", "/api/version", "/version", "/v1/models", "/props")
ALL_WITHIN_S = 1.5

NAMES = {
    BackendKind.OLLAMA: "Ollama",
    BackendKind.VLLM: "vLLM",
    BackendKind.LLAMA: "llama-server",
    BackendKind.DEMO: "demo backend (canned text, no model)",
}


def identify(answers: Mapping[str, Answer]) -> tuple[BackendKind, str] | None:
    """Kind and version of the server that gave these answers (by question), None where it is none we know.

    Hive's own proxy passes some of these questions on, so it would look like the backend behind it: it is told by
    `X-Queue-Wait-Ms`, which it puts on every answer, and by `src: hive` in its refusals.

    >>> identify({"/props": Answer(200, {}, b'{"build_info": "b1-0c1e570"}')})
    (<BackendKind.LLAMA: 'llama'>, 'b1-0c1e570')
    >>> identify({"/props": Answer(200, {}, b"<html>It works!</html>")}) is None
    True
    """
    if any(_is_hive(answer) for answer in answers.values()):
        return None
    ollama = _text(_json(answers, "/api/version"), "version")
    if ollama and _is_demo(answers["/api/version"]):
        return BackendKind.DEMO, ollama
    if ollama and _says(answers, "/", b"Ollama is running"):
        return BackendKind.OLLAMA, ollama
    vllm = _text(_json(answers, "/version"), "version")
    if vllm and "vllm" in _owners(_json(answers, "/v1/models")):
        return BackendKind.VLLM, vllm
    if llama := _text(_json(answers, "/props"), "build_info"):
        return BackendKind.LLAMA, llama
    return None


async def recognise(address: str) -> BackendInfo | None:
    """The backend at `address` (`host:port` or a socket path), None where none that we know answers in 1.5 s.

    All questions are asked at once; a backend is recognised by those it answered.
    """
    asked = await asyncio.gather(*(_ask(address, question) for question in QUESTIONS))
    found = identify({question: answer for question, answer in zip(QUESTIONS, asked, strict=True) if answer})
    if found is None:
        return None
    kind, version = found
    return BackendInfo(kind=kind, address=address, label=f"{NAMES[kind]} at {address}", version=version, up=True)


async def find(candidates: Sequence[str] = CANDIDATES) -> BackendInfo | None:
    """The first of `candidates`, in their order, that is a backend; all are asked at once, so 2 s are enough."""
    found = await asyncio.gather(*(recognise(address) for address in candidates))
    return next((info for info in found if info is not None), None)


async def _ask(address: str, question: str) -> Answer | None:
    try:
        return await get(address, question, within_s=ALL_WITHIN_S)
    except (BackendDown, BackendTimeout):
        return None


def _json(answers: Mapping[str, Answer], question: str) -> dict[str, Any]:
    """The JSON object a question was answered with under 200, else an empty one."""
    answer = answers.get(question)
    if answer is None or answer.status != 200:
        return {}
    return _object(answer.body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _text(found: Mapping[str, Any], key: str) -> str:
    """A short printable text of an answer, else empty: it ends on a terminal."""
    value = found.get(key)
    return value if isinstance(value, str) and len(value) <= 200 and value.isprintable() else ""


def _owners(models: Mapping[str, Any]) -> set[str]:
    listed = models.get("data")
    return (
        {_text(entry, "owned_by") for entry in listed if isinstance(entry, dict)} if isinstance(listed, list) else set()
    )


def _says(answers: Mapping[str, Answer], question: str, words: bytes) -> bool:
    answer = answers.get(question)
    return answer is not None and answer.status == 200 and answer.body.startswith(words)


def _is_demo(answer: Answer) -> bool:
    return answer.headers.get("server") == SERVER


def _is_hive(answer: Answer) -> bool:
    if "x-queue-wait-ms" in answer.headers:
        return True
    refusal = _object(answer.body)
    error = refusal.get("error")
    return "hive" in (refusal.get("src"), error.get("src") if isinstance(error, dict) else None)
