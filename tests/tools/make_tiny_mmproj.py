#!/usr/bin/env python3
"""Makes the eyes for the model of make_tiny_gguf.py, random too: 60 kB, nothing is downloaded.

    make_tiny_mmproj.py OUT.gguf [--seed N]

A picture is 4 tokens (32 × 32 points, patches of 8 × 8, merged 2 × 2), in the shape of Gemma 3's SigLIP encoder, which
llama-server serves with `--mmproj`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TEXT_HIDDEN = 64
"""HIDDEN of make_tiny_gguf.py."""
IMAGE, PATCH, MERGED = 32, 8, 2
HIDDEN, INNER, LAYERS, HEADS = 32, 64, 1, 2


def add_shape(writer: gguf.GGUFWriter) -> None:
    writer.add_string("clip.projector_type", "gemma3")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": IMAGE,
        "patch_size": PATCH,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "projection_dim": TEXT_HIDDEN,
        "projector.scale_factor": MERGED,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])


def add_tensors(writer: gguf.GGUFWriter, seed: int) -> None:
    dice = np.random.default_rng(seed)

    def rand(*shape: int) -> Any:
        return (dice.standard_normal(shape) * 0.3).astype(np.float32)

    writer.add_tensor("v.patch_embd.weight", rand(HIDDEN, 3, PATCH, PATCH))
    writer.add_tensor("v.patch_embd.bias", rand(HIDDEN))
    writer.add_tensor("v.position_embd.weight", rand((IMAGE // PATCH) ** 2, HIDDEN))
    shapes = {f"attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "out")}
    shapes |= {"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            writer.add_tensor(f"v.blk.{layer}.{name}.weight", rand(*shape))
            writer.add_tensor(f"v.blk.{layer}.{name}.bias", rand(shape[0]))
        for name in ("ln1", "ln2"):
            add_norm(writer, f"v.blk.{layer}.{name}")
    add_norm(writer, "v.post_ln")
    writer.add_tensor("mm.input_projection.weight", rand(HIDDEN, TEXT_HIDDEN))
    writer.add_tensor("mm.soft_emb_norm.weight", np.ones(HIDDEN, np.float32))


def add_norm(writer: gguf.GGUFWriter, name: str) -> None:
    writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor(f"{name}.bias", np.zeros(HIDDEN, np.float32))


def make(out: Path, seed: int = 0) -> None:
    """Writes the encoder to `out`; the same bytes for the same seed."""
    writer = gguf.GGUFWriter(out, "clip")
    add_shape(writer)
    add_tensors(writer, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
