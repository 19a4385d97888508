"""`hive config runtime`: what is in force in the running Hive, and changing it there."""

from __future__ import annotations

from typing import Any

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_a_change_is_in_force_at_once_and_taken_back(hive: Hive) -> None:
    assert hive("config", "runtime").out == "everything is at its default (--all shows it)\n"
    said = hive("config", "runtime", "proxy.queue_depth=7", "inference.auto_sleep_enabled=no")
    assert said.code == 0
    assert [line.split() for line in said.out.splitlines()] == [
        ["SETTING", "VALUE", "FROM"],
        ["inference.auto_sleep_enabled", "false", "runtime"],
        ["proxy.queue_depth", "7", "runtime"],
    ]
    assert hive("config", "runtime").out == said.out
    taken_back = hive("config", "runtime", "--unset", "proxy.queue_depth", "--json").json
    assert [(one["name"], one["value"], one["source"]) for one in taken_back["settings"]] == [
        ("proxy.queue_depth", 64, "default")
    ]


def test_all_of_them_are_shown_where_that_is_asked(hive: Hive) -> None:
    assert "sleep.deep_after_s" in hive("config", "runtime", "--all").out


def test_one_wrong_change_keeps_all_from_happening(hive: Hive) -> None:
    said = hive("config", "runtime", "proxy.queue_depth=7", "proxy.queue_dept=8")
    assert said.code == 2
    assert "did you mean `proxy.queue_depth`?" in said.err
    assert "default" in hive("config", "runtime").out


def test_what_is_no_change_is_a_usage_error(hive: Hive) -> None:
    assert hive("config", "runtime", "proxy.queue_depth").code == 2
    assert hive("config", "runtime", "proxy.queue_depth=1", "--unset", "proxy.queue_depth").code == 2


def test_a_setting_that_is_set_twice_at_once_is_refused(hive: Hive) -> None:
    """The last one was taken, and nothing said so."""
    said = hive("config", "runtime", "proxy.queue_depth=7", "proxy.queue_depth = 8")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("hive: proxy.queue_depth cannot be set twice at once  [usage]\n")
    assert "default" in hive("config", "runtime").out


def test_settings_of_no_file_name_a_hive_that_has_others(hive: Hive) -> None:
    other = "a Hive runs here with other settings: hive config runtime"
    assert other not in hive("config", "show").err
    hive("config", "runtime", "proxy.queue_depth=7")
    said = hive("config", "show")
    assert said.code == 0
    assert other in said.err
