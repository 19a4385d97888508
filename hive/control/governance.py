"""Asks for the word of the signers before an operation, and takes each token once.

A service takes an `Approval`, which nobody but the Governor makes: a way in that forgot to ask has none to give.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hive.agents.transition_lock import outcome_of
from hive.audit.approval import Approval
from hive.audit.audit_log import AuditLog
from hive.errors import (
    BadRequest,
    ConfigError,
    GovernanceBroken,
    NotPermitted,
    OpTokenExpired,
    OpTokenReplayed,
    OpTokenRequired,
)
from hive.governance import hmac_token
from hive.governance.operation import OPERATIONS
from hive.governance.rules import HMAC_ALONE, SignRule, SignRules, parse
from hive.governance.verdict import AskedOperation, check_eviction, judge
from hive.host.trusted_file import read_trusted
from hive.shapes.governance import GovernanceView
from hive.store import op_nonces
from hive.store.database import Database
from hive.terminal_text import counted

ROOT = "uid:0"
"""The actor who may break the glass: root, whom the kernel names at the unix socket."""
BREAK_GLASS = "break-glass"
REASON_MAX = 200
LOAD, UNLOAD, EVICTS = "model-load", "model-unload", "evictModel"
SEEN_EVERY_S = 60.0
"""The mark of the clock is so old at most, where there are rules."""
FILE = "governance.toml"
"""Beside hive.conf."""


@dataclass(frozen=True)
class GovernedAct:
    """An operation that somebody asks for. `token`: base64url of an envelope, or the original form's JSON."""

    operation: str
    params: Mapping[str, Any]
    token: str = ""
    break_glass: str = ""

    @property
    def evicted(self) -> str:
        """The model that leaves for the one that is loaded; empty for none."""
        return str(self.params.get(EVICTS) or "") if self.operation == LOAD else ""


class Governor:
    """`file`: of the rules, None where there can be none. `installed`: the file has to be root's.

    The file is read at every question: what root writes into it holds from then on.
    """

    def __init__(
        self,
        file: Path | None,
        *,
        installed: bool,
        hmac_key_file: Callable[[], str],
        database: Database,
        audit_log: AuditLog,
    ) -> None:
        self.file = file
        self._owners = {0} if installed else {0, os.geteuid()}
        self._hmac_key_file = hmac_key_file
        self._database = database
        self._audit_log = audit_log
        self._known: tuple[object, SignRules | None] | None = None
        self.box = ""

    def __repr__(self) -> str:
        return f"<Governor of {self.box}>"

    async def begin(self) -> None:
        """Learns the id of this box, which is made once. Raises as `Database.write`."""
        new_id = f"box-{secrets.token_hex(16)}"

        def work(conn: sqlite3.Connection) -> op_nonces.BoxRow:
            made = op_nonces.make_box(conn, new_id, time.time())
            op_nonces.see(conn, time.time())
            return made

        self.box = (await self._database.write(work)).id

    async def run(self) -> None:
        """Raises the mark of the clock every minute where there are rules, until cancelled."""
        while True:
            await asyncio.sleep(SEEN_EVERY_S)
            if self._may_be_governed():
                await outcome_of(self._see())  # where it fails, all else that is written fails too, and says so

    def _may_be_governed(self) -> bool:
        return bool(self._hmac_key_file()) or (self.file is not None and os.path.lexists(self.file))

    async def _see(self) -> None:
        await self._database.write(lambda conn: op_nonces.see(conn, time.time()))

    # the rules --------------------------------------------------------------------------------------------------------

    def rules(self) -> SignRules | None:
        """Those in force; None where there are none. Raises GovernanceBroken where they cannot be known."""
        try:
            if self.file is not None:
                return parse(read_trusted(self.file, "the rules", self._owners).decode(), path=str(self.file))
        except FileNotFoundError:
            pass
        except UnicodeDecodeError as error:
            raise GovernanceBroken(f"{self.file}: not UTF-8: {error}") from None
        except ConfigError as error:
            raise GovernanceBroken(error.message, hint=error.hint) from None
        except OSError as error:
            raise GovernanceBroken(f"cannot read {self.file}: {error.strerror}") from None
        return HMAC_ALONE if self._hmac_key_file() else None

    def view(self) -> GovernanceView:
        """The rules, for people. Reads the file."""
        rules, broken = None, ""
        try:
            rules = self.rules()
        except GovernanceBroken as error:
            broken = error.message
        known = rules or SignRules()
        return {
            "box": self.box,
            "governed": rules is not None or bool(broken),
            "file": "" if self.file is None else str(self.file),
            "broken": broken,
            "signers": [
                {"name": name, "public_key": key.text, "key_id": key.id} for name, key in known.signers.items()
            ],
            "rules": [
                {"operation": operation, "threshold": rule.threshold, "of": [*rule.of], "hmac": rule.hmac}
                for operation in OPERATIONS
                for rule in [known.of(operation) or SignRule(0)]
            ],
        }

    def has_rule(self, operation: str) -> bool:
        """Whether this operation needs more than a role; also where the rules cannot be known. Cheap."""
        found = self._seen()
        if self._known is None or self._known[0] != found:
            try:
                self._known = (found, self.rules())
            except GovernanceBroken:
                return True
        rules = self._known[1]
        return rules is not None and rules.of(operation) is not None

    def _seen(self) -> object:
        """Marks that tell one content of the file from another."""
        try:
            stat = os.stat(self.file) if self.file is not None else None
        except OSError as error:
            is_link = self.file is not None and os.path.lexists(self.file)  # one that leads nowhere is no missing file
            return error.errno, is_link, self._hmac_key_file()
        seen = None if stat is None else (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        return seen, self._hmac_key_file()

    def _hmac_key(self) -> bytes | None:
        """Raises GovernanceBroken."""
        if not (path := self._hmac_key_file()):
            return None
        try:
            key = read_trusted(Path(path), "the key for HMACs", {0, os.geteuid()}, is_secret=True).strip()
        except ConfigError as error:
            raise GovernanceBroken(error.message, hint=error.hint) from None
        except OSError as error:
            raise GovernanceBroken(f"cannot read {path}: {error.strerror}") from None
        if len(key) < hmac_token.KEY_MIN_BYTES:
            raise GovernanceBroken(f"{path} has less than {hmac_token.KEY_MIN_BYTES} bytes, and is no key")
        return key

    # the question -----------------------------------------------------------------------------------------------------

    async def approve(self, act: GovernedAct, actor: str) -> Approval:
        """The leave to do it; nothing is burnt yet.

        Raises OpTokenRequired and its siblings (errors.py), GovernanceBroken, ClockWentBack; NotPermitted where
        somebody else than root at the unix socket would break the glass.
        """
        assert act.operation in OPERATIONS, act.operation
        if act.break_glass:
            return await self._break_glass(act, actor)
        rules = self.rules()
        rule = None if rules is None else rules.of(act.operation)
        unload = None if rules is None else rules.of(UNLOAD)
        evicted = act.evicted
        if rules is None or rule is None:
            if evicted:
                check_eviction(unload, (), evicted)
            return Approval(act.operation, may_evict=bool(evicted))
        if not act.token:
            raise OpTokenRequired(f"{act.operation} needs {_needed(rule)}")
        key, now = self._hmac_key() if rule.hmac else None, time.time()
        box = await self._database.read(op_nonces.box) or op_nonces.BoxRow(self.box, now, now)
        asked = AskedOperation(act.operation, act.params, self.box, box.made_at)
        try:
            verdict = judge(act.token, asked, rules, rule, now=now, mark=box.clock, hmac_key=key)  # 16 of them: 4 ms
        except OpTokenExpired:
            await self._see()  # a clock that is set back later makes it no better
            raise
        if evicted:
            check_eviction(unload, verdict.signers, evicted, is_hmac=verdict.is_hmac)
        if await self._database.read(lambda conn: op_nonces.is_used(conn, verdict.nonce)):
            raise OpTokenReplayed
        detail = {"name": act.operation, "by": verdict.by, "nonce": verdict.nonce, "params": dict(act.params)}
        self._audit_log.note("governance.judged", actor=actor, detail=detail)
        return Approval(act.operation, verdict.by, verdict=verdict, may_evict=bool(evicted))

    async def _break_glass(self, act: GovernedAct, actor: str) -> Approval:
        """Written to the audit table before anything is done. Raises as `Database.write`."""
        reason = act.break_glass
        if act.token:
            raise BadRequest("either a token or break-glass")
        if not reason.isprintable() or not reason.strip() or len(reason) > REASON_MAX:
            raise BadRequest(f"break-glass wants a reason: a line of {REASON_MAX} characters at most")
        if actor != ROOT:
            raise NotPermitted("only root on the unix socket may break the glass")
        try:
            rules = self.rules()
            asked = [act.operation, UNLOAD] if act.evicted else [act.operation]
            if rules is None or not any(rules.of(operation) for operation in asked):
                return Approval(act.operation, may_evict=bool(act.evicted))
        except GovernanceBroken as error:
            why = error.message
        else:
            why = ""
        detail = {"name": act.operation, "reason": reason, "params": dict(act.params)} | (
            {"broken": why} if why else {}
        )
        self._audit_log.note("governance.break_glass", actor=actor, detail=detail)
        await self._audit_log.flush()
        by = f"{BREAK_GLASS}: {reason}"
        return Approval(act.operation, by, is_break_glass=True, may_evict=bool(act.evicted))


def _needed(rule: SignRule) -> str:
    """
    >>> _needed(SignRule(2, ("ann", "ben"))), _needed(SignRule(1, ("ann",), hmac=True)), _needed(SignRule(0, hmac=True))
    ('2 signatures of ann, ben', '1 signature of ann, or an HMAC', 'an HMAC')
    """
    of = f"{counted(rule.threshold, 'signature')} of {', '.join(rule.of)}"
    if not rule.hmac:
        return of
    return f"{of}, or an HMAC" if rule.threshold else "an HMAC"
