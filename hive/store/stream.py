"""The entries of `hive:usage`: what the proxy adds and the daemon reads. Pure.

An entry carries its epoch and numbers beside its events, so that the number of an unreadable event is known to be lost
instead of being waited for: `{e: epoch, n: first, to: last, d: one event as JSON a line}`, without `to` for one
event alone, and `{e: epoch, n: first, to: last}` for numbers that have no event (any more). Many events share an
entry because redis-py spends 11 µs of CPU on each XADD (profiled; a sixth of a proxied request).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hive.domain import UsageEvent

MOST_TOKENS = 2**40
"""No request has more; a backend that says so is not believed."""
MOST_EVENTS = 2**53

_decode = msgspec.json.Decoder(UsageEvent).decode


class ToldRange(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers `first` to `last` of `epoch` are told of: as one event, or (None) as lost, because of `why`."""

    epoch: str
    first: int
    last: int
    event: UsageEvent | None = None
    why: str = ""


Entry = dict[str, str | int | bytes]


def event_entry(epoch: str, event_no: int, line: bytes) -> Entry:
    return {"e": epoch, "n": event_no, "d": line}


def events_entry(epoch: str, first: int, lines: Sequence[bytes]) -> Entry:
    """One entry for the events `first`, `first` + 1, …; the lines have no line end of their own."""
    if len(lines) == 1:
        return event_entry(epoch, first, lines[0])
    return {"e": epoch, "n": first, "to": first + len(lines) - 1, "d": b"\n".join(lines)}


def lost_entry(epoch: str, first: int, last: int) -> Entry:
    return {"e": epoch, "n": first, "to": last}


def read_all(fields: Mapping[bytes, bytes]) -> list[ToldRange]:
    """The content of an entry, an item an event; nothing where it is none of Hive's.

    >>> [told.first for told in read_all({b"e": b"p1", b"n": b"4", b"to": b"5", b"d": b"{}\\n{}"})]
    [4, 5]
    """
    whole = read_entry({name: value for name, value in fields.items() if name != b"d"})
    if whole is None:
        return []
    if b"d" not in fields:
        return [whole]
    lines = fields[b"d"].split(b"\n")
    if len(lines) != whole.last - whole.first + 1:
        return [msgspec.structs.replace(whole, why="the entry does not hold the events it announces")]
    alone = [
        read_entry({b"e": fields[b"e"], b"n": b"%d" % (whole.first + at), b"d": line}) for at, line in enumerate(lines)
    ]
    return [told for told in alone if told is not None]


def read_entry(fields: Mapping[bytes, bytes]) -> ToldRange | None:
    """The content of an entry of one event, or of none; None where it is none of Hive's.

    >>> read_entry({b"e": b"p1", b"n": b"4", b"to": b"6"})
    ToldRange(epoch='p1', first=4, last=6, event=None, why='dropped by the proxy')
    >>> read_entry({b"e": b"p1", b"n": b"4", b"d": b"{"}).why
    'Input data was truncated'
    >>> read_entry({b"something": b"else"}) is None
    True
    """
    try:
        epoch, first = fields[b"e"].decode(), int(fields[b"n"])
        last = int(fields.get(b"to", first))
    except (KeyError, ValueError):
        return None
    if not 1 <= first <= last <= MOST_EVENTS:
        return None
    if b"d" not in fields:
        return ToldRange(epoch=epoch, first=first, last=last, why="dropped by the proxy")
    try:
        event = _believable(_decode(fields[b"d"]))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return ToldRange(epoch=epoch, first=first, last=first, why=str(error))
    if (event.epoch, event.event_no) != (epoch, first):
        return ToldRange(epoch=epoch, first=first, last=first, why="the event is not the one it is announced as")
    return ToldRange(epoch=epoch, first=first, last=first, event=event)


def _believable(event: UsageEvent) -> UsageEvent:
    """The event with impossible counts made unknown: SQLite holds 64 bits, and sums must fit too."""
    counts = {name: getattr(event, name) for name in ("tokens_in", "tokens_out", "cached_tokens")}
    wrong = {name: None for name, count in counts.items() if count is not None and not 0 <= count <= MOST_TOKENS}
    return msgspec.structs.replace(event, **wrong) if wrong else event
