"""A Whisper's directory: found, checked before it is loaded, and started with what its entry says."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hive.backends.entries import entries_of, kind_at
from hive.backends.entry_launch import launch_entry
from hive.backends.model_files import Format, find
from hive.backends.models_dir import ModelsDir
from hive.domain import BackendKind
from hive.errors import BadRequest, HiveError
from hive.pooling.entry_facts import entry_facts, model_info, read_facts
from hive.settings.pool import ModelRow, PoolSection
from hive.settings.table import InferenceSection, Settings
from tests import whisper


def text(value: bytes) -> bytes:
    return struct.pack("<H", len(value) + 1) + value + b"\0"


def weights(spec: bytes = b"WhisperSpec", *, tensors: int = 2, told: int = 6) -> bytes:
    """A model.bin with small tensors and one alias, as CTranslate2 writes it."""
    tensor = text(b"encoder/x") + struct.pack("<BIIBI", 2, 1, 4, 0, 16) + bytes(16)
    aliases = struct.pack("<I", 1) + text(b"a") + text(b"b")
    return struct.pack("<I", told) + text(spec) + struct.pack("<II", 3, tensors) + tensor * tensors + aliases


def directory(folder: Path, content: bytes | None = None, *, tokenizer: bool = True) -> Path:
    folder.mkdir()
    (folder / "model.bin").write_bytes(weights() if content is None else content)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_whole_one_is_found_with_its_files_alone(tmp_path: Path) -> None:
    found = find(directory(tmp_path / "w"))
    assert found.format is Format.WHISPER
    assert [file.name for file in found.files] == ["model.bin", "config.json", "tokenizer.json"]
    assert found.left_out == ("README.md",)


def test_real_weights_are_whole() -> None:
    assert find(whisper.model()).size_bytes > 70_000_000


def test_one_that_was_copied_half_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    folder = directory(tmp_path / "w")
    for cut in range(len(weights())):
        (folder / "model.bin").write_bytes(weights()[:cut])
        with pytest.raises(BadRequest, match="no whole model"):
            find(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (weights(b"TransformerSpec"), "TransformerSpec"),
        (weights() + b"x", "should be"),
        (weights(told=99), "version is 99"),
        (struct.pack("<I", 6) + text(b"WhisperSpec") + struct.pack("<II", 3, 1 << 31), "no header"),
        (b"", "within its header"),
    ],
)
def test_what_is_no_whisper_is_refused_in_words(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(HiveError, match=why):
        find(directory(tmp_path / "w", content))


def test_one_without_its_tokenizer_is_refused_because_no_hub_is_asked(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"tokenizer\.json"):
        find(directory(tmp_path / "w", tokenizer=False))


def test_one_in_models_dir_is_a_model_of_sound_without_a_description(tmp_path: Path) -> None:
    directory(tmp_path / "ear")
    (tmp_path / "text").mkdir()
    assert kind_at(tmp_path / "text") is BackendKind.VLLM
    entries = entries_of(Settings(pool=PoolSection(found=True)), ModelsDir(tmp_path).paths())
    (entry,) = [entry for entry in entries.values() if entry.name == "ear"]
    assert entry.kind == "whisper"
    facts = entry_facts(entry, read_facts(entry.path), InferenceSection())
    assert (facts.context, facts.parallel) == (0, 1)
    assert model_info(entry, facts).capabilities == ("transcription",)


@pytest.mark.parametrize(("accounts", "device", "gpus"), [({"cpu": 900}, "cpu", ""), ({"GPU-1": 900}, "cuda", "GPU-1")])
def test_its_start_names_its_files_and_where_it_is(
    tmp_path: Path, accounts: dict[str, int], device: str, gpus: str
) -> None:
    model = directory(tmp_path / "ear")
    settings = Settings(models={"ear": ModelRow(backend="whisper", file=str(model))})
    (entry,) = entries_of(settings).values()
    inference = InferenceSection(whisper_program="/opt/w/bin/hive-runner")
    made = launch_entry(entry, accounts, 0, inference, {}, socket=Path("/r/s.sock"), state=Path("/s"), most_audio_s=60)
    words = list(made.command)
    assert words[:2] == ["/opt/w/bin/hive-runner", "whisper"]
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert flags == {
        "--socket": "/r/s.sock",
        "--name": "ear",
        "--spool": "/s",
        "--model": str(model),
        "--device": device,
        "--most-audio-s": "60",
    }
    assert made.environment["HF_HUB_OFFLINE"] == "1"
    assert made.environment["CUDA_VISIBLE_DEVICES"] == gpus
    assert [need.key for need in made.needed] == ["whisper_program", "file"]
