"""Texts of Ollama 0.32.15 besides answers, as seen over a socket: rows of its lists, errors, who may ask.

The stand-ins take it from here; no package has an Ollama that could be asked instead. Pure.
"""

from __future__ import annotations

import ipaddress
import json
from functools import lru_cache
from typing import Any

Object = dict[str, Any]
FINGERPRINT = "fp_ollama"
MODIFIED_AT = "2026-05-04T14:56:49.277302595+02:00"
CONTEXT_LENGTH = 4096
LOADED_CONTEXT = 2048
"""A model is loaded with less than it has."""
DIED = "an error was encountered while running the model: unexpected EOF"
BROKEN = "llama-server process has terminated: exit status 1: error loading model: tensor data is out of bounds"
_OWN_TOPS = (".localhost", ".local", ".internal")
_FLOATS = ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("num_predict", "num_ctx", "top_k", "seed", "num_keep", "repeat_last_n")


def tagged(name: str) -> str:
    """The whole name: `tiny` is `tiny:latest`."""
    return name if ":" in name else f"{name}:latest"


def tag(name: str, size: int, digest: str, capabilities: list[str], **details: Any) -> Object:
    """A row of `/api/tags`. `details`: over the usual ones."""
    known: Object = {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "164K",
    }
    known |= {"quantization_level": "F32", "context_length": CONTEXT_LENGTH, "embedding_length": 64, **details}
    row = {"name": name, "model": name, "modified_at": MODIFIED_AT, "size": size, "digest": digest, "details": known}
    return {**row, "capabilities": capabilities}


def running(row: Object) -> Object:
    """The same model in `/api/ps`, on a CPU. Its context is the one it was loaded with."""
    kept = {name: row[name] for name in ("name", "model", "size", "digest", "details")}
    return {**kept, "expires_at": "2026-12-01T00:00:00Z", "size_vram": 0, "context_length": LOADED_CONTEXT}


def listed(names: list[str]) -> Object:
    """`/v1/models`: null where there are none."""
    data = [{"id": name, "object": "model", "created": 1777899409, "owned_by": "library"} for name in names]
    return {"object": "list", "data": data or None}


def unknown(path: str, model: str) -> str:
    """The error of a model that is not there, as each path words it."""
    if path == "/api/show":
        return f"model '{tagged(model)}' not found"
    if path in ("/api/embed", "/api/embeddings", "/v1/embeddings"):
        return f'model "{model}" not found, try pulling it first'
    return f"model '{model}' not found"


def lacking(model: str, body: Object, capabilities: list[str]) -> str:
    """The error (400) of a model that cannot do what is asked; nothing where it can."""
    if body.get("tools") and "tools" not in capabilities:
        return f"registry.ollama.ai/library/{tagged(model)} does not support tools"
    if asks_to_think(body) and "thinking" not in capabilities:
        return f'"{model}" does not support thinking'
    if _has_picture(body) and "vision" not in capabilities:  # the runner's own error, as text
        said = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
        return json.dumps({"error": {"code": 400, "message": said, "type": "invalid_request_error"}})
    return ""


def asks_to_think(body: Object) -> bool:
    """In whichever dialect."""
    effort = body.get("reasoning_effort") or (body.get("reasoning") or {}).get("effort") or "none"
    return bool(body.get("think")) or effort != "none" or (body.get("thinking") or {}).get("type") == "enabled"


def thinks(body: Object, capabilities: list[str]) -> bool:
    """Whether a model that can thinks: it does unless it is told not to."""
    off = body.get("think") is False or body.get("reasoning_effort") == "none"
    return "thinking" in capabilities and not off and (body.get("thinking") or {}).get("type") != "disabled"


def misread(path: str, body: Object) -> str:
    """The error (500) of an option of another type, or of a format that is none; nothing where both can be read."""
    options = body.get("options") or {}
    for names, kind in ((_FLOATS, "float32"), (_INTS, "integer")):
        for name in names:
            if name in options and (isinstance(options[name], bool) or not isinstance(options[name], int | float)):
                return f'option "{name}" must be of type {kind}'
    given = body.get("format") if path.startswith("/api") else None
    if given not in (None, "", "json") and not isinstance(given, dict):
        return f'invalid format: "{given}"; expected "json" or a valid JSON Schema object'
    return ""


@lru_cache
def is_for_itself(host: str) -> bool:
    """Whether an Ollama on a loopback address answers to this `Host`; to any other it says 403, and nothing more.

    >>> [is_for_itself(host) for host in ("localhost:11434", "127.0.0.1", "[::1]:80", "box.local", "", "a.example:80")]
    [True, True, True, True, True, False]
    """
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    name = name.strip("[]").lower()
    if name in ("", "localhost") or name.endswith(_OWN_TOPS):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_private or address.is_unspecified


def _has_picture(body: Object) -> bool:
    parts: list[Any] = [body]
    for message in body.get("messages") or []:
        parts += [message, *(message["content"] if isinstance(message.get("content"), list) else [])]
    return any(part.get("images") or part.get("type") in ("image", "image_url") for part in parts)
