"""Carrying out the calls of one turn: each within its time and size, a few at a time, the results in their order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from hive.jobs.toolloop import Fate, JudgedCall, LoopLimits
from hive.jobs.tools import ToolDefinition
from hive.tasks import spawn

log = logging.getLogger("hive.jobs")
FRAME_BYTES = 64
"""Room for what stands around a text that was cut."""
NOTED = "noted"
"""Result of a call that was a signal: templates want one for each call."""


class ToolFailed(Exception):
    """The tool gave no result, and the text says why; the model is told."""


class ToolRunner(Protocol):
    """Runs calls of tools. Whatever it raises is the result of that call alone."""

    async def run(self, name: str, arguments: Mapping[str, Any], *, max_bytes: int) -> str:
        """The text of the result. `arguments` match the tool's schema. It is cancelled when its time is over; of a text
        longer than `max_bytes` the rest is cut off, so it may stop there."""
        ...


class Tool(msgspec.Struct, frozen=True):
    """A tool and what runs it."""

    definition: ToolDefinition
    runner: ToolRunner


async def run_calls(
    calls: Sequence[JudgedCall], runners: Mapping[str, ToolRunner], limits: LoopLimits
) -> tuple[str, ...]:
    """A result for each call, in their order. When this is cancelled, so is all that it runs."""
    places = asyncio.Semaphore(limits.parallel)
    return tuple(await asyncio.gather(*(_result(call, runners, limits, places) for call in calls)))


async def _result(
    judged: JudgedCall, runners: Mapping[str, ToolRunner], limits: LoopLimits, places: asyncio.Semaphore
) -> str:
    if judged.fate is Fate.REFUSE:
        return error_text(judged.why, limits.result_max_bytes)
    if judged.fate is Fate.NOTE:
        return NOTED
    name = judged.call.name
    async with places:
        work = _outcome(runners[name], name, judged.arguments, limits.result_max_bytes)
        task = spawn(work, name=f"tool-{name}")
        try:
            await asyncio.wait({task}, timeout=limits.tool_timeout_s)
        finally:
            task.cancel()  # it may take no notice: nobody waits for it
    if not task.done():
        return error_text(f"{name} gave no result within {limits.tool_timeout_s:g} s")
    return error_text(f"{name} was cancelled") if task.cancelled() else task.result()


async def _outcome(runner: ToolRunner, name: str, arguments: Mapping[str, Any], max_bytes: int) -> str:
    try:
        return cut(await runner.run(name, arguments, max_bytes=max_bytes), max_bytes)
    except ToolFailed as error:
        return error_text(str(error), max_bytes)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a tool's own kind may be none of Exception: the others' calls go on all the same
        log.warning("tool_failed tool=%s error=%s", name, type(error).__name__)
        return error_text(named(error), max_bytes)


def named(error: BaseException) -> str:
    """An exception in words; its class alone where it cannot tell its own.

    >>> named(ValueError("no"))
    'ValueError: no'
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def error_text(why: str, max_bytes: int = 65536) -> str:
    """Result of a call that came to nothing.

    >>> error_text('no "x"')
    '{"error":"no \\\\"x\\\\""}'
    """
    room = max_bytes
    while len(found := msgspec.json.encode({"error": cut(why, room)})) > max_bytes + FRAME_BYTES and room:
        room = max(0, room * max_bytes // len(found) - FRAME_BYTES)  # JSON writes a control character in 6 bytes
    return found.decode()


def cut(text: str, max_bytes: int) -> str:
    """The text, or as much of it as fits, and a word that there was more. Half a surrogate pair becomes "?", as does
    NUL: llama-server without jinja takes it for the end of the message.

    >>> cut("ab", 2), cut("a\\u00e4b", 2), cut("\\ud83d\\0", 9)
    ('ab', 'a\\n[cut off after 2 bytes]', '??')
    """
    data = text[: max_bytes + 1].replace("\0", "?").encode(errors="replace")  # a character has a byte at least
    if len(data) <= max_bytes and len(text) <= max_bytes:
        return data.decode()
    return f"{data[:max_bytes].decode(errors='ignore')}\n[cut off after {max_bytes} bytes]"
