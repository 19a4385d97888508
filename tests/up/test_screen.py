"""The view of a person: on a real terminal (a pty) and where there is none."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import IO

PROGRAM = """
from hive.up.screen import Screen
screen = Screen(json={json})
screen.tell("Hive is up")
view = {{"name": "ann", "status": "paused", "depth": "light", "brief": "quiet for 9 s", "held_bytes": 64 << 20,
        "requests": 3, "tokens_in": 5, "tokens_out": 7, "last_wake_ms": 2.25}}
for second in range(12):
    screen.show([view], now=100.0 + second)
    screen.say("proxy", f"line {{second}}")
screen.close()
if {json}:
    screen.result({{"agents": 1}})
"""


def on_terminal(*, json: bool = False, program: str = PROGRAM, arguments: tuple[str, ...] = (), **env: str) -> str:
    """The output of the program to a terminal that is its stdout and stderr."""
    leader, follower = pty.openpty()
    out = b""
    with subprocess.Popen(
        [sys.executable, "-c", program.format(json=json), *arguments],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **env},
    ):
        os.close(follower)
        while piece := _read(leader):
            out += piece
    os.close(leader)
    return out.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO: nobody has the other side open any more (pty(7))
        return b""


def on_files(*, json: bool) -> tuple[str, str]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(json=json)], capture_output=True, text=True, check=True, env=os.environ
    )
    return ran.stdout, ran.stderr


def test_a_terminal_gets_a_live_table_below_the_lines() -> None:
    shown = on_terminal(json=False)
    assert "Hive is up" in shown
    for cell in ("ann", "paused", "light", "quiet for 9 s", "64 MiB", "2.2 ms", "12"):
        assert cell in shown
    assert len(re.findall(r"line \d+", shown)) == 12
    assert "\x1b[36m" in shown, "coloured"


MANY = """
import os
from hive.up.screen import Screen
screen = Screen(json=False)
for second in range(3):
    views = [{{"name": f"agent-{{n}}", "status": "paused"}} for n in range(900)]
    views.append({{"name": "ill", "status": "error"}})
    screen.show(views, now=100.0 + second, head="Hive is up · model http://127.0.0.1:11435")
    for line in range(2000):
        screen.say("proxy", f"line {{line}}")
    screen.say("daemon", "audit_head head=7:abc")
screen.close()
"""


def test_of_many_agents_and_lines_what_fits_is_drawn_and_few_times() -> None:
    """At 934 agents each log line drew the whole table anew, 471 ms; the demo's callers were silent for minutes."""
    shown = on_terminal(program=MANY)
    drawn = shown.count("Hive is up · model")
    assert 1 <= drawn < 600, "six thousand lines are not as many drawings"
    assert "ill" in shown, "an agent in trouble comes first"
    assert re.search(r"… 8\d\d agents more: hive ps", shown)
    assert re.search(r"… [\d,]+ lines more: hive logs", shown)
    assert "line 1999" in shown
    assert "audit_head" not in shown


GRAVE = """
import sys
from pathlib import Path
from hive.files.log_file import LogFile
from hive.up.screen import Screen
file = LogFile(Path(sys.argv[1]))
screen = Screen(json=False)
screen.keep(file)
screen.goes_on("Hive comes up: redis …")
screen.say("daemon", "<6>helper_connected")
screen.say("proxy", "<4>ports_taken")
screen.goes_on("Hive comes up: proxy …")
screen.say("proxy", "Traceback")
screen.goes_on("Hive comes up: daemon …")
screen.tell("Hive is up")
for second in range(3):
    screen.show([{{"name": "ann", "status": "paused"}}], now=100.0 + second, head="Hive 1 · Ctrl-C ends it")
    screen.say("daemon", "<6>agent_paused")
screen.say("sandbox", "<3>freeze_failed")
screen.close()
screen.leaves()
screen.goes_on("Hive ends …")
screen.say("proxy", "<4>daemon_lost")
screen.say("up", "<4>child_killed")
screen.say("proxy", "<3>spool_full")
screen.goes_on("Hive ends …")
screen.close()
file.close()
"""


def test_a_terminal_is_told_what_is_wrong_and_its_banner_is_not_pushed_away(tmp_path: Path) -> None:
    """Each start and each sleep of an agent was a line above the table: the addresses were gone before one had read."""
    shown = on_terminal(program=GRAVE, arguments=(str(tmp_path / "up.log"),))
    for routine in ("helper_connected", "agent_paused", "daemon_lost", "<4>", "<3>"):
        assert routine not in shown
    for problem in ("ports_taken", "Traceback", "freeze_failed", "child_killed", "spool_full"):
        assert len(re.findall(problem, shown)) == 1
    assert shown.index("Traceback") < shown.index("Hive is up") < shown.index("ann")
    kept = (tmp_path / "up.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in kept][:3] == [
        "daemon <6>helper_connected",
        "proxy <4>ports_taken",
        "proxy Traceback",
    ]
    assert len(kept) == 10


def test_what_goes_on_leaves_nothing_on_the_terminal(tmp_path: Path) -> None:
    shown = on_terminal(program=GRAVE, arguments=(str(tmp_path / "up.log"),))
    assert "Hive comes up: daemon …\r\x1b[KHive is up" in shown
    assert shown.endswith("Hive ends …\r\x1b[K")


def test_a_pipe_gets_every_line_and_nothing_that_only_goes_on(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", GRAVE.format(), str(tmp_path / "up.log")], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "Hive is up\n"
    assert "daemon   | helper_connected\nproxy    | ports_taken\nproxy    | Traceback\n" in ran.stderr
    assert ran.stderr.count("daemon   | agent_paused") == 3


def test_no_color_is_respected() -> None:
    assert not re.search(r"\x1b\[[0-9;]*3\dm", on_terminal(json=False, NO_COLOR="1"))


def test_a_pipe_gets_a_plain_table_every_ten_seconds_and_no_escapes() -> None:
    out, err = on_files(json=False)
    assert out == "Hive is up\n"
    assert err.count("ann ") == 2
    assert "\x1b" not in err
    assert "proxy    | line 11\n" in err


def test_with_json_only_the_object_is_on_stdout() -> None:
    out, err = on_files(json=True)
    assert out == '{"agents":1}\n'
    assert "Hive is up" in err


def test_with_json_a_terminal_gets_no_live_table() -> None:
    assert "\x1b[?25l" not in on_terminal(json=True), "the cursor stays"


def test_a_program_that_stopped_reading_is_not_waited_for() -> None:
    """`hive up | less`, and `less` shows the first page only."""
    reading, writing = os.pipe()
    many = PROGRAM.format(json=False).replace("range(12)", "range(2000)")
    with subprocess.Popen([sys.executable, "-c", many], stdout=writing, stderr=writing) as process:
        os.close(writing)
        assert process.wait(timeout=60) == 0
    _close(os.fdopen(reading, "rb"))


def _close(file: IO[bytes]) -> None:
    assert file.read(5) == b"Hive "
    file.close()
