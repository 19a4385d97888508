"""`hive agent responses` against the real API over services in memory."""

from __future__ import annotations

from typing import Any

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_how_much_is_kept_is_shown_and_deleted_when_it_was_said_twice(hive: Hive) -> None:
    lines = [" ".join(line.split()) for line in hive("agent", "responses", "alice").out.splitlines()]
    assert lines[0].endswith("2")
    assert any("4 KiB" in line or "4.0 KiB" in line for line in lines)
    assert "for 30 days" in lines[-1]
    found = hive("agent", "responses", "alice", "--json").json
    assert (found["schema"], found["responses"], found["bytes"]) == ("agent.responses", 2, 4096)
    asked = hive("agent", "responses", "alice", "--delete")
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert hive("agent", "responses", "alice", "--delete", "-y").out == "2 responses of alice are deleted\n"
    assert hive("agent", "responses", "nobody").code == 3
