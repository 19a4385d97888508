"""The registry in the daemon: what was ordered to be loaded, as it is on record. One writer; reading never waits.

A change is written in the transaction of the job that makes it, and is in memory once that is committed. Where a rule
asks for signed loads, the pool loads by itself only what is on record here with a signature.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from hive.audit.audit_log import AuditLog
from hive.backends.entries import ModelEntry
from hive.domain import DeploymentState, ModelInfo
from hive.pool.deployed import CHANGED, LEFT, ComparedDeployment
from hive.settings.pool import slot_id
from hive.shapes.models import DeployedModel
from hive.store import deployments as store
from hive.store.database import Database
from hive.store.deployments import StoredDeployment

LOAD_RULE = "model-load"
"""Name of the operation that a signed row stands for."""
AT_SERVER = "@"
"""In the id of a model at the inference server in use: before the kind of that."""


class RegistryChange(NamedTuple):
    """Rows to write, to move and to take away, in one transaction; `Deployments.took` follows once that is committed.

    A row that is moved or taken away is let alone where another order has written another one since.
    """

    puts: tuple[StoredDeployment, ...] = ()
    moves: tuple[StoredDeployment, ...] = ()
    ends: tuple[StoredDeployment, ...] = ()
    actor: str = "hive"

    def write(self, conn: sqlite3.Connection) -> None:
        for row in self.ends:
            store.remove(conn, row)
        for row in self.puts:
            store.put(conn, row)
        for row in self.moves:
            store.move(conn, row)


NOTHING_RECORDED = RegistryChange()


class Deployments:
    """Every deployment on record. `has_rule`: whether a rule asks for the signatures of an operation of this name."""

    def __init__(
        self,
        rows: Sequence[StoredDeployment],
        *,
        database: Database,
        audit_log: AuditLog,
        has_rule: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._rows = {row.id: row for row in rows}
        self._database = database
        self._audit_log = audit_log
        self._has_rule = has_rule
        self.on_change: Callable[[], object] = lambda: None
        """Called once a change has been taken over."""

    def __repr__(self) -> str:
        return f"<Deployments {len(self._rows)} on record>"

    # looking ----------------------------------------------------------------------------------------------------------

    def rows(self) -> list[StoredDeployment]:
        """All of them, the oldest first."""
        return sorted(self._rows.values(), key=lambda row: (row.at, row.id))

    def views(self) -> list[DeployedModel]:
        """The same for the API."""
        return [view_of(row) for row in self.rows()]

    def row(self, id: str) -> StoredDeployment | None:
        return self._rows.get(id)

    def in_pool(self, model: str) -> StoredDeployment | None:
        """The row of a model of the pool by its name or id, also of one that hive.conf has no more."""
        for row in self._rows.values():
            if AT_SERVER not in row.id and model in (row.name, row.id):
                return row
        return None

    def lost(self, model: str) -> StoredDeployment | None:
        """The row of a model at an inference server that is in use no more."""
        for row in self._rows.values():
            if AT_SERVER in row.id and row.name == model and row.state is DeploymentState.ABSENT:
                return row
        return None

    def why_not_approved(self, entry: ModelEntry, digest: str) -> str:
        """The reason that the pool may not load this by itself, a clause, else empty. `digest`: of its files now."""
        if entry.is_remote or not self._has_rule(LOAD_RULE):
            return ""
        row = self._rows.get(entry.approved_as)
        if row is None or row.state is DeploymentState.UNLOADING:
            return "no signed load of it is on record"
        if why := self.why_not_signed(row):
            return why
        return "" if row.digest == digest else CHANGED.replace("deployed", "approved")

    def why_not_signed(self, row: StoredDeployment) -> str:
        """The reason that nothing is loaded by this row, a clause, where a rule asks for signatures; else empty."""
        if row.signature or not self._has_rule(LOAD_RULE):
            return ""
        return f"{row.deployed_by} had it loaded without a signature"

    # changes ----------------------------------------------------------------------------------------------------------

    def deployed(
        self, entry: ModelEntry, digest: str, *, actor: str, signature: str, state: DeploymentState
    ) -> RegistryChange:
        """An order to load a model of the pool, `signature`: by whom it was approved."""
        row = StoredDeployment(
            id=entry.id,
            name=entry.name,
            digest=digest,
            path=str(entry.path),
            backend=entry.kind,
            signature=signature,
            deployed_by=actor,
            at=time.time(),
            state=state,
        )
        return RegistryChange(puts=(row,), actor=actor)

    def pinned(self, entry: ModelEntry, digest: str, *, actor: str, is_loaded: bool) -> RegistryChange:
        """An order to keep a model of the pool loaded: what is on record of it already stays as it is, with its
        signature; a pin gives none."""
        if entry.id in self._rows:
            return RegistryChange(actor=actor)
        state = DeploymentState.LOADED if is_loaded else DeploymentState.LOADING
        return self.deployed(entry, digest, actor=actor, signature="", state=state)

    def at_server(
        self, model: ModelInfo, backend: str, *, actor: str, signature: str, state: DeploymentState, path: str = ""
    ) -> RegistryChange:
        """An order to the inference server in use to load a model. `path`: of its files, where that is known."""
        return RegistryChange(puts=(_at_server(model, backend, actor, signature, state, path),), actor=actor)

    def switched(self, backend: str, models: Sequence[ModelInfo], *, actor: str, path: str) -> RegistryChange:
        """Another inference server is in use, with these models in its memory from its start on: what was deployed at
        the one before is at its end. Who signed the switch has not signed a load: there is no signature in these."""
        state, own = DeploymentState.LOADED, [model for model in models if not model.parent]
        puts = tuple(_at_server(model, backend, actor, "", state, path) for model in own)
        new = {row.id for row in puts}
        ends = tuple(row for row in self._rows.values() if AT_SERVER in row.id and row.id not in new)
        return RegistryChange(puts=puts, ends=ends, actor=actor)

    def reached(self, id: str, at: float, state: DeploymentState, last_error: str = "") -> RegistryChange:
        """The order of this time came so far; nothing where another one came since, also to unload it."""
        row = self._rows.get(id)
        if row is None or row.at != at or row.state is DeploymentState.UNLOADING:
            return RegistryChange()
        return RegistryChange(moves=(msgspec.structs.replace(row, state=state, last_error=last_error),))

    def taken_back(self, id: str, at: float, before: StoredDeployment | None) -> RegistryChange:
        """The order of this time was cancelled: what was on record `before` holds again."""
        row = self._rows.get(id)
        if row is None or row.at != at or row.state is DeploymentState.UNLOADING:
            return RegistryChange()
        return RegistryChange(ends=(row,), puts=() if before is None else (before,))

    def evicted(self, id: str) -> RegistryChange:
        """It leaves for another model by order, and stays on record: a request loads it again."""
        row = self._rows.get(id)
        if row is None:
            return RegistryChange()
        return RegistryChange(moves=(msgspec.structs.replace(row, state=DeploymentState.EVICTED, last_error=LEFT),))

    def unloading(self, id: str, actor: str) -> RegistryChange:
        """An order to unload it: it is no deployment any more once that is done."""
        row = self._rows.get(id)
        if row is None:
            return RegistryChange(actor=actor)
        return RegistryChange(moves=(msgspec.structs.replace(row, state=DeploymentState.UNLOADING),), actor=actor)

    def ended(self, id: str, at: float | None, actor: str) -> RegistryChange:
        """It is unloaded by order; nothing where another order came since `at` (None: there was no row)."""
        row = self._rows.get(id)
        if row is None or row.at != at:
            return RegistryChange(actor=actor)
        return RegistryChange(ends=(row,), actor=actor)

    def kept(self, id: str, at: float | None) -> RegistryChange:
        """An order to unload it is not carried out."""
        row = self._rows.get(id)
        if row is None or row.at != at:
            return RegistryChange()
        return RegistryChange(moves=(msgspec.structs.replace(row, state=DeploymentState.LOADED),))

    def came(self, id: str, at: float, actor: str, error: str, *, is_load: bool) -> RegistryChange:
        """An order to the inference server in use has ended; `error` is empty where it was carried out."""
        if is_load:
            return self.reached(id, at, DeploymentState.FAILED if error else DeploymentState.LOADED, error)
        return self.kept(id, at) if error else self.ended(id, at, actor)

    def compared(self, row: StoredDeployment, found: ComparedDeployment) -> RegistryChange:
        """The row as its server was seen; nothing where that is what is on record."""
        if found.ends:
            return RegistryChange(ends=(row,))
        if (found.state, found.last_error) == (row.state, row.last_error):
            return RegistryChange()
        moved = msgspec.structs.replace(row, state=found.state, last_error=found.last_error)
        return RegistryChange(moves=(moved,))

    async def write(self, change: RegistryChange) -> None:
        """Writes a change that no job makes. Raises as `Database.write` does."""
        if change.puts or change.moves or change.ends:
            await self._database.write(change.write)
            self.took(change)

    def took(self, change: RegistryChange) -> None:
        """Takes over what has been committed."""
        for row in change.ends:
            if self._is_current(row):
                del self._rows[row.id]
                self._note("model.undeployed", row, change.actor)
        for row in change.puts:
            self._rows[row.id] = row
            if row.deployed_by == change.actor:
                self._note("model.deployed", row, change.actor)
        for row in change.moves:
            if self._is_current(row):
                self._rows[row.id] = row
        self.on_change()

    def _is_current(self, row: StoredDeployment) -> bool:
        known = self._rows.get(row.id)
        return known is not None and known.at == row.at

    def _note(self, act: str, row: StoredDeployment, actor: str) -> None:
        detail = {"name": row.name, "backend": row.backend, "digest": row.digest, "signature": row.signature}
        self._audit_log.note(act, target=row.id, actor=actor, detail=detail)


def id_at_server(model: str, backend: str) -> str:
    """The id of a model's row at the inference server in use.

    >>> id_at_server("llama3.2", "ollama")
    'llama3-2-45b1c980@ollama'
    """
    return f"{slot_id(model)}{AT_SERVER}{backend}"


def view_of(row: StoredDeployment) -> DeployedModel:
    return DeployedModel(
        id=row.id,
        kind=row.kind,
        name=row.name,
        digest=row.digest,
        path=row.path,
        backend=row.backend,
        base=row.base,
        signature=row.signature,
        deployed_by=row.deployed_by,
        at=row.at,
        state=row.state,
        last_error=row.last_error,
    )


def _at_server(
    model: ModelInfo, backend: str, actor: str, signature: str, state: DeploymentState, path: str
) -> StoredDeployment:
    return StoredDeployment(
        id=id_at_server(model.name, backend),
        name=model.name,
        digest=model.digest,
        path=path or model.name,
        backend=backend,
        signature=signature,
        deployed_by=actor,
        at=time.time(),
        state=state,
    )
