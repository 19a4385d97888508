"""Ollama (server/routes.go of 2026-08): data and pure functions. The demo backend speaks the same dialect."""

from __future__ import annotations

import hashlib
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from hive.backends.command_line import Launch, Needed, Order, program
from hive.backends.conversation import (
    LOAD_S,
    Answers,
    AskedServer,
    Conversation,
    check_done,
    json_of,
    post,
    shape,
    text_in,
    texts,
)
from hive.backends.openai_answers import ONE_TOKEN_PROMPT
from hive.backends.spec import Asking, BackendSpec, Fields, Requests
from hive.domain import BackendKind, Dialect, ModelInfo
from hive.errors import BackendDown, BackendTimeout, NotSupported
from hive.models.cache_epochs import FlushedBy
from hive.models.capabilities import EDITS, NO_SCHEMA, Over
from hive.models.whereabouts import Whereabouts, is_of_the_cloud, would_leave
from hive.settings.table import InferenceSection

ADDRESS = "127.0.0.1:11434"
"""In its own network, where Hive starts it."""
PARALLEL = 1
"""Its default of `OLLAMA_NUM_PARALLEL` (envconfig/config.go of 2026-08); its API does not tell what it is."""
TAGS = "/api/tags"
VERSION = "/api/version"


# --- which it is, and what it says of itself ---------------------------------------------------------------------


class _Version(msgspec.Struct):
    version: str


class _Details(msgspec.Struct):
    quantization_level: str = ""


class _Tag(msgspec.Struct):
    name: str
    size: int | None = None
    modified_at: str = ""
    details: _Details | None = None
    digest: str = ""
    remote_host: str = ""
    remote_model: str = ""


class Tags(msgspec.Struct):
    """`/api/tags`."""

    models: list[_Tag] | None = None


class _Generated(msgspec.Struct):
    eval_count: int = 0


def recognise(answers: Answers) -> str | None:
    """Several others have a version there."""
    root = answers.get("/")
    is_ollama = root is not None and root.status == 200 and root.body.startswith(b"Ollama is running")
    return (text_in(json_of(answers, VERSION), "version") or None) if is_ollama else None


def version(server: AskedServer) -> Conversation[str]:
    return (yield from shape(server, VERSION, _Version)).version


def models(server: AskedServer) -> Conversation[list[ModelInfo]]:
    return models_in((yield from shape(server, TAGS, Tags)))


def models_in(tags: Tags) -> list[ModelInfo]:
    """The models of Ollama's list."""
    return [
        ModelInfo(
            name=tag.name,
            size_bytes=tag.size,
            owned_by=owner_of(tag.name),
            created=unix_seconds(tag.modified_at),
            quantization=tag.details.quantization_level if tag.details else "",
            remote_host=tag.remote_host,
            remote_model=tag.remote_model,
            digest=tag.digest,
        )
        for tag in tags.models or []  # Go writes an empty list as null
    ]


def mark(server: AskedServer) -> Conversation[str]:  # noqa: ARG001
    """Its version and its list: a name in it may become a stub of the cloud from one moment to the next."""
    version, tags = yield from texts(VERSION, TAGS)
    return "" if version is None or tags is None else hashlib.sha256(version + tags).hexdigest()


def loaded(server: AskedServer) -> Conversation[frozenset[str] | None]:
    try:
        running = yield from shape(server, "/api/ps", Tags)
    except (BackendDown, BackendTimeout):
        return None
    return frozenset(tag.name for tag in running.models or [])


def load(server: AskedServer, model: str) -> Conversation[None]:
    """An empty prompt loads (docs/api.md of 2026-08); `keep_alive` is the server's own default."""
    yield from _generate(server, model, {"model": model, "stream": False})


def unload(server: AskedServer, model: str) -> Conversation[None]:
    yield from _generate(server, model, {"model": model, "stream": False, "keep_alive": 0})


def _generate(server: AskedServer, model: str, body: dict[str, object]) -> Conversation[None]:
    """Raises NotSupported where that would be sent on to another host: there is nothing to load here."""
    why = Whereabouts(why_far, (yield from models(server))).why_known_far(model)
    if why:
        raise NotSupported(would_leave(model, why))
    check_done((yield from post("/api/generate", body, within_s=LOAD_S)), server)


def unix_seconds(text: str) -> int:
    """Go's RFC 3339 time as Unix seconds; 0 where it is none or from before 1970 (Go's zero time).

    >>> unix_seconds("2026-05-04T14:56:49.277302595+02:00"), unix_seconds("0001-01-01T00:00:00Z"), unix_seconds("")
    (1777899409, 0, 0)
    """
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp()))
    except (ValueError, OverflowError):
        return 0


def owner_of(name: str) -> str:
    """Owner of a model: the namespace in its name, as Ollama's own `/v1/models` has it.

    >>> owner_of("tiny:latest"), owner_of("ann/tiny"), owner_of("hf.co/meta/tiny:q4_0")
    ('library', 'ann', 'meta')
    """
    *_, namespace, _ = ("library", *name.split("/"))
    return namespace


def why_far(model: ModelInfo) -> str:
    """Clause that says where requests for this model go; empty where they stay on the box.

    >>> why_far(ModelInfo(name="work-helper", remote_host="https://h:443", remote_model="big"))
    'Ollama sends it to https://h:443, as big'
    >>> why_far(ModelInfo(name="tiny", size_bytes=9)), why_far(ModelInfo(name="x:cloud"))
    ('', 'Ollama sends what is named so to its cloud')
    """
    if model.remote_host or model.remote_model:
        to = model.remote_host or "another host"
        return f"Ollama sends it to {to}{', as ' + model.remote_model if model.remote_model else ''}"
    return "Ollama sends what is named so to its cloud" if is_of_the_cloud(model.name) else ""


# --- what requests say to it -------------------------------------------------------------------------------------

_ONE = "it gives one answer, however many are asked for"
_BEST = "it gives the first answer it makes"
_BIAS = "it weighs all tokens as the model does"
_MODEL_CHOOSES = "the model alone chooses whether it calls a tool, and which"
_NO_FUNCTIONS = "it has tools, and not what OpenAI had before them"
_TEXT = "it answers in text"
PASSED_OVER = {  # measured with 0.17.4 and 0.32.15; openai/openai.go, anthropic/anthropic.go of 2026-08
    "/v1/chat/completions": (
        Over("n", _ONE, refused=True, idle=(1,)),
        Over("audio", _TEXT, refused=True),
        Over("tool_choice", _MODEL_CHOOSES, idle=("auto",)),
        Over("parallel_tool_calls", "a model that can call several tools at once may", idle=(True,)),
        Over("logit_bias", _BIAS),
        Over("functions", _NO_FUNCTIONS),
        Over("function_call", _NO_FUNCTIONS, idle=("auto", "none")),
    ),
    "/v1/completions": (
        Over("n", _ONE, refused=True, idle=(1,)),
        Over("response_format", NO_SCHEMA, refused=True, idle=({"type": "text"},)),
        Over("best_of", _BEST, idle=(1,)),
        Over("logit_bias", _BIAS),
    ),
    "/v1/responses": (
        Over("tool_choice", _MODEL_CHOOSES, idle=("auto",)),
        Over("parallel_tool_calls", "a model that can call several tools at once may", idle=(True,)),
    ),
    "/v1/messages": (
        Over("output_config", NO_SCHEMA, refused=True, inner="format"),
        Over("output_format", NO_SCHEMA, refused=True),
        Over("tool_choice", _MODEL_CHOOSES, idle=({"type": "auto"},)),
        EDITS,
    ),
}


_KEPT_AT = frozenset({"/api/generate", "/api/chat", "/api/embed", "/api/embeddings"})


def pooled_fields(endpoint: str) -> Fields:
    """The member by which a model of the pool stays loaded: only the pool ends it. A request that makes Ollama load
    would have it unloaded after Ollama's own time. Its other endpoints have no such field, and change no time.

    >>> pooled_fields("/api/chat"), pooled_fields("/v1/messages")
    ((('keep_alive', b'-1'),), ())
    """
    return (("keep_alive", b"-1"),) if endpoint in _KEPT_AT else ()


def one_token(model: str, limit: str) -> tuple[str, dict[str, Any]]:  # noqa: ARG001 - it has a name of its own
    """
    >>> one_token("m", "max_tokens")
    ('/api/generate', {'model': 'm', 'prompt': 'Hi', 'stream': False, 'options': {'num_predict': 1}})
    """
    options = {"num_predict": 1}
    return "/api/generate", {"model": model, "prompt": ONE_TOKEN_PROMPT, "stream": False, "options": options}


def tokens_in(body: bytes) -> int:
    """
    >>> tokens_in(b'{"eval_count":1}'), tokens_in(b"<html>")
    (1, 0)
    """
    try:
        return msgspec.json.decode(body, type=_Generated).eval_count
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


# --- how it is started -------------------------------------------------------------------------------------------


def places(told: int | None, inference: InferenceSection) -> tuple[int | None, str]:  # noqa: ARG001
    return PARALLEL, "Ollama's default, it does not tell; [proxy] backend_concurrency overrides it"


def launch(order: Order) -> Launch:
    """It knows no unix socket: systemd carries one to the loopback of its own network."""
    inference = order.inference
    less = {"OLLAMA_NO_CLOUD": "1"}  # what would leave the box fails there, whatever it is named; a drop-in may say 0
    more = {
        "OLLAMA_HOST": ADDRESS,
        "OLLAMA_MODELS": inference.ollama_models,
        # At its start Ollama deletes what it thinks no model uses any more.
        "OLLAMA_NOPRUNE": "1",
    }
    store = Needed(
        "ollama_models", Path(inference.ollama_models), "make it, or point inference.ollama_models to a store"
    )
    return Launch(
        (inference.ollama_program, "serve"),
        less | order.environment | more,
        (program("ollama_program", inference.ollama_program), store),
        None,
    )


SPEC = BackendSpec(
    kind=BackendKind.OLLAMA,
    label="Ollama",
    dialects=frozenset({Dialect.OLLAMA, Dialect.OPENAI, Dialect.ANTHROPIC}),
    lacks=frozenset({"/v1/messages/count_tokens"}),
    questions=("/", VERSION),
    recognise=recognise,
    asking=Asking(
        health_path=VERSION,  # it has one health: whoever answers this also serves
        version=version,
        models=models,
        mark=mark,
        loaded=loaded,
        load=load,
        unload=unload,
    ),
    one_token=one_token,
    tokens_in=tokens_in,
    requests=Requests(
        passed_over=PASSED_OVER,
        pooled_fields=pooled_fields,
        grammar="grammar_ollama",
        prompt_target=b"/api/chat",
    ),
    places=places,
    prefix_cache="shared between all agents (Ollama cannot separate it)",
    flushed_by=FlushedBy.LOAD,
    why_far=why_far,
    fetches=True,
    program=lambda inference: inference.ollama_program,
    launch=launch,
)
