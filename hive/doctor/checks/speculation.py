"""Speculation as it is configured: is there what it needs, and does the draft go with its model."""

from __future__ import annotations

from collections.abc import Sequence

from hive.backends.entries import entries_of, started_entries
from hive.backends.speculation import DRAFT, NGRAM, is_other_vocabulary
from hive.backends.vllm_numba import lacks_numba
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.domain import BackendKind


def look_at_numba(subject: Subject) -> CheckVerdict:
    inference = subject.settings.inference
    entries = started_entries(entries_of(subject.settings)).values()
    asking = [entry.name for entry in entries if entry.kind == BackendKind.VLLM and entry.row.speculative == NGRAM]
    if inference.speculative == NGRAM and not entries:
        asking.append("[inference]")
    return judge_numba(asking, inference.vllm_program, lacks=bool(asking) and lacks_numba(inference.vllm_program))


def judge_numba(asking: Sequence[str], program: str, *, lacks: bool) -> CheckVerdict:
    """
    >>> judge_numba([], "/opt/vllm/bin/vllm", lacks=False).reason
    'no vLLM is to draft by ngrams'
    """
    if not asking:
        return skipped("no vLLM is to draft by ngrams")
    if lacks:
        return wrong("speculation_without_numba", model=asking[0], program=program)
    return passed("numba is there, or vLLM's packages are elsewhere")


def look_at_drafts(subject: Subject) -> CheckVerdict:
    """Reads the headers of the models' files."""
    from hive.backends.model_files import read_vocabulary  # reads files: not needed to list the checks

    pairs: list[tuple[str, str, int | None, int | None]] = []
    for entry in started_entries(entries_of(subject.settings)).values():
        if entry.draft is not None:
            pairs.append((entry.name, entry.kind, read_vocabulary(entry.path), read_vocabulary(entry.draft)))
    inference = subject.settings.inference
    if inference.speculative == DRAFT:
        for kind in (BackendKind.LLAMA, BackendKind.VLLM):
            draft = getattr(inference, f"{kind}_speculative_model")
            if draft and not (model := getattr(inference, f"{kind}_model")).endswith("/"):
                pairs.append(("[inference]", kind, read_vocabulary(model), read_vocabulary(draft)))
    return judge_drafts(pairs)


def judge_drafts(pairs: Sequence[tuple[str, str, int | None, int | None]]) -> CheckVerdict:
    """`pairs`: (name, kind, tokens of its vocabulary, of its draft's); None where that is not told.

    >>> judge_drafts([]).reason, judge_drafts([("m", "llama", 32000, 32000)]).reason
    ('no model has a draft model', '1 model and its draft have one vocabulary')
    """
    if not pairs:
        return skipped("no model has a draft model")
    for name, kind, of_model, of_draft in pairs:
        if is_other_vocabulary(kind, of_model, of_draft):
            return wrong("speculation_other_vocabulary", model=name, tokens=of_model, draft=of_draft)
    known = sum(None not in pair[2:] for pair in pairs)
    said = "1 model and its draft have" if known == 1 else f"{known} models and their drafts have"
    return passed(f"{said} one vocabulary")


CHECKS = (
    Check("speculation.numba", "vLLM has what its ngram drafts need.", look_at_numba),
    Check("speculation.drafts", "Draft models have the vocabulary of their models.", look_at_drafts),
)
