"""Speculation: words for the servers, how good drafts are over time, and the same answers with and without."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.backends.backend import open_backend
from hive.backends.counters import Drafts
from hive.backends.speculation import LEAST_TOKENS, POOR, WINDOW_S, Acceptance, llama_words, vllm_words
from hive.backends.vllm_numba import check_numba, lacks_numba
from hive.domain import BackendKind
from hive.errors import DependencyDown
from hive.settings.table import InferenceSection
from tests import llama, vllm

PROMPTS = ("once upon a time there was", "the river the river the river the river", "a b c d a b c d a b c d a b")
TOKENS = 80


# --- how good drafts are -------------------------------------------------------------------------------------------


def test_it_costs_only_after_ten_minutes_under_three_in_ten() -> None:
    seen, told = Acceptance(), []
    for minute in range(21):
        told.append(seen.see(Drafts(minute * 100, minute * 20), now=minute * 60.0))
    assert told.index(True) == WINDOW_S / 60
    assert told.count(True) == 1, "it is told once"
    assert (seen.rate, seen.costs) == (0.2, True)
    assert "20%" in seen.warning


def test_it_costs_no_more_once_drafts_are_accepted_again() -> None:
    seen = Acceptance()
    for minute in range(12):
        seen.see(Drafts(minute * 100, 0), now=minute * 60.0)
    assert seen.costs
    for minute in range(12, 30):
        seen.see(Drafts(minute * 100, (minute - 11) * 90), now=minute * 60.0)
    assert not seen.costs
    assert seen.warning == ""


def test_a_server_that_was_started_anew_begins_anew() -> None:
    seen = Acceptance()
    for minute in range(12):
        seen.see(Drafts(1000 + minute * 100, 0), now=minute * 60.0)
    assert seen.costs
    assert not seen.see(Drafts(3, 3), now=720.0)
    assert (seen.costs, seen.rate, seen.drafts) == (False, None, Drafts(3, 3))


def test_a_server_that_was_started_without_speculation_is_not_warned_of_for_ever() -> None:
    seen = Acceptance()
    for minute in range(12):
        seen.see(Drafts(minute * 100, 0), now=minute * 60.0)
    seen.see(None, now=720.0)
    assert seen.costs, "it may only have been busy"
    seen.see(None, now=660.0 + WINDOW_S)
    assert (seen.costs, seen.warning, seen.drafts, seen.rate) == (False, "", None, None)


def test_of_a_few_drafts_and_of_no_counters_nothing_is_said() -> None:
    few, none = Acceptance(), Acceptance()
    for minute in range(30):
        few.see(Drafts(minute * (LEAST_TOKENS // 20), 0), now=minute * 60.0)
        none.see(None, now=minute * 60.0)
    assert not few.costs
    assert (none.drafts, none.rate, none.costs) == (None, None, False)


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1), st.floats(1, 400)), max_size=40))
def test_it_costs_exactly_where_the_window_says_so(steps: list[tuple[int, float, float]]) -> None:
    seen, now, looks = Acceptance(), 0.0, [(0.0, Drafts(0, 0))]
    seen.see(looks[0][1], now=0.0)
    for drafted, share, later in steps:
        last = looks[-1][1]
        now += later
        looks.append((now, Drafts(last.drafted + drafted, last.accepted + int(drafted * share))))
        seen.see(looks[-1][1], now=now)
        old = [look for look in looks if look[0] <= now - WINDOW_S]
        if not old:
            assert not seen.costs
            continue
        was, is_now = old[-1][1], looks[-1][1]
        made, kept = is_now.drafted - was.drafted, is_now.accepted - was.accepted
        assert seen.costs == (made >= LEAST_TOKENS and round(kept / made, 3) < POOR)


# --- numba ---------------------------------------------------------------------------------------------------------


def test_a_vllm_without_numba_is_not_started_to_draft_by_ngrams(tmp_path: Path) -> None:
    program, packages = tmp_path / "bin" / "vllm", tmp_path / "lib" / "python3.11" / "site-packages"
    assert not lacks_numba(str(program)), "its packages are elsewhere, and nothing is known"
    packages.mkdir(parents=True)
    config = tmp_path / "pyvenv.cfg"
    config.write_text("include-system-site-packages = true\n")
    assert not lacks_numba(str(program)), "it may be the system's"
    config.write_text("include-system-site-packages = false\n")
    inference = InferenceSection(vllm_program=str(program))
    with pytest.raises(DependencyDown, match="needs numba"):
        check_numba(BackendKind.VLLM, inference, "ngram")
    check_numba(BackendKind.VLLM, inference, "draft")
    check_numba(BackendKind.LLAMA, inference, "ngram")
    link = tmp_path / "elsewhere" / "bin" / "vllm"
    (link.parent.parent / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    link.parent.mkdir(parents=True)
    program.parent.mkdir()
    program.touch()
    link.symlink_to(program)
    assert lacks_numba(str(link))
    (packages / "numba").mkdir()
    assert not lacks_numba(str(link)), "a link of uv or pipx: the packages of what it leads to count"
    check_numba(BackendKind.VLLM, inference, "ngram")


# --- the same answers ----------------------------------------------------------------------------------------------


def answers(url: str) -> list[str]:
    """Greedy continuations of the prompts."""
    wanted = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    said = [asked(f"{url}/v1/completions", {"prompt": prompt, **wanted}) for prompt in PROMPTS]
    return [answer["choices"][0]["text"] for answer in said]


def asked(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextmanager
def llama_with(folder: Path, inference: InferenceSection) -> Iterator[llama.LlamaServer]:
    """The tests' llama-server with the words that Hive gives it."""
    folder.mkdir()
    with llama.serve(folder, more=llama_words(inference)) as server:
        yield server


@pytest.fixture(scope="module")
def drafts_of_llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model itself as its draft, which is always right, and one of other weights, which is not."""
    folder = tmp_path_factory.mktemp("drafts")
    made = {"same": folder / "same.gguf", "other": folder / "other.gguf"}
    for seed, path in enumerate(made.values()):
        subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(path), "--seed", str(seed)], check=True)
    return made


@pytest.mark.llama
async def test_a_llama_server_answers_the_same_with_and_without_speculation(
    tmp_path: Path, llama_server: llama.LlamaServer, drafts_of_llama: dict[str, Path]
) -> None:
    plain = answers(llama_server.url)
    assert await open_backend(BackendKind.LLAMA, llama_server.address).drafts() == Drafts(0, 0)
    accepted: dict[str, Drafts] = {}
    for name, settings in {
        "other": InferenceSection(speculative="draft", llama_speculative_model=str(drafts_of_llama["other"])),
        "same": InferenceSection(speculative="draft", llama_speculative_model=str(drafts_of_llama["same"])),
        "ngram": InferenceSection(speculative="ngram"),
    }.items():
        with llama_with(tmp_path / name, settings) as server:
            assert answers(server.url) == plain, name
            found = await open_backend(BackendKind.LLAMA, server.address).drafts()
            assert found is not None
            accepted[name] = found
    assert accepted["same"].drafted > 0
    assert accepted["same"].accepted > accepted["same"].drafted * 0.9
    assert accepted["other"].drafted > 0
    assert accepted["other"].accepted < accepted["other"].drafted * POOR


@pytest.mark.llama
async def test_a_llama_server_goes_on_drafting_in_vain_where_a_grammar_is_active(
    tmp_path: Path, drafts_of_llama: dict[str, Path]
) -> None:
    """Hive says so (docs/limits.md): per request it cannot be switched off there."""
    settings = InferenceSection(speculative="draft", llama_speculative_model=str(drafts_of_llama["same"]))
    with llama_with(tmp_path / "server", settings) as server:
        body = {
            "prompt": "hello",
            "max_tokens": 40,
            "temperature": 0,
            "grammar": "root ::= [a-z ]*",
            "ignore_eos": True,
        }
        asked(f"{server.url}/completion", body)
        found = await open_backend(BackendKind.LLAMA, server.address).drafts()
    assert found is not None
    assert found.drafted > 0


@contextmanager
def vllm_with(inference: InferenceSection) -> Iterator[vllm.VllmServer]:
    with vllm.served(*vllm_words(inference)) as server:
        yield server


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["draft", "ngram"])
async def test_a_vllm_answers_the_same_with_and_without_speculation(
    method: str, request: pytest.FixtureRequest
) -> None:
    venv = vllm.environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    if method == "ngram" and lacks_numba(str(venv / "bin" / "vllm")):
        pytest.skip("vLLM's environment has no numba: run tests/tools/setup_vllm_cpu.sh")
    plain = answers(request.getfixturevalue("vllm_server").url)
    folder = Path(tempfile.mkdtemp(prefix="hive-draft-"))
    try:
        model = str(vllm.model_for(venv, folder))
        with vllm_with(InferenceSection(speculative=method, vllm_speculative_model=model)) as server:
            assert answers(server.url) == plain
            found = await open_backend(BackendKind.VLLM, server.address).drafts()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert found is not None
    assert found.drafted > 0
    if method == "draft":
        assert found.accepted > found.drafted * 0.9, "it is its own draft"
