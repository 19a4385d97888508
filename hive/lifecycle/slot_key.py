"""Facts of a server by which a saved slot is good there, and which it does not tell: its files, program, options.

Of files nothing is known but what is on the disk now. So they count only where none has changed since the server began.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hive.errors import NotSupported
from hive.host.listener import TICK_S, ListeningProcess, listener_at
from hive.host.process import words_of

_OPTION = re.compile(r"--?(cache-type|ct[kv]|flash-attn|fa|rope|yarn|override-kv|control-vector|swa|kv|grp)\b")
"""Options of a llama-server that change what is in a slot, or its form, and which it does not tell."""
_VARIABLE = re.compile(rb"LLAMA_ARG_(CACHE_TYPE|FLASH_ATTN|ROPE|YARN|OVERRIDE_KV|SWA|KV|GRP)")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf\Z")


def facts_of(dialled: str, files: Iterable[str]) -> list[object]:
    """For a server at this address, which read these files when it began. Blocks.

    Raises NotSupported where its process or a file is not to be seen, or where a file has changed since.
    """
    server = listener_at(dialled)
    if server is None:
        raise NotSupported(f"the process at {dialled} is not to be seen")
    try:
        program = os.stat(f"/proc/{server.pid}/exe")
    except OSError:
        raise NotSupported(f"the program at {dialled} is not to be seen") from None
    read = [_facts(path, server) for file in files for path in _parts(file)]
    options = [*options_in(words_of(server.pid)), *_variables(server.pid)]
    return [program.st_size, program.st_mtime_ns, program.st_ino, options, read]


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


def _variables(pid: int) -> list[str]:
    try:
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        raise NotSupported("the variables of the server are not to be seen") from None
    return sorted(one.decode(errors="replace") for one in given if _VARIABLE.match(one))


def _parts(file: str) -> list[str]:
    """The file, or all files of a model that is split.

    >>> _parts("/m/a-00001-of-00002.gguf"), _parts("/m/b.gguf")
    (['/m/a-00001-of-00002.gguf', '/m/a-00002-of-00002.gguf'], ['/m/b.gguf'])
    """
    split = _PART.search(file)
    if split is None:
        return [file]
    return [f"{file[: split.start()]}-{part:05}-of-{split[1]}.gguf" for part in range(1, int(split[1]) + 1)]


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
