"""Tokens: what their derivation depends on, and the form they have on a command line and in a URL."""

from __future__ import annotations

import re

from hive.agents.tokens import TokenKind, derive, digest

KEY = bytes(range(32))


def test_a_token_changes_with_key_agent_kind_and_serial() -> None:
    tokens = {
        derive(key, agent, kind, serial)
        for key in (KEY, bytes(32))
        for agent in ("a1", "a2")
        for kind in TokenKind
        for serial in (1, 2)
    }
    assert len(tokens) == 16


def test_the_same_question_has_the_same_answer() -> None:
    assert derive(KEY, "a1", TokenKind.MODEL, 1) == derive(KEY, "a1", TokenKind.MODEL, 1)


def test_a_token_needs_no_quoting_anywhere() -> None:
    for serial in range(200):
        assert re.fullmatch(r"hi_[A-Za-z0-9_-]{43}", derive(KEY, "a1", TokenKind.INGRESS, serial))


def test_a_digest_is_sha256_in_hex() -> None:
    # printf abc | sha256sum
    assert digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
