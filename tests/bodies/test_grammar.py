"""The limits for schemas: each kind of explosion is refused with its pointer, the schemas that agents send are not."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.bodies import body, grammar
from hive.bodies.body import BodyChoice, OpenedBody, Opening, Want
from hive.bodies.body_worker import completed, opened
from hive.bodies.body_workers import DeepReaders
from hive.bodies.fields import FieldTable
from hive.bodies.patterns import Pattern, PatternError
from hive.domain import BackendKind, Tier
from hive.errors import BadRequest, GrammarTooComplex
from hive.routing.slot import grammar_limits
from hive.settings.field_rules import FieldRules, Fields
from hive.settings.file import load_text
from hive.settings.table import Settings
from tests.bodies.reading import read_body
from tests.examples import examples
from tests.proxy.harness import CHAT, Client, post, proxied

LIMITS = grammar_limits(Settings(), BackendKind.LLAMA)
AT = "/response_format/json_schema/schema"
Schema = dict[str, Any]


def check(**fields: Any) -> None:
    texts = {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in fields.items()}
    grammar.check({name: msgspec.Raw(text) for name, text in texts.items()}, LIMITS)


def why(**fields: Any) -> str:
    """The refusal of a body with these fields."""
    with pytest.raises(GrammarTooComplex) as caught:
        check(**fields)
    return caught.value.message


def answer(schema: Any) -> Schema:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def named(number: int, schema: Any) -> Schema:
    return {f"p{at}": schema for at in range(number)}


def object_of(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def nested(schema: Any, times: int, key: str = "items") -> Any:
    for _ in range(times):
        schema = {"type": "array", key: schema}
    return schema


TEXT = {"type": "string"}
BAD = {"enum": [*range(999)]}
FORK = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}
COPIES = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 8} for at in range(8)} | {"a8": object_of({"x": TEXT})}
EXPLOSIONS: dict[str, tuple[Any, str]] = {
    "optional properties": (
        {"type": "object", "properties": named(1000, {"type": "integer"})},
        f"{AT}/properties: 1001 choices at once",
    ),
    "an enum": ({"enum": [f"v{at}" for at in range(5000)]}, f"{AT}/enum: 5000 choices at once"),
    "branches": ({"anyOf": [TEXT] * 500}, f"{AT}/anyOf: 500 choices at once"),
    "branches within branches": (
        {"anyOf": [{"oneOf": [{"enum": list(range(20))}] * 5}] * 4},
        f"{AT}/anyOf: 400 choices at once",
    ),
    "arrays side by side": ({"anyOf": [nested(TEXT, 2)] * 40}, f"{AT}/anyOf: 280 choices at once"),
    "strings with a length side by side": (
        {"anyOf": [{"type": "string", "maxLength": 100 + at} for at in range(40)]},
        f"{AT}/anyOf: 160 choices at once",
    ),
    "long strings": (object_of(named(400, {"type": "string", "maxLength": 1900})), "/properties/p52"),
    "long arrays": (object_of(named(400, {"type": "array", "maxItems": 1900, "items": TEXT})), "rules in all"),
    "ranges": (object_of(named(600, {"minimum": -(10**15), "maximum": 10**15})), "rules in all"),
    "a pattern's empty loop": (
        object_of(named(5, {"type": "string", "pattern": "^((a|b|[a-z]*)*c?){0,40}$"})),
        f"{AT}/properties/p0/pattern: this pattern is not taken: it repeats what may be empty",
    ),
    "a pattern's stars": ({"pattern": "^" + "[a-z]*" * 12 + "$"}, f"{AT}/pattern: a text may be read in"),
    "a long pattern": ({"pattern": "a" * 2000}, f"{AT}/pattern: this pattern is not taken: it is longer than"),
    "patterns' repetitions": (
        object_of(named(8, {"type": "string", "pattern": "^[a-z]{1,600}$"})),
        "/pattern: the repetitions in all patterns, such as `{1,500}`, are too many and too long together",
    ),
    "a pattern's copies": ({"pattern": "^((a{900}b){900}c){900}$"}, f"{AT}/pattern"),
    "a name that is a pattern": ({"patternProperties": {"^(a*)*$": TEXT}}, f"{AT}/patternProperties/^(a*)*$"),
    "depth": (nested(TEXT, 100), "objects and lists within each other; this server is given at most 64"),
    "a long name": ({"properties": {"n" * 5000: TEXT}}, "a name of 5000 characters"),
    "itself": ({"$ref": "#"}, f"{AT}/$ref: it refers to itself"),
    "itself in turn": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        "it refers to itself",
    ),
    "twice as many readings at each level": ({"$defs": {"a": FORK}, "$ref": "#/$defs/a"}, "begin alike"),
    "copies of copies": ({"$defs": COPIES, "allOf": [{"$ref": "#/$defs/a0"}]}, "choices at once"),
    "a reference elsewhere": ({"$ref": "https://example.com/schema"}, "in the same schema"),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "nothing where it refers to"),
    "a type twice": ({"type": ["object"] * 9, "properties": {}}, f"{AT}/type"),
    "bytes": ({"description": "x" * 70_000}, "/response_format: 70"),
}


@pytest.mark.parametrize(("schema", "said"), EXPLOSIONS.values(), ids=EXPLOSIONS)
def test_each_kind_of_explosion_is_refused_with_its_pointer(schema: Any, said: str) -> None:
    """338 bytes (five patterns that repeat what may be empty) held a llama-server for 9 s, for all agents; 1,000
    optional properties for 11.7 s, an enum of 5,000 values for 9.5 s, 400 strings of a maxLength of 1900 for 2.5 s."""
    assert said in why(response_format=answer(schema))


def test_nesting_that_ends_a_server_is_refused_in_tools_too() -> None:
    """1 MB of `{"items":` in `tools` killed a llama-server; what let Hive refuse it was the limit of a decoder."""
    for times in (20_000, 800):
        deep = b'[{"type":"function","function":{"name":"f","parameters":%b1%b}}]' % (
            b'{"items":' * times,
            b"}" * times,
        )
        assert "/tools" in why(tools=deep)


REGEX = {"type": "grammar"}
LOOP = {"syntax": "regex", "definition": "(a*)*"}


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"response_format": answer(BAD)}, f"{AT}/enum"),
        ({"response_format": {"type": "json_object", "schema": BAD}}, "/response_format/schema/enum"),
        ({"format": BAD}, "/format/enum"),
        ({"tools": [{"type": "function", "function": {"parameters": BAD}}]}, "/tools/0/function/parameters/enum"),
        ({"tools": [{"Type": "function", "Function": {"Parameters": BAD}}]}, "/tools/0/Function/Parameters/enum"),
        ({"tools": [{"type": "function", "parameters": BAD}]}, "/tools/0/parameters/enum"),
        ({"functions": [{"name": "f", "parameters": BAD}]}, "/functions/0/parameters/enum"),
        ({"tools": [{"name": "a"}, {"name": "f", "input_schema": BAD}]}, "/tools/1/input_schema/enum"),
        ({"output_config": {"format": {"type": "json_schema", "schema": BAD}}}, "/output_config/format/schema/enum"),
        ({"output_format": {"type": "json_schema", "schema": BAD}}, "/output_format/schema/enum"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}}, "/text/format/schema/enum"),
        ({"tools": [{"custom": {"format": REGEX | {"grammar": LOOP}}}]}, "/tools/0/custom/format/grammar/definition"),
        ({"tools": [{"type": "custom", "format": REGEX | LOOP}]}, "/tools/0/format/definition"),
        ({"tools": [{"format": REGEX | {"syntax": "lark", "definition": "start: x"}}]}, "/tools/0/format"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "/response_format"),
        ({"structured_outputs": {"json": BAD}}, "/structured_outputs/json/enum"),
        ({"guided_json": BAD}, "/guided_json/enum"),
    ],
)  # fmt: skip
def test_every_dialect_s_form_of_a_schema_is_found(fields: Schema, pointer: str) -> None:
    assert why(**fields).startswith(f"{pointer}: ")


def tools(number: int, parameters: Schema) -> list[Schema]:
    return [{"type": "function", "function": {"name": f"t{at}", "parameters": parameters}} for at in range(number)]


def test_all_schemas_of_a_request_are_counted_together() -> None:
    half = object_of(named(26, {"type": "string", "maxLength": 1900}))
    check(tools=tools(1, half))
    check(response_format=answer(half))
    more = object_of(named(30, half["properties"]["p0"]))
    assert "rules in all" in why(tools=tools(1, half), response_format=answer(more))
    assert "/tools/1/" in why(tools=tools(2, {**half, "properties": named(30, half["properties"]["p0"])}))  # fmt: skip


def test_tools_are_bounded_in_number_names_and_bytes() -> None:
    """`tools` had no bound at all: 1 MB of them passed."""
    small = object_of({"a": TEXT})
    check(tools=tools(256, small))
    assert why(tools=tools(257, small)) == "/tools: 257 tools; this server is given at most 256"
    assert "/tools/1: another tool is named" in why(tools=[*tools(1, small), *tools(1, small)])
    assert "/tools: " in why(tools=tools(1, {"description": "x" * 300_000}))


def usual_tool(number: int) -> Schema:
    about = "What is to be changed, as it is listed by the other tools of this server, and where it is found. "
    properties: Schema = {
        "owner": {"type": "string", "description": about},
        "state": {"type": ["string", "null"], "enum": ["open", "closed", None], "description": about},
        "page": {"type": "integer", "minimum": 1, "maximum": 100, "default": 1},
        "at": {"type": "string", "format": "date-time"},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$", "maxLength": 64},
        "labels": {"type": "array", "items": TEXT, "maxItems": 100},
        "files": {
            "type": "array",
            "items": object_of({"path": TEXT, "content": {"type": "string", "maxLength": 65536}}),
        },
        "filter": {"anyOf": [TEXT, object_of({"and": nested(TEXT, 1)}), {"type": "null"}]},
    }
    schema = {"$schema": "x", "type": "object", "properties": properties, "required": ["owner", "name"]}
    return {"type": "function", "function": {"name": f"tool_{number}", "description": about * 4, "parameters": schema}}


@pytest.mark.parametrize("size", [60_000, 120_000, 200_000])
@pytest.mark.parametrize("kind", list(BackendKind))
def test_tools_as_agents_have_them_pass(size: int, kind: BackendKind) -> None:
    some: list[Schema] = []
    while len(text := json.dumps(some).encode()) < size:
        some.append(usual_tool(len(some)))
    grammar.check({"tools": msgspec.Raw(text)}, grammar_limits(Settings(), kind))


AGAIN = {"$ref": "#/$defs/f"}
LIST = {"type": "array", "items": AGAIN}
FILTER = {"anyOf": [object_of({"and": LIST}), TEXT, object_of({"or": LIST})]}
VALUE = {"anyOf": [TEXT, {"type": "number"}, LIST, {"type": "object", "additionalProperties": AGAIN}]}


@pytest.mark.parametrize(
    "schema", [FILTER, VALUE, object_of({"left": {"$ref": "#/$defs/f"}, "right": {"$ref": "#/$defs/f"}})]
)
def test_what_refers_to_itself_as_filters_do_passes(schema: Schema) -> None:
    check(response_format=answer({"$defs": {"f": schema}, "$ref": "#/$defs/f"}))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        r"^(?:(?:\d\d[2468][048]|\d\d[13579][26])-02-29|\d{4}-(?:0[1-9]|1[02]))T(?:[01]\d|2[0-3]):[0-5]\d(?:\.\d+)?Z$",
        r"^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[0-9])$",
        r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        r"^https?:\/\/[-a-zA-Z0-9@:%._\+~#=]{1,256}\.[a-zA-Z0-9()]{1,6}\b(?:[-a-zA-Z0-9()@:%_\+.~#?&\/=]*)$",
        r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-5][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$",
        r"^P(?!$)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?$",
        r"^[\s\S]{0,500}$",
        "^(foo|bar|baz)(,(foo|bar|baz))*$",
    ],
)
def test_patterns_that_libraries_write_pass(pattern: str) -> None:
    """zod's for addresses, dates, times, base64 and UUIDs, as tools in TypeScript carry them."""
    check(response_format=answer({"type": "string", "pattern": pattern}))


# any schema -----------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [
        *("type", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum", "const"),
        *("pattern", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "additionalProperties"),
        *("patternProperties", "prefixItems", "not", "if", "format", "a", "b", "function", "parameters", "name"),
        *("schema", "json_schema", "input_schema", "custom", "grammar", "syntax", "definition"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["object", "array", "string", "integer", "#", "#/$defs/a", "#/properties/a", "regex"])
    | st.text("ab[]()*+?{}1,|^$\\.-", max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=25,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(sorted(grammar.FORMS)), VALUES, min_size=1, max_size=3))
@settings(max_examples=examples(400), deadline=None)
def test_it_raises_nothing_but_its_own_error(fields: Schema) -> None:
    said = "/"
    try:
        check(**fields)
    except GrammarTooComplex as error:
        said = error.message
    assert said.startswith("/")
    assert said.isascii()
    assert len(said) < 700


@given(st.binary(max_size=60), st.sampled_from(sorted(grammar.FORMS)))
@settings(max_examples=examples(200), deadline=None)
def test_what_is_no_json_is_refused_as_well(text: bytes, name: str) -> None:
    try:
        check(**{name: b'{"a":' + text + b"}"})
    except GrammarTooComplex:
        return


@given(st.text("ab[]()*+?{}12,|^$\\.-:=!<>", max_size=40))
@settings(max_examples=examples(600), deadline=None)
def test_every_expression_is_read_or_refused(text: str) -> None:
    try:
        assert Pattern(text).ways >= 1
    except PatternError:
        return


def work(**fields: Any) -> int:
    """Calls of Python's functions that one check makes."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        with suppress(GrammarTooComplex):
            check(**fields)
    finally:
        sys.setprofile(None)
    return calls


GROWING = {
    "properties": lambda n: object_of(named(n, {"type": "integer"})),
    "lists of types": lambda n: object_of(named(n, {"type": ["string", "null"]})),
    "references": lambda n: {"$defs": {"a": TEXT}, **object_of(named(n, {"$ref": "#/$defs/a"}))},
    "small unions": lambda n: object_of(named(n, {"anyOf": [TEXT, {"type": "null"}]})),
    "patterns": lambda n: object_of({f"p{at}": {"pattern": f"^[a-z]*{at}[0-9]*$"} for at in range(n)}),
    "one pattern": lambda n: {"pattern": "^" + "(a|b)c?" * (n // 5) + "$"},
    "nested alike": lambda n: {"anyOf": [nested(TEXT, 3)] * (n // 40)},
}


@pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)
def test_the_work_grows_with_the_length_of_the_schema(make: Any) -> None:
    """Twice as many members are at most a little more than twice the calls; no clock is looked at."""
    once, twice = (work(response_format=answer(make(n))) for n in (300, 600))
    assert twice <= 2.2 * once + 50


# on its way -----------------------------------------------------------------------------------------------------------

RULES = FieldRules(target="/x", fields=Fields(plain=frozenset(grammar.FORMS)))
LARGE = {"response_format": answer(BAD)}


def test_a_body_is_refused_on_the_loop_and_in_a_worker_alike() -> None:
    want = Want(grammar=LIMITS)
    text = json.dumps(LARGE).encode()
    with pytest.raises(BadRequest, match="enum: 999 choices at once; this server is given at most 128"):
        read_body(text, RULES, want)
    found = opened(msgspec.msgpack.encode(RULES), msgspec.msgpack.encode(Opening()), text)
    assert isinstance(found, OpenedBody)
    said, pieces = completed(found, msgspec.msgpack.encode(BodyChoice(want, "m")))
    assert (said.code, pieces) == ("grammar_too_complex", [])


@pytest.mark.parametrize(
    ("fields", "is_light"),
    [
        ({"format": {"type": "object"}}, True),
        ({"messages": "pattern" * 1000}, True),
        ({"format": {"pattern": "^a$"}}, False),
        ({"format": {"description": "x" * 5000}}, False),
        ({"tools": [{"function": {"parameters": {"p\\u0061ttern": "a"}}}]}, False),
    ],
)
def test_what_takes_long_is_left_to_a_worker(fields: Schema, is_light: bool) -> None:
    text = json.dumps(fields).replace("\\\\", "\\").encode()
    rules = FieldRules(target="/x", fields=Fields(plain=frozenset({*grammar.FORMS, "messages"})))
    if is_light:
        assert read_body(text, rules, Want(grammar=LIMITS), on_loop=True).upstream
    else:
        with pytest.raises(body.TooHeavyHere):
            read_body(text, rules, Want(grammar=LIMITS), on_loop=True)


def test_each_kind_of_server_has_limits_of_its_own() -> None:
    text = b"[grammar_llama]\nchoices = 3\n[grammar_vllm]\nchoices = 9\n"
    given = load_text(text.decode(), env={}).settings
    assert grammar_limits(given, BackendKind.LLAMA).choices == 3
    assert grammar_limits(given, BackendKind.VLLM).choices == 9
    assert grammar_limits(given, BackendKind.DEMO) == grammar_limits(given, BackendKind.REMOTE)


async def test_an_agent_hears_the_pointer_and_the_server_is_not_asked(tmp_path: Path) -> None:
    """Over a socket, a body with a pattern by way of a real worker, a small one on the loop."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.path.readers = readers = DeepReaders()
        readers.start()
        try:
            client = await Client.unix(proxy.socket_path)
            for schema, pointer in (({"pattern": "^(a*)*$"}, "pattern"), ({"enum": [*range(300)]}, "enum")):
                text = json.dumps({**json.loads(CHAT), "response_format": answer(schema)}).encode()
                status, _, said = await client.ask(post(b"/v1/chat/completions", text))
                assert (status, json.loads(said)["error"]["code"]) == (400, "grammar_too_complex")
                assert json.loads(said)["error"]["message"].startswith(f"{AT}/{pointer}: ")
            text = json.dumps({**json.loads(CHAT), "tools": [usual_tool(at) for at in range(30)]}).encode()
            assert backend.requests == []
            assert (await client.ask(post(b"/v1/chat/completions", text)))[0] == 200
            assert len(json.loads(backend.requests[0][1])["tools"]) == 30
        finally:
            readers.close()


@pytest.mark.parametrize("target", ["/v1/embeddings", "/api/embed"])
def test_texts_to_be_embedded_are_bounded(target: str) -> None:
    """A list of any length was taken, each text of which is a request to the server."""
    rules = FieldTable(Settings()).rules(target, Tier.LOW)
    for number, is_taken in ((2048, True), (2049, False)):
        text = json.dumps({"model": "m", "input": ["a"] * number}).encode()
        if is_taken:
            assert read_body(text, rules, Want())
        else:
            with pytest.raises(BadRequest, match="more than 2048 prompts"):
                read_body(text, rules, Want())
