"""`hive agent edit` with real editors: small programs that change the file they are given."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hive.client.client import Client

Hive = Any
"""conftest.Hive: test modules import no siblings."""


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which a description lies while it is edited."""
    directory = tmp_path / "left"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture(autouse=True)
def no_editor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)


def use(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("EDITOR", f"sed -i '{script}'")


def test_what_was_saved_is_applied(hive: Hive, monkeypatch: pytest.MonkeyPatch, left: Path) -> None:
    use(monkeypatch, "s/9000/9007/")
    said = hive("agent", "edit", "alice")
    plan = "  port: 9000 → 9007 (from its next start)\n"
    assert (said.code, said.out) == (0, f"alice is changed:\n{plan}`hive agent restart alice` makes it so\n")
    use(monkeypatch, "s/9007/9008/")
    assert hive("agent", "edit", "alice", "--json").json["changed"] == ["port"]
    assert list(left.iterdir()) == []


def test_what_was_left_as_it_was_changes_nothing(hive: Hive, monkeypatch: pytest.MonkeyPatch, left: Path) -> None:
    use(monkeypatch, "")
    assert hive("agent", "edit", "alice").out == "alice is unchanged\n"
    monkeypatch.setenv("EDITOR", "false")
    assert hive("agent", "edit", "alice").err == "hive: false ended with 1: nothing is changed  [internal]\n"
    monkeypatch.setenv("EDITOR", "/no/such/editor")
    assert hive("agent", "edit", "alice").err.startswith("hive: /no/such/editor: No such file")
    assert list(left.iterdir()) == []


def test_what_was_written_is_not_lost_where_it_is_wrong(
    hive: Hive, monkeypatch: pytest.MonkeyPatch, left: Path
) -> None:
    use(monkeypatch, "s/^port/porte/")
    said = hive("agent", "edit", "alice")
    assert said.code == 2
    [file] = left.glob("*/alice.toml")
    assert said.err.startswith(f"what was written is in {file}\nhive: line ")
    assert "did you mean `port`?" in said.err
    assert (file.parent.stat().st_mode & 0o777, "porte = 9000" in file.read_text()) == (0o700, True)


def test_a_person_has_another_go(hive: Hive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first time it is spoilt, the second time it is right."""
    editor = tmp_path / "editor"
    editor.write_text(
        '#!/bin/sh\nif [ -e "$0.again" ]; then sed -i s/porte/port/ "$1"; else sed -i s/^port/porte/ "$1"; fi\n'
        'sed -i s/9000/9001/ "$1"; touch "$0.again"\n'
    )
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    stdin = io.StringIO("y\n")
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    said = hive("agent", "edit", "alice")
    assert (said.code, "9000 → 9001" in said.out) == (0, True)
    assert "no such key" in said.err


def test_a_name_is_not_changed_and_nothing_is_overwritten(
    hive: Hive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: Path
) -> None:
    use(monkeypatch, "s/alice/carol/")
    assert "and stays so" in hive("agent", "edit", "alice").err
    assert hive("ps", "-q").out == "alice\nbusy-bob\n"
    other = tmp_path / "other.toml"
    other.write_text(hive("agent", "export", "alice").out.replace("9000", "9005"))
    program = f"{sys.executable} -m hive agent apply {other}"
    monkeypatch.setenv("EDITOR", f"sh -c '{program} >&2; sed -i s/9000/9006/ \"$0\"'")
    assert "was changed by somebody else meanwhile" in hive("agent", "edit", "alice").err
    assert Client(hive.socket).get("/api/agents/alice")["port"] == 9005


def test_without_a_terminal_and_an_editor_it_says_what_to_do(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    said = hive("agent", "edit", "alice")
    assert said.code == 2
    assert "hive agent export alice > alice.toml, change it, then hive agent apply alice.toml" in said.err


def test_flags_of_create_change_it_without_an_editor(hive: Hive) -> None:
    """`hive agent edit poet --idle 3` was no option, though `create` has it."""
    said = hive("agent", "edit", "alice", "--idle", "3", "--tier", "high", "--deepest", "light", "--autostart")
    assert (said.code, "idle_s" in said.out, "restart" in said.out) == (0, True, False)
    said = hive("agent", "edit", "alice", "--memory", "1g", "--pids", "50", "--model", "fast")
    assert (said.code, said.out.splitlines()[-1]) == (0, "`hive agent restart alice` makes it so")
    assert hive("agent", "edit", "alice", "--cpus", "1.5", "--no-autostart").code == 0
    now = Client(hive.socket).get("/api/agents/alice")
    assert [now[field] for field in ("idle_s", "tier", "deepest", "autostart", "model")] == [
        3.0,
        "high",
        "light",
        False,
        "fast",
    ]
    assert [now["limits"][name] for name in ("memory_mb", "pids", "cpu")] == [1024, 50, 1.5]
    assert hive("agent", "edit", "alice", "--memory", "much").err.startswith("hive: --memory much: expected")
