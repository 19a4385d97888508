"""Permission for the server of an entry of the pool to sleep instead of being ended. Pure."""

from __future__ import annotations

from collections.abc import Collection

from hive.backends.entries import ModelEntry
from hive.backends.kinds import spec_of
from hive.settings.pool import PoolSection

CPU = "cpu"
GENERATES = ("llm", "vision")
"""Categories of models that can be asked for a token: after a wake nothing else tells that it is whole."""


def why_no_sleep(entry: ModelEntry, pool: PoolSection, accounts: Collection[str] = ()) -> str:
    """The reason that a model never sleeps, a clause; empty if it may. `accounts`: of its grant, as far as known.

    >>> from pathlib import Path
    >>> from hive.settings.pool import ModelRow
    >>> def entry(kind="vllm", **row):
    ...     return ModelEntry(id="q-1", name="q", kind=kind, path=Path("/m/q"), row=ModelRow(**row), origin="[model q]")
    >>> pool = PoolSection(host_ram_mb=8192)
    >>> why_no_sleep(entry("llama"), pool), why_no_sleep(entry(sleep=False), pool)
    ('llama-server has no sleep', '[model q] says sleep = false')
    >>> why_no_sleep(entry(gpus="cpu"), pool), why_no_sleep(entry(), pool, ["cpu"])
    ('vLLM sleeps on GPUs only', 'vLLM sleeps on GPUs only')
    >>> why_no_sleep(entry(), PoolSection()), why_no_sleep(entry(), pool, ["GPU-1"])
    ('host_ram_mb in [pool] is 0', '')
    """
    spec = spec_of(entry.kind)
    if spec.sleeping is None:
        return f"{spec.label} has no sleep"
    if not entry.row.sleep:
        return f"{entry.origin} says sleep = false"
    if CPU in accounts or entry.row.gpus.strip() == CPU:
        return f"{spec.label} sleeps on GPUs only"
    if entry.row.category not in GENERATES:
        return "only a model that generates text can be tested after a wake"
    if entry.row.adapters:
        return "what becomes of its adapters in its sleep is not known"
    if not pool.host_ram_mb:
        return "host_ram_mb in [pool] is 0"
    return ""
