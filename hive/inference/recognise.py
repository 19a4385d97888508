"""Which inference server listens at an address, told by its answers to harmless GETs; no prompt is ever sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hive.domain import BackendInfo, BackendKind, origin_of
from hive.errors import BackendDown, BackendTimeout
from hive.host.access import NO_ACCESS, Access
from hive.inference.ask import FAR_ANSWER_S, Answer, get
from hive.inference.canned import SERVER
from hive.inference.remote import MODELS, is_list, refusal, version_in

CANDIDATES = ("127.0.0.1:11434", "127.0.0.1:8000", "127.0.0.1:8080", "127.0.0.1:9931")
"""Default loopback ports: Ollama, vLLM, llama-server of old and of 2026. Servers on unix sockets have no default."""

QUESTIONS = ("/", "/api/version", "/version", "/v1/models", "/props")
ALL_WITHIN_S = 1.5

NAMES = {
    BackendKind.OLLAMA: "Ollama",
    BackendKind.VLLM: "vLLM",
    BackendKind.LLAMA: "llama-server",
    BackendKind.DEMO: "demo backend (canned text, no model)",
    BackendKind.REMOTE: "remote server of OpenAI's dialect",
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


async def recognise(address: str, access: Access | None = None) -> BackendInfo | None:
    """The backend at `address` (as `BackendInfo` has it), None where none that we know answers in 1.5 s, on another
    machine in 5 s.

    `access`: given for an address that somebody named. There any server that lists models as OpenAI does is one, of the
    kind `remote`, and it is shown the key. All questions are asked at once; a backend is recognised by those it
    answered. Below a path of its server it is always `remote`.
    """
    origin, shown = origin_of(address), (access or NO_ACCESS).shown_to(None, address)
    within_s = ALL_WITHIN_S if origin.is_here else FAR_ANSWER_S
    questions = (MODELS,) if origin.prefix else QUESTIONS
    # What runs on this machine and asks for no key is shown none, so it is asked without one first.
    first = shown if origin.tls else NO_ACCESS
    asked = await asyncio.gather(*(_ask(address, question, first, within_s) for question in questions))
    answers = {question: answer for question, answer in zip(questions, asked, strict=True) if answer}
    found = None if origin.prefix else identify(answers)
    if found is None and access is not None:
        listed = answers.get(MODELS)
        if listed is not None and listed.status in (401, 403) and shown != first:
            listed = await _ask(address, MODELS, shown, within_s)
        found = _remote(listed)
    if found is None:
        return None
    kind, version = found
    return BackendInfo(kind=kind, address=address, label=f"{NAMES[kind]} at {address}", version=version, up=True)


def _remote(listed: Answer | None) -> tuple[BackendKind, str] | None:
    """Hive's own proxy lists models, too, and is no backend."""
    if listed is None or listed.status != 200 or _is_hive(listed) or not is_list(listed.body):
        return None
    return BackendKind.REMOTE, version_in(listed.headers)


async def why_unknown(address: str, access: Access) -> str:
    """Why what answers at an address that somebody named is no backend, a sentence."""
    shown = access.shown_to(None, address)
    try:
        listed = await get(address, MODELS, within_s=FAR_ANSWER_S, access=shown)
    except (BackendDown, BackendTimeout) as error:
        return error.message
    if listed.status != 200:
        withheld = " (a key is not sent over plain HTTP to another host)" if access.key and not shown.key else ""
        return refusal(address, listed.status, has_key=bool(shown.key)) + withheld
    return f"{address} answers GET {MODELS} with something else than OpenAI's list of models"


async def find(candidates: Sequence[str] = CANDIDATES) -> BackendInfo | None:
    """The first of `candidates`, in their order, that is a backend; all are asked at once, so 2 s are enough."""
    found = await asyncio.gather(*(recognise(address) for address in candidates))
    return next((info for info in found if info is not None), None)


async def _ask(address: str, question: str, access: Access, within_s: float) -> Answer | None:
    try:
        return await get(address, question, within_s=within_s, access=access)
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
