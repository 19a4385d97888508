"""Kept responses in their own file: chains, bounds, and that what was deleted is on the disk no more."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest, HiveError, NotFound, StoreFull, TooLarge, WrongState
from hive.store import responses, responses_file
from hive.store.response_items import ItemPage, as_items, page_of_items
from hive.store.responses import KeptResponse, KeptSum
from hive.store.responses_file import SIDES, ResponsesFile

MUCH = 10_000_000


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[ResponsesFile]:
    found = ResponsesFile(tmp_path / "responses.db")
    yield found
    found.close()


def response(name: str, text: str = "") -> bytes:
    content = [{"type": "output_text", "text": text or f"answer {name}", "annotations": []}]
    output = [{"id": f"msg_of_{name}", "type": "message", "role": "assistant", "content": content}]
    return json.dumps({"id": name, "object": "response", "output": output}).encode()


def one(name: str, asked: Any = "", *, previous: str | None = None, agent: str = "a1", text: str = "") -> KeptResponse:
    return KeptResponse(agent, name, previous, json.dumps(asked or f"question {name}").encode(), response(name, text))


async def keep(file: ResponsesFile, *kept: KeptResponse, most: int = MUCH, now: float = 0.0) -> list[int]:
    return [
        await file.do(lambda conn, one=one: responses.keep(conn, one, most_bytes=most, now=now))  # type: ignore[misc]
        for one in kept
    ]


async def history(file: ResponsesFile, name: str, *, agent: str = "a1", most: int = MUCH) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        await file.do(lambda conn: responses.history(conn, agent, name, most_bytes=most))
    )
    return found


def said(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"] if isinstance(item["content"], str) else item["content"][0]["text"] for item in items]


def on_disk(path: Path) -> bytes:
    files = [path, *(path.with_name(path.name + side) for side in SIDES)]
    return b"".join(file.read_bytes() for file in files if file.exists())


async def test_a_conversation_is_its_turns_in_their_order(file: ResponsesFile) -> None:
    await keep(file, one("r1"), one("r2", previous="r1"), one("r3", previous="r2"), one("side", previous="r1"))
    assert said(await history(file, "r3")) == [
        "question r1", "answer r1", "question r2", "answer r2", "question r3", "answer r3"
    ]  # fmt: skip
    assert said(await history(file, "side")) == ["question r1", "answer r1", "question side", "answer side"]


async def test_nothing_of_another_agent_is_found(file: ResponsesFile) -> None:
    """The same words as for one that never was, whichever way it is asked."""
    await keep(file, one("r1"), one("mine", previous="r1", agent="b2"))
    ways: list[responses_file.Work[Any]] = [
        lambda conn: responses.get(conn, "b2", "r1"),
        lambda conn: responses.delete(conn, "b2", "r1"),
        lambda conn: responses.history(conn, "b2", "r1", most_bytes=MUCH),
        lambda conn: responses.history(conn, "b2", "mine", most_bytes=MUCH),
        lambda conn: responses.input_items(conn, "b2", "r1", ItemPage(), most_bytes=MUCH),
    ]
    for way in ways:
        with pytest.raises(NotFound, match=r"^Response with id 'r1' not found\.$"):
            await file.do(way)
    with pytest.raises(NotFound, match=r"^Item with id 'msg_of_r1' not found\.$"):
        await file.do(lambda conn: responses.items_named(conn, "b2", ["msg_of_r1"], most_bytes=MUCH))
    assert await file.do(lambda conn: responses.get(conn, "a1", "r1")) == response("r1")


async def test_the_same_id_may_be_two_agents_own(file: ResponsesFile) -> None:
    await keep(file, one("r1", "hers"), one("r1", "his", agent="b2"))
    assert said(await history(file, "r1", agent="b2")) == ["his", "answer r1"]


async def test_beyond_its_bytes_the_oldest_of_that_agent_go(file: ResponsesFile) -> None:
    await keep(file, one("other", agent="b2"))
    await keep(file, one("r1", text="x" * 3000), one("r2", text="x" * 3000, previous="r1"))
    assert await keep(file, one("r3", text="x" * 3000, previous="r2"), most=9000) == [1]
    assert await file.do(responses.agents) == ["a1", "b2"]
    with pytest.raises(NotFound, match="'r1'"):
        await history(file, "r3")
    found = await file.do(lambda conn: responses.summed(conn, "a1"))
    assert (found.responses, found.bytes <= 9000) == (2, True)
    with pytest.raises(TooLarge):
        await keep(file, one("r4", text="x" * 9000), most=9000)
    assert (await file.do(lambda conn: responses.summed(conn, "a1"))).responses == 2


async def test_an_item_is_found_by_its_id_whoever_wrote_it(file: ResponsesFile) -> None:
    """@ai-sdk/openai names items it has seen instead of sending them again."""
    await keep(file, one("r1", [{"id": "mine", "role": "user", "content": "hello"}]))
    names = ["msg_of_r1", "mine"]
    found = await file.do(lambda conn: responses.items_named(conn, "a1", names, most_bytes=MUCH))
    assert [json.loads(item)["id"] for item in found] == names
    await keep(file, one("r2", [*({"type": "item_reference", "id": name} for name in names[::-1])]))
    assert said(await history(file, "r2")) == ["hello", "answer r1", "answer r2"]
    await file.do(lambda conn: responses.delete(conn, "a1", "r1"))
    with pytest.raises(NotFound, match="Item with id 'mine'"):
        await history(file, "r2")


async def test_a_conversation_is_bounded_in_bytes_and_turns(
    file: ResponsesFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep(file, one("r1"), one("r2", previous="r1"), one("r3", previous="r2"))
    with pytest.raises(BadRequest, match="longer than 300 bytes"):
        await history(file, "r3", most=300)
    monkeypatch.setattr(responses, "TURNS_MAX", 2)
    with pytest.raises(BadRequest, match="more than 2 responses"):
        await history(file, "r3")
    await keep(file, one("own", previous="own"))  # a circle ends too
    with pytest.raises(BadRequest, match="more than 2 responses"):
        await history(file, "own")


async def test_an_item_that_is_named_again_and_again_does_not_grow_beyond_bounds(file: ResponsesFile) -> None:
    """A reference has 40 bytes, and what it names may be a megabyte: a body of them would become gigabytes."""
    await keep(file, one("r1", text="x" * 100_000))
    named = [{"type": "item_reference", "id": "msg_of_r1"}] * 20
    await keep(file, one("r2", named))
    assert len(await history(file, "r2")) == 21
    with pytest.raises(BadRequest, match="longer than 1000000 bytes"):
        await history(file, "r2", most=1_000_000)


async def test_what_is_read_for_a_conversation_is_bounded_too(file: ResponsesFile) -> None:
    """Answers repeat their requests' instructions: a thousand short turns could make a thousand megabytes to read."""
    long = [one(f"r{n}", previous=f"r{n - 1}" if n else None) for n in range(10)]
    await keep(file, *(turn._replace(response=turn.response[:-1] + b',"i":"%b"}' % (b"x" * 10_000)) for turn in long))
    assert len(await history(file, "r9", most=20_000)) == 20
    with pytest.raises(BadRequest, match="longer than"):
        await history(file, "r9", most=10_000)
    names = [f"msg_of_r{n}" for n in range(10)]
    with pytest.raises(BadRequest, match="longer than"):
        await file.do(lambda conn: responses.items_named(conn, "a1", names, most_bytes=10_000))


async def test_input_items_are_what_the_model_was_given_page_by_page(file: ResponsesFile) -> None:
    await keep(
        file, one("r1"), one("r2", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], previous="r1")
    )

    async def page(**fields: Any) -> dict[str, Any]:
        wanted = ItemPage(**fields)
        found: dict[str, Any] = json.loads(
            await file.do(lambda conn: responses.input_items(conn, "a1", "r2", wanted, most_bytes=MUCH))
        )
        return found

    whole = await page()
    assert said(whole["data"]) == ["b", "a", "answer r1", "question r1"]
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "b"}]
    assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (
        False, whole["data"][0]["id"], whole["data"][-1]["id"]
    )  # fmt: skip
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 4
    first = await page(limit=3, ascending=True)
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    rest = await page(limit=3, ascending=True, after=first["last_id"])
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == (ids[:1], False)
    with pytest.raises(BadRequest, match="no item 'gone'"):
        await page(after="gone")


@pytest.mark.parametrize("asked", [b"1", b"{}", b"[1]", b'["a"]', b"[", b'[{"id":7}]', b"\xff", b"[" * 5000])
def test_what_is_no_input_is_refused_as_such(asked: bytes) -> None:
    with pytest.raises(BadRequest):
        as_items(asked, "r")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "type", "x", '"id"']), inner),
    max_leaves=8,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.none() | st.text(max_size=6),
            "type": st.none() | st.sampled_from(["message", "reasoning", "item_reference"]),
            "content": VALUES,
            "x": VALUES,
        },
    ),
    max_size=6,
)


@given(ITEMS, st.booleans(), st.integers(1, 3))
def test_any_items_keep_what_they_say_and_are_paged_whole(
    items: list[dict[str, Any]], ascending: bool, limit: int
) -> None:
    """An id is put into the text of an item: whatever stands there, the rest of it stays."""
    text = json.dumps(items, indent=1 if ascending else None).encode()
    given_ids = json.loads(as_items(text, "r"))
    assert [{**item, "id": 0} for item in given_ids] == [{**item, "id": 0} for item in items]
    assert all(item["id"] for item in given_ids)
    assert [new["id"] for new, old in zip(given_ids, items, strict=True) if old.get("id")] == [
        old["id"] for old in items if old.get("id")
    ]
    if len({item["id"] for item in given_ids}) < len(given_ids):
        return  # a client's own ids may repeat: then `after` means the first of them
    seen, after = [], ""
    while True:
        page = json.loads(page_of_items(as_items(text, "r"), ItemPage(limit, after, ascending)))
        seen += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert seen == [item["id"] for item in (given_ids if ascending else given_ids[::-1])]


def test_an_empty_list_has_a_page() -> None:
    assert json.loads(page_of_items(b"[]", ItemPage())) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False
    }  # fmt: skip


@pytest.mark.parametrize("how", ["delete", "forget", "expire"])
async def test_what_was_deleted_is_on_the_disk_no_more(how: str, file: ResponsesFile) -> None:
    """SQLite leaves what was deleted in free pages and in the log: a prompt could still be read there."""
    await keep(file, one("r1", "a secret question " * 500, text="a secret answer " * 500))
    await keep(file, one("r2", "stays"))
    assert b"secret question" in on_disk(file.path)
    ways: dict[str, responses_file.Work[Any]] = {
        "delete": lambda conn: responses.delete(conn, "a1", "r1"),
        "forget": lambda conn: responses.forget(conn, "a1"),
        "expire": lambda conn: responses.expire(conn, before=1.0),
    }
    await file.do(lambda conn: None, then_clean=True)
    before = os.stat(file.path).st_size
    await file.do(ways[how], then_clean=True)
    assert b"secret" not in on_disk(file.path)
    assert os.stat(file.path).st_size < before - 15_000, "its room is given back"
    assert (await file.do(lambda conn: responses.summed(conn, "a1"))).responses == (1 if how == "delete" else 0)


async def test_expiry_and_tidying_go_by_time_owner_and_bound(file: ResponsesFile) -> None:
    await keep(file, one("old"), one("gone", agent="g"), now=10.0)
    await keep(file, one("new"), one("newer"), one("gone2", agent="g"), now=20.0)
    assert await file.do(
        lambda conn: responses.tidy(conn, gone={"g"}, most_bytes=MUCH, before=15.0), then_clean=True
    ) == (3, 2)
    found = await file.do(lambda conn: responses.summed(conn, "a1"))
    assert (found.responses, found.oldest_at) == (2, 20.0)
    assert await file.do(lambda conn: responses.tidy(conn, gone=(), most_bytes=0, before=0.0)) == (2, 0)
    assert await file.do(lambda conn: responses.summed(conn, "a1")) == KeptSum()


async def test_it_is_made_when_it_is_needed_for_its_owner_alone_and_stays(file: ResponsesFile) -> None:
    assert not file.exists
    await keep(file, one("r1"))
    assert file.exists
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.close()
    again = ResponsesFile(file.path)
    assert said(await history(again, "r1")) == ["question r1", "answer r1"]
    again.close()
    again.close()
    with pytest.raises(HiveError, match="closed"):
        again.do(responses.agents)


@pytest.mark.parametrize("damage", [b"no database at all" * 400, b""])
async def test_a_damaged_file_is_deleted_and_begun_anew(
    damage: bytes, file: ResponsesFile, caplog: pytest.LogCaptureFixture
) -> None:
    """Set aside it would hold prompts for ever that were to go with their agents."""
    await keep(file, one("r1", "secret"))
    file.close()
    file.path.write_bytes(damage)
    again = ResponsesFile(file.path)
    assert await again.do(responses.agents) == []
    await keep(again, one("r2"))
    again.close()
    assert ("responses_damaged" in caplog.text) is bool(damage)
    assert {path.name for path in file.path.parent.iterdir()} == {"responses.db"}


async def test_damage_that_is_met_later_ends_that_file_only(
    file: ResponsesFile, caplog: pytest.LogCaptureFixture
) -> None:
    await keep(file, one("r1", text="x" * 200_000))
    await file.do(lambda conn: None, then_clean=True)
    with file.path.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"\xff" * 180_000)
    other = ResponsesFile(file.path)
    with pytest.raises((HiveError, NotFound)):
        await history(other, "r1")
    other.close()
    assert "responses_damaged" in caplog.text
    file.close()


async def test_a_newer_hives_file_is_left_alone(file: ResponsesFile) -> None:
    await keep(file, one("r1"))
    file.close()
    conn = sqlite3.connect(file.path)
    conn.execute("PRAGMA user_version = 2")
    conn.close()
    again = ResponsesFile(file.path)
    with pytest.raises(WrongState, match="newer Hive"):
        await again.do(responses.agents)
    again.close()
    assert b"question r1" in on_disk(file.path)


async def test_the_last_of_a_disk_is_never_taken(file: ResponsesFile, monkeypatch: pytest.MonkeyPatch) -> None:
    await keep(file, one("r1"))
    file.room_for(1000)
    found = os.statvfs(file.path.parent)
    monkeypatch.setattr(responses_file, "RESERVE_BYTES", found.f_bavail * found.f_frsize * 2)
    with pytest.raises(StoreFull, match="are free on the disk"):
        file.room_for(0)


async def test_what_fails_undoes_itself_alone(file: ResponsesFile) -> None:
    await keep(file, one("r1"))
    with pytest.raises(HiveError, match="UNIQUE"):
        await keep(file, one("r1"))
    with pytest.raises(BadRequest):
        await keep(file, one("r2")._replace(response=b"[]"))
    await keep(file, one("r3"))
    assert (await file.do(lambda conn: responses.summed(conn, "a1"))).responses == 2
