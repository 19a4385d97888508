"""The program of a llama-server as its process shows it: what changes slots, and the server does not tell. Blocks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hive.errors import NotSupported
from hive.host.process import words_of

_OPTION = re.compile(r"--?(cache-type|ct[kv]|flash-attn|fa|rope|yarn|override-kv|control-vector|swa|kv|grp)\b")
"""Options of a llama-server that change what is in a slot, or its form, and which it does not tell."""
_VARIABLE = re.compile(rb"LLAMA_ARG_(CACHE_TYPE|FLASH_ATTN|ROPE|YARN|OVERRIDE_KV|SWA|KV|GRP)")
_WRITES_TO = "--slot-save-path"


class ServerProgram(msgspec.Struct, frozen=True):
    """`size`, `mtime_ns`, `inode`: of its file; `options`: words and variables by which slots differ."""

    size: int
    mtime_ns: int
    inode: int
    options: list[str]


def program_at(pid: int) -> ServerProgram:
    """Raises NotSupported where this user may not look at it, or it has ended."""
    try:
        program = os.stat(f"/proc/{pid}/exe")
    except OSError:
        raise NotSupported(f"the program of process {pid} is not to be seen") from None
    options = [*options_in(words_of(pid)), *_variables(pid)]
    return ServerProgram(program.st_size, program.st_mtime_ns, program.st_ino, options)


def options_in(words: Sequence[str]) -> list[str]:
    """The options, with their values, by which slots differ.

    >>> options_in(["server", "-m", "x", "-ctk", "q8_0", "--port", "1", "--rope-freq-base=1e6"])
    ['-ctk', 'q8_0', '--rope-freq-base=1e6']
    """
    found = list[str]()
    for at, word in enumerate(words):
        if _OPTION.match(word):
            found.append(word)
            found += [value for value in words[at + 1 : at + 2] if not value.startswith("--")]
    return found


def writes_slots_to(words: Sequence[str]) -> str:
    """The directory that its command line names for slots; empty for none.

    >>> writes_slots_to(["server", "--slot-save-path", "/d", "--metrics"]), writes_slots_to(["server"])
    ('/d', '')
    """
    found = [words[at + 1] for at, word in enumerate(words[:-1]) if word == _WRITES_TO]
    return found[-1] if found else ""


def _variables(pid: int) -> list[str]:
    try:
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        raise NotSupported("the variables of the server are not to be seen") from None
    return sorted(one.decode(errors="replace") for one in given if _VARIABLE.match(one))
