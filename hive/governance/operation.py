"""An operation as its signers see it: the payload of an envelope."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hive.errors import OpTokenExpired, OpTokenInvalid, UsageError, did_you_mean
from hive.governance.exact_json import members, read_object

HOLDS_MAX_S = 300
VERSION = 1
_MEMBERS = frozenset({"v", "operation", "audience", "params", "issuedAt", "expiresAt", "nonce"})
_NONCE = re.compile("[0-9a-f]{32}")


class OperationParam(NamedTuple):
    """A member of params. `default`: what an order has that does not say; it is signed only where `is_signed`."""

    kind: str
    is_needed: bool = False
    default: Any = None
    is_signed: bool = False


TEXT, WHOLE, FLAG, NUMBER = "text", "a whole number", "true or false", "a number or null"
_MODEL = {"modelId": OperationParam(TEXT, True)}
_LEASE = {
    "vramMB": OperationParam(WHOLE, True),
    "gpus": OperationParam(WHOLE, default=1, is_signed=True),
    "band": OperationParam(TEXT, default="normal", is_signed=True),
    "preemptible": OperationParam(FLAG, default=False, is_signed=True),
    "all": OperationParam(FLAG, default=False, is_signed=True),
    "maxS": OperationParam(NUMBER, is_signed=True),
}
_ADAPTER = {"name": OperationParam(TEXT, True)}
PARAMS: Mapping[str, Mapping[str, OperationParam]] = {
    "model-load": {
        **_MODEL,
        "quantization": OperationParam(TEXT),
        "maxContextLength": OperationParam(WHOLE),
        "gpuMemoryBudgetMB": OperationParam(WHOLE),
        "evictModel": OperationParam(TEXT),
    },
    "model-unload": {**_MODEL, "force": OperationParam(FLAG, default=False)},
    "cache-flush": {
        "scope": OperationParam(TEXT, True),
        "tenantId": OperationParam(TEXT),
        "modelId": OperationParam(TEXT),
        "tag": OperationParam(TEXT),
    },
    "model-pin": _MODEL,
    "model-unpin": _MODEL,
    "backend-switch": {"backend": OperationParam(TEXT, True)},
    "lease-run": _LEASE,
    "lease-take": _LEASE,
    "lease-end": {"id": OperationParam(TEXT, True)},
    "adapter-pull": {
        "path": OperationParam(TEXT, True),
        "base": OperationParam(TEXT, True),
        "name": OperationParam(TEXT),
    },
    "adapter-load": {**_ADAPTER, "digest": OperationParam(TEXT)},
    "adapter-unload": _ADAPTER,
    "adapter-remove": {**_ADAPTER, "digest": OperationParam(TEXT)},
    "adapter-trust": {"keyId": OperationParam(TEXT, True)},
}
"""Operation → the members that its params may have."""
OPERATIONS = tuple(PARAMS)
"""All that rules may be about."""


class Operation(NamedTuple):
    """`audience`: the id of the box it is for. Times in whole Unix seconds. `nonce`: 32 hex digits."""

    operation: str
    audience: str
    params: dict[str, Any]
    issued_at: int
    expires_at: int
    nonce: str

    def as_json(self) -> bytes:
        found = {
            "v": VERSION,
            "operation": self.operation,
            "audience": self.audience,
            "params": self.params,
            "issuedAt": self.issued_at,
            "expiresAt": self.expires_at,
            "nonce": self.nonce,
        }
        return json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()

    def check_time(self, now: float) -> None:
        """Raises OpTokenExpired before `issued_at` and after `expires_at`.

        >>> token = Operation("model-load", "box", {}, 1000, 1300, "")
        >>> token.check_time(1000.0), token.check_time(1300.0)
        (None, None)
        >>> token.check_time(1300.5)
        Traceback (most recent call last):
        hive.errors.OpTokenExpired: the operation token held until 1 s ago
        """
        if now < self.issued_at:
            raise OpTokenExpired(
                f"the operation token holds in {self.issued_at - now:.0f} s, not before", hint="are the clocks right?"
            )
        if now > self.expires_at:
            raise OpTokenExpired(f"the operation token held until {max(1, round(now - self.expires_at))} s ago")


def operation_of(payload: bytes) -> Operation:
    """The operation in a payload. Raises OpTokenInvalid."""
    found = read_object(payload, "the payload")
    members(found, _MEMBERS, "the payload")
    whole = [found[name] for name in ("v", "issuedAt", "expiresAt")]
    words = [found[name] for name in ("operation", "audience", "nonce")]
    if any(type(each) is not int for each in whole) or any(type(each) is not str for each in words):
        raise OpTokenInvalid("v, issuedAt and expiresAt are whole numbers, operation, audience and nonce are text")
    if found["v"] != VERSION:
        raise OpTokenInvalid(f"version {str(found['v'])[:20]} of operation tokens is not known here")
    if not isinstance(found["params"], dict):
        raise OpTokenInvalid("params is no object")
    if not _NONCE.fullmatch(found["nonce"]):
        raise OpTokenInvalid("the nonce is not 32 hex digits")
    if not 0 < found["expiresAt"] - found["issuedAt"] <= HOLDS_MAX_S:
        raise OpTokenInvalid(f"an operation token holds for {HOLDS_MAX_S} s at most")
    return Operation(
        found["operation"],
        found["audience"],
        found["params"],
        found["issuedAt"],
        found["expiresAt"],
        found["nonce"],
    )


def params_of(operation: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The params of an order, from words as a person types them. Raises UsageError that names what is wrong.

    What an order leaves out where it is the default is left out here too: both are compared member by member.

    >>> params_of("model-unload", {"modelId": "m", "force": "false"})
    {'modelId': 'm'}
    >>> params_of("lease-take", {"vramMB": "800"})
    {'vramMB': 800, 'gpus': 1, 'band': 'normal', 'preemptible': False, 'all': False, 'maxS': None}
    >>> params_of("model-load", {"modelID": "m"})
    Traceback (most recent call last):
    hive.errors.UsageError: model-load has no 'modelID'
    """
    known = PARAMS.get(operation)
    if known is None:
        hint = did_you_mean(operation, OPERATIONS) or f"there are {', '.join(OPERATIONS)}"
        raise UsageError(f"there is no operation {operation[:40]!r}", hint=hint)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"it has {', '.join(known)}"
            raise UsageError(f"{operation} has no {name[:40]!r}", hint=hint)
    found: dict[str, Any] = {}
    for name, param in known.items():
        value = _value(name, given[name], param.kind) if name in given else param.default
        if name not in given and param.is_needed:
            raise UsageError(f"{operation} needs {name}={param.kind.upper().replace(' ', '_')}")
        if param.is_signed or (name in given and (param.is_needed or value != param.default)):
            found[name] = value
    return found


def _value(name: str, text: str, kind: str) -> Any:
    if kind == TEXT and text:
        return text
    if kind == WHOLE and re.fullmatch("[0-9]{1,15}", text):
        return int(text)
    if kind == FLAG and text in ("true", "false"):
        return text == "true"
    if kind == NUMBER and text == "null":
        return None
    if kind == NUMBER and re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", text):
        return float(text)
    raise UsageError(f"{name}: expected {kind}, found {text[:40]!r}")
