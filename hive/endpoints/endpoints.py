"""The allowlist: the requests that may be made to a model, one row an endpoint. Pure.

A path is compared as bytes, never decoded, normalised or matched by prefix, and the row's bytes go upstream: no
spelling of a forbidden path can pass (facts: of 39 bypass spellings servers route several). A query is for Hive alone:
its known parameters choose a row or a part of a list, the others are ignored, and none of its bytes goes upstream.
Dated: Ollama's routes of 2026-08, vLLM 0.32, llama-server 0c1e570, anthropic-python 2.10.0 (its beta calls add
`?beta=true`: rows of their own).
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import msgspec

from hive.backends.kinds import spec_of, specs
from hive.dialects.translators import RESPONSES
from hive.domain import Dialect
from hive.endpoints.runner_paths import is_runners, refusal
from hive.endpoints.unknown_paths import not_offered
from hive.errors import BadRequest, MethodNotAllowed, WrongMediaType
from hive.wire.http1 import Request

MODEL_PREFIX = b"/v1/models/"
KEPT_PREFIX = b"/v1/responses/"
BETA = b"beta=true"
MOST_OF_A_PATH = 256
"""Bytes of an unknown path that are looked at to tell of it."""


class Meter(StrEnum):
    """The place of the usage in an endpoint's answer."""

    NONE = "none"
    OLLAMA = "ollama"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RUNNER = "runner"
    """In a field of the answer's head, `x-hive-cost`: seconds of sound, or pictures, of a runner of Hive's own."""


class Keeps(StrEnum):
    """A question about a response that was kept."""

    GET = "get"
    DELETE = "delete"
    ITEMS = "items"
    CANCEL = "cancel"


ANSWERED = frozenset({"/", "/api/tags", "/api/ps", "/api/show", "/api/version"})
"""Paths that Hive answers by itself, from its list of models, for a backend that does not."""
COUNT = "/v1/messages/count_tokens"
"""The path that Hive answers with an estimate if no server counts."""
ANSWERED_OR_ESTIMATED = ANSWERED | {COUNT}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `listing`: answered by Hive from the daemon's list. `needs_place`: occupies the model. `keeps`: answered
    by the daemon from what it has kept of responses.

    `streams`: what an absent `stream` field means. `is_extra`: of those that speak the dialect only the kinds that add
    it have it (`BackendSpec.adds`). `form`: its body is `multipart/form-data` with one file. `category`: of the models
    that are asked here, `audio` or `image`; empty for those of text.
    """

    method: bytes
    target: bytes
    dialect: Dialect
    body: bool = False
    streams: bool = False
    meter: Meter = Meter.NONE
    needs_place: bool = False
    counts: bool = False
    """True if a request is charged to the sliding window."""
    listing: bool = False
    keeps: Keeps | None = None
    is_extra: bool = False
    form: bool = False
    category: str = ""
    request_line: bytes = b""
    """The request line that goes upstream, made from the two above. HEAD is asked as GET and its body dropped: an
    answer to HEAD has no framing."""
    name: str = ""
    """The path alone, made from the target."""
    can_be_hives: bool = False
    """True if Hive answers it by itself in some case: it is a list, or one of `ANSWERED_OR_ESTIMATED`."""

    def __post_init__(self) -> None:
        method = b"GET" if self.method == b"HEAD" else self.method
        msgspec.structs.force_setattr(self, "request_line", b"%b %b HTTP/1.1\r\n" % (method, self.target))
        name = self.target.partition(b"?")[0].decode("ascii")
        msgspec.structs.force_setattr(self, "name", name)
        msgspec.structs.force_setattr(self, "can_be_hives", self.listing or name in ANSWERED_OR_ESTIMATED)

    def is_offered_by(self, kind: str) -> bool:
        """Whether that kind of backend answers it by itself.

        >>> [find(b"POST", b"/v1/messages/count_tokens").is_offered_by(kind) for kind in ("vllm", "ollama", "demo")]
        [True, False, False]
        """
        return spec_of(kind).answers(self.dialect, self.name, is_extra=self.is_extra)


def _ollama(target: bytes, *, streams: bool, needs_place: bool, meter: Meter = Meter.OLLAMA) -> Endpoint:
    return Endpoint(
        method=b"POST",
        target=target,
        dialect=Dialect.OLLAMA,
        body=True,
        streams=streams,
        meter=meter,
        needs_place=needs_place,
        counts=True,
    )


def _openai(target: bytes, *, is_extra: bool = False) -> Endpoint:
    return Endpoint(
        method=b"POST",
        target=target,
        dialect=Dialect.OPENAI,
        body=True,
        meter=Meter.OPENAI,
        needs_place=True,
        counts=True,
        is_extra=is_extra,
    )


def _scores(target: bytes) -> Endpoint:
    """OpenAI has none of these. Each document of a list is a prompt of its own, so they take a place."""
    return _openai(target, is_extra=True)


def _tokenizes(target: bytes) -> Endpoint:
    """The model is not asked: the server splits texts beside it. vLLM and llama-server have different fields."""
    return msgspec.structs.replace(_openai(target, is_extra=True), meter=Meter.NONE, needs_place=False)


def _runner(target: bytes, category: str, *, form: bool = False) -> Endpoint:
    """A row that only kinds of that category answer (`BackendSpec.category`)."""
    row = _openai(target, is_extra=True)
    return msgspec.structs.replace(row, meter=Meter.RUNNER, form=form, category=category)


def _anthropic(path: bytes, *, needs_place: bool) -> list[Endpoint]:
    return [
        Endpoint(
            method=b"POST",
            target=path + query,
            dialect=Dialect.ANTHROPIC,
            body=True,
            meter=Meter.ANTHROPIC if needs_place else Meter.NONE,
            needs_place=needs_place,
            counts=True,
        )
        for query in (b"", b"?" + BETA)
    ]


def _reads(target: bytes) -> list[Endpoint]:
    return [Endpoint(method=method, target=target, dialect=Dialect.OLLAMA) for method in (b"GET", b"HEAD")]


PULL = msgspec.structs.replace(_ollama(b"/api/pull", streams=True, needs_place=False, meter=Meter.NONE), listing=True)
"""Answered for a model that is in the list (hive.proxy.loading); no agent fetches another one."""

ENDPOINTS = [
    _ollama(b"/api/generate", streams=True, needs_place=True),
    _ollama(b"/api/chat", streams=True, needs_place=True),
    _ollama(b"/api/embed", streams=False, needs_place=True),
    _ollama(b"/api/embeddings", streams=False, needs_place=True, meter=Meter.NONE),
    _ollama(b"/api/show", streams=False, needs_place=False, meter=Meter.NONE),
    PULL,
    *_reads(b"/api/tags"),
    *_reads(b"/api/version"),
    *_reads(b"/api/ps"),
    *_reads(b"/"),
    _openai(b"/v1/chat/completions"),
    _openai(b"/v1/completions"),
    _openai(b"/v1/embeddings"),
    *(_scores(path) for path in (b"/v1/rerank", b"/rerank", b"/v1/score", b"/score")),
    *(_tokenizes(path) for path in (b"/tokenize", b"/detokenize")),
    _runner(b"/v1/audio/transcriptions", "audio", form=True),
    _runner(b"/v1/audio/translations", "audio", form=True),
    _runner(b"/v1/images/generations", "image"),
    _openai(RESPONSES.encode(), is_extra=True),  # servers that have it are asked by chat completions
    *_anthropic(b"/v1/messages", needs_place=True),
    *_anthropic(b"/v1/messages/count_tokens", needs_place=False),
    Endpoint(method=b"GET", target=b"/v1/models", dialect=Dialect.OPENAI, listing=True),
]
FORM_TARGETS = tuple(row.target for row in ENDPOINTS if row.form)
ONE_MODEL = Endpoint(method=b"GET", target=MODEL_PREFIX, dialect=Dialect.OPENAI, listing=True)
"""`GET /v1/models/{id}`: the id is compared with the list's names, as bytes."""

KEPT = {
    (method, end): Endpoint(
        method=method, target=b"/v1/responses/{id}" + end, dialect=Dialect.OPENAI, counts=True, keeps=keeps
    )
    for method, end, keeps in (
        (b"GET", b"", Keeps.GET),
        (b"DELETE", b"", Keeps.DELETE),
        (b"GET", b"/input_items", Keeps.ITEMS),
        (b"POST", b"/cancel", Keeps.CANCEL),
    )
}
"""Endpoints by method and the path behind the id, which is compared as bytes with the ids of kept responses."""

TRANSLATED = {
    "/api/chat": b"/v1/chat/completions",
    "/api/generate": b"/v1/chat/completions",
    "/api/embed": b"/v1/embeddings",
    "/api/embeddings": b"/v1/embeddings",
    "/v1/messages": b"/v1/chat/completions",
    RESPONSES: b"/v1/chat/completions",
}
"""Paths at which a backend is asked instead if it does not speak the client's dialect, or is not asked in it
(hive.dialects.translators).
"""

_ROWS = {(row.method, row.target): row for row in ENDPOINTS}
_METHODS: dict[bytes, str] = {}
for _row in ENDPOINTS:
    _METHODS[_row.target] = ", ".join(filter(None, [_METHODS.get(_row.target), _row.method.decode()]))


def find(method: bytes, target: bytes, kind: str | None = None) -> Endpoint:
    """The row of a request. Raises for an unknown path Refusal (403), or NotSupported (501) where servers of another
    kind than the active one, `kind`, have it; MethodNotAllowed (405) for another method.

    >>> find(b"POST", b"/api/chat").needs_place
    True
    >>> find(b"DELETE", b"/api/chat")
    Traceback (most recent call last):
    hive.errors.MethodNotAllowed: /api/chat takes POST
    >>> find(b"POST", b"/api/%63hat")
    Traceback (most recent call last):
    hive.errors.Refusal: /api/%63hat is not offered to agents: it is on no list of endpoints
    >>> [find(b"POST", b"/v1/messages" + query).target for query in (b"?x=/api/pull", b"?x=1&beta=true")]
    [b'/v1/messages', b'/v1/messages?beta=true']
    """
    row = _ROWS.get((method, target))
    if row is not None:
        return row
    path, _, query = target.partition(b"?")
    if query and BETA in query.split(b"&"):
        row = _ROWS.get((method, path + b"?" + BETA))
    row = row or _ROWS.get((method, path))
    if row is not None:
        return row
    if is_runners(path):
        raise refusal(path)
    if path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
        if method == b"GET":
            return ONE_MODEL
        raise MethodNotAllowed("/v1/models/{id} takes GET", allow="GET")
    if path.startswith(KEPT_PREFIX) and (row := _kept(method, path)) is not None:
        return row
    allow = _METHODS.get(path)
    if allow is not None:
        raise MethodNotAllowed(f"{path.decode('ascii')} takes {allow}", allow=allow)
    raise not_offered(path[:MOST_OF_A_PATH], kind, _offered(kind))


def _kept(method: bytes, path: bytes) -> Endpoint | None:
    """The row of a path with the id of a response in it. Raises MethodNotAllowed.

    >>> _kept(b"GET", b"/v1/responses/resp_1/input_items").name, _kept(b"GET", b"/v1/responses/resp_1/x")
    ('/v1/responses/{id}/input_items', None)
    """
    name, slash, rest = path[len(KEPT_PREFIX) :].partition(b"/")
    allow = [row.method.decode() for row in KEPT.values() if row.target == b"/v1/responses/{id}" + slash + rest]
    if not name or not allow:
        return None
    if method.decode("latin-1") not in allow:
        raise MethodNotAllowed(
            f"/v1/responses/{{id}}{(slash + rest).decode()} takes {', '.join(allow)}", allow=", ".join(allow)
        )
    return KEPT[method, slash + rest]


@cache
def _offered(kind: str | None) -> tuple[str, ...]:
    """The paths that are of use before a backend of that kind; where it is not known, all."""
    rows = [row for row in ENDPOINTS if kind is None or answered_by_hive(row, kind) or asked_as(row, kind)]
    return tuple(dict.fromkeys(row.name for row in rows))


def asked_as(endpoint: Endpoint, kind: str) -> Endpoint | None:
    """The row by which that kind of backend is asked: the same, or another after translation; None for neither.

    >>> asked_as(find(b"POST", b"/api/chat"), "vllm").name
    '/v1/chat/completions'
    >>> asked_as(find(b"POST", COUNT.encode()), "demo")
    """
    return endpoint if endpoint.is_offered_by(kind) else translated(endpoint, kind)


def offering_kinds(endpoint: Endpoint) -> str:
    """The kinds of backend that answer it by themselves, in words; empty for none.

    >>> offering_kinds(find(b"POST", b"/v1/score")), offering_kinds(find(b"POST", b"/tokenize"))
    ('vllm does', 'llama and vllm do')
    """
    kinds = sorted(spec.kind for spec in specs() if endpoint.is_offered_by(spec.kind))
    return f"{' and '.join(kinds)} {'do' if len(kinds) > 1 else 'does'}" if kinds else ""


def translated(endpoint: Endpoint, kind: str) -> Endpoint | None:
    """The row in another dialect that a request of this one is translated to; None where there is none.

    >>> translated(find(b"POST", b"/v1/messages"), "llama").name
    '/v1/chat/completions'
    """
    row = _ROWS.get((b"POST", TRANSLATED.get(endpoint.name, b"")))
    return row if row is not None and row.is_offered_by(kind) else None


def answered_by_hive(endpoint: Endpoint, kind: str) -> bool:
    """Whether no backend of that kind is asked.

    >>> show = find(b"POST", b"/api/show")
    >>> answered_by_hive(show, "llama"), answered_by_hive(show, "ollama")
    (True, False)
    """
    return endpoint.listing or (endpoint.name in ANSWERED_OR_ESTIMATED and not endpoint.is_offered_by(kind))


def check_body(endpoint: Endpoint, request: Request) -> None:
    """Checks that this endpoint takes such a body; the parser holds it to its length.

    Raises BadRequest, WrongMediaType.
    """
    if not endpoint.body:
        if request.content_length != 0:
            raise BadRequest(f"{endpoint.method.decode()} takes no body")
        return
    for name, value in request.fields:
        if name == b"content-encoding" and value.lower() != b"identity":
            plain = "the form as it is" if endpoint.form else "plain JSON"
            raise WrongMediaType(f"Content-Encoding {value.decode('latin-1')[:40]} is not taken; send {plain}")


def dialect_of(target: bytes) -> Dialect:
    """The dialect of a refusal: `/api…` and `/` are Ollama's, `/v1/messages…` Anthropic's, all else OpenAI's.

    >>> [dialect_of(target).value for target in (b"/api/pull", b"/?x", b"/v1/messages/batches", b"/v1/files")]
    ['ollama', 'ollama', 'anthropic', 'openai']
    """
    target = target.partition(b"?")[0]
    if target.startswith(b"/v1/messages"):
        return Dialect.ANTHROPIC
    return Dialect.OLLAMA if target == b"/" or target.startswith(b"/api") else Dialect.OPENAI
