"""Whisper as a runner: OpenAI's transcriptions and translations by faster-whisper, with the model's files alone.

A long sound is heard in pieces, so that its memory does not grow with it. Between two windows of 30 s it is looked
whether the client is still there: the engine cannot be stopped within one.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hive.runner.faults import EngineFault
from hive.runner.form import SentForm
from hive.runner.http_server import CallRoute, EngineCall
from hive.runner.sound import RATE, Sound, decoded_sound
from hive.runner.transcript import FORMATS, HeardSegment, HeardWord, Transcript, code_of, shaped, usage_of

PIECE_S = 300.0
"""Seconds of sound that the engine has in its memory at once."""
WINDOW_S = 30.0
"""Of each piece but the last, this much at its end is heard again with the next: it may be cut within a word."""
MOST_THREADS = 8
PROMPT_CHARACTERS = 400
"""Of the piece before, told to the next: Whisper reads 224 tokens of it."""
FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried one after another where a window was not understood, unless a request says one."""
NEEDED = ("model.bin", "config.json", "tokenizer.json")
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Threads that wait for each other sleep: on two cores that others use too it took 1.3 s of CPU for 5 s of sound, and
with threads that spin 2.2 to 2.9 s (CTranslate2 4.8)."""
GRANULARITIES = ("word", "segment")


class Hearing(NamedTuple):
    """One request as its form asks. `language`: Whisper's code, None to find out; `temperatures`: tried in order."""

    task: str
    form: str
    language: str | None
    prompt: str
    temperatures: tuple[float, ...]
    words: bool
    segments: bool
    stream: bool


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds its own flags to those of every runner."""
    parser.add_argument("--model", type=Path, required=True, help="directory of the model (CTranslate2's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it is loaded")
    parser.add_argument("--most-audio-s", type=float, default=7200, help="longest sound of a request, seconds")


class WhisperProgram:
    """The engine with its one model, as an EngineProgram."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path: Path = arguments.model
        self._device: str = arguments.device
        self._most_s: float = arguments.most_audio_s
        self._spool: str | None = arguments.spool
        self._name: str = arguments.name
        self._model: Any = None
        self._version = ""
        self._bytes = 0
        self._counting = threading.Lock()
        self._audio_s = self._work_s = 0.0
        self._calls = 0

    def load(self) -> None:
        """Loads the model and has it hear a second of silence: what it takes for its work is then taken."""
        lacks = [name for name in NEEDED if not (self._path / name).is_file()]
        if lacks:
            raise FileNotFoundError(f"{self._path} has no {', '.join(lacks)}, and no hub is asked")
        self._bytes = sum(file.stat().st_size for file in self._path.iterdir() if file.is_file())
        for name, value in PASSIVE.items():
            os.environ.setdefault(name, value)
        import faster_whisper  # 1 s of CPU, while /health answers already
        import numpy

        self._version = str(faster_whisper.__version__)
        self._model = faster_whisper.WhisperModel(
            str(self._path),
            device=self._device,
            cpu_threads=min(MOST_THREADS, len(os.sched_getaffinity(0))),
            local_files_only=True,
        )
        silence = numpy.zeros(RATE, dtype=numpy.float32)
        for temperature in (0.0, 1.0):  # both ways of decoding
            segments, _ = self._model.transcribe(silence, language="en", temperature=temperature, max_new_tokens=8)
            for _ in segments:
                pass

    def version(self) -> str:
        return self._version

    def routes(self) -> Mapping[tuple[str, str], CallRoute]:
        return {
            ("POST", "/v1/audio/transcriptions"): CallRoute(self.transcribe),
            ("POST", "/v1/audio/translations"): CallRoute(self.translate),
        }

    def facts(self) -> dict[str, Any]:
        speaks = "multilingual" if self.is_multilingual else "English"
        can = ["transcription", *(["translation"] if self.is_multilingual else [])]
        return {
            "size_bytes": self._bytes,
            "capabilities": can,
            "meta": {"languages": speaks, "audio_max_s": self._most_s},
        }

    def counts(self) -> Mapping[str, float]:
        with self._counting:
            return {
                "hive_runner_calls_total": self._calls,
                "hive_runner_audio_seconds_total": self._audio_s,
                "hive_runner_work_seconds_total": self._work_s,
            }

    @property
    def is_multilingual(self) -> bool:
        return bool(self._model.model.is_multilingual)

    def transcribe(self, call: EngineCall) -> None:
        """Answers `/v1/audio/transcriptions`."""
        self._hear(call, "transcribe")

    def translate(self, call: EngineCall) -> None:
        """Answers `/v1/audio/translations`: English text of speech in any language."""
        self._hear(call, "translate")

    def _hear(self, call: EngineCall, task: str) -> None:
        asked = hearing_of(call.form(), task, is_multilingual=self.is_multilingual, model=self._name)
        file = call.form().file
        if file is None:
            raise EngineFault(400, "the form has no file: send the audio as `file`", "bad_request", param="file")
        sound = decoded_sound(file, most_s=self._most_s, directory=self._spool, look=call.check_caller)
        try:
            call.close()  # the upload is not needed any more
            call.cost = f"audio_s={sound.seconds:.3f}"
            began = time.monotonic()
            try:
                self._answer(call, asked, sound)
            finally:
                with self._counting:
                    self._calls += 1
                    self._audio_s += sound.seconds
                    self._work_s += time.monotonic() - began
        finally:
            sound.close()

    def _answer(self, call: EngineCall, asked: Hearing, sound: Sound) -> None:
        heard: list[HeardSegment] = []
        language = [asked.language or ("" if self.is_multilingual else "en")]
        for segment in self._heard(asked, sound, language):
            call.check_caller()
            if asked.stream:
                text = segment.text if heard else segment.text.lstrip()
                call.event({"type": "transcript.text.delta", "delta": text})
            heard.append(segment)
        call.check_caller()
        found = Transcript(heard, language[0], sound.seconds)
        if asked.stream:
            done = {"type": "transcript.text.done", "text": found.text, "usage": usage_of(sound.seconds)}
            call.event(done)
            call.event("[DONE]")
            call.end_events()
            return
        answer, kind = shaped(found, asked.form, task=asked.task, words=asked.words, segments=asked.segments)
        if isinstance(answer, bytes):
            call.answer(answer, kind)
        else:
            call.answer_json(answer)

    def _heard(self, asked: Hearing, sound: Sound, language: list[str]) -> Iterator[HeardSegment]:
        """The segments in order. `language` gets what it was found to be."""
        at, before = 0.0, asked.prompt
        while at < sound.seconds:
            piece = sound.piece(at, PIECE_S)
            is_last = at + PIECE_S >= sound.seconds
            ends = PIECE_S if is_last else PIECE_S - WINDOW_S
            segments, info = self._model.transcribe(
                piece,
                task=asked.task,
                language=language[0] or None,
                initial_prompt=before or None,
                temperature=list(asked.temperatures),
                word_timestamps=asked.words,
            )
            language[0] = language[0] or info.language
            reached, is_cut = 0.0, False
            for segment in segments:
                is_cut = not is_last and segment.end > ends and reached > 0
                if is_cut:
                    break  # the next piece begins where the last whole one ended
                reached = min(segment.end, len(piece) / RATE)
                one = moved(segment, at)
                before = (before + one.text)[-PROMPT_CHARACTERS:]
                yield one
            if is_last:
                return
            at += reached if is_cut else max(reached, ends)


def moved(segment: Any, at: float) -> HeardSegment:
    """The engine's segment of a piece that begins at `at` seconds."""
    words = tuple(HeardWord(word.word, word.start + at, word.end + at) for word in segment.words or ())
    return HeardSegment(
        start=segment.start + at,
        end=segment.end + at,
        text=segment.text,
        seek=segment.seek + round(at * 100),
        tokens=tuple(segment.tokens),
        temperature=segment.temperature or 0.0,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
        words=words,
    )


def hearing_of(form: SentForm, task: str, *, is_multilingual: bool, model: str) -> Hearing:
    """Reads the fields of a form. Raises EngineFault (400) that names the field and what it may be."""
    if task == "translate" and not is_multilingual:
        raise refused("model", f"{model} hears English only, so it translates nothing: ask a multilingual model")
    shape = form.one("response_format") or "json"
    if shape == "diarized_json":
        raise refused(
            "response_format", "diarized_json says who speaks, and Whisper does not know: verbose_json has times"
        )
    if shape not in FORMATS:
        raise refused("response_format", f"response_format is one of {', '.join(FORMATS)}, not {shape[:40]!r}")
    granularities = [name for value in form.all("timestamp_granularities") for name in value.split(",")]
    if wrong := [name for name in granularities if name not in GRANULARITIES]:
        raise refused("timestamp_granularities", f"a granularity is word or segment, not {wrong[0][:40]!r}")
    if granularities and shape != "verbose_json":
        raise refused("timestamp_granularities", "timestamps need response_format verbose_json")
    stream = {"": False, "false": False, "true": True}.get((form.one("stream") or "").lower())
    if stream is None:
        raise refused("stream", "stream is true or false")
    if stream and shape not in ("json", "text"):
        raise refused("response_format", f"a stream is of text alone: json or text, not {shape}")
    return Hearing(
        task=task,
        form=shape,
        language=_language(form.one("language"), is_multilingual, model),
        prompt=form.one("prompt") or "",
        temperatures=_temperatures(form.one("temperature")),
        words="word" in granularities,
        segments="segment" in granularities or not granularities,
        stream=stream,
    )


def _language(told: str | None, is_multilingual: bool, model: str) -> str | None:
    if not told:
        return None
    code = code_of(told)
    if code is None:
        raise refused("language", f"{told[:40]!r} is no language that Whisper knows: say it as ISO 639-1 does (en, de)")
    if code != "en" and not is_multilingual:
        raise refused("language", f"{model} hears English only, not {told[:40]}")
    return code


def _temperatures(told: str | None) -> tuple[float, ...]:
    """Those to try: of 0, as of none, the higher ones too, where a window was not understood."""
    try:
        temperature = float(told or "0")
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 1:
        raise refused("temperature", f"temperature is a number from 0 to 1, not {(told or '')[:40]!r}")
    return (temperature,) if temperature else FALLBACK


def refused(field: str, why: str) -> EngineFault:
    """The error for a field that cannot be as asked."""
    return EngineFault(400, why, "bad_request", param=field)


Program = WhisperProgram
