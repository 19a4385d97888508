"""The programs of inference servers, looked at for the daemon, which may not; of no other user's processes."""

from __future__ import annotations

import asyncio
import pwd

from hive.errors import NotFound, NotSupported
from hive.host.accounts import SERVERS
from hive.host.process import read_stat, real_uid
from hive.host.server_program import program_at
from hive.link.message import LinkMessage
from hive.link.slots import AskServerProgram, ServerProgramIs

VERBS: frozenset[type[LinkMessage]] = frozenset({AskServerProgram})


async def do(message: AskServerProgram) -> LinkMessage:
    """Carries it out. Raises NotFound, NotSupported."""
    return await asyncio.to_thread(_look, message)


def _look(message: AskServerProgram) -> ServerProgramIs:
    try:
        servers = pwd.getpwnam(SERVERS).pw_uid
    except KeyError:
        raise NotSupported(f"there is no user {SERVERS}") from None
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
