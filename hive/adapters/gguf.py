"""The header of a GGUF file: of an adapter (`general.type = adapter`), and of the model that it is for.

Every length is checked against the file before it is read or skipped: a header that lies costs no memory and no time.
llama.cpp reads the same fields with less care, as root's or the box's own files (its SECURITY.md says so).
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hive.adapters.lora import DIMENSION_MOST, HalfPair, LoraFile, Matrix, paired
from hive.errors import AdapterMismatch, AdapterUnsafe

VERSIONS = (2, 3)
KEYS_MOST = 1 << 16
TENSORS_MOST = 1 << 18
NAME_MOST = 1 << 10
"""Bytes; llama.cpp takes 64 of a tensor."""
TEXT_MOST = 1 << 16
NESTING_MOST = 4
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY, _UINT32 = 8, 9, 4
_WEIGHTS = {0: (1, 4), 1: (1, 2), 30: (1, 2), 8: (32, 34)}
"""Types that convert_lora_to_gguf.py writes: f32, f16, bf16, q8_0; weights and bytes of a block."""
_DOWN, _UP = ".lora_a", ".lora_b"
_TRANSPOSED = "token_embd.weight"
"""Of this one llama.cpp looks rows up: its two tensors are the other way round (llama-adapter.cpp)."""
_PASSED_OVER = "_norm.weight"
"""llama.cpp does not look at these."""
_SHARD = re.compile(r"-00001-of-(\d{5})\.gguf$")


class GgufTensor(NamedTuple):
    """One tensor of a header; `shape` as it is written, the fastest dimension first."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufContents(NamedTuple):
    """The texts of a header by key, its tensors, and where their bytes begin."""

    texts: dict[str, str]
    tensors: list[GgufTensor]
    begin: int


def read_adapter(path: Path) -> LoraFile:
    """The adapter in this file, whole. Raises AdapterUnsafe, AdapterMismatch where it is another kind of adapter."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        contents = read_contents(file, size)
    if contents.texts.get("general.type") != "adapter":
        raise AdapterUnsafe("it is no adapter: its general.type is not `adapter`", hint="hive model pull takes models")
    if (kind := contents.texts.get("adapter.type", "")) != "lora":
        raise AdapterMismatch(f"it is an adapter of type {kind[:40]!r}; only lora is taken")
    _check_data(contents, size)
    downs: dict[str, HalfPair] = {}
    ups: dict[str, HalfPair] = {}
    for tensor in contents.tensors:
        if tensor.name.endswith(_PASSED_OVER):
            continue
        name, is_down = tensor.name.removesuffix(_DOWN), tensor.name.endswith(_DOWN)
        if not is_down and not tensor.name.endswith(_UP):
            raise AdapterUnsafe(f"the tensor {tensor.name[:80]} belongs to no LoRA adapter")
        name = name if is_down else tensor.name.removesuffix(_UP)
        if len(tensor.shape) < 2:
            raise AdapterUnsafe(f"the tensor {tensor.name[:80]} is no matrix")
        rank_at = 0 if name == _TRANSPOSED or not is_down else 1
        (downs if is_down else ups)[name] = HalfPair(tensor.shape[rank_at], tensor.shape[1 - rank_at])
    pairs = paired(downs, ups, contents.texts.get("general.architecture", ""))
    if (turned := pairs.targets.get(_TRANSPOSED)) is not None:
        pairs.targets[_TRANSPOSED] = Matrix(turned.outputs, turned.inputs)
    return pairs


def read_model(path: Path) -> tuple[str, dict[str, Matrix]]:
    """Architecture and matrices of a model, of all its shards. Raises AdapterUnsafe, OSError."""
    architecture, found = "", dict[str, Matrix]()
    shard = _SHARD.search(path.name)
    count = int(shard[1]) if shard else 1
    stem = path.name[: shard.start()] if shard else ""
    names = [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)] if shard else [path.name]
    for name in names:
        with path.with_name(name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            contents = read_contents(file, size)
        architecture = architecture or contents.texts.get("general.architecture", "")
        found |= {one.name: Matrix(one.shape[0], one.shape[1]) for one in contents.tensors if len(one.shape) >= 2}
    return architecture, found


def read_contents(file: BinaryIO, size: int) -> GgufContents:
    """The header of the file, which is at its begin. Raises AdapterUnsafe."""
    reader = _BoundedReader(file, size)
    if reader.take(4) != b"GGUF":
        raise AdapterUnsafe("it does not begin with GGUF")
    if (version := reader.number("<I")) not in VERSIONS:
        raise AdapterUnsafe(f"GGUF version {version}; {' and '.join(map(str, VERSIONS))} are read")
    tensors, keys = reader.count(TENSORS_MOST, "tensors", 24), reader.count(KEYS_MOST, "keys", 12)
    texts: dict[str, str] = {}
    alignment = 32
    for _ in range(keys):
        name, kind = reader.text(TEXT_MOST), reader.number("<I")
        if kind == _TEXT and name.startswith(("general.", "adapter.")):
            texts[name] = reader.long_text()
        elif name == "general.alignment" and kind == _UINT32:
            alignment = reader.number("<I")
        else:
            reader.skip_value(kind)
    if alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
        raise AdapterUnsafe(f"an alignment of {alignment}: that is no GGUF")
    found = [reader.tensor() for _ in range(tensors)]
    if len({tensor.name for tensor in found}) != len(found):
        raise AdapterUnsafe("it names a tensor twice")
    return GgufContents(texts, found, -(-reader.at // alignment) * alignment)


def _check_data(contents: GgufContents, size: int) -> None:
    """Raises AdapterUnsafe where tensors lie beyond the file's end, or over each other."""
    spans = []
    for tensor in contents.tensors:
        if tensor.kind not in _WEIGHTS:
            raise AdapterUnsafe(f"{tensor.name[:80]} is of type {tensor.kind}; f32, f16, bf16 and q8_0 are taken")
        block, bytes_ = _WEIGHTS[tensor.kind]
        count = 1
        for length in tensor.shape:
            count *= length
        if tensor.shape[0] % block:
            raise AdapterUnsafe(f"{tensor.name[:80]} does not end with a block")
        begin = contents.begin + tensor.offset
        spans.append((begin, begin + count // block * bytes_, tensor.name))
    at, before = contents.begin, ""
    for begin, end, name in sorted(spans):
        if begin < at:
            raise AdapterUnsafe(f"the tensors {before[:80]} and {name[:80]} lie over each other")
        if end > size:
            raise AdapterUnsafe(f"it is {size} bytes long and {name[:80]} ends at {end}: it was not copied to its end")
        at, before = end, name


class _BoundedReader:
    """Pieces of a header. Every method raises AdapterUnsafe where the file ends inside of what it reads."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.at = 0

    def take(self, length: int) -> bytes:
        self._fits(length)
        self.at += length
        return self._file.read(length)

    def number(self, format: str) -> int:
        return int(struct.unpack(format, self.take(struct.calcsize(format)))[0])

    def count(self, most: int, what: str, least_bytes: int) -> int:
        found = self.number("<Q")
        if found > min(most, self._size // least_bytes):
            raise AdapterUnsafe(f"{found} {what} in {self._size} bytes: that is no GGUF")
        return found

    def text(self, most: int) -> str:
        length = self.number("<Q")
        if length > most:
            raise AdapterUnsafe(f"a name of {length} bytes: that is no GGUF")
        return self.take(length).decode(errors="replace")

    def long_text(self) -> str:
        """A text of which the begin is enough."""
        length = self.number("<Q")
        kept = self.take(min(length, TEXT_MOST))
        self._skip(length - len(kept))
        return kept.decode(errors="replace")

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        elif kind == _TEXT:
            self._skip(self.number("<Q"))
        elif kind == _ARRAY and depth < NESTING_MOST:
            of, length = self.number("<I"), self.number("<Q")
            if of in _SCALAR_BYTES:
                self._skip(length * _SCALAR_BYTES[of])
            else:
                self._fits(length * 8)
                for _ in range(length):
                    self.skip_value(of, depth + 1)
        else:
            raise AdapterUnsafe(f"a value of type {kind}: that is no GGUF")

    def tensor(self) -> GgufTensor:
        name, dimensions = self.text(NAME_MOST), self.number("<I")
        if not 1 <= dimensions <= 4:
            raise AdapterUnsafe(f"a tensor of {dimensions} dimensions: that is no GGUF")
        shape = tuple(self.number("<Q") for _ in range(dimensions))
        if not all(1 <= length <= DIMENSION_MOST for length in shape):
            raise AdapterUnsafe(f"the tensor {name[:80]} has dimensions that no model has")
        return GgufTensor(name, shape, self.number("<I"), self.number("<Q"))

    def _skip(self, length: int) -> None:
        self._fits(length)
        self.at += length
        self._file.seek(self.at)

    def _fits(self, length: int) -> None:
        if self.at + length > self._size:
            raise AdapterUnsafe(f"it ends after {self._size} bytes, inside its header")
