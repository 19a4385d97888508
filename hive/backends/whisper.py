"""Whisper (faster-whisper 1.2 in Hive's own runner): speech to text. Data and pure functions."""

from __future__ import annotations

import msgspec

from hive.backends.command_line import Launch, Order
from hive.backends.hive_runner import ASKING, heard, runner_launch, runner_spec
from hive.domain import BackendKind

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def launch(order: Order) -> Launch:
    flags = (
        *("--model", order.model),
        *("--device", "cuda" if order.gpus else "cpu"),
        *("--most-audio-s", f"{order.most_audio_s:g}"),
    )
    return runner_launch(BackendKind.WHISPER, order, program_key="whisper_program", flags=flags, environment={})


SPEC = runner_spec(
    kind=BackendKind.WHISPER,
    label="Whisper",
    category="audio",
    adds=frozenset({TRANSCRIPTIONS, TRANSLATIONS}),
    asking=msgspec.structs.replace(ASKING, heard=heard),
    why_not_ahead="it hears sound, and reads no prompt ahead",
    why_not_flush="Whisper keeps nothing of a request",
    model_format="whisper",
    program=lambda inference: inference.whisper_program,
    launch=launch,
)
