"""Sound of an uploaded file: decoded once by FFmpeg (PyAV), 16,000 samples a second, into a file without a name.

So its length is known before any of it is heard, and a long one takes no memory. Only formats that hold their own sound
are opened: a playlist would have FFmpeg read other files, or ask other hosts.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO

from hive.runner.faults import EngineFault

RATE = 16_000
"""Samples a second that Whisper hears."""
SAMPLE_BYTES = 2
LEAST_RATE, MOST_RATE = 1_000, 768_000
"""Samples a second that a file may have. One frame of a FLAC holds 65,535 samples, so that 8 KiB of it, at 1 Hz, took
2 GiB of memory (seen); and the filter that brings 10^9 Hz down to 16,000 takes 400 MiB."""
LEAST_S = 0.1
FORMATS = "aac,aiff,caf,flac,matroska,mov,mp3,mpeg,ogg,wav"
"""FFmpeg's names of what it may find in a file: flac, m4a, mp3, mp4, mpeg, mpga, oga, ogg, wav, webm and their kin."""
MOST_BROKEN = 1000
"""Frames in a file that cannot be decoded and are passed over; a file with more is none."""
LOOK_EVERY = 512
"""Frames between two looks at whether anybody still wants it."""


class Sound:
    """The samples of one file."""

    def __init__(self, directory: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - `close` does
        self.samples = 0

    def __repr__(self) -> str:
        return f"<Sound of {self.seconds:.3f} s>"

    @property
    def seconds(self) -> float:
        return self.samples / RATE

    def add(self, raw: bytes) -> None:
        """Puts samples (16 bit) behind those that are there."""
        self._file.write(raw)
        self.samples += len(raw) // SAMPLE_BYTES

    def piece(self, begin_s: float, length_s: float) -> Any:
        """So many seconds of it as an array of float32, from -1 to 1; fewer at its end."""
        begin = min(self.samples, round(begin_s * RATE))
        count = min(self.samples - begin, round(length_s * RATE))
        self._file.flush()
        import numpy  # the engine's, as av: only its environment has them

        raw = os.pread(self._file.fileno(), count * SAMPLE_BYTES, begin * SAMPLE_BYTES)
        return numpy.frombuffer(raw, dtype=numpy.int16).astype(numpy.float32) / 32768.0

    def close(self) -> None:
        """Lets its file go."""
        self._file.close()


def decoded_sound(file: BinaryIO, *, most_s: float, directory: str | None, look: Callable[[], None]) -> Sound:
    """Decodes a file. `look` is called now and then, and may raise.

    Raises EngineFault: 400 `invalid_audio` for what holds no sound, 413 for more than `most_s` seconds of it.
    """
    import av

    sound = Sound(directory)
    try:
        _decode(file, sound, most_s, look)
        if sound.seconds < LEAST_S:
            raise invalid(f"it holds {sound.seconds:.3f} s of sound; {LEAST_S:g} s is the least")
    except (av.FFmpegError, UnicodeDecodeError, EOFError) as error:
        sound.close()
        raise invalid(f"it cannot be decoded ({type(error).__name__})") from None
    except OSError as error:
        sound.close()
        if error.errno == errno.EINVAL:  # a place before its begin, which its head names
            raise invalid("it cannot be decoded (its head is broken)") from None
        raise
    except BaseException:
        sound.close()
        raise
    return sound


def invalid(why: str) -> EngineFault:
    """The error for a file that is no sound."""
    taken = "flac, m4a, mp3, mp4, mpeg, mpga, oga, ogg, wav and webm are taken"
    return EngineFault(400, f"the file is no audio: {why}; {taken}", "invalid_audio", param="file")


def _decode(file: BinaryIO, sound: Sound, most_s: float, look: Callable[[], None]) -> None:
    import av

    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    with av.open(file, mode="r", metadata_errors="ignore", options=options) as container:
        if not container.streams.audio:
            raise invalid("there is no sound in it")
        resampler, shape = None, None
        frames, broken, number = container.decode(audio=0), 0, 0
        while True:
            try:
                frame = next(frames)
            except StopIteration:
                break
            except av.error.InvalidDataError:
                broken += 1
                if broken > MOST_BROKEN:
                    raise
                continue
            if not LEAST_RATE <= frame.sample_rate <= MOST_RATE:
                raise invalid(f"it has {frame.sample_rate} samples a second; {LEAST_RATE} to {MOST_RATE} may be")
            frame.pts = None  # some files tell times that run backwards
            if shape != (shape := (frame.sample_rate, frame.layout.name, frame.format.name)):  # two files in one
                _add(sound, resampler, None)
                resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
            _add(sound, resampler, frame)
            if sound.seconds > most_s:
                raise EngineFault(
                    413, f"the audio is longer than {most_s:g} s (audio_max_s)", "too_large", param="file"
                )
            number += 1
            if number % LOOK_EVERY == 0:
                look()
        _add(sound, resampler, None)


def _add(sound: Sound, resampler: Any, frame: Any) -> None:
    """Puts a frame behind what is there, or, of None, what the resampler still holds."""
    for made in resampler.resample(frame) if resampler is not None else ():
        sound.add(made.to_ndarray().tobytes())
