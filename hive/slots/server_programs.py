"""The programs of inference servers, looked at for the daemon, which may not; of no other user's processes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from hive.errors import NotFound, NotSupported
from hive.host.accounts import SERVERS, servers_uid
from hive.host.process import read_stat, real_uid
from hive.host.server_program import program_at
from hive.link.message import LinkMessage
from hive.link.slots import AskServerProgram, ServerProgramIs

VERBS: frozenset[type[LinkMessage]] = frozenset({AskServerProgram})
_thread = ThreadPoolExecutor(1, thread_name_prefix="server-programs")
"""One look at a time, and none in a thread that agents wait for: how long one takes is up to the server."""


async def do(message: AskServerProgram) -> LinkMessage:
    """Carries it out. Raises NotFound, NotSupported."""
    return await asyncio.get_running_loop().run_in_executor(_thread, _look, message)


def _look(message: AskServerProgram) -> ServerProgramIs:
    servers = servers_uid()
    if servers is None:
        raise NotSupported(f"there is no user {SERVERS}")
    return look(message, servers)


def look(message: AskServerProgram, servers: int) -> ServerProgramIs:
    """`servers`: uid of whose processes are told of. Blocks. Raises NotFound, NotSupported."""
    _check(message, servers)
    found = program_at(message.pid)
    _check(message, servers)  # another process may have its number meanwhile
    return ServerProgramIs(size=found.size, mtime_ns=found.mtime_ns, inode=found.inode, options=found.options)


def _check(message: AskServerProgram, servers: int) -> None:
    stat = read_stat(message.pid)
    if stat is None or stat.start_ticks != message.start_ticks or real_uid(message.pid) != servers:
        raise NotFound(f"process {message.pid} is no inference server of Hive's")
