"""The draft model of a service's server: whether it goes with the model, and how much memory it takes.

A server alone would refuse it after its model is loaded, or draft in vain. The pool looks at its entries in the same
way.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from hive.backends.speculation import DRAFT
from hive.domain import BackendKind
from hive.errors import ConfigError
from hive.host.gpu_memory import GpuMemoryReader
from hive.host.memory import read_memory
from hive.pool.estimate import ModelFacts, estimate
from hive.pooling.draft_models import why_no_draft_model
from hive.pooling.entry_facts import FileFacts, read_facts
from hive.settings.table import InferenceSection


def check_draft(kind: str, inference: InferenceSection, *, room_bytes: int | None = None) -> None:
    """Raises ConfigError where the server of `kind` is to draft with a model that does not go with its own, or takes
    more than its share. `room_bytes`: the memory that is a share of; None for that of the largest GPU, or of the host.

    A path that is not there is told by whoever starts the server.
    """
    if inference.speculative != DRAFT or kind not in (BackendKind.LLAMA, BackendKind.VLLM):
        return
    key = f"{kind}_speculative_model"
    path, draft_path = Path(getattr(inference, f"{kind}_model")), Path(getattr(inference, key))
    is_router = kind == BackendKind.LLAMA and inference.llama_model.endswith("/")
    if draft_path == Path() or is_router or not (path.exists() and draft_path.exists()):
        return
    model, draft = read_facts(path), read_facts(draft_path)
    room = room_bytes if room_bytes is not None else asyncio.run(_room_bytes())
    why = why_no_draft_model(
        kind,
        model,
        draft,
        draft_bytes=draft_bytes(kind, draft_path.name, model, draft, inference),
        room=room,
        share=inference.speculative_memory_share,
    )
    if why:
        raise ConfigError(
            f"{path} cannot be served with {key} = {draft_path}: {why}",
            hint="another draft, a larger speculative_memory_share, or speculative = none",
        )


def draft_bytes(kind: str, name: str, model: FileFacts, draft: FileFacts, inference: InferenceSection) -> int:
    """Bytes that the draft takes beside its model: weights, and the keys and values of as long a context.

    >>> draft, model = FileFacts(size_bytes=1000), FileFacts()
    >>> draft_bytes("llama", "small", model, draft, InferenceSection())
    1100
    """
    context = inference.llama_context if kind == BackendKind.LLAMA else model.context_trained or 0
    facts = ModelFacts(
        name=name, file_bytes=draft.size_bytes, is_gguf=draft.is_gguf, shape=draft.shape, context=context
    )
    found = estimate(facts)
    return 0 if found is None else found.bytes


async def _room_bytes() -> int:
    """Bytes of the largest GPU, or of the host's memory where there is none; 0 where neither is known."""
    gpus = (await GpuMemoryReader().seen()).gpus
    return max((gpu.total_bytes or 0 for gpu in gpus), default=0) or read_memory().total_bytes or 0
