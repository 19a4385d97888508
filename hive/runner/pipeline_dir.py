"""The directory of a pipeline as diffusers lays it out: its parts, by the names and sizes of files. Standard library.

Only safetensors count as weights: other forms are programs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

INDEX = "model_index.json"
WEIGHTS = ".safetensors"
VARIANTS = ("fp16", "bf16")
"""Names of weights that are there in half the precision."""


class PipelinePart(NamedTuple):
    """A part with weights: the library and class that it is of, its bytes, and the variant that is to be loaded."""

    library: str
    kind: str
    size: int
    variant: str = ""


def read_index(path: Path) -> dict[str, Any]:
    """Content of model_index.json. Raises ValueError where it is none, or names no class of diffusers' own."""
    try:
        index = json.loads((path / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path / INDEX} cannot be read: {error}") from None
    name = index.get("_class_name") if isinstance(index, dict) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{path / INDEX} names no pipeline of diffusers' own (_class_name)")
    return dict(index)


def parts_of(path: Path, index: dict[str, Any]) -> dict[str, PipelinePart]:
    """The parts that have weights, by name. Raises ValueError for weights that are no safetensors."""
    found: dict[str, PipelinePart] = {}
    for name, entry in index.items():
        is_part = isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry)
        if name.startswith("_") or not name.isidentifier() or not is_part:
            continue
        files = {file.name: file.stat().st_size for file in (path / name).glob(f"*{WEIGHTS}")}
        if not files and any((path / name).glob("*.bin")):
            raise ValueError(f"{name} has weights, but none that are {WEIGHTS}")
        if files:
            variant = variant_of(list(files))
            size = sum(size for file, size in files.items() if _variant(file) == variant)
            found[name] = PipelinePart(entry[0], entry[1], size, variant)
    if not found:
        raise ValueError(f"{path} has no part with {WEIGHTS}")
    return found


def variant_of(files: list[str]) -> str:
    """The variant of weights that are there in no other; empty where they are there without one.

    >>> variant_of(["model.fp16.safetensors"]), variant_of(["model.safetensors", "model.fp16.safetensors"])
    ('fp16', '')
    """
    there = {_variant(file) for file in files}
    return "" if "" in there else next((variant for variant in VARIANTS if variant in there), "")


def _variant(file: str) -> str:
    """
    >>> _variant("model.fp16-00001-of-00002.safetensors"), _variant("model-00001-of-00002.safetensors")
    ('fp16', '')
    """
    return next((name for name in VARIANTS if f".{name}." in file or f".{name}-" in file), "")
