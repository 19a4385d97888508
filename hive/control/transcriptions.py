"""Watches how fast the pool's models of sound hear it, by their own counters."""

from __future__ import annotations

import asyncio

from hive.backends.backend import open_backend
from hive.backends.counters import Heard
from hive.exposition import Values
from hive.pool.state import SlotState
from hive.pooling.pooling import ModelPool
from hive.settings.pool import category_of

LOOK_S = 15.0


class TranscriptionWatch:
    """Asks each runner of Whisper that serves for its counters, and keeps what it told last."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._told: dict[str, Heard] = {}

    def __repr__(self) -> str:
        return f"<TranscriptionWatch of {', '.join(self._told) or 'none'}>"

    async def run(self) -> None:
        """Looks every 15 s, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """One look at each of them. One that does not answer keeps what it told; one that is unloaded tells nothing."""
        there = [
            slot
            for slot in list(self._pool.slots.values())
            if slot.state is SlotState.READY and category_of(slot.entry.row) == "audio"
        ]
        for slot in there:
            if (told := await open_backend(slot.entry.kind, slot.address).heard()) is not None:
                self._told[slot.model] = told
        names = {slot.model for slot in there}
        self._told = {model: told for model, told in self._told.items() if model in names}

    def metrics(self) -> dict[str, Values | None]:
        """The counters of the runners themselves; they begin anew with each start of one."""
        told = self._told.items()
        return {
            "transcription_audio_seconds": {(model,): of.audio_s for model, of in told},
            "transcription_work_seconds": {(model,): of.work_s for model, of in told},
            "transcription_real_time_factor": {(model,): of.work_s / of.audio_s for model, of in told if of.audio_s},
            "transcription_load_seconds": {(model,): of.load_s for model, of in told},
        }
