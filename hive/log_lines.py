"""Log lines for programs: one JSON object for each event, and how such a line is read again.

Hive's own calls say `log.info("agent_paused agent=%s idle_s=%d", …)`. The fields are taken from the template, not from
the finished text, so nothing a value contains can pass for another field. Everything beyond ASCII and every control
character is escaped by JSON itself: a line is one line, and a terminal obeys nothing in it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

VALUE_MAX = 2000
"""Characters of one value; the rest is cut off."""
TRACEBACK_MAX = 6000
"""Characters of a traceback, its end: what failed stands there."""
LINE_MAX = 40_000
"""journald splits what is longer than 48 KiB into several entries (journald.conf(5), LineMax)."""

_SPEC = re.compile(r"%(?:%|[#0\- +]*\d*(?:\.\d+)?([a-zA-Z]))")
_MARK = re.compile("\x00(\\d+)\x00")
_EVENT = re.compile("[a-z](?:[a-z0-9_]|\x00\\d+\x00)*:?")
_FIELD = re.compile(r"""([a-z][\w.]*)=('[^']*'|"[^"]*"|\S+)""")
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_PREFIX = re.compile(r"<([0-7])>(?=.)")
LEVELS = dict(enumerate(("critical", "critical", "critical", "error", "warning", "info", "info", "debug")))
"""Level of a line of each priority that journald knows (sd-daemon(3))."""
PROBLEM = 4
"""Priority of a warning; what is worse has a smaller one."""

Fields = dict[str, Any]


class LogEntry(NamedTuple):
    """One line of a log. `at`: Unix time, None where the line does not say it. `text`: what is in no field."""

    at: float | None
    level: str
    event: str
    fields: Fields
    text: str


class JsonLines(logging.Formatter):
    """`{"ts", "level", "logger", "event", "fields", "text"?, "exception"?}` in one line of ASCII.

    `prefixed`: with `<N>` before it, from which journald takes the entry's priority (sd-daemon(3)).
    """

    def __init__(self, *, prefixed: bool = False) -> None:
        super().__init__()
        self._prefixed = prefixed

    def format(self, record: logging.LogRecord) -> str:
        event, fields, text = _taken_apart(record)
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: Fields = {"ts": moment, "level": record.levelname.lower(), "logger": record.name, "event": event}
        told["fields"] = {name: _bounded(value) for name, value in fields.items()}
        if text:
            told["text"] = _bounded(text)
        if record.exc_info and record.exc_info[0] is not None:
            told["exception"] = self.formatException(record.exc_info)[-TRACEBACK_MAX:]
        line = json.dumps(told)
        if len(line) > LINE_MAX:
            line = json.dumps({**told, "fields": {}, "text": line[:VALUE_MAX], "exception": "", "cut": True})
        return f"<{_priority(record.levelno)}>{line}" if self._prefixed else line


class PrefixedLines(logging.Formatter):
    """The words of a message with `<N>`, its priority, before each of its lines: of a part of `hive up`, which shows
    people what is wrong and keeps the rest."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


def without_priority(line: str) -> tuple[int, str]:
    """The priority of a line, that of a problem where it does not say one, as with a traceback; and the rest of it.

    >>> without_priority("<6>agent_paused agent=ann"), without_priority("Traceback")
    ((6, 'agent_paused agent=ann'), (4, 'Traceback'))
    """
    found = _PREFIX.match(line)
    return (PROBLEM, line) if found is None else (int(found[1]), line[found.end() :])


def goes_to_journal(fd: int, env: Mapping[str, str]) -> bool:
    """Whether what is written to `fd` is read by journald: JOURNAL_STREAM names that very stream (systemd.exec(5)).

    The variable is inherited by programs whose output goes elsewhere, so its presence alone says nothing.
    """
    device, _, inode = env.get("JOURNAL_STREAM", "").partition(":")
    if not (device.isdigit() and inode.isdigit()):
        return False
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (int(device), int(inode))


def parse(line: str) -> LogEntry:
    """Parses a line of a service of any origin: one that is not of Hive's form is an entry with nothing but its text.

    >>> parse('{"ts": "2026-11-20T10:00:00.000+00:00", "level": "info", "event": "left", "fields": {"n": 1}}')
    LogEntry(at=1795168800.0, level='info', event='left', fields={'n': 1}, text='')
    >>> parse("Ready to accept connections").text, parse("<4>ports_taken").level
    ('Ready to accept connections', 'warning')
    """
    priority, bare = without_priority(line)
    said = "" if bare is line else LEVELS[priority]
    try:
        found = json.loads(bare) if bare.startswith("{") else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return LogEntry(None, said, "", {}, bare)
    fields = found.get("fields")
    exception = str(found.get("exception") or "")
    text = "\n".join(part for part in (str(found.get("text") or ""), exception) if part)
    level, fields = str(found.get("level", said)), fields if isinstance(fields, dict) else {}
    return LogEntry(_unix(found.get("ts")), level, found["event"], fields, text)


def in_words(entry: LogEntry) -> str:
    """The entry as `event key=value …: text`, as it was before it became JSON; not yet harmless.

    >>> in_words(LogEntry(None, "info", "agent_paused", {"agent": "ann", "why": "idle for 9 s"}, ""))
    "agent_paused agent=ann why='idle for 9 s'"
    """
    fields = [f"{name}={_shown(value)}" for name, value in entry.fields.items()]
    said = " ".join([entry.event, *fields] if entry.event else fields)
    if not said or entry.event == MESSAGE:
        return " ".join(part for part in (entry.text, *fields) if part)
    return f"{said}: {entry.text}" if entry.text else said


MESSAGE = "message"
"""The event of what has none: lines of libraries."""


def _taken_apart(record: logging.LogRecord) -> tuple[str, Fields, str]:
    r"""Event, fields and the remaining words.

    >>> line = logging.LogRecord("hive.x", 20, "", 0, "ports_taken wanted='%s' n=%d: move", ("1 got=2", 3), None)
    >>> _taken_apart(line)
    ('ports_taken', {'wanted': '1 got=2', 'n': 3}, 'move')
    """
    # A single mapping is unwrapped by LogRecord, for templates with `%(name)s`.
    arguments = (record.args,) if isinstance(record.args, Mapping) else record.args or ()
    if not record.name.startswith("hive") or not isinstance(record.msg, str):
        return MESSAGE, {}, _message(record)
    specs: list[str] = []

    def marked(found: re.Match[str]) -> str:
        if found[1] is None:
            return "%"
        specs.append(found[0])
        return f"\x00{len(specs) - 1}\x00"

    template = _SPEC.sub(marked, record.msg.replace("\x00", ""))
    first, _, rest = template.partition(" ")
    if len(specs) != len(arguments) or not _EVENT.fullmatch(first):
        return MESSAGE, {}, _message(record)

    def filled(text: str) -> str:
        return _MARK.sub(lambda found: _formatted(specs, arguments, int(found[1])), text)

    fields: Fields = {}

    def taken(found: re.Match[str]) -> str:
        value, end = found[2], ""
        if value[0] in "'\"":
            value = value[1:-1]
        elif value[-1] in ":;,":
            value, end = value[:-1], value[-1]
        single = _MARK.fullmatch(value)
        fields[found[1]] = _native(specs, arguments, int(single[1])) if single else filled(value)
        return end

    text = filled(" ".join(_FIELD.sub(taken, rest).split())).lstrip(":;, ")
    return filled(first.rstrip(":")), fields, text


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # of somebody else's arguments that do not fit
        return f"{record.msg} {record.args}"


def _formatted(specs: Sequence[str], arguments: Sequence[object], number: int) -> str:
    try:
        return specs[number] % (arguments[number],)
    except (TypeError, ValueError):
        return str(arguments[number])


def _native(specs: Sequence[str], arguments: Sequence[object], number: int) -> object:
    """The argument as JSON has it, as exact as the call wanted it."""
    value, spec = arguments[number], specs[number]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        formatted = _formatted(specs, arguments, number)
        try:
            return int(formatted) if spec[-1] in "di" else float(formatted) if spec[-1] in "fg" else value
        except ValueError:
            return formatted
    if spec[-1] == "r" and isinstance(value, str):
        return value  # JSON has quotes of its own
    return _formatted(specs, arguments, number)


def _bounded(value: object) -> object:
    if isinstance(value, str) and len(value) > VALUE_MAX:
        return f"{value[:VALUE_MAX]} … {len(value) - VALUE_MAX} more"
    return value


def _priority(level: int) -> int:
    return next((priority for least, priority in _PRIORITIES if level >= least), 7)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value) if not value or re.search(r"\s", value) else value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unix(moment: object) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp() if isinstance(moment, str) else None
    except ValueError:
        return None
