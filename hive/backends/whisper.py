"""Whisper (faster-whisper 1.2 in Hive's own runner): speech to text. Data and pure functions."""

from __future__ import annotations

from hive.backends import openai_answers
from hive.backends.command_line import Launch, Order
from hive.backends.hive_runner import (
    HEALTH,
    OF_TEXT,
    busy,
    heard,
    loaded,
    models,
    places,
    recognises,
    runner_launch,
    version,
)
from hive.backends.spec import Asking, BackendSpec, Requests
from hive.domain import BackendKind, Dialect

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def launch(order: Order) -> Launch:
    flags = (
        *("--model", order.model),
        *("--device", "cuda" if order.gpus else "cpu"),
        *("--most-audio-s", f"{order.most_audio_s:g}"),
    )
    return runner_launch(BackendKind.WHISPER, order, program_key="whisper_program", flags=flags, environment={})


SPEC = BackendSpec(
    kind=BackendKind.WHISPER,
    label="Whisper",
    dialects=frozenset({Dialect.OPENAI}),
    category="audio",
    adds=frozenset({TRANSCRIPTIONS, TRANSLATIONS}),
    lacks=OF_TEXT,
    stops_late=True,
    questions=(HEALTH,),
    recognise=recognises(BackendKind.WHISPER),
    asking=Asking(
        health_path=HEALTH,  # 503 while its model loads
        version=version,
        models=models,
        busy=busy,
        heard=heard,
        loaded=loaded,
        why_not_load="a runner serves the model it was started with",
    ),
    one_token=openai_answers.completion,
    tokens_in=openai_answers.tokens_in,
    requests=Requests(why_not_ahead="it hears sound, and reads no prompt ahead"),
    places=places,
    prefix_cache="none",
    why_not_flush="Whisper keeps nothing of a request",
    model_format="whisper",
    program=lambda inference: inference.whisper_program,
    launch=launch,
)
