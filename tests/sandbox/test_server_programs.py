"""Programs of servers as the helper tells of them, from a real process: of one user, and of no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hive.errors import NotFound
from hive.host.process import read_stat
from hive.link.slots import AskServerProgram
from hive.sandbox.server import MAY_ASK
from hive.slots.server_programs import look


@pytest.fixture
def server() -> Iterator[AskServerProgram]:
    command = [sys.executable, "-c", "print(1, flush=True); input()", "-ctk", "q8_0", "--port", "1"]
    variables = {**os.environ, "LLAMA_ARG_FLASH_ATTN": "on", "LLAMA_ARG_THREADS": "2"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = read_stat(process.pid)
        assert stat is not None
        yield AskServerProgram(pid=process.pid, start_ticks=stat.start_ticks)
        process.kill()


def test_of_a_server_its_file_is_told_and_the_words_by_which_slots_differ(server: AskServerProgram) -> None:
    told = look(server, os.getuid())
    found = os.stat(sys.executable)
    assert (told.size, told.mtime_ns, told.inode) == (found.st_size, found.st_mtime_ns, found.st_ino)
    assert told.options == ["-ctk", "q8_0", "LLAMA_ARG_FLASH_ATTN=on"]


def test_of_no_other_users_process_and_of_none_that_took_a_number_again_anything_is_told(
    server: AskServerProgram,
) -> None:
    for asked, servers in (
        (server, os.getuid() + 1),
        (AskServerProgram(pid=server.pid, start_ticks=server.start_ticks - 1), os.getuid()),
        (AskServerProgram(pid=2**22 + 1, start_ticks=1), os.getuid()),
    ):
        with pytest.raises(NotFound):
            look(asked, servers)


def test_nobody_but_the_daemon_may_ask() -> None:
    assert [role for role, verbs in MAY_ASK.items() if AskServerProgram in verbs] == ["daemon"]
