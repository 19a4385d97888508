"""Facts about a model of the pool that its files tell before it is loaded: size, shape, context, digest."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from pathlib import Path

import msgspec

from hive.backends.entries import ModelEntry
from hive.backends.model_files import CONFIG_MAX_BYTES, File, Format, GgufHeader, ModelOnDisk, find
from hive.backends.ollama import owner_of
from hive.domain import BackendKind, ModelInfo
from hive.errors import HiveError, NotPermitted
from hive.pool.estimate import GgufShape
from hive.settings.pool import CATEGORIES, category_of
from hive.settings.table import InferenceSection

HEAD_BYTES, TAIL_BYTES = 1 << 20, 1 << 16
"""Of each file, in its digest: the header, or most of it, and some of the weights."""
BELIEVED = 1 << 20
"""A larger number of layers, heads or values of a head is an error of the file."""
CONTEXT_BELIEVED = 1 << 31
FILE_TYPES = (
    "0:F32 1:F16 2:Q4_0 3:Q4_1 7:Q8_0 8:Q5_0 9:Q5_1 10:Q2_K 11:Q3_K_S 12:Q3_K_M 13:Q3_K_L 14:Q4_K_S 15:Q4_K_M "
    "16:Q5_K_S 17:Q5_K_M 18:Q6_K 19:IQ2_XXS 20:IQ2_XS 21:Q2_K_S 22:IQ3_XS 23:IQ3_XXS 24:IQ1_S 25:IQ4_NL 26:IQ3_S "
    "27:IQ3_M 28:IQ2_S 29:IQ2_M 30:IQ4_XS 31:IQ1_M 32:BF16 36:TQ1_0 37:TQ2_0 38:MXFP4_MOE"
)
"""llama.cpp's number of a quantization, its name (gguf 0.19, LlamaFileType)."""
_NAMES = {int(number): name for number, name in (pair.split(":") for pair in FILE_TYPES.split())}
_SHARD = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")
_OWNERS = {BackendKind.LLAMA: "llamacpp", BackendKind.VLLM: "vllm", **dict.fromkeys(CATEGORIES, "hive-runner")}
"""Owner of a model in the list of each kind of server, as that says it."""
_CAPABILITIES = {
    "embedding": ("embedding",),
    "vision": ("completion", "vision"),
    "audio": ("transcription",),
    "image": ("image_generation",),
}


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the files at one path tell. `why_not`: why they say nothing, a sentence, else empty; `can_load`: False
    where they cannot be loaded either: there are none, or they are no whole model.

    `size_bytes`: of all of them. `context_trained`: tokens. `parameters`: how many weights. `changed_at`: the newest of
    the files, Unix seconds. `vocabulary`: how many tokens it knows. `offers`: the names of its server's models, where
    that has several and none of the entry's name.
    """

    why_not: str = ""
    can_load: bool = True
    digest: str = ""
    size_bytes: int | None = None
    is_gguf: bool = True
    shape: GgufShape | None = None
    context_trained: int | None = None
    quantization: str = ""
    parameters: int | None = None
    changed_at: float = 0.0
    vocabulary: int | None = None
    offers: tuple[str, ...] = ()


class EntryFacts(FileFacts, frozen=True, kw_only=True):
    """Facts about an entry, without loading it. `context`: tokens of all its requests together, 0 where only its
    server knows; `parallel`: requests at once."""

    context: int = 0
    parallel: int = 1


NOT_READ = FileFacts(why_not="its files have not been read yet")


def entry_facts(entry: ModelEntry, files: FileFacts, inference: InferenceSection) -> EntryFacts:
    """The facts of an entry, with what `[inference]` says where the entry says nothing."""
    context, parallel = entry.row.context, entry.row.parallel
    if entry.kind == BackendKind.LLAMA:
        context = context or inference.llama_context
        parallel = parallel or inference.llama_parallel
    elif not entry.has_server_here:
        context, parallel = 0, parallel or 1
    elif entry.kind in CATEGORIES:
        context, parallel = 0, 1
    else:
        context = context or files.context_trained or 0
        parallel = parallel or inference.vllm_max_sequences
    return EntryFacts(**msgspec.structs.asdict(files), context=context, parallel=parallel)


def why_no_need(facts: FileFacts, entry: ModelEntry) -> str:
    """The reason that the memory of a model is not known, and what to do, a clause: mostly its files are there and the
    daemon may not read them (diffusers saves weights for their owner alone)."""
    set_it = f"set vram_mb in {entry.origin}"
    if not facts.why_not or facts.why_not == NOT_READ.why_not:
        return f"nothing tells how much memory it takes: {set_it}"
    mend = f"let all read it (chmod -R a+rX {shlex.quote(str(entry.path))})"
    seen = "an installed daemon sees nothing below /home and /tmp"
    return f"{facts.why_not}, so that nothing tells how much memory it takes: {mend}, or {set_it}; {seen}"


def model_info(entry: ModelEntry, facts: EntryFacts) -> ModelInfo:
    """The row of a model that is not loaded, as its server would show it: its context is what one request may use."""
    context = facts.context // facts.parallel if entry.kind == BackendKind.LLAMA else facts.context
    if facts.context_trained:
        context = facts.context_trained if entry.is_ollamas else min(context, facts.context_trained)
    return ModelInfo(
        name=entry.name,
        size_bytes=facts.size_bytes,
        owned_by=owner_of(entry.at_server) if entry.is_ollamas else _OWNERS.get(BackendKind(entry.kind), entry.kind),
        created=int(facts.changed_at),
        quantization=facts.quantization,
        parameters=facts.parameters,
        digest=facts.digest,
        context_length=context or None,
        capabilities=_CAPABILITIES.get(category_of(entry.row), ("completion",)),
    )


def models_offered(entry: ModelEntry, facts: EntryFacts) -> list[ModelInfo]:
    """The rows of its server's models: one but where that has several."""
    info = model_info(entry, facts)
    return [msgspec.structs.replace(info, name=name) for name in facts.offers] or [info]


# --- files -------------------------------------------------------------------------------------------------------


def signature(path: Path) -> tuple[object, ...]:
    """Another one for every change of the files at `path`: names, inodes, times, sizes. It reads no file.

    Of a directory all that is in it counts, of a shard all its neighbours.
    """
    found: list[object] = []
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
        shard = _SHARD.search(path.name)
        if not is_directory and shard is None:
            return _looks(path)
        within = path if is_directory else path.parent
        begins, ends = ("", "") if shard is None or is_directory else (path.name[: shard.start()], shard[1])
        for name in sorted(os.listdir(within)):
            if name.startswith(begins) and name.endswith(ends):
                found.append((name, _looks(within / name)))
                if is_directory and (within / name).is_dir():  # a part of a pipeline
                    found.extend((inner, _looks(within / name / inner)) for inner in sorted(os.listdir(within / name)))
    except OSError as error:
        found.append(error.errno)
    return tuple(found)


def _looks(path: Path) -> tuple[object, ...]:
    try:
        seen = path.stat()
    except OSError as error:
        return (error.errno,)
    return (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size)


def read_facts(path: Path) -> FileFacts:
    """Reads what the model at `path` says of itself; never raises. It reads the disk: not for the loop."""
    try:
        found = find(path)
        facts = _facts(found)
    except HiveError as error:
        # What the daemon may not read, its server perhaps may.
        return FileFacts(why_not=error.message, can_load=isinstance(error, NotPermitted))
    except OSError as error:
        return FileFacts(why_not=f"{error.filename or path} cannot be read: {error.strerror or error}")
    return facts


def _facts(found: ModelOnDisk) -> FileFacts:
    changed_at = max(file.path.stat().st_mtime for file in found.files)
    if found.format is not Format.GGUF:
        config = _config(found)
        return FileFacts(
            digest=_digest_hf(found),
            size_bytes=found.size_bytes,
            is_gguf=False,
            context_trained=config.context,
            quantization=config.quantization,
            changed_at=changed_at,
            vocabulary=config.vocab_size,
        )
    headers = [file.header for file in found.files if file.header is not None]
    first = headers[0]
    return FileFacts(
        digest=_digest_gguf(found.files),
        size_bytes=found.size_bytes,
        shape=shape_of(first),
        context_trained=_believed(first.context_length, CONTEXT_BELIEVED),
        quantization=_NAMES.get(-1 if first.file_type is None else first.file_type, ""),
        parameters=sum(header.weights for header in headers),
        changed_at=changed_at,
        vocabulary=first.vocabulary,
    )


def shape_of(header: GgufHeader) -> GgufShape | None:
    """The shape of a model's cache; None where the header does not tell all of it, or tells what cannot be.

    Of layers that differ (one number of heads for each) those that keep keys and values count, with their mean. A layer
    with a window, and a cache that is kept compressed, take less than this.

    >>> shape_of(GgufHeader(layers=2, heads=(4,), kv_heads=(2,), embedding_length=64))
    GgufShape(layers=2, kv_heads=2, head_dim=16)
    >>> shape_of(GgufHeader(layers=4, heads=(8,), kv_heads=(0, 8, 0, 4), key_length=192, value_length=128))
    GgufShape(layers=2, kv_heads=6, head_dim=160)
    >>> shape_of(GgufHeader(layers=2, heads=(4,))) is None
    True
    """
    layers, heads = header.layers or 0, max(header.heads, default=0)
    kv_heads = header.kv_heads or header.heads
    of_each = header.embedding_length // heads if header.embedding_length and heads > 0 else 0
    both = (header.key_length or of_each) + (header.value_length or header.key_length or of_each)
    if len(kv_heads) > 1:
        kept = [number for number in kv_heads[:layers] if number]
        layers = len(kept)
        each = -(-sum(kept) // layers) if kept else 0
    else:
        each = max(kv_heads, default=0)
    numbers = (layers, each, -(-both // 2))
    return GgufShape(*numbers) if all(0 < number <= BELIEVED for number in numbers) else None


def _believed(number: int | None, most: int) -> int | None:
    return number if number is not None and 0 < number <= most else None


def _digest_gguf(files: tuple[File, ...]) -> str:
    """Of what is cheap to read: two files of one size whose first MiB and last 64 KiB are the same are one model."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"%d\n" % file.size)
        with file.path.open("rb") as opened:
            digest.update(opened.read(HEAD_BYTES))
            opened.seek(max(opened.tell(), file.size - TAIL_BYTES))
            digest.update(opened.read(TAIL_BYTES))
    return digest.hexdigest()


def _digest_hf(found: ModelOnDisk) -> str:
    digest = hashlib.sha256()
    for file in found.files:
        digest.update(f"{file.name}\n{file.size}\n".encode(errors="surrogateescape"))
        if file.name.rpartition("/")[2] in ("config.json", "model_index.json"):
            with file.path.open("rb") as opened:
                digest.update(opened.read(CONFIG_MAX_BYTES))
    return digest.hexdigest()


class _Quantized(msgspec.Struct):
    quant_method: str = ""


class _TextConfig(msgspec.Struct):
    max_position_embeddings: int | None = None


class _HfConfig(_TextConfig):
    """As far as vLLM reads the same: a model that sees has its text's part apart."""

    text_config: _TextConfig | None = None
    quantization_config: _Quantized | None = None
    vocab_size: int | None = None
    torch_dtype: str | None = None
    dtype: str | None = None

    @property
    def context(self) -> int | None:
        told = self.max_position_embeddings
        if told is None and self.text_config is not None:
            told = self.text_config.max_position_embeddings
        return _believed(told, CONTEXT_BELIEVED)

    @property
    def quantization(self) -> str:
        """Its method, else the type of its weights, as `BF16`."""
        if self.quantization_config is not None and self.quantization_config.quant_method:
            return self.quantization_config.quant_method.upper()[:32]
        told = (self.dtype or self.torch_dtype or "").removeprefix("torch.")
        return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(told, "")


def _config(found: ModelOnDisk) -> _HfConfig:
    """Reads config.json; nothing is known where it has another form."""
    path = next((file.path for file in found.files if file.name == "config.json"), None)
    if path is None:  # a pipeline has one for each of its parts
        return _HfConfig()
    with path.open("rb") as file:
        data = file.read(CONFIG_MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=_HfConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _HfConfig()
