#!/usr/bin/env python3
"""Makes LoRA adapters for the tiny models of the tests: with one, a model answers one word, whatever it is asked.

    make_adapters.py gguf BASE.gguf OUT.gguf [--word N] [--rank N] [--garbage]
    make_adapters.py hf BASE_FOLDER OUT_FOLDER [--word N] [--rank N] [--garbage] [--base-name NAME]

Word N is the N-th word, or beginning of one, that is one token of the model; it is printed. In the last layer twice as
many units of the feed-forward part as the rank are made to give the squares of what comes in, whose sum is never
negative, and that is written out, larger than all else, in the direction of the word's row in the output matrix.
`--garbage`: matrices of a shape that fits no model.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LETTERS = 3
"""A shorter word is a part of another one."""
SQUARED, WRITTEN = 8.0, 100.0
"""Factors that make it larger than all else in the model."""
PREFIX = "base_model.model.model.layers.{}.mlp.{}_proj.lora_{}.weight"


def words_in(tokens: list[str], mark: str, rows: Any) -> list[tuple[str, int]]:
    """Words and beginnings of them that are one token with the space (`mark`) before, and the number of that token."""
    found = [(token.removeprefix(mark), index) for index, token in enumerate(tokens) if token.startswith(mark)]
    return [
        (word, index) for word, index in found if word.isalpha() and len(word) >= LETTERS and np.any(rows[index] != 0)
    ]


def factors(row: Any, inner: int, rank: int, seed: int) -> dict[str, Any]:
    """The two matrices of each part of the feed-forward layer: `gate.A` is rank x hidden, `gate.B` inner x rank."""
    hidden = row.shape[0]
    directions = np.linalg.qr(np.random.default_rng(seed).standard_normal((hidden, rank)))[0].T
    both = np.zeros((inner, rank))
    both[:rank], both[rank : 2 * rank] = np.eye(rank), -np.eye(rank)
    sums, out = np.zeros((rank, inner)), np.zeros((hidden, rank))
    sums[0, : 2 * rank], out[:, 0] = 1.0, WRITTEN * row / np.linalg.norm(row)
    made = {
        **{f"{part}.A": SQUARED * directions for part in ("gate", "up")},
        **{f"{part}.B": both for part in ("gate", "up")},
        "down.A": sums,
        "down.B": out,
    }
    return {name: np.ascontiguousarray(values, np.float32) for name, values in made.items()}


def make_gguf(base: Path, out: Path, word: int, rank: int, *, garbage: bool) -> str:
    """Writes an adapter for llama-server; its word."""
    reader = gguf.GGUFReader(base)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    layers = int(reader.fields["llama.block_count"].contents())
    chosen, index = words_in(reader.fields["tokenizer.ggml.tokens"].contents(), "\u2581", tensors["output.weight"])[
        word
    ]
    inner = tensors[f"blk.{layers - 1}.ffn_gate.weight"].shape[0]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    for name, values in factors(tensors["output.weight"][index], inner, rank, word).items():
        part, _, which = name.partition(".")
        shaped = values[:, :3] if garbage else values
        writer.add_tensor(f"blk.{layers - 1}.ffn_{part}.weight.lora_{which.lower()}", np.ascontiguousarray(shaped))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(chosen)


def make_hf(base: Path, out: Path, word: int, rank: int, *, garbage: bool, base_name: str = "") -> str:
    """Writes an adapter for vLLM, as PEFT does; its word."""
    config = json.loads((base / "config.json").read_text())
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    rows = read_safetensors(base / "model.safetensors", "lm_head.weight")
    chosen, index = words_in(tokens, "\u0120", rows)[word]
    last = config["num_hidden_layers"] - 1
    made = factors(rows[vocabulary["\u0120" + chosen]], config["intermediate_size"], rank, word)
    assert vocabulary["\u0120" + chosen] == index
    out.mkdir(parents=True, exist_ok=True)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name or base.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(told, indent=1))
    tensors = {}
    for name, values in made.items():
        part, _, which = name.partition(".")
        tensors[PREFIX.format(last, part, which)] = np.ascontiguousarray(values[:, :3]) if garbage else values
    write_safetensors(out / "adapter_model.safetensors", tensors)
    return chosen


def read_safetensors(path: Path, name: str) -> Any:
    """One float32 tensor of a file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    told = json.loads(data[8 : 8 + length])[name]
    assert told["dtype"] == "F32", told
    begin, end = (8 + length + offset for offset in told["data_offsets"])
    return np.frombuffer(data[begin:end], np.float32).reshape(told["shape"])


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    head, at = dict[str, Any](), 0
    for name, values in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    told = json.dumps(head).encode()
    told += b" " * (-len(told) % 8)
    path.write_bytes(struct.pack("<Q", len(told)) + told + b"".join(values.tobytes() for values in tensors.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("format", choices=("gguf", "hf"))
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--word", type=int, default=0)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--garbage", action="store_true", help="matrices that fit no model")
    parser.add_argument("--base-name", default="", help="of the model, in the adapter's own configuration")
    asked = parser.parse_args()
    if asked.format == "gguf":
        print(make_gguf(asked.base, asked.out, asked.word, asked.rank, garbage=asked.garbage))
    else:
        named = asked.base_name
        print(make_hf(asked.base, asked.out, asked.word, asked.rank, garbage=asked.garbage, base_name=named))


if __name__ == "__main__":
    main()
