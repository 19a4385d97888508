"""The demo backend, Hive's own program: a real HTTP server with canned text, in Ollama's dialect and OpenAI's."""

from __future__ import annotations

import msgspec

from hive.backends import ollama
from hive.backends.conversation import Answers, AskedServer, Conversation, json_of, text_in
from hive.backends.spec import Asking, BackendSpec, Requests
from hive.domain import DEMO_SERVER, BackendKind, Dialect, ModelInfo
from hive.settings.table import InferenceSection


def recognise(answers: Answers) -> str | None:
    version = text_in(json_of(answers, ollama.VERSION), "version")
    return version if version and answers[ollama.VERSION].headers.get("server") == DEMO_SERVER else None


def models(server: AskedServer) -> Conversation[list[ModelInfo]]:
    listed = yield from ollama.models(server)
    return [msgspec.structs.replace(model, owned_by="hive") for model in listed]


def places(told: int | None, inference: InferenceSection) -> tuple[int | None, str]:  # noqa: ARG001
    return None, "no limit"


SPEC = BackendSpec(
    kind=BackendKind.DEMO,
    label="demo backend (canned text, no model)",
    dialects=frozenset({Dialect.OLLAMA, Dialect.OPENAI}),
    questions=(ollama.VERSION,),
    recognise=recognise,
    asking=Asking(
        health_path=ollama.VERSION,
        version=ollama.version,
        models=models,
        why_not_load="the demo backend has no model, only canned text",
    ),
    one_token=ollama.one_token,
    tokens_in=ollama.tokens_in,
    requests=Requests(),
    places=places,
    prefix_cache="none",
    why_not_flush="the demo backend keeps nothing of a prompt",
    is_canned=True,
)
