"""Slots that were kept and are put back at the same server for the same cache group alone: real llama-servers."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.journeys.slot_stack import (
    SlotHold,
    SlotServer,
    agree,
    asleep,
    files,
    found,
    is_named,
    relay_before,
    say,
    slot_config,
    slot_server,
)
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(300)]
ONE_GROUP = "[tenant acme]\ncache_group = us\n[tenant bolt]\ncache_group = us\n"
TWO_GROUPS = "[tenant acme]\n[tenant bolt]\n"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir(mode=0o700)
    (tmp_path / "kept" / "engine").mkdir(mode=0o700)
    return tmp_path / "kept"


@pytest.fixture
def server(tmp_path: Path, kept: Path) -> Iterator[SlotServer]:
    with slot_server(tmp_path, kept) as server:
        yield server


@pytest.fixture
def relay(server: SlotServer, tmp_path: Path) -> Iterator[SlotHold]:
    (tmp_path / "relay").mkdir()
    with relay_before(server, tmp_path / "relay") as relay:
        yield relay


def two_agents(hive: Stack) -> None:
    for name, tenant in (("one", "acme"), ("two", "bolt")):
        hive.post("/api/agents", {"name": name, "command": ["/bin/sleep", "1000"], "tenant": tenant})


def is_known(hive: Stack) -> bool:
    """Whether the server in use is up, by what Hive says."""
    return bool(hive.get("/api/system/inference")["running"])


def test_a_slot_is_put_back_at_no_other_build_context_or_kind_of_kv_cache(
    server: SlotServer, kept: Path, tmp_path: Path
) -> None:
    another = tmp_path / "llama-server"
    shutil.copy2(server.program, another)
    with stack(url=server.url, config=slot_config(kept, more=ONE_GROUP)) as hive:
        two_agents(hive)
        until(lambda: is_named(hive), within_s=60, what="the slots are named")
        own = say(hive, "one").text

        def after(change: str, *more: str) -> str:
            """The finding of the agent after its sleep, in which the server became another one."""
            asleep(hive, "one")
            [file] = files(kept)
            before = {what: found(hive, what) for what in ("restored", "refused")}
            server.kill()
            until(lambda: not is_known(hive), within_s=60, what="it is gone")
            server.start(*more)
            until(lambda: is_known(hive), within_s=60, what="it is there again")
            said = say(hive, "one")
            [what] = [what for what, count in before.items() if found(hive, what) > count]
            assert (said.text == own, said.is_kept) == (True, what == "restored"), change
            until(lambda: not file.exists() and agree(hive, kept), within_s=60, what="it is deleted")
            return what

        assert after("nothing") == "restored"
        assert after("context", "-c", "2048") == "refused"
        assert after("context back") == "refused"
        assert after("KV type", "-ctk", "f32") == "refused"
        assert after("KV type back") == "refused"
        server.program = another
        assert after("build") == "refused"


def test_of_two_cache_groups_nothing_is_kept_and_nothing_is_used_again(
    server: SlotServer, relay: SlotHold, kept: Path
) -> None:
    with stack(url=relay.url, config=slot_config(kept, more=TWO_GROUPS)) as hive:
        two_agents(hive)
        for _ in range(2):
            for agent in ("one", "two"):
                assert say(hive, agent).reused == 0
                hive.post(f"/api/agents/{agent}/pause")
                hive.post(f"/api/agents/{agent}/resume")
        assert (relay.events, files(kept)) == ([], []), "the server was asked for no slot"


def test_what_was_kept_before_its_tenant_was_set_apart_is_never_put_back(server: SlotServer, kept: Path) -> None:
    with stack(url=server.url, config=slot_config(kept, more=ONE_GROUP)) as hive:
        two_agents(hive)
        until(lambda: is_named(hive), within_s=60, what="the slots are named")
        own = say(hive, "one").text
        asleep(hive, "one")
        say(hive, "two")
        hive.stop()
        hive.rewrite(slot_config(kept, more=TWO_GROUPS))
        hive.start()
        assert len(files(kept)) == 1
        said = say(hive, "one")
        assert (said.text, said.reused) == (own, 0)
        until(lambda: files(kept) == [] and agree(hive, kept), within_s=60, what="it is deleted")


def test_an_agent_that_becomes_another_tenants_leaves_what_it_had(server: SlotServer, kept: Path) -> None:
    with stack(url=server.url, config=slot_config(kept, more=ONE_GROUP)) as hive:
        two_agents(hive)
        until(lambda: is_named(hive), within_s=60, what="the slots are named")
        asleep(hive, "one")
        spec = {"name": "one", "command": ["/bin/sleep", "1000"], "tenant": "bolt"}
        hive.client().put("/api/agents/one", spec)
        until(lambda: files(kept) == [] and agree(hive, kept), within_s=60, what="it is deleted")


def test_a_record_that_names_another_tenants_file_gives_nobody_that_file(server: SlotServer, kept: Path) -> None:
    with stack(url=server.url, config=slot_config(kept, more=ONE_GROUP)) as hive:
        two_agents(hive)
        until(lambda: is_named(hive), within_s=60, what="the slots are named")
        own = say(hive, "two").text
        say(hive, "one")
        asleep(hive, "one")
        two = hive.get("/api/agents/two")["id"]
        hive.stop()
        with closing(sqlite3.connect(hive.state / "hive.db")) as database, database:
            database.execute("UPDATE parked_slots SET agent = ?", (two,))
        hive.start()
        said = say(hive, "two")
        assert (said.text, said.is_kept, found(hive, "refused")) == (own, False, 1)
        until(lambda: files(kept) == [] and agree(hive, kept), within_s=60, what="it is deleted")
