"""Blocking calls, each in a thread of its own beside the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(ask: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Returns or raises what `ask` does.

    Not `asyncio.to_thread`: its few threads are shared, so that verbs which wait for busy agents would keep the looks
    from having one; and the end of the loop waits for them. Nothing waits for these: an act asked for goes on in the
    daemon, its answer is not heard.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled under the thread's hands

    def answer() -> None:
        try:
            found = ask(*args, **named)
        except StopIteration as error:  # no future takes it: its awaiter would wait for ever
            outcome.set_exception(RuntimeError(repr(error)))
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(found)

    Thread(target=answer, name="hive top", daemon=True).start()
    return await asyncio.wrap_future(outcome)
