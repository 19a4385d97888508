"""The parts of a request: its body, the names in its path, and its query.

Each parameter is one object, which reads it and describes it in the API's description.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.requests import Request

from hive.control import schedule_times
from hive.errors import BadRequest, TooLarge, WrongMediaType, did_you_mean

Schema = dict[str, Any]
Body = TypeVar("Body")

JSON = "application/json"
BODY_MAX_BYTES = 1024 * 1024
BODY = "hive.body"
"""Key in the scope of the request's whole body."""
LENGTH = "^([0-9]{1,6}[smhd])+$"


class Param(Protocol):
    """One parameter of a query."""

    @property
    def name(self) -> str: ...

    @property
    def says(self) -> str:
        """Its effect, in one sentence."""

    def of(self, request: Request) -> Any:
        """Its value. Raises BadRequest that names it."""

    def schema(self) -> Schema:
        """Its permitted values, as JSON Schema."""


class Number(NamedTuple):
    """A whole number from `least` to `most`."""

    name: str
    says: str
    default: int
    most: int
    least: int = 0

    def of(self, request: Request) -> int:
        text = request.query_params.get(self.name, str(self.default))
        if not re.fullmatch("[0-9]{1,15}", text) or not self.least <= int(text) <= self.most:
            raise BadRequest(
                f"{self.name}: expected a whole number from {self.least} to {self.most}, found {text[:20]!r}"
            )
        return int(text)

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.least, "maximum": self.most, "default": self.default}


class Flag(NamedTuple):
    """0 or 1."""

    name: str
    says: str

    def of(self, request: Request) -> bool:
        text = request.query_params.get(self.name, "0")
        if text not in ("0", "1"):
            raise BadRequest(f"{self.name}: expected 0 or 1, found {text[:20]!r}")
        return text == "1"

    def schema(self) -> Schema:
        return {"type": "integer", "enum": [0, 1], "default": 0}


class WordParam(NamedTuple):
    """One of some words."""

    name: str
    says: str
    words: Sequence[str]
    default: str

    def of(self, request: Request) -> str:
        text = request.query_params.get(self.name, self.default)
        if text not in self.words:
            raise BadRequest(f"{self.name}: expected one of {', '.join(self.words)}, found {text[:20]!r}")
        return text

    def schema(self) -> Schema:
        return {"type": "string", "enum": [*self.words], "default": self.default}


class Text(NamedTuple):
    """A name of something; None where it is not given."""

    name: str
    says: str

    def of(self, request: Request) -> str | None:
        return request.query_params.get(self.name)

    def schema(self) -> Schema:
        return {"type": "string"}


class Header(NamedTuple):
    """A field of the head, given once at most; None where it is not given. `pattern`: of its value."""

    name: str
    says: str
    pattern: str

    def of(self, request: Request) -> str | None:
        found = request.headers.getlist(self.name)
        if len(found) > 1 or (found and not re.fullmatch(self.pattern, found[0])):
            raise BadRequest(f"{self.name}: expected one value like {self.pattern}, found {', '.join(found)[:20]!r}")
        return found[0] if found else None

    def schema(self) -> Schema:
        return {"type": "string", "pattern": self.pattern}


class Words(NamedTuple):
    """Several, in their order: given as often as there are words. At least one."""

    name: str
    says: str
    most: int

    def of(self, request: Request) -> list[str]:
        found = request.query_params.getlist(self.name)
        if not 0 < len(found) <= self.most or not found[0]:
            raise BadRequest(f"{self.name}: expected 1 to {self.most} words, of which the first is not empty")
        return found

    def schema(self) -> Schema:
        return {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": self.most}


class Span(NamedTuple):
    """Seconds, given as a length of time: `90s`, `1h30m`. None where it is not given and has no default."""

    name: str
    says: str
    default: str | None = None

    def of(self, request: Request) -> float | None:
        text = request.query_params.get(self.name, self.default)
        return None if text is None else schedule_times.seconds_of(text, field=self.name)

    def schema(self) -> Schema:
        known = {"type": "string", "pattern": LENGTH}
        return known if self.default is None else {**known, "default": self.default}


WAIT = Number("wait_s", "Answer once it is over, or after so many seconds.", default=0, most=600)
FOLLOW = Flag("follow", "1: go on as more comes, until the daemon ends.")


def check_query(request: Request, known: Sequence[Param]) -> None:
    """Raises BadRequest for a parameter that is none of these, or is given twice: a typo would else go unnoticed."""
    names, several = [param.name for param in known], [param.name for param in known if isinstance(param, Words)]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in names:
            says = f"there are {', '.join(names)}" if names else "there is none here"
            raise BadRequest(f"{name[:40]!r} is no parameter: {says}", hint=did_you_mean(name, names))
        if given.count(name) > 1 and name not in several:
            raise BadRequest(f"{name}: given {given.count(name)} times")


async def received(request: Request) -> bytes:
    """The whole body. Raises TooLarge."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_MAX_BYTES:
            raise TooLarge(f"the body is larger than {BODY_MAX_BYTES} bytes")
    return bytes(data)


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether they say that the body is JSON as it stands, or nothing of it: a form of a page of the web says else.

    >>> [is_json({"content-type": kind}) for kind in ("application/json; charset=utf-8", "text/plain")], is_json({})
    ([True, False], True)
    """
    kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    return kind == JSON and headers.get("content-encoding", "identity").lower() == "identity"


def _check_once(pairs: list[tuple[str, Any]]) -> None:
    """Refuses a member that is there twice: msgspec takes the last, as most do, but the writer meant one of them."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise BadRequest(f"{name[:40]!r} is there more than once")
        seen.add(name)


def body_of(request: Request, shape: type[Body], *, empty: Body | None = None) -> Body:
    """The body as this shape; `empty` where there is none. Raises BadRequest."""
    data = request.scope[BODY]
    if not data and empty is not None:
        return empty
    if not is_json(request.headers):
        raise WrongMediaType
    try:
        decoded = _decoded(data, shape)
        json.loads(data, object_pairs_hook=_check_once)
        return decoded
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not what is expected here: {error}") from None


def _decoded(data: bytes, shape: type[Body]) -> Body:
    """The object. JSON has one kind of number, and for JSON Schema 5.0 is an integer; msgspec takes it for none."""
    try:
        return msgspec.json.decode(data, type=shape)
    except msgspec.ValidationError as error:
        with contextlib.suppress(msgspec.ValidationError, ValueError, RecursionError):
            return msgspec.convert(json.loads(data, parse_float=_number), type=shape)
        raise error from None


def _number(text: str) -> int | float:
    """
    >>> _number("5.0"), _number("1e3"), _number("0.5"), _number("1e999")
    (5, 1000, 0.5, inf)
    """
    value = float(text)
    return int(value) if value.is_integer() else value


def named(request: Request, of: str = "ref") -> str:
    """The name in the path; quoted once more by our client, so that a slash in it is no part of the path."""
    return unquote(request.path_params[of])
