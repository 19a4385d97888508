"""Models of an Ollama as slots, each step against the stand-in as a real process (fakes/fake_ollama.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from hive.backends.entries import entries_of
from hive.errors import NotFound
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pooling.ollama_slots import OllamaSlots
from hive.settings.file import load_text
from hive.settings.pool import slot_id
from tests.fakes.programs import Program, fake_ollama
from tests.waiting import until

MIB = 1 << 20
GRANT = SlotGrant(accounts={"cpu": 70}, generation=3)
TINY = slot_id("tiny")


class Watched:
    """The slots of one stand-in, and what they told."""

    def __init__(self, server: Program, *names: str) -> None:
        rows = "".join(f"[model {name}]\nbackend = ollama\n" for name in names)
        self.server = server
        self.moved: list[SlotProcess] = []
        self.listed = 0
        entries = entries_of(load_text(rows, env={}).settings)
        self.slots = OllamaSlots(entries.values(), server.address, on_moved=self.moved.append, on_list=self._count_list)

    def _count_list(self) -> None:
        self.listed += 1

    async def loaded(self, id: str, grant: SlotGrant = GRANT) -> SlotProcess:
        """The slot, once its start has ended one way or the other."""
        before = len(self.moved)
        begun = await self.slots.slot_start(id, grant)
        assert begun.state is ProcessState.STARTING
        await until(lambda: len(self.moved) > before)
        return self.moved[-1]

    async def told(self, id: str) -> str:
        """The reason why the model cannot be loaded."""
        facts = await self.slots.facts_of(self.slots.ids[id])
        assert facts.can_load == (not facts.why_not)
        return facts.why_not

    def in_memory(self) -> list[str]:
        return [row["model"] for row in self.server.get("/api/ps").json()["models"]]

    def asked(self) -> list[tuple[str, Any]]:
        return [(one["path"], one["keep_alive"]) for one in self.server.get("/fake/asked").json()["asked"]]

    def post(self, path: str, **body: Any) -> None:
        httpx.post(self.server.url + path, json=body, trust_env=False).raise_for_status()


@asynccontextmanager
async def watched(
    *flags: str, names: tuple[str, ...] = ("tiny",), models: tuple[str, ...] = ("tiny",)
) -> AsyncIterator[Watched]:
    with fake_ollama("--layer-bytes", str(30 * MIB), *flags, *models) as server:
        box = Watched(server, *names)
        try:
            yield box
        finally:
            await box.slots.close()


async def test_a_model_is_loaded_for_ever_measured_and_let_go() -> None:
    async with watched() as box:
        served = await box.loaded(TINY)
        assert (served.state, served.bytes, served.gpu_bytes, served.grant) == (
            ProcessState.SERVING,
            60 * MIB,
            0,
            GRANT,
        )
        assert (await box.slots.slots())[TINY].run == served.run
        await box.slots.slot_stop(TINY, grace_s=1)
        assert (box.in_memory(), await box.slots.slots()) == ([], {})
        await box.slots.slot_stop(TINY, grace_s=1)  # nothing is there
        assert box.asked() == [("/api/generate", -1), ("/api/generate", 0)]
        assert (await box.loaded(TINY)).run != served.run


async def test_what_is_on_a_gpu_is_told_apart() -> None:
    async with watched("--on-gpu") as box:
        served = await box.loaded(TINY)
        assert (served.bytes, served.gpu_bytes) == (0, 60 * MIB)


async def test_a_model_that_only_embeds_is_loaded_without_a_prompt_too() -> None:
    async with watched("--embeds", "gte", names=("gte",), models=("gte",)) as box:
        assert (await box.loaded(slot_id("gte"))).state is ProcessState.SERVING
        await box.slots.slot_stop(slot_id("gte"), grace_s=1)
        assert (box.asked(), box.in_memory()) == ([("/api/embed", -1), ("/api/generate", 0)], [])


async def test_a_load_that_fails_says_so_in_ollamas_words() -> None:
    async with watched("--memory", str(MIB)) as box:
        ended = await box.loaded(TINY)
        assert (ended.state, ended.was_dropped) == (ProcessState.ENDED, False)
        assert "cudaMalloc failed: out of memory" in ended.last[0]


async def test_what_ollama_unloads_for_another_one_is_dropped() -> None:
    async with watched("--most", "1", names=("tiny", "other"), models=("tiny", "other")) as box:
        await box.loaded(TINY)
        await box.loaded(slot_id("other"))
        (dropped,) = [one for one in box.moved if one.state is ProcessState.ENDED]
        assert (dropped.id, dropped.was_dropped, dropped.why) == (TINY, True, "Ollama unloaded it by itself")
        assert list(await box.slots.slots()) == [slot_id("other")]


async def test_a_load_that_is_given_up_is_no_load() -> None:
    async with watched("--load-s", "0.5") as box:
        await box.slots.slot_start(TINY, GRANT)
        await asyncio.sleep(0.1)
        await box.slots.slot_stop(TINY, grace_s=1)
        assert (await box.slots.slots(), box.in_memory(), box.moved) == ({}, [], [])


async def test_a_model_that_was_loaded_past_hive_is_found_and_kept() -> None:
    async with watched() as box:
        box.post("/api/generate", model="tiny", keep_alive="20s", stream=False)
        found = (await box.slots.slots())[TINY]
        assert (found.state, found.grant, found.bytes) == (ProcessState.SERVING, None, 60 * MIB)
        await until(lambda: box.asked()[-1] == ("/api/generate", -1))
        assert (await box.slots.slot_start(TINY, GRANT)).grant == GRANT  # it runs already


async def test_options_that_load_it_anew_do_not_have_it_expire() -> None:
    """Ollama takes its own time for a load that a request without `keep_alive` causes."""
    async with watched() as box:
        await box.loaded(TINY)
        box.post("/api/chat", model="tiny", messages=[{"role": "user", "content": "Hi"}], options={"num_ctx": 9})
        await box.slots.look()
        await until(lambda: box.asked()[-1] == ("/api/generate", -1))


async def test_a_look_that_waits_for_a_load_changes_nothing() -> None:
    """`/api/ps` waits for a load: what was there before is there."""
    async with watched("--load-s", "3", names=("tiny", "other"), models=("tiny", "other")) as box:
        await box.loaded(TINY)
        await box.slots.slot_start(slot_id("other"), GRANT)
        await asyncio.sleep(0.1)
        assert not await box.slots.look()
        assert (await box.slots.slots())[TINY].state is ProcessState.SERVING


async def test_why_a_model_cannot_be_loaded_is_told() -> None:
    names = ("tiny", "mine", "gone", "stub", "x:cloud")
    async with watched("--copy", "mine=tiny", "--stub", "stub", names=names) as box:
        told = {name: await box.told(slot_id(name)) for name in names}
        assert told == {
            "tiny": "",
            "mine": "at Ollama it is the same model as tiny, which is loaded once: describe one of them",
            "gone": f"the Ollama at {box.server.address} has no model gone",
            "stub": "it is no model of this box: Ollama sends it to https://cloud.invalid:443, as gpt-oss:120b",
            "x:cloud": f"the Ollama at {box.server.address} has no model x:cloud",
        }
        facts = await box.slots.facts_of(box.slots.ids[TINY])
        assert (facts.size_bytes, len(facts.digest), facts.quantization) == (60 * MIB, 64, "Q4_K_M")
        ended = await box.loaded(slot_id("stub"))
        assert (ended.state, box.server.get("/fake/left").json()["left"]) == (ProcessState.ENDED, [])
        with pytest.raises(NotFound):
            await box.slots.slot_start("other-00000000", GRANT)


async def test_a_copy_is_in_memory_with_what_it_is_a_copy_of() -> None:
    async with watched("--copy", "mine=tiny", names=("mine",)) as box:
        assert (await box.loaded(slot_id("mine"))).state is ProcessState.SERVING
        assert box.in_memory() == ["tiny:latest"]
        await box.slots.slot_stop(slot_id("mine"), grace_s=1)
        assert box.in_memory() == []


async def test_an_ollama_that_is_gone_has_dropped_all_and_is_told_once_it_is_back() -> None:
    async with watched() as box:
        await box.loaded(TINY)
        port = box.server.address.rpartition(":")[2]
        box.server.process.kill()
        box.server.process.wait()
        running = asyncio.create_task(box.slots.run())
        gone = f"no Ollama answers at {box.server.address}"
        await until(lambda: box.moved[-1].was_dropped)
        assert (box.moved[-1].why, await box.told(TINY), await box.slots.slots()) == (gone, gone, {})
        assert (await box.loaded(TINY)).was_dropped  # no failure of the model's
        listed = box.listed
        with fake_ollama("--port", port, "tiny"):
            await until(lambda: box.listed > listed)
            assert await box.told(TINY) == ""
        running.cancel()
