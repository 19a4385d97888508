"""`hive agent responses` against a real daemon."""

from __future__ import annotations

from typing import Any

from hive.link.responses import KeepResponse

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def keep(box: Any, number: int) -> None:
    said = KeepResponse(
        agent=box.life("alice").agent.id,
        id=f"resp_{number}",
        previous_id=None,
        asked=b'"hi"',
        response=b'{"output":[]}',
    )
    box.services.responses.hear(said, None)


def test_how_much_is_kept_is_shown_and_deleted_when_it_was_said_twice(hive: Hive) -> None:
    for number in range(2):
        hive.daemon.call(keep, hive.box, number)
    lines = [" ".join(line.split()) for line in hive("agent", "responses", "alice").out.splitlines()]
    assert lines[0].endswith("2")
    assert any("KiB" in line for line in lines)
    assert "for 30 days" in lines[-1]
    found = hive("agent", "responses", "alice", "--json").json
    assert (found["schema"], found["responses"], found["bytes"] > 1024) == ("agent.responses", 2, True)
    asked = hive("agent", "responses", "alice", "--delete")
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert hive("agent", "responses", "alice", "--delete", "-y").out == "2 responses of alice are deleted\n"
    assert hive("agent", "responses", "nobody").code == 3
