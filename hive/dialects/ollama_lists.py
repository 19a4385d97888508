"""What Ollama's clients ask besides prompts, said for a backend that does not speak their dialect. Pure.

What Hive does not know is left out, as Go leaves out what is empty; ollama-python 0.6.3 takes all of it as optional.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from hive import __version__
from hive.domain import ModelInfo

RUNNING = b"Ollama is running"
"""The answer to `GET /`, by which clients recognise that somebody is there."""
LIKE_OLLAMA = "0.13.3"
"""The version told to clients that ask for features by it: what is translated here is Ollama's API of that time."""
_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_FROM = re.compile(r"^([ \t]*(?:FROM|ADAPTER)[ \t]+)(.*)$", re.IGNORECASE | re.MULTILINE)
"""A line of a Modelfile that names a model or a file."""
_PATH = re.compile(r"(?:[A-Za-z]:)?[~.]*[/\\]")
"""How the name of a file begins, and no model's."""


class _Model(msgspec.Struct, omit_defaults=True):
    """`size`: bytes. `modified_at`: RFC 3339."""

    name: str
    model: str
    modified_at: str = ""
    size: int | None = None


class _Models(msgspec.Struct):
    models: list[_Model]


class _Shown(msgspec.Struct):
    modified_at: str | msgspec.UnsetType
    model_info: dict[str, str]
    capabilities: tuple[str, ...]


def tags(models: Sequence[ModelInfo]) -> bytes:
    """`GET /api/tags`, and `/api/ps`: what a server offers that is no Ollama is loaded, or the next to be.

    >>> tags([ModelInfo(name="tiny", size_bytes=9, created=1_800_000_000)])
    b'{"models":[{"name":"tiny","model":"tiny","modified_at":"2027-01-15T08:00:00Z","size":9}]}'
    """
    return _encode(_Models([_row(model) for model in models]))


def shown(model: ModelInfo) -> bytes:
    """`POST /api/show`: what is known of one model.

    >>> shown(ModelInfo(name="tiny", owned_by="llamacpp"))
    b'{"model_info":{"general.basename":"tiny","hive.owned_by":"llamacpp"},"capabilities":["completion"]}'
    """
    known = {"general.basename": model.name, "hive.owned_by": model.owned_by}
    info = {name: value for name, value in known.items() if value}
    return _encode(_Shown(_time(model) or msgspec.UNSET, info, ("completion",)))


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


def _row(model: ModelInfo) -> _Model:
    return _Model(model.name, model.name, modified_at=_time(model), size=model.size_bytes)


def _time(model: ModelInfo) -> str:
    return time_of(model.created) if model.created else ""


def time_of(unix_s: int) -> str:
    """As RFC 3339 has it.

    >>> time_of(0)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
