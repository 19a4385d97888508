"""Blocks of uids for templates, in a real database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from hive.domain import Agent, AgentSpec
from hive.errors import Saturated
from hive.store import agents, template_uids
from hive.store.migrations import migrate
from hive.store.template_uids import UIDS, UidBlock, block_of, reserve

FIRST = 70000


@pytest.fixture
def conn() -> Iterator[sqlite3.Connection]:
    found = sqlite3.connect(":memory:", isolation_level=None)
    found.row_factory = sqlite3.Row
    migrate(found)
    yield found
    found.close()


def plain(conn: sqlite3.Connection, agent: str, in_use: frozenset[int] = frozenset()) -> int:
    return agents.allocate_uid(conn, agent, first_uid=FIRST, in_use=in_use)


def block(conn: sqlite3.Connection, name: str = "lg", owner: str = "default", **more: object) -> UidBlock:
    """All there are are described, unless it says which."""
    described = {tuple(row) for row in conn.execute("SELECT template, owner FROM template_uids")}
    given = {"in_use": frozenset(), "described": described, **more}
    return reserve(conn, name, owner, first_uid=FIRST, **given)  # type: ignore[arg-type]


def allocate(conn: sqlite3.Connection, agent: str, of: UidBlock, in_use: frozenset[int] = frozenset()) -> int:
    return template_uids.allocate(conn, agent, "lg", of, in_use=in_use)


def test_a_block_is_a_templates_for_good_and_no_other_agent_has_a_uid_of_it(conn: sqlite3.Connection) -> None:
    assert plain(conn, "a") == FIRST
    lg = block(conn)
    assert (lg, block(conn), block_of(conn, "lg", "default")) == (UidBlock(FIRST + 1, UIDS), lg, lg)
    assert plain(conn, "b") == lg.last + 1
    other = block(conn, "other")
    assert other.first == lg.last + 2
    assert block(conn, "lg", "team-a").first == other.last + 1  # two owners never share one
    assert block_of(conn, "lg", "team-b") is None


def test_its_agents_uids_are_given_back_to_its_agents_alone(conn: sqlite3.Connection) -> None:
    lg = block(conn)
    uids = [allocate(conn, f"a{number}", lg) for number in range(3)]
    assert uids == [lg.first + 1, lg.first + 2, lg.first + 3]
    agents.remove(conn, "a0", now=50.0)
    assert plain(conn, "x") == lg.last + 1
    assert allocate(conn, "y", lg, frozenset({uids[0]})) == lg.first + 4  # a process of it is left
    assert template_uids.allocate(conn, "w", "lg", lg, in_use=(), freed_before=50.0) == lg.first + 5
    assert allocate(conn, "z", lg) == uids[0]


def test_a_full_block_is_said(conn: sqlite3.Connection) -> None:
    lg = block(conn)
    for number in range(len(lg.of_agents)):
        allocate(conn, f"a{number}", lg)
    with pytest.raises(Saturated, match="template lg has 254 uids for its agents, and all are given out"):
        allocate(conn, "more", lg)


def test_a_block_lies_where_no_process_and_no_nobody_is(conn: sqlite3.Connection) -> None:
    assert block(conn, in_use=frozenset({FIRST + 7, FIRST + 100})).first == FIRST + 101
    low = reserve(conn, "low", "default", first_uid=65400, in_use=frozenset(), described={("lg", "default")})
    assert low.first > 65535
    conn.execute("INSERT INTO uids VALUES (?, 'x', NULL)", (2**32 - 100,))
    with pytest.raises(Saturated, match="no block of uids is left"):
        block(conn, "high")


def test_the_block_of_a_template_that_is_gone_is_used_again_once_nobody_is_in_it(conn: sqlite3.Connection) -> None:
    lg = block(conn)
    uid = allocate(conn, "a", lg)
    agents.insert(conn, Agent(id="a", spec=AgentSpec(name="a", command=["x"], template="lg"), uid=uid))
    assert block(conn, "b").first == lg.last + 1  # an agent is in it
    agents.remove(conn, "a", now=10.0)
    assert block(conn, "c", described={("lg", "default"), ("b", "default")}).first == lg.last + 1 + UIDS
    assert block(conn, "d", freed_before=10.0, described={("b", "default"), ("c", "default")}).first > lg.last + UIDS
    gone = {("b", "default"), ("c", "default"), ("d", "default")}
    assert block(conn, "e", in_use=frozenset({uid}), described=gone).first > lg.last + UIDS
    assert block(conn, "f", described={*gone, ("e", "default")}) == lg
    assert block_of(conn, "lg", "default") is None


def test_code_that_knows_no_blocks_gives_out_none_of_one(conn: sqlite3.Connection) -> None:
    """The last uid of a block is held in the table that older code counts on from."""
    lg = block(conn)
    assert conn.execute("SELECT max(uid) FROM uids").fetchone()[0] == lg.last
    assert conn.execute("SELECT count(*) FROM uids WHERE agent_id = 'template:lg'").fetchone()[0] == 2
