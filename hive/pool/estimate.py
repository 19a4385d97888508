"""The memory that a model will probably take: for its first load only, until it has been measured. Pure.

The chain of the original specification, the first that is known: what was learnt; `vram_mb` of the entry; the metadata
of a GGUF file, with the context; the size of its files; its name.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from hive.pool.state import MIB

GGUF_FACTOR, SAFETENSORS_FACTOR = 1.1, 1.3
"""Memory for each byte of a file, where nothing else is known."""
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32}
KV_BYTES |= {"q4_0": 18 / 32, "iq4_nl": 18 / 32}
"""Bytes of one value in the cache of keys and values; ggml's blocks of 32."""
BITS = re.compile(r"(?:^|[-_.:])i?q(\d)(?:[-_.]|$)|(?:^|[-_.:])(?:int|fp|bf|f|w)(4|8|16|32)(?:[-_.]|$)", re.IGNORECASE)
PARAMETERS = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)
UNNAMED_BITS = 16.0
PER_BITS_MORE = 0.5
"""A quantisation of `n` bits takes about half a bit a weight more, for its scales."""
NAME_FACTOR = 1.2
"""Weights by the name say nothing about the context."""


class EstimateSource(StrEnum):
    """The link of the chain that an estimate comes from."""

    LEARNT = "learnt"
    ENTRY = "vram_mb"
    METADATA = "metadata"
    FILE = "file size"
    NAME = "name"


class GgufShape(msgspec.Struct, frozen=True):
    """The metadata of a GGUF file that its cache of keys and values depends on."""

    layers: int
    kv_heads: int
    head_dim: int


class EngineNeed(msgspec.Struct, frozen=True):
    """The memory of a runner's engine, as far as it was measured: for each byte of its files, and besides."""

    factor: float
    besides_bytes: int


ENGINES = {
    ("whisper", True): EngineNeed(3.0, 220 * MIB),
    ("whisper", False): EngineNeed(1.3, 600 * MIB),
    ("diffusers", True): EngineNeed(2.2, 450 * MIB),
    ("diffusers", False): EngineNeed(1.2, 2048 * MIB),
}
"""By kind of server, and whether it is on the CPU. Whisper there: weights of 16 bit become 32 (tiny.en of 78 MB took
438 MB at most, base of 148 MB 722, with CTranslate2 4.8). diffusers there: 410 MB with a pipeline of 2 MB (torch 2.13,
diffusers 0.42), and half precision becomes 32 bits. Neither was measured on a GPU."""


class ModelFacts(msgspec.Struct, frozen=True):
    """Knowledge of a model before its first load. `file_bytes`: of all its files, of a draft model and of adapters
    too; `is_gguf`: else safetensors; `context`: tokens of all its parallel requests together; `engine`: of a runner."""

    name: str
    learnt_bytes: int | None = None
    vram_mb: int | None = None
    file_bytes: int | None = None
    is_gguf: bool = True
    shape: GgufShape | None = None
    context: int = 0
    kv_type: str = "f16"
    engine: EngineNeed | None = None


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes, and where the figure comes from."""

    bytes: int
    source: EstimateSource


def estimate(facts: ModelFacts, margin_percent: float = 10.0) -> MemoryEstimate | None:
    """The charge of a first load; None if nothing at all is known: such a model needs a `vram_mb`.

    What was learnt and what the entry says is taken as it is. `margin_percent` is added to metadata only: the factors
    of the others hold it.

    >>> estimate(ModelFacts("m", vram_mb=100)).bytes // MIB
    100
    >>> estimate(ModelFacts("m", file_bytes=1000)), estimate(ModelFacts("m", file_bytes=1000, is_gguf=False)).bytes
    (MemoryEstimate(bytes=1100, source=<EstimateSource.FILE: 'file size'>), 1300)
    >>> shape = GgufShape(layers=32, kv_heads=8, head_dim=128)
    >>> estimate(ModelFacts("m", file_bytes=4700 * MIB, shape=shape, context=8192), 0.0).bytes // MIB
    5724
    >>> estimate(ModelFacts("m", file_bytes=78 * MIB, engine=ENGINES["whisper", True])).bytes // MIB
    454
    >>> estimate(ModelFacts("m")) is None
    True
    """
    if facts.learnt_bytes:
        return MemoryEstimate(facts.learnt_bytes, EstimateSource.LEARNT)
    if facts.vram_mb:
        return MemoryEstimate(facts.vram_mb * MIB, EstimateSource.ENTRY)
    if facts.file_bytes and facts.shape is not None and facts.context:
        bytes = facts.file_bytes + kv_cache_bytes(facts.shape, facts.context, facts.kv_type)
        return MemoryEstimate(int(bytes * (100 + margin_percent) / 100), EstimateSource.METADATA)
    if facts.file_bytes and facts.engine is not None:
        needed = facts.file_bytes * facts.engine.factor + facts.engine.besides_bytes
        return MemoryEstimate(round(needed), EstimateSource.FILE)
    if facts.file_bytes:
        factor = GGUF_FACTOR if facts.is_gguf else SAFETENSORS_FACTOR
        return MemoryEstimate(round(facts.file_bytes * factor), EstimateSource.FILE)
    by_name = bytes_by_name(facts.name)
    return None if by_name is None else MemoryEstimate(by_name, EstimateSource.NAME)


def kv_cache_bytes(shape: GgufShape, context: int, kv_type: str = "f16") -> int:
    """Bytes of the cache of keys and values: 2 x layers x heads x dimension x context, in the type it is kept in.

    An unknown type is taken for the largest.

    >>> [kv_cache_bytes(GgufShape(32, 8, 128), 8192, type) // MIB for type in ("f16", "q8_0", "f32", "?")]
    [1024, 544, 2048, 2048]
    """
    values = 2 * shape.layers * shape.kv_heads * shape.head_dim * context
    return int(values * KV_BYTES.get(kv_type.lower(), max(KV_BYTES.values())))


def bytes_by_name(name: str) -> int | None:
    """Bytes by the parameters and the quantisation that a name tells; None if it tells no parameters.

    >>> [round((bytes_by_name(name) or 0) / 1e9, 1) for name in ("llama3.1:8b-q4_0", "qwen3-32b", "8x7b-q8", "x")]
    [5.4, 76.8, 71.4, 0.0]
    """
    parameters = PARAMETERS.search(name)
    if parameters is None:
        return None
    billions = int(parameters[1] or 1) * float(parameters[2])
    told = BITS.search(name)
    bits = UNNAMED_BITS
    if told is not None:
        bits = float(told[1]) + PER_BITS_MORE if told[1] else float(told[2])
    return int(billions * 1e9 * bits / 8 * NAME_FACTOR)
