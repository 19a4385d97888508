"""Answers of the API about Hive's own database, as types (see system.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from hive.shapes.system import Bytes, Milliseconds


class DbColumn(TypedDict):
    """A column. `primary_key`: its place in that, 0 for none. `hidden`: NULL in a query without `secrets`."""

    name: str
    type: str
    not_null: bool
    default: str | None
    primary_key: int
    hidden: bool


class DbTable(TypedDict):
    """A table, and its file. `rows`, `bytes` (with its indexes): null where that could not be told in two seconds."""

    name: str
    file: str
    rows: int | None
    bytes: Bytes | None
    columns: list[DbColumn]


class DbTables(TypedDict):
    """Those of each file by name."""

    tables: list[DbTable]


class DbTableSchema(TypedDict):
    """`sql`: the statements that make a table and its indexes."""

    name: str
    file: str
    sql: list[str]


class DbSchema(TypedDict):
    """Those of each file by name."""

    tables: list[DbTableSchema]


class DbResult(TypedDict):
    """Rows that a query found. `columns` has each name once: the second `id` is `id_2`."""

    columns: list[str]
    rows: Annotated[
        list[dict[str, Any]],
        Meta(
            description='Column to value. Bytes, and text that is no UTF-8, are {"$base64": true, "encoded": "..."};'
            ' infinite numbers are "Infinity" and "-Infinity".'
        ),
    ]
    truncated: Annotated[
        Literal["rows", "bytes"] | None,
        Meta(description="The bound that cut the rows off: `limit`, or 8 MiB of answer; null where these are all."),
    ]
    hidden: Annotated[
        list[str], Meta(description="Columns named in the query that hold secrets, as `table.column`: they were NULL.")
    ]
    secrets: bool
    took_ms: Milliseconds
