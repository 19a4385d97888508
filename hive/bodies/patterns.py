"""The number of ways in which a regular expression can read a short text, and the size of its grammar. Pure.

A grammar engine follows all readings of a text at once, and for each token of the vocabulary again: `([a-z]*)*` has
more of them with every letter, so that one step of llama-server took minutes. The expression is read as Glushkov's
automaton is made: each letter or class is a place, with the places that may follow it. Nothing is matched.
"""

from __future__ import annotations

from collections.abc import Iterable

LETTERS = 8
"""A text of so many letters is read; a token of a vocabulary is seldom longer."""
LONGEST = 1024
"""Characters of an expression. The longest known of clients is one for IPv6 addresses, with 800."""
_DEEPEST = 32
"""Groups within groups."""
_MOST_COPIES = 2000
"""Repetitions beyond this are none to llama-server: any number is taken."""
_COPIED = 16
"""Repetitions up to this are counted exactly, more as any number of them."""
_REPEATED = 32
"""A repetition that becomes `n` rules costs `n * n / _REPEATED` more: xgrammar 0.2.8 reads `[a-z]{1,1000}` in 39 ms and
`[a-z]{1,500}` in 10 ms, within vLLM's loop."""
_FOLLOWERS = 24
"""Places that may follow one, at the average: an expression with more is refused before they are counted."""
_ALL = (1 << 129) - 1
_OTHERS = 1 << 128
"""All letters beyond ASCII count as one."""


class PatternError(ValueError):
    """Says why an expression is not taken."""


def _set(letters: Iterable[int]) -> int:
    bits = 0
    for letter in letters:
        bits |= 1 << min(letter, 128)
    return bits


def _span(first: int, last: int) -> int:
    first, last = min(first, 128), min(last, 128)
    return ((1 << (last - first + 1)) - 1) << first if first <= last else 0


_DIGITS = _span(48, 57)
_WORD = _DIGITS | _span(65, 90) | _span(97, 122) | _set([95])
_SPACE = _set(b" \t\n\r\f\v") | _OTHERS
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE, "D": _ALL ^ _DIGITS, "W": _ALL ^ _WORD, "S": _ALL}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_HEX = {"x": 2, "u": 4, "U": 8}
_DOT = _ALL ^ _set(b"\n\r")

Part = tuple[list[int], list[int], bool, bool]
"""A part: the places it may begin at, those it may end at, True if it may be empty, True if it is one place."""
_NOTHING: Part = ([], [], True, False)


class Pattern:
    """One expression, read. Raises PatternError for one that is not understood or repeats what may be empty.

    `ways`: readings of the worst text of LETTERS letters, more than which there are none. `size`: rules it becomes.
    `repeated`: what its long repetitions cost beside them, in rules; `most_times`: the largest number in one of them.

    >>> Pattern("^[a-z]{1,64}$").ways, Pattern("^[a-z]*[a-z]*$").ways
    (1, 9)
    >>> Pattern("^(c{2,300}|d{5,})$").most_times
    300
    >>> Pattern("^((a|b|[a-z]*)*c?){0,40}$")
    Traceback (most recent call last):
    hive.bodies.patterns.PatternError: it repeats what may be empty
    """

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise PatternError(f"it is longer than {LONGEST} characters")
        self._text = text
        self._at = 0
        self._deep = 0
        self._sets: list[int] = []
        self._follow: list[list[int]] = []
        self._edges = 0
        self.size = 1
        self.repeated = self.most_times = 0
        first, _, _, _ = self._choice()
        if self._at < len(text):
            raise PatternError("its parentheses do not match")
        self.ways = self._count(first)

    def __repr__(self) -> str:
        return f"<Pattern {len(self._sets)} places, {self.ways} ways, size {self.size}>"

    # reading ----------------------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> Part:
        first, last, empty = [], [], False
        while True:
            part = self._sequence()
            first += part[0]
            last += part[1]
            empty = empty or part[2]
            if self._peek() != "|":
                return first, last, empty, False
            self._at += 1

    def _sequence(self) -> Part:
        first: list[int] = []
        last: list[int] = []
        empty = True
        while self._peek() not in ("", "|", ")"):
            part = self._repeated()
            self._link(last, part[0])
            if empty:
                first += part[0]
            last = last + part[1] if part[2] else part[1]
            empty = empty and part[2]
        return first, last, empty, False

    def _link(self, before: list[int], behind: list[int]) -> None:
        self._edges += len(before) * len(behind)
        if self._edges > _FOLLOWERS * (len(self._sets) + 16):
            raise PatternError("too much may follow too much in it")
        for place in before:
            self._follow[place] += behind

    def _repeated(self) -> Part:
        begun = self.size
        part = self._one()
        while (times := self._times()) is not None:
            low, high = times
            self.most_times = max(self.most_times, low, high or 0)
            if part[3] and high is not None and 1 < high <= _COPIED:
                part = self._copies(part[0][0], low, high)
                continue
            first, last, empty, is_place = part
            if high is None or high > 1:
                if empty and first:
                    raise PatternError("it repeats what may be empty")
                self._link(last, first) if not is_place or first[0] not in self._follow[first[0]] else None
            copies = max(low, 1 if high is None else min(high, _MOST_COPIES), 1)
            self.size = begun + (self.size - begun) * copies
            if copies > 1:
                self.repeated += (self.size - begun) ** 2 // _REPEATED
            part = first, last, empty or low == 0, False
        return part

    def _copies(self, place: int, low: int, high: int) -> Part:
        """One place so many times, each copy a place of its own: two of them are no two readings."""
        chain = [place]
        for _ in range(high - 1):
            (another,), _, _, _ = self._place(self._sets[place])
            self._link(chain[-1:], [another])
            chain.append(another)
        return chain[:1], chain[max(low - 1, 0) :], low == 0, False

    def _times(self) -> tuple[int, int | None] | None:
        letter = self._peek()
        if letter in ("*", "+", "?") and letter:
            self._at += 1
            found: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[letter]
        elif letter == "{" and (end := self._text.find("}", self._at)) > 0:
            low, comma, high = self._text[self._at + 1 : end].partition(",")
            if not _is_number(low) and not (comma and low == "" and _is_number(high)):
                return None  # a brace that is itself meant
            if comma and high and not _is_number(high):
                return None
            self._at = end + 1
            least = int(low or 0)
            found = (least, least if not comma else int(high) if high else None)
        else:
            return None
        if self._peek() in ("?", "+"):  # lazy or possessive: as many readings
            self._at += 1
        return found

    def _one(self) -> Part:
        letter = self._next()
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._place(self._class())
        if letter in "^$":
            return _NOTHING
        if letter == ".":
            return self._place(_DOT)
        if letter in "*+?":
            raise PatternError("nothing stands before a repetition")
        if letter == "\\":
            bits = self._escape()
            return _NOTHING if bits is None else self._place(bits)
        return self._place(_set([ord(letter)]))

    def _place(self, letters: int) -> Part:
        place = len(self._sets)
        self._sets.append(letters)
        self._follow.append([])
        self.size += 1
        return [place], [place], False, True

    def _group(self) -> Part:
        self._deep += 1
        if self._deep > _DEEPEST:
            raise PatternError(f"its groups are nested deeper than {_DEEPEST}")
        looks = False
        if self._peek() == "?":
            self._at += 1
            kind = self._next()
            if kind == "P":
                kind = self._next()
            if kind == "<" and self._peek() not in ("=", "!"):
                while self._next() != ">":
                    pass
            elif kind in "=!" or kind == "<":
                looks = True
                self._at += kind == "<"
            elif kind != ":":
                raise PatternError("one of its groups is of no known kind")
        part = self._choice()
        if self._next() != ")":
            raise PatternError("its parentheses do not match")
        self._deep -= 1
        return _NOTHING if looks else (part[0], part[1], part[2], False)

    def _escape(self) -> int | None:
        """The letters an escape stands for, None for a place between letters."""
        letter = self._next()
        if letter in "bB":
            return None
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _CONTROLS:
            return _set([_CONTROLS[letter]])
        if letter in "pP" and self._peek() == "{":
            while self._next() != "}":
                pass
            return _ALL
        if letter in _HEX:
            digits = self._text[self._at : self._at + _HEX[letter]]
            if len(digits) < _HEX[letter] or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise PatternError("it has an escape that is not understood")
            self._at += len(digits)
            return _set([int(digits, 16)])
        if letter in "123456789kg":
            raise PatternError("it refers back to a group")
        return _set([ord(letter)])

    def _class(self) -> int:
        bits, excludes, is_first = 0, self._peek() == "^", True
        self._at += excludes
        while (letter := self._next()) != "]" or is_first:
            is_first = False
            if letter == "]":  # some read an empty class here, others the bracket: both are taken to be there
                if not self._text.find("]", self._at) > 0:
                    break
                bits |= _set([93])
                continue
            low = self._letters(letter)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._letters(self._next())
                low = _span((low & -low).bit_length() - 1, high.bit_length() - 1) | low | high
            bits |= low
        return _ALL ^ bits if excludes else bits

    def _letters(self, letter: str) -> int:
        if letter != "\\":
            return _set([ord(letter)])
        if self._peek() == "b":
            self._at += 1
            return _set([8])
        return self._escape() or 0

    # counting ---------------------------------------------------------------------------------------------------------

    def _count(self, first: list[int]) -> int:
        """Readings of the worst text: from the end of the text backwards, how many begin at each place."""
        kinds = {letters: number for number, letters in enumerate(dict.fromkeys(self._sets))}
        kind_of = [kinds[letters] for letters in self._sets]
        shared = {a: [b for other, b in kinds.items() if other & letters] for letters, a in kinds.items()}
        ways = [1] * len(self._sets)
        forks = [(place, behind) for place, behind in enumerate(self._follow) if behind]
        for _ in range(LETTERS - 1):
            before = ways
            ways = before.copy()
            for place, behind in forks:
                ways[place] = before[behind[0]] if len(behind) == 1 else _worst(behind, before, kind_of, shared)
        return _worst(first, ways, kind_of, shared)


def _worst(places: list[int], ways: list[int], kind_of: list[int], shared: dict[int, list[int]]) -> int:
    """Ways from here by the one letter that leads to the most of them; never too few."""
    sums: dict[int, int] = {}
    for place in places:
        sums[kind_of[place]] = sums.get(kind_of[place], 0) + ways[place]
    if len(sums) <= 1:
        return max(sums.values(), default=1)
    worst = 1
    for kind in sums:
        others = shared[kind] if len(shared[kind]) < len(sums) else sums
        both = set(shared[kind])
        worst = max(worst, sum(sums.get(other, 0) for other in others if other in both))
    return worst


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
