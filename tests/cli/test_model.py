"""`hive model`: listing models and their agents, bringing and removing some."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hive.cli import following, model
from tests.cli.conftest import beside_ollama

Hive = Any
"""conftest.Hive: test modules import no siblings."""
TINY = b"GGUF\3\0\0\0" + b"\1" + b"\0" * 15 + b"\1" + b"\0" * 7 + b"t" + b"\1\0\0\0" + b"\2" + b"\0" * 23
"""A header with one tensor of two F32 weights."""


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
    found = shared_hive("model", "route", "fast", "--tier", "high", "--tenant", "acme", "--json").json
    assert found["model"] == "llama3.2:q4_0"
    said = shared_hive("model", "route", "llama3.2:q8_0", "--tier", "high", "--tenant", "acme")
    assert said.code == 3
    assert "tenant acme may not use the model" in said.err
    assert shared_hive("model", "route", "llama3.2:q8_0", "--tier", "high").code == 0


def test_the_list_says_of_what_it_is_and_how_old(shared_hive: Hive) -> None:
    said = shared_hive("model", "list")
    assert said.code == 0
    assert said.out.splitlines()[:3] == [
        "MODEL              SIZE     QUANTIZATION  PARAMETERS  LOADED  TIERS              ALIASES",
        "llama3.2:q4_0      7.6 MiB  Q4_0          -           no      low                fast",
        "llama3.2:q8_0      7.6 MiB  Q8_0          -           no      medium, high       -",
    ]
    assert "odd\\x1b[2J:latest" in said.out
    assert said.err.startswith("from Ollama at 127.0.0.1:")
    found = shared_hive("model", "list", "--json").json
    assert (found["schema"], found["aliases"], len(found["models"])) == ("model.list", {"fast": ["llama3.2:q4_0"]}, 5)


def test_what_a_silent_server_offered_last_is_stale_and_a_refresh_is_exit_5(
    monkeypatch: pytest.MonkeyPatch, no_daemon: Hive
) -> None:
    with beside_ollama() as (daemon, ollama):
        files = daemon.box.paths.state / "models"
        files.mkdir()
        (files / "qwen3-8b.gguf").write_bytes(bytes(15 << 10))
        ollama.process.kill()
        monkeypatch.setenv("HIVE_SOCKET", str(daemon.socket))
        assert no_daemon("model", "refresh").code == 5
        assert no_daemon("model", "refresh", "--json").error["code"] == "dependency_down"
        said = no_daemon("model", "list")
    assert said.err.splitlines()[0].endswith(" does not answer: this is what it offered last")
    assert said.err.startswith("stale: ")
    assert said.out.splitlines()[-1] == f"not offered, but in {files}: qwen3-8b (15 KiB)"


def test_one_model_is_shown_with_who_is_given_it(shared_hive: Hive) -> None:
    said = shared_hive("model", "show", "fast").out
    assert "Variants: llama3.2:q8_0" in said
    assert "Agents: alice (running, tier low, tenant acme, as fast)" in said
    unknown = shared_hive("model", "show", "lama3.2:q4_0")
    assert (unknown.code, "did you mean `llama3.2:q4_0`?" in unknown.err) == (3, True)


def test_a_name_with_a_slash_is_one_name(shared_hive: Hive) -> None:
    assert shared_hive("model", "show", "meta/x", "--json").json["name"] == "meta/x:latest"


def test_a_pull_is_followed_in_lines_where_there_is_no_terminal(shared_hive: Hive) -> None:
    said = shared_hive("model", "pull", "new")
    assert said.code == 0
    assert re.fullmatch(r"new is there, 7\.6 MiB, after \d+s\n", said.out)
    assert said.err.startswith("Ollama pulls new\n")
    failed = shared_hive("model", "pull", "nonexistent")
    assert (failed.code, failed.out) == (3, "")
    assert "file does not exist" in failed.err
    assert shared_hive("model", "pull", "newer", "--json").json["state"] == "done"


def test_files_are_brought_and_what_to_do_next_is_said(shared_hive: Hive, tmp_path: Path) -> None:
    (tmp_path / "brought.gguf").write_bytes(TINY + bytes(11))
    said = shared_hive("model", "pull", str(tmp_path / "brought.gguf"))
    place = shared_hive.box.paths.state / "models" / "brought.gguf"
    assert said.code == 0, said.err
    assert said.out.startswith(f"brought is there in {place}, ")
    assert said.err.splitlines()[-1].startswith("next: ")
    assert shared_hive("model", "remove", "brought", "--yes").out == "brought is removed, 72 B are free\n"
    result = {"model": "m", "file": "/m", "size_bytes": 4_000_000, "took_s": 3.0, "left_out": ["run.py\x1b[2J"]}
    told = model._pulled({"state": "done", "result": result})
    assert told == "m is there in /m, 3.8 MiB, after 3s; left out: run.py\\x1b[2J"


def test_a_pull_goes_on_when_nobody_looks_and_ends_when_it_is_cancelled(
    shared_hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = shared_hive("model", "pull", "slow", "--no-wait").out
    assert re.fullmatch(r"job [0-9a-f]+: .*pull.*\n", begun)
    assert shared_hive("model", "pull", "other", "--cancel").code == 3

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
    left = shared_hive("model", "pull", "slow")
    assert left.code == 130
    assert "the pull goes on: `hive model pull slow --cancel` ends it" in left.err
    assert shared_hive("model", "pull", "slow", "--cancel").out.endswith("it was cancelled\n")


def test_a_model_is_removed_once_somebody_said_yes(shared_hive: Hive) -> None:
    asked = shared_hive("model", "remove", "tiny")
    assert (asked.code, "--yes" in asked.err) == (2, True)
    assert shared_hive("model", "remove", "tiny", "--yes").out == "tiny is removed\n"
    backend = shared_hive.box.services.effects.backend
    httpx.post(f"http://{backend.address}/api/generate", json={"model": "llama3.2:q4_0"}, trust_env=False)
    used = shared_hive("model", "remove", "llama3.2:q4_0", "--yes")
    assert (used.code, "--force" in used.err) == (1, True)
    assert shared_hive("model", "remove", "llama3.2:q4_0", "--yes", "--force").code == 0
