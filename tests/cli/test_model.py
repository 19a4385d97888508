"""`hive model`: listing models and their agents, bringing and removing some."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from hive.cli import following

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_the_decision_is_explained_step_by_step(shared_hive: Hive) -> None:
    said = shared_hive("model", "route", "llama3.2", "--tier", "low")
    assert (said.code, said.out.splitlines()) == (
        0,
        [
            "asked for llama3.2, tier low",
            "tier low prefers q4_0, q4_K_M, q4_K_S",
            "there are llama3.2:q4_0 (Q4_0), llama3.2:q8_0 (Q8_0)",
            "takes llama3.2:q4_0: q4_0 is the first of tier low that is there",
        ],
    )
    found = shared_hive("model", "route", "llama3.2", "--json").json
    assert (found["tier"], found["model"]) == ("medium", "llama3.2:q8_0")


def test_one_that_would_be_refused_is_exit_3_and_says_what_there_is(shared_hive: Hive) -> None:
    said = shared_hive("model", "route", "gpt-9\x1b[2J")
    assert said.code == 3
    assert "model 'gpt-9\\x1b[2J' not found" in said.err
    assert "llama3.2:q4_0" in said.err


def test_an_unknown_tier_is_a_mistake_of_the_command(shared_hive: Hive) -> None:
    said = shared_hive("model", "route", "llama3.2", "--tier", "gold")
    assert said.code == 2
    assert "low, medium, high" in said.err


def test_a_tenant_is_given_no_more_than_it_may_have(shared_hive: Hive) -> None:
    found = shared_hive("model", "route", "llama3.2", "--tier", "high", "--tenant", "acme", "--json").json
    assert found["model"] == "llama3.2:q4_0"


def test_the_list_says_of_what_it_is_and_how_old(shared_hive: Hive) -> None:
    said = shared_hive("model", "list")
    assert said.code == 0
    assert said.out.splitlines() == [
        "MODEL                 SIZE     QUANTIZATION  PARAMETERS  LOADED  TIERS         ALIASES",
        "llama3.2:q4_0         1.8 GiB  Q4_0          3.2B        yes     low           fast",
        "llama3.2:q8_0\\x1b[2J  -        -             -           -       medium, high  -",
        "not offered, but in /var/lib/hive/models/pulled: qwen3-8b\\x1b[2J (15 GiB)",
    ]
    assert said.err.splitlines()[0] == "stale: demo does not answer: this is what it offered last"
    assert said.err.splitlines()[1].startswith("from demo, ")
    found = shared_hive("model", "list", "--json").json
    assert (found["schema"], found["aliases"], len(found["models"])) == ("model.list", {"fast": ["llama3.2:q4_0"]}, 2)


def test_one_model_is_shown_with_who_is_given_it(shared_hive: Hive) -> None:
    said = shared_hive("model", "show", "fast").out
    assert "Variants: llama3.2:q8_0" in said
    assert "Agents: alice (running, tier low, tenant acme, as fast)" in said
    unknown = shared_hive("model", "show", "lama3.2:q4_0")
    assert (unknown.code, "did you mean `llama3.2:q4_0`?" in unknown.err) == (3, True)


def test_a_name_with_a_slash_is_one_name(shared_hive: Hive) -> None:
    assert shared_hive("model", "show", "meta/x", "--json").json["name"] == "meta/x"


def test_a_refresh_of_a_silent_server_is_exit_5(shared_hive: Hive) -> None:
    assert (shared_hive("model", "refresh").code, shared_hive("model", "refresh", "--json").error["code"]) == (
        5,
        "dependency_down",
    )


def test_a_pull_is_followed_in_lines_where_there_is_no_terminal(shared_hive: Hive) -> None:
    said = shared_hive("model", "pull", "/srv/new.gguf")
    assert (said.code, said.out) == (
        0,
        "new.gguf is there in /m/new.gguf, 3.8 MiB, after 3s; left out: run.py\\x1b[2J\n",
    )
    assert said.err.splitlines() == [
        "pulling new.gguf\\x1b[2J",
        "pulling new.gguf\\x1b[2J: 1.9 MiB of 3.8 MiB",
        "next: switch to it",
    ]
    failed = shared_hive("model", "pull", "broken")
    assert (failed.code, failed.out) == (3, "")
    assert "hive: Ollama: file does not exist\nhint: look there" in failed.err
    assert shared_hive("model", "pull", "new", "--json").json["state"] == "done"


def test_a_pull_goes_on_when_nobody_looks_and_ends_when_it_is_cancelled(
    shared_hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = shared_hive("model", "pull", "slow", "--no-wait").out
    assert begun.startswith("job j")
    assert begun.endswith(": pulling slow\\x1b[2J\n")
    assert shared_hive("model", "pull", "other", "--cancel").code == 3

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
    left = shared_hive("model", "pull", "slow")
    assert left.code == 130
    assert "the pull goes on: `hive model pull slow --cancel` ends it" in left.err
    assert shared_hive("model", "pull", "slow", "--cancel").out == "it was cancelled\n"


def test_a_model_is_removed_once_somebody_said_yes(shared_hive: Hive) -> None:
    asked = shared_hive("model", "remove", "tiny")
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert shared_hive("model", "remove", "tiny", "--yes").out == "tiny is removed, 3.8 MiB are free\n"
    used = shared_hive("model", "remove", "llama3.2:q4_0", "--yes")
    assert (used.code, "--force" in used.err) == (1, True)
    assert shared_hive("model", "remove", "llama3.2:q4_0", "--yes", "--force").code == 0
