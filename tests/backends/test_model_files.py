"""Files that are a whole model: GGUF and Hugging Face's layout, and each way of being none."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from hive.backends.model_files import Format, find
from hive.errors import BadRequest, NotFound


def gguf(*, version: int = 3, tensors: int = 2, magic: bytes = b"GGUF", data: int | None = None) -> bytes:
    """A header as llama.cpp writes it, with a text, an array and numbers; each tensor of 64 weights as F16."""

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    keys = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 0.5, 1.5),
        text("scale") + struct.pack("<If", 6, 0.5),
    ]
    infos = [text(f"t{n}") + struct.pack("<IQIQ", 1, 64, 1, 128 * n) for n in range(tensors)]
    head = magic + struct.pack("<IQQ", version, tensors, len(keys)) + b"".join(keys + infos)
    padding = b"\0" * (-len(head) % 32)
    return head + padding + b"\0" * (128 * tensors if data is None else data)


def safetensors(size: int = 8, *, cut: int = 0) -> bytes:
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * (size - cut)


def hf(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(safetensors())
    (path / "tokenizer.json").write_text("{}")
    (path / "run.py").write_text("print()")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    return path


def test_a_gguf_file_is_a_model_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(gguf())
    found = find(tmp_path / "tiny.gguf")
    assert (found.format, found.is_one_file, found.size_bytes) == (Format.GGUF, True, len(gguf()))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (gguf(magic=b"GGML"), "does not begin with GGUF"),
        (gguf(version=1), "GGUF version 1"),
        (gguf(version=3 << 24), "GGUF version 50331648"),  # the other byte order
        (gguf(tensors=0), "no tensors"),
        (gguf(data=255), "and should be"),
        (gguf()[:60], "inside its header"),
        (b"GG", "does not begin with GGUF"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "no header of a model"),
    ],
)
def test_what_is_no_whole_gguf_file_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(BadRequest, match=says) as refused:
        find(tmp_path / "x.gguf")
    assert refused.value.message.startswith(f"{tmp_path}/x.gguf is no whole model: ")


def test_every_beginning_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    whole = gguf()
    for length in range(len(whole)):
        (tmp_path / "x.gguf").write_bytes(whole[:length])
        with pytest.raises(BadRequest):
            find(tmp_path / "x.gguf")


def test_a_shard_stands_for_all_of_them_and_one_that_lacks_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"big-0000{number}-of-00003.gguf").write_bytes(gguf())
    with pytest.raises(NotFound, match="big-00003-of-00003"):
        find(tmp_path / "big-00001-of-00003.gguf")
    (tmp_path / "big-00003-of-00003.gguf").write_bytes(gguf())
    for path in (tmp_path / "big-00001-of-00003.gguf", tmp_path):
        assert len(find(path).files) == 3


def test_a_directory_of_hugging_face_is_taken_without_programs(tmp_path: Path) -> None:
    found = find(hf(tmp_path / "m"))
    assert (found.format, found.is_one_file) == (Format.HF, False)
    assert sorted(file.name for file in found.files) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert found.left_out == ("pytorch_model.bin", "run.py")


def write(name: str, data: bytes | str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(data if isinstance(data, bytes) else data.encode())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "no \\*.safetensors"),
        (write("config.json", "[]"), "not what it should be"),
        (write("config.json", "{}"), "no model_type"),
        (write("model.safetensors", safetensors(cut=1)), "and should be"),
        (write("model.safetensors", b"\xff" * 64), "no safetensors file"),
        (write("model.safetensors", b"\2\0\0\0\0\0\0\0{}"), "no tensors"),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}'), "lacks model-2"),
        (lambda path: (path / "secret.json").symlink_to("/etc/shadow"), "leads out of"),
    ],
)
def test_a_directory_that_is_no_whole_model_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(hf(tmp_path / "m"))
    with pytest.raises(BadRequest, match=says):
        find(tmp_path / "m")


def test_links_as_the_cache_of_hugging_face_has_them_are_followed(tmp_path: Path) -> None:
    at, blobs = hf(tmp_path / "models--a--b/snapshots/1"), tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    (at / "model.safetensors").rename(blobs / "ab12")
    (at / "model.safetensors").symlink_to("../../blobs/ab12")
    assert find(at).size_bytes > 8


def test_what_is_no_file_and_no_directory_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    for path, error in ((tmp_path / "x.gguf", BadRequest), (tmp_path / "none.gguf", NotFound), (tmp_path, BadRequest)):
        with pytest.raises(error):
            find(path)
