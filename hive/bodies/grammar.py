"""The size of the grammar that the schemas of a request would become, judged before a server compiles them. Pure.

llama-server, Ollama and vLLM make a grammar of `response_format`, `format`, `tools` and their like, and follow it token
by token within the loop that serves all requests: 338 bytes of schema stopped a llama-server for 9 s. Counted is what
they build for all schemas of a request together: rules, and places a text may be at. Every keyword of a schema is
looked at, also one the server ignores; the limits are those of the server's kind (`[grammar KIND]`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hive.bodies.schemas import LONGEST_NAME, MeasuredSchema, Path, SchemaLimits, Sums, refused

Raw = msgspec.Raw
LIGHT_BYTES = 4096
"""Schemas up to this are looked at on the loop (2 ms at most)."""

# --- where a body has its schemas -------------------------------------------------------------------------------------


_WRAPPED = 3
"""Lists and objects around a schema: of the tools, of one tool, of its function."""


class Form(msgspec.Struct, frozen=True):
    """One field that carries schemas: how they are found in it, and whether they are tools."""

    find: Callable[[Any, Path], Iterator[tuple[Any, Path]]]
    is_tools: bool = False


def _member(value: Any, name: str) -> tuple[str, Any]:
    """The member of that name in any writing, as Ollama reads names, with the name as it is written."""
    if isinstance(value, dict):
        for key in (name, *value):
            if key in value and (key == name or key.casefold() == name):
                return key, value[key]
    return name, None


def _itself(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """Ollama's `format`: a schema, or the text `json`."""
    yield value, path


def _response_format(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """OpenAI's, flat (`text.format`, Anthropic's) and nested; `json_object` has a `schema` before llama-server."""
    kind = _member(value, "type")[1]
    if kind not in (None, "text", "json_object", "json_schema", "json"):
        yield from _custom(value, path, str(kind))
        return
    key, nested = _member(value, "json_schema")
    for within, at in ((value, path), (nested, path / key)):
        name, schema = _member(within, "schema")
        if schema is not None:
            yield schema, at / name


def _inside(name: str) -> Callable[[Any, Path], Iterator[tuple[Any, Path]]]:
    def find(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
        key, inner = _member(value, name)
        yield from _response_format(inner, path / key)

    return find


def _structured(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """vLLM's `structured_outputs`, where an operator opened it."""
    key, schema = _member(value, "json")
    yield schema, path / key


def _tools(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """Tools, nested (OpenAI, Ollama), flat (Responses, `functions`) and Anthropic's."""
    for number, tool in enumerate(value if isinstance(value, list) else []):
        at = path / number
        key, function = _member(tool, "function")
        for within, place in ((tool, at), (function, at / key)):
            for name in ("parameters", "input_schema"):
                written, schema = _member(within, name)
                if schema is not None:
                    yield schema, place / written
        key, custom = _member(tool, "custom")
        for within, place in ((tool, at), (custom, at / key)):
            name, wanted = _member(within, "format")
            if isinstance(wanted, dict):
                yield from _custom(wanted, place / name, str(_member(wanted, "type")[1]))


def _worded_tools(value: Any, path: Path, sums: Sums) -> Iterator[tuple[Any, Path]]:
    """Tools of Responses, those within a namespace too, which count as much as others."""
    tools = value if isinstance(value, list) else []
    yield from _tools([_without_words(tool) for tool in tools], path)
    within = [(path / number / "tools", _member(tool, "tools")[1]) for number, tool in enumerate(tools)]
    spaces = [(at, inner) for at, inner in within if isinstance(inner, list)]
    if len(tools) + sum(len(inner) for _, inner in spaces) > (most := sums.limits.tools):
        raise refused(path, f"too many tools; this server is given at most {most}")
    for at, inner in spaces:
        _check_tools(inner, at, sums)
        yield from _worded_tools(inner, at, sums)


def _without_words(tool: Any) -> Any:
    """A tool as it is counted: all of it but a Lark grammar."""
    key, wanted = _member(tool, "format")
    if _member(wanted, "type")[1] != "grammar" or _member(wanted, "syntax")[1] != "lark":
        return tool
    return {name: value for name, value in tool.items() if name != key}


class Expression(str):
    """A regular expression that stands where a schema would."""


def _custom(value: Any, path: Path, kind: str) -> Iterator[tuple[Any, Path]]:
    """A grammar in words of its own. Expressions are counted; what else there is cannot be."""
    if kind in ("text", "None"):
        return
    key, nested = _member(value, "grammar")
    within, at = (nested, path / key) if isinstance(nested, dict) else (value, path)
    if _member(within, "syntax")[1] == "regex":
        name, text = _member(within, "definition")
        yield Expression(text if isinstance(text, str) else ""), at / name
        return
    raise refused(path, f'a grammar of the kind "{kind[:40]}" is not counted here, so it is not taken; use a schema')


FORMS = {
    "response_format": Form(_response_format),
    "format": Form(_itself),
    "output_format": Form(_response_format),
    "output_config": Form(_inside("format")),
    "text": Form(_inside("format")),
    "json_schema": Form(_itself),
    "guided_json": Form(_itself),
    "structured_outputs": Form(_structured),
    "tools": Form(_tools, is_tools=True),
    "functions": Form(_tools, is_tools=True),
}
"""Fields of bodies that carry schemas, at any endpoint."""
_NAMES = frozenset(FORMS)


def has_schemas(fields: dict[str, Raw]) -> bool:
    """Whether any of these fields may carry a schema."""
    return not _NAMES.isdisjoint(fields)


def is_light(fields: dict[str, Raw]) -> bool:
    """Whether these fields' schemas may be looked at on the loop; an expression may take longer than its length says.

    >>> is_light({"tools": Raw(b"[]")}), is_light({"format": Raw(b'{"pattern":"a"}')})
    (True, False)
    """
    for name in _NAMES & fields.keys():
        data = bytes(fields[name])
        look = data.find
        if len(data) > LIGHT_BYTES or look(b"pattern") >= 0 or look(b"\\u") >= 0 or look(b"regex") >= 0:
            return False
    return True


def check(fields: dict[str, Raw], limits: SchemaLimits, *, has_worded: bool = False) -> None:
    """All schemas of a body together, by their JSON pointers. Raises GrammarTooComplex. `has_worded`: a Lark grammar of
    a custom tool goes to the model in words, so that no server compiles it.

    >>> rules = {"rules": 99, "answer_rules": 99, "pattern_times": 99}
    >>> few = SchemaLimits(schema_bytes=99, tools_bytes=99, depth=9, choices=2, tools=9, pattern_ways=9, **rules)
    >>> check({"format": Raw(b'{"enum":[1,2]}')}, few)
    >>> check({"format": Raw(b'{"enum":[1,2,3]}')}, few)
    Traceback (most recent call last):
    hive.errors.GrammarTooComplex: /format/enum: 3 choices at once; this server is given at most 2
    """
    sums = Sums(limits)
    for name in sorted(_NAMES & fields.keys(), key=lambda name: (FORMS[name].is_tools, name)):
        sums.most = limits.rules if FORMS[name].is_tools else limits.answer_rules
        _check_field(name, fields[name], limits, sums, has_worded=has_worded)


def _check_field(name: str, raw: Raw, limits: SchemaLimits, sums: Sums, *, has_worded: bool) -> None:
    form, path, data = FORMS[name], Path(name), bytes(raw)
    if data[:1] not in (b"{", b"["):
        return
    most = limits.tools_bytes if form.is_tools else limits.schema_bytes
    if len(data) > most:
        raise refused(path, f"{len(data)} bytes; this server is given at most {most}")
    value = _read(data, path)
    _check_depth(value, path, limits.depth)
    if form.is_tools and isinstance(value, list):
        _check_tools(value, path, sums)
    for schema, at in _worded_tools(value, path, sums) if has_worded and form.is_tools else form.find(value, path):
        if isinstance(schema, Expression):
            sums.take_expression(schema, at)
        elif isinstance(schema, dict):
            MeasuredSchema(schema, at, sums).measure()


def _read(data: bytes, path: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise refused(path, "an object in it names something more than once")
        return made

    try:
        return json.loads(data, object_pairs_hook=once)
    except RecursionError:
        raise refused(path, "it nests objects and lists too deeply") from None
    except ValueError:
        raise refused(path, "it is not JSON") from None


def _check_depth(value: Any, path: Path, most: int) -> None:
    waiting = [(value, path, 1)]
    while waiting:
        value, path, depth = waiting.pop()
        if depth > most + _WRAPPED:
            raise refused(path, f"objects and lists within each other; this server is given at most {most} of them")
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list):
                waiting.append((inner, path / key, depth + 1))


def _check_tools(tools: list[Any], path: Path, sums: Sums) -> None:
    """Each is a choice; two of one name would be read side by side to their ends."""
    if len(tools) > (most := sums.limits.tools):
        raise refused(path, f"{len(tools)} tools; this server is given at most {most}")
    names: set[str] = set()
    for number, tool in enumerate(tools):
        name = _member(tool, "name")[1] or _member(_member(tool, "function")[1], "name")[1]
        name = name or _member(_member(tool, "custom")[1], "name")[1]
        if isinstance(name, str):
            if name in names:
                raise refused(path / number, f'another tool is named "{name[:60]}" already')
            if len(name) > LONGEST_NAME:
                raise refused(path / number, f"a name of {len(name)} characters; {LONGEST_NAME} are the most")
            names.add(name)
