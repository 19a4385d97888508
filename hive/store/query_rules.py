"""Rights of a query of `hive db query`: it may read tables, and nothing else. Pure.

SQLite asks these rules once for each thing a statement does, while it compiles it. They are the second line: what is
secret is not in the views that a query sees (query_process.py). SQLite 3.40.1 does not ask about a column that only
`USING` or `NATURAL` names, so that `... FULL JOIN api_tokens USING (digest)` showed every digest to a query whose
authorizer hid that column.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Mapping

PRAGMAS = frozenset({"table_info", "table_xinfo"})
_TEXT = (
    "abs char coalesce concat concat_ws format glob hex if ifnull iif instr length like likelihood likely lower ltrim"
    " max min nullif octet_length printf quote random randomblob replace round rtrim sign soundex sqlite_version substr"
    " substring trim typeof unhex unicode unistr unlikely upper zeroblob"
)
_AGGREGATES = (
    "avg count cume_dist dense_rank first_value group_concat lag last_value lead median nth_value ntile percent_rank"
    " percentile rank row_number string_agg sum total"
)
_DATES = "current_date current_time current_timestamp date datetime julianday strftime time timediff unixepoch"
_JSON = (
    "-> ->> json json_array json_array_length json_error_position json_extract json_group_array json_group_object"
    " json_insert json_object json_patch json_pretty json_quote json_remove json_replace json_set json_type json_valid"
    " jsonb jsonb_array jsonb_extract jsonb_group_array jsonb_group_object jsonb_insert jsonb_object jsonb_patch"
    " jsonb_remove jsonb_replace jsonb_set"
)
_MATHEMATICS = (
    "acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power"
    " radians sin sinh sqrt tan tanh trunc"
)
FUNCTIONS = frozenset(f"{_TEXT} {_AGGREGATES} {_DATES} {_JSON} {_MATHEMATICS}".split())
"""Functions of SQLite that compute something from their arguments. One that is not here is refused: others read files,
load code or look into SQLite itself."""
TABLE_FUNCTIONS = frozenset({"json_each", "json_tree", "pragma_table_info", "pragma_table_xinfo"})
INTERNAL = re.compile(r"sqlite_(?!version\s*\()\w*", re.IGNORECASE)
"""Tables of SQLite's own: raw pages (`sqlite_dbpage`), samples of indexed values (`sqlite_stat4`), schemas."""
_WRITES = (
    "ALTER_TABLE ANALYZE ATTACH CREATE_INDEX CREATE_TABLE CREATE_TEMP_INDEX CREATE_TEMP_TABLE CREATE_TEMP_TRIGGER"
    " CREATE_TEMP_VIEW CREATE_TRIGGER CREATE_VIEW CREATE_VTABLE DELETE DETACH DROP_INDEX DROP_TABLE DROP_TEMP_INDEX"
    " DROP_TEMP_TABLE DROP_TEMP_TRIGGER DROP_TEMP_VIEW DROP_TRIGGER DROP_VIEW DROP_VTABLE INSERT REINDEX SAVEPOINT"
    " TRANSACTION UPDATE"
)
REFUSED = {getattr(sqlite3, f"SQLITE_{name}"): name.replace("_", " ") for name in _WRITES.split()}
"""Words for what else SQLite asks about."""


class QueryRules:
    """SQLite's authorizer for one statement. `refused`: why it was refused, empty where it was not.

    `views`: those the statement may read. `hidden`: for each what of it is NULL; `met` becomes those of them that the
    statement names, as `table.column`. `schemas`: the names of the databases behind the views, which nobody can guess.
    """

    def __init__(self, views: Collection[str], hidden: Mapping[str, Collection[str]], schemas: Collection[str]) -> None:
        self.views = views
        self._hidden = hidden
        self._schemas = schemas
        self.met: set[str] = set()
        self.refused = ""

    def __repr__(self) -> str:
        return f"<QueryRules for {len(self.views)} tables{f', refused {self.refused}' * bool(self.refused)}>"

    def __call__(
        self, action: int, first: str | None, second: str | None, database: str | None, within: str | None
    ) -> int:
        why = self._why_not(action, first or "", second or "", database, within)
        if why:
            self.refused = self.refused or why
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    def _why_not(self, action: int, first: str, second: str, database: str | None, within: str | None) -> str:
        match action:
            case sqlite3.SQLITE_SELECT | sqlite3.SQLITE_RECURSIVE:
                return ""
            case sqlite3.SQLITE_READ:
                return self._why_not_read(first, second, database, within)
            case sqlite3.SQLITE_FUNCTION:
                return "" if second.lower() in FUNCTIONS else f"the function {second[:60]}"
            case sqlite3.SQLITE_PRAGMA:
                return "" if first.lower() in PRAGMAS else f"PRAGMA {first[:60]}"
        if first == "sqlite_master":
            return "that table function"  # SQLite would make a table of it now
        return REFUSED.get(action, f"what SQLite calls action {action}")

    def _why_not_read(self, table: str, column: str, database: str | None, within: str | None) -> str:
        if database in self._schemas:
            is_shown = within == table and column not in self._hidden.get(table, ())
            return "" if is_shown or not column else f"{table[:60]}.{column[:60]} behind its view"
        if database == "temp" and table in self.views:
            if column in self._hidden.get(table, ()):
                self.met.add(f"{table}.{column}")
            return ""
        if table in TABLE_FUNCTIONS or not column or column == "ROWID":
            return ""  # no content: a count, or a table that the statement itself makes
        return f"the table {table[:60]}"


def internal_name(sql: str) -> str:
    """The first name of a table of SQLite's own in a statement, empty where there is none.

    It is looked for as text, in strings too: see the module for what SQLite does not ask about.

    >>> internal_name("SELECT data FROM SQLite_DBpage"), internal_name("SELECT sqlite_version()")
    ('SQLite_DBpage', '')
    """
    found = INTERNAL.search(sql)
    return found[0] if found else ""
