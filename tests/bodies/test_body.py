"""Request bodies: rebuilt, never the client's bytes, and unchanged where no rule applies."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.backends.kinds import SPECS, spec_of
from hive.bodies import body
from hive.bodies.body import Asked, Opening, Want
from hive.bodies.fields import FieldTable
from hive.bodies.json_object import MAX_NAMES
from hive.domain import Tier
from hive.errors import BadRequest, HiveError, NotSupported, TooLarge
from hive.settings.field_rules import FieldRules, Fields, Rule, Verb
from hive.settings.table import Settings
from tests.bodies.reading import read_body

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(alphabet="abcdefgh_", min_size=1, max_size=8)
OPEN = FieldRules(target="/x", fields=Fields())


def read(raw: bytes, default_model: str = "") -> Asked:
    return read_body(raw, OPEN, Want(), Opening(default_model, streams=True))


def policed(text: bytes, want: Want | None = None, /, **rules: Rule) -> tuple[Any, Asked]:
    """The body that goes upstream as Python objects, and the reading, by these rules of its fields."""
    always = tuple(name for name, rule in rules.items() if rule.filled or rule.verb is Verb.INJECT)
    asked = read_body(text, FieldRules(target="/x", fields=Fields(policed=rules, always=always)), want or Want())
    return json.loads(b"".join(asked.upstream)), asked


def upstream(asked: Asked) -> bytes:
    assert asked.size == sum(map(len, asked.upstream))
    return b"".join(asked.upstream)


# what is not policed --------------------------------------------------------------------------------------------------


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.sampled_from([None, 1, 4]), st.booleans())
def test_what_nobody_polices_goes_on_as_it_was(fields: dict[str, object], indent: int | None, plain: bool) -> None:
    raw = json.dumps(fields, indent=indent, ensure_ascii=not plain).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    assert json.loads(upstream(read(raw))) == json.loads(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"small","MODEL":"huge"}',
        b'{"model":"small","model":"huge"}',
        b'{"model": "small", "model": "huge"}',
        b'{"a":1,"a":1}',
        b'{"keep_alive":1,"\xe2\x84\xaaeep_alive":-1}',
        b'{"mod\\u0065l":"huge","model":"small"}',
        b'{"mod\\u0065l":"huge"}',
    ],
)
def test_a_name_that_stands_twice_for_some_decoder_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        read(raw)


@given(st.dictionaries(NAMES, st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_no_white_space_hides_a_repeated_name(fields: dict[str, int], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields)))
    pad = data.draw(st.text(alphabet=" \t\n\r", max_size=12))
    pairs = [f'{pad}"{key}":{pad}{value}' for key, value in [*fields.items(), (name, 7)]]
    with pytest.raises(BadRequest):
        read(("{" + ",".join(pairs) + pad + "}").encode())


def test_names_are_folded_also_where_only_one_decoder_would() -> None:
    asked = read(b'{"MODEL":"m","\xe2\x84\xaaeep_alive":-1,"Stream":false,"\xc5\xbfeed":1}')
    assert json.loads(upstream(asked)) == {"model": "m", "keep_alive": -1, "stream": False, "seed": 1}
    assert (asked.model, asked.stream) == ("m", False)


@pytest.mark.parametrize("number", ["1e2", "1.0", "123456789012345678901234567890", "-0.0", "1E+2"])
def test_numbers_stay_as_written(number: str) -> None:
    assert number.encode() in upstream(read(b'{"temperature":%b,"model":"m"}' % number.encode()))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b'{"a":NaN}',
        b'{"a":1}x',
        b'{"a":1,}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"a":"\xff"}',
        b'{"a":' + b"[" * 200_000,
        b'{"model":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":null}',
        b'{"model":"' + b"x" * 600 + b'"}',
        b'{"stream":1}',
        b"{" + b",".join(b'"%x":0' % number for number in range(MAX_NAMES + 1)) + b"}",
    ],
)
def test_anything_else_is_a_bad_request(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        read(raw)


def test_the_default_model_stands_in_only_where_none_is_named() -> None:
    assert json.loads(upstream(read(b'{"n":1}', "m"))) == {"n": 1, "model": "m"}
    assert json.loads(upstream(read(b'{"model":""}', "m"))) == {"model": "m"}
    assert read(b'{"model":"other"}', "m").model == "other"
    assert upstream(read(b"{}")) == b"{}"
    assert upstream(read(b"{ }", "m")) == b'{"model":"m"}'


# actions --------------------------------------------------------------------------------------------------------------


def test_a_dropped_field_is_left_out_and_told() -> None:
    fields, asked = policed(b'{"a":1,"b":[1],"c":null}', b=Rule(verb=Verb.DROP), c=Rule(verb=Verb.DROP))
    assert fields == {"a": 1}
    assert asked.dropped == ("b",)  # null asked for nothing


@pytest.mark.parametrize("value", ["null", "false", '""', "[]", "{}"])
def test_a_refused_field_that_asks_for_nothing_is_only_left_out(value: str) -> None:
    """ollama-python sends `"raw":false` with every request."""
    fields, asked = policed(b'{"a":1,"raw":%b}' % value.encode(), raw=Rule(verb=Verb.REFUSE))
    assert (fields, asked.dropped) == ({"a": 1}, ())


@pytest.mark.parametrize("value", ["true", "0", '"x"', "[0]", '{"a":1}', "[ ]"])
def test_a_refused_field_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadRequest, match='"raw" is not taken on /x'):
        policed(b'{"raw":%b}' % value.encode(), raw=Rule(verb=Verb.REFUSE))


@pytest.mark.parametrize(
    ("value", "goes_on", "told"),
    [
        ("1", "1", ()),
        ("1e0", "1e0", ()),
        ("3", "2", ("n=2",)),
        ("-1", "0.5", ("n=0.5",)),
        ("99999999999999999999999", "2", ("n=2",)),
        ("null", "null", ()),
    ],
)
def test_a_number_outside_its_range_is_put_to_the_end_of_it(value: str, goes_on: str, told: tuple[str, ...]) -> None:
    asked = policed(b'{"n":%b}' % value.encode(), n=Rule(verb=Verb.CLAMP, low=0.5, high=2))[1]
    assert upstream(asked) == b'{"n":%b}' % goes_on.encode()
    assert asked.clamped == told


@pytest.mark.parametrize("value", ['"2"', "true", "[1]", "1e999", "-1e999", '"1e3"'])
def test_what_is_to_be_a_number_must_be_one(value: str) -> None:
    with pytest.raises(BadRequest, match='"n"'):
        policed(b'{"n":%b}' % value.encode(), n=Rule(verb=Verb.CLAMP, low=0, high=2))


@pytest.mark.parametrize("number", [b"-1", b"0", b"-0", b"0.5", b"1e-400"])
def test_without_a_lower_end_less_than_one_means_no_limit(number: bytes) -> None:
    """Ollama leaves a `num_predict` of 0 out, and llama-server then goes on for ever (llm/llama_server.go)."""
    limit = Rule(verb=Verb.CLAMP, high=100)
    assert policed(b'{"n":%b}' % number, n=limit)[0] == {"n": 100}
    assert policed(b'{"n":1}', n=limit)[0] == {"n": 1}


@pytest.mark.parametrize("number", [b"1" + b"0" * 400, b"1e300", b"9" * 23], ids=["long", "large", "beyond 64 bits"])
def test_a_number_beyond_all_bounds_is_bounded_or_passed_but_never_a_fault(number: bytes) -> None:
    fields = Fields(policed={"max_tokens": Rule(verb=Verb.CLAMP, high=100)})
    rules = FieldRules(target="/x", fields=fields, tokens=("max_tokens",), max_tokens=100)
    assert read_body(b'{"max_tokens":%b}' % number, rules, Want()).max_tokens == 100
    free = FieldRules(target="/x", fields=Fields(plain=frozenset({"max_tokens"})), tokens=("max_tokens",))
    asked = read_body(b'{"max_tokens":%b}' % number, free, Want())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Asked) == asked, "a worker can tell of it"


def test_no_depth_of_nesting_is_a_fault() -> None:
    for depth in range(850, 1100):
        text = b'{ "zz":' + b"[" * depth + b"]" * depth + b"}"
        try:
            read_body(text, FieldRules(target="/x", fields=Fields()), Want())
        except BadRequest:
            continue


def test_an_operators_smaller_limit_holds_whatever_name_it_is_asked_under() -> None:
    fields = Fields(plain=frozenset({"n_predict"}), policed={"max_tokens": Rule(verb=Verb.CLAMP, high=100)})
    rules = FieldRules(target="/x", fields=fields, tokens=("max_tokens", "n_predict"), max_tokens=100)
    asked = read_body(b'{"max_tokens":50,"n_predict":4096}', rules, Want())
    assert msgspec.json.decode(asked.upstream[0]) == {"max_tokens": 50, "n_predict": 100}


def test_what_is_longer_than_allowed_is_too_large() -> None:
    assert policed(b'{"stop":"abc"}', stop=Rule(max_bytes=5))[0] == {"stop": "abc"}
    with pytest.raises(TooLarge, match='"stop" is longer than 5 bytes'):
        policed(b'{"stop":"abcd"}', stop=Rule(max_bytes=5))


def test_an_injected_value_stands_whatever_was_asked() -> None:
    rule = Rule(verb=Verb.INJECT, value=b'{"a":1}')
    assert policed(b"{}", x=rule)[0] == policed(b'{"x":2}', x=rule)[0] == {"x": {"a": 1}}


@pytest.mark.parametrize("value", ['""', '" \\n\\t"', '"\\u0020\\u2003"', "[]", "[ \n]", "null", "0", "{}", "false"])
def test_an_empty_prompt_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="empty"):
        policed(b'{"prompt":%b}' % value.encode(), prompt=Rule(filled=True))


@pytest.mark.parametrize("value", ['"a"', '" a"', '"\\u0061"', "[1]", '[""]', '"\\""'])
def test_a_prompt_that_says_something_goes_on(value: str) -> None:
    assert policed(b'{"prompt":%b}' % value.encode(), prompt=Rule(filled=True))[0]["prompt"] is not None


def test_an_absent_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match='"prompt" is missing'):
        policed(b"{}", prompt=Rule(filled=True))


@pytest.mark.parametrize(
    ("unknown", "goes_on", "told"), [(Verb.ALLOW, {"a": 1, "b": 2}, ()), (Verb.DROP, {"a": 1}, ("b",))]
)
def test_an_unknown_field_goes_on_or_is_dropped_and_told(
    unknown: Verb, goes_on: dict[str, int], told: tuple[str, ...]
) -> None:
    rules = FieldRules(target="/x", fields=Fields(plain=frozenset("a"), unknown=unknown))
    asked = read_body(b'{"a":1,"b":2}', rules, Want())
    assert (json.loads(upstream(asked)), asked.dropped) == (goes_on, told)


def test_an_unknown_field_may_be_refused() -> None:
    rules = FieldRules(target="/x", fields=Fields(plain=frozenset("a"), unknown=Verb.REFUSE))
    with pytest.raises(BadRequest, match='"b" is not known on /x'):
        read_body(b'{"a":1,"b":2}', rules, Want())


@given(st.lists(st.text(min_size=1, max_size=80), max_size=60, unique_by=str.casefold))
def test_names_are_told_so_that_a_header_can_carry_them(names: list[str]) -> None:
    raw = json.dumps(dict.fromkeys(names, 1), ensure_ascii=False).encode("utf-8", "replace")
    try:
        asked = read_body(raw, FieldRules(target="/x", fields=Fields(unknown=Verb.DROP)), Want())
    except HiveError:
        return
    told = ", ".join(asked.dropped)
    assert told.isascii()
    assert told.isprintable() or not told
    assert len(told) <= 21 * 62
    assert len(asked.dropped) == min(len(names), 21)


# within an object -----------------------------------------------------------------------------------------------------

OPTIONS = Rule(
    verb=Verb.TAKE,
    inside=Fields(
        plain=frozenset({"seed"}),
        policed={"num_ctx": Rule(verb=Verb.DROP), "stop": Rule(max_bytes=10)},
        unknown=Verb.DROP,
    ),
)


def test_fields_within_an_object_are_judged_and_told_with_their_path() -> None:
    fields, asked = policed(b'{"options":{"Seed":1,"NUM_CTX":9,"new":2}}', options=OPTIONS)
    assert fields == {"options": {"seed": 1}}
    assert asked.dropped == ("options.num_ctx", "options.new")


@pytest.mark.parametrize(
    "options",
    [
        b'{"seed":1,"seed":2}',
        b'{"seed":1,"SEED":2}',
        b'{"num_ctx":1, "num_ctx":2}',
        b'{"num\\u005fctx":1}',
        b"[]",
        b'"x"',
        b"3",
    ],
)
def test_names_are_unique_within_an_object_too(options: bytes) -> None:
    with pytest.raises(BadRequest):
        policed(b'{"options":%b}' % options, options=OPTIONS)


def test_an_untouched_object_goes_on_as_written() -> None:
    assert upstream(policed(b'{"options":{"seed":1e2}}', options=OPTIONS)[1]) == b'{"options":{"seed":1e2}}'
    assert policed(b'{"options":null}', options=OPTIONS)[0] == {"options": None}


def test_a_closed_object_may_have_an_open_field() -> None:
    inside = Fields(plain=frozenset({"enable_thinking"}), unknown=Verb.DROP)
    rule = Rule(verb=Verb.DROP, inside=inside)
    fields, asked = policed(b'{"k":{"enable_thinking":false,"chat_template":"x"}}', k=rule)
    assert (fields, asked.dropped) == ({"k": {"enable_thinking": False}}, ("k.chat_template",))
    assert policed(b'{"k":{"chat_template":"x"}}', k=rule)[0] == {}
    assert policed(b'{"k":"x"}', k=rule)[1].dropped == ("k",)


# what Hive adds -------------------------------------------------------------------------------------------------------

LIMITED = FieldRules(
    target="/x",
    fields=Fields(
        policed={"max_tokens": Rule(verb=Verb.CLAMP, high=100), "n_predict": Rule(verb=Verb.CLAMP, high=100)}
    ),
    tokens=("max_tokens", "n_predict"),
    max_tokens=100,
)


@pytest.mark.parametrize(
    ("raw", "goes_on", "tokens"),
    [
        (b"{}", {"max_tokens": 100}, 100),
        (b'{"max_tokens":null}', {"max_tokens": 100}, 100),
        (b'{"max_tokens":7}', {"max_tokens": 7}, 7),
        (b'{"max_tokens":1000}', {"max_tokens": 100}, 100),
        (b'{"max_tokens":-1}', {"max_tokens": 100}, 100),
        (b'{"n_predict":7}', {"n_predict": 7, "max_tokens": 7}, 7),
        (b'{"n_predict":9,"max_tokens":1000}', {"n_predict": 9, "max_tokens": 100}, 100),
    ],
)
def test_no_more_tokens_than_the_tier_allows(raw: bytes, goes_on: dict[str, int], tokens: int) -> None:
    asked = read_body(raw, LIMITED, Want())
    assert (json.loads(upstream(asked)), asked.max_tokens) == (goes_on, tokens)


def test_a_limit_within_an_object_is_put_there() -> None:
    inside = Fields(policed={"num_predict": Rule(verb=Verb.CLAMP, high=100)})
    rules = FieldRules(
        target="/x",
        fields=Fields(policed={"options": Rule(verb=Verb.TAKE, inside=inside)}),
        tokens=("num_predict",),
        tokens_in="options",
        max_tokens=100,
    )
    for raw, options, tokens in [
        (b"{}", {"num_predict": 100}, 100),
        (b'{"options":null}', {"num_predict": 100}, 100),
        (b'{"options":{"seed":1}}', {"seed": 1, "num_predict": 100}, 100),
        (b'{"options":{"num_predict":-2}}', {"num_predict": 100}, 100),
        (b'{"options":{"num_predict":3}}', {"num_predict": 3}, 3),
    ]:
        asked = read_body(raw, rules, Want())
        assert (json.loads(upstream(asked))["options"], asked.max_tokens) == (options, tokens)


def test_where_the_server_has_a_small_default_none_is_put_in() -> None:
    asked = read_body(b"{}", LIMITED, Want(limit_absent=False))
    assert (upstream(asked), asked.max_tokens) == (b"{}", None)
    assert read_body(b'{"max_tokens":1000}', LIMITED, Want(limit_absent=False)).max_tokens == 100


def test_without_a_limit_what_is_asked_is_known_all_the_same() -> None:
    rules = FieldRules(target="/x", fields=Fields(), tokens=("max_tokens",))
    assert read_body(b'{"max_tokens":12}', rules, Want()).max_tokens == 12
    assert read_body(b'{"max_tokens":-1}', rules, Want()).max_tokens is None
    assert upstream(read_body(b"{}", rules, Want())) == b"{}"


def test_hive_s_own_fields_stand_over_the_client_s_and_that_is_told() -> None:
    want = Want(inject=(("cache_salt", b'"s"'), ("priority", b"5"), ("id_slot", b"1")))
    fields, asked = policed(b'{"cache_salt":"mine","priority":-9}', want, priority=Rule(verb=Verb.DROP))
    assert fields == {"cache_salt": "s", "priority": 5, "id_slot": 1}
    assert sorted(asked.dropped) == ["cache_salt", "priority"]


@pytest.mark.parametrize(
    ("raw", "options", "added"),
    [
        (b'{"stream":true}', {"include_usage": True}, True),
        (b'{"stream":true,"stream_options":null}', {"include_usage": True}, True),
        (b'{"stream":true,"stream_options":{"include_usage":false,"a":1}}', {"include_usage": True, "a": 1}, True),
        (b'{"stream":true,"stream_options":{"include_usage":true}}', {"include_usage": True}, False),
        (b'{"stream":true,"stream_options":{"INCLUDE_USAGE":true}}', None, False),
        (b'{"stream":false}', None, False),
    ],
)
def test_the_usage_of_a_stream_is_asked_for(raw: bytes, options: dict[str, object] | None, added: bool) -> None:
    asked = read_body(raw, OPEN, Want(ask_usage=True))
    assert asked.usage_added is added
    if options is not None:
        assert json.loads(upstream(asked))["stream_options"] == options


def test_an_old_spelling_of_the_model_is_read_and_set_right() -> None:
    rules = FieldRules(target="/api/show", fields=Fields(), alias="name")
    for raw, model in [
        (b'{"name":"m"}', "m"),
        (b'{"name":"m","model":"n"}', "n"),
        (b'{"name":"m","model":""}', "m"),
        (b'{"NAME":"m"}', "m"),
    ]:
        asked = read_body(raw, rules, Want(), Opening("d"))
        assert (asked.model, json.loads(upstream(asked))) == (model, {"model": model})


def test_a_body_of_many_small_parts_is_heavy_long_before_it_is_long() -> None:
    text = b'{"messages":[{"role":"user","content":"%b"}]}'
    assert not body.is_heavy(text % (b"x" * 250_000))
    assert body.is_heavy(text % (b"x" * 270_000))
    assert body.is_heavy(b'{"messages":[%b]}' % b",".join([b'{"content":[{}]}'] * 1500))
    assert body.is_heavy(b"[%b]" % b",".join([b"[]"] * 12_000))


# --- what the backend passes over -------------------------------------------------------------------------------------

OLLAMA = spec_of("ollama").requests.passed_over


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        ("/v1/chat/completions", b'"n":2'),
        ("/v1/chat/completions", b'"audio":{"voice":"a","format":"mp3"}'),
        ("/v1/completions", b'"n":3'),
        ("/v1/completions", b'"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"object"}}}'),
        ("/v1/messages", b'"output_config":{"effort":"low","format":{"type":"json_schema","schema":{}}}'),
        ("/v1/messages", b'"output_format":{"type":"json_schema","schema":{}}'),
    ],
)
def test_what_would_give_another_shape_is_refused(endpoint: str, field: bytes) -> None:
    """Ollama passed over them: one answer for two, and text where JSON by a schema was asked for."""
    rules = FieldTable(Settings()).rules(endpoint, Tier.HIGH)
    with pytest.raises(NotSupported, match="cannot be said to this backend"):
        read_body(b'{"model":"m",%b}' % field, rules, Want(passed_over=OLLAMA.get(endpoint, ())))


@pytest.mark.parametrize(
    ("endpoint", "fields", "told"),
    [
        ("/v1/chat/completions", b'"tool_choice":"required","logit_bias":{"5":1}', ("tool_choice", "logit_bias")),
        ("/v1/chat/completions", b'"tool_choice":{"type":"function","function":{"name":"f"}}', ("tool_choice",)),
        ("/v1/chat/completions", b'"parallel_tool_calls":false', ("parallel_tool_calls",)),
        ("/v1/chat/completions", b'"functions":[{"name":"f"}],"function_call":"auto"', ("functions",)),
        ("/v1/chat/completions", b'"n":1,"tool_choice":"auto","parallel_tool_calls":true,"logit_bias":{}', ()),
        ("/v1/chat/completions", b'"n":null,"n_keep":4', ()),
        ("/v1/completions", b'"best_of":2', ("best_of",)),
        ("/v1/completions", b'"best_of":1,"response_format":{"type":"text"}', ()),
        ("/v1/messages", b'"tool_choice":{"type":"tool","name":"f"}', ("tool_choice",)),
        ("/v1/messages", b'"tool_choice":{"type":"auto"},"output_config":{"effort":"low"}', ()),
    ],
)
def test_what_only_changes_the_words_goes_on_and_is_told(endpoint: str, fields: bytes, told: tuple[str, ...]) -> None:
    rules = FieldTable(Settings()).rules(endpoint, Tier.HIGH)
    asked = read_body(b'{"model":"m",%b}' % fields, rules, Want(passed_over=OLLAMA.get(endpoint, ())))
    assert asked.ignored == told
    assert msgspec.json.decode(b"".join(asked.upstream)).items() >= msgspec.json.decode(b"{%b}" % fields).items()
    assert asked.changes() == (b"x-hive-ignored: %b\r\n" % ", ".join(told).encode() if told else b"")


def test_every_field_of_the_table_is_one_of_its_endpoint() -> None:
    """A row for a field that is dropped or refused anyway would never be reached."""
    for kind, spec in SPECS.items():
        for endpoint, overs in spec.requests.passed_over.items():
            fields = FieldTable(Settings()).rules(endpoint, Tier.HIGH).fields
            for over in overs:
                name = over.field
                rule = fields.policed.get(name)
                assert name in fields.plain or (rule is not None and rule.verb is not Verb.REFUSE), (kind, over.field)


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [
        (b'{"max_completion_tokens":5}', {"max_completion_tokens": 5, "max_tokens": 5}),
        (b'{"max_completion_tokens":5,"max_tokens":null}', {"max_completion_tokens": 5, "max_tokens": 5}),
        (b'{"max_tokens":7}', {"max_tokens": 7}),
        (b"{}", {}),
    ],
)
def test_a_limit_by_another_name_reaches_a_server_that_knows_one(text: bytes, goes_on: dict[str, int]) -> None:
    """Before Ollama `max_completion_tokens` had no effect for a tier without a limit: asked for 5, it made 200."""
    free = Fields(plain=frozenset({"max_tokens", "max_completion_tokens"}))
    rules = FieldRules(target="/x", fields=free, tokens=("max_tokens", "max_completion_tokens"))
    asked = read_body(text, rules, Want())
    assert msgspec.json.decode(asked.upstream[0]) == goes_on
    assert asked.max_tokens == max(goes_on.values(), default=None)
    kept = read_body(text, rules, Want(limit_by_first_name=False))
    assert msgspec.json.decode(kept.upstream[0]) == msgspec.json.decode(text), "OpenAI refuses both of them at once"
