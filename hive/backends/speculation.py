"""Speculative decoding: the words by which each kind of server is told to draft tokens, and how good its drafts are.

A draft is some tokens that are guessed cheaply, by a small model or from what the text has said before, and that the
model checks in one step. What it does not agree with is thrown away: greedy output is the same with and without.
Facts and the time come in as arguments. Pure.
"""

from __future__ import annotations

from collections import deque

import msgspec

from hive.backends.counters import Drafts
from hive.domain import BackendKind
from hive.settings.table import InferenceSection

NONE, NGRAM, DRAFT = "none", "ngram", "draft"
NGRAM_LENGTH = 4
"""Tokens that have to have been there before, in this order, for what followed them to be a draft."""
LLAMA_SPARE_TOKENS = 128
"""llama-server drafts for a vocabulary that differs by so many tokens (llama.cpp 0c1e570, common/speculative.cpp)."""
WINDOW_S = 600.0
POOR = 0.3
"""Below this share of accepted tokens drafts cost more than they give (facts: row 31)."""
LEAST_TOKENS = 200
"""Drafted within the window: of fewer nothing is said."""


def vllm_words(inference: InferenceSection) -> tuple[str, ...]:
    """The words of vLLM's command line.

    >>> vllm_words(InferenceSection()), vllm_words(InferenceSection(speculative="ngram"))[0]
    ((), '--speculative-config')
    >>> vllm_words(InferenceSection(speculative="draft", vllm_speculative_model="/d"))[1]
    '{"method":"draft_model","model":"/d","num_speculative_tokens":4}'
    """
    config: dict[str, object]
    if inference.speculative == NGRAM:
        config = {"method": "ngram", "prompt_lookup_max": NGRAM_LENGTH, "prompt_lookup_min": NGRAM_LENGTH}
    elif inference.speculative == DRAFT and inference.vllm_speculative_model:
        config = {"method": "draft_model", "model": inference.vllm_speculative_model}
    else:
        return ()
    config["num_speculative_tokens"] = inference.speculative_draft_tokens
    return "--speculative-config", msgspec.json.encode(config).decode()


def llama_words(inference: InferenceSection) -> tuple[str, ...]:
    """The words of llama-server's command line. A router is told nothing: one draft model is not right for several.

    `--draft` and its like are removed and end it; `-md` alone drafts nothing (seen, commit 0c1e570).

    >>> llama_words(InferenceSection(speculative="ngram", speculative_draft_tokens=6))[:2]
    ('--spec-type', 'ngram-simple')
    >>> llama_words(InferenceSection(speculative="draft", llama_speculative_model="/d.gguf"))
    ('--spec-type', 'draft-simple', '-md', '/d.gguf', '--spec-draft-n-max', '4')
    >>> llama_words(InferenceSection(speculative="ngram", llama_model="/srv/models/"))
    ()
    """
    tokens = str(inference.speculative_draft_tokens)
    if inference.llama_model.endswith("/"):
        return ()
    if inference.speculative == NGRAM:
        lengths = ("--spec-ngram-simple-size-n", str(NGRAM_LENGTH), "--spec-ngram-simple-size-m", tokens)
        return ("--spec-type", "ngram-simple", *lengths)
    if inference.speculative == DRAFT and (model := inference.llama_speculative_model):
        return ("--spec-type", "draft-simple", "-md", model, "--spec-draft-n-max", tokens)
    return ()


def why_vain(inference: InferenceSection) -> list[str]:
    """Settings of `[inference]` about speculation that have no effect, clauses.

    >>> why_vain(InferenceSection(vllm_speculative_model="/d"))
    ['vllm_speculative_model has no effect: speculative is none']
    >>> why_vain(InferenceSection(speculative="draft"))
    ['speculative = draft has no effect: neither vllm_speculative_model nor llama_speculative_model names a model']
    >>> why_vain(InferenceSection(speculative="ngram", llama_model="/srv/models/"))
    ['speculative has no effect for llama-server: as a router it has several models']
    """
    models = [key for key in ("vllm_speculative_model", "llama_speculative_model") if getattr(inference, key)]
    said = []
    if inference.speculative != DRAFT:
        said += [f"{key} has no effect: speculative is {inference.speculative}" for key in models]
    elif not models:
        keys = "neither vllm_speculative_model nor llama_speculative_model"
        said.append(f"speculative = draft has no effect: {keys} names a model")
    if inference.speculative != NONE and inference.llama_model.endswith("/"):
        said.append("speculative has no effect for llama-server: as a router it has several models")
    return said


def is_four_bit(quantization: str) -> bool:
    """Whether weights of this quantization take about four bits.

    >>> [is_four_bit(name) for name in ("Q4_K_M", "IQ4_XS", "MXFP4_MOE", "AWQ", "Q8_0", "BF16", "")]
    [True, True, True, True, False, False, False]
    """
    name = quantization.upper()
    return name.startswith(("Q4", "IQ4", "MXFP4", "NVFP4", "INT4", "W4")) or name in ("AWQ", "GPTQ", "NF4")


def why_draft_too_large(draft_bytes: int, room_bytes: int, share: float) -> str:
    """A clause where a draft model takes more than `share` of the memory there is; empty where it fits.

    >>> why_draft_too_large(3 << 30, 20 << 30, 0.15), why_draft_too_large(4 << 30, 20 << 30, 0.15)
    ('', 'its draft model takes 4096 MiB, and speculative_memory_share gives it 3072 MiB of 20480 MiB')
    """
    most = int(room_bytes * share)
    if not room_bytes or draft_bytes <= most:
        return ""
    mib = 1 << 20
    return (
        f"its draft model takes {draft_bytes // mib} MiB, and speculative_memory_share gives it {most // mib} MiB"
        f" of {room_bytes // mib} MiB"
    )


def is_other_vocabulary(kind: str, tokens: int | None, draft: int | None) -> bool:
    """Whether a draft's vocabulary is too unlike the model's for this kind of server; False where one is not told.

    >>> [is_other_vocabulary(kind, 32000, 32100) for kind in ("llama", "vllm")], is_other_vocabulary("vllm", 7, None)
    ([False, True], False)
    """
    spare = LLAMA_SPARE_TOKENS if kind == BackendKind.LLAMA else 0
    return bool(tokens and draft) and abs((tokens or 0) - (draft or 0)) > spare


class Acceptance:
    """Drafts of one server over time: since it started, and within the last ten minutes.

    `costs`: for ten minutes fewer than three in ten drafted tokens were accepted, of 200 at least.

    >>> seen = Acceptance()
    >>> [seen.see(Drafts(drafted, drafted // 10), now=60.0 * n) for n, drafted in enumerate(range(0, 1200, 100))]
    [False, False, False, False, False, False, False, False, False, False, True, False]
    >>> seen
    <Acceptance 110 of 1100, costs more than it gives>
    """

    def __init__(self) -> None:
        self.drafts: Drafts | None = None
        self.costs = False
        self._looks: deque[tuple[float, Drafts]] = deque()

    def __repr__(self) -> str:
        if self.drafts is None:
            return "<Acceptance of nothing>"
        said = ", costs more than it gives" if self.costs else ""
        return f"<Acceptance {self.drafts.accepted} of {self.drafts.drafted}{said}>"

    @property
    def rate(self) -> float | None:
        """The share that was accepted within the window; None where nothing was drafted there."""
        if not self._looks:
            return None
        (_, first), (_, last) = self._looks[0], self._looks[-1]
        drafted = last.drafted - first.drafted
        return round((last.accepted - first.accepted) / drafted, 3) if drafted else None

    def see(self, drafts: Drafts | None, now: float) -> bool:
        """Takes a look at the server's counters, None where it told none. Whether it began to cost just now.

        Counters that went back are those of a server that was started anew: what was before does not count.
        """
        if drafts is None:
            if self._looks and now - self._looks[-1][0] >= WINDOW_S:  # started anew without, or gone
                self.drafts, self.costs = None, False
                self._looks.clear()
            return False
        if self.drafts is not None and (drafts.drafted < self.drafts.drafted or drafts.accepted < self.drafts.accepted):
            self._looks.clear()
            self.costs = False
        self.drafts = drafts
        self._looks.append((now, drafts))
        while len(self._looks) > 1 and self._looks[1][0] <= now - WINDOW_S:
            self._looks.popleft()
        began, first = self._looks[0]
        is_poor = (
            now - began >= WINDOW_S and drafts.drafted - first.drafted >= LEAST_TOKENS and (self.rate or 0.0) < POOR
        )
        before, self.costs = self.costs, is_poor
        return is_poor and not before

    @property
    def warning(self) -> str:
        """A sentence where it costs more than it gives, else empty."""
        if not self.costs:
            return ""
        return (
            f"speculation costs more than it gives: of its drafted tokens {self.rate or 0:.0%} were accepted in the"
            " last 10 minutes (requests with a schema accept none at llama-server)"
        )
