"""An adapter as PEFT writes it, for vLLM: adapter_config.json beside *.safetensors. No pickle is ever looked at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.adapters.lora import DIMENSION_MOST, HalfPair, LoraFile, Matrix, merged, paired
from hive.errors import AdapterMismatch, AdapterUnsafe

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""vLLM looks for the second one by this name, and for pickles where it is not there."""
CONFIG_MAX_BYTES = 1 << 20
HEADER_MAX_BYTES = 16 << 20
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "U32": 4, "U64": 8}
_LORA = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.[^.]+)?(?:\.weight)?")


class PeftConfig(msgspec.Struct):
    """The part of adapter_config.json that is read."""

    r: int
    peft_type: str = "LORA"
    base_model_name_or_path: str | None = ""
    rank_pattern: dict[str, int] | None = None
    bias: str | None = "none"
    use_dora: bool | None = False
    modules_to_save: Any = None


class TensorInHeader(msgspec.Struct):
    """One entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class PeftAdapter(NamedTuple):
    """`base`: the model that its maker names; empty where he names none."""

    lora: LoraFile
    rank: int
    base: str


def read_adapter(directory: Path) -> PeftAdapter:
    """The adapter in a directory that holds nothing else. Raises AdapterUnsafe, AdapterMismatch."""
    config = _config(directory / CONFIG)
    files = []
    for path in sorted(directory.glob("*.safetensors")):
        try:
            files.append(_lora(read_header(path)))
        except AdapterUnsafe as error:
            raise AdapterUnsafe(f"{path.name}: {error.message}", hint=error.hint) from None
    lora = merged(files)
    ranks = {config.r, *(config.rank_pattern or {}).values()}
    if wrong := sorted(set(lora.ranks.values()) - ranks):
        raise AdapterMismatch(f"{CONFIG} says r = {config.r}, and its tensors are of rank {wrong[0]}")
    return PeftAdapter(lora, max(ranks), config.base_model_name_or_path or "")


def _config(path: Path) -> PeftConfig:
    if path.stat().st_size > CONFIG_MAX_BYTES:
        raise AdapterUnsafe(f"{CONFIG} is larger than {CONFIG_MAX_BYTES} bytes")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=PeftConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterUnsafe(f"{CONFIG} is none that can be read: {error}") from None
    if config.peft_type.upper() != "LORA":
        raise AdapterMismatch(f"{CONFIG} is of a {config.peft_type[:40]} adapter; only LORA is taken")
    if config.use_dora:
        raise AdapterMismatch("it is a DoRA adapter, which inference servers do not load")
    if config.bias not in (None, "none"):
        raise AdapterMismatch("it changes biases, which inference servers do not load")
    if not all(1 <= rank <= 1 << 16 for rank in (config.r, *(config.rank_pattern or {}).values())):
        raise AdapterUnsafe(f"{CONFIG} says a rank that is none")
    return config


def read_header(path: Path) -> dict[str, TensorInHeader]:
    """The tensors of a safetensors file, whose bytes are all there, and no others. Raises AdapterUnsafe, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_MAX_BYTES, max(size - 8, 0)):
            raise AdapterUnsafe(f"a header of {length} bytes in a file of {size}: that is no safetensors file")
        data = file.read(length)
    try:
        header = msgspec.json.decode(data.decode(), type=dict[str, msgspec.Raw])
        msgspec.json.decode(header.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        tensors = {name: msgspec.json.decode(raw, type=TensorInHeader) for name, raw in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterUnsafe(f"its header is no safetensors header: {error}") from None
    if not tensors:
        raise AdapterUnsafe("it has no tensors")
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if begin != at or end < begin:
            raise AdapterUnsafe(f"the tensor {name[:80]} does not begin where the one before it ends")
        if end - begin != _bytes_of(name, tensor):
            raise AdapterUnsafe(f"the tensor {name[:80]} has {end - begin} bytes, which are not those of its shape")
        at = end
    if 8 + length + at != size:
        raise AdapterUnsafe(f"it is {size} bytes long and should be {8 + length + at}: it was not copied to its end")
    return tensors


def _bytes_of(name: str, tensor: TensorInHeader) -> int:
    if tensor.dtype not in _BYTES:
        raise AdapterUnsafe(f"the tensor {name[:80]} is of type {tensor.dtype[:20]!r}, which is not known here")
    count = _BYTES[tensor.dtype]
    for length in tensor.shape:
        if not 0 <= length <= DIMENSION_MOST:
            raise AdapterUnsafe(f"the tensor {name[:80]} has dimensions that no model has")
        count *= length
    return count


def _lora(tensors: dict[str, TensorInHeader]) -> LoraFile:
    """The pairs of a file. Raises AdapterUnsafe, AdapterMismatch."""
    downs: dict[str, HalfPair] = {}
    ups: dict[str, HalfPair] = {}
    for name, tensor in tensors.items():
        if (found := _LORA.fullmatch(name)) is None:
            raise AdapterMismatch(f"the tensor {name[:80]} is none of a LoRA adapter; inference servers do not load it")
        if len(tensor.shape) != 2:
            raise AdapterUnsafe(f"the tensor {name[:80]} is no matrix")
        rows, columns = tensor.shape
        pair = HalfPair(rows, columns) if found[2].endswith("A") else HalfPair(columns, rows)
        is_down = found[2] in ("A", "embedding_B")  # of an embedding rows are looked up: it is the other way round
        (downs if is_down else ups)[f"{found[1]}.weight"] = pair
    return paired(downs, ups)


def read_model(directory: Path) -> dict[str, Matrix]:
    """The matrices of a model of Hugging Face's form, as far as its files say them. Raises AdapterUnsafe, OSError."""
    found: dict[str, Matrix] = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in read_header(path).items():
            if len(tensor.shape) == 2:
                rows, columns = tensor.shape
                found[name] = Matrix(columns, rows)
    return found
