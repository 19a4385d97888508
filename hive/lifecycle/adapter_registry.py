"""The registry's rows of adapters: which was ordered to be loaded, by whom, and what became of it.

As with models, a change is written in the transaction of the job that makes it, and is in memory once that is
committed. Which digest answers for a name is not known here but to those that serve it (adapters.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hive.adapters.record import AdapterRecord
from hive.domain import DeploymentState
from hive.pooling.deployments import NOTHING_RECORDED, RegistryChange, view_of
from hive.shapes.models import DeployedModel
from hive.store.database import Database
from hive.store.deployments import ADAPTER, StoredDeployment

LOAD_RULE = "adapter-load"
ENDED = "Hive ended before the load did"
NOT_SERVED = "it is not served any more: hive adapter load loads it again"
ANOTHER = "another build of it is served"


class AdapterRegistry:
    """Every adapter on record, by its name."""

    def __init__(
        self, rows: Sequence[StoredDeployment], *, database: Database, has_rule: Callable[[str], bool]
    ) -> None:
        """`has_rule`: whether a rule asks for the signatures of an operation of this name."""
        self._rows = {row.name: row for row in rows}
        self._database = database
        self._has_rule = has_rule

    def __repr__(self) -> str:
        return f"<AdapterRegistry {len(self._rows)} on record>"

    def rows(self) -> list[StoredDeployment]:
        """All of them, the oldest first."""
        return sorted(self._rows.values(), key=lambda row: (row.at, row.id))

    def views(self) -> list[DeployedModel]:
        """The same for the API."""
        return [view_of(row) for row in self.rows()]

    def row(self, name: str) -> StoredDeployment | None:
        return self._rows.get(name)

    def why_not_approved(self, name: str, digest: str) -> str:
        """The reason that these weights may not be loaded without a new order, a clause, where a rule asks for
        signatures; else empty. What is loaded already stays."""
        if not self._has_rule(LOAD_RULE):
            return ""
        row = self._rows.get(name)
        if row is None or row.digest != digest:
            return f"no signed load of {name} is on record"
        return "" if row.signature else f"{row.deployed_by} had {name} loaded without a signature"

    # changes ----------------------------------------------------------------------------------------------------------

    def ordered(
        self, record: AdapterRecord, path: str, *, actor: str, signature: str, state: DeploymentState
    ) -> RegistryChange:
        """An order to load it, `signature`: by whom it was approved."""
        row = StoredDeployment(
            id=f"{ADAPTER}:{record.name}",
            kind=ADAPTER,
            name=record.name,
            digest=record.digest,
            path=path,
            backend=record.format,
            base=record.base,
            signature=signature,
            deployed_by=actor,
            at=time.time(),
            state=state,
        )
        return RegistryChange(puts=(row,), actor=actor)

    def reached(self, row: StoredDeployment, state: DeploymentState, last_error: str = "") -> RegistryChange:
        """The order came so far; nothing where another one came since."""
        if not self._is_current(row):
            return NOTHING_RECORDED
        return RegistryChange(moves=(msgspec.structs.replace(row, state=state, last_error=last_error),))

    def failed(self, row: StoredDeployment, before: StoredDeployment | None, why: str) -> RegistryChange:
        """The order has failed; `before`: what is served on, and so is on record again."""
        if before is None:
            return self.reached(row, DeploymentState.FAILED, why)
        return RegistryChange(puts=(before,)) if self._is_current(row) else NOTHING_RECORDED

    def ended(self, name: str, actor: str) -> RegistryChange:
        """It is unloaded by order, and is no deployment any more."""
        row = self._rows.get(name)
        return RegistryChange(ends=() if row is None else (row,), actor=actor)

    def gone(self, builds: Mapping[str, str], why: str) -> RegistryChange:
        """These builds (name → digest) are not served any more, by nobody's order to unload them. What is on record of
        another build of such a name stays."""
        rows = [row for name, digest in builds.items() if (row := self._rows.get(name)) and row.digest == digest]
        moved = [msgspec.structs.replace(row, state=DeploymentState.ABSENT, last_error=why) for row in rows]
        return RegistryChange(moves=tuple(moved))

    def compared(self, served: Mapping[str, str], why_not: Mapping[str, str]) -> RegistryChange:
        """The rows as they are seen at the daemon's start. `served`: name → digest; `why_not`: of what may not be
        loaded, by digest."""
        found = ((row, compare(row, served.get(row.name), why_not.get(row.digest, ""))) for row in self._rows.values())
        moves = [msgspec.structs.replace(row, state=to[0], last_error=to[1]) for row, to in found]
        return RegistryChange(moves=tuple(row for row in moves if row != self._rows[row.name]))

    async def write(self, change: RegistryChange) -> None:
        """Writes a change that no job makes. Raises as `Database.write` does."""
        if change != RegistryChange(actor=change.actor):
            await self._database.write(change.write)
            self.took(change)

    def took(self, change: RegistryChange) -> None:
        """Takes over what has been committed."""
        for row in change.ends:
            if self._is_current(row):
                del self._rows[row.name]
        for row in change.puts:
            self._rows[row.name] = row
        for row in change.moves:
            if self._is_current(row):
                self._rows[row.name] = row

    def _is_current(self, row: StoredDeployment) -> bool:
        known = self._rows.get(row.name)
        return known is not None and known.at == row.at


def compare(row: StoredDeployment, digest: str | None, why_not: str = "") -> tuple[DeploymentState, str]:
    """State and last error of a row of an earlier daemon; `digest`: what is served by its name now, None for nothing.

    >>> row = StoredDeployment(id="adapter:a", kind="adapter", name="a", digest="d1", backend="gguf", deployed_by="u",
    ...                        at=1.0, state=DeploymentState.LOADING)
    >>> [compare(row, digest)[0].value for digest in ("d1", "d2", None)]
    ['loaded', 'failed', 'failed']
    >>> row = msgspec.structs.replace(row, state=DeploymentState.LOADED)
    >>> [compare(row, digest)[0].value for digest in ("d1", "d2", None)]
    ['loaded', 'absent', 'absent']
    """
    if digest == row.digest:
        return DeploymentState.LOADED, ""
    if row.state is DeploymentState.LOADING:
        return DeploymentState.FAILED, ENDED
    if row.state in (DeploymentState.FAILED, DeploymentState.ABSENT):
        return row.state, row.last_error
    return DeploymentState.ABSENT, ANOTHER if digest is not None else why_not or NOT_SERVED
