"""Real Whisper as a model of the pool, behind a whole Hive, asked by unmodified `openai`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests import whisper
from tests.journeys.stack import Stack, stack, until
from tests.whisper import SPOKEN, word_error_rate

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.timeout(300)]
MOST_WRONG = 0.25


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Stack]:
    """A model that is described, and one that is found in models_dir."""
    tmp_path.chmod(0o755)
    models = tmp_path / "models"
    models.mkdir()
    (models / "found").symlink_to(whisper.model())
    config = (
        f"[inference]\nwhisper_program = {whisper.program(tmp_path)}\nmodels_dir = {models}\n"
        "[proxy]\naudio_max_s = 300\n"
        "[pool]\nreserve_mb = 0\ncpu_mb = 1500\nfound = true\n"
        f"[model ear]\nbackend = whisper\nfile = {whisper.model()}\n"
    )
    with stack(config=config) as made:
        made.create("alice", "idler.py")
        yield made


def client_of(hive: Stack) -> openai.OpenAI:
    access: Any = hive.get("/api/agents/alice/tokens")
    return openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0, timeout=200)


def slots(hive: Stack) -> dict[str, Any]:
    return {slot["model"]: slot for slot in hive.get("/api/pool")["slots"]}


def runners(hive: Stack) -> list[psutil.Process]:
    """The runners of this Hive, by its directory in their words."""
    found = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    mine = str(hive.state)
    return [
        process
        for process, words in found
        if words[2:3] == ["whisper"] and words[1].endswith("/hive-runner") and mine in " ".join(words)
    ]


def test_an_agent_says_transcribe_and_the_box_makes_room(hive: Stack, tmp_path: Path) -> None:
    spoken = whisper.speech(tmp_path / "spoken.wav")
    assert {name: slot["category"] for name, slot in slots(hive).items()} == {"ear": "audio", "found": "audio"}
    with client_of(hive) as client:
        assert {model.id for model in client.models.list()} >= {"ear", "found"}
        for model in ("ear", "found"):
            heard = client.audio.transcriptions.create(model=model, file=spoken)
            assert word_error_rate(SPOKEN, heard.text) <= MOST_WRONG
        verbose: Any = client.audio.transcriptions.create(
            model="ear", file=spoken, response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
        assert (verbose.language, bool(verbose.words), bool(verbose.segments)) == ("english", True, True)
        plain: Any = client.audio.transcriptions.create(model="ear", file=spoken, response_format="vtt")
        assert plain.startswith("WEBVTT")
        events = list(client.audio.transcriptions.create(model="ear", file=spoken, stream=True))
        assert [event.type for event in events][-1] == "transcript.text.done"
        assert word_error_rate(SPOKEN, getattr(events[-1], "text", "")) <= MOST_WRONG
    assert slots(hive)["ear"]["state"] == "ready"
    until(lambda: "hive_transcription_real_time_factor{" in metrics(hive), within_s=40, what="its figures are told")
    told = metrics(hive)
    assert 'hive_transcription_load_seconds{model="ear"}' in told
    assert 'hive_transcription_audio_seconds_total{model="ear"}' in told


def metrics(hive: Stack) -> str:
    return b"\n".join(hive.client().lines("/metrics")).decode()


def test_what_cannot_be_heard_is_told_in_words_and_the_model_stays(hive: Stack, tmp_path: Path) -> None:
    noise, long = tmp_path / "noise.mp3", whisper.silence(tmp_path / "long.wav", 310)
    noise.write_bytes(b"no sound at all" * 1000)
    spoken = whisper.speech(tmp_path / "spoken.wav")
    with client_of(hive) as client:
        with pytest.raises(openai.BadRequestError, match="no audio") as bad:
            client.audio.transcriptions.create(model="ear", file=noise)
        assert bad.value.code == "invalid_audio"
        with pytest.raises(openai.APIStatusError, match="longer than 300 s") as too_long:
            client.audio.transcriptions.create(model="ear", file=long)
        assert too_long.value.status_code == 413
        # openai's newest models have it no more
        with pytest.deprecated_call(), pytest.raises(openai.BadRequestError, match="English only"):
            client.audio.translations.create(model="ear", file=spoken)
        with pytest.raises(openai.BadRequestError, match="diarized_json"):
            client.audio.transcriptions.create(model="ear", file=spoken, response_format="diarized_json")
        assert word_error_rate(SPOKEN, client.audio.transcriptions.create(model="ear", file=spoken).text) <= MOST_WRONG


def test_a_runner_that_is_killed_in_mid_work_gives_no_part_of_a_text_as_the_whole(hive: Stack, tmp_path: Path) -> None:
    """Before anything was relayed the file is sent to the next server, or the answer is 502; in a stream it is an
    error, and never the end of a transcript."""
    text = f"{SPOKEN} " * 6
    long = whisper.speech(tmp_path / "long.wav", text)  # several windows
    with client_of(hive) as client:
        client.audio.transcriptions.create(model="ear", file=whisper.speech(tmp_path / "short.wav"))
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(client.audio.transcriptions.create(model="ear", file=long, temperature=0.01).text)
            except openai.APIStatusError as error:
                found.append(error.status_code)

        asked = threading.Thread(target=ask)
        asked.start()
        until(lambda: slots(hive)["ear"]["in_flight"] == 1, within_s=30, what="it is at work")
        kill_runners(hive)
        asked.join()
        assert found[0] in (502, 503) or word_error_rate(text, found[0]) <= MOST_WRONG

        types: list[str] = []

        def follow() -> None:
            for event in client.audio.transcriptions.create(model="ear", file=long, temperature=0.01, stream=True):
                types.append(event.type)
                kill_runners(hive)

        with pytest.raises((openai.APIError, httpx.HTTPError)):
            follow()
        assert types
        assert "transcript.text.done" not in types
        heard = client.audio.transcriptions.create(model="ear", file=whisper.speech(tmp_path / "again.wav"))
        assert word_error_rate(SPOKEN, heard.text) <= MOST_WRONG


def kill_runners(hive: Stack) -> None:
    for process in runners(hive):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def test_an_engine_without_memory_is_503_and_the_model_is_charged_more(hive: Stack, tmp_path: Path) -> None:
    spoken = whisper.speech(tmp_path / "spoken.wav")
    with client_of(hive) as client:
        client.audio.transcriptions.create(model="ear", file=spoken)
        before = slots(hive)["ear"]["need_bytes"]
        (process,) = runners(hive)
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_AS, (process.memory_info().rss + (4 << 20),) * 2)
        long = whisper.silence(tmp_path / "long.wav", 250)  # more than what it has kept of its heap
        with pytest.raises(openai.InternalServerError) as full:
            client.audio.transcriptions.create(model="ear", file=long)
        assert (full.value.status_code, full.value.code) == (503, "out_of_memory")
        until(lambda: slots(hive)["ear"]["need_bytes"] > before, within_s=30, what="it is charged more")
        heard = client.audio.transcriptions.create(model="ear", file=spoken)
        assert word_error_rate(SPOKEN, heard.text) <= MOST_WRONG
