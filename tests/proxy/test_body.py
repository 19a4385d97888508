"""What a body asks: rebuilt, never the client's bytes, and nothing of it changed that nobody polices."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest
from hive.proxy import body

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(alphabet="abcdefgh_", min_size=1, max_size=8)


def read(raw: bytes, default_model: str = "") -> body.Asked:
    return body.read(raw, default_model=default_model, streams=True)


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.sampled_from([None, 1, 4]), st.booleans())
def test_what_nobody_polices_goes_on_as_it_was(fields: dict[str, object], indent: int | None, plain: bool) -> None:
    raw = json.dumps(fields, indent=indent, ensure_ascii=not plain).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    assert json.loads(read(raw).upstream) == json.loads(raw)


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
    asked = read(b'{"MODEL":"m","\xe2\x84\xaaeep_alive":-1,"Stream":false}')
    assert json.loads(asked.upstream) == {"model": "m", "keep_alive": -1, "stream": False}
    assert (asked.model, asked.stream) == ("m", False)


@pytest.mark.parametrize("number", ["1e2", "1.0", "123456789012345678901234567890", "-0.0", "1E+2"])
def test_numbers_stay_as_written(number: str) -> None:
    assert number.encode() in read(b'{"temperature":%b,"model":"m"}' % number.encode()).upstream


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
        b'{"stream_options":[]}',
    ],
)
def test_anything_else_is_a_bad_request(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        read(raw)


def test_the_default_model_stands_in_only_where_none_is_named() -> None:
    assert json.loads(read(b'{"n":1}', "m").upstream) == {"n": 1, "model": "m"}
    assert read(b'{"model":"other"}', "m").model == "other"
    assert read(b"{}").upstream == b"{}"
