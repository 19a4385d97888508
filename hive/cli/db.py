"""Hive's own database, read with SQL: its tables, what they are made of, and queries."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from base64 import b64decode
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hive.cli.call import Answer, CommandCall, completed, out
from hive.cli.text import harmless, narrowed, number, one_line, size, table
from hive.errors import UsageError
from hive.terminal_text import counted

SQL_MAX_BYTES = 65536
LIMIT, LIMIT_MOST = 1000, 100_000
TIMEOUT_S, TIMEOUT_LEAST_S, TIMEOUT_MOST_S = 5.0, 0.1, 60.0
ANSWERED_S = 15.0
"""On top of a query's own time: its process has to start, and its answer to be sent."""
COMPLETED_WITHIN_S = 1.0
"""Longer than for other names: a process is started for it."""
CELL_MIN = 8
"""Columns of a terminal in which a cell still says something."""
BYTES_SHOWN = 16
"""Of a blob in a table."""


def table_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completion of a table's name."""

    def ask(client: Any) -> list[Answer]:
        found: list[Answer] = client.get("/api/db/schema", timeout_s=COMPLETED_WITHIN_S)["tables"]
        return found

    return completed(ctx, incomplete, ask, within_s=COMPLETED_WITHIN_S)


AsCsv = Annotated[bool, typer.Option("--csv", help="Print comma-separated values (RFC 4180).")]
AsTable = Annotated[bool, typer.Option("--table", help="Print a table: the default.")]


def tables(call: CommandCall, as_csv: AsCsv = False, as_table: AsTable = False) -> None:
    """Lists the tables of Hive's database: rows, size and columns. It takes an admin.

    A hidden column holds a secret: a query shows NULL for it unless it is asked with --secrets. What could not be
    counted within two seconds is -.

    Examples:
      hive db tables
      hive db tables --json | jq -r '.tables[] | select(.rows > 0) | .name'
    """
    _refuse_several(call, as_csv=as_csv, as_table=as_table)
    answer = call.client.get("/api/db/tables")
    found = answer["tables"]
    if as_csv:
        rows = [[one["name"], one["rows"], one["bytes"], *_named(one)] for one in found]
        _print_csv(["name", "rows", "bytes", "hidden", "columns"], rows)
    else:
        call.show("db.tables", answer, lambda: _listed(found, _width()))


def schema(
    call: CommandCall,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TABLE...",
            help="Only these; without a name all of them.",
            autocompletion=table_names,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Prints the statements that make the tables and their indexes. It takes an admin.

    Examples:
      hive db schema
      hive db schema agents inference_usage
      hive db schema --json | jq -r '.tables[].sql[]'
    """
    answer = call.client.get("/api/db/schema", table=names or None)
    call.show("db.schema", answer, lambda: _statements(answer["tables"]))


def query(
    call: CommandCall,
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="One statement; - reads it from standard input.", show_default=False)
    ],
    params: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="NAME=VALUE", help="The text :NAME stands for (again and again)."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=LIMIT_MOST, help="At most so many rows.")] = LIMIT,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=TIMEOUT_LEAST_S, max=TIMEOUT_MOST_S, help="How long it may take."),
    ] = TIMEOUT_S,
    secrets: Annotated[
        bool,
        typer.Option("--secrets", help="Also show messages, prompts, specs, kept responses and digests of tokens."),
    ] = False,
    as_csv: AsCsv = False,
    as_table: AsTable = False,
) -> None:
    """Reads Hive's database with one SQL statement. It takes an admin, and is written into the audit table.

    It can only read, and sees the tables of `hive db tables`, kept responses among them. A column that holds a secret
    is NULL, which stderr says. An answer has at most 8 MiB. On a terminal cells are cut to its width; what goes into a
    file or a pipe is complete.

    Examples:
      hive db query "SELECT name, status, since FROM agents ORDER BY since DESC"
      hive db query "SELECT * FROM inference_usage WHERE model = :model" -p model=llama3.2 --limit 20
      hive db query --csv --limit 100000 "SELECT * FROM inference_usage" > usage.csv
      hive db query --json - < report.sql | jq '.rows[]'
    """
    _refuse_several(call, as_csv=as_csv, as_table=as_table)
    order = {
        "sql": _piped() if sql == "-" else sql,
        "params": parameters(params or []),
        "limit": limit,
        "timeout_s": timeout,
        "secrets": secrets,
    }
    if not str(order["sql"]).strip():
        raise UsageError("the statement is empty", hint="hive db query --help")
    answer = call.client.post("/api/db/query", order, timeout_s=timeout + ANSWERED_S)
    columns, rows = answer["columns"], [[*row.values()] for row in answer["rows"]]
    left_out: list[str] = []
    if as_csv:
        _print_csv(columns, rows)
    else:
        call.show("db.query", answer, lambda: _fitted(columns, rows, left_out))
    for line in notes(answer, left_out):
        call.say(line)


def notes(answer: Answer, left_out: Sequence[str]) -> list[str]:
    """Notes about a result, beside its rows.

    >>> notes({"rows": [{}, {}], "truncated": "rows", "hidden": ["messages.text"]}, ["text"])
    ['hidden, so NULL here: messages.text; --secrets shows it', \
'only the first 2 rows: there are more, --limit N shows them', \
'left out for want of room: text; --csv and --json have it']
    """
    count = counted(len(answer["rows"]), "row")
    found = []
    if hidden := answer["hidden"]:
        found.append(
            f"hidden, so NULL here: {', '.join(hidden)}; --secrets shows {'it' if len(hidden) == 1 else 'them'}"
        )
    match answer["truncated"]:
        case "rows":
            found.append(f"only the first {count}: there are more, --limit N shows them")
        case "bytes":
            found.append(f"only the first {count}: an answer has at most 8 MiB, so ask for less of each")
        case _ if not answer["rows"]:
            found.append("no rows")
    if left_out:
        names = ", ".join(map(one_line, left_out))
        found.append(
            f"left out for want of room: {names}; --csv and --json have {'it' if len(left_out) == 1 else 'them'}"
        )
    return found


def parameters(given: Sequence[str]) -> dict[str, str]:
    """
    >>> parameters(["model=a=b", ":n="])
    {'model': 'a=b', 'n': ''}
    """
    found: dict[str, str] = {}
    for text in given:
        name, is_there, value = text.partition("=")
        name = name.removeprefix(":")
        if not is_there or not name:
            raise UsageError(f"-p: expected NAME=VALUE, found {text!r}", hint="hive db query --help")
        if name in found:
            raise UsageError(f"-p {name}: given twice")
        found[name] = value
    return found


def _refuse_several(call: CommandCall, *, as_csv: bool, as_table: bool) -> None:
    if as_csv + as_table + call.as_json > 1:
        raise UsageError("--csv, --json, --table: one of them")


def _piped() -> str:
    data = sys.stdin.buffer.read(SQL_MAX_BYTES + 1)
    if len(data) > SQL_MAX_BYTES:
        raise UsageError(f"a statement has at most {SQL_MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError("the statement is no UTF-8") from None


# how it is shown ------------------------------------------------------------------------------------------------------


def _width() -> int | None:
    """Of the terminal; None where nobody looks at one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _named(one: Answer) -> tuple[str, str]:
    """Its hidden columns, and all of them."""
    return (
        " ".join(column["name"] for column in one["columns"] if column["hidden"]),
        " ".join(column["name"] for column in one["columns"]),
    )


def _listed(found: Sequence[Answer], width: int | None) -> str:
    headers = ["NAME", "ROWS", "SIZE", "HIDDEN", "COLUMNS"]
    rows = [[one["name"], number(one["rows"]), size(one["bytes"]), *_named(one)] for one in found]
    if width is None:
        return table(headers, rows)
    return table(*narrowed(headers, rows, columns=width, drop=["HIDDEN", "COLUMNS", "SIZE", "ROWS"], prose="COLUMNS"))


def _statements(found: Sequence[Answer]) -> str:
    return "\n\n".join("\n".join(f"{harmless(sql)};" for sql in one["sql"]) for one in found)


def _fitted(columns: Sequence[str], rows: Sequence[Sequence[object]], left_out: list[str]) -> str:
    """The table; on a terminal as wide as that. Columns for which there is no room are added to `left_out`."""
    lines = [[one_line(shown(cell)) for cell in row] for row in rows]
    headers = [one_line(name) for name in columns]
    width = _width()
    if width is None:
        return table(headers, lines)
    count, most = fit([max(map(len, column)) for column in zip(headers, *lines, strict=True)], width)
    left_out += columns[count:]
    return table(
        [_cut(name, most) for name in headers[:count]], [[_cut(cell, most) for cell in line[:count]] for line in lines]
    )


def fit(widths: Sequence[int], room: int) -> tuple[int, int]:
    """Number of columns of these widths that fit into `room`, two apart, and the widest cell there.

    >>> fit([4, 90, 200], 80), fit([4, 4], 80), fit([20] * 20, 80), fit([500], 20)
    ((3, 36), (2, 4), (8, 8), (1, 20))
    """
    for count in range(len(widths), 1, -1):
        left = room - 2 * (count - 1)
        if sum(min(width, CELL_MIN) for width in widths[:count]) <= left:
            most = max(widths[:count])
            while sum(min(width, most) for width in widths[:count]) > left:
                most = max(CELL_MIN, min(most - 1, left))
            return count, most
    return 1, min(room, max(widths, default=room))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def shown(value: object) -> str:
    """A value in a table: bytes as SQL writes them, their beginning where they are many.

    >>> [shown(value) for value in (None, 1.5, "a", {"$base64": True, "encoded": "AP8="})]
    ['NULL', '1.5', 'a', "x'00ff'"]
    >>> shown({"$base64": True, "encoded": "AAAA" * 8})
    "x'00000000000000000000000000000000…' (24 bytes)"
    """
    if value is None:
        return "NULL"
    data = _bytes_in(value)
    if data is None:
        return str(value)
    if len(data) <= BYTES_SHOWN:
        return f"x'{data.hex()}'"
    return f"x'{data[:BYTES_SHOWN].hex()}…' ({counted(len(data), 'byte')})"


def _bytes_in(value: object) -> bytes | None:
    return b64decode(value["encoded"]) if isinstance(value, dict) else None


def _print_csv(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """As RFC 4180 has it. NULL is an empty field, bytes are written as in SQL; a terminal is spared what steers it."""
    file = io.StringIO()
    writer = csv.writer(file)  # its lines end with CR LF
    writer.writerow(columns)
    writer.writerows([_field(value) for value in row] for row in rows)
    text = file.getvalue()
    out(harmless(text.replace("\r\n", "\n")) if sys.stdout.isatty() else text, end="")


def _field(value: object) -> object:
    data = _bytes_in(value)
    return value if data is None else f"x'{data.hex()}'"
