"""Log lines as JSON: fields come from the call, not from what its arguments say; and they are read again."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.log_lines import LINE_MAX, MESSAGE, JsonLines, LogEntry, goes_to_journal, in_words, parse
from tests.source_trees import HIVE, source_trees


def line_of(template: object, *args: object, name: str = "hive.test", level: int = logging.INFO, **more: Any) -> str:
    return JsonLines().format(logging.LogRecord(name, level, "f.py", 1, template, args, more.get("exc_info")))


def entry_of(template: object, *args: object, **more: Any) -> LogEntry:
    return parse(line_of(template, *args, **more))


@pytest.mark.parametrize(
    ("template", "args", "event", "fields", "text"),
    [
        ("proxy_lost", (), "proxy_lost", {}, ""),
        ("agent_ended agent=%s exit_code=%s", ("ann", 3), "agent_ended", {"agent": "ann", "exit_code": 3}, ""),
        ("child_ended name=%s exit=%d", ("redis", 1), "child_ended", {"name": "redis", "exit": 1}, ""),
        ("drained cut=%d s=%.1f", (0, 2.345), "drained", {"cut": 0, "s": 2.3}, ""),
        ("engine_warns warning=%r", ("it's \x1b[2J",), "engine_warns", {"warning": "it's \x1b[2J"}, ""),
        ("foreign fields=%.20r", ({"a": 1},), "foreign", {"fields": "{'a': 1}"}, ""),
        ("agent_sleeps_%s agent=%s", ("deep", "ann"), "agent_sleeps_deep", {"agent": "ann"}, ""),
        ("taken wanted='%s' got='%s': another", ("1", "2"), "taken", {"wanted": "1", "got": "2"}, "another"),
        ("not_reloaded reason='there is no file'", (), "not_reloaded", {"reason": "there is no file"}, ""),
        ("damaged file=%s: it holds none", ("/x",), "damaged", {"file": "/x"}, "it holds none"),
        ("config_reloaded %s", ("applied=a needs_restart=b",), "config_reloaded", {}, "applied=a needs_restart=b"),
        ("unheard serving=own_sockets", (), "unheard", {"serving": "own_sockets"}, ""),
        ("waits at=%s is_up=%s n=%s", (None, True, 2), "waits", {"at": None, "is_up": True, "n": 2}, ""),
        ("full share=%d%%", (7,), "full", {"share": "7%"}, ""),
        ("address at=%s:%d", ("h", 1), "address", {"at": "h:1"}, ""),
    ],
)
def test_an_event_is_taken_apart(
    template: str, args: tuple[object, ...], event: str, fields: dict[str, object], text: str
) -> None:
    found = entry_of(template, *args)
    assert (found.event, found.fields, found.text) == (event, fields, text)


def test_a_number_is_a_number_as_exact_as_the_call_wants_it() -> None:
    assert json.loads(line_of("x n=%s m=%d s=%.2f", 2, 2, 1 / 3))["fields"] == {"n": 2, "m": 2, "s": 0.33}


@given(st.text(max_size=200))
def test_no_value_can_pass_for_a_field_or_another_line(value: str) -> None:
    line = line_of("agent_ended agent=%s error=%s", "ann", value)
    assert line.isascii()
    assert line.isprintable()
    assert parse(line).fields == {"agent": "ann", "error": value}


@pytest.mark.parametrize(
    "value", ["x agent=bob", '", "agent": "bob', "a\nagent_ended agent=bob", "\x00\x000\x00", "%s %d"]
)
def test_what_an_agent_says_forges_nothing(value: str) -> None:
    found = entry_of("agent_ended agent=%s error=%s", "ann", value)
    assert found.fields == {"agent": "ann", "error": value}


@pytest.mark.parametrize(
    ("template", "args", "name"),
    [
        ("Task exception was never retrieved", (), "asyncio"),
        ("connection lost=%s", ("1",), "uvicorn"),
        ("Loop is closed", (), "hive.x"),
        ("two %s %s", ("one",), "hive.x"),
    ],
)
def test_what_is_no_event_of_hives_is_a_message(template: str, args: tuple[object, ...], name: str) -> None:
    found = entry_of(template, *args, name=name)
    assert (found.event, found.fields) == (MESSAGE, {})
    assert template.split()[0] in found.text


def test_arguments_that_do_not_fit_lose_no_line() -> None:
    assert entry_of("x n=%d", "many").fields == {"n": "many"}
    assert "1, 2" in entry_of("x", 1, 2).text


def test_a_traceback_is_in_the_same_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        line = line_of("api_failed path=%s", "/x", exc_info=sys.exc_info())
    assert "\n" not in line
    found = parse(line)
    assert (found.event, found.fields) == ("api_failed", {"path": "/x"})
    assert found.text.endswith("ValueError: no")


def test_a_line_is_never_longer_than_journald_takes() -> None:
    template = "x " + " ".join(f"a{n}=%s" for n in range(12))
    line = line_of(template, *["é" * 5000] * 12)
    assert len(line) <= LINE_MAX
    assert parse(line).event == "x"
    assert json.loads(line)["cut"] is True
    assert entry_of("x a=%s", "b" * 5000).fields["a"].endswith("… 3000 more")


@pytest.mark.parametrize(("level", "prefix"), [(10, "<7>"), (20, "<6>"), (30, "<4>"), (40, "<3>"), (50, "<2>")])
def test_journald_is_told_the_level(level: int, prefix: str) -> None:
    record = logging.LogRecord("hive.x", level, "", 0, "left", (), None)
    line = JsonLines(prefixed=True).format(record)
    assert line.startswith(prefix + "{")
    assert parse(line).event == "left"


@pytest.mark.parametrize(
    "line", ["", "Ready to accept connections", "{", "[1]", '{"a": 1}', '{"event": 1}', "<6>", "null", "{" * 100_000]
)
def test_a_line_of_another_program_is_its_text(line: str) -> None:
    assert parse(line) == LogEntry(None, "", "", {}, line)
    assert in_words(parse(line)) == line


@pytest.mark.parametrize(
    ("template", "args", "words"),
    [
        ("agent_ended agent=%s exit_code=%d", ("ann", 3), "agent_ended agent=ann exit_code=3"),
        ("x why=%s", ("idle for 9 s",), "x why='idle for 9 s'"),
        ("damaged file=%s: it holds none", ("/x",), "damaged file=/x: it holds none"),
        ("x up=%s at=%s", (True, None), "x up=true at=None"),
    ],
)
def test_an_event_is_readable_again(template: str, args: tuple[object, ...], words: str) -> None:
    assert in_words(entry_of(template, *args)) == words


def test_a_moment_is_read_as_it_was_written() -> None:
    record = logging.LogRecord("hive.x", 20, "", 0, "left", (), None)
    assert parse(JsonLines().format(record)).at == pytest.approx(record.created, abs=0.002)
    assert parse('{"event": "x", "ts": "yesterday"}').at is None


def calls(path: Path, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(where, template) of every line that a file of Hive writes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr) != ("log", "setLevel")
            and node.func.value.id in ("log", "audit")
            and node.func.attr in ("debug", "info", "warning", "error", "critical", "exception")
        ):
            template = node.args[0]
            assert isinstance(template, ast.Constant), f"{path}:{node.lineno}: the template is computed"
            assert isinstance(template.value, str)
            yield f"{path.relative_to(HIVE)}:{node.lineno}", template.value


def test_every_line_hive_writes_is_an_event() -> None:
    """Its first word names it, and none of its arguments falls outside a field but in words at its end."""
    found = [call for path, tree in source_trees().items() for call in calls(path, tree)]
    assert len(found) > 200
    # Numbers fit every %.
    events = {where: entry_of(text, *range(1, text.replace("%%", "").count("%") + 1)).event for where, text in found}
    assert [where for where, event in events.items() if event == MESSAGE] == []


def test_only_the_stream_that_journald_reads_counts(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file:
        stat = os.fstat(file.fileno())
        named = {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
        assert goes_to_journal(file.fileno(), named)
        assert not goes_to_journal(2, named)
        for wrong in ("", "x", f"{stat.st_dev}", f"{stat.st_dev}:{stat.st_ino + 1}"):
            assert not goes_to_journal(file.fileno(), {"JOURNAL_STREAM": wrong})
    assert not goes_to_journal(1_000_000, named)


PROGRAM = """
import logging
from hive.cli.service_starts import log_events
log_events(as_json={as_json})
logging.getLogger("hive.x").info("left n=%d", 1)
logging.getLogger("other").info("not told")
logging.getLogger("other").warning("told")
"""


def said(*, as_json: bool, journal: bool, tmp_path: Path) -> list[str]:
    with (tmp_path / "stderr").open("w+") as file:
        stat = os.fstat(file.fileno())
        env = {**os.environ, "JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino if journal else 1}"}
        program = [sys.executable, "-c", PROGRAM.format(as_json=as_json)]
        subprocess.run(program, env=env, stderr=file, check=True)
        file.seek(0)
        return file.read().splitlines()


def test_a_service_writes_json_where_journald_or_an_installation_reads_it(tmp_path: Path) -> None:
    assert said(as_json=False, journal=False, tmp_path=tmp_path) == ["left n=1", "told"]
    plain = said(as_json=True, journal=False, tmp_path=tmp_path)
    assert [line[0] for line in plain] == ["{", "{"]
    prefixed = said(as_json=False, journal=True, tmp_path=tmp_path)
    assert [line[:4] for line in prefixed] == ["<6>{", "<4>{"]
    assert [parse(line).event for line in prefixed] == ["left", MESSAGE]
