"""The draft model of a model of the pool: whether the two go together, and how much memory it may take. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hive.backends.speculation import is_four_bit, is_other_vocabulary, why_draft_too_large
from hive.pool.state import CPU, MemoryAccount
from hive.pooling.entry_facts import FileFacts


def why_no_draft_model(
    kind: str, model: FileFacts, draft: FileFacts, *, draft_bytes: int, room: int, share: float
) -> str:
    """The reason that the model cannot be loaded with this draft, a clause; empty where it can.

    `draft_bytes`: that it takes with its context, of `room`, of which it may have `share`.

    >>> model, other = FileFacts(vocabulary=32000), FileFacts(vocabulary=128256)
    >>> why_no_draft_model("llama", model, model, draft_bytes=1, room=100, share=0.15)
    ''
    >>> why_no_draft_model("llama", model, other, draft_bytes=1, room=100, share=0.15)
    'its draft model has another vocabulary: 128256 tokens, and not 32000'
    """
    if not draft.can_load:
        return f"its draft model: {draft.why_not}"
    if is_other_vocabulary(kind, model.vocabulary, draft.vocabulary):
        return f"its draft model has another vocabulary: {draft.vocabulary} tokens, and not {model.vocabulary}"
    return why_draft_too_large(draft_bytes, room, share)


def room_for(accounts: Sequence[MemoryAccount], permitted: Sequence[str]) -> int:
    """The memory that a share is of: the largest account a model may be in; of GPUs where there are any.

    >>> accounts = [MemoryAccount("GPU-1", 80), MemoryAccount("GPU-2", 24), MemoryAccount("cpu", 256)]
    >>> room_for(accounts, ()), room_for(accounts, ("GPU-2",)), room_for(accounts, ("cpu",)), room_for([], ())
    (80, 24, 256, 0)
    """
    may = [account for account in accounts if not permitted or account.id in permitted]
    gpus = [account.total_bytes for account in may if account.id != CPU]
    return max(gpus or [account.total_bytes for account in may], default=0)


def draft_warning(name: str, draft: FileFacts) -> str:
    """A sentence where the draft's weights are not of four bits; empty where they are, or nothing tells.

    >>> draft_warning("small", FileFacts(quantization="Q8_0"))
    'the draft small is Q8_0: with weights of 4 bits it would take less memory and time'
    """
    if not draft.quantization or is_four_bit(draft.quantization):
        return ""
    return f"the draft {name} is {draft.quantization}: with weights of 4 bits it would take less memory and time"
