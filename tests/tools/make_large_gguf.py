#!/usr/bin/env python3
"""Makes random-weight Llama models of a real one's size, and adapters for them, in seconds: nothing is downloaded.

    make_large_gguf.py model OUT.gguf [--shape 7b|1b] [--type q4_0|q8_0|f16] [--seed N]
    make_large_gguf.py adapter OUT.gguf [--shape 7b|1b] [--rank N] [--seed N]

A model has the tokenizer of make_tiny_gguf.py, and as many layers, heads and columns as Llama 3 8B (`7b`: 7.0 billion
weights beside a small vocabulary) or Llama 3.2 1B. Its words make no sense; its memory and its speed are a real one's.
An adapter changes every matrix of every layer a little.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2])]

from tests.tools import make_tiny_gguf as tiny  # noqa: E402 - a program, and a part of this tree

TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q4_0", "q8_0", "f16")}
WEIGHT = 0.02
"""Standard deviation of a weight."""
POOL_BYTES = 1 << 24
"""So much is random; larger matrices repeat it."""


class Shape(NamedTuple):
    """Columns of a hidden state, layers, heads, heads of keys and values, the size of one, and the inner columns."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of the matrices of a layer."""
        return {
            "attn_q": (self.heads * self.head, self.hidden),
            "attn_k": (self.kv_heads * self.head, self.hidden),
            "attn_v": (self.kv_heads * self.head, self.hidden),
            "attn_output": (self.hidden, self.heads * self.head),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }


SHAPES = {"7b": Shape(4096, 32, 32, 8, 128, 14336), "1b": Shape(2048, 16, 32, 8, 64, 8192)}


def blocks(kind: str, count: int, dice: np.random.Generator) -> Any:
    """`count` random blocks of 32 weights as bytes, one row each."""
    if kind == "f16":
        return (dice.standard_normal((count, 32), np.float32) * WEIGHT).astype(np.float16).view(np.uint8)
    inner, widest = (16, 4.6) if kind == "q4_0" else (32, 73.6)  # the standard deviation of what is drawn evenly
    made = np.empty((count, 2 + inner), np.uint8)
    made[:, :2] = np.full(count, WEIGHT / widest, np.float16).view(np.uint8).reshape(count, 2)
    made[:, 2:] = dice.integers(0, 256, (count, inner), np.uint8)
    return made


def matrix(pool: Any, rows: int, columns: int) -> Any:
    """The bytes of a matrix, one row each."""
    count = rows * columns // 32
    return np.resize(pool, (count, pool.shape[1])).reshape(rows, -1)


def make_model(out: Path, shape: Shape, kind: str, seed: int) -> None:
    """Writes the model to `out`; the same bytes for the same seed."""
    dice = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, "llama")
    tokens = tiny.add_tokenizer(writer, tiny.VOCABULARY)
    writer.add_name(f"random {out.stem} {seed}")
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tokens)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    output = (dice.standard_normal((tokens, shape.hidden), np.float32) * WEIGHT).astype(np.float16)
    first_byte = len(tiny.SPECIALS)
    for silent in (slice(0, first_byte + 0x20), slice(first_byte + 0x7F, first_byte + 256)):
        output[silent] = 0
    writer.add_tensor("token_embd.weight", dice.standard_normal((tokens, shape.hidden), np.float32).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    writer.add_tensor("output.weight", output)
    drawn = blocks(kind, POOL_BYTES // 32, dice)
    made = {name: matrix(drawn, *size) for name, size in shape.matrices().items()}
    ones = np.ones(shape.hidden, np.float32)
    for layer in range(shape.layers):
        for name, data in made.items():
            if kind == "f16":
                writer.add_tensor(f"blk.{layer}.{name}.weight", data.view(np.float16))
            else:
                writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=TYPES[kind])
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
    _write(writer)


def make_adapter(out: Path, shape: Shape, rank: int, seed: int) -> None:
    """Writes an adapter of this rank to `out`, in half precision."""
    dice = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    made = {}
    for name, (rows, columns) in shape.matrices().items():
        for part, size in (("a", (rank, columns)), ("b", (rows, rank))):
            made[name, part] = (dice.standard_normal(size, np.float32) * WEIGHT / 4).astype(np.float16)
    for layer in range(shape.layers):
        for (name, part), data in made.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_{part}", data)
    _write(writer)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("model", "adapter"))
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="7b")
    parser.add_argument("--type", choices=tuple(TYPES), default="q4_0")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.what == "model":
        make_model(asked.out, SHAPES[asked.shape], asked.type, asked.seed)
    else:
        make_adapter(asked.out, SHAPES[asked.shape], asked.rank, asked.seed)
    print(f"{asked.out}: {asked.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
