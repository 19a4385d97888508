#!/usr/bin/env python3
"""Makes a tiny random-weight Llama model that llama-server can serve: 670 kB, nothing is downloaded.

    make_tiny_gguf.py OUT.gguf [--seed N] [--tokens N]

Weights are random (seeded), the vocabulary comes from a few sentences held here. The output rows of special tokens
and of bytes that are not printable ASCII are zero, so with `ignore_eos` N tokens asked for are N tokens given. With
`--tokens` the vocabulary is filled up with made-up words, numbers and marks: what grammars cost grows with it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A hive is a home for many bees, and each bee has its own work to do.",
    "Hello, how are you today? I am fine, thank you very much.",
    "Please write a short story about a river, a mountain and a small boat.",
    "What is the capital of France? The capital of France is Paris.",
    "One two three four five six seven eight nine ten eleven twelve.",
    "You are a helpful assistant. Answer the question as well as you can.",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCABULARY, CONTEXT = 512, 4096
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 64, 128, 2, 4, 2, 32


def made_up_words(seed: int) -> Iterator[str]:
    """Words with and without a space before them, numbers, and marks as JSON has them, as vocabularies have them."""
    dice = random.Random(seed)
    while True:
        kind = dice.random()
        letters = "0123456789" if kind < 0.05 else '{}[]",:._-/()' if kind < 0.12 else "etaoinshrdlucmfwypvbgkjqxz"
        word = "".join(dice.choices(letters, k=dice.randint(1, 3 if kind < 0.12 else 9)))
        yield ("\u2581" if dice.random() < 0.5 else "") + (word.capitalize() if dice.random() < 0.2 else word)


def make_vocabulary(size: int = VOCABULARY) -> tuple[list[str], list[float], list[Any]]:
    """Tokens, scores and types: specials, all bytes, then characters and prefixes of words, then made-up words.

    llama.cpp builds a word by merging neighbours whose concatenation is a token, best score first; so every prefix of
    a word has to be a token of its own.
    """
    kinds = gguf.TokenType
    words = [word for sentence in SENTENCES for word in sentence.split()]
    pieces = ["\u2581", *sorted({letter for word in words for letter in word})]
    pieces += [("\u2581" + word)[:end] for word in words for end in range(2, len(word) + 2)]
    fixed = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    normal = list(dict.fromkeys(pieces))[: VOCABULARY - len(fixed)]
    if size > VOCABULARY:
        more, known = made_up_words(0), dict.fromkeys(normal)
        while len(fixed) + len(known) < size:
            known[next(more)] = None
        normal = list(known)
    types = [kinds.UNKNOWN, *[kinds.CONTROL] * (len(SPECIALS) - 1), *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(normal)]
    scores = [0.0] * len(fixed) + [-float(rank) for rank in range(len(normal))]
    return fixed + normal, scores, types


def add_shape(writer: gguf.GGUFWriter, tokens: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(tokens)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def add_tokenizer(writer: gguf.GGUFWriter, size: int) -> int:
    tokens, scores, types = make_vocabulary(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(4)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def add_tensors(writer: gguf.GGUFWriter, tokens: int, seed: int) -> None:
    dice = np.random.default_rng(seed)

    def rand(*shape: int, std: float = 0.1) -> Any:
        return (dice.standard_normal(shape) * std).astype(np.float32)

    output, first_byte = rand(tokens, HIDDEN, std=0.5), len(SPECIALS)
    for silent in (slice(0, first_byte + 0x20), slice(first_byte + 0x7F, first_byte + 256)):
        output[silent] = 0
    writer.add_tensor("token_embd.weight", rand(tokens, HIDDEN, std=0.5))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output.weight", output)
    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = {
        "attn_q": (queries, HIDDEN),
        "attn_k": (keys, HIDDEN),
        "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, queries),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", rand(*shape))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))


def make(out: Path, seed: int = 0, size: int = VOCABULARY) -> None:
    """Writes the model to `out`; the same bytes for the same seed."""
    writer = gguf.GGUFWriter(out, "llama")
    tokens = add_tokenizer(writer, size)
    add_shape(writer, tokens)
    add_tensors(writer, tokens, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="GGUF file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=VOCABULARY, help="size of the vocabulary")
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed, arguments.tokens)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
