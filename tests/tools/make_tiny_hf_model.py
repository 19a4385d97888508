#!/usr/bin/env python3
"""Makes a tiny random-weight Llama model that vLLM can serve: 660 kB, nothing is downloaded.

    make_tiny_hf_model.py FOLDER [--seed N] [--tokens N]

Weights are random (seeded), the tokenizer is trained on a few sentences held here. The output rows of special tokens
and of bytes that are not printable ASCII are zero, so N tokens asked for are N tokens given. With
`--tokens` the tokenizer is trained on made-up words as well: what grammars cost grows with its vocabulary. Runs in
vLLM's own environment: torch, transformers and tokenizers come with it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAD, BOS, EOS, START, END = SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
VOCABULARY, CONTEXT = 512, 32768
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2
HEAD_SIZE = 32
"""The smallest that vLLM's attention on a CPU has code for."""


def made_up_words(number: int) -> str:
    """Words, numbers and marks as JSON has them."""
    dice = random.Random(0)
    kinds = ("etaoinshrdlucmfwypvbgkjqxz", "0123456789", '{}[]",:._-/()')
    letters = (dice.choices(kinds, weights=(88, 5, 7))[0] for _ in range(number))
    return " ".join("".join(dice.choices(some, k=dice.randint(1, 9))) for some in letters)


def make_tokenizer(size: int = VOCABULARY) -> Any:
    """Byte-level BPE: 256 bytes, the specials, and pieces of the sentences."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    more = [made_up_words(size * 2)] if size > VOCABULARY else []
    bpe.train_from_iterator([*SENTENCES * 4, *more], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    silence(model, tokenizer)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def silence(model: Any, tokenizer: Any) -> None:
    """Zeroes the output rows of what is no printable ASCII; all others are far from zero, so that no zero row wins."""
    printable = {chr(code) for code in range(0x21, 0x7F)} | {"\u0120"}  # byte-level BPE's space
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
        for index, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
            if token in SPECIALS or not set(token) <= printable:
                model.lm_head.weight[index] = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=VOCABULARY, help="size of the vocabulary")
    asked = parser.parse_args()
    tokenizer = make_tokenizer(asked.tokens)
    model = make_model(tokenizer, asked.seed)
    model.save_pretrained(asked.folder, safe_serialization=True)
    tokenizer.save_pretrained(asked.folder)
    print(f"{asked.folder}: {sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
