"""The program of a llama-server as its process shows it: what changes slots, and the server does not tell. Blocks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import msgspec

from hive.errors import NotSupported

_OPTION = re.compile(r"--?(cache-type|ct[kv]|flash-attn|fa|rope|yarn|override-kv|control-vector|swa|kv|grp)\b")
"""Options of a llama-server that change what is in a slot, or its form, and which it does not tell."""
_VARIABLE = re.compile(rb"LLAMA_ARG_(CACHE_TYPE|FLASH_ATTN|ROPE|YARN|OVERRIDE_KV|SWA|KV|GRP)")
_WRITES_TO = "--slot-save-path"
MOST_BYTES = 262144
"""Of a command line, and of all variables. A process may have the kernel show any of its memory as these."""
MOST_OPTIONS = 64
MOST_OPTION_BYTES = 4096


class ServerProgram(msgspec.Struct, frozen=True):
    """`size`, `mtime_ns`, `inode`: of its file; `options`: words and variables by which slots differ."""

    size: int
    mtime_ns: int
    inode: int
    options: list[str]


def program_at(pid: int) -> ServerProgram:
    """Raises NotSupported where this user may not look at it, it has ended, or it shows more than a server does."""
    try:
        program = os.stat(f"/proc/{pid}/exe")
    except OSError:
        raise NotSupported(f"the program of process {pid} is not to be seen") from None
    options = [*options_in([word.decode(errors="replace") for word in _shown(pid, "cmdline")]), *_variables(pid)]
    if len(options) > MOST_OPTIONS or any(len(one.encode()) > MOST_OPTION_BYTES for one in options):
        raise NotSupported(f"process {pid} has more or longer options than a server that keeps slots")
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
    return sorted(one.decode(errors="replace") for one in _shown(pid, "environ") if _VARIABLE.match(one))


def _shown(pid: int, name: str) -> list[bytes]:
    """The words that the kernel shows of it. Raises NotSupported where they may be cut off: they are then not all."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as shown:
            content = shown.read(MOST_BYTES)
    except OSError:
        raise NotSupported(f"{name} of process {pid} is not to be seen") from None
    if len(content) >= MOST_BYTES:
        raise NotSupported(f"{name} of process {pid} has {MOST_BYTES} bytes or more")
    return content.rstrip(b"\0").split(b"\0")
