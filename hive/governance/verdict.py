"""The verdict on an operation token: facts in, the word of its signers out. Pure.

The order of the checks is fixed: what it looks like; audience, operation, params; time; signatures; threshold. Whether
it has been used is asked last, by who writes that down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from hive.errors import ClockWentBack, OpTokenInvalid, OpTokenMismatch, OpTokenThreshold
from hive.governance.envelope import TokenEnvelope, envelope_of, token_object
from hive.governance.exact_json import differences, is_same
from hive.governance.hmac_token import HmacOperation, hmac_operation_of
from hive.governance.operation import Operation, operation_of
from hive.governance.rules import SignRule, SignRules

CLOCK_MAY_GO_BACK_S = 60.0
KEPT_S = 600.0
"""A used nonce is kept so long after its token has expired."""
HMAC = "hmac"
"""The name of an HMAC's word in the audit table."""


class AskedOperation(NamedTuple):
    """The order a token came with, at a box. `made_at`: when that box was made, in Unix seconds."""

    operation: str
    params: Mapping[str, Any]
    box: str
    made_at: float = 0.0


class TokenVerdict(NamedTuple):
    """`by`: who approved, in words. `nonce`: to be written down; `expires_at`: it holds until then, in Unix seconds.
    `signers`: those who were counted; none of an HMAC."""

    by: str
    nonce: str
    expires_at: float
    signers: tuple[str, ...] = ()
    is_hmac: bool = False


def check_clock(now: float, mark: float) -> None:
    """`mark`: the latest time this box has seen. Raises ClockWentBack.

    >>> check_clock(1000.0, 1060.0)
    >>> check_clock(1000.0, 1061.0)
    Traceback (most recent call last):
    hive.errors.ClockWentBack: the clock of this box is 61 s behind a time it has seen
    """
    if now < mark - CLOCK_MAY_GO_BACK_S:
        raise ClockWentBack(f"the clock of this box is {mark - now:.0f} s behind a time it has seen")


def judge(
    token: str,
    asked: AskedOperation,
    rules: SignRules,
    rule: SignRule,
    *,
    now: float,
    mark: float,
    hmac_key: bytes | None,
) -> TokenVerdict:
    """Raises OpTokenInvalid, OpTokenMismatch, OpTokenExpired, OpTokenThreshold, ClockWentBack.

    `hmac_key`: None where the original specification's form is not taken.
    """
    found = token_object(token)
    if "opToken" in found:
        return _judge_hmac(hmac_operation_of(found, _text(token)), asked, rule, now=now, mark=mark, key=hmac_key)
    envelope = envelope_of(found)
    operation = operation_of(envelope.payload)
    check_about(operation, asked)
    check_clock(now, mark)
    operation.check_time(now)
    signers = signers_of(envelope, rules)
    counted = [name for name in signers if name in rule.of]
    if not rule.threshold or len(counted) < rule.threshold:
        raise OpTokenThreshold(short_of(rule, counted))
    return TokenVerdict(", ".join(counted), operation.nonce, float(operation.expires_at), tuple(counted))


def _text(token: str) -> bytes:
    from base64 import urlsafe_b64decode

    return token.encode() if token.startswith("{") else urlsafe_b64decode(token + "=" * (-len(token) % 4))


def check_about(operation: Operation, asked: AskedOperation) -> None:
    """Raises OpTokenMismatch where it is for another box, another operation, or other params."""
    if operation.audience != asked.box:
        raise OpTokenMismatch(f"the operation token is for {operation.audience[:64]!r}, and this box is {asked.box}")
    if operation.operation != asked.operation:
        raise OpTokenMismatch(f"the operation token is for {operation.operation[:40]!r}, not for {asked.operation}")
    if odd := differences(operation.params, dict(asked.params)):
        names = ", ".join(name[:40] for name in odd[:5])
        raise OpTokenMismatch(f"what is asked for is not what was signed: {names}")


def signers_of(envelope: TokenEnvelope, rules: SignRules) -> list[str]:
    """Names of those who signed it, each key once, by name. Raises OpTokenInvalid for a key that is nobody's, and for a
    signature that does not hold."""
    by_id = {key.id: (name, key) for name, key in rules.signers.items()}
    found: set[str] = set()
    for signature in envelope.signatures:
        if signature.key_id not in by_id:
            raise OpTokenInvalid(f"nobody has the key {signature.key_id[:16]!r} that it says it is signed with")
        name, key = by_id[signature.key_id]
        if not key.verifies(signature.raw, envelope.signed):
            raise OpTokenInvalid(f"the signature of {name} is not over what is in it")
        found.add(name)
    return sorted(found)


def check_eviction(rule: SignRule | None, signers: Collection[str], evicted: str, *, is_hmac: bool = False) -> None:
    """Raises OpTokenThreshold where a load would unload `evicted`, and those who signed it could not have that done.

    `rule`: of an unload. `is_hmac`: the load has an HMAC for its word, which is enough here where it is for an unload.

    >>> check_eviction(None, (), "m"), check_eviction(SignRule(1, ("ann",)), ("ann", "ben"), "m")
    (None, None)
    >>> check_eviction(SignRule(0, hmac=True), (), "m", is_hmac=True)
    >>> check_eviction(SignRule(1, ("ann",)), ("ben",), "m")
    Traceback (most recent call last):
    hive.errors.OpTokenThreshold: m would leave, and who may unload it has a rule of its own: 0 of 1 signatures that \
count; others who may sign: ann
    """
    if rule is None or (is_hmac and rule.hmac):
        return
    counted = [name for name in signers if name in rule.of]
    if not rule.threshold or len(counted) < rule.threshold:
        raise OpTokenThreshold(
            f"{evicted[:80]} would leave, and who may unload it has a rule of its own: {short_of(rule, counted)}",
            hint=f"unload it first: hive model unload {evicted[:80]}",
        )


def short_of(rule: SignRule, counted: list[str]) -> str:
    """A sentence: how many signatures are there, and whose would count.

    >>> short_of(SignRule(2, ("ann", "ben", "cy")), ["ann"])
    '1 of 2 signatures that count (ann); others who may sign: ben, cy'
    """
    if not rule.threshold:
        return "only the holder of the HMAC key may approve this"
    others = ", ".join(name for name in rule.of if name not in counted)
    who = f" ({', '.join(counted)})" if counted else ""
    return f"{len(counted)} of {rule.threshold} signatures that count{who}; others who may sign: {others}"


def _judge_hmac(
    found: HmacOperation, asked: AskedOperation, rule: SignRule, *, now: float, mark: float, key: bytes | None
) -> TokenVerdict:
    if key is None:
        raise OpTokenInvalid("operation tokens with an HMAC are not taken here", hint="[governance] hmac_key_file")
    if found.operation != asked.operation:
        raise OpTokenMismatch(f"the operation token is for {found.operation[:40]!r}, not for {asked.operation}")
    if not is_same(found.model, asked.params.get("modelId")):
        raise OpTokenMismatch("what is asked for is not what was signed: modelId")
    check_clock(now, mark)
    found.check_time(now)
    if found.issued_at < int(asked.made_at):
        raise OpTokenMismatch("the operation token is older than this box, as it has been since its database was lost")
    if not found.is_signed_with(key):
        raise OpTokenInvalid("the HMAC is not over what is in it, or with another key")
    if not rule.hmac:
        raise OpTokenThreshold(
            "an HMAC is one authority's word, and this operation needs signatures",
            hint="`hmac = true` in its rule would take that word for enough",
        )
    return TokenVerdict(HMAC, f"{HMAC}:{found.nonce}", float(found.issued_at + 300), is_hmac=True)
