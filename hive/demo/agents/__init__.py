"""The three sample agents of `hive up --demo`: what to copy into each one's home and how to start it.

They use the standard library of Python 3.9 or newer only and know nothing of Hive but the environment it gives them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent


class DemoAgent(NamedTuple):
    """One sample agent.

    `files`: source path → name in the agent's home. `arguments`: what follows `/usr/bin/python3`, with the home as
    working directory. `idle_s`: seconds of quiet before it should sleep. `heap_mb`: MiB of live objects, about.
    It reads `HIVE_AGENT_PORT` (where it listens for callers; the spec's `port`), `HIVE_DIALECT` (`ollama` or
    `openai`), `HIVE_MODEL` (else it takes the first of the list), and where the model is: `OLLAMA_HOST`, or
    `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
    """

    files: dict[str, str]
    arguments: list[str]
    idle_s: float
    tier: str
    heap_mb: int


def _character(name: str, *, idle_s: float, tier: str, heap_mb: int) -> DemoAgent:
    files = {str(_HERE / file): file for file in ("sample_agent.py", f"{name}.py")}
    return DemoAgent(files, ["sample_agent.py", name], idle_s, tier, heap_mb)


DEMO_AGENTS: dict[str, DemoAgent] = {
    "scribe": _character("scribe", idle_s=3.0, tier="medium", heap_mb=60),
    "librarian": _character("librarian", idle_s=6.0, tier="high", heap_mb=140),
    "watcher": _character("watcher", idle_s=4.0, tier="low", heap_mb=90),
}
"""Name → what it is."""
