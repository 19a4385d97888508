"""The kinds of inference server there are: registered here, by the name that settings and the API have for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hive.backends import comfyui, demo, diffusers, llama, ollama, remote, vllm, whisper
from hive.backends.spec import BackendSpec
from hive.domain import ModelInfo
from hive.models.whereabouts import NOWHERE, Whereabouts

SPECS: dict[str, BackendSpec] = {
    spec.kind: spec
    for spec in (
        *(ollama.SPEC, vllm.SPEC, llama.SPEC, demo.SPEC, remote.SPEC),
        *(whisper.SPEC, diffusers.SPEC, comfyui.SPEC),
    )
}
"""By name, in the order in which people are told of them. A new kind is one more `SPEC` here."""


def spec_of(kind: str) -> BackendSpec:
    """Finds the specification of a registered kind.

    >>> spec_of("llama")
    <BackendSpec llama>
    """
    return SPECS[kind]


def specs() -> Iterator[BackendSpec]:
    """Yields every kind, in that order."""
    yield from SPECS.values()


def whereabouts(kind: str | None, models: Sequence[ModelInfo]) -> Whereabouts:
    """Makes the judge of where requests for the models of a server go; kind None: no server.

    >>> there = [ModelInfo(name="tiny"), ModelInfo(name="helper", remote_host="https://h")]
    >>> [whereabouts(kind, there).far for kind in ("vllm", "ollama", None)]
    [frozenset(), frozenset({'helper'}), frozenset()]
    """
    if kind is None:
        return NOWHERE
    spec = spec_of(kind)
    return Whereabouts(spec.why_far, models, server=spec.label)
