"""Names of users: as they were a moment ago, and never waited for long."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hive.host import accounts
from hive.host.accounts import UserNames, name_of

NOBODYS = 2**31 - 7


async def test_who_has_a_name_here_is_known_by_it_and_who_has_none_by_none() -> None:
    names = UserNames()
    assert names.of("uid:0") == "", "it was never learnt"
    for actor in ("uid:0", f"uid:{NOBODYS}", f"uid:{2**80}", "idle", "uid:x"):
        await names.learn(actor)
    assert [names.of(actor) for actor in ("uid:0", f"uid:{NOBODYS}", "idle", "uid:x")] == ["root", "", "", ""]
    assert name_of(0) == "root"


async def test_a_user_who_is_renamed_or_removed_is_known_by_the_new_name_later(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {7: "ann"}
    monkeypatch.setattr(accounts, "name_of", lambda uid: known.get(uid, ""))
    names = UserNames()
    await names.learn("uid:7")
    known[7] = "anna"
    await names.learn("uid:7")
    assert names.of("uid:7") == "ann", "for a minute"
    monkeypatch.setattr(accounts, "NAME_KEPT_S", 0.0)
    await names.learn("uid:7")
    assert names.of("uid:7") == "anna"
    del known[7]
    await names.learn("uid:7")
    assert names.of("uid:7") == ""


async def test_a_directory_that_hangs_is_asked_once_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, begun, goes_on = [], threading.Event(), threading.Event()

    def slow(uid: int) -> str:
        asked.append(uid)
        begun.set()
        goes_on.wait()
        return "ann"

    monkeypatch.setattr(accounts, "name_of", slow)
    monkeypatch.setattr(accounts, "NAME_WITHIN_S", 0.01)
    names = UserNames()
    try:
        await asyncio.gather(*(names.learn("uid:7") for _ in range(5)))
        await asyncio.to_thread(begun.wait)
        await asyncio.gather(*(names.learn("uid:7") for _ in range(5)))
        assert (asked, names.of("uid:7")) == ([7], "")
    finally:
        goes_on.set()
    monkeypatch.setattr(accounts, "NAME_WITHIN_S", 60.0)
    await names.learn("uid:7")
    assert (asked, names.of("uid:7")) == ([7], "ann")
