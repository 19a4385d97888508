"""What `PUT /api/config` takes: every setting that may be changed while Hive runs, as the table of settings has it."""

from __future__ import annotations

import msgspec

from hive import settings_runtime
from hive.control.asked import Schema


def changes() -> Schema:
    """
    >>> changes()["properties"]["proxy.queue_depth"]["anyOf"] == [{"type": "integer", "minimum": 0}, {"type": "null"}]
    True
    """
    rows = sorted(settings_runtime.rows().items())
    return {
        "type": "object",
        "description": "`section.key` → its new value, null to take it back.",
        "properties": {name: _setting(msgspec.json.schema(row.annotation)) for name, row in rows},
        "additionalProperties": False,
    }


def _setting(schema: Schema) -> Schema:
    says = schema.pop("description", "")
    return {"description": says, "anyOf": [schema, {"type": "null"}]}
