"""The chain of the audit table: each row carries the hash of the row before it, and one over itself. Pure.

SHA-256 without a key: only the daemon's user and root can write the table, and both can read every key the daemon
could use; and a copy of the table can be checked anywhere, without a secret. What keeps such a user from writing the
whole chain anew are the heads that were noted elsewhere (anchors.py): up to the last of them nothing can be changed
unseen, for as long as that other place is out of his reach. Behind it he can; `ChainVerdict.unanchored` says how far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

GENESIS = "0" * 64
"""The hash that the first row of all follows."""
TAKEN_IN, PRUNED, BEGUN_ANEW = "audit.taken_in", "audit.pruned", "audit.begun_anew"
"""Acts with a detail `{"to": id, "hash": hash}` about the row before the first. `rows`: how many they were about."""


class Head(NamedTuple):
    """A row and its hash, by which all before it are fixed. `hash`: 64 hex digits."""

    id: int
    hash: str


START = Head(0, GENESIS)


class ChainLink(NamedTuple):
    """A row as it is stored; `prev` and `hash` None where it has not been taken into the chain."""

    id: int
    at: float
    actor: str
    act: str
    target: str
    origin: str
    outcome: str
    detail: str
    prev: str | None
    hash: str | None


class Bad(NamedTuple):
    """The first row that is not as it was written, or not there. `id` counts from 1."""

    id: int
    why: str


class ChainVerdict(NamedTuple):
    """`head`: the last row that was found right. `anchored`: up to which row an anchor vouches, 0 where none does.

    `taken_in`: rows that an older Hive wrote without a chain; what was done to them before is not known. `begun_anew`:
    rows that say that those before them are gone with a damaged database.
    """

    rows: int
    head: Head
    bad: Bad | None
    anchored: int
    taken_in: int = 0
    begun_anew: int = 0

    @property
    def unanchored(self) -> int:
        """Rows at the end which, or others behind which, could have been removed or replaced unseen."""
        return max(0, self.head.id - self.anchored)


def hash_of(link: ChainLink, prev: str) -> str:
    """SHA-256 over JSON of the row and `prev`, its time as hex digits: no other row has the same bytes.

    >>> hash_of(ChainLink(1, 1.5, "uid:0", "agent.created", "a1", "socket", "ok", "{}", None, None), GENESIS)[:16]
    '27ad3ac6fb97c64b'
    """
    return hashlib.sha256(msgspec.json.encode((prev, link.id, float(link.at).hex(), *link[2:8]))).hexdigest()


class _Told(msgspec.Struct, frozen=True):
    to: int
    hash: str
    rows: int


def _told(detail: str) -> _Told:
    """Reads the detail; a writer of the whole chain anew may have written anything there."""
    try:
        return msgspec.json.decode(detail, type=_Told)
    except msgspec.MsgspecError:
        return _Told(-1, "", 0)


def verify(
    links: Iterable[ChainLink],
    heads: Iterable[Head] = (),
    *,
    begun_after: Head = START,
    begins_as_noted: bool = True,
    numbered_to: int = 0,
    beginnings: frozenset[Head] | None = None,
) -> ChainVerdict:
    """Looks at every row, in the order of their ids, until one is wrong.

    `heads`: anchors; `beginnings`: those of them behind which a chain may begin, None where there are no anchors.
    `begun_after`: what is said to have been before the first row; `begins_as_noted`: whether an anchor says so too, or
    there are none. `numbered_to`: the last id the table has given out.
    """
    anchors = _by_id(heads)
    last, rows, anchored, taken_in, begun_anew, is_told = begun_after, 0, 0, 0, 0, begun_after == START
    for link in links:
        last = _after_loss(link, last, beginnings)
        if bad := _wrong(link, last) or _unlike(link.id, str(link.hash), anchors, after=anchored):
            return ChainVerdict(rows, last, bad, anchored, taken_in, begun_anew)
        last, rows = Head(link.id, str(link.hash)), rows + 1
        anchored = link.id if link.id in anchors else anchored
        begun_anew += link.act == BEGUN_ANEW
        if link.act in (TAKEN_IN, PRUNED, BEGUN_ANEW):
            told = _told(link.detail)
            is_told = is_told or (told.to, told.hash) == begun_after
            taken_in += told.rows if link.act == TAKEN_IN else 0
    bad = _unlike(begun_after.id, begun_after.hash, anchors) if begun_after.id else None
    if bad is None and not (is_told and begins_as_noted):
        who = "row of the chain" if not is_told else "anchor"
        bad = Bad(begun_after.id + 1, f"it is said to be the first that was not pruned, and no {who} says so")
    if bad is None and (there_was := max(numbered_to, *anchors, 0)) > last.id:
        bad = Bad(last.id + 1, f"it is gone, and so is all behind it: there was a row {there_was}")
    return ChainVerdict(rows, last, bad, anchored, taken_in, begun_anew)


def _after_loss(link: ChainLink, last: Head, beginnings: frozenset[Head] | None) -> Head:
    """The row that `link` follows, where it says that rows before it were lost and an anchor permits that."""
    if link.act != BEGUN_ANEW or link.id == last.id + 1:
        return last
    told = _told(link.detail)
    follows = Head(told.to, told.hash)
    return follows if follows.id > last.id and (beginnings is None or follows in beginnings) else last


def _by_id(heads: Iterable[Head]) -> dict[int, set[str]]:
    """Two for one id cannot both be right: then the row is not like one of them."""
    found: dict[int, set[str]] = {}
    for head in heads:
        found.setdefault(head.id, set()).add(head.hash)
    return found


def _wrong(link: ChainLink, last: Head) -> Bad | None:
    if link.id != last.id + 1:
        return Bad(last.id + 1, f"it is gone: row {link.id} comes next")
    if link.prev is None or link.hash is None:
        return Bad(link.id, "it is not in the chain: an older Hive wrote it, or somebody else did")
    if link.prev != last.hash:
        return Bad(link.id, f"it does not follow row {last.id}")
    if link.hash != hash_of(link, link.prev):
        return Bad(link.id, "it was changed")
    return None


def _unlike(row: int, found: str, anchors: dict[int, set[str]], *, after: int | None = None) -> Bad | None:
    """`after`: the anchor before it. A row changed between them, and those behind it hashed anew, show here."""
    if anchors.get(row, {found}) == {found}:
        return None
    since = "" if after is None or after + 1 >= row else f": it, or one from {after + 1} on, was replaced"
    return Bad(row, f"it is not the row whose hash was noted{since}")
