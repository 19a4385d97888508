"""Meanings of the lines typed into a conversation. Pure.

As Ollama's users know it: `/bye`, `/clear`, `/set system …`, and three quotes around what has several lines.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

QUOTES = '"""'
HELP = """\
/set system TEXT   what the model is told before everything else; without TEXT nothing
/set verbose       after each answer how many tokens it had and how fast they came; /set quiet ends that
/clear             forgets what was said
/bye               ends the conversation, as Ctrl-D does
\"\"\"                begins and ends what has several lines
Ctrl-C             stops an answer"""


class InputKind(Enum):
    """`MORE`: the text goes on in the next line. `UNKNOWN`: a command that is none."""

    SAY = auto()
    MORE = auto()
    NOTHING = auto()
    BYE = auto()
    CLEAR = auto()
    SYSTEM = auto()
    VERBOSE = auto()
    QUIET = auto()
    HELP = auto()
    UNKNOWN = auto()


class Typed(NamedTuple):
    """The act asked for, and its text."""

    kind: InputKind
    text: str = ""


class Lines:
    """Lines in the order in which they are typed.

    >>> lines = Lines()
    >>> [lines.take(line).kind.name for line in ("hello", "", "/set system be brief", "/bye", "/nope")]
    ['SAY', 'NOTHING', 'SYSTEM', 'BYE', 'UNKNOWN']
    >>> lines.take('\"\"\"one').kind.name, lines.take(' /bye'), lines.take('three\"\"\"')
    ('MORE', Typed(kind=<InputKind.MORE: 2>, text=''), Typed(kind=<InputKind.SAY: 1>, text='one\\n /bye\\nthree'))
    """

    def __init__(self) -> None:
        self._open: tuple[InputKind, list[str]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether quotes are open."""
        return self._open is not None

    def forget(self) -> None:
        """Ctrl-C: what was begun is not said."""
        self._open = None

    def take(self, line: str) -> Typed:
        if self._open is not None:
            return self._goes_on(line)
        stripped = line.strip()
        if not stripped:
            return Typed(InputKind.NOTHING)
        if stripped.startswith(QUOTES):
            return self._opened(InputKind.SAY, stripped)
        if not stripped.startswith("/"):
            return Typed(InputKind.SAY, line)
        return self._command(stripped)

    def _opened(self, kind: InputKind, text: str) -> Typed:
        rest = text.removeprefix(QUOTES)
        if rest.endswith(QUOTES):
            return Typed(kind, rest.removesuffix(QUOTES))
        self._open = kind, [rest] if rest else []
        return Typed(InputKind.MORE)

    def _goes_on(self, line: str) -> Typed:
        assert self._open is not None
        kind, lines = self._open
        if not line.rstrip().endswith(QUOTES):
            lines.append(line)
            return Typed(InputKind.MORE)
        self._open = None
        last = line.rstrip().removesuffix(QUOTES)
        return Typed(kind, "\n".join([*lines, *([last] if last else [])]))

    def _command(self, line: str) -> Typed:
        words = line.split(maxsplit=2)
        match words[:2]:
            case ["/bye" | "/exit"]:
                return Typed(InputKind.BYE)
            case ["/clear"]:
                return Typed(InputKind.CLEAR)
            case ["/?" | "/help", *_]:
                return Typed(InputKind.HELP)
            case ["/set", "verbose"]:
                return Typed(InputKind.VERBOSE)
            case ["/set", "quiet"]:
                return Typed(InputKind.QUIET)
            case ["/set", "system"]:
                text = words[2] if len(words) > 2 else ""
                return (
                    self._opened(InputKind.SYSTEM, text) if text.startswith(QUOTES) else Typed(InputKind.SYSTEM, text)
                )
        return Typed(InputKind.UNKNOWN, line)
