"""Facts of a server by which a saved slot is good there, and which it does not tell: its files, program, options.

Of files nothing is known but what is on the disk now. So they count only where none has changed since the server began.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from hive.errors import NotSupported
from hive.host.listener import TICK_S, ListeningProcess, listener_at
from hive.host.process import words_of
from hive.host.server_program import ServerProgram, program_at, writes_slots_to
from hive.link.slots import ServerProgramIs

MOST_FILES = 1024
"""Files that a server may have read: it names them itself, and each is looked at."""
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf\Z")

AskProgram = Callable[[int, int], Awaitable[ServerProgramIs]]
"""By pid and start, in ticks since boot."""


class SlotKeys:
    """`ask_program`: whoever may look at another user's processes tells of them, where servers are another user;
    `engine`: the directory they have to write slots to then."""

    def __init__(self, ask_program: AskProgram | None = None, engine: Path | None = None) -> None:
        self._ask_program = ask_program
        self._engine = engine

    def __repr__(self) -> str:
        return f"<SlotKeys {'of others' if self._ask_program else 'of this user'}>"

    async def facts_of(self, dialled: str, files: Iterable[str]) -> list[object]:
        """For a server at this address, which read these files when it began.

        Raises NotSupported where its process or a file is not to be seen, where a file has changed since, or where
        slots go elsewhere; whatever `ask_program` raises.
        """
        server = await asyncio.to_thread(_server_at, dialled)
        program: ServerProgram | ServerProgramIs
        if self._ask_program is None:
            program = await asyncio.to_thread(program_at, server.pid)
        else:
            await asyncio.to_thread(self._check_place, server)
            program = await self._ask_program(server.pid, server.start_ticks)
        return await asyncio.to_thread(_all_facts, server, program, list(files))

    def _check_place(self, server: ListeningProcess) -> None:
        """One that was started before the setting would leave files where nobody takes them away."""
        if self._engine is None or writes_slots_to(words_of(server.pid)) != str(self._engine):
            raise NotSupported(f"its server was not started to write into {self._engine}")


def _server_at(dialled: str) -> ListeningProcess:
    server = listener_at(dialled)
    if server is None:
        raise NotSupported(f"the process at {dialled} is not to be seen")
    return server


def _all_facts(server: ListeningProcess, program: ServerProgram | ServerProgramIs, files: list[str]) -> list[object]:
    paths = list(islice((path for file in files for path in _parts(file)), MOST_FILES + 1))
    if len(paths) > MOST_FILES:
        raise NotSupported(f"the server names more than {MOST_FILES} files")
    read = [_facts(path, server) for path in paths]
    return [program.size, program.mtime_ns, program.inode, program.options, read]


def _parts(file: str) -> Iterator[str]:
    """The file, or all files of a model that is split.

    >>> list(_parts("/m/a-00001-of-00002.gguf")), list(_parts("/m/b.gguf"))
    (['/m/a-00001-of-00002.gguf', '/m/a-00002-of-00002.gguf'], ['/m/b.gguf'])
    """
    split = _PART.search(file)
    if split is None:
        yield file
        return
    for part in range(1, int(split[1]) + 1):
        yield f"{file[: split.start()]}-{part:05}-of-{split[1]}.gguf"


def _facts(path: str, server: ListeningProcess) -> list[int]:
    if not path.startswith("/"):
        raise NotSupported(f"the server names the file {path!r} by no whole path")
    try:
        found, link = os.stat(path), os.lstat(path)
    except OSError:
        raise NotSupported(f"the file {path} is not to be seen") from None
    if max(found.st_ctime, link.st_ctime) > server.began_at + TICK_S:
        raise NotSupported(f"{Path(path).name} has changed since the server began")
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev]
