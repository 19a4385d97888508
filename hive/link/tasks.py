"""Messages about tasks: the rung that a request would be given now, told by the proxy, which alone knows its lines."""

from __future__ import annotations

import msgspec

from hive.link.message import LinkMessage


class RungRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rung for a request that came now. `model`: as the ladder names it; `served`: the model that is meant, empty
    where there is none. `state`: ready, cold, full or down; `expected_s`: until the request would have its place, None
    where that cannot be said or has no end. `refused`, `lacks`: why it would be passed over, clauses. `context`: tokens
    of prompt and answer, None where that is not known. `far`: a request there would leave the box."""

    model: str
    served: str = ""
    state: str = ""
    expected_s: float | None = None
    refused: str = ""
    lacks: str = ""
    context: int | None = None
    far: bool = False


class TaskRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `aliases`: other names of it. `rung`: the one that a request would be given, None for none; `waits`: it
    would wait there for a load; `why`: the reason, a sentence."""

    name: str
    aliases: list[str]
    rungs: list[RungRow]
    rung: int | None
    waits: bool
    why: str


class AskTasks(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, daemon → proxy. `agent`: the id of who would ask, empty for an operator; `task`: this one, empty for all.
    Answer: `TasksAre`, or `Failed(not_found)` where the agent is not known. No model is asked, and nothing changes."""

    agent: str = ""
    task: str = ""


class TasksAre(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The tasks that there are, in the order of hive.conf."""

    tasks: list[TaskRoute]
