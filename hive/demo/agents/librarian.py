"""The librarian holds a big index and answers with what it finds there."""

from __future__ import annotations

import hashlib

SHELVES = [
    "history",
    "rivers",
    "bridges",
    "clocks",
    "maps",
    "bees",
    "glass",
    "ships",
    "winds",
    "roots",
    "stars",
    "salt",
    "iron",
    "paper",
    "bread",
    "songs",
]
BOOKS = 340_000


class Librarian:
    """About 140 MiB: `BOOKS` index cards by signature, and per shelf the signatures that stand on it."""

    name = "librarian"

    def __init__(self) -> None:
        self._cards: dict[str, dict[str, object]] = {}
        self._shelves: dict[str, list[str]] = {shelf: [] for shelf in SHELVES}
        for number in range(BOOKS):
            made = card(number)
            signature = str(made["signature"])
            self._cards[signature] = made
            self._shelves[str(made["shelf"])].append(signature)
        self._lent: list[str] = []

    def size(self) -> int:
        return len(self._cards)

    def prompt(self, say: str) -> str:
        shelf = next((shelf for shelf in SHELVES if shelf in say.lower()), SHELVES[len(say) % len(SHELVES)])
        standing = self._shelves[shelf]
        found = [self._cards[standing[(len(say) * 31 + step) % len(standing)]]["title"] for step in range(3)]
        return f"A reader asks: {say}. We have: {'; '.join(map(str, found))}. Which one fits, and why?"

    def learn(self, say: str) -> None:
        self._lent = [*self._lent[-99:], say[:80]]

    def spot_check(self, turn: int) -> bool:
        """Whether 64 cards, other ones each turn, are unchanged and every book still stands somewhere."""
        if sum(map(len, self._shelves.values())) != BOOKS:
            return False
        expected = [card((turn * 6007 + step * 15_485_863) % BOOKS) for step in range(64)]
        return all(self._cards.get(str(wanted["signature"])) == wanted for wanted in expected)


def card(number: int) -> dict[str, object]:
    """The index card with this number, the same each time."""
    digest = hashlib.sha256(b"book %d" % number).digest()
    shelf = SHELVES[digest[0] % len(SHELVES)]
    title = f"On {shelf} and {SHELVES[digest[1] % len(SHELVES)]}, volume {digest[2]}"
    return {"signature": f"{shelf[:2]}-{number:07d}", "shelf": shelf, "title": title, "pages": digest[3] * 4 + 16}
