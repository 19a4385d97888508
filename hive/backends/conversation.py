"""One control question to a server as a conversation: what to send next follows from what was answered. Pure.

A conversation is a generator. It yields the questions that can be asked at once, and is given their answers in that
order, an error in the place of one that came to nothing; what it returns is what was wanted. `ask` carries it on.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import msgspec

from hive.errors import BackendDown, HiveError, NotFound

LOAD_S = 600.0
"""Longest wait for a model to be loaded: 100 GB from a disk that gives 200 MB/s."""
MOST_TEXT = 200
"""Characters of a short text in an answer that are shown to somebody."""
Result = TypeVar("Result")


class ControlAnswer(msgspec.Struct, frozen=True):
    """Answer to a question: status, header names in lower case, the whole body."""

    status: int
    headers: dict[str, str]
    body: bytes


class Question(msgspec.Struct, frozen=True):
    """`GET path`; with a `body` `POST path` with that as JSON. `within_s`: 0 for as long as a question may take."""

    path: str
    body: dict[str, object] | None = None
    within_s: float = 0


class AskedServer(msgspec.Struct, frozen=True):
    """Address of a server, as `BackendInfo` has it; `has_key`: it is shown a key."""

    address: str
    has_key: bool = False

    def __str__(self) -> str:
        return self.address


class Pause(msgspec.Struct, frozen=True):
    """Yielded instead of questions: nothing is asked for so long."""

    seconds: float


Conversation = Generator[tuple[Question, ...] | Pause, list[ControlAnswer | HiveError], Result]


def constant(result: Result) -> Conversation[Result]:
    """A conversation in which nothing is asked."""
    yield from ()
    return result


def post(path: str, body: dict[str, object], *, within_s: float) -> Conversation[ControlAnswer]:
    """The answer to `body`, whatever its status. Raises `BackendDown`, `BackendTimeout`."""
    (found,) = yield (Question(path, body, within_s),)
    return _answer(found)


def get(path: str, *, within_s: float = 0) -> Conversation[ControlAnswer]:
    """The answer, whatever its status. Raises `BackendDown`, `BackendTimeout`."""
    (found,) = yield (Question(path, within_s=within_s),)
    return _answer(found)


def texts(*paths: str) -> Conversation[list[bytes | None]]:
    """The 200 answers as they came; None for a path that has none in time."""
    found = yield tuple(Question(path) for path in paths)
    return [None if isinstance(one, HiveError) or one.status != 200 else one.body for one in found]


def text(path: str) -> Conversation[bytes | None]:
    """The 200 answer as it came; None where there is none in time."""
    (found,) = yield from texts(path)
    return found


def shape(server: AskedServer, path: str, wanted: type[Result]) -> Conversation[Result]:
    """The 200 answer, decoded; besides `get`'s errors `BackendDown` where it is not that."""
    return decoded(server, path, (yield from get(path)), wanted)


def decoded(server: AskedServer, path: str, answer: ControlAnswer, wanted: type[Result]) -> Result:
    """A 200 answer to `GET path`, as `wanted`. Raises `BackendDown` where it is not that."""
    if answer.status != 200:
        raise BackendDown(f"{server} answers GET {path} with status {answer.status}")
    try:
        return msgspec.json.decode(answer.body, type=wanted)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendDown(f"{server} answers GET {path} with something else: {error}") from None


def check_done(answer: ControlAnswer, server: AskedServer) -> None:
    """Raises NotFound, BackendDown where a model was not loaded or unloaded, in the server's own words."""
    if answer.status == 200:
        return
    said = " ".join(answer.body[:MOST_TEXT].decode(errors="replace").split())
    error = NotFound if answer.status == 404 else BackendDown
    raise error(f"{server} answers {answer.status}: {said}")


def _answer(found: ControlAnswer | HiveError) -> ControlAnswer:
    if isinstance(found, HiveError):
        raise found
    return found


# --- what an answer holds ----------------------------------------------------------------------------------------

Answers = Mapping[str, ControlAnswer]
"""By question: those to harmless GETs, by which a server is recognised."""


def json_of(answers: Answers, question: str) -> dict[str, Any]:
    """The JSON object a question was answered with under 200, else an empty one."""
    answer = answers.get(question)
    if answer is None or answer.status != 200:
        return {}
    return object_in(answer.body)


def object_in(body: bytes) -> dict[str, Any]:
    """A JSON object, an empty one where it is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def text_in(found: Mapping[str, Any], key: str) -> str:
    """A short printable text of an answer, else empty: it ends on a terminal."""
    value = found.get(key)
    return value if isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable() else ""
