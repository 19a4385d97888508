"""The one way to start a task: named, kept until done, its exception logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("hive.tasks")
_kept: set[asyncio.Task[Any]] = set()
Result = TypeVar("Result")


def spawn(work: Coroutine[Any, Any, Result], *, name: str) -> asyncio.Task[Result]:
    """Starts `work`; the loop alone keeps only a weak reference to a task, so this keeps a strong one."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _kept.add(task)
    task.add_done_callback(_done)
    return task


def _done(task: asyncio.Task[Any]) -> None:
    _kept.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task_failed task=%s", task.get_name(), exc_info=error)
