"""The model that a client of the runner API means: by its name, and by a quantization besides. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hive.domain import ModelInfo
from hive.errors import BadRequest, HiveError, ModelNotFound, NotFound
from hive.models.catalog import Catalog
from hive.models.names import parse, quantization_of


def chosen(catalog: Catalog, model_id: str, quantization: str | None = None) -> ModelInfo:
    """The model of this name, or its variant in this quantization. A name is never a path.

    Raises ModelNotFound, BadRequest for a quantization that there is none of.

    >>> from hive.models.routing import preferences
    >>> there = [ModelInfo(name="meta/Llama-8B:awq-4bit"), ModelInfo(name="meta/Llama-8B:fp16"), ModelInfo(name="m")]
    >>> catalog = Catalog(there, preferences())
    >>> [chosen(catalog, "meta/Llama-8B", word).name for word in ("awq-4bit", "fp16")]
    ['meta/Llama-8B:awq-4bit', 'meta/Llama-8B:fp16']
    >>> chosen(catalog, "m", "bf16")
    Traceback (most recent call last):
    hive.errors.BadRequest: m is not here as bf16: its quantization is not known
    >>> chosen(catalog, "/etc/passwd")
    Traceback (most recent call last):
    hive.errors.ModelNotFound: there is no model '/etc/passwd' here
    """
    found = _named(catalog, model_id)
    if quantization is None:
        if found is None:
            raise _not_here(model_id)
        return found
    if found is not None and _is_in(quantization, catalog, found):
        return found
    variants = _variants(catalog, model_id, found)
    for model in variants:
        if _is_in(quantization, catalog, model):
            return model
    if found is None and not variants:
        raise _not_here(model_id)
    known = sorted({catalog.quantization(model) for model in [*variants, *([found] if found else [])]} - {""})
    there = f"it is here as {', '.join(known)}" if known else "its quantization is not known"
    raise BadRequest(f"{model_id[:80]} is not here as {quantization[:40]}: {there}")


def is_same(asked: str, known: str) -> bool:
    """Whether both are names of one quantization.

    >>> is_same("awq-4bit", "AWQ"), is_same("fp16", "F16"), is_same("fp16", "bf16"), is_same("gptq-4bit", "GPTQ-Int4")
    (True, True, False, True)
    """
    one, other = quantization_of(asked), quantization_of(known)
    if one is None or other is None:
        return asked.casefold() == known.casefold()
    return one.name == other.name


def _is_in(quantization: str, catalog: Catalog, model: ModelInfo) -> bool:
    """Whether the model is in this quantization, by its server or by the name that it is described with."""
    variant = parse(model.name).variant
    known = {catalog.quantization(model), "" if variant is None else variant.name}
    return any(is_same(quantization, word) for word in known if word)


def _named(catalog: Catalog, model_id: str) -> ModelInfo | None:
    try:
        return catalog.find(model_id)
    except NotFound:
        return None


def _variants(catalog: Catalog, model_id: str, found: ModelInfo | None) -> list[ModelInfo]:
    """The models that are the same in some quantization: by the part of their name before the tag, where none is named
    so."""
    if found is not None:
        names: Iterable[str] = catalog.variants(found.name)
        return [model for model in catalog.models if model.name in set(names)]
    return [model for model in catalog.models if model.name.rpartition(":")[0] == model_id]


def _not_here(model_id: str) -> HiveError:
    return ModelNotFound(f"there is no model {model_id[:80]!r} here")
