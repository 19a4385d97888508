"""An agent's two tokens, derived from the box key: nothing secret of an agent has to be stored (design.md §9)."""

from __future__ import annotations

import base64
import hashlib
import hmac
from enum import StrEnum


class TokenKind(StrEnum):
    """`model`: the agent shows it to reach the model. `ingress`: a caller shows it to reach the agent."""

    MODEL = "model"
    INGRESS = "ingress"


PREFIX = {TokenKind.MODEL: "hm_", TokenKind.INGRESS: "hi_"}


def derive(box_key: bytes, agent_id: str, kind: TokenKind, serial: int) -> str:
    """The token: the kind's prefix and 43 characters of urlsafe base64. Another serial makes the old one worthless.

    >>> derive(b"k" * 32, "a1", TokenKind.MODEL, 1)
    'hm_4AD8WqmFyILL1pFjLd97tTa3WT2kIJSpOc_8zTlg6RM'
    """
    code = hmac.digest(box_key, f"{agent_id}|{kind}|{serial}".encode(), "sha256")
    return PREFIX[kind] + base64.urlsafe_b64encode(code).rstrip(b"=").decode()


def digest(token: str) -> str:
    """SHA-256 of the token's ASCII, hex: all the proxy ever gets.

    >>> digest("hm_x")[:16]
    'ff1e530fa5389b52'
    """
    return hashlib.sha256(token.encode("ascii")).hexdigest()
