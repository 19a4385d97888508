"""Whisper's runner and files of strangers: each is heard, or refused in words, and the runner stays small."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import whisper
from tests.whisper import SPOKEN, WhisperRunner, word_error_rate

MADE = """
import sys
import av, numpy

def joined(path, parts, form, codec, frame):
    with open(path, "wb") as out:
        for rate, layout, seconds in parts:
            with av.open(path + ".part", "w", format=form) as file:
                options = {"frame_size": frame} if frame else {}
                stream = file.add_stream(codec, rate=rate, layout=layout, options=options)
                silent = numpy.zeros((1, int(rate * seconds) * (1 if layout == "mono" else 2)), dtype="int16")
                sound = av.AudioFrame.from_ndarray(silent, format="s16", layout=layout)
                sound.sample_rate = rate
                size = int(frame) if frame else stream.frame_size
                cut = av.AudioResampler(format=stream.format.name, layout=layout, rate=rate, frame_size=size)
                for piece in [*cut.resample(sound), *cut.resample(None), None]:
                    for packet in stream.encode(piece):
                        file.mux(packet)
            out.write(open(path + ".part", "rb").read())

joined(sys.argv[1] + "/two.aac", [(16000, "mono", 2), (44100, "stereo", 2)], "adts", "aac", "")
joined(sys.argv[1] + "/slow.flac", [(1, "mono", 65535)], "flac", "flac", "65535")
"""
"""Two recordings in one file, as a box that records makes it whose settings are changed; 65,535 samples in a frame, one
for a second."""

BACKWARDS = (
    "636166660001000064657363000000000000002040cf4000ff8000006c70637f0080000000c6007f000000010000007f000000660001"
    "000064657f63000000000000002040cf4000ff80000000007f000000660001000064657f63000000000000002040cf4000ff8000006c"
    "70636d0080000000c60004000000010000007f000000106368616e000000000000ff0c006500020000000000000000696e666f000000"
    "000000001a00000001656e636f646572006572004c61766636322e7f32ff3130766636322e3132ff3130320064617461000001000000"
    "ee0400000000000000000100011a02340234"
)
"""A CAF file whose head names a place before its begin."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    whisper.model()
    subprocess.run([str(whisper.cache() / "venv/bin/python"), "-c", MADE, str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[WhisperRunner]:
    with whisper.runner(folder) as made:
        yield made


def peak_mib(served: WhisperRunner) -> int:
    """The most memory that the runner has had."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def wav(rate: int, samples: int) -> bytes:
    data = b"\0\0" * samples
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, (rate * 2) & 0xFFFFFFFF, 2, 16)
    return (
        b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    )


def test_a_file_of_one_sample_a_second_takes_no_memory(served: WhisperRunner, folder: Path) -> None:
    """8 KiB of it took 2 GiB: the pool's kernel would have ended the server, and the model been charged more."""
    before = peak_mib(served)
    for name, content in {"slow.flac": b"", "slow.wav": wav(1, 4000), "fast.wav": wav(1_500_000_000, 4000)}.items():
        if content:
            (folder / name).write_bytes(content)
        answer = served.hear(folder / name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_audio")
        assert "samples a second; 1000 to 768000 may be" in answer.json()["error"]["message"]
    assert peak_mib(served) - before < 100


def test_two_recordings_in_one_file_are_heard_as_one(served: WhisperRunner, folder: Path) -> None:
    """The second has another rate and more channels: it was a 500."""
    answer = served.hear(folder / "two.aac")
    assert answer.status_code == 200
    assert float(answer.headers["x-hive-cost"].partition("=")[2]) == pytest.approx(4, abs=0.3)


def test_a_head_that_leads_before_the_file_is_invalid_audio(served: WhisperRunner, folder: Path) -> None:
    """It was a 500: PyAV tells it as an OSError of its own reading."""
    (folder / "back.caf").write_bytes(bytes.fromhex(BACKWARDS))
    answer = served.hear(folder / "back.caf")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_audio")


@pytest.mark.wide
def test_a_model_that_is_taken_away_serves_on(tmp_path: Path) -> None:
    """Its weights are in memory. Its row at /v1/models was a 500: each question counted its files anew."""
    copy = tmp_path / "model"
    shutil.copytree(whisper.model(), copy)
    spoken = whisper.speech(tmp_path / "spoken.wav")
    with whisper.runner(tmp_path, "tiny.en", "--model", str(copy)) as served:
        (row,) = served.client.get("/v1/models").json()["data"]
        shutil.rmtree(copy)
        assert served.client.get("/v1/models").json()["data"] == [row]
        assert word_error_rate(SPOKEN, served.hear(spoken).json()["text"]) <= 0.25
