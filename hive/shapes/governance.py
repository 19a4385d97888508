"""The API's answers about governance, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta


class SignerView(TypedDict):
    """Somebody whose word counts."""

    name: str
    public_key: Annotated[str, Meta(description="ed25519: and base64.")]
    key_id: Annotated[str, Meta(description="What a signature names it by.")]


class OperationRule(TypedDict):
    """The rule of one operation. A threshold of 0 without an HMAC: the caller's role is enough."""

    operation: str
    threshold: int
    of: list[str]
    hmac: Annotated[bool, Meta(description="The word of the holder of the HMAC key is enough.")]


class GovernanceView(TypedDict):
    """The rules of this box: whose word is needed for what."""

    box: Annotated[str, Meta(description="What operation tokens name this box by.")]
    governed: Annotated[bool, Meta(description="False: there are no rules, and roles alone decide.")]
    file: str
    broken: Annotated[str, Meta(description="Why the rules cannot be read: then nothing governed is done; else empty.")]
    signers: list[SignerView]
    rules: Annotated[list[OperationRule], Meta(description="Of every operation there is.")]
