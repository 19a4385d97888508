"""`hive model route`: which model a request is given, step by step."""

from __future__ import annotations

from typing import Any

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_the_decision_is_explained_step_by_step(hive: Hive) -> None:
    said = hive("model", "route", "llama3.2", "--tier", "low")
    assert (said.code, said.out.splitlines()) == (
        0,
        [
            "asked for llama3.2, tier low",
            "tier low prefers q4_0, q4_K_M, q4_K_S",
            "there are llama3.2:q4_0 (Q4_0), llama3.2:q8_0 (Q8_0)",
            "takes llama3.2:q4_0: q4_0 is the first of tier low that is there",
        ],
    )
    found = hive("model", "route", "llama3.2", "--json").json
    assert (found["tier"], found["model"]) == ("medium", "llama3.2:q8_0")


def test_one_that_would_be_refused_is_exit_3_and_says_what_there_is(hive: Hive) -> None:
    said = hive("model", "route", "gpt-9\x1b[2J")
    assert said.code == 3
    assert "model 'gpt-9\\x1b[2J' not found" in said.err
    assert "llama3.2:q4_0" in said.err


def test_an_unknown_tier_is_a_mistake_of_the_command(hive: Hive) -> None:
    said = hive("model", "route", "llama3.2", "--tier", "gold")
    assert said.code == 2
    assert "low, medium, high" in said.err
