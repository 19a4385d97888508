"""The abilities of each runtime on this host: asked of the helper at every (re)connect, and now and then."""

from __future__ import annotations

import asyncio
import contextlib

from hive.agents.transition_lock import outcome_of
from hive.control.tail import Output
from hive.domain import Agent, RuntimeKind
from hive.errors import HiveError, LinkLost
from hive.link.specs import RuntimeCapabilities
from hive.sandbox.client import SandboxClient
from hive.settings.table import Paths

LOOK_S = 60.0
"""An engine may come and go. A look costs the helper a question to the engine and a start of the VMM (its version)."""


class RuntimeWatch:
    """`found`: what the helper said last; empty until it said anything."""

    def __init__(self, helper: SandboxClient) -> None:
        self._helper = helper
        self._here = asyncio.Event()
        self.found: dict[RuntimeKind, RuntimeCapabilities] = {}

    def __repr__(self) -> str:
        return f"<RuntimeWatch {', '.join(self.found) or 'nothing known'}>"

    def helper_here(self) -> None:
        """It is another one, perhaps."""
        self._here.set()

    def output_of(self, agent: Agent, paths: Paths) -> Output:
        """A file, but where the helper says that such agents are units of systemd.

        There may be none yet. Raises LinkLost where only the helper knows, and is not there.
        """
        can = self.found.get(agent.spec.runtime)
        if can is None and paths.apart:
            raise LinkLost("the helper is not connected: only it knows where the agent's output is")
        return Output(paths.log(agent.id), "" if can is None else can.journal.format(agent.id))

    async def run(self) -> None:
        """Until cancelled. A helper that cannot be asked leaves what was known; its link says when it is back."""
        while True:
            self._here.clear()
            found = await outcome_of(self._helper.runtimes())
            if not isinstance(found, HiveError):
                self.found = found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._here.wait()
