"""The refusal of a body that is too long, with the setting that would take it. Pure."""

from __future__ import annotations

from hive.errors import TooLarge

BODY_SETTING = "[proxy] body_max_bytes"
FORM_SETTING = "[proxy] upload_max_mb"

_MIB = 1 << 20


def size(length: int) -> str:
    """Bytes as people count them: in MiB from one on.

    >>> size(60_000_069), size(16 << 20), size(1000)
    ('57.2 MiB', '16 MiB', '1000 bytes')
    """
    if length < _MIB:
        return f"{length} bytes"
    return f"{length / _MIB:.1f}".removesuffix(".0") + " MiB"


def too_large(what: str, most: int, setting: str, *, length: int | None = None) -> TooLarge:
    """The refusal of a body of `length` bytes, None where its length is not told. `most`: 0 where none is taken.

    >>> too_large("body", 16 << 20, BODY_SETTING, length=60_000_069).message
    'a body of 57.2 MiB exceeds 16 MiB ([proxy] body_max_bytes)'
    >>> too_large("body", 16 << 20, BODY_SETTING, length=(16 << 20) + 1).message
    'a body of 16777217 bytes exceeds 16777216 bytes ([proxy] body_max_bytes)'
    >>> too_large("form", 25 << 20, FORM_SETTING).message
    'the form exceeds 25 MiB ([proxy] upload_max_mb)'
    """
    if not most:
        return TooLarge(f"no {what} is taken here")
    if length is None:
        return TooLarge(f"the {what} exceeds {size(most)} ({setting})")
    is_near = size(length) == size(most)
    told = (f"{length} bytes", f"{most} bytes") if is_near else (size(length), size(most))
    return TooLarge(f"a {what} of {told[0]} exceeds {told[1]} ({setting})")
