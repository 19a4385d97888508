"""Usage events as they travel: lines over the link, and entries of the stream `hive:usage`. Pure.

Lines carry their epoch and numbers beside them, so that the number of an unreadable event is known to be lost instead
of being waited for. An entry is `{e: epoch, n: first, to: last, d: one event as JSON a line}`, without `to` for one
event alone, and `{e: epoch, n: first, to: last}` for numbers that have no event (any more). Many events share an
entry: each one costs Redis and its client some µs of CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from hive.domain import UsageEvent

MOST_TOKENS = 2**40
"""No request has more; a backend that says so is not believed."""
MOST_AMOUNT, MOST_WORK = 1e9, 2.0**50
"""The same of seconds of audio and images, and of the pixels of all their steps."""
MOST_EVENTS = 2**53
ENTRY_EVENTS = 100
"""Events that share one entry of the stream, about 30 KB."""

_decode = msgspec.json.Decoder(UsageEvent).decode


class ToldRange(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers `first` to `last` of `epoch` are told of: as one event, or (None) as lost, because of `why`."""

    epoch: str
    first: int
    last: int
    event: UsageEvent | None = None
    why: str = ""


StreamFields = dict[str, str | int | bytes]
Lines = tuple[int, int, bytes | None]
"""First and last number, and a line each with line ends between; None where their events are lost."""


def entries_of(epoch: str, items: Iterable[Lines]) -> list[StreamFields]:
    """The entries for these lines: those of consecutive numbers share one, lost numbers have one of their own.

    >>> [(entry["n"], entry.get("to")) for entry in entries_of("p1", [(1, 1, b"{}"), (2, 3, b"{}\\n{}"), (4, 9, None)])]
    [(1, 3), (4, 9)]
    """
    entries: list[StreamFields] = []
    lines: list[bytes] = []
    begin = end = 0
    for first, last, found in (*items, (0, 0, None)):
        if lines and (found is None or first != end + 1 or last - begin >= ENTRY_EVENTS):
            entries.append(_entry(epoch, begin, end, b"\n".join(lines)))
            lines = []
        if found is not None:
            begin, end = begin if lines else first, last
            lines.append(found)
        elif last:
            entries.append(_entry(epoch, first, last, None))
    return entries


def _entry(epoch: str, first: int, last: int, lines: bytes | None) -> StreamFields:
    entry: StreamFields = {"e": epoch, "n": first}
    if last != first or lines is None:
        entry["to"] = last
    if lines is not None:
        entry["d"] = lines
    return entry


def read_entry(fields: Mapping[bytes, bytes]) -> list[ToldRange]:
    """The content of an entry, an item an event; nothing where it is none of Hive's.

    >>> [told.first for told in read_entry({b"e": b"p1", b"n": b"4", b"to": b"5", b"d": b"{}\\n{}"})]
    [4, 5]
    >>> read_entry({b"something": b"else"})
    []
    """
    try:
        epoch, first = fields[b"e"].decode(), int(fields[b"n"])
        last = int(fields.get(b"to", first))
    except (KeyError, ValueError):
        return []
    return read_lines(epoch, first, last, fields.get(b"d"))


def read_lines(epoch: str, first: int, last: int, lines: bytes | None) -> list[ToldRange]:
    """The events of these lines, an item each, or one that tells all of them as lost; nothing for impossible numbers.

    >>> read_lines("p1", 4, 6, None)
    [ToldRange(epoch='p1', first=4, last=6, event=None, why='dropped by the proxy')]
    >>> read_lines("p1", 4, 4, b"{")[0].why
    'Input data was truncated'
    """
    if not 1 <= first <= last <= MOST_EVENTS:
        return []
    if lines is None:
        return [ToldRange(epoch=epoch, first=first, last=last, why="dropped by the proxy")]
    found = lines.split(b"\n")
    if len(found) != last - first + 1:
        return [ToldRange(epoch=epoch, first=first, last=last, why="there are not the events that were announced")]
    return [_read_event(epoch, no, line) for no, line in enumerate(found, first)]


def _read_event(epoch: str, no: int, line: bytes) -> ToldRange:
    try:
        event = _believable(_decode(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return ToldRange(epoch=epoch, first=no, last=no, why=str(error))
    if (event.epoch, event.event_no) != (epoch, no):
        return ToldRange(epoch=epoch, first=no, last=no, why="the event is not the one it is announced as")
    return ToldRange(epoch=epoch, first=no, last=no, event=event)


def _believable(event: UsageEvent) -> UsageEvent:
    """The event with impossible counts made unknown: SQLite holds 64 bits, and sums must fit too."""
    counts = {name: getattr(event, name) for name in ("tokens_in", "tokens_out", "cached_tokens")}
    wrong = {name: None for name, count in counts.items() if count is not None and not 0 <= count <= MOST_TOKENS}
    for name, most in (("amount", MOST_AMOUNT), ("work", MOST_WORK)):
        found = getattr(event, name)
        if found is not None and not 0 <= found <= most:
            wrong[name] = None
    return msgspec.structs.replace(event, **wrong) if wrong else event
