"""Acts of the `hive` command without a daemon leave a trace, for every user and every end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hive.audit.audit_log import AuditLog
from hive.cli.main import main
from hive.errors import HiveError, UsageError
from hive.files import offline_audit as told
from hive.files.backup_contents import installed
from hive.files.conf_edit import set_value, unset_value
from hive.files.layout import CONF_FILE, STATE, TARGET, UNITS, Layout
from hive.files.secrets import directory, generate, rotate
from hive.host.accounts import name_of
from hive.install import conf_file
from hive.store import acts, chain
from hive.store import audit as table
from hive.store.acts import OfflineAct, acts_of
from hive.store.database import Database
from hive.store.live import Live

ME = f"uid:{os.geteuid()}"


@pytest.fixture
def box(tmp_path: Path) -> Layout:
    """An installed Hive in a root of its own."""
    layout = Layout(tmp_path / "root")
    for path in (UNITS, f"{STATE}/daemon", "/etc/hive"):
        layout.at(path).mkdir(parents=True)
    (layout.at(UNITS) / TARGET).write_text("[Unit]\n")
    layout.at(CONF_FILE).write_text(conf_file.text())
    generate(layout)
    return layout


def acts_in(box: Layout) -> list[OfflineAct]:
    return acts.read(acts_of(installed(box).database)).acts


def test_a_rotation_is_told_and_no_value_is(box: Layout) -> None:
    rotate(box, "box-key")
    with pytest.raises(HiveError):
        rotate(box, "no-such\x1b[2J" + "x" * 1000)
    one, two = acts_in(box)
    assert (one.actor, one.act, one.target, one.outcome) == (ME, "rotate_secret", "box-key", "ok")
    assert (two.target[:11], len(two.target), two.outcome) == ("no-such\x1b[2J", 200, "not_found")
    text = acts_of(installed(box).database).read_bytes()
    assert not [name for name in directory(box).iterdir() if name.read_bytes() in text]


def test_a_setting_is_told_with_what_it_was_and_is(box: Layout) -> None:
    conf = box.at(CONF_FILE)
    set_value(conf, "proxy.queue_depth", "32", dry_run=True)
    assert acts_in(box) == []
    set_value(conf, "proxy.queue_depth", "32", dry_run=False)
    with pytest.raises(UsageError):
        set_value(conf, "proxy.queue_dept", "32", dry_run=False)
    unset_value(conf, "proxy.queue_depth", dry_run=False)
    found = [
        (act.act, act.target, act.outcome, act.detail.get("before"), act.detail.get("after")) for act in acts_in(box)
    ]
    assert found == [
        ("set_config", "proxy.queue_depth", "ok", None, "32"),
        ("set_config", "proxy.queue_dept", "usage", None, None),
        ("unset_config", "proxy.queue_depth", "ok", "32", None),
    ]


def test_a_file_of_which_nobody_knows_whose_it_is_leaves_no_trace(box: Layout, tmp_path: Path) -> None:
    other = tmp_path / "hive.conf"
    set_value(other, "proxy.queue_depth", "32", dry_run=False)
    assert acts_in(box) == []
    assert told.database_of(other, uid=0, env={}) is None
    assert told.database_of(Path(CONF_FILE), uid=1000, env={"XDG_STATE_HOME": "/s"}) in (
        Path("/s/hive/hive.db"),
        Path(STATE, "daemon/hive.db"),
    )


def test_what_was_cut_short_is_told(box: Layout) -> None:
    database = installed(box).database
    with pytest.raises(KeyboardInterrupt), told.noted(database, "restore", file="b.tar"):
        raise KeyboardInterrupt
    assert [(act.outcome, act.detail["file"]) for act in acts_in(box)] == [("cut_short", "b.tar")]


def test_who_logged_in_is_told_where_that_is_another(
    box: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = tmp_path / "loginuid"
    monkeypatch.setattr(told, "LOGIN_UID", login)
    for text in ("1000", str(os.geteuid()), "4294967295", "", "x"):
        login.write_text(text)
        rotate(box, "api-token")
    details = [act.detail for act in acts_in(box)]
    assert [detail.get("login") for detail in details] == ["uid:1000", None, None, None, None]
    assert [detail.get("user", "") for detail in details] == [name_of(os.geteuid())] * 5
    assert details[0].get("login_user", "") == name_of(1000)


def test_a_path_whose_bytes_are_no_utf_8_is_noted(box: Layout, tmp_path: Path) -> None:
    """`hive backup $'b\\xff.tar'` made the backup, could not note it, and ended with 1."""
    database = installed(box).database
    odd = os.fsdecode(b"/tmp/b\xff.tar")
    with told.noted(database, "backup", target=odd, file=odd, secrets=False):
        pass
    with pytest.raises(HiveError), told.noted(database, "backup", file="x"):
        raise HiveError(f"{odd} is there already")
    one, two = acts_in(box)
    assert (one.target, {key: one.detail[key] for key in ("file", "secrets")}, one.outcome) == (
        r"/tmp/b\udcff.tar",
        {"file": r"/tmp/b\udcff.tar", "secrets": False},
        "ok",
    )
    assert (two.detail["file"], two.detail["error"]) == ("x", r"/tmp/b\udcff.tar is there already")


def test_what_cannot_be_noted_is_done_and_said(box: Layout, caplog: pytest.LogCaptureFixture) -> None:
    acts_of(installed(box).database).mkdir()
    rotate(box, "api-token")
    assert "this will not be in the audit table: " in caplog.text
    caplog.clear()
    with pytest.raises(HiveError):
        rotate(box, "none")
    assert caplog.text == ""


def test_where_there_is_no_hive_nothing_is_left(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    generate(layout)
    rotate(layout, "api-token")
    assert not layout.at(STATE).exists()


def test_the_next_daemon_has_it_in_its_chain_and_people_can_ask_for_it(box: Layout, tmp_path: Path) -> None:
    assert main(["secrets", "rotate", "redis-daemon", "--prefix", str(box.root), "--json"]) == 0
    assert main(["config", "set", "proxy.port", "7", "--config", str(box.at(CONF_FILE)), "--json"]) == 0

    async def daemon() -> list[tuple[str, str, str]]:
        database = Database.open(installed(box).database)
        journal = AuditLog(database, Live(tmp_path / "redis.sock"))
        await journal.begin()
        found = await journal.page(table.Filter(act="order.*"), 10)
        verdict = await database.read(lambda conn: chain.verify(table.links(conn)))
        await journal.close()
        database.close()
        assert verdict.bad is None
        return [(entry.row.origin, entry.row.act, entry.row.target) for entry in reversed(found)]

    assert asyncio.run(daemon()) == [
        ("cli", "order.rotate_secret", "redis-daemon"),
        ("cli", "order.set_config", "proxy.port"),
    ]
    assert acts_in(box) == []
