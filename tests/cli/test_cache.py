"""`hive cache`: what was reused and flushed, as tables, and the order to flush."""

from __future__ import annotations

from typing import Any

import pytest

from hive.domain import BackendInfo, BackendKind, ModelInfo, UsageEvent

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def used(number: int, cached: int | None) -> UsageEvent:
    return UsageEvent(
        id=f"e-{number}",
        epoch="e",
        event_no=number,
        agent_id="a",
        tenant="default",
        model="tiny",
        backend="llama",
        endpoint="/v1/completions",
        tokens_in=100,
        cached_tokens=cached,
        created_at=1.0,
    )


@pytest.fixture
def hive(hive: Hive) -> Hive:
    effects = hive.box.daemon.effects
    effects.backend = BackendInfo(kind=BackendKind.VLLM, address="/r/vllm.sock", up=True)
    effects.models = [ModelInfo(name="tiny")]
    return hive


def test_what_was_reused_is_told_by_model(hive: Hive) -> None:
    hive.box.daemon.services.cache.used([used(1, 0), used(2, 90), used(3, None)])
    told = hive("cache", "--json").json
    rows = {row["model"]: row for row in told["models"]}
    assert {key: rows["tiny"][key] for key in ("requests", "hits", "tokens", "tokens_reused", "hit_rate")} == {
        "requests": 2,
        "hits": 1,
        "tokens": 200,
        "tokens_reused": 90,
        "hit_rate": 0.45,
    }
    head, line = hive("cache", "show").out.splitlines()[:2]
    assert head.split()[:2] == ["MODEL", "BACKEND"]
    assert "45%" in line


def test_a_flush_is_done_and_shown(hive: Hive) -> None:
    assert hive("cache", "flush", "--tag", "nightly").out == "tag nightly is flushed\n"
    told = hive("cache", "flush", "--tenant", "acme", "--json").json
    assert (told["flushed"], told["entries_removed"], told["left_out"]) == (True, None, [])
    shown = hive("cache").out.split("\n\n")[1].splitlines()
    assert [line.split()[:2] for line in shown[1:3]] == [["tenant", "acme"], ["tag", "nightly"]]


@pytest.mark.parametrize(
    "words",
    [[], ["--all", "--tenant", "acme"], ["--model", "m", "--tag", "t"], ["--tenant", "a", "--tag", ""]],
    ids=" ".join,
)
def test_a_flush_names_one_thing(hive: Hive, words: list[str]) -> None:
    said = hive("cache", "flush", *words)
    assert (said.code, "--all, --model, --tenant and --tag" in said.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "code"), [(["--tenant", "nobody"], 3), (["--tag", "x" * 65], 2), (["--tenant", "../x"], 2)]
)
def test_what_is_not_there_or_is_none_is_told(hive: Hive, words: list[str], code: int) -> None:
    assert hive("cache", "flush", *words).code == code
