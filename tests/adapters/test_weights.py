"""Headers that lie: of safetensors and of GGUF files, refused before an inference server reads them."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.adapters import gguf, peft
from hive.adapters.lora import LoraFile, Matrix, merged
from hive.errors import AdapterMismatch, AdapterUnsafe
from tests.adapters.lora_files import INPUTS, OUTPUTS, TARGET, Tensors, gguf_adapter, gguf_header, pair, peft_adapter
from tests.adapters.lora_files import safetensors as safetensors_of

# safetensors -------------------------------------------------------------------------------------------------------


def header_of(path: Path, content: bytes) -> dict[str, peft.TensorInHeader]:
    path.write_bytes(content)
    return peft.read_header(path)


def entry(begin: int, end: int, *, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


WHOLE: Tensors = {"a": ("F32", [2], bytes(8)), "b": ("F32", [2], bytes(8))}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
        ((17 << 20).to_bytes(8, "little") + b"{}", "a header of 17825792 bytes"),
        ((40).to_bytes(8, "little") + b'{"a": 1}', "a header of 40 bytes in a file of 16"),
        ((4).to_bytes(8, "little") + b"[[[[", "no safetensors header"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc", "no safetensors header"),
        ((2).to_bytes(8, "little") + b"{}", "it has no tensors"),
        (safetensors_of(WHOLE)[:-1], "was not copied to its end"),
        (safetensors_of(WHOLE) + b"x", "should be"),
        (safetensors_of(WHOLE, b=entry(8, 80)), "was not copied to its end"),
        (safetensors_of(WHOLE, b=entry(4, 16)), "does not begin where the one before it ends"),
        (safetensors_of(WHOLE, b=entry(0, 8)), "does not begin where the one before it ends"),
        (safetensors_of(WHOLE, b=entry(12, 16)), "does not begin where the one before it ends"),
        (safetensors_of(WHOLE, b=entry(8, 4, shape=[1])), "does not begin where the one before it ends"),
        (safetensors_of(WHOLE, b=entry(8, 16, shape=[3])), "are not those of its shape"),
        (safetensors_of(WHOLE, b=entry(8, 16, shape=[1 << 62, 1 << 62])), "dimensions that no model has"),
        (safetensors_of(WHOLE, b=entry(8, 16, shape=[-2])), "dimensions that no model has"),
        (safetensors_of(WHOLE, b=entry(8, 16, dtype="PICKLE")), "of type 'PICKLE'"),
        (safetensors_of(WHOLE, b={"dtype": "F32"}), "no safetensors header"),
        (safetensors_of(WHOLE, b=entry(8, 16) | {"data_offsets": [8]}), "no safetensors header"),
        (safetensors_of(WHOLE, b=entry(8, 16) | {"data_offsets": [8, 1 << 70]}), "are not those of its shape"),
        (safetensors_of(WHOLE, __metadata__={"a": 1}), "no safetensors header"),
        (safetensors_of(WHOLE, __metadata__={"a": "x"}).replace(b'"x"', b'"\xff"'), "no safetensors header"),
        ((100_000).to_bytes(8, "little") + b'{"a":' + b"[" * 99_995, "no safetensors header"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(AdapterUnsafe, match=why):
        header_of(tmp_path / "x.safetensors", content)


def test_a_safetensors_file_that_does_not_lie_is_read(tmp_path: Path) -> None:
    content = safetensors_of(WHOLE, __metadata__={"format": "pt"})
    assert sorted(header_of(tmp_path / "x.safetensors", content)) == ["a", "b"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_safetensors_file_or_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for content in (data, len(data).to_bytes(8, "little") + data):
        try:
            header_of(path, content)
        except AdapterUnsafe:
            continue


def test_an_adapter_of_peft_is_read(tmp_path: Path) -> None:
    found = peft.read_adapter(peft_adapter(tmp_path / "a", rank=4))
    assert (found.rank, found.base) == (4, "tiny-base")
    assert found.lora.targets == {f"{TARGET}.weight": Matrix(INPUTS, OUTPUTS)}


def test_the_change_of_an_embedding_is_the_other_way_round(tmp_path: Path) -> None:
    place = peft_adapter(tmp_path / "a", rank=4)
    name = "base_model.model.model.embed_tokens"
    tensors = pair(4) | {
        f"{name}.lora_embedding_A": ("F32", [4, 100], bytes(1600)),
        f"{name}.lora_embedding_B": ("F32", [INPUTS, 4], bytes(16 * INPUTS)),
    }
    (place / "adapter_model.safetensors").write_bytes(safetensors_of(tensors))
    assert peft.read_adapter(place).lora.targets["model.embed_tokens.weight"] == Matrix(INPUTS, 100)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "of a IA3 adapter"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"r": 16}, "says r = 16, and its tensors are of rank 8"),
        ({"r": 0}, "a rank that is none"),
        ({"r": "8"}, "none that can be read"),
        ({"rank_pattern": {"q": 1 << 20}}, "a rank that is none"),
    ],
)
def test_a_configuration_that_no_server_takes_is_refused(tmp_path: Path, config: dict[str, object], why: str) -> None:
    place = peft_adapter(tmp_path / "a", **{"rank": 8, **config})  # type: ignore[arg-type]
    with pytest.raises((AdapterMismatch, AdapterUnsafe), match=why):
        peft.read_adapter(place)


def test_another_rank_of_one_module_counts(tmp_path: Path) -> None:
    place = peft_adapter(tmp_path / "a", rank=8, rank_pattern={"q_proj": 32})
    assert peft.read_adapter(place).rank == 32


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"r": 8' + b" " * (1 << 20) + b"}"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    place = peft_adapter(tmp_path / "a")
    (place / "adapter_config.json").write_bytes(content)
    with pytest.raises(AdapterUnsafe, match=r"adapter_config\.json"):
        peft.read_adapter(place)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop(next(iter(tensors))), "one of the two tensors"),
        (lambda tensors: tensors.update(x=("F32", [1], bytes(4))), "none of a LoRA adapter"),
        (lambda tensors: tensors.update({"m.lora_A.weight": ("F32", [4], bytes(16))}), "is no matrix"),
        (
            lambda tensors: tensors.update(
                {"m.lora_A.weight": ("F32", [8, 1], bytes(32)), "m.lora_B.weight": ("F32", [1, 4], bytes(16))}
            ),
            "have the ranks 8 and 4",
        ),
    ],
)
def test_tensors_that_are_no_whole_adapter_are_refused(tmp_path: Path, change: object, why: str) -> None:
    place = peft_adapter(tmp_path / "a")
    tensors = pair()
    change(tensors)  # type: ignore[operator]
    (place / "adapter_model.safetensors").write_bytes(safetensors_of(tensors))
    with pytest.raises((AdapterMismatch, AdapterUnsafe), match=why):
        peft.read_adapter(place)


def test_two_files_do_not_change_one_matrix() -> None:
    one = LoraFile({"q": Matrix(1, 1)}, {"q": 8})
    with pytest.raises(AdapterUnsafe, match="two of its files change q"):
        merged([one, one])


# GGUF --------------------------------------------------------------------------------------------------------------


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def text_key(name: bytes, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", 8) + text(value)


ADAPTER = text_key(b"general.type", b"adapter") + text_key(b"adapter.type", b"lora")


def tensor(name: bytes, shape: tuple[int, ...], *, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


A, B = b"blk.0.attn_q.weight.lora_a", b"blk.0.attn_q.weight.lora_b"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "ends after 0 bytes"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "GGUF version 1"),
        (gguf_header(counts=(1 << 60, 0)), "tensors in 24 bytes"),
        (gguf_header(counts=(0, 1 << 60)), "keys in 24 bytes"),
        (gguf_header(text(b"x", 1 << 62), counts=(0, 1)), "a name of 4611686018427387904 bytes"),
        (gguf_header(text(b"x", 60_000), counts=(0, 1)), "inside its header"),
        (gguf_header(text(b"x") + struct.pack("<I", 77), counts=(0, 1)), "a value of type 77"),
        (gguf_header(text(b"x") + struct.pack("<IIQ", 9, 8, 1 << 61), counts=(0, 1)), "inside its header"),
        (gguf_header(text(b"x") + struct.pack("<IIQ", 9, 4, 1 << 62), counts=(0, 1)), "inside its header"),
        (gguf_header(text(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, counts=(0, 1)), "of type 9"),
        (gguf_header(text(b"x") + struct.pack("<I", 8) + text(b"y", 1 << 63), counts=(0, 1)), "inside its header"),
        (gguf_header(text(b"general.alignment") + struct.pack("<II", 4, 3), counts=(0, 1)), "an alignment of 3"),
        (gguf_header(text(b"general.alignment") + struct.pack("<II", 4, 0), counts=(0, 1)), "an alignment of 0"),
        (gguf_header(text_key(b"general.type", b"model"), counts=(0, 1)), "general.type is not"),
        (
            gguf_header(text_key(b"general.type", b"adapter") + text_key(b"adapter.type", b"control"), counts=(0, 2)),
            "of type 'control'",
        ),
        (gguf_header(ADAPTER, counts=(0, 2)), "no tensors of a LoRA adapter"),
        (gguf_header(ADAPTER, tensor(A, (64, 8)), counts=(1, 2)), "was not copied to its end"),
        (
            gguf_header(ADAPTER, tensor(A, (64, 8), offset=1 << 60) + bytes(9000), counts=(1, 2)),
            "not copied to its end",
        ),
        (gguf_header(ADAPTER, tensor(A, (64, 8)) + bytes(9000), counts=(1, 2)), "one of the two tensors"),
        (gguf_header(ADAPTER, tensor(A, (1 << 40, 8)), counts=(1, 2)), "dimensions that no model has"),
        (gguf_header(ADAPTER, tensor(A, (0, 8)), counts=(1, 2)), "dimensions that no model has"),
        (gguf_header(ADAPTER, tensor(A, (1,) * 5), counts=(1, 2)), "a tensor of 5 dimensions"),
        (gguf_header(ADAPTER, tensor(A, (64, 8), kind=12), counts=(1, 2)), "of type 12"),
        (gguf_header(ADAPTER, tensor(A, (40, 8), kind=8), counts=(1, 2)), "does not end with a block"),
        (gguf_header(ADAPTER, tensor(A, (64, 8)) * 2, counts=(2, 2)), "names a tensor twice"),
        (gguf_header(ADAPTER, tensor(A, (64, 8)) + tensor(B, (8, 64)) + bytes(9000), counts=(2, 2)), "over each other"),
        (gguf_header(ADAPTER, tensor(A, (64,)) + bytes(9000), counts=(1, 2)), "is no matrix"),
        (gguf_header(ADAPTER, tensor(b"blk.0.x", (64, 8)) + bytes(9000), counts=(1, 2)), "belongs to no LoRA"),
        (
            gguf_header(ADAPTER, tensor(A, (64, 8)) + tensor(B, (4, 64), offset=4096) + bytes(9000), counts=(2, 2)),
            "have the ranks 8 and 4",
        ),
    ],
)
def test_a_gguf_header_that_lies_is_refused_and_costs_no_memory(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises((AdapterUnsafe, AdapterMismatch), match=why):
        gguf.read_adapter(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_an_adapter_of_llama_cpp_is_read(tmp_path: Path) -> None:
    found = gguf.read_adapter(gguf_adapter(tmp_path / "a.gguf", rank=4))
    assert (found.rank, found.architecture) == (4, "llama")
    assert found.targets == {"blk.0.attn_q.weight": Matrix(INPUTS, OUTPUTS), "token_embd.weight": Matrix(INPUTS, 100)}


def test_a_gguf_file_cut_or_changed_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    whole = gguf_adapter(tmp_path / "a.gguf").read_bytes()
    path, chance = tmp_path / "b.gguf", random.Random(1)
    for number in range(400):
        content = bytearray(whole[: chance.randrange(len(whole))] if number % 2 else whole)
        for _ in range(chance.randrange(4)):
            if content:
                content[chance.randrange(min(600, len(content)))] = chance.randrange(256)
        path.write_bytes(content)
        try:
            gguf.read_adapter(path)
        except (AdapterUnsafe, AdapterMismatch):
            continue


def test_a_model_in_shards_is_looked_at_whole(tmp_path: Path) -> None:
    for number, name in ((1, b"a.weight"), (2, b"b.weight")):
        content = gguf_header(text_key(b"general.architecture", b"llama"), tensor(name, (4, 2)), counts=(1, 1))
        (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(content + bytes(64))
    architecture, matrices = gguf.read_model(tmp_path / "m-00001-of-00002.gguf")
    assert (architecture, sorted(matrices)) == ("llama", ["a.weight", "b.weight"])


def test_the_header_of_what_was_written_by_hand_is_json() -> None:
    content = safetensors_of(pair())
    assert len(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])) == 2
