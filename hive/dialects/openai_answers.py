"""Reading the answers of a backend that speaks OpenAI's dialect, for all translations alike. Sans I/O.

Servers are read as generously as their clients read them: an `id` of null, counts written as `30.0`, half a surrogate
pair, a `usage` of another shape do not spoil the answer. Its contents are read strictly: a text that is no text fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from hive.errors import BackendDown, StreamIncomplete

Raw = msgspec.Raw
NONE = Raw(b"null")
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions that `read` raises."""
GIVEN_UP = frozenset({"abort", "error"})
"""The `finish_reason` of a backend that was stopped (vLLM) or that failed (OpenRouter)."""
MAX_HELD = 1024 * 1024
"""Characters of the arguments of an answer's calls, and of the pieces that wait behind them; with more of either it
fails."""
MAX_WORDS = 4096
"""Characters of a backend's own words about an error."""
_MOST_COUNTED = 2**53
PIECES_KEPT = 1024
"""Pieces of a text kept one by one before they are joined."""
_A_CALL = 64
"""The size that a call counts for beside its arguments."""

NO_NAMES: Mapping[str, str] = MappingProxyType({})
"""The names if no tool has another name for the backend than for the client."""

Number = int | float


class Cached(msgspec.Struct, gc=False):
    """Tokens read from a cache, and written to it: `created_cache_tokens` (vLLM) or `cache_write_tokens` (OpenAI)."""

    cached_tokens: Number | None = None
    created_cache_tokens: Number | None = None
    cache_write_tokens: Number | None = None

    @property
    def written(self) -> Number | None:
        return self.created_cache_tokens if self.created_cache_tokens is not None else self.cache_write_tokens


class Thought(msgspec.Struct, gc=False):
    reasoning_tokens: Number | None = None


class TokenUsage(msgspec.Struct, gc=False):
    prompt_tokens: Number | None = None
    completion_tokens: Number | None = None
    prompt_tokens_details: Cached | None = None
    completion_tokens_details: Thought | None = None


class ServerTimings(msgspec.Struct, gc=False):
    """llama-server's; `prompt_n` leaves out what came from its cache."""

    cache_n: Number = 0
    prompt_n: Number = 0
    prompt_ms: Number = 0
    predicted_n: Number = 0
    predicted_ms: Number = 0


class CalledFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class CallPiece(msgspec.Struct, gc=False):
    """A call in a message, a piece of one in a delta."""

    index: int | None = None
    id: str | None = None
    function: CalledFunction | None = None


class Delta(msgspec.Struct, gc=False):
    """A delta, or a message. Thinking is `reasoning` (vLLM) or `reasoning_content` (llama-server); `function_call` is
    OpenAI's form before `tool_calls`, which some servers still send."""

    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None
    function_call: CalledFunction | None = None

    @property
    def calls(self) -> list[CallPiece]:
        """The calls in it, or pieces of them; there is only one `function_call` in an answer."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [CallPiece(0, None, self.function_call)]

    @property
    def text(self) -> str:
        return self.content or self.refusal or ""

    @property
    def thinking(self) -> str:
        return self.reasoning or self.reasoning_content or ""


class Token(msgspec.Struct, gc=False):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None
    top_logprobs: list[Token] | None = None


class Logprobs(msgspec.Struct, gc=False):
    """Log probabilities: of a chat `content`, of a completion vLLM's other three, one list for all tokens each."""

    content: list[Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(msgspec.Struct, gc=False):
    """`stop_reason`: vLLM's, the stop sequence that was met."""

    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Raw = NONE
    logprobs: Logprobs | None = None


class Completion(msgspec.Struct, gc=False):
    """A chunk of a stream, or an answer in one piece."""

    id: str | int | None = None
    choices: list[CompletionChoice] | None = None
    usage: TokenUsage | None = None
    timings: ServerTimings | None = None
    error: Raw = NONE
    object: Raw = NONE

    @property
    def is_error(self) -> bool:
        """Whether it says that something failed; older vLLMs have no `error` but an `object` of that name."""
        return (self.error is not NONE and bytes(self.error) != b"null") or (
            self.object is not NONE and bytes(self.object) == b'"error"'
        )


_completion = msgspec.json.Decoder(Completion).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode
_DISPENSABLE = {
    name: msgspec.json.Decoder(kind).decode
    for name, kind in (("id", str | int | None), ("usage", TokenUsage | None), ("timings", ServerTimings | None))
}
_HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def read(payload: bytes) -> Completion:
    """Raises one of `NOT_JSON`. Half a surrogate pair, as gateways in JavaScript cut texts, becomes U+FFFD; an id or
    counts that cannot be read are none.

    >>> read(rb'{"id":null,"choices":[{"text":"\\ud83d"}],"usage":{"prompt_tokens":"?"}}').choices[0].text
    '\ufffd'
    """
    try:
        return _completion(payload)
    except msgspec.DecodeError:
        return _completion(readable(_HALF.sub(rb"\\ufffd", payload)))


def read_whole(body: bytes) -> tuple[Completion, CompletionChoice, Delta]:
    """A chat completion in one piece, its first choice and the message of that.

    Raises BackendDown for what is none, StreamIncomplete for an aborted one.
    """
    try:
        found = read(body)
    except NOT_JSON:
        raise BackendDown("the backend's answer is no chat completion") from None
    if found.is_error:
        raise BackendDown(f"the backend failed: {words_of(body)}")
    choice = found.choices[0] if found.choices else None
    if choice is None or choice.message is None:
        raise BackendDown("the backend's answer has no message")
    if choice.finish_reason in GIVEN_UP:
        raise StreamIncomplete
    return found, choice, choice.message


def readable(payload: bytes) -> bytes:
    """The payload without those unreadable members that are not needed to understand an answer."""
    found = _members(payload)
    for name, decode in _DISPENSABLE.items():
        if name in found:
            try:
                decode(found[name])
            except NOT_JSON:
                del found[name]
    return _encode(found)


def count(number: Number | None) -> int | None:
    """Backends use -1 for a count they do not have (llama-swap #760); no count is beyond 2 ** 53.

    >>> count(30.0), count(-1), count(10 ** 30), count(None)
    (30, None, None, None)
    """
    return None if number is None or not 0 <= number <= _MOST_COUNTED else int(number)


# --- errors -----------------------------------------------------------------------------------------------------------


class _Worded(msgspec.Struct):
    """The places of a server's error text: OpenAI's and llama-server's `error`, FastAPI's `detail`, or `message`."""

    error: Raw = NONE
    detail: Raw = NONE
    message: Raw = NONE
    code: Raw = NONE


class _Type(msgspec.Struct):
    type: str = ""


class _Typed(msgspec.Struct):
    error: _Type


_typed = msgspec.json.Decoder(_Typed).decode
_worded = msgspec.json.Decoder(_Worded).decode
_text = msgspec.json.Decoder(str).decode


def words_of(body: bytes) -> str:
    """The text of a backend's error body, at most 4096 characters of it; empty if it has none.

    >>> words_of(b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}')
    'Loading model'
    >>> words_of(b'{"detail":"Not Found"}'), words_of(b"upstream timed out\\n"), words_of(b"{}")
    ('Not Found', 'upstream timed out', '')
    """
    try:
        told = _worded(body)
    except NOT_JSON:
        return body[: 4 * MAX_WORDS].decode(errors="replace").strip()[:MAX_WORDS]
    for raw in (told.error, told.message, told.detail):
        if words := _words(raw):
            return words[:MAX_WORDS]
    return ""


def code_of(body: bytes) -> str:
    """The code for programs in an error body; empty if it has none that is a word.

    >>> code_of(b'{"error":{"message":"No","code":"queue_full"}}'), code_of(b'{"error":{"code":503}}'), code_of(b"")
    ('queue_full', '', '')
    """
    try:
        found = msgspec.json.decode(body)
    except NOT_JSON:
        return ""
    error = found.get("error") if isinstance(found, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code[:64] if isinstance(code, str) else ""


def _words(raw: Raw) -> str:
    text = bytes(raw)
    if text.startswith(b"{"):
        return words_of(text) or text.decode(errors="replace")
    try:
        return _text(_HALF.sub(rb"\\ufffd", text))
    except NOT_JSON:
        return "" if text in (b"null", b"[]") else text.decode(errors="replace")


def status_of(body: bytes) -> int:
    """The status that an error says it has, in its `code`; 0 for none.

    >>> status_of(b'{"error":{"message":"busy","code":503}}'), status_of(b'{"error":"busy"}'), status_of(b"<html>")
    (503, 0, 0)
    """
    try:
        told = _worded(body)
    except NOT_JSON:
        return 0
    code = bytes(told.code).strip(b'"')
    if len(code) == 3 and code.isdigit() and 400 <= int(code) <= 599:
        return int(code)
    inner = bytes(told.error)
    return status_of(inner) if inner.startswith(b"{") else 0


def kind_of(body: bytes) -> str:
    """The `type` of an error, empty for none.

    >>> kind_of(b'{"error":{"message":"too long","type":"invalid_request_error","code":null}}'), kind_of(b"<html>")
    ('invalid_request_error', '')
    """
    try:
        return _typed(body).error.type
    except NOT_JSON:
        return ""


# --- calls of tools ---------------------------------------------------------------------------------------------------


class ToolCall:
    """One call of a tool, put together from its pieces. `number`: how many were begun before it."""

    __slots__ = ("_pieces", "id", "name", "number")

    def __init__(self, number: int, given_id: str = "") -> None:
        self.number = number
        self.id = given_id
        self.name = ""
        self._pieces: list[str] = []

    def __repr__(self) -> str:
        return f"<ToolCall {self.number} {self.name!r} {self.arguments[:40]!r}>"

    def add(self, function: CalledFunction | None) -> str:
        """The arguments in this piece. A name that is said again is the same name."""
        if function is None:
            return ""
        if function.name and function.name != self.name:
            self.name += function.name
        words = function.arguments or ""
        if words:
            self._pieces.append(words)
            if len(self._pieces) > PIECES_KEPT:
                self._pieces = ["".join(self._pieces)]
        return words

    @property
    def has_arguments(self) -> bool:
        return bool(self._pieces)

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    @property
    def unreadable(self) -> str:
        """The error text for arguments that are no JSON object."""
        return f'the model called "{self.name[:60]}" with arguments that are no JSON object'


class ToolCalls:
    """Assigns pieces to their calls, in any order of the pieces.

    A piece with an index belongs to the call of that index, but for a new id, which begins another (some servers say 0
    for all). Without one the id decides; without both it belongs to the last call, unless that has arguments and the
    piece a name.

    >>> calls = ToolCalls()
    >>> pieces = CallPiece(1, "b"), CallPiece(0, "a"), CallPiece(1), CallPiece(None, "b"), CallPiece(0, "c")
    >>> [calls.take(piece)[0].number for piece in pieces]
    [0, 1, 0, 0, 2]
    """

    __slots__ = ("_by_id", "_by_index", "_last", "_size", "begun")

    def __init__(self) -> None:
        self.begun: list[ToolCall] = []
        self._by_index: dict[int, ToolCall] = {}
        self._by_id: dict[tuple[int | None, str], ToolCall] = {}
        self._last: ToolCall | None = None
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self.begun)

    def take(self, piece: CallPiece) -> tuple[ToolCall, str]:
        """Adds a piece to its call; the call, and the arguments in the piece. Raises BackendDown for too many."""
        call = self._last = self._of(piece)
        words = call.add(piece.function)
        self._size += len(words)
        if self._size > MAX_HELD:
            raise BackendDown("the calls in the backend's answer are longer than 1 MiB")
        return call, words

    def take_whole(self, pieces: list[CallPiece]) -> list[ToolCall]:
        """The calls of a message, each of which is one piece."""
        for piece in pieces:
            self._begin(piece).add(piece.function)
        return self.begun

    def in_order(self) -> list[ToolCall]:
        """The calls as the model made them: by index, if each has one of its own."""
        order = {call.number: index for index, call in self._by_index.items()}
        if len(order) < len(self.begun):
            return self.begun
        return sorted(self.begun, key=lambda call: order[call.number])

    def _of(self, piece: CallPiece) -> ToolCall:
        index, given_id = piece.index, piece.id or ""
        call = self._by_id.get((index, given_id)) if given_id else None
        if call is None and index is not None:
            call = self._by_index.get(index)
            if call is not None and given_id and call.id:
                call = None
        elif call is None and not given_id and not self._is_next(piece):
            call = self._last
        if call is None:
            call = self._begin(piece)
        call.id = call.id or given_id
        if index is not None:
            self._by_index[index] = call
        if given_id:
            self._by_id[index, given_id] = self._by_id[None, given_id] = call
        return call

    def _is_next(self, piece: CallPiece) -> bool:
        """Whether a piece without an index or an id begins another call than the last."""
        last, named = self._last, piece.function is not None and piece.function.name
        return last is None or bool(named and not last.id and last.has_arguments)

    def _begin(self, piece: CallPiece) -> ToolCall:
        call = ToolCall(len(self.begun), piece.id or "")
        self.begun.append(call)
        self._size += _A_CALL
        return call


def is_object(text: str) -> bool:
    """Whether this is a whole JSON object.

    >>> is_object('{"n": 1e2}'), is_object('{"n": '), is_object("[]")
    (True, False, False)
    """
    try:
        _members(text)
    except NOT_JSON:
        return False
    return True
