"""One setting changed in a hive.conf: that line and no other, whatever the file looks like."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.install import conf_file
from hive.settings.edit import Name, known_names, name_of, row_of, value_in, with_value, without_value
from hive.settings.file import load_text
from hive.settings.rows import rows_of
from hive.settings.table import SECTIONS

PORT = Name("proxy", "port")

FILE = """\
# hive.conf
[proxy]
; where agents reach the model
  port :  1
#head_s = 10

[sleep]
# nothing yet

[ tenant   acme ]
weight=2
[proxy]
queue_depth = 3"""


@pytest.mark.parametrize(
    ("name", "value", "old", "new"),
    [
        ("proxy.port", "2", "  port :  1", "  port : 2"),
        ("proxy.head_s", "5", "#head_s = 10", "head_s = 5"),
        ("tenant acme.weight", "7", "weight=2", "weight= 7"),
        ("proxy.queue_depth", "4", "queue_depth = 3", "queue_depth = 4"),
        ("proxy.window_s", "9", "queue_depth = 3", "queue_depth = 3\nwindow_s = 9\n"),
        ("sleep.check_s", "9", "# nothing yet\n", "# nothing yet\ncheck_s = 9\n"),
        ("tenant acme.models", "m", "weight=2\n", "weight=2\nmodels = m\n"),
        ("inference.default_model", "", "queue_depth = 3", "queue_depth = 3\n\n[inference]\ndefault_model =\n"),
        ("fields /v1/messages.a.b", "drop", "depth = 3", "depth = 3\n\n[fields /v1/messages]\na.b = drop\n"),
    ],
)
def test_a_value_goes_where_it_belongs_and_nothing_else_moves(name: str, value: str, old: str, new: str) -> None:
    assert FILE.count(old) == 1
    assert with_value(FILE, name_of(name), value) == FILE.replace(old, new)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("proxy.port", "  port :  1", "#port = 11435"),
        ("tenant acme.weight", "weight=2\n", ""),
        ("proxy.queue_depth", "\nqueue_depth = 3", ""),
        ("proxy.head_s", "", ""),
        ("sleep.check_s", "", ""),
    ],
)
def test_a_value_is_taken_out_again(name: str, old: str, new: str) -> None:
    assert without_value(FILE, name_of(name)) == FILE.replace(old, new)


def test_windows_line_ends_stay() -> None:
    text = "[proxy]\r\n#port = 1\r\nhead_s = 5\r\n"
    assert with_value(text, PORT, "2") == "[proxy]\r\nport = 2\r\nhead_s = 5\r\n"
    assert with_value(text, Name("proxy", "head_s"), "7") == "[proxy]\r\n#port = 1\r\nhead_s = 7\r\n"
    assert with_value(text, Name("proxy", "window_s"), "7").endswith("head_s = 5\r\nwindow_s = 7\r\n")


def test_an_empty_file_gets_a_section() -> None:
    assert with_value("", PORT, "2") == "[proxy]\nport = 2\n"
    assert with_value("# only this", PORT, "2") == "# only this\n\n[proxy]\nport = 2\n"


@pytest.mark.parametrize("text", ["port", "", ".", "proxy.", ".port", " . "])
def test_what_has_no_section_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"SECTION\.KEY"):
        name_of(text)


@pytest.mark.breadth(4)
@pytest.mark.parametrize("full", known_names())
def test_every_setting_of_the_installers_file_can_be_set_in_its_place_and_unset_again(full: str) -> None:
    text, name = conf_file.text(), name_of(full)
    row = row_of(name)
    assert row is not None
    value = conf_file.written(row.default)
    changed = with_value(text, name, value)
    assert value_in(changed, name) == value
    added = [line for line in difflib.ndiff(text.splitlines(), changed.splitlines()) if line[0] == "+"]
    assert len(added) == (0 if full in conf_file.SET and changed == text else 1)
    if full not in conf_file.SET:
        assert without_value(changed, name) == text
    load_text(changed, env={})


NAMES = st.sampled_from([*map(name_of, known_names()), Name("tenant acme", "weight")])
WORDS = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=10)
LINES = st.one_of(
    st.builds("# {}".format, WORDS),
    st.just(""),
    st.sampled_from([f"[{section}]" for section in (*SECTIONS, "tenant acme", "other")]),
    st.builds("#{} = {}".format, st.sampled_from([key for s, t in SECTIONS.items() for key in rows_of(s, t)]), WORDS),
    st.builds("{}={}".format, st.sampled_from([key for s, t in SECTIONS.items() for key in rows_of(s, t)]), WORDS),
    WORDS,
)
TEXTS = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(LINES, max_size=20), st.sampled_from(["", "\n"]))


@given(TEXTS, NAMES, WORDS)
def test_in_any_text_the_value_is_there_afterwards_and_at_most_one_line_was_touched(
    text: str, name: Name, value: str
) -> None:
    changed = with_value(text, name, value)
    assert value_in(changed, name) == value
    diff = [line for line in difflib.ndiff(text.splitlines(), changed.splitlines()) if line[0] in "+-"]
    removed, added = [d for d in diff if d[0] == "-"], [d for d in diff if d[0] == "+"]
    assert len(removed) <= 1
    assert 0 <= len(added) <= 3
    assert with_value(changed, name, value) == changed


@given(TEXTS, NAMES)
def test_in_any_text_it_is_gone_afterwards_and_at_most_one_line_was_touched(text: str, name: Name) -> None:
    before = value_in(text, name)
    changed = without_value(text, name)
    assert (changed == text) == (before is None)
    diff = [line for line in difflib.ndiff(text.splitlines(), changed.splitlines()) if line[0] == "-"]
    assert len(diff) <= 1
