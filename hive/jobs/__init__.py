"""Jobs: a model that works through tools, under control. `llama_worker` is the library's door to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hive.jobs.wiring import llama_worker

__all__ = ["llama_worker"]


def __getattr__(name: str) -> Any:
    """Loads the worker for those alone who want one: the daemon reads orders of this room, and starts no server."""
    if name == "llama_worker":
        from hive.jobs.wiring import llama_worker

        return llama_worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
