"""The programs of a template as text, for a process that may not read Hive's files: a clone in /root is closed to it.

Used by Hive, not by a template. The fork server is handed over as one file that is on no disk: with the modules beside
it, and with the file of `hive` that a script imports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(os.path.abspath(__file__)).parent
FILES = {
    "hive": HERE.parent / "__init__.py",
    **{name: HERE / f"{name}.py" for name in ("fork_server", "kernel", "reset", "script", "unit_setup", "warm")},
}
NAME = "fork_server.py"
"""The word of its command line by which `ps` shows what it is."""
_BEGIN = '''"""A template's fork server, handed over by Hive in the descriptor that this program is read from."""
import os
import sys
os.close(int(os.path.basename(sys.argv[0])))
sys.path.pop(0)
SOURCES = {sources!r}
exec(compile(SOURCES["fork_server"][1], SOURCES["fork_server"][0], "exec", dont_inherit=True))
'''


def fork_server() -> str:
    """The whole program, for `python /proc/self/fd/N [FD]`. Raises OSError where Hive cannot read its own files."""
    sources = {name: (str(path), path.read_text(encoding="utf-8")) for name, path in FILES.items()}
    return _BEGIN.format(sources=sources)


@contextmanager
def opened_fork_server() -> Iterator[int]:
    """A descriptor of that program, closed here at the end. Each template gets one of its own: it may write to it."""
    with open(os.memfd_create(NAME, os.MFD_CLOEXEC), "w", encoding="utf-8") as file:
        file.write(fork_server())
        file.flush()
        yield file.fileno()


def command(python: str, program_fd: int, control_fd: int) -> list[str]:
    """The command line by which `python` runs the program.

    >>> command("/v/bin/python", 4, 3)
    ['/v/bin/python', '/proc/self/fd/4', '3', 'fork_server.py']
    """
    return [python, f"/proc/self/fd/{program_fd}", str(control_fd), NAME]
