"""The opening handshake of a WebSocket: what asks for one, and the one answer that opens it."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest
from hive.wire.heads import BadResponse
from hive.wire.http1 import Request
from hive.wire.websocket import Handshake, is_asked, read_handshake

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""Both from RFC 6455 §1.3."""
FIELDS = {
    b"host": b"h",
    b"upgrade": b"websocket",
    b"connection": b"keep-alive, Upgrade",
    b"sec-websocket-key": KEY,
    b"sec-websocket-version": b"13",
}
LINES = [b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: " + ACCEPT]
OFFER = Handshake(KEY, (b"chat", b"superchat"), (b"permessage-deflate; client_max_window_bits", b"x-other"))


def request(*more: tuple[bytes, bytes], method: bytes = b"GET", v11: bool = True, **changed: bytes | None) -> Request:
    """A right one, but for the fields that are `changed` (None: left out) or there once `more`."""
    fields = FIELDS | {name.replace("_", "-").encode(): value for name, value in changed.items()}
    kept = [(name, value) for name, value in fields.items() if value is not None]
    return Request(method, b"/", [*kept, *more], chunks=v11)


def head(*lines: bytes, status: bytes = b"HTTP/1.1 101 Switching Protocols") -> bytes:
    return b"\r\n".join([status, *lines, b"", b""])


def test_a_right_request_is_read_with_what_it_offers() -> None:
    offers = [(b"sec-websocket-protocol", b"chat, superchat"), (b"sec-websocket-extensions", b"x-one; a=1")]
    handshake = read_handshake(request(*offers, (b"sec-websocket-extensions", b"x-two")))
    assert handshake == Handshake(KEY, (b"chat", b"superchat"), (b"x-one; a=1", b"x-two"))
    assert handshake.request_fields() == (
        b"upgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-protocol: chat, superchat\r\nsec-websocket-extensions: x-one; a=1, x-two\r\n"
    )


@pytest.mark.parametrize(
    "other",
    [
        request(upgrade=None),
        request(upgrade=b"h2c"),
        request(upgrade=b"websocket, h2c"),
        request((b"upgrade", b"h2c")),
        request(connection=b"close"),
        request(connection=None),
        request(method=b"POST"),
        request(v11=False),
    ],
)
def test_any_other_upgrade_is_an_offer_that_nobody_must_take(other: Request) -> None:
    assert not is_asked(other)
    assert read_handshake(other) is None


@pytest.mark.parametrize(
    "wrong",
    [
        request(sec_websocket_key=None),
        request((b"sec-websocket-key", KEY)),
        request(sec_websocket_key=b"c2hvcnQ="),
        request(sec_websocket_key=KEY[:-3] + b"R=="),
        request(sec_websocket_key=b"x" * 24),
        request(sec_websocket_version=b"8"),
        request(sec_websocket_version=None),
        request((b"sec-websocket-version", b"8")),
    ],
)
def test_a_websocket_asked_for_wrongly_is_refused(wrong: Request) -> None:
    assert is_asked(wrong)
    with pytest.raises(BadRequest):
        read_handshake(wrong)


def test_the_right_answer_is_the_rfcs_example() -> None:
    own, fields = Handshake(KEY).check(head(*LINES, b"Set-Cookie: a=b"))
    assert own == b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: " + ACCEPT + b"\r\n"
    assert (b"set-cookie", b"a=b") in fields


def test_of_what_was_offered_the_answer_may_choose() -> None:
    chosen = [b"Sec-WebSocket-Protocol: superchat", b"Sec-WebSocket-Extensions: permessage-deflate; x=10"]
    own, _ = OFFER.check(head(*LINES, *chosen))
    assert b"sec-websocket-protocol: superchat\r\n" in own
    assert b"sec-websocket-extensions: permessage-deflate; x=10\r\n" in own


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (head(*LINES, status=b"HTTP/1.1 200 OK"), "200, not 101"),
        (head(*LINES, status=b"HTTP/1.1 100 Continue"), "100, not 101"),
        (head(*LINES, status=b"HTTP/1.0 101 Switching Protocols"), "not 101"),
        (head(*LINES, status=b"HTTP/1.1  101 Switching"), "malformed"),
        (head(*LINES[:2]), "wrong Sec-WebSocket-Accept"),
        (head(*LINES, LINES[2]), "wrong Sec-WebSocket-Accept"),
        (head(*LINES[:2], b"Sec-WebSocket-Accept: " + ACCEPT.lower()), "wrong Sec-WebSocket-Accept"),
        (head(*LINES[1:]), "does not say|malformed"),
        (head(LINES[0], LINES[2]), "does not say|malformed"),
        (head(b"Upgrade: h2c", *LINES[1:]), "does not say"),
        (head(*LINES, b"Upgrade: h2c"), "does not say"),
        (head(*LINES, b"Content-Length: 0"), "no body"),
        (head(*LINES, b"Transfer-Encoding: chunked"), "no body|malformed"),
        (head(*LINES, b"Sec-WebSocket-Protocol: other"), "subprotocol"),
        (head(*LINES, b"Sec-WebSocket-Protocol: chat", b"Sec-WebSocket-Protocol: chat"), "subprotocol"),
        (head(*LINES, b"Sec-WebSocket-Protocol: chat, superchat"), "subprotocol"),
        (head(*LINES, b"Sec-WebSocket-Extensions: x-unoffered"), "extension"),
        (head(*LINES, *[b"x: y"] * 200), "fields"),
    ],
)
def test_any_other_answer_opens_nothing(answer: bytes, why: str) -> None:
    with pytest.raises(BadResponse, match=why):
        OFFER.check(answer)


@given(st.binary(max_size=60))
def test_no_junk_opens_a_websocket(junk: bytes) -> None:
    with pytest.raises(BadResponse):
        Handshake(KEY).check(junk + b"\r\n\r\n")


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_the_proof_of_one_key_is_no_proof_of_another(one: bytes, another: bytes) -> None:
    proofs = {Handshake(base64.b64encode(nonce)).accept for nonce in (one, another)}
    assert len(proofs) == len({one, another})
