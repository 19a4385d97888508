"""Transcript of a sound in the shapes of OpenAI's answers: text, JSON, subtitles, events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_LANGUAGES = (
    "af=afrikaans am=amharic ar=arabic as=assamese az=azerbaijani ba=bashkir be=belarusian bg=bulgarian bn=bengali "
    "bo=tibetan br=breton bs=bosnian ca=catalan cs=czech cy=welsh da=danish de=german el=greek en=english "
    "es=spanish et=estonian eu=basque fa=persian fi=finnish fo=faroese fr=french gl=galician gu=gujarati "
    "ha=hausa haw=hawaiian he=hebrew hi=hindi hr=croatian ht=haitian_creole hu=hungarian hy=armenian "
    "id=indonesian is=icelandic it=italian ja=japanese jw=javanese ka=georgian kk=kazakh km=khmer kn=kannada "
    "ko=korean la=latin lb=luxembourgish ln=lingala lo=lao lt=lithuanian lv=latvian mg=malagasy mi=maori "
    "mk=macedonian ml=malayalam mn=mongolian mr=marathi ms=malay mt=maltese my=myanmar ne=nepali nl=dutch "
    "nn=nynorsk no=norwegian oc=occitan pa=punjabi pl=polish ps=pashto pt=portuguese ro=romanian ru=russian "
    "sa=sanskrit sd=sindhi si=sinhala sk=slovak sl=slovenian sn=shona so=somali sq=albanian sr=serbian "
    "su=sundanese sv=swedish sw=swahili ta=tamil te=telugu tg=tajik th=thai tk=turkmen tl=tagalog tr=turkish "
    "tt=tatar uk=ukrainian ur=urdu uz=uzbek vi=vietnamese yi=yiddish yo=yoruba yue=cantonese zh=chinese"
)
LANGUAGES = dict(pair.split("=") for pair in _LANGUAGES.split())
"""Whisper's codes of languages, and the names that a verbose answer has."""


class HeardWord(NamedTuple):
    """One word with its times, seconds from the begin of the sound."""

    word: str
    start: float
    end: float


class HeardSegment(NamedTuple):
    """A piece of speech with its times; the figures are Whisper's own."""

    start: float
    end: float
    text: str
    seek: int = 0
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: tuple[HeardWord, ...] = ()


class Transcript(NamedTuple):
    """The whole of it. `language`: Whisper's code; `duration`: seconds of sound."""

    segments: Sequence[HeardSegment]
    language: str
    duration: float

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


def usage_of(duration: float) -> dict[str, Any]:
    """The cost of a transcript, as OpenAI's answers tell it for a model that is paid by the time: whole seconds.

    >>> usage_of(6.02)
    {'type': 'duration', 'seconds': 7}
    """
    return {"type": "duration", "seconds": -int(-duration // 1)}


def shaped(
    found: Transcript, form: str, *, task: str, words: bool, segments: bool
) -> tuple[bytes | dict[str, Any], str]:
    """The answer in `form`, one of FORMATS, and its media type; JSON as an object.

    >>> heard = Transcript([HeardSegment(0.0, 1.5, " One."), HeardSegment(1.5, 3.25, " Two.")], "en", 3.4)
    >>> shaped(heard, "text", task="transcribe", words=False, segments=True)
    (b'One. Two.\\n', 'text/plain; charset=utf-8')
    >>> print(shaped(heard, "srt", task="transcribe", words=False, segments=True)[0].decode())
    1
    00:00:00,000 --> 00:00:01,500
    One.
    <BLANKLINE>
    2
    00:00:01,500 --> 00:00:03,250
    Two.
    <BLANKLINE>
    <BLANKLINE>
    """
    plain = "text/plain; charset=utf-8"
    if form == "text":
        return f"{found.text}\n".encode(), plain
    if form == "srt":
        blocks = (
            f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_line(one.text)}\n\n"
            for number, one in enumerate(found.segments, 1)
        )
        return "".join(blocks).encode(), plain
    if form == "vtt":
        blocks = (f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_line(one.text)}\n\n" for one in found.segments)
        return ("WEBVTT\n\n" + "".join(blocks)).encode(), plain
    answer: dict[str, Any] = {"text": found.text}
    if form == "verbose_json":
        name = LANGUAGES.get(found.language, found.language).replace("_", " ")
        answer = {"task": task, "language": name, "duration": round(found.duration, 3), **answer}
        if segments:
            answer["segments"] = [_segment(number, one) for number, one in enumerate(found.segments)]
        if words:
            answer["words"] = [
                {"word": word.word.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
                for one in found.segments
                for word in one.words
            ]
    return answer | {"usage": usage_of(found.duration)}, "application/json"


def _segment(number: int, one: HeardSegment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": one.seek,
        "start": round(one.start, 3),
        "end": round(one.end, 3),
        "text": one.text,
        "tokens": list(one.tokens),
        "temperature": one.temperature,
        "avg_logprob": one.avg_logprob,
        "compression_ratio": one.compression_ratio,
        "no_speech_prob": one.no_speech_prob,
    }


def _line(text: str) -> str:
    """A subtitle's text: an arrow in it would be read as times."""
    return text.strip().replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    """
    >>> _time(3661.0005, "."), _time(0.9996, ",")
    ('01:01:01.000', '00:00:01,000')
    """
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


def code_of(language: str) -> str | None:
    """Whisper's code for a language, by its code or its English name; None for neither.

    >>> code_of("EN"), code_of("german"), code_of("xx")
    ('en', 'de', None)
    """
    asked = language.strip().lower().replace(" ", "_")
    return asked if asked in LANGUAGES else next((code for code, name in LANGUAGES.items() if name == asked), None)
