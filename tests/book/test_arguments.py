"""Every `hive …` that a page of the book types is taken: the verb, its options, and what they are given."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from typer._click.exceptions import UsageError

from hive.cli.lazy import CommandTable, LazyCommand, load
from hive.cli.main import HIVE
from tests.book.blocks import blocks_of

COMMAND = re.compile(r"^\$ (?:sudo )?(?:\.venv/bin/)?hive (.*)$")
FILLED_IN = {"LEASE": "l-17", "N": "5", "TIME": "10m"}
"""Words in capitals that stand for something of a form of its own; every other one may stand as it is."""


def typed() -> dict[str, str]:
    """Each command of the book, with the place where it stands first."""
    found: dict[str, str] = {}
    for block in blocks_of("console", ""):
        for line in block.text.replace("\\\n", " ").splitlines():
            if (match := COMMAND.match(line)) is not None:
                found.setdefault(match[1], str(block))
    return found


TYPED = typed()


def words_of(line: str) -> list[str]:
    """Its words up to a pipe, a redirection, another command or a comment; what a shell would put in is a number."""
    line = re.sub(r'"?\$\((?:[^()]|\([^()]*\))*\)"?', "1", line)
    words = shlex.split(line, comments=True)
    ends = [number for number, word in enumerate(words) if word in ("|", ">", ">>", "<", "&&", "||", ";", "&")]
    return [FILLED_IN.get(word, word) for word in words[: min(ends, default=len(words))]]


def command_of(words: list[str]) -> tuple[str, LazyCommand, list[str]]:
    """The command, by its last word, and what it is given."""
    entry: CommandTable | LazyCommand = HIVE
    rest, name = list(words), ""
    while isinstance(entry, CommandTable):
        name = rest.pop(0) if rest and not rest[0].startswith("-") else entry.default
        assert name in entry.entries, f"there is no `hive {' '.join(words)}`"
        entry = entry.entries[name]
    return name, entry, rest


def test_there_are_commands() -> None:
    assert len(TYPED) > 40


@pytest.mark.parametrize(("line", "where"), TYPED.items(), ids=TYPED)
def test_every_command_of_the_book_is_taken(line: str, where: str) -> None:
    words = words_of(line)
    if words == ["--version"] or "--help" in words:
        return
    name, entry, rest = command_of(words)
    command: Any = load(name, entry)
    try:
        command.make_context(name, rest)
    except UsageError as error:
        pytest.fail(f"{where}: `hive {line}`: {error.format_message()}")
