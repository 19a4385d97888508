"""A port of this host is one agent's: two that shared one answered each other's callers."""

from __future__ import annotations

import sqlite3

import pytest

from hive.domain import AgentSpec, Isolation
from hive.errors import WrongState
from hive.store import runtime_settings
from hive.store.runtime_settings import BOOT
from tests.control.box import SLEEPER, Box
from tests.waiting import until

TAKEN = "^port: 9131 is a1's already$"


def spec_of(name: str, port: int | None = 9131, egress: list[str] | None = None) -> AgentSpec:
    return AgentSpec(name=name, command=SLEEPER, port=port, egress=egress)


async def record(box: Box, *specs: AgentSpec) -> None:
    """Records agents at port 9131 as a daemon did that let them share it; they were not started."""
    for number, spec in enumerate(specs):
        await box.services.agents.apply(spec_of(spec.name, 9200 + number), "uid:0")
    assert box.daemon is not None

    def share(conn: sqlite3.Connection) -> None:
        conn.execute("UPDATE agents SET spec = json_set(spec, '$.port', 9131)")

    await box.daemon._database.write(share)
    await box.stop_daemon()
    await box.start_daemon()


async def test_a_port_of_another_agent_is_refused_with_who_has_it(box: Box) -> None:
    """A call with dup's URL and token was answered by a1, or hung while a1 was frozen."""
    await box.everything()
    await box.create("a1", port=9131)
    with pytest.raises(WrongState, match=TAKEN) as refused:
        await box.create("dup", port=9131)
    assert refused.value.hint == "another port, or --no-network (as root)"
    for dry_run in (True, False):
        with pytest.raises(WrongState, match=TAKEN):
            await box.services.agents.apply(spec_of("dup"), "uid:0", dry_run=dry_run)
    assert box.services.agent_views.shorts("", 10)["total"] == 1
    await box.stop("a1", "uid:0")
    with pytest.raises(WrongState, match=TAKEN):
        await box.create("dup", port=9131)


async def test_an_agent_keeps_its_own_port_and_may_not_move_to_another_ones(box: Box) -> None:
    await box.everything()
    await box.create("a1", port=9131)
    await box.create("bob", port=9132)
    answer = await box.services.agents.apply(spec_of("a1", egress=["192.0.2.0/24"]), "uid:0", dry_run=True)
    assert answer["changed"] == ["egress"]
    with pytest.raises(WrongState, match=TAKEN):
        await box.services.agents.apply(spec_of("bob"), "uid:0")
    assert (await box.view("bob"))["port"] == 9132


async def test_a_port_is_its_agents_until_it_listens_there_no_more(box: Box) -> None:
    """It is asked for at the port it was started with until it is started anew."""
    await box.everything()
    await box.create("a1", port=9131)
    await box.services.agents.apply(spec_of("a1", 9132), "uid:0")
    with pytest.raises(WrongState, match=TAKEN):
        await box.create("bob", port=9131)
    await box.restart("a1", "uid:0")
    assert (await box.create("bob", port=9131))["status"] == "running"
    await box.services.agents.remove("bob", "uid:0")
    assert (await box.create("carl", port=9131))["status"] == "running"


async def test_networks_of_their_own_have_the_same_port_each(box: Box) -> None:
    await box.everything()
    await box.create("a1", port=9131)
    for name in ("bob", "carl"):
        assert (await box.services.agents.apply(spec_of(name, egress=[]), "uid:0"))["created"]
    with pytest.raises(WrongState, match=TAKEN):
        await box.services.agents.apply(spec_of("bob"), "uid:0")


async def test_on_an_installed_hive_agents_in_the_hosts_network_share_its_ports(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(isolation=Isolation.FULL)
    apply = box.services.agents.apply
    await apply(spec_of("alone"), "uid:0")
    await apply(spec_of("alone-too"), "uid:0")
    await apply(spec_of("a1", egress=["192.0.2.0/24"]), "uid:0")
    with pytest.raises(WrongState, match=TAKEN):
        await apply(spec_of("bob", egress=["192.0.2.0/24"]), "uid:0")


async def test_of_two_that_were_recorded_with_one_port_one_runs_at_a_time(box: Box) -> None:
    """Recorded before a port was one agent's, both are there; the second says why it does not start."""
    await box.everything()
    await record(box, spec_of("a1"), spec_of("dup"))
    assert (await box.start("a1", "uid:0"))["status"] == "running"
    with pytest.raises(WrongState, match=TAKEN) as refused:
        await box.start("dup", "uid:0")
    assert refused.value.hint == "hive agent stop a1, or hive agent edit dup for another port"
    seen = await box.view("dup")
    assert (seen["status"], seen["reason"]) == ("error", "port: 9131 is a1's already")
    with pytest.raises(WrongState, match="port: 9131 is a1's already"):
        await box.restart("dup", "uid:0")
    await box.stop("a1", "uid:0")
    assert (await box.start("dup", "uid:0"))["status"] == "running"
    with pytest.raises(WrongState, match="port: 9131 is dup's already"):
        await box.start("a1", "uid:0")
    await box.services.agents.apply(spec_of("a1", 9132), "uid:0")
    assert (await box.start("a1", "uid:0"))["status"] == "running"


async def test_a_new_daemon_knows_who_listens_at_a_port(box: Box) -> None:
    await box.everything()
    await record(box, spec_of("a1"), spec_of("dup"))
    pid = (await box.start("a1", "uid:0"))["pid"]
    await box.stop_daemon()
    await box.start_daemon()
    with pytest.raises(WrongState, match=TAKEN):
        await box.start("dup", "uid:0")
    assert (await box.view("a1"))["pid"] == pid


async def test_after_a_boot_of_two_that_ran_one_is_started(box: Box) -> None:
    """Neither listens yet when both are to be started: they must not keep each other from it."""
    await box.everything()
    await record(box, spec_of("a1"), spec_of("dup"))
    assert box.daemon is not None
    database = box.daemon._database

    def ran(conn: sqlite3.Connection) -> None:
        conn.execute("UPDATE agents SET status = 'running'")
        runtime_settings.put(conn, BOOT, "another-boot", actor="hive", now=1.0)

    await until(lambda: database.read_now(lambda conn: runtime_settings.get(conn, BOOT)))  # it notes its own first
    await database.write(ran)
    await box.stop_daemon()
    await box.start_daemon()
    await until(lambda: {box.life(name).status for name in ("a1", "dup")} == {"running", "error"})
    one, other = sorted(("a1", "dup"), key=lambda name: box.life(name).status, reverse=True)
    assert (await box.view(other))["reason"] == f"port: 9131 is {one}'s already"
