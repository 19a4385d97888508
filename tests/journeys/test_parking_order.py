"""Order of sleeping, waking, saving and putting back a slot: neither sleep nor wake waits, with a full disk too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.journeys.slot_stack import (
    SlotHold,
    agree,
    asleep,
    files,
    found,
    is_named,
    parking,
    relay_before,
    rows,
    say,
    slot_config,
    slot_server,
)
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_chaos import is_frozen

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 2 MiB."""
    made = tmp_path_factory.mktemp("kept")
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "hive-test", str(made)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    (made / "engine").mkdir(mode=0o700)
    yield made
    subprocess.run(["umount", "--lazy", str(made)], check=True)


@pytest.fixture(scope="module")
def relay(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotHold]:
    with (
        slot_server(tmp_path_factory.mktemp("llama"), kept) as server,
        relay_before(server, tmp_path_factory.mktemp("relay")) as relay,
    ):
        yield relay


@pytest.fixture(scope="module")
def running(kept: Path, relay: SlotHold) -> Iterator[Stack]:
    with stack(url=relay.url, config=slot_config(kept)) as hive:
        for name in ("one", "two"):
            hive.post("/api/agents", {"name": name, "command": ["/bin/sleep", "1000"]})
        yield hive


@pytest.fixture
def hive(running: Stack, kept: Path) -> Stack:
    """Both agents are awake, and nothing is on the disk."""
    until(lambda: is_named(running), within_s=60, what="the slots are named")
    for name in ("one", "two"):
        running.post(f"/api/agents/{name}/resume")
    until(lambda: files(kept) == [], within_s=60, what="nothing is on the disk")
    return running


def is_asleep(hive: Stack, agent: str) -> bool:
    """Both by what Hive says and by the process itself."""
    view = hive.get(f"/api/agents/{agent}")
    frozen = is_frozen(view["pid"])
    assert frozen is (view["status"] == "paused")
    return bool(frozen)


def fill(kept: Path) -> Path:
    """A file that takes all that is left of the disk."""
    filler = kept / "filler"
    disk = os.statvfs(kept)
    filler.write_bytes(bytes(disk.f_bavail * disk.f_frsize))
    return filler


def test_an_agent_is_asleep_before_its_slot_is_saved(hive: Stack, relay: SlotHold, kept: Path) -> None:
    say(hive, "one")
    saved = parking(hive)["saved"]
    relay.hold("before save")
    hive.post("/api/agents/one/pause")
    assert is_asleep(hive, "one")
    relay.until_held()
    assert (files(kept), parking(hive)["saved"]) == ([], saved)
    relay.release()
    until(lambda: parking(hive)["saved"] == saved + 1 and agree(hive, kept), within_s=60, what="it is saved")
    assert say(hive, "one").is_kept


@pytest.mark.parametrize("place", ["before save", "after save"])
def test_a_wake_cancels_a_save_and_waits_for_none(hive: Stack, relay: SlotHold, kept: Path, place: str) -> None:
    say(hive, "one")
    saved = parking(hive)["saved"]
    relay.hold(place)
    hive.post("/api/agents/one/pause")
    relay.until_held()
    hive.post("/api/agents/one/resume")
    assert not is_asleep(hive, "one")
    relay.release()
    until(lambda: "after save" in relay.events, within_s=60, what="the server has done what it was asked")
    until(lambda: files(kept) == [], within_s=60, what="nothing of it is left")
    assert parking(hive)["saved"] == saved
    assert say(hive, "one").is_kept, "nobody else has been in its slot"
    asleep(hive, "one")
    until(lambda: agree(hive, kept) and len(files(kept)) == 1, within_s=60, what="the next one is saved as always")
    say(hive, "one")


def test_an_agent_is_awake_before_its_slot_is_put_back(hive: Stack, relay: SlotHold, kept: Path) -> None:
    own = say(hive, "one").text
    asleep(hive, "one")
    say(hive, "two")
    relay.hold("before restore")
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(say, hive, "one")
        relay.until_held()
        hive.post("/api/agents/one/resume")
        assert not is_asleep(hive, "one")
        assert not asking.done() or asking.result().is_cold, "it was resumed first, or waited for no longer"
        relay.release()
        assert asking.result(60).text == own
    until(lambda: agree(hive, kept) and files(kept) == [], within_s=60, what="it is used once")


def test_a_request_goes_on_without_what_does_not_come(hive: Stack, relay: SlotHold, kept: Path) -> None:
    own, refused = say(hive, "one").text, found(hive, "refused")
    asleep(hive, "one")
    say(hive, "two")
    relay.hold("after restore")
    say(hive, "one")
    told = say(hive, "one")
    assert told.text == own
    assert found(hive, "refused") == refused + 1
    relay.release()
    until(lambda: files(kept) == [], within_s=60, what="it is deleted")


@pytest.mark.parametrize("place", ["before save", "after save"])
def test_a_full_disk_leaves_nothing_half_done_and_the_agent_asleep(
    hive: Stack, relay: SlotHold, kept: Path, place: str
) -> None:
    own, saved = say(hive, "one").text, parking(hive)["saved"]
    relay.hold(place)
    hive.post("/api/agents/one/pause")
    assert is_asleep(hive, "one"), "before anything is known of the disk"
    relay.until_held()
    filler = fill(kept)
    if place == "after save":
        assert len(files(kept)) == 2, "the server's file is whole; there is no room for the copy"
    relay.release()
    until(lambda: "after save" in relay.events, within_s=60, what="the server has tried")
    until(lambda: files(kept) == [filler] and rows(hive) == [], within_s=60, what="nothing of it is left")
    assert is_asleep(hive, "one")
    assert parking(hive)["saved"] == saved
    assert "slot_not_parked" in hive.log
    filler.unlink()
    say(hive, "two")
    assert say(hive, "one").text == own
    asleep(hive, "one")
    until(lambda: agree(hive, kept) and len(files(kept)) == 1, within_s=60, what="with room it is saved as always")
    say(hive, "two")
    after = say(hive, "one")
    assert (after.text, after.is_kept) == (own, True)


def test_a_disk_that_is_known_to_be_too_small_is_not_written_to(hive: Stack, relay: SlotHold, kept: Path) -> None:
    say(hive, "one")
    asleep(hive, "one")  # how large a token's part is, is known since
    say(hive, "one")
    until(lambda: files(kept) == [], within_s=60, what="nothing is on the disk")
    filler, saved = fill(kept), parking(hive)["saved"]
    os.truncate(filler, filler.stat().st_size - 8192)
    relay.hold("never")  # empties the events
    hive.post("/api/agents/one/resume")
    hive.post("/api/agents/one/pause")
    until(lambda: "the disk has no room for it" in hive.log, within_s=60, what="it is said")
    assert (relay.events, files(kept), parking(hive)["saved"]) == ([], [filler], saved)
    filler.unlink()
