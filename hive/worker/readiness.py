"""Waiting for a server that was just started: until it listens, is loaded, and has generated a token."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from hive.errors import BackendDown
from hive.worker.child import ServerProcess
from hive.worker.stream import AnswerFailed, Clock, Progress, generates, status_of

HEALTH = "/health"
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.25
LOOK_SHARE = 0.05
"""Part of the time so far that passes until the next look: a load seems longer by that much at most."""


async def until_it_answers(process: ServerProcess, socket: Path, clock: Clock) -> None:
    """Returns once `GET /health` is answered with 200. Raises BackendDown where the process ends before."""
    began = clock()
    while await status_of(socket, HEALTH, Progress(clock)) != 200:
        wait_s = min(max(LOOK_SHARE * (clock() - began), SHORTEST_LOOK_S), LONGEST_LOOK_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await process.ended.wait()
        if not process.is_alive():
            raise BackendDown(f"the server ended with exit code {process.code} before it answered")


async def until_it_generates(process: ServerProcess, socket: Path, model: str, clock: Clock) -> None:
    """`until_it_answers`, and one token: a server may be healthy and die at its first request (vLLM 0.32 did).

    Raises BackendDown.
    """
    await until_it_answers(process, socket, clock)
    try:
        await generates(socket, model, clock)
    except AnswerFailed as error:
        raise BackendDown(f"asked for its first token the server failed: {error}") from None
    if not process.is_alive():
        raise BackendDown(f"the server ended with exit code {process.code} at its first request")
