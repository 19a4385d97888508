"""The scribe keeps notes and summarises what it is told."""

from __future__ import annotations

import hashlib

WORDS = [
    "bee",
    "comb",
    "wax",
    "nectar",
    "queen",
    "drone",
    "swarm",
    "smoke",
    "clover",
    "heather",
    "winter",
    "summer",
    "scout",
    "dance",
    "guard",
    "honey",
]
NOTES = 119_000


class Scribe:
    """About 60 MiB: a notebook of `NOTES` notes, each a dict made from its number alone, so any can be checked."""

    name = "scribe"

    def __init__(self) -> None:
        self._notes = [note(number) for number in range(NOTES)]
        self._heard: list[str] = []

    def size(self) -> int:
        return len(self._notes)

    def prompt(self, say: str) -> str:
        recent = " / ".join(self._heard[-3:])
        return f"Summarise in one sentence. Before: {recent or 'nothing'}. Now: {say}"

    def learn(self, say: str) -> None:
        self._heard = [*self._heard[-9:], say[:200]]

    def spot_check(self, turn: int) -> bool:
        """Whether 64 notes, other ones each turn, are still what they were when they were written."""
        places = [(turn * 7919 + step * 104_729) % NOTES for step in range(64)]
        return all(self._notes[place] == note(place) for place in places)


def note(number: int) -> dict[str, object]:
    """The note with this number, the same each time."""
    digest = hashlib.sha256(b"note %d" % number).digest()
    text = " ".join(WORDS[byte % len(WORDS)] for byte in digest[:20])
    return {"number": number, "text": text, "weight": digest[20] / 255, "mark": digest.hex()[48:]}
