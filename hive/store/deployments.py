"""The registry: what was ordered to be loaded here, by whom, and what became of it. One transaction's connection."""

from __future__ import annotations

import sqlite3

import msgspec

from hive.domain import DeploymentState

MODEL, ADAPTER = "model", "adapter"
"""Kinds of the rows that this version reads; rows of another kind are left as they are."""


class StoredDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment. `id`: of the slot in the pool, or of the model at the inference server in use.

    `digest`: of its files as they were then, empty where they could not be read. `path`: its file or directory, or its
    name at a server that has it by a name. `base`: the model that an adapter or a draft belongs to. `signature`: by
    whom the order was approved, empty where no rule asked for that. `at`: Unix seconds of the order.
    """

    id: str
    kind: str = MODEL
    name: str
    digest: str = ""
    path: str = ""
    backend: str
    base: str = ""
    signature: str = ""
    deployed_by: str
    at: float
    state: DeploymentState
    last_error: str = ""


_COLUMNS = StoredDeployment.__struct_fields__
_PUT = f"INSERT OR REPLACE INTO deployments ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


def living(conn: sqlite3.Connection, kind: str = MODEL) -> list[StoredDeployment]:
    """Every deployment of this kind, the oldest first."""
    rows = conn.execute("SELECT * FROM deployments WHERE kind = ? ORDER BY at, id", (kind,))
    return [_deployment(row) for row in rows]


def put(conn: sqlite3.Connection, row: StoredDeployment) -> None:
    """Writes this one, over an earlier one of the same id."""
    conn.execute(_PUT, [str(getattr(row, column)) if column != "at" else row.at for column in _COLUMNS])


def move(conn: sqlite3.Connection, row: StoredDeployment) -> None:
    """Notes state and error of this one; nothing where another order has written another one since."""
    conn.execute(
        "UPDATE deployments SET state = ?, last_error = ? WHERE id = ? AND at = ?",
        (str(row.state), row.last_error, row.id, row.at),
    )


def remove(conn: sqlite3.Connection, row: StoredDeployment) -> None:
    """Takes this one away; nothing where another order has written another one since."""
    conn.execute("DELETE FROM deployments WHERE id = ? AND at = ?", (row.id, row.at))


def _deployment(row: sqlite3.Row) -> StoredDeployment:
    found = {column: row[column] for column in _COLUMNS}
    known = set(DeploymentState)
    state = DeploymentState(found["state"]) if found["state"] in known else DeploymentState.ABSENT
    return StoredDeployment(**(found | {"state": state}))
