"""A workflow file for the stand-in of ComfyUI. Standard library only."""

from __future__ import annotations

import json
from typing import Any

IMAGE = {"width": "{{width}}", "height": "{{height}}", "batch_size": 1, "color": "{{seed}}"}
GRAPH: dict[str, Any] = {
    "1": {"class_type": "EmptyImage", "inputs": IMAGE},
    "2": {"class_type": "StandInText", "inputs": {"text": "a photo of {{prompt}}"}},
    "3": {"class_type": "StandInSteps", "inputs": {"images": ["1", 0], "steps": "{{steps}}"}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "hive"}},
}
INPUTS: dict[str, Any] = {
    "prompt": {"type": "text"},
    "seed": {"type": "integer", "min": 0, "max": (1 << 24) - 1},
    "steps": {"type": "integer", "min": 1, "max": 1000, "default": 2},
    "width": {"type": "integer", "min": 8, "max": 512, "multiple_of": 8, "default": 64},
    "height": {"type": "integer", "min": 8, "max": 512, "multiple_of": 8, "default": 32},
}


def workflow(**more: Any) -> str:
    """A workflow file; `more`: members of its graph."""
    graph = GRAPH | more
    return json.dumps({"description": "One colour.", "inputs": INPUTS, "workflow": graph})
