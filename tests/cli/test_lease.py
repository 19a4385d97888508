"""`hive lease`: those that wait and those that hold memory, as a person reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hive.cli.leases import orders as command

Hive = Any
"""conftest.Hive: test modules import no siblings."""
HELD: dict[str, Any] = {
    "id": "l-3",
    "token": 3,
    "kind": "job",
    "state": "running",
    "mb": 8192,
    "gpus": ["GPU-1"],
    "wanted_gpus": 1,
    "band": "normal",
    "place": None,
    "before": [],
    "ready_in_s": 0.0,
    "bound_s": 0.0,
    "label": "train\x1b[2J",
    "user": "uid:1000",
    "preemptible": True,
    "since": 100.0,
    "granted_at": 110.0,
    "until": None,
    "ended_at": None,
    "used_mb": 6144,
    "enforced": "",
    "held_by": "scope",
    "why": "it is held",
}
WAITS = HELD | {
    "id": "l-4",
    "state": "waiting",
    "gpus": [],
    "place": 1,
    "ready_in_s": 34.0,
    "bound_s": 148.0,
    "label": "",
    "granted_at": None,
    "used_mb": None,
    "held_by": "",
    "why": "qwen3-8b is in its way",
    "preemptible": False,
}


def test_a_lease_is_a_line_with_what_it_has_and_why() -> None:
    head, held, waits = command._listed([HELD, WAITS]).splitlines()
    assert head.split() == list(command.HEADERS)
    assert held.split()[:7] == ["l-3", "running,", "preemptible", "8.0", "GiB", "6.0", "GiB"]
    assert "train\\x1b[2J" in held
    assert waits.split()[:6] == ["l-4", "waiting,", "place", "1,", "in", "about"]
    assert waits.endswith("qwen3-8b is in its way")
    assert command._listed([]) == "nobody holds a lease, and nobody waits for one"


def test_one_lease_says_how_long_it_waits_at_most_and_how_its_limit_is_kept() -> None:
    waits, held = command._shown(WAITS), command._shown(HELD)
    assert "at most 2m 28s" in waits
    assert "told, not enforced" in held
    assert "dmem" in command._shown(HELD | {"enforced": "dmem"})
    assert "no end can be seen" in command._shown(WAITS | {"bound_s": None})


def test_without_a_helper_nothing_is_leased_and_what_is_wrong_is_said(hive: Hive) -> None:
    assert hive("lease").out == "nobody holds a lease, and nobody waits for one\n"
    said = hive("lease", "show", "l-1", "--json")
    assert (said.code, json.loads(said.err)["code"]) == (3, "not_found")
    for words in (["renew", "l-1", "--token", "1"], ["end", "l-1"]):
        assert hive("lease", *words, "--json").code == 3


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["take", "--vram", "8"], "no amount of memory"),
        (["take", "--vram", "8G", "--ttl", "soon"], "no time"),
        (["renew", "l-1"], "--token"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(hive: Hive, words: list[str], what: str) -> None:
    said = hive("lease", *words)
    assert (said.code, what in said.err) == (2, True)
