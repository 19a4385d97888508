"""Whisper as a runner: real weights hear real speech."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import whisper
from tests.whisper import SPOKEN, WhisperRunner, word_error_rate

pytestmark = pytest.mark.engines
MOST_WRONG = 0.25
"""Of the words. The smallest model hears a synthetic voice with 5 to 15 % of them wrong."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[WhisperRunner]:
    with whisper.runner(folder, "tiny.en", "--most-audio-s", "900") as made:
        yield made


@pytest.fixture(scope="module")
def spoken(folder: Path) -> Path:
    whisper.model()
    return whisper.speech(folder / "spoken.wav")


def test_it_hears_what_was_said_and_tells_what_that_cost(served: WhisperRunner, spoken: Path) -> None:
    answer = served.hear(spoken)
    assert word_error_rate(SPOKEN, answer.json()["text"]) <= MOST_WRONG
    with wave.open(str(spoken)) as file:
        seconds = file.getnframes() / file.getframerate()
    name, _, cost = answer.headers["x-hive-cost"].partition("=")
    assert name == "audio_s"
    assert float(cost) == pytest.approx(seconds, abs=0.05)
    assert answer.json()["usage"] == {"type": "duration", "seconds": -int(-seconds // 1)}


@pytest.mark.parametrize("form", ["text", "srt", "vtt"])
def test_text_and_subtitles_are_plain_text(served: WhisperRunner, spoken: Path, form: str) -> None:
    answer = served.hear(spoken, response_format=form)
    assert answer.headers["content-type"].startswith("text/plain")
    begins = {"text": "", "srt": "1\n00:00:0", "vtt": "WEBVTT\n\n00:00:0"}[form]
    assert answer.text.startswith(begins)
    said = [line for line in answer.text.splitlines() if "-->" not in line and line not in ("WEBVTT", "1", "2", "3")]
    assert word_error_rate(SPOKEN, " ".join(said)) <= MOST_WRONG


@pytest.mark.parametrize("asked", [[], ["segment"], ["word"], ["word", "segment"]])
def test_a_verbose_answer_has_the_timestamps_that_were_asked_for(
    served: WhisperRunner, spoken: Path, asked: list[str]
) -> None:
    fields: dict[str, Any] = {"timestamp_granularities[]": asked} if asked else {}
    found = served.hear(spoken, **fields, response_format="verbose_json").json()
    assert (found["task"], found["language"]) == ("transcribe", "english")
    assert ("words" in found) is ("word" in asked)
    assert ("segments" in found) is (asked != ["word"])
    for key in {"words", "segments"} & found.keys():
        times = [time for one in found[key] for time in (one["start"], one["end"])]
        assert times == sorted(times)
        assert times[-1] <= found["duration"] + 1


def test_a_stream_has_deltas_that_make_the_text_and_an_end(served: WhisperRunner, spoken: Path) -> None:
    answer = served.hear(spoken, stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "audio_s=" in answer.headers["x-hive-cost"]
    *events, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert end == "[DONE]"
    *deltas, done = [json.loads(event) for event in events]
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert "".join(delta["delta"] for delta in deltas) == done["text"]
    assert word_error_rate(SPOKEN, done["text"]) <= MOST_WRONG


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "xml"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "hour", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"stream": "perhaps"}, "stream"),
        ({"temperature": "2"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"language": "de"}, "language"),  # English only
        ({"language": "klingon"}, "language"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_a_field_that_cannot_be_as_asked_is_named(
    served: WhisperRunner, spoken: Path, fields: dict[str, str], param: str
) -> None:
    answer = served.hear(spoken, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_english_only_model_translates_nothing(served: WhisperRunner, spoken: Path) -> None:
    answer = served.hear(spoken, "/v1/audio/translations")
    assert answer.status_code == 400
    assert "English only" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"these are words and no sound" * 100,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile '{path}'\n",
        b"RIFF\x24\x00\x00\x00WAVEfmt ",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 200,
    ],
    ids=["empty", "text", "playlist", "concat", "cut", "picture"],
)
def test_what_is_no_sound_is_invalid_audio(served: WhisperRunner, spoken: Path, folder: Path, content: bytes) -> None:
    """Playlists name another file: one that is there, and that nobody may have opened for the asker."""
    path = folder / "no.wav"
    path.write_bytes(content.replace(b"{path}", str(spoken).encode()))
    answer = served.hear(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_audio")
    assert "x-hive-cost" not in answer.headers


def test_a_sound_longer_than_may_be_is_413(served: WhisperRunner, folder: Path) -> None:
    answer = served.hear(whisper.silence(folder / "long.wav", 930))
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")
    assert "900 s" in answer.json()["error"]["message"]


def test_a_long_sound_is_heard_in_pieces_to_its_end(served: WhisperRunner, spoken: Path, folder: Path) -> None:
    """Speech, then silence beyond the length of a piece, then speech: all is there, and its times are the sound's."""
    long = folder / "pieces.wav"
    with wave.open(str(spoken)) as file:
        parameters, said = file.getparams(), file.readframes(file.getnframes())
    with wave.open(str(long), "wb") as file:
        file.setparams(parameters)
        file.writeframes(said)
        for _ in range(300):
            file.writeframes(b"\0\0" * parameters.framerate)
        file.writeframes(said)
    found = served.hear(long, response_format="verbose_json", temperature="0.01").json()
    ends = [one for one in found["segments"] if one["start"] > 290]
    assert word_error_rate(SPOKEN, " ".join(one["text"] for one in ends)) <= 2 * MOST_WRONG
    assert found["duration"] == pytest.approx(300 + 2 * len(said) / 2 / parameters.framerate, abs=0.1)
    starts = [one["start"] for one in found["segments"]]
    assert starts == sorted(starts)


def test_a_client_that_leaves_ends_the_work_after_a_window(served: WhisperRunner, spoken: Path, folder: Path) -> None:
    """The place is free when the connection is closed; the rest of the sound was not heard."""
    with wave.open(str(spoken)) as file:
        parameters, said = file.getparams(), file.readframes(file.getnframes())
    long = folder / "cut.wav"
    with wave.open(str(long), "wb") as file:
        file.setparams(parameters)
        for _ in range(12):
            file.writeframes(said)
    content = long.read_bytes()
    begin = (
        b'--B\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
        b'--B\r\nContent-Disposition: form-data; name="temperature"\r\n\r\n0.01\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="audio"\r\n\r\n'
    )
    body = begin + content + b"\r\n--B--\r\n"
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(100)
        asking.connect(str(served.socket))
        asking.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        came = asking.recv(65536)
        assert came.startswith(b"HTTP/1.1 200")
        asking.shutdown(socket.SHUT_WR)
        while more := asking.recv(65536):
            came += more
    assert b"transcript.text.done" not in came
    assert "hive_runner_busy 0" in served.client.get("/metrics").text


def test_its_figures_tell_the_sound_and_the_time_for_it(served: WhisperRunner, spoken: Path) -> None:
    def figures() -> dict[str, float]:
        pairs = (line.split() for line in served.client.get("/metrics").text.splitlines())
        return {name: float(value) for name, value in pairs}

    before = figures()
    served.hear(spoken)
    after = figures()
    assert after["hive_runner_audio_seconds_total"] > before["hive_runner_audio_seconds_total"]
    assert after["hive_runner_work_seconds_total"] > before["hive_runner_work_seconds_total"]
    assert after["hive_runner_load_seconds"] > 0


def test_nothing_of_an_upload_lies_in_its_directory(served: WhisperRunner, spoken: Path, folder: Path) -> None:
    before = set(os.listdir(folder))
    served.hear(spoken)
    assert set(os.listdir(folder)) == before


def test_a_multilingual_model_finds_the_language_and_translates(tmp_path: Path) -> None:
    with whisper.runner(tmp_path, "base") as served:
        german = whisper.speech(tmp_path / "de.wav", whisper.GERMAN, "de")
        heard = served.hear(german, response_format="verbose_json").json()
        assert heard["language"] == "german"
        assert word_error_rate(whisper.GERMAN, heard["text"]) <= 0.5
        english = served.hear(german, "/v1/audio/translations").json()["text"].lower()
        assert {"morning", "weather", "dog", "park"} & set(english.replace(".", " ").replace(",", " ").split())
        listed = served.client.get("/v1/models").json()["data"][0]
        assert listed["capabilities"] == ["transcription", "translation"]


def test_a_model_without_its_tokenizer_is_refused_and_no_hub_is_asked(tmp_path: Path) -> None:
    broken = tmp_path / "m"
    broken.mkdir()
    for name in ("model.bin", "config.json"):
        (broken / name).symlink_to(whisper.model() / name)
    words = ("whisper", "--socket", str(tmp_path / "s"), "--name", "w", "--model", str(broken))
    done = subprocess.run([str(whisper.program(tmp_path)), *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "tokenizer.json" in done.stderr


def test_without_memory_it_answers_503_and_ends_with_77(tmp_path: Path) -> None:
    """A limit on its address space, as an engine meets it: not a cgroup's, which kills."""
    with whisper.runner(tmp_path) as served:
        long = whisper.silence(tmp_path / "long.wav", 250)  # more than what it has kept of its heap
        rss = int((Path("/proc") / str(served.process.pid) / "statm").read_text().split()[0]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
        subprocess.run(["prlimit", f"--as={rss + (4 << 20)}", "--pid", str(served.process.pid)], check=True)
        answer = served.hear(long)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
        assert served.process.wait(60) == 77
        assert served.process.returncode != -signal.SIGKILL
