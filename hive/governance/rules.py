"""The file governance.toml: who signs, and how many of whom each operation needs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from hive.errors import ConfigError, did_you_mean
from hive.governance import hmac_token
from hive.governance.keys import PublicKey, public_key
from hive.governance.operation import OPERATIONS

DEFAULT = "default"
"""The rule of every operation that has none of its own."""
SIGNERS_MAX = 100
SIGNER_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SIGNER_NAMES = "a signer's name has letters, digits, `.`, `_` and `-`, a letter or digit first, 64 in all"
_RULE = ("threshold", "of", "hmac")


class SignRule(NamedTuple):
    """`threshold` of the signers `of`; 0: the caller's role is enough. `hmac`: the holder of the HMAC key is enough."""

    threshold: int
    of: tuple[str, ...] = ()
    hmac: bool = False


class SignRules(NamedTuple):
    """The file. `signers`: name → key."""

    signers: Mapping[str, PublicKey] = {}
    rules: Mapping[str, SignRule] = {}

    def of(self, operation: str) -> SignRule | None:
        """The rule that holds for an operation; None where there is none, or where it asks for nothing."""
        rule = self.rules.get(operation, self.rules.get(DEFAULT))
        return rule if rule is not None and (rule.threshold or rule.hmac) else None

    @property
    def open(self) -> list[str]:
        """Operations that need nobody's signature."""
        return [operation for operation in OPERATIONS if self.of(operation) is None]


HMAC_ALONE = SignRules(rules={operation: SignRule(0, hmac=True) for operation in hmac_token.OPERATIONS})
"""The rules where there is a key for HMACs and no file."""


def parse(text: str, *, path: str = "governance.toml") -> SignRules:
    """The rules in a TOML document. Raises ConfigError that says where, and what is meant by a mistyped word.

    >>> parse('[signers]\\nann = "x"\\n')
    Traceback (most recent call last):
    hive.errors.ConfigError: governance.toml line 2: signers.ann: expected ed25519: and the base64 of 32 bytes, as \
`hive op keygen` prints it
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no TOML: {error}") from None
    reader = _Reader(text, path)
    reader.known(document, ("signers", "rules"), "")
    signers = reader.signers(reader.table(document, "signers"))
    rules = {
        operation: reader.rule(operation, reader.table(reader.table(document, "rules"), operation, "rules."), signers)
        for operation in reader.known(reader.table(document, "rules"), (*OPERATIONS, DEFAULT), "rules.")
    }
    if not rules:
        raise ConfigError(f"{path}: there is no rule in it", hint="remove it, and roles alone decide")
    return SignRules(signers, rules)


class _Reader:
    """The text, for the lines of what is wrong in it."""

    def __init__(self, text: str, path: str) -> None:
        self._text = text
        self._path = path

    def wrong(self, key: str, problem: str, hint: str = "") -> ConfigError:
        line = _line(self._text, key)
        return ConfigError(f"{self._path}{f' line {line}' if line else ''}: {key}: {problem}", hint=hint)

    def known(self, found: dict[str, Any], names: tuple[str, ...], above: str) -> list[str]:
        for name in found:
            if name not in names:
                hint = did_you_mean(name, names) or f"known are {', '.join(names)}"
                raise self.wrong(f"{above}{name}", "no such key", hint)
        return [*found]

    def table(self, found: dict[str, Any], name: str, above: str = "") -> dict[str, Any]:
        table = found.get(name, {})
        if not isinstance(table, dict):
            raise self.wrong(f"{above}{name}", "expected a table")
        return table

    def signers(self, table: dict[str, Any]) -> dict[str, PublicKey]:
        found: dict[str, PublicKey] = {}
        for name, text in table.items():
            key = f"signers.{name}"
            if not SIGNER_NAME.fullmatch(name):
                raise self.wrong(key, SIGNER_NAMES)
            try:
                public = public_key(text if isinstance(text, str) else "")
            except ConfigError as error:
                raise self.wrong(key, error.message) from None
            if (same := next((other for other, has in found.items() if has == public), None)) is not None:
                raise self.wrong(key, f"{same} has that key already, and a key counts once")
            found[name] = public
        if len(found) > SIGNERS_MAX:
            raise ConfigError(f"{self._path}: more than {SIGNERS_MAX} signers")
        return found

    def rule(self, operation: str, table: dict[str, Any], signers: Mapping[str, PublicKey]) -> SignRule:
        above = f"rules.{operation}"
        self.known(table, _RULE, f"{above}.")
        threshold, of, is_hmac = table.get("threshold"), table.get("of", []), table.get("hmac", False)
        if not isinstance(of, list) or not all(isinstance(name, str) for name in of):
            raise self.wrong(f"{above}.of", "expected a list of signers")
        for name in of:
            if name not in signers:
                hint = did_you_mean(name, signers) or "a signer has a line in [signers]"
                raise self.wrong(f"{above}.of", f"there is no signer {name[:64]!r}", hint)
        if len({*of}) != len(of):
            raise self.wrong(f"{above}.of", "a signer is there twice")
        if type(threshold) is not int or not 0 <= threshold <= len(of) or bool(threshold) is not bool(of):
            expected = f"expected 1 to {len(of)}, of the signers in `of`" if of else "expected 0, or signers in `of`"
            raise self.wrong(above if threshold is None else f"{above}.threshold", f"threshold: {expected}")
        if not isinstance(is_hmac, bool):
            raise self.wrong(f"{above}.hmac", "expected true or false")
        if is_hmac and operation not in hmac_token.OPERATIONS:
            raise self.wrong(f"{above}.hmac", f"an HMAC can speak for {', '.join(hmac_token.OPERATIONS)} only")
        return SignRule(threshold, tuple(of), is_hmac)


def _line(text: str, key: str) -> int:
    """The line that sets `key` or opens its table; 0 where that is not found. tomllib does not say."""
    for start in range(key.count(".") + 1):  # the longest table first: [rules.model-load] before [rules]
        parts = key.split(".")
        table, name = parts[: len(parts) - start], parts[len(parts) - start :]
        at = re.search(rf"^\s*\[\s*{_dotted(table)}\s*\]", text, re.MULTILINE)
        if at is None:
            continue
        if not name:
            return text.count("\n", 0, at.end()) + 1
        found = re.compile(rf"^\s*(?:\[|{_dotted(name)}\s*[=.])", re.MULTILINE).search(text, at.end())
        if found is not None and not found[0].endswith("["):
            return text.count("\n", 0, found.end()) + 1
        if found is None or start == len(parts) - 1:
            return text.count("\n", 0, at.end()) + 1
    found = re.search(rf"^\s*\[?\s*{_dotted(key.split('.'))}\s*[=.\]]", text, re.MULTILINE)
    return text.count("\n", 0, found.end()) + 1 if found else 0


def _dotted(parts: list[str]) -> str:
    return r"\s*\.\s*".join(rf"[\"']?{re.escape(part)}[\"']?" for part in parts)
