"""Programs of servers as the helper tells of them, from a real process: of one user, and of no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hive.errors import NotFound, NotSupported
from hive.host.process import read_stat
from hive.link.slots import AskServerProgram
from hive.sandbox.server import MAY_ASK
from hive.slots.server_programs import look


@pytest.fixture
def server() -> Iterator[AskServerProgram]:
    with running(["-ctk", "q8_0", "--port", "1"], {"LLAMA_ARG_FLASH_ATTN": "on", "LLAMA_ARG_THREADS": "2"}) as asked:
        yield asked


@contextmanager
def running(
    words: list[str], more: dict[str, str], program: str = "print(1, flush=True); input()"
) -> Iterator[AskServerProgram]:
    command, variables = [sys.executable, "-c", program, *words], {**os.environ, **more}
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


LONG = "x" * 100_000
LIES = """
import ctypes, struct
libc = ctypes.CDLL(None)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
size = 64 << 20
at = libc.mmap(None, size, 3, 0x4022, -1, 0)
stat = [0] * 3 + open("/proc/self/stat").read().rsplit(")", 1)[1].split()
told = [int(stat[n]) for n in (26, 27, 45, 46, 47)] + [libc.sbrk(0)] + [int(stat[n]) for n in (28, 48, 49)]
told = struct.pack("<11QQII", *told, at, at + size, 0, 0, 0xFFFFFFFF)
print(libc.prctl(35, 14, ctypes.c_char_p(told), len(told), 0) == 0 and len(open("/proc/self/environ", "rb").read()))
input()
"""
"""Has the kernel show 64 MiB of zeros as its variables (PR_SET_MM_MAP), which takes no privilege."""


@pytest.mark.parametrize(
    ("words", "variables", "program"),
    [
        (["-ctk", LONG], {}, ""),
        (["-ctk", "q8_0"] * 33, {}, ""),
        ([LONG, LONG, LONG], {}, ""),
        ([], {"LLAMA_ARG_KV": LONG}, ""),
        ([], {f"LLAMA_ARG_KV{n}": "1" for n in range(65)}, ""),
        ([], {f"OTHER_{n}": LONG for n in range(3)}, ""),
        ([], {}, LIES),
    ],
)
def test_a_server_that_shows_more_than_any_has_is_not_supported(
    words: list[str], variables: dict[str, str], program: str
) -> None:
    with running(words, variables, *([program] if program else [])) as asked, pytest.raises(NotSupported):
        look(asked, os.getuid())


def test_nobody_but_the_daemon_may_ask() -> None:
    assert [role for role, verbs in MAY_ASK.items() if AskServerProgram in verbs] == ["daemon"]
