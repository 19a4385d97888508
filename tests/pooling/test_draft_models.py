"""Models that draft for others in the pool: described, charged, started, and refused where they do not go together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hive.backends.entries import entries_of
from hive.backends.entry_launch import launch_entry
from hive.backends.model_files import read_vocabulary
from hive.errors import ConfigError
from hive.pool.state import MIB, MemoryAccount
from hive.pooling.draft_models import draft_warning, room_for, why_no_draft_model
from hive.pooling.entry_facts import FileFacts, read_facts
from hive.pooling.footprints import Footprints
from hive.settings.file import load_text
from hive.settings.pool import slot_id
from hive.settings.table import Settings
from hive.store.database import Database
from tests.llama import MAKE_MODEL


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: folder / f"{name}.gguf" for name in ("big", "small", "odd")}
    for seed, (name, path) in enumerate(made.items()):
        more = ["--tokens", "2000"] if name == "odd" else []
        subprocess.run([sys.executable, str(MAKE_MODEL), str(path), "--seed", str(seed), *more], check=True)
    return made


def described(
    files: dict[str, Path], *, of_big: str = "speculative = draft\ndraft = small\n", more: str = ""
) -> Settings:
    text = f"[model big]\nfile = {files['big']}\ncontext = 4096\nparallel = 1\n{of_big}\n"
    text += f"[model small]\nfile = {files['small']}\nrole = draft\n\n{more}"
    return load_text(text, env={}).settings


def test_a_draft_has_no_slot_of_its_own(files: dict[str, Path]) -> None:
    entries = entries_of(described(files))
    assert [entry.name for entry in entries.values()] == ["big"]
    assert entries[slot_id("big")].draft == files["small"]


def test_a_draft_that_lies_in_models_dir_is_offered_to_nobody(files: dict[str, Path]) -> None:
    settings = described(files, more="[pool]\nfound = true\n")
    found = {"small": files["small"], "odd": files["odd"]}
    assert [entry.name for entry in entries_of(settings, found).values()] == ["big", "odd"]


def test_its_server_is_told_the_draft(files: dict[str, Path], tmp_path: Path) -> None:
    settings = described(files, of_big="speculative = draft\ndraft = small\nspeculative_draft_tokens = 7\n")
    (entry,) = entries_of(settings).values()

    def words(**accounts: int) -> str:
        made = launch_entry(
            entry, accounts, 0, settings.inference, {}, socket=tmp_path / "s.sock", state=tmp_path, weights_bytes=0
        )
        assert [str(need.path) for need in made.needed if need.key == "draft"] == [str(files["small"])]
        return " ".join(made.command)

    assert f"--spec-type draft-simple -md {files['small']} --spec-draft-n-max 7" in words(cpu=100)
    assert "--spec-draft-ngl" not in words(cpu=100)
    assert "--spec-draft-ngl 999" in words(**{"GPU-1": 100})


def test_an_entry_speaks_for_itself(files: dict[str, Path], tmp_path: Path) -> None:
    """The words of [inference] are of the service of `hive backend`."""
    settings = described(files, of_big="", more="[inference]\nspeculative = ngram\n")
    (entry,) = entries_of(settings).values()
    made = launch_entry(entry, {"cpu": 9}, 0, settings.inference, {}, socket=tmp_path / "s.sock", state=tmp_path)
    assert not [word for word in made.command if "spec" in word]


@pytest.mark.parametrize(
    ("of_big", "more", "wrong"),
    [
        ("speculative = draft\n", "", "missing: the [model NAME] with role = draft"),
        ("draft = small\n", "", "no effect without speculative = draft"),
        ("speculative = draft\ndraft = none\n", "", "there is no [model none]"),
        ("speculative = draft\ndraft = big\n", "", "[model big] is no draft"),
        ("speculative = draft\ndraft = hf\n", "[model hf]\nbackend = vllm\nfile = /d\nrole = draft\n", "another kind"),
        ("", "[model x]\nfile = /x.gguf\nrole = draft\npin = true\n", "loaded with the models that draft with it"),
        ("", "[model o]\nbackend = ollama\nspeculative = ngram\n", "Ollama does not speculate"),
    ],
)
def test_a_description_that_cannot_be_is_told(files: dict[str, Path], of_big: str, more: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as told:
        described(files, of_big=of_big, more=more)
    assert wrong in str(told.value.message)


async def test_a_draft_is_charged_with_its_model(files: dict[str, Path], database: Database) -> None:
    needs = {}
    for word, of_big in {"with": "speculative = draft\ndraft = small\n", "without": ""}.items():
        settings = described(files, of_big=of_big)
        footprints = Footprints(database, lambda settings=settings: settings, {})  # type: ignore[misc]
        (entry,) = entries_of(settings).values()
        await footprints.facts_of(entry)
        need = footprints.need(entry, "cpu")
        assert need is not None
        needs[word] = need.bytes
        await footprints.after_load(entry, "cpu", 10 * MIB, (20 if word == "with" else 10) * MIB, 1.0)
        learnt = footprints.need(entry, "cpu")
        assert learnt is not None
        assert learnt.bytes == (20 if word == "with" else 10) * MIB, "what was measured with a draft is of that alone"
    assert needs["with"] - needs["without"] >= files["small"].stat().st_size


def test_a_draft_that_does_not_go_with_its_model_is_a_reason(files: dict[str, Path]) -> None:
    big, small, odd = (read_facts(files[name]) for name in ("big", "small", "odd"))
    assert big.vocabulary == small.vocabulary == read_vocabulary(files["big"])
    assert big.vocabulary is not None
    assert odd.vocabulary == 2000

    def why(draft: FileFacts, *, kind: str = "llama", draft_bytes: int = 1) -> str:
        return why_no_draft_model(kind, big, draft, draft_bytes=draft_bytes, room=100 * MIB, share=0.15)

    assert why(small) == ""
    assert "another vocabulary" in why(odd)
    assert "speculative_memory_share gives it 15 MiB" in why(small, draft_bytes=16 * MIB)
    assert "there is no" in why(read_facts(files["big"].with_name("gone.gguf")))
    near = FileFacts(vocabulary=big.vocabulary + 100)
    assert why(near) == ""
    assert "another vocabulary" in why(near, kind="vllm")


def test_the_share_is_of_the_largest_account_that_a_model_may_be_in() -> None:
    accounts = [MemoryAccount("GPU-1", 80), MemoryAccount("cpu", 256)]
    assert [room_for(accounts, permitted) for permitted in ((), ("GPU-1",), ("cpu",), ("GPU-9",))] == [80, 80, 256, 0]


def test_a_draft_of_more_than_four_bits_is_warned_of() -> None:
    assert "Q8_0" in draft_warning("small", FileFacts(quantization="Q8_0"))
    assert [draft_warning("small", FileFacts(quantization=name)) for name in ("Q4_0", "")] == ["", ""]
