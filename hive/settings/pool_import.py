"""The seed's manifest of models, and its tasks.yaml, as descriptions for models.d. Pure: the caller has read them.

A manifest is a table of models by name, or a list of tables with `id` or `name`, at its top or under `models`. What has
no counterpart is told in a note, so that nobody believes it was taken over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from hive.errors import ConfigError
from hive.settings.tasks import NO_TASK, TASK_NAME

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
LADDERS = ("models", "candidates", "ladder", "model")
"""Keys of a task for the models that it may be given."""
TIMES = frozenset({"budget_s", "keep_alive_s"})
TOLD_MAX = 80
CLOUD = re.compile(r"(claude|openai|gemini):", re.IGNORECASE)
"""Names of models that others serve."""
WHY_NOT = {
    "gpus": "names no GPU by its UUID, and the numbers of GPUs change",
    "chat_template": "is no file of a Jinja template",
}
_GPU = re.compile(r"(GPU|MIG)-[A-Za-z0-9-]+|cpu")


class ImportedModels(msgspec.Struct, frozen=True):
    """The models and the tasks by name, each with its keys as in models.d; `notes`: what was left out, one sentence
    each."""

    models: dict[str, dict[str, Any]]
    notes: list[str]
    tasks: dict[str, dict[str, Any]] = {}


def imported(documents: Mapping[str, Any], base: Path) -> ImportedModels:
    """Makes descriptions of the documents by file name; a path that is not absolute is one of `base`.

    Raises ConfigError where none of them describes a model that a server here can load, or a task.

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
    tasks: dict[str, dict[str, Any]] = {}
    left_out = described.keys() - models.keys()
    for where, document in documents.items():
        _take_tasks(_tasks_of(document) or {}, where, left_out, tasks, notes)
    if not models and not tasks:
        hint = "; ".join(notes[:3]) or "a manifest has models with their files, tasks.yaml has tasks"
        raise ConfigError(f"no model and no task in {', '.join(documents)} can be taken over", hint=hint)
    return ImportedModels(models, notes, tasks)


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


def _take_tasks(
    found: Mapping[Any, Any],
    where: str,
    left_out: Collection[str],
    tasks: dict[str, dict[str, Any]],
    notes: list[str],
) -> None:
    """The tasks with their ladders. `left_out`: models of the manifest that no server here loads; what others serve is
    left out, too."""
    for name, task in found.items():
        said = f"{where}: task {_told(name)}"
        if not isinstance(task, dict):
            raise ConfigError(f"{said}: expected a table of settings, found {_told(task)}")
        if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
            notes.append(f"{said}: left out, its name is none here: {NO_TASK}")
            continue
        if name in tasks:
            raise ConfigError(f"{said}: it is described already")
        key = next((key for key in LADDERS if key in task), "")
        ladder = _names(task[key]) if key else []
        kept = list(dict.fromkeys(rung for rung in ladder if rung not in left_out and not CLOUD.match(rung)))
        for rung in ladder:
            if rung in left_out or CLOUD.match(rung):
                notes.append(f"{said}: {_told(rung)} was left out of its ladder: it is no model of this box")
        if not kept:
            notes.append(f"{said}: left out, no model of its ladder is there")
            continue
        made: dict[str, Any] = {"models": " | ".join(kept)}
        tasks[name] = made
        for other, value in task.items():
            is_time = other in TIMES and _is_number(value) and value >= 0
            if is_time or (other == "pin_primary" and isinstance(value, bool)):
                made[other] = value
            elif other != key:
                notes.append(f"{said}: {_told(other)} has no counterpart and was left out")


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
