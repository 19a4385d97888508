"""Memory that a ComfyUI holds, asked of a real runner before a stand-in; the helper that starts it is played."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.backends.backend import open_backend
from hive.backends.entries import entries_of
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pooling.comfy_servers import ComfyServers
from hive.settings.comfyui import ComfyuiSection
from hive.settings.table import Settings
from tests.runner.comfy_box import ComfyBox, served

MIB = 1 << 20
RUNS = {"state": ProcessState.SERVING, "run": "1", "pids": [7], "bytes": 20 * MIB, "peak_bytes": 21 * MIB}


class PlayedHelper:
    """Has the servers it is told to have."""

    def __init__(self, *processes: SlotProcess) -> None:
        self.processes = processes

    async def slots(self) -> dict[str, SlotProcess]:
        return {process.id: process for process in self.processes}


@pytest.fixture
def box(tmp_path: Path) -> Iterator[ComfyBox]:
    with served(tmp_path) as made:
        yield made


def servers(box: ComfyBox) -> tuple[ComfyServers, PlayedHelper, str]:
    section = ComfyuiSection(url=f"http://127.0.0.1:{box.port}", workflows_dir=str(box.workflows))
    (entry,) = entries_of(Settings(comfyui=section)).values()
    other = SlotProcess(id="gpt-1", **RUNS)  # type: ignore[arg-type]
    grant = SlotGrant(accounts={"GPU-1": 8192})
    helper = PlayedHelper(SlotProcess(id=entry.id, grant=grant, **RUNS), other)  # type: ignore[arg-type]
    made = ComfyServers(helper, [entry], lambda _: str(box.socket))  # type: ignore[arg-type]
    return made, helper, entry.id


async def test_what_comfyui_holds_on_its_gpu_is_its_slots_and_no_other_ones(box: ComfyBox) -> None:
    made, helper, id = servers(box)
    first = (await made.slots())[id]
    assert (first.bytes, first.gpu_bytes) == (None, None)  # nobody has asked yet, and the runner's own say nothing
    await made.look()
    assert (await made.slots())[id].gpu_bytes == 0
    await asyncio.to_thread(box.generate)
    await made.look()
    found = await made.slots()
    assert (found[id].bytes, found[id].peak_bytes, found[id].gpu_bytes) == (0, None, 3000 * MIB)
    assert found["gpt-1"] == helper.processes[1]


async def test_of_a_comfyui_that_is_down_nothing_is_known(box: ComfyBox) -> None:
    made, helper, id = servers(box)
    await made.slots()
    await asyncio.to_thread(box.generate)
    await made.look()
    box.end_comfy()
    await made.look()
    assert (await made.slots())[id].gpu_bytes is None
    helper.processes = ()
    assert await made.slots() == {}


async def test_the_prompts_in_its_queue_count_as_waiting_there(box: ComfyBox) -> None:
    control = open_backend("comfyui", str(box.socket))
    assert (await control.busy()).waiting == 0
    assert (await control.busy()).places == 1
    assert await control.version() == "0.3.64"
    assert [model.name for model in await control.models()] == ["comfy/plain"]
    assert await control.loaded() == frozenset({"comfy/plain"})
    assert await control.health()
