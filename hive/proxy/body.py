"""What a body asks: the top level decoded as name → raw JSON text, checked, and rebuilt. Pure.

Ollama decodes with Go's encoding/json: names match without regard to case, the last of equal ones wins, even with
U+212A KELVIN SIGN for k. So names are folded and must be unique, and never the client's bytes go upstream.
Values nobody polices go on exactly as written (`1e2` stays `1e2`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from hive.errors import BadRequest

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_text = msgspec.json.Decoder(str).decode
_bool = msgspec.json.Decoder(bool).decode
_any = msgspec.json.Decoder(dict[str, Any]).decode
MAX_MODEL_NAME = 512
"""Characters."""


class Asked(msgspec.Struct, frozen=True):
    """One body: the model it names, whether it wants a stream, and what goes upstream.

    `usage_added`: the usage of the stream was asked for by Hive, not by the client, who must not see it.
    """

    model: str
    stream: bool
    upstream: bytes
    usage_added: bool = False


def read(body: bytes, *, default_model: str, streams: bool, ask_usage: bool = False) -> Asked:
    """Reads and rebuilds a JSON body. `streams`: what an absent `stream` means. Raises BadRequest.

    `ask_usage`: a stream whose client did not ask for its usage asks for it all the same.

    >>> read(b'{"messages": [], "temperature": 1e2}', default_model="m", streams=False).upstream
    b'{"messages":[],"temperature":1e2,"model":"m"}'
    >>> read(b'{"model":"small","MODEL":"huge"}', default_model="", streams=False)
    Traceback (most recent call last):
    hive.errors.BadRequest: the body names "model" more than once
    """
    try:
        body.decode()
        fields = _decode(body)
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    rebuilt = _encode(fields)
    if len(rebuilt) != len(body):  # equal lengths leave no room for a second field of a name, nor for white space
        _check_unique(body, rebuilt)
    folded = _fold(fields)
    model, stream = _model(folded, default_model), _stream(folded, streams)
    if model and "model" not in folded:
        folded = {**folded, "model": msgspec.Raw(_encode(model))}
    added = None
    if ask_usage and stream and (added := _with_usage(folded.get("stream_options"))) is not None:
        folded = {**folded, "stream_options": added}
    return Asked(model, stream, rebuilt if folded is fields else _encode(folded), added is not None)


def _with_usage(raw: msgspec.Raw | None) -> msgspec.Raw | None:
    """`stream_options` with `include_usage` set; None where the client set it."""
    options = {} if raw is None or bytes(raw) == b"null" else _decode(raw)
    if bytes(options.get("include_usage", b"false")) == b"true":
        return None
    return msgspec.Raw(_encode({**options, "include_usage": True}))


def _check_unique(body: bytes, rebuilt: bytes) -> None:
    """A dict keeps the last of equal names, so a body with repeated names is longer than what it decodes to."""
    if len(msgspec.json.format(body, indent=-1)) != len(msgspec.json.format(rebuilt, indent=-1)):
        raise BadRequest("the body has a field twice, or a field name written with escapes")


def _fold(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The same dict where every name is folded already (the rule), else a new one. Raises BadRequest on a clash."""
    if all(name.isascii() and name == name.lower() for name in fields):
        return fields
    folded: dict[str, msgspec.Raw] = {}
    for name, value in fields.items():
        plain = name.casefold()
        if plain in folded:
            raise BadRequest(f'the body names "{plain[:60]}" more than once')
        folded[plain] = value
    return folded


def _model(fields: dict[str, msgspec.Raw], default: str) -> str:
    raw = fields.get("model")
    if raw is None:
        return default
    try:
        model = _text(raw)
    except msgspec.MsgspecError:
        raise BadRequest('"model" must be a string') from None
    if len(model) > MAX_MODEL_NAME:
        raise BadRequest(f'"model" is longer than {MAX_MODEL_NAME} characters')
    return model


def _stream(fields: dict[str, msgspec.Raw], default: bool) -> bool:
    raw = fields.get("stream")
    try:
        options = fields.get("stream_options")
        if options is not None and bytes(options) != b"null":
            _any(options)
        return default if raw is None or bytes(raw) == b"null" else _bool(raw)
    except msgspec.MsgspecError:
        raise BadRequest('"stream" must be true or false, "stream_options" an object') from None
