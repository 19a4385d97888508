"""Wakes an agent for something Hive itself has for it: a message, a schedule."""

from __future__ import annotations

import asyncio

from hive.agents.lifecycle import Life
from hive.domain import WakeCause
from hive.link.messages import Open, Refused


async def wake(life: Life, cause: WakeCause) -> str:
    """Returns when it is awake: the empty string. Else the status that keeps it from being woken, like `stopped`."""
    done: asyncio.Future[Open | Refused] = asyncio.get_running_loop().create_future()
    life.wake(cause, lambda answer: None if done.done() else done.set_result(answer), actor="hive")
    answer = await done
    return answer.status if isinstance(answer, Refused) else ""
