"""The command that shows this Hive as clients of the runner API see it."""

from __future__ import annotations

from typing import Any

from hive.cli.call import Answer, CommandCall
from hive.cli.text import UNKNOWN, fields, one_line, span, table

HEADERS = ("MODEL", "STATE", "QUANTIZATION", "CONTEXT", "MB")


def capabilities(call: CommandCall) -> None:
    """Shows what the runner API says of this Hive: models, memory, queue. At most 5 s old.

    Examples:
      hive capabilities
      hive capabilities --json | jq '.models.loaded[].id'
    """
    answer = call.client.get("/v1/capabilities")
    call.show("capabilities", answer, lambda: _shown(answer))


def _shown(answer: Answer) -> str:
    """The parts below each other; what is not known is left open."""
    models, resources, queue = answer["models"], answer["resources"], answer["queue"]
    rows = [
        [one["id"], "loaded", *(_cell(one, key) for key in ("quantization", "contextLength", "gpuMemoryMB"))]
        for one in models["loaded"]
    ]
    rows += [[one["id"], _loading(one), "", "", ""] for one in models["loading"]]
    rows += [[name, "available", "", "", ""] for name in models["available"]]
    able = [name for name, has in answer["capabilities"].items() if has]
    told = fields(
        [
            ("runner", f"{answer['runnerType']} at {answer['runnerId']}, {answer['health']}"),
            ("memory", f"{_cell(resources, 'gpuMemoryUsedMB')} of {_cell(resources, 'gpuMemoryTotalMB')} MB in use"),
            ("queue", f"{_cell(queue, 'depth')} waiting; {queue['maxDepth']} may"),
            ("can", ", ".join(able)),
        ]
    )
    return "\n".join([told, table(HEADERS, [[one_line(cell) for cell in row] for row in rows])])


def _cell(of: dict[str, Any], key: str) -> str:
    """
    >>> _cell({"depth": 3}, "depth"), _cell({}, "depth") == UNKNOWN
    ('3', True)
    """
    return str(of[key]) if key in of else UNKNOWN


def _loading(one: dict[str, Any]) -> str:
    """
    >>> _loading({"id": "m", "progress": 0.45, "eta": 180}), _loading({"id": "m"})
    ('loading 45%, 3m left', 'loading')
    """
    share = f" {one['progress']:.0%}" if "progress" in one else ""
    left = f", {span(one['eta'])} left" if "eta" in one else ""
    return f"loading{share}{left}"
