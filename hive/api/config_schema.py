"""The body of `PUT /api/config`: every setting that may be changed while Hive runs, by the table of settings."""

from __future__ import annotations

import msgspec

from hive.api.params import Schema
from hive.settings import runtime


def changes() -> Schema:
    """
    >>> changes()["properties"]["proxy.queue_depth"]["anyOf"] == [{"type": "integer", "minimum": 0}, {"type": "null"}]
    True
    """
    rows = sorted(runtime.rows().items())
    return {
        "type": "object",
        "description": "`section.key` → its new value, null to take it back.",
        "properties": {name: _setting(msgspec.json.schema(row.annotation)) for name, row in rows},
        "additionalProperties": False,
    }


def _setting(schema: Schema) -> Schema:
    says = schema.pop("description", "")
    return {"description": says, "anyOf": [schema, {"type": "null"}]}
