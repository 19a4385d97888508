"""The model that an adapter is for, as its own files say it: compared before any inference server is asked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from hive.adapters import gguf, peft
from hive.adapters.lora import LoraFile, Matrix
from hive.adapters.record import GGUF, SAFETENSORS
from hive.errors import AdapterMismatch, AdapterUnsafe, BadRequest

_SHORTEST_NAME = 4


class BaseModel(NamedTuple):
    """A model by its name here. `path`: its GGUF file, or its directory for vLLM; None where its server has it and
    Hive has not. `names`: others it goes by."""

    name: str
    path: Path | None = None
    names: Collection[str] = ()


def check_base(base: BaseModel, lora: LoraFile, format: str, told: str = "") -> None:
    """Raises AdapterMismatch where these matrices are not the model's.

    Where the model's files are here, they decide, and names count for nothing. `told`: the model that the adapter's
    maker names; empty where he names none. Raises BadRequest where the model's files cannot be looked at.
    """
    if base.path is not None:
        is_gguf = base.path.suffix == ".gguf"
        if is_gguf != (format == GGUF):
            raise AdapterMismatch(
                f"a {format} adapter does not go with {base.name}, which is {GGUF if is_gguf else SAFETENSORS}",
                hint="llama.cpp's convert_lora_to_gguf.py makes a gguf adapter of a safetensors one",
            )
        try:
            architecture, matrices = gguf.read_model(base.path) if is_gguf else ("", peft.read_model(base.path))
        except (OSError, AdapterUnsafe) as error:
            raise BadRequest(
                f"the model {base.name} cannot be looked at: {error}", hint="hive model show tells where its files are"
            ) from None
        if lora.architecture != architecture:
            raise AdapterMismatch(
                f"it is for the architecture {lora.architecture[:40]!r}, and {base.name} is {architecture[:40]!r}"
            )
        if is_gguf and lora.targets.keys().isdisjoint(matrices):
            raise AdapterMismatch(f"it is not for {base.name}: the model has none of its matrices")
        if why := why_not_of(lora.targets, matrices):
            raise AdapterMismatch(f"it is not for {base.name}: {why}")
        if is_gguf or not lora.targets.keys().isdisjoint(matrices):
            return
    if told and not any(is_same_model(told, name) for name in (base.name, *base.names)):
        raise AdapterMismatch(f"its maker says it is for {told[:120]}, which is not {base.name}")


def why_not_of(targets: Mapping[str, Matrix], matrices: Mapping[str, Matrix]) -> str:
    """The reason why these changes are not of a model with these matrices; empty where they are, or where that is not
    known: the matrices of a quantized safetensors model have other names.

    >>> why_not_of({"q": Matrix(64, 64)}, {"q": Matrix(64, 32)})
    'q is 64×64 there and 64×32 in the model'
    >>> why_not_of({"q": Matrix(1, 1)}, {}), why_not_of({"q": Matrix(1, 1), "k": Matrix(1, 1)}, {"q": Matrix(1, 1)})
    ('', 'the model has no k')
    """
    if targets.keys().isdisjoint(matrices):
        return ""
    for name, matrix in sorted(targets.items()):
        if name not in matrices:
            return f"the model has no {name[:80]}"
        if matrices[name] != matrix:
            return f"{name[:80]} is {matrix} there and {matrices[name]} in the model"
    return ""


def is_same_model(told: str, name: str) -> bool:
    """Whether two names are probably of one model: by their last parts, where one may be longer.

    >>> is_same_model("meta-llama/Llama-3.1-8B", "/srv/models/llama-3.1-8b-awq"), is_same_model("a/qwen3-8b", "llama")
    (True, False)
    """
    one, other = (re.sub(r"[^a-z0-9]", "", text.rstrip("/").rpartition("/")[2].lower()) for text in (told, name))
    shorter, longer = sorted((one, other), key=len)
    return one == other or (len(shorter) >= _SHORTEST_NAME and longer.startswith(shorter))
