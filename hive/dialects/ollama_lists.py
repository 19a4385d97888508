"""Answers to requests of Ollama's clients other than prompts, for a backend that does not speak their dialect. Pure.

Unknown values are empty or 0, as Go writes them: clients (llm-ollama) read `digest`, `details` and `size` of each model
without checking that they are there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from hive import __version__
from hive.domain import ModelInfo

RUNNING = b"Ollama is running"
"""The answer to `GET /`, by which clients recognise a server."""
LIKE_OLLAMA = "0.13.3"
"""The version told to clients that ask for features by it: what is translated here is Ollama's API of that time."""
_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_FROM = re.compile(r"^([ \t]*(?:FROM|ADAPTER)[ \t]+)(.*)$", re.IGNORECASE | re.MULTILINE)
"""A line of a Modelfile that names a model or a file."""
_PATH = re.compile(r"(?:[A-Za-z]:)?[~.]*[/\\]")
"""The beginning of a file's name, which no model's name has."""


FOREVER = "2318-01-01T00:00:00Z"
"""The expiry of a model that its server does not unload by itself: about as far as Ollama's for `keep_alive: -1`."""
UNKNOWN_KIND = "unknown"
"""`general.architecture` of a model if its server does not tell it; clients find the other keys by it."""
_SIZES = {" - Small": "_S", " - Medium": "_M", " - Large": "_L"}


class _Details(msgspec.Struct):
    """`parameter_size` and `quantization_level` as Ollama writes them: `1.2B`, `Q4_K_M`."""

    parent_model: str
    format: str
    family: str
    families: tuple[str, ...] | None
    parameter_size: str
    quantization_level: str


class _Model(msgspec.Struct):
    """`size`: bytes. `modified_at`: RFC 3339."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: _Details


class _Running(msgspec.Struct):
    """`size_vram`: its server does not tell how much of it is in a GPU's memory, so it is 0."""

    name: str
    model: str
    size: int
    digest: str
    details: _Details
    expires_at: str
    size_vram: int
    context_length: int


class _Models(msgspec.Struct):
    models: list[_Model] | list[_Running]


class _Shown(msgspec.Struct):
    modified_at: str
    template: str
    details: _Details
    model_info: dict[str, str | int]
    capabilities: tuple[str, ...]


def tags(models: Sequence[ModelInfo]) -> bytes:
    """`GET /api/tags`: what a server offers that is no Ollama.

    >>> tags([ModelInfo(name="tiny", size_bytes=9, created=1_800_000_000)])[:83]
    b'{"models":[{"name":"tiny","model":"tiny","modified_at":"2027-01-15T08:00:00Z","size'
    """
    rows = [
        _Model(model.name, model.name, time_of(model.created), model.size_bytes or 0, _digest(model), _details(model))
        for model in models
    ]
    return _encode(_Models(rows))


def running(models: Sequence[ModelInfo]) -> bytes:
    """`GET /api/ps`: what such a server offers is loaded, or the next to be, and stays."""
    rows = []
    for model in models:
        size, context = model.size_bytes or 0, model.context_length or 0
        rows.append(_Running(model.name, model.name, size, _digest(model), _details(model), FOREVER, 0, context))
    return _encode(_Models(rows))


def shown(model: ModelInfo) -> bytes:
    """`POST /api/show`: what is known of one model.

    >>> told = shown(ModelInfo(name="tiny", owned_by="vllm", context_length=4096, capabilities=("embedding",)))
    >>> told[told.index(b'"model_info"'):told.index(b',"hive.')]
    b'"model_info":{"general.architecture":"unknown","general.basename":"tiny","unknown.context_length":4096'
    >>> told[-31:]
    b'},"capabilities":["embedding"]}'
    """
    known: dict[str, str | int | None] = {
        "general.architecture": UNKNOWN_KIND,
        "general.basename": model.name,
        "general.parameter_count": model.parameters,
        f"{UNKNOWN_KIND}.context_length": model.context_length,
        f"{UNKNOWN_KIND}.embedding_length": _whole(model.meta.get("n_embd")),
        "hive.owned_by": model.owned_by,
    }
    info = {name: value for name, value in known.items() if value}
    can = model.capabilities or ("completion",)
    return _encode(_Shown(time_of(model.created), model.template, _details(model), info, can))


def _details(model: ModelInfo) -> _Details:
    """`format`: llama-server has nothing but GGUF; of others it is not known."""
    of_llama = "gguf" if model.owned_by == "llamacpp" else ""
    size = in_short(model.parameters) if model.parameters else ""
    return _Details(model.parent, of_llama, "", None, size, quantization_level(model))


def quantization_level(model: ModelInfo) -> str:
    """The quantization in Ollama's words; empty if its server tells none.

    >>> [quantization_level(ModelInfo(name="x", meta={"ftype": told})) for told in ("Q4_K - Medium", "all F32", "Q8_0")]
    ['Q4_K_M', 'F32', 'Q8_0']
    """
    told = model.quantization or str(model.meta.get("ftype") or "").removeprefix("all ")
    for words, letter in _SIZES.items():
        told = told.replace(words, letter)
    return told


def in_short(parameters: int) -> str:
    """The number of weights, as Ollama writes it.

    >>> in_short(164_160), in_short(1_235_814_432), in_short(70_000_000_000)
    ('164.16K', '1.2B', '70.0B')
    """
    for bound, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if parameters >= bound:
            return f"{parameters / bound:.{digits}f}{letter}"
    return str(parameters)


def _digest(model: ModelInfo) -> str:
    """The digest by its server, else one of the model's known values: the same for the same model, another one for
    another."""
    told = (model.name, model.owned_by, str(model.size_bytes), str(model.parameters), quantization_level(model))
    return model.digest or hashlib.sha256("\n".join(told).encode()).hexdigest()


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def without_paths(answer: bytes) -> bytes:
    """Ollama's answer to `POST /api/show` without the directories of its host: its Modelfile names the files that the
    model is made of, and so may `parent_model`. As it came where it is no such answer.

    >>> without_paths(b'{"modelfile":"# made\\\\nFROM /var/lib/x/blobs/sha256-ab\\\\nPARAMETER stop /a/b","size":1e2}')
    b'{"modelfile":"# made\\\\nFROM sha256-ab\\\\nPARAMETER stop /a/b","size":1e2}'
    """
    try:
        told = _object(answer)
        if "modelfile" in told:
            text = _FROM.sub(lambda found: found[1] + _file_name(found[2]), _text(told["modelfile"]))
            told["modelfile"] = msgspec.Raw(_encode(text))
        details = _object(told["details"]) if "details" in told else {}
        if "parent_model" in details:
            parent = _text(details["parent_model"])
            details["parent_model"] = msgspec.Raw(_encode(_file_name(parent)))
            told["details"] = msgspec.Raw(_encode(details))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return answer
    return _encode(told)


def _file_name(name: str) -> str:
    """A path without its directories; any other name as it is.

    >>> _file_name("/root/.ollama/models/x.gguf"), _file_name("meta/llama3.2:1b"), _file_name("C:\\\\models\\\\x.gguf")
    ('x.gguf', 'meta/llama3.2:1b', 'x.gguf')
    """
    plain = name.strip(' \t\r"')
    return re.split(r"[/\\]", plain)[-1] if _PATH.match(plain) else name


def version() -> bytes:
    """`GET /api/version`."""
    return _encode({"version": LIKE_OLLAMA, "hive": __version__})


def time_of(unix_s: int) -> str:
    """A time as in RFC 3339; 1970 for a number that is no time (some servers tell milliseconds).

    >>> time_of(1_800_000_000), time_of(1_800_000_000_000)
    ('2027-01-15T08:00:00Z', '1970-01-01T00:00:00Z')
    """
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return time_of(0)
