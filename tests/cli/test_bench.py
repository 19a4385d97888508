"""`hive bench sleep` against a real daemon, on a host with swap that is played."""

from __future__ import annotations

from typing import Any

import pytest

from hive.cli.bench import density

Hive = Any
"""conftest.Hive: test modules import no siblings."""


@pytest.fixture
def mute(host_memory: None, hive: Hive) -> Hive:
    """Beside an agent without a port, which is woken by resume."""
    assert hive("agent", "create", "mute", "--", "sleep", "9").code == 0
    return hive


def test_ram_awake_and_asleep_make_the_density(mute: Hive) -> None:
    """90 MiB awake; deep 9 MiB and 81 MiB in swap, of which zram makes a quarter."""
    answer = mute("bench", "sleep", "mute", "--rounds", "2", "--json").json
    (agent,) = answer["agents"]
    assert (agent["name"], agent["awake_bytes"], agent["skipped"]) == ("mute", 94371840, "")
    assert agent["light"]["bytes"] == 94371840
    assert agent["deep"]["bytes"] == 9437184 + 21233664
    assert (agent["deep"]["wake_ms"] > 0, agent["deep"]["first_turn_ms"]) == (True, None)
    assert answer["k"] == {"light": 1.0, "deep": 0.325}
    assert [row["deep"] for row in answer["density"]] == [
        round(density(row["awake"], 0.325), 3) for row in answer["density"]
    ]
    assert answer["density"][1] == {"awake": 0.1, "light": 1.0, "deep": 2.548}


def test_the_table_is_for_people(mute: Hive) -> None:
    said = mute("bench", "sleep", "mute", "--rounds", "1")
    assert said.err == "measuring mute …\n"
    lines = said.out.splitlines()
    assert lines[0].split("  ")[0] == "NAME"
    assert [line.split()[:2] for line in lines[1:3]] == [["mute", "light"], ["mute", "deep"]]
    assert "10%    1.00 ×  2.55 ×" in said.out
    assert "k = 0.325" in said.out


@pytest.mark.breadth(3)
@pytest.mark.parametrize("found", ["running", "paused (light)", "paused (deep)"])
def test_an_agent_is_left_as_it_was_found(mute: Hive, found: str) -> None:
    if found != "running":
        mute("agent", "pause", "mute", *(["--deep"] if "deep" in found else []))
    mute("bench", "sleep", "mute", "--rounds", "1")
    assert found in next(line for line in mute("agent", "list").out.splitlines() if line.startswith("mute"))


def test_who_does_not_run_is_skipped_and_named(mute: Hive) -> None:
    mute("agent", "stop", "mute")
    assert mute("bench", "sleep", "mute").out == "mute: it is stopped\n"
    assert mute("bench", "sleep", "nobody").code == 3


def test_an_agent_that_does_not_answer_callers_is_skipped_and_put_back(hive: Hive) -> None:
    """alice listens at a port, but here is no proxy."""
    answer = hive("bench", "sleep", "alice", "--json").json
    assert answer["agents"][0]["skipped"].startswith("ingress does not answer")
    assert answer["k"] == {"light": None, "deep": None}
    assert "running" in hive("agent", "list").out.splitlines()[1]
