"""Jobs: a model that works through tools, under control. `llama_worker` is the library's door to it."""

from hive.jobs.wiring import llama_worker

__all__ = ["llama_worker"]
