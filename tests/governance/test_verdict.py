"""The verdict on an operation token: each way in which one can be wrong, and the order in which that is found."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import (
    ClockWentBack,
    HiveError,
    OpTokenExpired,
    OpTokenInvalid,
    OpTokenMismatch,
    OpTokenRefused,
    OpTokenThreshold,
)
from hive.governance.envelope import TOKEN_MAX_BYTES, Signature, TokenEnvelope, pae
from hive.governance.rules import SignRule
from hive.governance.verdict import AskedOperation
from tests.governance.signing import ASKED, BOX, HMAC_KEY, KEYS, LOAD, NOW, hmac_token, judged, operation, signed, token


def test_two_of_three_signers_approve() -> None:
    verdict = judged(token("ben", "ann"))
    assert (verdict.by, verdict.expires_at) == ("ann, ben", NOW + 300)
    assert judged(token("ann", "ben", "cy")).by == "ann, ben, cy"


def test_every_bit_of_a_token_matters() -> None:
    text = token("ann", "ben").encode()
    assert judged(text.decode())
    for place in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[place] ^= 1 << bit
            with pytest.raises(OpTokenRefused):
                judged(flipped.decode("latin-1"))


def test_every_bit_of_the_envelope_matters() -> None:
    """The same below the outer base64, where a flipped bit leaves readable JSON much more often."""
    text = signed(operation().as_json(), "ann", "ben").as_json()
    assert judged(text.decode())
    for place in range(len(text)):
        for bit in range(7):  # the eighth makes it no ASCII, which is refused before
            flipped = bytearray(text)
            flipped[place] ^= 1 << bit
            with pytest.raises(OpTokenRefused):
                judged(base64.urlsafe_b64encode(flipped).decode().rstrip("="))


def test_one_key_counts_once_however_often_it_signs() -> None:
    once = signed(operation().as_json(), "ann")
    with pytest.raises(OpTokenThreshold, match=r"1 of 2 signatures that count \(ann\)"):
        judged(once._replace(signatures=once.signatures * 16).as_token())


def test_more_than_sixteen_signatures_are_not_looked_at() -> None:
    once = signed(operation().as_json(), "ann", "ben")
    with pytest.raises(OpTokenInvalid, match="16 signatures at most"):
        judged(once._replace(signatures=once.signatures * 9).as_token())


def test_a_key_of_another_rule_does_not_count() -> None:
    with pytest.raises(OpTokenThreshold, match=r"1 of 2 .*others who may sign: ben, cy"):
        judged(token("ann", "dee"))


def test_a_key_of_nobody_makes_the_token_invalid() -> None:
    envelope = signed(operation().as_json(), "ann", "ben")
    stranger = Signature("f" * 64, envelope.signatures[0].raw)
    with pytest.raises(OpTokenInvalid, match="nobody has the key"):
        judged(envelope._replace(signatures=(*envelope.signatures, stranger)).as_token())


def test_a_signature_in_the_name_of_another_is_none() -> None:
    envelope = signed(operation().as_json(), "ann", "ben")
    as_cy = envelope.signatures[0]._replace(key_id=KEYS["cy"].public.id)
    with pytest.raises(OpTokenInvalid, match="the signature of cy is not over what is in it"):
        judged(envelope._replace(signatures=(as_cy, envelope.signatures[1])).as_token())


def test_a_signature_over_the_same_bytes_of_another_type_is_none() -> None:
    payload = operation().as_json()
    other = pae("application/vnd.in-toto+json", payload)
    signatures = tuple(Signature(KEYS[name].public.id, KEYS[name].sign(other)) for name in ("ann", "ben"))
    with pytest.raises(OpTokenInvalid, match="signature of ann"):
        judged(TokenEnvelope(payload, signatures).as_token())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"audience": "box-2"}, "for 'box-2', and this box is box-1"),
        ({"operation": "model-unload"}, "for 'model-unload', not for model-load"),
        ({"params": {"modelId": "other"}}, "not what was signed: modelId"),
        ({"params": {**LOAD, "quantization": "q4"}}, "not what was signed: quantization"),
        ({"params": {}}, "not what was signed: modelId"),
    ],
)
def test_a_token_about_something_else_is_a_mismatch(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OpTokenMismatch, match=said):
        judged(token("ann", "ben", **changes))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"n": 5}, {"n": 5.0}, True),
        ({"n": 1}, {"n": True}, False),
        ({"n": 0}, {"n": False}, False),
        ({"n": None}, {}, False),
        ({"n": "1"}, {"n": 1}, False),
        ({"n": [1, 2]}, {"n": [2, 1]}, False),
        ({"n": {"a": 1, "b": 2}}, {"n": {"b": 2, "a": 1}}, True),
        ({"n": 2**53 + 1}, {"n": float(2**53)}, False),
        ({"n": "é"}, {"n": "e\u0301"}, False),
        ({"N": 1}, {"n": 1}, False),
    ],
)
def test_params_are_compared_as_json_means_them(one: dict[str, Any], other: dict[str, Any], is_same: bool) -> None:
    asked = AskedOperation("model-load", other, BOX)
    text = token("ann", "ben", params=one)
    if is_same:
        assert judged(text, asked=asked)
        return
    with pytest.raises(OpTokenMismatch):
        judged(text, asked=asked)


@pytest.mark.parametrize(
    ("now", "holds"),
    [
        (NOW - 1, False),
        (NOW - 0.001, False),
        (NOW, True),
        (NOW + 300, True),
        (NOW + 300.001, False),
        (NOW + 301, False),
    ],
)
def test_a_token_holds_to_the_second(now: float, holds: bool) -> None:
    text = token("ann", "ben")
    if holds:
        assert judged(text, now=now)
        return
    with pytest.raises(OpTokenExpired):
        judged(text, now=now)


@pytest.mark.parametrize("holds_s", [301, 0, -1, 10**12])
def test_a_token_holds_for_five_minutes_at_most(holds_s: int) -> None:
    with pytest.raises(OpTokenInvalid, match="300 s at most"):
        judged(token("ann", "ben", expires_at=NOW + holds_s))


def test_a_clock_that_went_back_is_found_before_the_time() -> None:
    text = token("ann", "ben")
    assert judged(text, now=NOW + 1, mark=NOW + 61)
    with pytest.raises(ClockWentBack, match="61 s behind"):
        judged(text, now=NOW + 1, mark=NOW + 62)


PAYLOAD: dict[str, Any] = json.loads(operation(nonce="0" * 32).as_json())
PAYLOAD_FAULTS: tuple[dict[str, Any], ...] = (
    {"v": 2},
    {"v": True},
    {"v": 1.0},
    {"issuedAt": str(NOW)},
    {"issuedAt": float(NOW)},
    {"expiresAt": None},
    {"params": []},
    {"params": None},
    {"operation": 1},
    {"audience": None},
    {"nonce": "a" * 31},
    {"nonce": "A" * 32},
    {"nonce": "0" * 33},
    {"nonce": 1},
)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"null",
        b'"text"',
        b"{",
        b"\xff",
        b"[" * 5000,
        json.dumps({**PAYLOAD, "more": 1}).encode(),
        json.dumps({name: PAYLOAD[name] for name in PAYLOAD if name != "v"}).encode(),
        *(json.dumps({**PAYLOAD, **changes}).encode() for changes in PAYLOAD_FAULTS),
        json.dumps(PAYLOAD).encode()[:-1] + b',"v":1}',
        json.dumps(PAYLOAD).replace('"modelId":', '"modelId": "x", "modelId":').encode(),
        json.dumps({**PAYLOAD, "params": {"x": float("nan")}}).encode(),
        json.dumps(PAYLOAD).replace('"qwen3-32b"', "1e999").encode(),
    ],
)
def test_a_payload_that_is_no_operation_is_invalid_although_it_is_signed(payload: bytes) -> None:
    with pytest.raises(OpTokenInvalid):
        judged(signed(payload or b" ", "ann", "ben").as_token())


GOOD: dict[str, Any] = json.loads(signed(operation().as_json(), "ann", "ben").as_json())


@pytest.mark.parametrize(
    "envelope",
    [
        {},
        {**GOOD, "more": 1},
        {**GOOD, "payloadType": "application/vnd.in-toto+json"},
        {**GOOD, "payloadType": None},
        {**GOOD, "payload": None},
        {**GOOD, "payload": ""},
        {**GOOD, "payload": GOOD["payload"] + "="},
        {**GOOD, "payload": GOOD["payload"] + "\n"},
        {**GOOD, "signatures": None},
        {**GOOD, "signatures": {}},
        {**GOOD, "signatures": [None]},
        {**GOOD, "signatures": [{}]},
        {**GOOD, "signatures": [{**GOOD["signatures"][0], "keyid": None}]},
        {**GOOD, "signatures": [{**GOOD["signatures"][0], "sig": ""}]},
        {**GOOD, "signatures": [{**GOOD["signatures"][0], "sig": "AAAA"}]},
        {**GOOD, "signatures": [{**GOOD["signatures"][0], "alg": "none"}]},
    ],
)
def test_an_envelope_that_is_none_is_invalid(envelope: dict[str, Any]) -> None:
    with pytest.raises(OpTokenInvalid):
        judged(base64.urlsafe_b64encode(json.dumps(envelope).encode()).decode().rstrip("="))


def test_a_token_without_signatures_is_short_of_all() -> None:
    with pytest.raises(OpTokenThreshold, match="0 of 2"):
        judged(token())


@given(st.text() | st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode().rstrip("=")))
def test_nothing_else_is_a_token(text: str) -> None:
    with pytest.raises(OpTokenInvalid):
        judged(text)


def test_a_token_larger_than_sixteen_kib_is_not_read() -> None:
    text = token("ann", "ben", params={**LOAD, "x": "y" * TOKEN_MAX_BYTES})
    assert len(text) > TOKEN_MAX_BYTES
    with pytest.raises(OpTokenInvalid, match="16384"):
        judged(text)


FAULTS: list[tuple[type[HiveError], dict[str, Any], dict[str, Any]]] = [
    (OpTokenMismatch, {"audience": "box-2"}, {}),
    (ClockWentBack, {}, {"mark": NOW + 1000}),
    (OpTokenExpired, {"issued_at": NOW - 300, "expires_at": NOW - 10}, {}),
]


@pytest.mark.parametrize("first", range(len(FAULTS)))
def test_the_first_fault_in_order_is_the_one_that_is_told(first: int) -> None:
    """Its subject, then the clock, then its time, then signatures and threshold."""
    changes: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for _, of_token, of_box in FAULTS[first:]:
        changes |= of_token
        facts |= of_box
    with pytest.raises(FAULTS[first][0]):
        judged(token("dee", **changes), **facts)


# the original specification's form ------------------------------------------------------------------------------------

BOTH = SignRule(2, ("ann", "ben", "cy"), hmac=True)


@pytest.mark.parametrize("spaced", [False, True])
def test_an_hmac_is_one_authoritys_word_where_the_rule_takes_it(spaced: bool) -> None:
    text = hmac_token(spaced=spaced)
    for as_sent in (text, base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")):
        verdict = judged(as_sent, rule=BOTH, hmac_key=HMAC_KEY)
        assert (verdict.by, verdict.expires_at) == ("hmac", NOW + 300)
        assert verdict.nonce.startswith("hmac:")


def test_an_hmac_never_counts_towards_a_threshold() -> None:
    with pytest.raises(OpTokenThreshold, match="one authority's word"):
        judged(hmac_token(), hmac_key=HMAC_KEY)


def test_without_a_key_no_hmac_is_taken() -> None:
    with pytest.raises(OpTokenInvalid, match="are not taken here"):
        judged(hmac_token(), rule=BOTH)


def test_every_bit_of_an_hmac_token_matters() -> None:
    text = hmac_token().encode()
    for place in range(len(text)):
        for bit in range(8):
            flipped = bytearray(text)
            flipped[place] ^= 1 << bit
            with pytest.raises(OpTokenRefused):
                judged(flipped.decode("latin-1"), rule=BOTH, hmac_key=HMAC_KEY)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"operation": "model-unload"}, OpTokenMismatch),
        ({"modelId": "other"}, OpTokenMismatch),
        ({"modelId": None}, OpTokenMismatch),
        ({"issuedAt": NOW + 2}, OpTokenExpired),
        ({"issuedAt": NOW - 300}, OpTokenExpired),
        ({"issuedAt": "now"}, OpTokenInvalid),
        ({"nonce": "short"}, OpTokenInvalid),
        ({"nonce": "x" * 129}, OpTokenInvalid),
        ({"signers": "ann"}, OpTokenInvalid),
        ({"more": 1}, OpTokenInvalid),
        ({"key": b"another key of the same length.."}, OpTokenInvalid),
    ],
)
def test_an_hmac_token_that_is_wrong_is_refused(changes: dict[str, Any], error: type[HiveError]) -> None:
    with pytest.raises(error):
        judged(hmac_token(**changes), rule=BOTH, hmac_key=HMAC_KEY)


def test_an_hmac_token_is_not_older_than_its_box() -> None:
    """It names no box: of one that lost its database, a token that was used before would be good again."""
    made = ASKED._replace(made_at=NOW + 0.9)
    assert judged(hmac_token(), rule=BOTH, hmac_key=HMAC_KEY, asked=made).by == "hmac"
    with pytest.raises(OpTokenMismatch, match="older than this box"):
        judged(hmac_token(issuedAt=NOW - 1), rule=BOTH, hmac_key=HMAC_KEY, asked=made)


def test_an_hmac_token_with_half_a_character_is_no_json() -> None:
    """`json` takes a lone surrogate and msgspec does not, which ended in a 500."""
    for text in (hmac_token(signers=["\ud800"]), hmac_token(operation="\udfff")):
        with pytest.raises(OpTokenInvalid, match="no JSON"):
            judged(text, rule=BOTH, hmac_key=HMAC_KEY)


def test_signatures_still_approve_what_an_hmac_could() -> None:
    assert judged(token("ann", "ben"), rule=BOTH, hmac_key=HMAC_KEY).by == "ann, ben"
    with pytest.raises(OpTokenThreshold, match="only the holder of the HMAC key"):
        judged(token("ann", "ben"), rule=SignRule(0, hmac=True), hmac_key=HMAC_KEY)
