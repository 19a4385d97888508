"""A translated request before a backend that does not take every field a translation may make. Pure.

Translations write fields that OpenAI's schema does not have: vLLM and llama-server know them. A server that refuses
unknown fields (OpenAI's own does) gets none of them. Fields that ask for nothing or change no answer are left out and
told; fields that would give another answer are refused. Efforts, names of tools and schemas for answers are written as
OpenAI's own schema has them (openai_schema.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from hive.dialects import openai_schema
from hive.dialects.translation import FieldFate, FieldRow, Sent
from hive.errors import BadRequest, NotSupported

Raw = msgspec.Raw
_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, Raw]]).decode
CHAT = "/v1/chat/completions"
EFFORTS = ((4096, "low"), (16384, "medium"))
"""Below so many tokens of budget; more is `high`."""
_HIGHER, _HIGH = frozenset({b'"max"', b'"xhigh"'}), Raw(b'"high"')
_SHORT = 32
"""Bytes of a value that may ask for nothing; a longer one is looked at no further."""


def _no(why: str) -> FieldRow:
    return FieldRow(FieldFate.REFUSED, why=why)


def _aside(why: str) -> FieldRow:
    return FieldRow(FieldFate.HARMLESS, why=why)


_ALONE = "it has OpenAI's schema alone, which has no "
_BUDGET = FieldRow(FieldFate.MAPPED, to="reasoning_effort", why="below 4,096 low, below 16,384 medium, else high")
_GOES_ON = _no(_ALONE + "way to go on with the assistant's last message")
_PENALTY = _no(_ALONE + "penalty of that kind, only presence_penalty and frequency_penalty")
FIELDS: Mapping[str, FieldRow] = {
    "top_k": _no(_ALONE + "top_k, only top_p"),
    "min_p": _no(_ALONE + "min_p, only top_p"),
    "repetition_penalty": _PENALTY,
    "repeat_penalty": _PENALTY,
    "repeat_last_n": _aside("how far back a penalty looks that is not taken either"),
    "chat_template_kwargs": _no(_ALONE + "switch for thinking; say a level (low, medium, high)"),
    "thinking_token_budget": _BUDGET,
    "thinking_budget_tokens": _BUDGET,
    "continue_final_message": _GOES_ON,
    "add_generation_prompt": _GOES_ON,
    "truncate_prompt_tokens": _aside("a text that is too long is refused by the backend, never cut"),
}
"""Rules for fields that the backend does not take. Of two fields with the same meaning both are left out if one is."""
ALTERNATIVES = (
    frozenset({"repetition_penalty", "repeat_penalty"}),
    frozenset({"thinking_token_budget", "thinking_budget_tokens"}),
)
_MADE_OF = {"continue_final_message": "messages", "add_generation_prompt": "messages"}
"""The client's field behind a field that has no row."""


def _at_most(limit: float) -> Callable[[float], bool]:
    return lambda number: number <= limit


_IDLE: Mapping[str, Callable[[float], bool]] = {
    "top_k": _at_most(0),
    "min_p": _at_most(0),
    "repetition_penalty": lambda number: number == 1,
    "repeat_penalty": lambda number: number == 1,
}
"""Numbers that ask for nothing."""
_GREEDY = frozenset({"top_k", "min_p"})
"""Fields that choose among likely tokens; temperature 0 takes the likeliest anyway."""


def fit(sent: Sent, rows: Mapping[str, FieldRow], lacking: Collection[str], *, limit_as: str = "") -> Sent:
    """The request without what the backend lacks. `rows`: of the client's endpoint, to name fields as the client does.
    `limit_as`: its name for `max_tokens`, where it has another.

    Raises NotSupported for a field without which the answer would be another.

    >>> rows = {f"options.{name}": FieldRow(FieldFate.MAPPED, name) for name in ("top_k", "seed")}
    >>> sent = fit(Sent("/v1/completions", b'{"top_k":5,"temperature":0,"seed":1e0}'), rows, ["top_k"])
    >>> sent.body, sent.dropped
    (b'{"temperature":0,"seed":1e0}', ('options.top_k',))
    """
    fields = _object(sent.body)
    if fields.keys().isdisjoint(lacking) and "reasoning_content" not in lacking and not limit_as:
        return sent
    dropped, clamped = list(sent.dropped), list(sent.clamped)
    left = {name: value for name, value in fields.items() if name not in lacking or name not in FIELDS}
    for name in fields:
        if name in left or any(name in group and group & left.keys() for group in ALTERNATIVES):
            continue
        told = _as_asked(rows, name)
        if FIELDS[name].fate is FieldFate.MAPPED:
            _say_effort(left, _number(fields[name]) or 0, told, dropped, clamped)
            continue
        if FIELDS[name].fate is FieldFate.REFUSED and not _asks_for_nothing(name, fields):
            raise NotSupported(f'"{told}" cannot be said to this backend: {FIELDS[name].why}', hint="leave it out")
        dropped.append(told)
    if "reasoning_content" in lacking and "messages" in left:
        left["messages"] = _plain(left["messages"], rows, dropped)
    kept = sent.kept
    if FIELDS.keys() <= set(lacking):
        _say_less(left, rows, clamped)
        if names := openai_schema.fit(left):
            kept = _encode({**_object(kept), "names": Raw(_encode(names))})
    if limit_as and sent.target == CHAT and "max_tokens" in left:
        left[limit_as] = left.pop("max_tokens")
    return Sent(sent.target, _encode(left), tuple(dict.fromkeys(dropped)), kept, tuple(dict.fromkeys(clamped)))


def _say_effort(left: dict[str, Raw], budget: float, told: str, dropped: list[str], clamped: list[str]) -> None:
    """A budget of tokens for thinking as an effort, where the client says none itself."""
    effort = next((effort for most, effort in EFFORTS if budget < most), "high")
    if f"{told}={effort}" in clamped:  # the other name of the same budget
        return
    if "reasoning_effort" in left:
        dropped.append(told)
        return
    left["reasoning_effort"] = Raw(_encode(effort))
    clamped.append(f"{told}={effort}")


def _say_less(left: dict[str, Raw], rows: Mapping[str, FieldRow], clamped: list[str]) -> None:
    """The highest efforts only some models take, and the others refuse the request."""
    if bytes(left.get("reasoning_effort", b"")) in _HIGHER:
        left["reasoning_effort"] = _HIGH
        clamped.append(f"{_asked_effort(rows)}=high")


def _asked_effort(rows: Mapping[str, FieldRow]) -> str:
    return next((name for name in ("output_config.effort", "reasoning.effort") if name in rows), "think")


def _as_asked(rows: Mapping[str, FieldRow], name: str) -> str:
    """The client's own name for a field of the backend's: where several become it, the last one, which is the most
    particular."""
    if name in _MADE_OF:
        return _MADE_OF[name]
    of = [asked for asked, row in rows.items() if name in {to.partition(".")[0] for to in row.to.split(", ")}]
    return of[-1] if of else name


def _asks_for_nothing(name: str, fields: Mapping[str, Raw]) -> bool:
    if name in _GREEDY and _number(fields.get("temperature")) == 0:
        return True
    number, idle = _number(fields[name]), _IDLE.get(name)
    return number is not None and idle is not None and idle(number)


def _number(raw: Raw | None) -> float | None:
    if raw is None or len(memoryview(raw)) > _SHORT:
        return None
    try:
        return msgspec.json.decode(raw, type=float)
    except msgspec.DecodeError:
        return None


def _plain(raw: Raw, rows: Mapping[str, FieldRow], dropped: list[str]) -> Raw:
    """Messages with the fields of OpenAI's schema only: it has no place for earlier thinking, which most templates
    leave out, and none for the name of the tool in its result, which the id of the call says."""
    if b'"reasoning_content"' not in bytes(raw) and b'"name"' not in bytes(raw):
        return raw
    try:
        messages = _objects(raw)
    except (msgspec.MsgspecError, RecursionError):
        raise BadRequest('"messages" must be a list of objects') from None
    for message in messages:
        if message.pop("reasoning_content", None) is not None:
            dropped.append(_thinking(rows))
        if bytes(message.get("role", b"")) == b'"tool"':
            message.pop("name", None)
    return Raw(_encode(messages))


def _thinking(rows: Mapping[str, FieldRow]) -> str:
    return next((asked for asked, row in rows.items() if row.to.endswith("reasoning_content")), "thinking")
