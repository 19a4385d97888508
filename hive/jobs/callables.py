"""Python functions as tools: the definition comes from the signature, the call runs here.

A plain function runs in a thread of its own, so that one that hangs holds up nobody; it cannot be ended, and its thread
ends with it or with the program. A coroutine is cancelled when its time is over. A generator, of either kind, gives its
result in pieces, and is closed when there is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec

from hive.errors import BadRequest
from hive.jobs.running import Tool, ToolFailed, named
from hive.jobs.tools import define

HANGING_MAX = 16
"""Calls of one plain function that still run, and that nobody waits for any more."""


def tool_of(function: Callable[..., Any], *, name: str = "", description: str = "") -> Tool:
    """A tool that calls `function` with named arguments. Its docstring's first paragraph is the description.

    Raises BadRequest for a signature of which no JSON Schema can be made.

    >>> def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool_of(add).definition.parameters["required"], tool_of(add).definition.description
    (['a'], 'Add two numbers.')
    """
    if not callable(function):
        raise BadRequest(f"a tool is a function, or Tool(read_definition(...), RUNNER), and this is {function!r:.200}")
    title = name or getattr(function, "__name__", "")
    types, required = _parameters(function, title)
    told = description or (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    return Tool(define(title, told, _schema(types, required, title)), CalledHere(function, types))


def _parameters(function: Callable[..., Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """Types by name, and the names without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = typing.get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise BadRequest(f"tool {name}: its signature cannot be read: {error}") from None
    for one in parameters:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise BadRequest(f"tool {name}: a tool has named parameters only, and {one} is none")
    types = {one.name: hints.get(one.name, Any) for one in parameters}
    return types, [one.name for one in parameters if one.default is one.empty]


def _schema(types: Mapping[str, Any], required: list[str], name: str) -> dict[str, Any]:
    try:
        schemas, definitions = msgspec.json.schema_components(list(types.values()), ref_template="#/$defs/{name}")
    except TypeError as error:
        raise BadRequest(f"tool {name}: {error}") from None
    properties = dict(zip(types, schemas, strict=True))
    found = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return found | ({"$defs": dict(definitions)} if definitions else {})


class CalledHere:
    """One function. Raises ToolFailed where its arguments are of another type than it says."""

    def __init__(self, function: Callable[..., Any], types: Mapping[str, Any]) -> None:
        self._function = function
        self._types = types
        self._left = 0
        """Running calls that nobody waits for."""

    def __repr__(self) -> str:
        return f"<CalledHere {self._function!r}, {self._left} hanging>"

    async def run(self, name: str, arguments: Mapping[str, Any], *, max_bytes: int) -> str:
        given = {key: _converted(value, self._types[key]) for key, value in arguments.items()}
        if inspect.isasyncgenfunction(self._function) or inspect.iscoroutinefunction(self._function):
            found = self._function(**given)
        else:
            found = await self._in_thread(name, given, max_bytes)
        if isinstance(found, AsyncIterator):
            return await _collected(found, max_bytes)
        return text_of(await found) if inspect.isawaitable(found) else str(found)

    async def _in_thread(self, name: str, given: Mapping[str, Any], max_bytes: int) -> Any:
        if self._left >= HANGING_MAX:
            raise ToolFailed(f"{self._left} earlier calls of {name} have not ended")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def tell(outcome: Any) -> None:
            if not ended.cancelled():
                ended.set_result(outcome)
                return
            self._left -= 1
            if inspect.iscoroutine(outcome):
                outcome.close()

        def body() -> None:
            try:
                outcome = context.run(self._called, given, max_bytes)
            except BaseException as error:  # a thread's end is nobody's news otherwise
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(tell, outcome)

        threading.Thread(target=body, name=f"tool-{name}", daemon=True).start()
        try:
            outcome = await ended
        except asyncio.CancelledError:
            self._left += ended.cancelled()
            raise
        if isinstance(outcome, BaseException):
            raise ToolFailed(named(outcome))
        return outcome

    def _called(self, given: Mapping[str, Any], max_bytes: int) -> Any:
        """Text; or what is to be awaited, where a decorator hides a coroutine or a generator of that kind."""
        found = self._function(**given)
        if inspect.isawaitable(found) or isinstance(found, AsyncIterator):
            return found
        return _joined(found, max_bytes) if isinstance(found, Iterator) else text_of(found)


def _converted(value: Any, wanted: Any) -> Any:
    """A value of JSON as the function's type. JSON Schema takes 1.0 for an integer; msgspec does as 1 only."""
    try:
        return msgspec.convert(value, wanted, str_keys=True)
    except msgspec.ValidationError as error:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(_whole(value), wanted, str_keys=True)
        raise ToolFailed(f"the arguments do not match: {error}") from None


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _joined(pieces: Iterator[Any], max_bytes: int) -> str:
    found, length = [], 0
    for piece in pieces:
        found.append(text_of(piece))
        length += len(found[-1])
        if length > max_bytes:
            break
    if close := getattr(pieces, "close", None):
        close()
    return "".join(found)


async def _collected(pieces: AsyncIterator[Any], max_bytes: int) -> str:
    found, length = [], 0
    try:
        async for piece in pieces:
            found.append(text_of(piece))
            length += len(found[-1])
            if length > max_bytes:
                break
            await asyncio.sleep(0)  # one that never waits would let nobody else run
    finally:
        if close := getattr(pieces, "aclose", None):
            await close()
    return "".join(found)


def text_of(value: Any) -> str:
    """A result as the model reads it: text as it is, all else as JSON.

    >>> text_of("a"), text_of({"n": 1}), text_of(b"a"), text_of(None)
    ('a', '{"n":1}', 'a', 'null')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return msgspec.json.encode(value, enc_hook=str).decode()
