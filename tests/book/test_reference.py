"""The reference is what the code says: settings, commands, API."""

from __future__ import annotations

import re

import pytest

from hive.cli.lazy import CommandTable, LazyCommand
from hive.cli.main import HIVE
from hive.settings.rows import rows_of
from hive.settings.table import SECTIONS
from tests.api.described import ROWS
from tests.book.reference import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_is_as_the_code_has_it(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "type: python -m tests.book.reference"


def heads(name: str) -> set[str]:
    return set(re.findall(r"^### (.*)$", (REFERENCE / name).read_text(), re.MULTILINE))


def test_every_setting_has_a_head_that_search_finds() -> None:
    wanted = {f"{section}.{key}" for section, struct in SECTIONS.items() for key in rows_of(section, struct)}
    assert wanted <= heads("settings.md")


def test_every_command_that_help_shows_has_a_head_and_no_hidden_one() -> None:
    def names(group: CommandTable, path: str) -> set[str]:
        found: set[str] = set()
        for name, entry in group.entries.items():
            if isinstance(entry, LazyCommand):
                found |= set() if entry.hidden else {f"{path} {name}"}
            else:
                found |= set() if entry.hidden else names(entry, f"{path} {name}")
        return found

    assert heads("commands.md") == names(HIVE, "hive")


def test_every_operation_of_the_api_has_a_head() -> None:
    assert {f"{row.method} {row.path}" for row in ROWS} <= heads("api-reference.md")


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_of_one_machine_alone(name: str) -> None:
    """A default that is a path of whoever wrote the page would be no default."""
    assert not re.search(r"/root/|/home/|/work/", (REFERENCE / name).read_text())
