"""The lines of Hive's services: kept by `hive up` in a bounded file, read from it or from the journal."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hive.cli.main import main
from hive.errors import DependencyDown, NotPermitted
from hive.files import logs
from hive.files.log_file import NAME, LogFile, LogLine, parsed, previous, written
from hive.files.logs import COMPONENTS, ServiceLine, command, file_lines, refuse_unreadable, said_of
from hive.log_lines import JsonLines
from hive.up.lines import is_routine
from tests.nobody import run_as_nobody

ROOT = Path(__file__).parents[2]


# --- the file of hive up -------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[LogFile]:
    file = LogFile(tmp_path / NAME, max_bytes=10_000)
    yield file
    file.close()


def said(path: Path, *components: str, lines: int = 100) -> list[tuple[str, str]]:
    found = file_lines(path, components, lines=lines, follow=False)
    return [(one.component, one.entry.text) for one in found]


def test_lines_come_back_with_their_time_and_who_said_them(kept: LogFile, tmp_path: Path) -> None:
    kept.write("proxy", "proxy_ready port=1", at=1000.25)
    kept.write("redis", "two\nlines é", at=1000.5)
    found = list(file_lines(tmp_path / NAME, [], lines=10, follow=False))
    assert [(one.at, one.component, one.entry.text) for one in found] == [
        (1000.25, "proxy", "proxy_ready port=1"),
        (1000.5, "redis", "two lines é"),
    ]


def test_only_who_is_asked_for_and_only_the_last_lines_are_shown(kept: LogFile, tmp_path: Path) -> None:
    for number in range(20):
        kept.write(("proxy", "daemon")[number % 2], str(number), at=number)
    assert said(tmp_path / NAME, "daemon", lines=3) == [("daemon", "15"), ("daemon", "17"), ("daemon", "19")]
    assert said(tmp_path / NAME, lines=2) == [("proxy", "18"), ("daemon", "19")]
    assert said(tmp_path / NAME, lines=0) == []


def test_the_file_is_its_users_alone_and_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    (tmp_path / NAME).symlink_to(tmp_path / "secret")
    LogFile(tmp_path / NAME).write("proxy", "x", at=0)
    assert (tmp_path / "secret").read_text() == ""
    (tmp_path / NAME).unlink()
    LogFile(tmp_path / NAME).write("proxy", "x", at=0)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600


def test_it_is_bounded_and_a_second_hive_up_goes_on_in_it(kept: LogFile, tmp_path: Path) -> None:
    for number in range(1000):
        kept.write("proxy", f"line {number}", at=number)
    sizes = [(tmp_path / name).stat().st_size for name in (NAME, f"{NAME}.1")]
    assert max(sizes) <= 10_000
    assert sum(sizes) > 10_000
    again = LogFile(tmp_path / NAME, max_bytes=10_000)
    again.write("proxy", "line 1000", at=1000)
    again.close()
    found = [text for _, text in said(tmp_path / NAME, lines=1000)]
    assert found == [f"line {number}" for number in range(1001 - len(found), 1001)], "over both files, without a gap"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_costs_the_line_and_nothing_else(small_disk: Path) -> None:
    file = LogFile(small_disk / NAME)
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    assert os.statvfs(small_disk).f_bavail == 0
    for number in range(1000):
        file.write("proxy", "x" * 100, at=number)
    (small_disk / "ballast").unlink()
    file.write("proxy", "again", at=0)
    assert said(small_disk / NAME)[-1] == ("proxy", "again")
    file.close()


def test_a_directory_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "none" / NAME, max_bytes=100)
    for _ in range(10):
        file.write("proxy", "x" * 60, at=0)
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_line_is_passed_over(tmp_path: Path) -> None:
    whole = written(LogLine(1.0, "proxy", "x"))
    (tmp_path / NAME).write_bytes(b"rest of a line\n\n" + whole + b"\xff\xfe\n" + whole[:20])
    assert said(tmp_path / NAME) == [("proxy", "x")]
    assert parsed(b"") is None


def test_following_goes_on_in_the_next_file(kept: LogFile, tmp_path: Path) -> None:
    kept.write("proxy", "0", at=0)
    stream = file_lines(tmp_path / NAME, [], lines=10, follow=True)
    assert next(stream).entry.text == "0"
    kept.write("proxy", "1", at=1)
    assert next(stream).entry.text == "1"
    kept._turn()
    kept.write("proxy", "2", at=2)
    assert next(stream).entry.text == "2"


def test_no_file_is_told_with_where_lines_are(tmp_path: Path) -> None:
    with pytest.raises(DependencyDown, match="there is no") as caught:
        file_lines(tmp_path / NAME, [], lines=1, follow=False)
    assert "terminal" in caught.value.hint


# --- the journal ---------------------------------------------------------------------------------------------------


def entry(**fields: object) -> ServiceLine | None:
    return said_of(json.dumps({"__REALTIME_TIMESTAMP": "1500000", **fields}).encode())


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_unit_that_can_be_asked_for_is_installed(component: str) -> None:
    there = {path.name for path in (ROOT / "systemd").iterdir()}
    assert set(COMPONENTS[component]) <= there


def test_all_instances_of_a_template_are_asked_for() -> None:
    assert "--unit=hive-model@*.service" in command(["backend"], lines=1, follow=False)


def test_every_service_of_hive_belongs_to_somebody() -> None:
    units = {unit for units in COMPONENTS.values() for unit in units} | set(logs.OTHERS)
    assert {path.name for path in (ROOT / "systemd").glob("*.service")} <= units


def test_all_of_them_are_asked_for_where_none_is_named_but_never_agents() -> None:
    words = command([], lines=7, follow=True)
    assert {"--unit=hive-daemon.service", "--unit=hive-inference-vllm.service", "--lines=7", "--merge"} <= set(words)
    assert not any("agent" in word for word in words)


def test_a_json_line_is_read_with_the_time_of_the_journal() -> None:
    import logging

    record = logging.LogRecord("hive.x", logging.WARNING, "", 0, "redis_down path=%s", ("/r",), None)
    found = entry(MESSAGE=JsonLines().format(record), _SYSTEMD_UNIT="hive-proxy.service", PRIORITY="6")
    assert found is not None
    assert (found.at, found.component) == (1.5, "proxy")
    assert (found.entry.level, found.entry.event, found.entry.fields) == ("warning", "redis_down", {"path": "/r"})


@pytest.mark.parametrize(
    ("fields", "component", "level", "text"),
    [
        ({"MESSAGE": "x", "_SYSTEMD_UNIT": "init.scope", "UNIT": "hive-redis.service"}, "redis", "", "x"),
        ({"MESSAGE": "x", "_SYSTEMD_UNIT": "hive-inference-llama.service", "PRIORITY": "3"}, "backend", "error", "x"),
        ({"MESSAGE": [104, 105, 255], "_SYSTEMD_UNIT": "hive-thaw.service"}, "thaw", "", "hi\ufffd"),
        ({"MESSAGE": ["a", "b"], "PRIORITY": "9"}, "", "", "a b"),
        ({"MESSAGE": None}, "", "", ""),
        ({}, "", "", ""),
    ],
)
def test_whatever_is_in_the_journal_is_shown(fields: dict[str, Any], component: str, level: str, text: str) -> None:
    found = entry(**fields)
    assert found is not None
    assert (found.component, found.entry.level, found.entry.text) == (component, level, text)


@pytest.mark.parametrize("raw", [b"", b"{", b"{}", b"[]", b'{"__REALTIME_TIMESTAMP": "x"}', b"Failed to open\n"])
def test_what_is_no_entry_is_none(raw: bytes) -> None:
    assert said_of(raw) is None


def test_the_program_that_reads_is_ended_with_its_reader() -> None:
    line = json.dumps({"__REALTIME_TIMESTAMP": "1", "MESSAGE": "x"})
    stream = logs._read_journal(
        ["/bin/sh", "-c", f"echo '{{\"__REALTIME_TIMESTAMP\": 1, \"MESSAGE\": \"'$$'\"}}'; yes '{line}'"]
    )
    pid = int(next(stream).entry.text)
    assert [one.entry.text for one in islice(stream, 100)] == ["x"] * 100
    assert Path(f"/proc/{pid}").exists()
    stream.close()  # type: ignore[attr-defined]
    assert not Path(f"/proc/{pid}").exists()


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(NotPermitted, match="insufficient permissions"):
        list(
            logs._read_journal(
                ["/bin/sh", "-c", "echo 'No journal files were opened due to insufficient permissions.'; exit 1"]
            )
        )


def test_without_a_journal_or_rights_it_is_said_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DependencyDown, match="keeps no journal"):
        refuse_unreadable([str(tmp_path)])
    (tmp_path / "machine").mkdir()
    journal = tmp_path / "machine/system.journal"
    journal.touch()
    refuse_unreadable([str(tmp_path)])
    journal.chmod(0)
    if os.geteuid() != 0:
        with pytest.raises(NotPermitted):
            refuse_unreadable([str(tmp_path)])


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path) -> Path:
    file = LogFile(tmp_path / NAME)
    file.write("proxy", "proxy_ready port=1", at=time.time())
    file.write("daemon", "evil \x1b]0;x\x07", at=time.time())
    file.close()
    return tmp_path


def test_the_command_shows_the_file_of_the_hive_that_is_meant(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--state-dir", str(state)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" proxy      proxy_ready port=1")
    assert lines[1].endswith(r" daemon     evil \x1b]0;x\x07")
    assert main(["logs", "daemon", "-n", "1", "--state-dir", str(state), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["component"], answer["text"]) == ("log", "daemon", "evil \x1b]0;x\x07")


@pytest.mark.parametrize(
    ("words", "code", "says"), [(["prxy"], 2, "did you mean `proxy`"), (["first-boot"], 2, "hive up")]
)
def test_a_component_that_is_not_there_is_told(
    state: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
) -> None:
    assert main(["logs", *words, "--state-dir", str(state)]) == code
    assert says in capsys.readouterr().err


def test_a_state_directory_without_one_is_exit_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--state-dir", str(tmp_path)]) == 5
    assert "terminal" in capsys.readouterr().err


def test_following_shows_what_comes_at_once(state: Path) -> None:
    words = [sys.executable, "-P", "-m", "hive", "logs", "-f", "--state-dir", str(state)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout is not None
        limit = threading.Timer(30, program.kill)
        limit.start()
        program.stdout.readline()
        program.stdout.readline()
        file = LogFile(state / NAME)
        file.write("redis", "later", at=time.time())
        file.close()
        assert program.stdout.readline().endswith("redis      later\n")
        limit.cancel()
        program.terminate()


def test_hive_up_keeps_what_it_shows_and_what_is_routine(passable: Path) -> None:
    words = [sys.executable, "-P", "-m", "hive", "up", "--backend", "demo", "--port", "0", "--ingress-port", "0"]
    words += ["--api-port", "0"]
    words += ["--state-dir", str(passable / "s"), "--exit-after", "1"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(passable)}
    shown = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, check=True, timeout=100)
    found = said(passable / "s" / NAME, lines=1000)
    assert "info" in {line.entry.level for line in file_lines(passable / "s" / NAME, ["proxy"], lines=99, follow=False)}
    assert {"proxy", "daemon", "sandbox", "backend"} <= {component for component, _ in found}
    lines = [line.split("|", 1) for line in shown.stderr.splitlines() if "|" in line]
    assert [(name.strip(), text[1:]) for name, text in lines] == [one for one in found if not is_routine(one[1])]


def test_the_previous_file_is_named_after_it() -> None:
    assert previous(Path("/s/up.log")).as_posix() == "/s/up.log.1"


def test_who_may_not_read_the_file_is_told_so(short_path: Path) -> None:
    LogFile(short_path / NAME).write("proxy", "x", at=0)
    short_path.chmod(0o755)
    program = (
        "from pathlib import Path\nfrom hive.files.logs import file_lines\nfrom hive.errors import HiveError\n"
        f"try: print(list(file_lines(Path('{short_path}/{NAME}'), [], lines=1, follow=False)))\n"
        "except HiveError as error: print(type(error).__name__)\n"
    )
    assert run_as_nobody(program).strip() == "NotPermitted"
