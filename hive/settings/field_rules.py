"""Rules for one field of a request body: the lines of `[fields TARGET]`, and what they become. Pure.

    [fields /v1/chat/completions]
    temperature = clamp 0..1 low medium; allow high
    options.num_ctx = drop

A line is `RULE [; RULE]…`, a rule `[VERB] [CONDITION…] [TIER…]`; without a tier it is for all of them. The key is the
field, a field of an object inside it with a dot between. `*` as TARGET is every endpoint.

- `allow`, `drop` (left out, and named in X-Hive-Dropped), `refuse` (400), `clamp LOW..HIGH` (a number put into this
  range), `inject JSON` (this value, whatever was asked), `take` (Hive's own rows: read by Hive and passed on).
- `max_bytes N` (longer as JSON text is 413), `max_items N` (a list of more texts is 400), `filled` (400 where absent or
  empty), `local_media` (media only as `data:` URLs), `local_tools` (no tool that the server itself would run),
  `switch` (true, false, or one of the words in SWITCHES), `words A|B` (one of these), `pixels N` (the size of an image,
  `WIDTHxHEIGHT` of at most so many, or `auto`).

Conditions, alone or beside `allow` and `clamp`, add to those that are there, and open nothing that is closed; `allow`
with nothing beside it opens the field altogether. The end of a range may be left out, or be `max_tokens` or
`concurrency`: the tier's own; or `max_steps`: that of [images], as are `max_pixels` and `max_prompt_bytes` behind
`pixels` and `max_bytes`. `clamp ..N` takes a number below 1 for "no limit", as servers do: it becomes N.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from hive.domain import Tier
from hive.errors import did_you_mean

TARGETS = (
    "/api/generate",
    "/api/chat",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/pull",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/tokenize",
    "/detokenize",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
)
"""Endpoints with fields in their bodies."""
EVERYWHERE = "*"
SWITCHES = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "auto", "on", "off")
"""Words a `switch` may be beside true and false: those that models' own templates know."""
MAX_FIELD = 200
"""Characters of a field's name, with the names it stands in."""

Number = int | float
Bound = Number | str | None
"""A number, the tier's own (`max_tokens`, `concurrency`), that of [images] (`max_steps`), or none."""
NAMED_BOUNDS = ("max_tokens", "concurrency", "max_steps")


class Verb(StrEnum):
    """The treatment of a field."""

    ALLOW = "allow"
    TAKE = "take"
    CLAMP = "clamp"
    DROP = "drop"
    REFUSE = "refuse"
    INJECT = "inject"


class RuleLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of a line as it is written. `tiers` empty: all; `verb` None: the conditions alone."""

    tiers: tuple[Tier, ...] = ()
    verb: Verb | None = None
    low: Bound = None
    high: Bound = None
    value: bytes = b""
    max_bytes: int | str | None = None
    max_items: int | str | None = None
    filled: bool = False
    local_media: bool = False
    local_tools: bool = False
    switch: bool = False
    words: tuple[str, ...] = ()
    pixels: int | str | None = None


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule for one field and one tier. `value`: raw JSON put in; `inside`: the rules of its own fields."""

    verb: Verb = Verb.ALLOW
    low: Number | None = None
    high: Number | None = None
    value: bytes = b""
    max_bytes: int | None = None
    filled: bool = False
    local_media: bool = False
    local_tools: bool = False
    switch: bool = False
    words: tuple[str, ...] = ()
    pixels: int | None = None
    max_items: int | None = None
    inside: Fields | None = None


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one object, laid out for reading fast.

    `plain`: names that just go on, `media`: those that do so once their media is seen to be local. `policed`: the
    rules of the others, by folded name; `always`: those of them that say something about an absent field too.
    `unknown`: what becomes of a name in none of them: allow, drop or refuse.
    """

    plain: frozenset[str] = frozenset()
    media: frozenset[str] = frozenset()
    policed: dict[str, Rule] = {}
    always: tuple[str, ...] = ()
    unknown: Verb = Verb.ALLOW


class FieldRules(msgspec.Struct, frozen=True, kw_only=True):
    """All that holds for the bodies of one endpoint and one tier.

    `tokens`: the names that limit how much is generated, the one to be set first; they stand in the object
    `tokens_in`, where that is not empty. `max_tokens`: the tier's limit, None for none. `alias`: an old spelling of
    `model`. `prompt`: the field without which a body asks to load the model or to unload it, where there is one.
    """

    target: str
    fields: Fields
    tokens: tuple[str, ...] = ()
    tokens_in: str = ""
    max_tokens: int | None = None
    alias: str = ""
    prompt: str = ""


_ALLOWED = Rule()


# --- reading a line ---------------------------------------------------------------------------------------------------

_RULE = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*")+')
_TIERS = re.compile(r"(.*?)((?:(?:^|\s+)(?:low|medium|high))*)", re.DOTALL)
_NUMBER = r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?"
_RANGE = re.compile(rf"({_NUMBER})?\.\.({_NUMBER}|{'|'.join(NAMED_BOUNDS)})?")
_CONDITIONS = ("max_bytes", "max_items", "filled", "local_media", "local_tools", "switch", "words", "pixels")


def field_name(key: str) -> str:
    """The name as bodies' names are compared. Raises ValueError.

    >>> field_name("Options.Num_CTX")
    'options.num_ctx'
    """
    name = key.casefold()
    if len(name) > MAX_FIELD or not all(name.split(".")) or re.search(r"\s", name):
        raise ValueError("expected a field, or `field.inner` for one inside an object")
    return name


def parse_line(text: str, *, built_in: bool = False) -> list[RuleLine]:
    """The rules of a line, in order. Raises ValueError that says what was expected.

    >>> [choice.verb.value for choice in parse_line("clamp 0..1 low medium; allow high")]
    ['clamp', 'allow']
    >>> parse_line("clmap 0..1")
    Traceback (most recent call last):
    ValueError: no such rule: clmap; did you mean `clamp`?
    """
    choices = [_choice(part.strip(), built_in) for part in _split(text)]
    seen: set[Tier] = set()
    for choice in choices:
        tiers = choice.tiers or tuple(Tier)
        if seen & set(tiers):
            raise ValueError("two rules for one tier")
        seen |= set(tiers)
    return choices


def _split(text: str) -> list[str]:
    parts = _RULE.findall(text)
    if not text.strip() or len(";".join(parts)) != len(text):
        raise ValueError("expected rules with `;` between them")
    return parts


def _choice(text: str, built_in: bool) -> RuleLine:
    match = _TIERS.fullmatch(text)
    assert match is not None
    words, tiers = match[1].strip(), tuple(Tier(word) for word in match[2].split())
    if not words:
        raise ValueError("expected a rule before the tiers" if tiers else "expected a rule between the `;`")
    if words == "inject" or words.startswith("inject "):
        return RuleLine(tiers=tiers, verb=Verb.INJECT, value=_json(words.removeprefix("inject").strip()))
    given: dict[str, object] = {}
    pending = words.split()
    while pending:
        word = pending.pop(0)
        if word in given or (word in _VERBS and "verb" in given):
            raise ValueError(f"`{word}` where there is a verb already" if word in _VERBS else f"`{word}` twice")
        if word in _VERBS and (built_in or word != Verb.TAKE):
            given["verb"] = Verb(word)
            if word == Verb.CLAMP:
                given["low"], given["high"] = _range(pending.pop(0) if pending else "")
        elif word == "max_bytes":
            given[word] = _size(pending.pop(0) if pending else "")
        elif word == "max_items":
            given[word] = _items(pending.pop(0) if pending else "")
        elif word == "words":
            given[word] = _words(pending.pop(0) if pending else "")
        elif word == "pixels":
            given[word] = _pixels(pending.pop(0) if pending else "")
        elif word in _CONDITIONS:
            given[word] = True
        else:
            raise ValueError(f"no such rule: {word[:60]}{_nearest(word)}")
    if given.get("verb") in (Verb.DROP, Verb.REFUSE) and len(given) > 1:
        raise ValueError(f"nothing may stand beside `{given['verb']}`")
    return msgspec.convert({"tiers": tiers, **given}, RuleLine)


_VERBS = frozenset(Verb)


def _range(text: str) -> tuple[Bound, Bound]:
    match = _RANGE.fullmatch(text)
    if match is None or text == "..":
        raise ValueError(f"expected a range like 0..2, ..4096 or ..max_tokens behind `clamp`, found {text[:60]!r}")
    low, high = _number(match[1]), match[2] if match[2] in NAMED_BOUNDS else _number(match[2])
    if low is not None and isinstance(high, int | float) and low > high:
        raise ValueError(f"{text} begins above its end")
    return low, high


def _number(text: str | None) -> Number | None:
    if text is None:
        return None
    return float(text) if "." in text else int(text)


def _size(text: str) -> int | str:
    if text == "max_prompt_bytes":
        return text
    if not re.fullmatch(r"[1-9][0-9]{0,11}", text):
        raise ValueError(f"expected a number of bytes behind `max_bytes`, found {text[:60]!r}")
    return int(text)


def _items(text: str) -> int | str:
    if text == "concurrency":
        return text
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise ValueError(f"expected a number or `concurrency` behind `max_items`, found {text[:60]!r}")
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}(\|[A-Za-z0-9_.-]{1,64}){0,31}", text):
        raise ValueError(f"expected words like png|webp behind `words`, found {text[:60]!r}")
    return tuple(text.split("|"))


def _pixels(text: str) -> int | str:
    if text == "max_pixels":
        return text
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise ValueError(f"expected a number of pixels behind `pixels`, found {text[:60]!r}")
    return int(text)


def _json(text: str) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(text, type=msgspec.Raw))
    except msgspec.DecodeError:
        raise ValueError(f"expected JSON behind `inject`, found {text[:60]!r}") from None


def _nearest(word: str) -> str:
    known = [*(verb for verb in Verb if verb != Verb.TAKE), *_CONDITIONS]
    return "; " + (did_you_mean(word, known) or f"known are {', '.join(known)}")


# --- what it means for a tier -----------------------------------------------------------------------------------------


def chosen(choices: list[RuleLine], tier: Tier) -> RuleLine | None:
    """The rule of a line that is for `tier`, None where it has none."""
    return next((choice for choice in choices if not choice.tiers or tier in choice.tiers), None)


def settled(choice: RuleLine, below: Rule | None, bounds: Mapping[str, int | None]) -> Rule:
    """The rule for one tier: `bounds` are the numbers by name (None: no limit), `below` the rule that is there already.

    >>> settled(RuleLine(verb=Verb.CLAMP, high="max_tokens"), None, {"max_tokens": 4096}).high
    4096
    >>> settled(RuleLine(max_bytes=10), Rule(verb=Verb.TAKE, filled=True), {}).filled
    True
    """
    if choice.verb is None:
        base = below or _ALLOWED
        if base.verb in (Verb.DROP, Verb.REFUSE, Verb.INJECT):
            return base  # a condition opens nothing: `allow` does
        return _with_conditions(base, choice, base, bounds)
    low, high = _bound(choice.low, bounds), _bound(choice.high, bounds)
    unbounded = choice.verb is Verb.CLAMP and low is None and high is None  # this tier has no limit
    rule = Rule(verb=Verb.ALLOW if unbounded else choice.verb, low=low, high=high, value=choice.value)
    bare = choice == RuleLine(tiers=choice.tiers, verb=Verb.ALLOW)
    kept = _ALLOWED if bare or below is None or rule.verb in (Verb.DROP, Verb.REFUSE, Verb.INJECT) else below
    return _with_conditions(rule, choice, kept, bounds)


def _with_conditions(rule: Rule, choice: RuleLine, below: Rule, bounds: Mapping[str, int | None]) -> Rule:
    """`rule` with the conditions of the line, and those that were there already."""
    items, size, pixels = (
        bounds[bound] if isinstance(bound, str) else bound
        for bound in (choice.max_items, choice.max_bytes, choice.pixels)
    )
    return msgspec.structs.replace(
        rule,
        max_bytes=size or below.max_bytes,
        max_items=items or below.max_items,
        filled=choice.filled or below.filled,
        local_media=choice.local_media or below.local_media,
        local_tools=choice.local_tools or below.local_tools,
        switch=choice.switch or below.switch,
        words=choice.words or below.words,
        pixels=pixels or below.pixels,
    )


def _bound(bound: Bound, bounds: Mapping[str, int | None]) -> Number | None:
    return bounds[bound] if isinstance(bound, str) else bound
