"""Settings that are changed while Hive runs: changes taken and refused, and their order of precedence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.errors import BadRequest, WrongState
from hive.files.conf_edit import BOUND
from hive.settings.file import load_text
from hive.settings.runtime import checked, rows, with_runtime
from hive.settings.table import Settings

ROWS = rows()


def test_where_the_proxy_listens_is_not_changed_while_it_does() -> None:
    assert not BOUND & ROWS.keys()


@settings(deadline=None)  # the first one loads what checks
@given(st.sampled_from(sorted(ROWS)), st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()))
def test_what_is_checked_can_be_taken_over_and_what_is_refused_is_named(name: str, value: Any) -> None:
    row, refused = ROWS[name], ""
    try:
        text = checked({name: value}, {})[name]
    except BadRequest as error:
        text, refused = None, error.message
    if refused:
        assert refused.startswith(f"{name}: expected {row.expected}")
        return
    found = getattr(getattr(with_runtime(Settings(), {} if text is None else {name: text}, {}), row.section), row.key)
    assert isinstance(found, row.kind) or (row.kind is float and type(found) is int)
    if isinstance(value, bool) or (isinstance(value, int | float) and row.kind is not str):
        assert found == value or (row.kind is float and found == float(value))  # beyond 2**53 a float is not exact
    elif value is None:
        assert found == row.default


@given(st.dictionaries(st.sampled_from(sorted(ROWS)), st.text(max_size=8), max_size=5))
def test_what_another_version_left_there_keeps_nothing_from_starting(values: dict[str, str]) -> None:
    assert msgspec.convert(msgspec.to_builtins(with_runtime(Settings(), values, {})), Settings)


def test_the_file_says_the_same_in_the_same_words() -> None:
    """A value that is taken here is one that hive.conf would take."""
    texts = {name: text for name in ROWS if (text := checked({name: ROWS[name].default}, {})[name])}
    lines = [f"[{name.partition('.')[0]}]\n{name.partition('.')[2]} = {text}" for name, text in texts.items()]
    for line, name in zip(lines, texts, strict=True):
        loaded = load_text(line, env={}).settings
        assert loaded == with_runtime(Settings(), {name: texts[name]}, {})


def test_the_environment_goes_first_and_that_is_said() -> None:
    env = {"AUTO_SLEEP_ENABLED": "false"}
    with pytest.raises(WrongState, match="AUTO_SLEEP_ENABLED in the environment"):
        checked({"inference.auto_sleep_enabled": True, "proxy.queue_depth": 3}, env)
    settings = with_runtime(Settings(), {"inference.auto_sleep_enabled": "false"}, {"AUTO_SLEEP_ENABLED": "true"})
    assert settings.inference.auto_sleep_enabled is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"proxy.port": 1}, "proxy.port is read at a start: it cannot be changed while Hive runs"),
        ({"proxy.queue_dept": 1}, "there is no setting 'proxy.queue_dept'"),
        ({"nonsense": 1}, "there is no setting 'nonsense'"),
        ({"proxy.queue_depth": True}, "proxy.queue_depth: expected a whole number at least 0, found True"),
        ({"proxy.queue_depth": 1.5}, "proxy.queue_depth: expected a whole number at least 0, found 1.5"),
        ({"inference.default_model": "a\nb"}, "inference.default_model: expected text"),
    ],
)
def test_what_is_wrong_is_said_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        checked(changes, {})
    assert caught.value.message.startswith(said)
    assert caught.value.hint or "expected" in said
