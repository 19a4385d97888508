"""The cost of the command line before it does anything (design.md §8, SPECIFICATION.md).

CPU time of `hive --help` and `hive ps` beside an empty Typer application with as many commands, in pairs that
alternate, so that a busy machine slows both. `ps` talks to a daemon with two agents that run elsewhere; the empty
application's command does nothing. Both are run without Rich, which Typer would load to draw its help; with it the
empty one is slower still.

    python benchmarks/cli.py [PAIRS]

Prints one line a case and exits 1 where a promise is broken: ratio ≤ 1.0, ≤ 220 ms (70 is the aim on an idle one).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from build_line import build_line

from hive.cli.lazy import CommandTable
from hive.cli.main import HIVE
from hive.client.client import Client

RATIO_MAX = 1.0
MS_MAX, MS_AIM = 220.0, 70.0
DAEMON_WITHIN_S = 30.0

HIVE_PROGRAM = "from hive.cli.entry import run\nrun()\n"


def empty_application() -> str:
    """The source of a Typer application with the commands and groups of Hive's table, all empty."""
    lines = ["import typer", "app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)"]

    def add(group: CommandTable, variable: str) -> None:
        for number, (name, entry) in enumerate(group.entries.items()):
            if isinstance(entry, CommandTable):
                lines.append(f"{variable}_{number} = typer.Typer()")
                lines.append(f"{variable}.add_typer({variable}_{number}, name={name!r})")
                add(entry, f"{variable}_{number}")
            else:
                lines.append(f"@{variable}.command({name!r})")
                lines.append(f"def {variable}_{number}() -> None: 'Does nothing at all.'")

    add(HIVE, "app")
    return "\n".join([*lines, "app()", ""])


def cpu_ms(command: list[str]) -> float:
    """User and system time of one run, its own children included. Raises RuntimeError where it fails."""
    pid = os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {os.waitstatus_to_exitcode(status)}")
    return (used.ru_utime + used.ru_stime) * 1000


@contextmanager
def running_daemon(directory: Path) -> Iterator[None]:
    """`hive daemon` on directories of its own, with two agents."""
    state, runtime, conf = directory / "s", directory / "r", directory / "hive.conf"
    state.mkdir(mode=0o700)
    runtime.mkdir(mode=0o700)
    conf.write_text("[inference]\nenabled = false\n")
    socket = runtime / "hive.sock"
    command = [sys.executable, "-m", "hive", "daemon", "--config", str(conf)]
    command += ["--state-dir", str(state), "--runtime-dir", str(runtime)]
    with (directory / "daemon.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as daemon:
        try:
            client = Client(socket)
            ends = time.monotonic() + DAEMON_WITHIN_S
            while not client.answers():
                if daemon.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError((directory / "daemon.log").read_text())
                time.sleep(0.05)
            for name in ("alice", "busy-bob"):
                client.post("/api/agents", {"name": name, "runtime": "external"})
            os.environ["HIVE_SOCKET"] = str(socket)
            yield
        finally:
            daemon.terminate()


def measure(words: list[str], hive: Path, empty: Path, pairs: int) -> tuple[float, float, float]:
    """Median milliseconds of both, and the median of the pairs' ratios."""
    both = []
    for _ in range(pairs):
        both.append([cpu_ms([sys.executable, str(program), *words]) for program in (empty, hive)])
    return (
        statistics.median(pair[1] for pair in both),
        statistics.median(pair[0] for pair in both),
        statistics.median(pair[1] / pair[0] for pair in both),
    )


def main(pairs: int) -> int:
    print(build_line())
    kept = True
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hive, empty = directory / "hive_program.py", directory / "empty_program.py"
        hive.write_text(HIVE_PROGRAM)
        empty.write_text(empty_application())
        with running_daemon(directory):
            for words in (["--help"], ["ps"]):
                measure(words, hive, empty, 2)  # writes the bytecode
                ours, theirs, ratio = measure(words, hive, empty, pairs)
                kept = kept and ratio <= RATIO_MAX and ours <= MS_MAX
                print(f"hive {' '.join(words):12} {ours:6.1f} ms CPU, empty Typer {theirs:6.1f} ms, ratio {ratio:.2f}")
    print(f"promised: ratio ≤ {RATIO_MAX}, ≤ {MS_MAX:.0f} ms: {'kept' if kept else 'BROKEN'}; aim {MS_AIM:.0f} ms")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
