"""The rung that a request for each task would be given now, for `hive task`: looked up and decided as for a request."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from hive.bodies.needs import BodyNeeds
from hive.domain import Caller
from hive.endpoints import endpoints
from hive.errors import NotFound
from hive.link.tasks import AskTasks, RungRow, TaskRoute, TasksAre
from hive.models.names import spelled
from hive.pool.ladder import LadderCaller, NoRung, RungFacts, Task, WaitFor, choose_rung
from hive.proxy.datapath import DataPath
from hive.proxy.ladder import FoundRung, look_at
from hive.proxy.registry import AgentEntry
from hive.queue.tenants import Tenant
from hive.routing.slot import Slot
from hive.settings.tasks import PREFIX

CHAT = endpoints.find(b"POST", b"/v1/chat/completions")
"""The endpoint for which the rungs are looked up; one of embeddings is asked at another."""


def task_routes(path: DataPath, asked: AskTasks, now: float) -> TasksAre:
    """The answer to the daemon. Raises NotFound for an agent that is not known."""
    entry = path.registry.by_id.get(asked.agent) if asked.agent else path.registry.operator
    if entry is None:
        raise NotFound(f"there is no agent {asked.agent[:64]!r}")
    names = [task for task in path.tasks.tasks if not asked.task or task.name == asked.task]
    return TasksAre(tasks=[_route(path, task, entry, now) for task in names])


def _route(path: DataPath, task: Task, entry: AgentEntry, now: float) -> TaskRoute:
    found = [
        look_at(
            partial(_found, path, entry),
            model,
            index,
            CHAT,
            entry.flow,
            BodyNeeds(),
            task.budget_s,
            now,
            in_full=True,
        )
        for index, model in enumerate(task.rungs)
    ]
    found = [_within_budget(path, entry, one) for one in found]
    held, until = path.tasks.held_by(entry.row.id, task)
    caller = LadderCaller(now + task.budget_s, held, until)
    choice = choose_rung(task, caller, [one.facts for one in found], now)
    return TaskRoute(
        name=task.name,
        aliases=sorted(name for name, one in path.tasks.names.items() if one is task and name != _own(task)),
        rungs=[_row(one) for one in found],
        rung=None if isinstance(choice, NoRung) else choice.index,
        waits=isinstance(choice, WaitFor),
        why=choice.why,
    )


class _Looker(NamedTuple):
    """The caller of a request that is only thought of, as the cloud guard looks at it."""

    caller: Caller
    tenant: Tenant
    is_local_only: bool = False


def _found(path: DataPath, entry: AgentEntry, model: str, index: int) -> tuple[str, Slot]:
    served, slot = path.which_model(model, entry.caller)
    looker = _Looker(entry.caller, entry.tenant)
    path.cloud_guard.check_model(slot, entry, looker, model, served, is_fallback=bool(index))
    return served, slot


def _within_budget(path: DataPath, entry: AgentEntry, one: FoundRung) -> FoundRung:
    """The rung, refused where a budget of the caller is spent for it: one for the cloud is so for what is far alone."""
    if one.slot is None or not (why := path.budgets.why_not(entry, entry.tenant, is_far=_is_far(one))):
        return one
    return one._replace(facts=RungFacts(one.facts.model, refused=why, expected_s=None, context=one.facts.context))


def _is_far(one: FoundRung) -> bool:
    slot = one.slot
    return slot is not None and slot.backend is not None and slot.is_far(slot.backend, one.served)


def _own(task: Task) -> str:
    return spelled(PREFIX + task.name)


def _row(one: FoundRung) -> RungRow:
    facts, slot = one.facts, one.slot
    expected_s = facts.expected_s
    return RungRow(
        model=facts.model,
        served=one.served,
        state="" if slot is None or facts.refused else str(facts.state),
        expected_s=None if slot is None or expected_s is None or math.isinf(expected_s) else round(expected_s, 1),
        refused=facts.refused,
        lacks=facts.lacks,
        context=facts.context,
        far=_is_far(one),
    )
