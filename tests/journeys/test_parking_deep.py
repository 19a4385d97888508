"""A slot is kept by deep sleep alone, as is the default: a real llama-server, a real page-out, real swap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.slot_stack import SlotServer
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_parking import asked, files, found, parking
from tests.llama import MODEL
from tests.swapspace import file_swap

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the slots."""
    made = tmp_path_factory.mktemp("kept")
    (made / "engine").mkdir(mode=0o700)
    return made


@pytest.fixture(scope="module")
def hive(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    server = SlotServer(tmp_path_factory.mktemp("llama"), kept)
    server.start()
    config = f"[inference]\nllama_slot_dir = {kept}\n[daemon]\nbackend_check_s = 0.2\n"
    try:
        with file_swap(256), stack(url=server.url, config=config) as hive:
            for name in ("one", "two"):
                hive.post("/api/agents", {"name": name, "command": ["/bin/sleep", "1000"]})
            until(
                lambda: asked(hive, "two", MODEL) and asked(hive, "two", MODEL)[1], within_s=60, what="slots are named"
            )
            yield hive
    finally:
        server.kill()


def test_light_sleep_keeps_no_slot_and_the_step_to_deep_sleep_does(hive: Stack, kept: Path) -> None:
    tokens, _ = asked(hive, "one", MODEL)
    hive.post("/api/agents/one/pause")
    until(lambda: hive.get("/api/agents/one")["depth"] == "light", within_s=20, what="it sleeps")
    assert (parking(hive)["saved"], files(kept)) == (0, [])
    hive.post("/api/agents/one/pause", {"deep": True})
    until(lambda: hive.get("/api/agents/one")["depth"] == "deep", within_s=30, what="it sleeps deep")
    until(lambda: parking(hive)["saved"] == 1, within_s=60, what="its slot is on the disk")
    assert asked(hive, "two", MODEL)[1] < tokens / 2, "the slot is another's"
    told = asked(hive, "one", MODEL)
    assert (told[0], found(hive, "restored")) == (tokens, 1)
    assert told[1] >= 0.95 * tokens
    until(lambda: not files(kept), within_s=60, what="it is used once")
