"""A model as files: one GGUF file or its shards, or a directory as Hugging Face lays it out.

A model that was copied half is found here and not when it is loaded: the header of each file says how long it is.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from hive.backends.ct2_files import check_whisper
from hive.errors import BadRequest, HiveError, NotFound, NotPermitted

GGUF = ".gguf"
READ_BY = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of names in a directory of Hugging Face that are taken along. No Python and no pickles: those are programs."""
HEADER_MAX_BYTES = 100 * 1024 * 1024
"""Of a safetensors file: what its own library takes (safetensors 0.8). A GGUF file's has some 20 MB at most: its
vocabulary."""
WHISPER_WEIGHTS = "model.bin"
"""CTranslate2's name for them."""
PIPELINE = "model_index.json"
"""Of a pipeline: its class, and the classes of its parts."""
PARTS_MAX = 64
CONFIG_MAX_BYTES = 16 * 1024 * 1024
GGUF_VERSIONS = (2, 3)
"""Those that llama.cpp reads."""
MOST = 1 << 20
"""Keys, tensors and dimensions of one file that are believed."""
NAME_MAX_BYTES = 65535
"""Of a key, by the format's own text (gguf.md)."""
WEIGHTS_MAX = 1 << 50
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
Shape = TypeVar("Shape")
_WHERE = "the file has to be on this box, readable for the daemon (an installed one sees nothing below /home and /tmp)"


class Format(StrEnum):
    """`gguf`: for llama-server (and Ollama, which makes its own of it); `hf`: for vLLM; `whisper`: CTranslate2's, for
    faster-whisper; `diffusers`: a directory with one for each part of a pipeline."""

    GGUF = "gguf"
    HF = "hf"
    WHISPER = "whisper"
    DIFFUSERS = "diffusers"


class GgufHeader(NamedTuple):
    """A GGUF file's words about its model, as far as it has any; of a model in shards the first one says most.

    `kv_heads`, `heads`: one number, or one for each layer. `key_length`, `value_length`: values of one head.
    `file_type`: llama.cpp's number of a quantization. `weights`: of all tensors of this file;
    `vocabulary`: how many tokens it knows.
    """

    architecture: str = ""
    layers: int | None = None
    heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    embedding_length: int | None = None
    key_length: int | None = None
    value_length: int | None = None
    context_length: int | None = None
    size_label: str = ""
    file_type: int | None = None
    weights: int = 0
    vocabulary: int | None = None


class File(NamedTuple):
    """One file of a model: what it will be called, where it lies, its bytes; `header`: of a GGUF file."""

    name: str
    path: Path
    size: int
    header: GgufHeader | None = None


class ModelOnDisk(NamedTuple):
    """A model on a disk, checked. `left_out`: names in its directory that are none of a model's files."""

    format: Format
    files: tuple[File, ...]
    left_out: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def is_one_file(self) -> bool:
        return self.format is Format.GGUF and len(self.files) == 1


def find(path: Path) -> ModelOnDisk:
    """The model at `path`, its files checked. It reads the disk: not for the loop.

    Raises NotFound, NotPermitted, BadRequest that says what is wrong with which file.
    """
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            return _directory(path)
        if not stat.S_ISREG(found.st_mode) or path.suffix != GGUF:
            raise BadRequest(
                f"{path} is no model: expected a file named *.gguf, or a directory with config.json and *.safetensors"
            )
        return ModelOnDisk(Format.GGUF, _shards(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no {error.filename or path}", hint=_WHERE) from None
    except PermissionError as error:
        raise NotPermitted(f"the daemon may not read {error.filename or path}", hint=_WHERE) from None
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror or error}") from None


def _checked(path: Path, check: Callable[[BinaryIO, int], GgufHeader | None]) -> File:
    """The file, with its own name in front of what is wrong with it."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest(f"{path} is no regular file")
        try:
            header = check(file, found.st_size)
        except BadRequest as error:
            raise BadRequest(f"{path} is no whole model: {error.message}") from None
    return File(path.name, path, found.st_size, header)


# GGUF -----------------------------------------------------------------------------------------------------------------


def _shards(path: Path) -> tuple[File, ...]:
    """The file, or all of its shards: `x-00001-of-00003.gguf` is nothing without the other two."""
    shard = _SHARD.search(path.name)
    names = [path.name]
    if shard is not None:
        count, stem = int(shard[2]), path.name[: shard.start()]
        names = [f"{stem}-{number:05}-of-{count:05}{GGUF}" for number in range(1, min(count, MOST) + 1)]
    return tuple(_checked(path.with_name(name), check_gguf) for name in names)


def check_gguf(file: BinaryIO, size: int) -> GgufHeader:
    """Its header's words about the model. Raises BadRequest where it is no GGUF file that llama.cpp would read, or not
    all of it is there."""
    reader = _Reader(file, size)
    if file.read(4) != b"GGUF":
        raise BadRequest("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in GGUF_VERSIONS:
        raise BadRequest(f"GGUF version {version}; llama.cpp reads {' and '.join(map(str, GGUF_VERSIONS))}")
    tensors, keys = reader.count("tensors"), reader.count("keys")
    if not tensors:
        raise BadRequest("it has no tensors: a vocabulary alone is no model")
    kept: dict[bytes, _Value] = {}
    vocabulary: int | None = None
    for _ in range(keys):
        name = reader.name()
        value = reader.value(reader.number("<I"))
        if name == _TOKENS:
            vocabulary = reader.texts
        if value is not None and (name in _GENERAL or name.partition(b".")[2] in _OF_ARCHITECTURE):
            kept[name] = value
    alignment = kept.get(b"general.alignment")
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
    ends = [reader.tensor() for _ in range(tensors)]
    begins = -(-file.tell() // alignment) * alignment
    if (expected := begins + max(end for end, _ in ends)) > size:
        raise BadRequest(f"it is {size} bytes long and should be {expected}: it was not copied to its end")
    return _header(kept, sum(weights for _, weights in ends))._replace(vocabulary=vocabulary)


_TOKENS = b"tokenizer.ggml.tokens"
_Value = int | bytes | tuple[int, ...]
_GENERAL = frozenset((b"general.architecture", b"general.alignment", b"general.file_type", b"general.size_label"))
_OF_ARCHITECTURE = frozenset(
    (
        b"block_count",
        b"context_length",
        b"embedding_length",
        b"attention.head_count",
        b"attention.head_count_kv",
        b"attention.key_length",
        b"attention.value_length",
    )
)
_LABEL_MAX = 64
"""Bytes of a text that is kept: the name of an architecture, a size."""


def _header(kept: dict[bytes, _Value], weights: int) -> GgufHeader:
    """A value of another type than its key has is none."""

    def text(name: bytes) -> str:
        value = kept.get(name)
        return value.decode(errors="replace") if isinstance(value, bytes) else ""

    def number(name: bytes) -> int | None:
        value = kept.get(name)
        return value if isinstance(value, int) else None

    def numbers(name: bytes) -> tuple[int, ...]:
        value = kept.get(name)
        return (value,) if isinstance(value, int) else value if isinstance(value, tuple) else ()

    architecture = text(b"general.architecture")
    of = architecture.encode() + b"."
    return GgufHeader(
        architecture=architecture,
        layers=number(of + b"block_count"),
        heads=numbers(of + b"attention.head_count"),
        kv_heads=numbers(of + b"attention.head_count_kv"),
        embedding_length=number(of + b"embedding_length"),
        key_length=number(of + b"attention.key_length"),
        value_length=number(of + b"attention.value_length"),
        context_length=number(of + b"context_length"),
        size_label=text(b"general.size_label"),
        file_type=number(b"general.file_type"),
        weights=weights,
    )


MOST_LAYERS = 4096
"""Of one array of numbers that is kept: a model has one for each of its layers."""
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_WHOLE = frozenset((0, 1, 2, 3, 4, 5, 10, 11))
_TEXT, _ARRAY = 8, 9
_SIZES = (
    "0:1:4 1:1:2 2:32:18 3:32:20 6:32:22 7:32:24 8:32:34 9:32:40 10:256:84 11:256:110 12:256:144 13:256:176 14:256:210",
    "15:256:292 16:256:66 17:256:74 18:256:98 19:256:50 20:32:18 21:256:110 22:256:82 23:256:136 24:1:1 25:1:2 26:1:4",
    "27:1:8 28:1:8 29:256:56 30:1:2 34:256:54 35:256:66 39:32:17",
)
"""ggml's number of a type, weights of one of its blocks, bytes of that (gguf 0.19, GGML_QUANT_SIZES)."""
_ROWS = [tuple(map(int, row.split(":"))) for row in " ".join(_SIZES).split()]
_BLOCKS = {type_: (weights, size) for type_, weights, size in _ROWS}


class _Reader:
    """The pieces of a GGUF header. Every method raises BadRequest where the file ends inside of what it reads."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._most = min(size, HEADER_MAX_BYTES)
        self.texts: int | None = None
        """Of the last array of texts that was passed over."""

    def number(self, format: str) -> int:
        data = self._file.read(struct.calcsize(format))
        if len(data) < struct.calcsize(format):
            raise BadRequest(f"it ends after {self._size} bytes, inside its header")
        return int(struct.unpack(format, data)[0])

    def count(self, what: str) -> int:
        found = self.number("<Q")
        if found > MOST:
            raise BadRequest(f"{found} {what}: that is no header of a model")
        return found

    def name(self) -> bytes:
        length = self.number("<Q")
        if length > NAME_MAX_BYTES:
            raise BadRequest(f"a name of {length} bytes: that is no header of a model")
        self._fits(length)
        return self._file.read(length)

    def value(self, type_: int) -> _Value | None:
        """A whole number, a short text, or a short array of whole numbers; nothing is kept of others."""
        if type_ == _TEXT:
            length = self.number("<Q")
            if length > _LABEL_MAX:
                self._skip(length)
                return None
            self._fits(length)
            return self._file.read(length)
        if type_ in (6, 12):
            self._skip(struct.calcsize(_SCALARS[type_]))
            return None
        if type_ in _SCALARS:
            return self.number(_SCALARS[type_])
        if type_ != _ARRAY:
            raise BadRequest(f"a value of type {type_}: that is no GGUF")
        of, length = self.number("<I"), self.number("<Q")
        self.texts = None
        if of == _TEXT:
            self._skip_texts(length)
            self.texts = length
        elif of in _WHOLE and length <= MOST_LAYERS:
            return tuple(self.number(_SCALARS[of]) for _ in range(length))
        elif of in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[of]))
        else:
            raise BadRequest(f"an array of type {of}: that is no GGUF")
        return None

    def tensor(self) -> tuple[int, int]:
        """End of this tensor, from the begin of the data; of a type that is not known here its begin. Its weights."""
        self.name()
        weights, dimensions = 1, self.number("<I")
        if dimensions > 8:
            raise BadRequest(f"a tensor of {dimensions} dimensions: that is no GGUF")
        for _ in range(dimensions):
            weights *= self.number("<Q")
        if weights > WEIGHTS_MAX:
            raise BadRequest(f"a tensor of {weights} weights: that is no GGUF")
        type_, offset = self.number("<I"), self.number("<Q")
        of_block, bytes_ = _BLOCKS.get(type_, (1, 0))
        return offset + -(-weights // of_block) * bytes_, weights

    def _skip_texts(self, count: int) -> None:
        """Some 300,000 in a vocabulary and its merges: 0.4 µs each."""
        self._fits(count * 8)
        at, read, seek = self._file.tell(), self._file.read, self._file.seek
        for _ in range(count):
            at += 8 + (length := int.from_bytes(read(8), "little"))
            if at > self._most:
                break
            seek(length, os.SEEK_CUR)
        self._fits(at - self._file.tell())

    def _skip(self, length: int) -> None:
        self._fits(length)
        self._file.seek(length, os.SEEK_CUR)

    def _fits(self, length: int) -> None:
        end = self._file.tell() + length
        if end > self._size:
            raise BadRequest(f"it ends after {self._size} bytes, inside its header")
        if end > HEADER_MAX_BYTES:
            raise BadRequest(f"a header of more than {HEADER_MAX_BYTES} bytes: that is no header of a model")


# Hugging Face ---------------------------------------------------------------------------------------------------------


class _Config(msgspec.Struct):
    model_type: str = ""
    architectures: list[str] | None = None


class _Vocabulary(msgspec.Struct):
    vocab_size: int | None = None


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _directory(path: Path) -> ModelOnDisk:
    names = sorted(entry.name for entry in os.scandir(path) if entry.is_file() and not entry.name.startswith("."))
    taken = [name for name in names if name.endswith(READ_BY)]
    weights = [name for name in taken if name.endswith(".safetensors")]
    ggufs = [name for name in names if name.endswith(GGUF)]
    if PIPELINE in names:
        return _pipeline(path, names)
    if "config.json" not in names and ggufs:
        if len(ggufs) == 1 or _SHARD.search(ggufs[0]):
            return ModelOnDisk(Format.GGUF, _shards(path / ggufs[0]))
        raise BadRequest(f"{path} holds {len(ggufs)} GGUF files", hint=f"name one: {path / ggufs[0]}")
    if "config.json" in names and WHISPER_WEIGHTS in names:
        return _whisper(path, names)
    if "config.json" not in names or not weights:
        lacks = "config.json" if "config.json" not in names else "*.safetensors"
        raise BadRequest(f"{path} is no model: it has no {lacks}")
    _inside(path, taken)
    config = _json(path / "config.json", _Config)
    if not config.model_type and not config.architectures:
        raise BadRequest(f"{path / 'config.json'} names no model_type and no architectures")
    if (index := "model.safetensors.index.json") in names:
        lacking = sorted(set(_json(path / index, _Index).weight_map.values()) - set(weights))
        if lacking:
            raise BadRequest(f"{path} lacks {lacking[0]}, which {index} names")
    files = [_checked(path / name, check_safetensors) for name in weights]
    files += [File(name, path / name, (path / name).stat().st_size) for name in taken if name not in weights]
    return ModelOnDisk(Format.HF, tuple(files), tuple(name for name in names if name not in taken))


def _whisper(path: Path, names: list[str]) -> ModelOnDisk:
    taken = [name for name in names if name.endswith((".json", ".txt")) or name == WHISPER_WEIGHTS]
    if "tokenizer.json" not in names:
        raise BadRequest(f"{path} is no whole Whisper: it has no tokenizer.json, and no hub is asked for it")
    _inside(path, taken)
    weights = _checked(path / WHISPER_WEIGHTS, check_whisper)
    others = [File(name, path / name, (path / name).stat().st_size) for name in taken if name != WHISPER_WEIGHTS]
    return ModelOnDisk(Format.WHISPER, (weights, *others), tuple(name for name in names if name not in taken))


def _pipeline(path: Path, names: list[str]) -> ModelOnDisk:
    """A pipeline, as diffusers lays it out: a directory for each part that its index names."""
    index = _json(path / PIPELINE, dict[str, msgspec.Raw])
    try:
        name = msgspec.json.decode(index.get("_class_name", msgspec.Raw(b"null")), type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise BadRequest(f"{path / PIPELINE} names no pipeline of diffusers' own (_class_name)") from None
    parts = [part for part in index if part.isidentifier() and not part.startswith("_") and (path / part).is_dir()]
    if len(parts) > PARTS_MAX:
        raise BadRequest(f"{path / PIPELINE} names {len(parts)} parts: that is no pipeline")
    inner = [
        f"{part}/{entry.name}"
        for part in sorted(parts)
        for entry in sorted(os.scandir(path / part), key=lambda entry: entry.name)
        if entry.is_file() and not entry.name.startswith(".")
    ]
    taken = [PIPELINE, *(each for each in inner if each.endswith(READ_BY))]
    if not any(each.endswith(".safetensors") for each in taken):
        raise BadRequest(f"{path} is no {name} that can be loaded: none of its parts has *.safetensors")
    _inside(path, taken)
    files = []
    for each in taken:
        found = path / each
        if each.endswith(".safetensors"):
            files.append(_checked(found, check_safetensors)._replace(name=each))
        else:
            files.append(File(each, found, found.stat().st_size))
    left = [each for each in (*names, *inner) if each not in taken]
    return ModelOnDisk(Format.DIFFUSERS, tuple(files), tuple(left))


def _inside(path: Path, names: list[str]) -> None:
    """A link may lead to its neighbours, or to where Hugging Face's cache keeps what its links name; nowhere else: what
    it leads to would be copied to where others read it. Raises BadRequest."""
    homes = (path.resolve(), (path.resolve().parent.parent / "blobs"))
    for name in names:
        if not any((path / name).resolve().is_relative_to(home) for home in homes):
            raise BadRequest(f"{path / name} is a link that leads out of the model's directory")


def check_safetensors(file: BinaryIO, size: int) -> None:
    """Raises BadRequest where its header is none, or the file is not as long as that says."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(HEADER_MAX_BYTES, max(size - 8, 0)):
        raise BadRequest(f"a header of {length} bytes in a file of {size}: that is no safetensors file")
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        ends = [msgspec.json.decode(raw, type=_Tensor).data_offsets[1] for raw in header.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"its header is no safetensors header: {error}") from None
    if not ends:
        raise BadRequest("it has no tensors")
    if 8 + length + max(ends) != size:
        raise BadRequest(f"it is {size} bytes long and should be {8 + length + max(ends)}")


def read_vocabulary(path: str | Path) -> int | None:
    """Tokens that the model at `path` knows; None where it does not tell, or is no model. It reads the disk."""
    try:
        found = find(Path(path))
        if found.format is Format.GGUF:
            return None if found.files[0].header is None else found.files[0].header.vocabulary
        return _json(Path(path) / "config.json", _Vocabulary).vocab_size
    except (HiveError, OSError):
        return None


def _json(path: Path, shape: type[Shape]) -> Shape:
    with path.open("rb") as file:
        data = file.read(CONFIG_MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{path} is not what it should be: {error}") from None
