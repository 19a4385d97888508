"""Claims for any bytes: a function for each parser, given bytes and where to cut them. Raises where one fails.

Each compares the real parser with itself on other cuts, and with a second, slower reading written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from hive.bodies.body import Opening, Want
from hive.bodies.fields import FieldTable
from hive.bodies.form import as_object, sent_form
from hive.bodies.form_reader import FormReader
from hive.dialects.ndjson import NdjsonReader
from hive.dialects.sse import SseReader
from hive.domain import Tier
from hive.errors import HiveError
from hive.settings.table import Settings
from hive.wire.chunks import BadChunks, ChunkDecoder
from hive.wire.heads import BadResponse
from hive.wire.http1 import KnownHead, Request, RequestParser, Response, ResponseParser
from tests.bodies.reading import read_body

MAX_BODY = 4096
REFUSALS = frozenset({400, 405, 413, 414, 417, 431, 501, 505})
"""All that the wire itself answers to a malformed request."""
Target = Callable[[bytes, list[int]], None]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` in pieces, cut at these places."""
    places = sorted({place % (len(data) + 1) for place in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b]


# requests -------------------------------------------------------------------------------------------------------------


class _Seen:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def on_head(self, request: Request) -> None:
        assert not request.complete

    def on_body(self, request: Request, size: int) -> None:
        assert 0 < size <= request.body_bytes <= MAX_BODY

    def on_request(self, request: Request) -> None:
        self.requests.append(request)


def _requests(pieces: list[bytes]) -> tuple[list[Request], bool]:
    """(the requests that were complete, whether what followed them was refused)."""
    seen = _Seen()
    parser = RequestParser(seen, max_body=MAX_BODY)
    try:
        for piece in pieces:
            while piece:
                rest = parser.feed(piece)
                assert len(rest) < len(piece)
                piece = rest
    except HiveError as error:
        if error.status not in REFUSALS:
            raise AssertionError(f"refused with {error.status}") from error
        return seen.requests, True
    return seen.requests, False


def _said(requests: list[Request]) -> list[tuple[object, ...]]:
    return [
        (each.method, each.target, each.fields, b"".join(each.body), each.keep_alive, each.expects) for each in requests
    ]


def head(data: bytes, cuts: list[int]) -> None:
    """Requests do not depend on the cuts, and each is one that a strict second reading takes for the same."""
    whole, refused = _requests([data])
    pieces, refused_in_pieces = _requests(cut(data, cuts))
    assert (_said(pieces), refused_in_pieces) == (_said(whole), refused)
    at = 0
    for request in whole:
        at += 2 * data.startswith(b"\r\n", at)
        end = data.index(b"\r\n\r\n", at)
        _check_head(data[at:end], request)
        at = end + 4
        if request.content_length is None:
            content, after = _dechunk(data, at)
            assert content == b"".join(request.body)
            at = after
        else:
            assert data[at : at + request.content_length] == b"".join(request.body)
            at += request.content_length


def _check_head(raw: bytes, request: Request) -> None:
    line, *lines = raw.split(b"\r\n")
    method, target, version = line.split(b" ")
    assert (method, target) == (request.method, request.target)
    assert version in (b"HTTP/1.0", b"HTTP/1.1")
    assert not re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", raw.replace(b"\r\n", b""))
    assert re.fullmatch(rb"/[!-~]*", target)
    pairs = [each.split(b":", 1) for each in lines]
    fields = [(name.lower(), value.strip(b" \t")) for name, value in pairs]
    assert [field for field in fields if field[0] != b"content-length"] == request.fields
    assert all(re.fullmatch(rb"[!#$%&'*+.^`|~0-9A-Za-z-]+", name) for name, _ in pairs)
    names = [name for name, _ in fields]
    assert names.count(b"host") == 1 or version == b"HTTP/1.0"
    assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
    assert (b"transfer-encoding" in names) == (request.content_length is None)


# chunks ---------------------------------------------------------------------------------------------------------------


def _dechunk(data: bytes, at: int) -> tuple[bytes, int]:
    """(content, where the body ends) of a chunked body, read as RFC 9112 §7.1 writes it. Raises ValueError."""
    content = b""
    while True:
        end = data.index(b"\r\n", at)
        size = re.fullmatch(rb"([0-9A-Fa-f]+)(;[^\r\n]+)?", data[at:end])
        if size is None:
            raise ValueError(data[at:end])
        length, at = int(size[1], 16), end + 2
        if length == 0:
            break
        content += data[at : at + length]
        if data[at + length : at + length + 2] != b"\r\n":
            raise ValueError("no line end after a chunk")
        at += length + 2
    while not data.startswith(b"\r\n", at):
        end = data.index(b"\r\n", at)
        if b":" not in data[at:end]:
            raise ValueError("no field")
        at = end + 2
    return content, at + 2


def _decoded(pieces: list[bytes]) -> tuple[bytes, bytes | None] | None:
    """(content, what follows it or None where it is not at its end); None where it is malformed."""
    decoder, content = ChunkDecoder(), b""
    for number, piece in enumerate(pieces):
        try:
            more, rest = decoder.feed(piece)
        except BadChunks:
            return None
        content += more
        if rest is not None:
            return content, rest + b"".join(pieces[number + 1 :])
    return content, None


def chunk(data: bytes, cuts: list[int]) -> None:
    """Chunks do not depend on the cuts, and decode to what a second reading finds."""
    whole = _decoded([data])
    assert _decoded(cut(data, cuts)) == whole
    if whole is not None and whole[1] is not None:
        content, end = _dechunk(data, 0)
        assert (content, data[end:]) == whole


# answers --------------------------------------------------------------------------------------------------------------


def _answer(pieces: list[bytes], known: KnownHead[Response] | None = None) -> tuple[object, ...] | None:
    parser, content = ResponseParser(known), b""
    try:
        for piece in pieces:
            content += parser.feed(piece)
    except BadResponse:
        return None
    if parser.head is None:
        return (None,)
    head = parser.head
    assert 200 <= head.status <= 599
    assert not (head.chunked and head.content_length is not None)
    assert parser.complete or len(content) != head.content_length
    return head.status, head.fields, head.content_length, head.keep_alive, content, parser.complete


def answer(data: bytes, cuts: list[int]) -> None:
    """Answers do not depend on the cuts nor on what was answered before; what is bad stays bad."""
    whole = _answer([data])
    assert _answer(cut(data, cuts)) == whole
    known = KnownHead(Response())
    assert _answer([data], known) == whole
    assert _answer([data], known) == whole


# streams --------------------------------------------------------------------------------------------------------------


def ndjson(data: bytes, cuts: list[int]) -> None:
    """Lines are what lies between line feeds."""
    reader = NdjsonReader()
    lines = [line for piece in cut(data, cuts) for line in reader.feed(piece)]
    assert lines == [line for line in data.split(b"\n")[:-1] if line]


def sse(data: bytes, cuts: list[int]) -> None:
    """Events are what the standard's line-by-line reading finds."""
    reader = SseReader()
    events = [event for piece in cut(data, cuts) for event in reader.feed(piece)] + reader.end()
    expected: list[bytes] = []
    lines: list[bytes] = []
    for line in re.split(rb"\r\n|\r|\n", data)[:-1]:
        name, _, value = line.partition(b":")
        if not line:
            expected.append(b"\n".join(lines))
            lines.clear()
        elif name == b"data" and b":" in line:
            lines.append(value.removeprefix(b" "))
    assert events == [event for event in expected if event]


# bodies ---------------------------------------------------------------------------------------------------------------


TABLE = FieldTable(Settings())
CLOSED = ("keep_alive", "cache_salt", "priority", "chat_template", "lora", "kv_transfer_params", "mm_processor_kwargs")


def request_body(data: bytes, cuts: list[int]) -> None:
    """A body is refused, or what goes upstream is one object of unique names without what is closed, and stays so."""
    target = BODIES[len(cuts) % len(BODIES)]
    rules = TABLE.rules(target, list(Tier)[sum(cuts) % 3])
    want, opening = Want(ask_usage=target.endswith("/completions")), Opening("m", streams=bool(cuts))
    try:
        asked = read_body(data, rules, want, opening)
    except HiveError as error:
        if error.status not in (400, 413):
            raise
        return
    sent = b"".join(asked.upstream)
    if asked.loading:
        assert not sent
        return
    pairs = msgspec.json.decode(sent, type=dict[str, msgspec.Raw])
    assert asked.size == len(sent)
    assert len({name.casefold() for name in pairs}) == len(pairs)
    assert not pairs.keys() & set(CLOSED)
    assert msgspec.json.decode(pairs["model"]) == asked.model  # a number elsewhere may be one no double holds
    assert all(0x21 <= ord(char) <= 0x7E for name in asked.dropped + asked.clamped for char in name)
    again = read_body(sent, rules, want, opening)
    assert again.upstream == [sent]
    assert not again.dropped + again.clamped
    assert (again.model, again.stream, again.max_tokens) == (asked.model, asked.stream, asked.max_tokens)
    if "messages" in rules.fields.media | rules.fields.policed.keys():
        assert not _fetches(msgspec.json.decode(pairs.get("messages", b"0")))


BODIES = (
    "/v1/chat/completions",
    "/api/chat",
    "/api/generate",
    "/v1/messages",
    "/v1/completions",
    "/api/show",
    "/v1/responses",
)


def _fetches(value: object, *, media: bool = False) -> bool:
    """Whether some part of some `content` names an `image_url` that is not sent along."""
    if isinstance(value, list):
        return any(_fetches(item, media=media) for item in value)
    if isinstance(value, dict):
        inner = [(name.casefold(), item) for name, item in value.items()]
        wanted = ("url",) if media else ("content", "image_url")
        return any(_fetches(item, media=media or name == "image_url") for name, item in inner if name in wanted)
    return media and isinstance(value, str) and value != "" and not value.startswith("data:")


# forms ----------------------------------------------------------------------------------------------------------------


FORM_BOUNDARY = b"xx-b"


def _check_refusal(error: HiveError) -> None:
    assert error.status in (400, 413), error


def _form(pieces: list[bytes]) -> tuple[list[tuple[str, bytes]], bytes] | None:
    """(the text fields, the file); None where it was refused."""
    file: list[bytes] = []
    reader = FormReader(FORM_BOUNDARY, file.append)
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.end()
    except HiveError as error:
        _check_refusal(error)
        return None
    return reader.fields, b"".join(file)


def form(data: bytes, cuts: list[int]) -> None:
    """A form does not depend on the cuts; what it holds is what a second reading finds; what goes upstream is read by
    both as the same fields, judged, and the same file."""
    whole = _form([data])
    assert _form(cut(data, cuts)) == whole
    if whole is None:
        return
    fields, file = whole
    assert sorted(_form_values(data)) == sorted([*(value for _, value in fields), file])
    target = "/v1/audio/transcriptions"
    try:
        text = as_object(target, fields)
        asked = read_body(text, FieldTable(Settings()).rules(target, Tier.LOW), Want(), Opening())
    except HiveError as error:
        _check_refusal(error)
        return
    before, after = sent_form(target, asked.upstream[0], b"hive")
    head, _, _ = before.rpartition(b"\r\n\r\n")
    assert re.findall(rb'(?:\A|\r\n)--hive\r\nContent-Disposition: form-data; name="([^"]*)"', head)[-1:] == [b"file"]
    assert after == b"\r\n--hive--\r\n"


def _form_values(data: bytes) -> list[bytes]:
    """The contents of the parts of a form that was taken: each from the end of its head to the next boundary."""
    found, at = [], len(FORM_BOUNDARY) + 2
    while data[at : at + 2] != b"--":
        begin = data.index(b"\r\n\r\n", at) + 4
        end = data.index(b"\r\n--" + FORM_BOUNDARY, begin)
        found.append(data[begin:end])
        at = end + 4 + len(FORM_BOUNDARY)
    return found


TARGETS: dict[str, Target] = {
    "head": head,
    "chunk": chunk,
    "answer": answer,
    "ndjson": ndjson,
    "sse": sse,
    "body": request_body,
    "form": form,
}
