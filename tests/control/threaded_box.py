"""A box whose loop runs in a thread: a real daemon beside what is synchronous, such as the command line."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.control.box import Box

Result = TypeVar("Result")
WITHIN_S = 60.0


class ThreadedBox:
    """`box` is used inside its loop only: by `do` and `call`."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.box.paths.state.mkdir()
        self.box.paths.runtime.mkdir()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="box")
        self._thread.start()

    @property
    def socket(self) -> Path:
        """The address at which the API listens."""
        return self.box.paths.api_socket

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs it in the loop; returns once it has ended."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WITHIN_S)

    def call(self, act: Callable[..., Result], *args: Any) -> Result:
        """Calls it in the loop."""

        async def once() -> Result:
            return act(*args)

        return self.do(once())

    def close(self) -> None:
        try:
            self.do(self.box.end())
            self.do(self._loop.shutdown_default_executor())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WITHIN_S)
            self._loop.close()


@contextmanager
def threaded_box(make: Callable[[Path], Box] = Box) -> Iterator[ThreadedBox]:
    """A new one in a directory with a short name; nothing is begun in it."""
    directory = Path(tempfile.mkdtemp(prefix="hive-"))
    try:
        threaded = ThreadedBox(make(directory))
        try:
            yield threaded
        finally:
            threaded.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
