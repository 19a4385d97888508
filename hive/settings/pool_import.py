"""The seed's manifest of models, and its tasks.yaml, as descriptions for models.d. Pure: the caller has read them.

A manifest is a table of models by name, or a list of tables with `id` or `name`, at its top or under `models`. What has
no counterpart is told in a note, so that nobody believes it was taken over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from hive.errors import ConfigError

BACKENDS = {"llama-server": "llama", "llama.cpp": "llama", "llama": "llama", "vllm": "vllm"}
CATEGORIES = {
    **dict.fromkeys(("llm", "chat", "text", "completion"), "llm"),
    **dict.fromkeys(("embedding", "embeddings"), "embedding"),
    **dict.fromkeys(("vision", "vlm"), "vision"),
    **dict.fromkeys(("image", "diffusion"), "image"),
    **dict.fromkeys(("audio", "tts", "stt", "speech"), "audio"),
}
UNSERVED = frozenset({"image", "audio"})
SAME = {
    **dict.fromkeys(("path", "file", "model_path", "gguf"), "file"),
    **dict.fromkeys(("context", "ctx_size", "context_length", "n_ctx"), "context"),
    **dict.fromkeys(("parallel", "n_parallel"), "parallel"),
    **dict.fromkeys(("gpus", "gpu"), "gpus"),
    **dict.fromkeys(("keep_alive_s", "stay_warm_s"), "keep_alive_s"),
    **{key: key for key in ("backend", "category", "vram_mb", "pin", "sleep", "chat_template", "thinking")},
}
"""The seed's key -> ours."""
NAMES = frozenset({"id", "name"})
TOLD_MAX = 80
CLOUD = re.compile(r"(claude|openai|gemini):", re.IGNORECASE)
"""Names of models that others serve."""
WHY_NOT = {
    "gpus": "names no GPU by its UUID, and the numbers of GPUs change",
    "chat_template": "is no file of a Jinja template",
}
_GPU = re.compile(r"(GPU|MIG)-[A-Za-z0-9-]+|cpu")


class ImportedModels(msgspec.Struct, frozen=True):
    """The models by name, each with its keys as in models.d; `notes`: what was left out, one sentence each."""

    models: dict[str, dict[str, Any]]
    notes: list[str]


def imported(documents: Mapping[str, Any], base: Path) -> ImportedModels:
    """Makes descriptions of the documents by file name; a path that is not absolute is one of `base`.

    Raises ConfigError where none of them describes a model that a server here can load.

    >>> manifest = {"models": {"qwen3-8b": {"backend": "llama-server", "path": "q.gguf", "pin": True, "vram_mb": 6000}}}
    >>> imported({"manifest.yaml": manifest}, Path("/srv/models")).models
    {'qwen3-8b': {'backend': 'llama', 'file': '/srv/models/q.gguf', 'pin': True, 'vram_mb': 6000}}
    """
    models: dict[str, dict[str, Any]] = {}
    described: dict[str, str] = {}
    notes: list[str] = []
    for where, document in documents.items():
        if _tasks_of(document) is not None:
            continue
        for name, values in _rows(document, where):
            if name in described:
                raise ConfigError(f"{where}: {name} is described already in {described[name]}")
            described[name] = where
            if CLOUD.match(name):
                notes.append(f"{where}: {name}: left out, it is no model of this box")
            elif (made := _model(values, f"{where}: {name}", base, notes)) is not None:
                models[name] = made
    for where, document in documents.items():
        _take_tasks(_tasks_of(document) or {}, where, models, notes)
    if not models:
        hint = "; ".join(notes[:3]) or "tasks.yaml names models without their files: give the manifest too"
        raise ConfigError(f"no model in {', '.join(documents)} can be taken over", hint=hint)
    return ImportedModels(models, notes)


def _rows(document: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The models of a manifest by name. Raises ConfigError for what is none."""
    found = document["models"] if isinstance(document, dict) and "models" in document else document
    if isinstance(found, list):
        pairs = [(_name_in(row), row) for row in found]
    elif isinstance(found, dict):
        pairs = list(found.items())
    else:
        raise ConfigError(f"{where}: expected models by name, or a list of models", hint="it is the seed's manifest")
    for name, row in pairs:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: {_told(name)}: expected the name of a model")
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: {_told(name)}: expected a table of settings, found {_told(row)}")
        yield name, row


def _name_in(row: Any) -> Any:
    return next((row[key] for key in ("id", "name") if key in row), None) if isinstance(row, dict) else row


def _model(row: Mapping[str, Any], said: str, base: Path, notes: list[str]) -> dict[str, Any] | None:
    """Its keys as in models.d; None, and a note, where no server here can load it."""
    given: dict[str, Any] = {}
    for key, value in row.items():
        if key in NAMES or value is None:
            continue
        if key not in SAME:
            notes.append(f"{said}: {_told(key)} has no counterpart and was left out")
        elif SAME[key] in given:
            notes.append(f"{said}: {key} was left out, {SAME[key]} is told by another key already")
        else:
            given[SAME[key]] = value
    category = CATEGORIES.get(str(given.pop("category", "llm")).lower(), "")
    backend = BACKENDS.get(str(given.pop("backend", "llama-server")).lower(), "")
    if not category or not backend or category in UNSERVED:
        notes.append(f"{said}: left out, no server here loads it (backend and category)")
        return None
    if not isinstance(given.get("file"), str) or not given["file"]:
        notes.append(f"{said}: left out, its file is not told (path)")
        return None
    made: dict[str, Any] = {"backend": backend, "file": str(base / given.pop("file"))}
    if category != "llm":
        made["category"] = category
    for key, value in given.items():
        taken = _value(key, value, base)
        if taken is None:
            notes.append(f"{said}: {key} was left out: {_told(value)} {WHY_NOT.get(key, 'is not understood')}")
        else:
            made[key] = taken
    return made


def _value(key: str, value: Any, base: Path) -> Any:
    """The value as models.d has it; None where it has no counterpart."""
    if key == "thinking":
        if isinstance(value, dict):
            value = value.get("enabled")
        words: dict[Any, str] = {True: "on", False: "off", "on": "on", "off": "off", "auto": "auto"}
        return words.get(value) if isinstance(value, bool | str) else None
    if key == "gpus":
        named = value if isinstance(value, list) else str(value).split(",")
        uuids = [str(one).strip() for one in named]
        return ", ".join(uuids) if uuids and all(_GPU.fullmatch(one) for one in uuids) else None
    if key == "chat_template":
        is_file = isinstance(value, str) and "\n" not in value and value.endswith((".jinja", ".jinja2", ".j2"))
        return str(base / value) if is_file else None
    if key in ("pin", "sleep"):
        return value if isinstance(value, bool) else None
    return value if _is_number(value) else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tasks_of(document: Any) -> dict[Any, Any] | None:
    tasks = document.get("tasks") if isinstance(document, dict) and "models" not in document else None
    return tasks if isinstance(tasks, dict) else None


def _take_tasks(tasks: Mapping[Any, Any], where: str, models: Mapping[str, dict[str, Any]], notes: list[str]) -> None:
    """Of a task only `keep_alive_s` is taken over, for its first model: the longest of all tasks, not over its own."""
    longest: dict[str, float] = {}
    for name, task in tasks.items():
        said = f"{where}: task {_told(name)}"
        if not isinstance(task, dict):
            raise ConfigError(f"{said}: expected a table of settings, found {_told(task)}")
        ladder = next((_names(task[key]) for key in ("models", "candidates", "ladder", "model") if key in task), [])
        keep = task.get("keep_alive_s")
        first = ladder[0] if ladder else ""
        if keep is not None and _is_number(keep) and first in models:
            longest[first] = max(longest.get(first, 0.0), keep)
        elif keep is not None:
            notes.append(f"{said}: keep_alive_s was left out: its first model is none of those taken over")
        notes.append(f"{said}: its ladder is not taken over; requests name a model, or an alias of [inference] aliases")
    for model, keep in longest.items():
        models[model].setdefault("keep_alive_s", keep)


def _names(found: Any) -> list[str]:
    rows: Iterable[Any] = found if isinstance(found, list) else [found]
    names = [_name_in(row) if isinstance(row, dict) else row for row in rows]
    return [name for name in names if isinstance(name, str)]


def _told(value: Any) -> str:
    """A scalar as it stands, of anything else its kind: what aliases of YAML refer to again and again has no end."""
    if isinstance(value, dict | list | tuple | set):
        return f"a {type(value).__name__}"
    text = str(value)
    return text if len(text) <= TOLD_MAX and text.isprintable() else f"{text[:TOLD_MAX]!a}"
