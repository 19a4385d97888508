"""The parts of a model's name: the model, its quantization, its publisher. Pure.

Every server spells it in its own way: `llama3.2:3b-instruct-q4_K_M` (Ollama), `Llama-3.2-3B-Instruct-Q4_K_M.gguf` (a
file), `hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M` (both), `neuralmagic/Meta-Llama-3-8B-Instruct-FP8` (vLLM). A
quantization is taken for one only at the end of a name or tag, and never if it is the whole name: a wrong guess would
put one model in another one's place, a missed one only means that no tier chooses it.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec


class Family(StrEnum):
    """A family of formats: `gguf` is read by Ollama and llama-server, all others by vLLM. `int`: llm-compressor's w4a16
    and w8a8, bitsandbytes, MLX; `fp4`: NVFP4, MXFP4; `plain`: not quantized."""

    GGUF = "gguf"
    AWQ = "awq"
    GPTQ = "gptq"
    FP8 = "fp8"
    FP4 = "fp4"
    INT = "int"
    PLAIN = "plain"


class Quantization(msgspec.Struct, frozen=True):
    """The format of a model's weights. `bits`: of one weight, about; it only orders variants of one model."""

    name: str
    bits: float
    family: Family


class ModelRef(msgspec.Struct, frozen=True):
    """A model's name, taken apart.

    `base`: its words, folded, with size and purpose (`llama-3.2-3b-instruct`): two names of one base and one publisher
    are one model, and another size is another model. `variant`: None where the name does not say it. `adapter`: a LoRA
    on that model. `revision`: what stands behind an `@`. `publisher`: empty where none is named.
    """

    base: str
    variant: Quantization | None = None
    adapter: str = ""
    revision: str = ""
    publisher: str = ""


_GGUF_BITS = (
    # of all weights of Llama-3.1-8B: llama.cpp, tools/quantize/README.md at f4a71e70
    "IQ1_S 2.00  IQ1_M 2.15  IQ2_XXS 2.38  IQ2_XS 2.59  IQ2_S 2.74  IQ2_M 2.93  IQ3_XXS 3.25  IQ3_XS 3.50  IQ3_S 3.66",
    "IQ3_M 3.76  IQ4_XS 4.46  IQ4_NL 4.68  Q2_K_S 2.97  Q2_K 3.16  Q3_K_S 3.64  Q3_K_L 4.30  Q4_K_S 4.67  Q4_K_M 4.89",
    "Q5_K_S 5.57  Q5_K_M 5.70  Q6_K 6.56  Q8_0 8.50",
    # GiB of Llama-3-8B by its 8.03e9 weights: llama.cpp, tools/quantize/quantize.cpp at 03161a4e
    "Q3_K_M 4.00  Q4_0 4.64  Q4_1 5.11  Q5_0 5.57  Q5_1 6.04",
    # aliases there; Q4_0 in another order of bytes
    "Q3_K 4.00  Q4_K 4.89  Q5_K 5.70  Q4_0_4_4 4.64  Q4_0_4_8 4.64  Q4_0_8_8 4.64",
    # ggml's blocks alone (gguf 0.19, GGML_QUANT_SIZES)
    "Q1_0 1.13  TQ1_0 1.69  TQ2_0 2.06  MXFP4_MOE 4.25",
    # publishers' own mixes, reckoned: the same 8B with embeddings and output (6.5 % of it each) at Q8_0, of Q8 at F16
    "Q2_K_L 3.67  Q3_K_XL 4.75  Q4_K_L 5.28  Q5_K_L 6.02  Q6_K_L 6.81",
    "Q2_K_XL 3.67  Q4_K_XL 5.28  Q5_K_XL 6.02  Q6_K_XL 6.81  Q8_K_XL 9.48",
)
_PLAIN_BITS = ("F16 16  FP16 16  FLOAT16 16  BF16 16  F32 32  FP32 32",)
_FP4_BITS = ("MXFP4 4.25  NVFP4 4.5",)
"""Blocks of 32 with a scale of 8 bits (OCP Microscaling 1.0), of 16 with one of 8 (GGML_QUANT_SIZES)."""
_FIRST_NAME = {"FP16": "F16", "FLOAT16": "F16", "FP32": "F32", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_GROUP_BITS = 0.16
"""AWQ and GPTQ: a scale of 16 bits and a zero of 4 for 128 weights. Weights left at 16 bits are not counted."""
_MLX_BITS = 0.5
"""MLX: scale and bias of 16 bits for 64 weights; bitsandbytes: one of 32."""


def _rows(lines: tuple[str, ...], family: Family) -> dict[str, Quantization]:
    words = " ".join(lines).split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return {name: Quantization(_FIRST_NAME.get(name, name), float(bits), family) for name, bits in pairs}


_TABLE = {**_rows(_GGUF_BITS, Family.GGUF), **_rows(_PLAIN_BITS, Family.PLAIN), **_rows(_FP4_BITS, Family.FP4)}
_NAMED = "|".join(re.escape(name.lower()).replace("_", "[_-]") for name in sorted(_TABLE, key=len, reverse=True))
_PATTERN = (
    rf"(?P<named>{_NAMED})"
    r"|awq(?:[-_]?(?:int4|4bit|w4a16))?(?:[-_]g?128g?)?(?P<awq>)"
    r"|gptq(?:[-_]?(?:int|w)?(?P<gptq>[2348])(?:bit|a16)?)?(?:[-_]g?\d{2,3}g?)?(?P<is_gptq>)"
    r"|fp8(?:[-_](?:dynamic|static|block|kv|e4m3|e5m2)){0,3}(?P<fp8>)"
    r"|w(?P<weights>[2348])a(?P<activations>8|16)(?:[-_]g\d{2,3})?"
    r"|(?:bnb[-_])?(?:int(?P<int>[48])|(?P<nbit>[2-8])-?bit)"
)
_WHOLE = re.compile(_PATTERN)
_AT_END = re.compile(rf"(?:^|[-_.+])(?:(?:ud|i1|imat|unsloth|quantized|mlx)[-_.]){{0,2}}(?:{_PATTERN})$")
"""A quantization at the end, with the publishers' marks before it: unsloth's UD, mradermacher's i1."""
_END = 48
"""Characters at the end of a name where a quantization is looked for; the longest that is known has 31."""
_CONTAINERS = tuple(f"{mark}{word}" for mark in "-_." for word in ("gguf", "quantized", "mlx", "i1", "imat"))
"""Words for the container of a model, not for the model."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_WORD = re.compile(r"\d+(?:\.\d+)*[^-_.:/\s\d]*|[^-_.:/\s\d]+")
_HOSTS = ("registry.ollama.ai/", "hf.co/", "huggingface.co/")
"""Registries: a model of theirs has the same name without them."""
_FILE = ".gguf"
_LEFT_OUT = re.compile(r"(?:-(?:\d+x-|e-)?(?:\d+(?:\.\d+)?b|\d\d+m))?(?:-a-\d+(?:\.\d+)?b)?(?:-instruct|-it|-chat)?")
"""`-1m` is no size: it is how much Qwen2.5-7B-Instruct-1M reads."""


def quantization_of(text: str) -> Quantization | None:
    """The quantization of exactly this name, None where it is none. Case does not matter, nor `-` for `_`.

    >>> quantization_of("q4_K_M")
    Quantization(name='Q4_K_M', bits=4.89, family=<Family.GGUF: 'gguf'>)
    >>> quantization_of("GPTQ-Int4").bits, quantization_of("fp8-dynamic").name, quantization_of("q4")
    (4.16, 'FP8', None)
    """
    found = _WHOLE.fullmatch(text.strip().lower())
    return None if found is None else _quantization(found)


def _quantization(found: re.Match[str]) -> Quantization:
    parts = found.groupdict()
    if parts["named"] is not None:
        return _TABLE[parts["named"].upper().replace("-", "_")]
    if parts["awq"] is not None:
        return Quantization("AWQ", 4 + _GROUP_BITS, Family.AWQ)
    if parts["is_gptq"] is not None:
        bits = int(parts["gptq"] or 4)
        return Quantization(f"GPTQ-INT{bits}", bits + _GROUP_BITS, Family.GPTQ)
    if parts["fp8"] is not None:
        return Quantization("FP8", 8.0, Family.FP8)
    if parts["weights"] is not None:
        bits, name = int(parts["weights"]), f"W{parts['weights']}A{parts['activations']}"
        return Quantization(name, bits if bits == 8 else bits + _GROUP_BITS, Family.INT)
    if parts["int"] is not None:
        bits = int(parts["int"])
        return Quantization(f"INT{bits}", bits if bits == 8 else bits + _GROUP_BITS, Family.INT)
    return Quantization(f"{parts['nbit']}BIT", int(parts["nbit"]) + _MLX_BITS, Family.INT)


def parse(name: str) -> ModelRef:
    """The parts of `name`. Never raises; a name without known parts is a base of its own.

    >>> ref = parse("llama3.2:3b-instruct-q4_K_M")
    >>> ref.base, ref.variant.name
    ('llama-3.2-3b-instruct', 'Q4_K_M')
    >>> ref = parse("hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M")
    >>> ref.base, ref.variant.name, ref.publisher
    ('llama-3.2-3b-instruct', 'Q4_K_M', 'bartowski')
    >>> parse("phi-4").base, parse("q4_0").base, parse("int8-parser:latest").variant
    ('phi-4', 'q-4-0', None)
    """
    plain, _, revision = spelled(name).partition("@")
    publisher, _, last = plain.rpartition("/")
    stem, _, tag = last.partition(":")
    if stem.endswith(_FILE):
        publisher, stem = "", _SHARD.sub("", stem[: -len(_FILE)])  # a file lies in directories, which are no publisher
    elif plain.startswith("/"):
        publisher = ""
    tag, of_tag = _split(tag, least=0)
    stem, of_stem = _split(_bare(stem), least=1)
    stem = _bare(stem)
    base = "-".join(_WORD.findall(f"{stem}-{tag}")) or spelled(name) or name.strip().lower()
    return ModelRef(base, of_tag or of_stem, revision=revision, publisher=publisher)


def _bare(stem: str) -> str:
    return next((stem[: -len(end)] for end in _CONTAINERS if stem.endswith(end)), stem)


def _split(text: str, *, least: int) -> tuple[str, Quantization | None]:
    """The text without the quantization at its end, and that. `least`: so many characters have to be left."""
    found = _AT_END.search(text, max(0, len(text) - _END))
    if found is None or found.start() < least:
        return text, None
    return text[: found.start()], _quantization(found)


def spelled(name: str) -> str:
    """A name folded so that those that mean the very same thing are equal: no case, no `:latest`, no default host.

    >>> spelled("Llama3.2:latest"), spelled("registry.ollama.ai/library/llama3.2"), spelled("hf.co/Meta/X:Q4_0")
    ('llama3.2', 'llama3.2', 'meta/x:q4_0')
    """
    folded = name.strip().lower().removesuffix(":latest")
    for host in _HOSTS:
        folded = folded.removeprefix(host)
    return folded.removeprefix("library/")


def leaves_out_only_size_and_purpose(short: str, full: str) -> bool:
    """Whether base `full` is base `short` with a size, `instruct`, `it` or `chat` at its end.

    >>> leaves_out_only_size_and_purpose("llama-3.2", "llama-3.2-3b-instruct")
    True
    >>> [leaves_out_only_size_and_purpose("qwen-2.5", f"qwen-2.5-{rest}") for rest in ("coder-7b", "7b-base", "vl-7b")]
    [False, False, False]
    """
    return full != short and full.startswith(short) and _LEFT_OUT.fullmatch(full, len(short)) is not None
