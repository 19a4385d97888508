"""Every command of Hive that a page of the book types is there, with its flags; none of them is run here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hive.cli.lazy import CommandTable, LazyCommand, load
from hive.cli.main import HIVE, root
from tests.book.blocks import blocks_in

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHELLS = ("", "console", "sh", "bash")
ENDS = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "<<", "2>", "(", ")", "|&", ">&", "&>", "<<<"})
BEFORE = re.compile(r"[A-Z][A-Z0-9_]*=.*|sudo|-u|-E|--user=\S+|time|exec")
"""Words that may stand before `hive`."""


def typed(text: str) -> Iterator[str]:
    """The lines of a page's blocks that somebody types, each with those it goes on in.

    >>> list(typed("```console\\n$ hive agent \\\\\\n    list\\nNAME\\n```\\n"))
    ['hive agent      list']
    """
    for block in blocks_in(text):
        if block.kind not in SHELLS:
            continue
        lines = block.text.replace("\\\n", " ").splitlines()
        has_prompts = any(line.startswith("$ ") for line in lines)
        for line in lines:
            if line.startswith("$ "):
                yield line[2:]
            elif not has_prompts and re.match(r"(sudo )?hive ", line):
                yield line


def calls(line: str) -> list[list[str]]:
    """Words of each call of `hive` in a line of a shell.

    >>> calls("sudo hive agent list --json | jq .  # all"), calls("docker compose exec daemon hive ps && ls")
    ([['agent', 'list', '--json']], [['ps']])
    >>> calls('curl "$(hive agent show ann --tokens | tail -1)"')
    [['agent', 'show', 'ann', '--tokens']]
    """
    found: list[list[str]] = []
    words: list[str] = []
    quoted = re.findall(r'"\$\(([^()]+)\)', line)
    for word in [word for part in (line, *quoted) for word in (*_words(part), ";")]:
        if word not in ENDS:
            words.append(word)
            continue
        if (at := _of_hive(words)) is not None:
            found.append(words[at + 1 :])
        words = []
    return found


def _words(line: str) -> shlex.shlex:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return lexer


def _of_hive(words: list[str]) -> int | None:
    """The place of the `hive` that is called."""
    for number, word in enumerate(words):
        if word == "hive" or word.endswith("/hive"):
            before = words[:number]
            is_first = all(BEFORE.fullmatch(one) for one in before)
            return number if is_first or before[:2] == ["docker", "compose"] else None
    return None


@cache
def options_of(path: tuple[str, ...], entry: LazyCommand) -> frozenset[str]:
    return frozenset(flag for param in load(path[-1], entry).params for flag in (*param.opts, *param.secondary_opts))


def wrong_with(words: list[str]) -> str:
    """The fault of a call, empty where there is none.

    >>> wrong_with(["agent", "list", "--json"]), wrong_with(["agent", "lost"]), wrong_with(["ps", "--colour"])
    ('', 'no command hive agent lost', 'hive ps has no --colour')
    """
    entry: CommandTable | LazyCommand = HIVE
    path: list[str] = []
    rest = list(words)
    while isinstance(entry, CommandTable) and rest and not rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "help":
            return ""
        path.append(word)
        if word not in entry.entries:
            return f"no command hive {' '.join(path)}"
        entry = entry.entries[word]
    if isinstance(entry, CommandTable) and path and entry.default:
        path.append(entry.default)
        entry = entry.entries[entry.default]
    known = {"--help", "-h"}
    if isinstance(entry, LazyCommand):
        known |= options_of(tuple(path), entry)
    elif not path:
        known |= {flag for param in root().params for flag in param.opts}
    given = rest[: rest.index("--")] if "--" in rest else rest
    flags = [flag for word in given if re.match(r"--?[a-z0-9]", word) for flag in _single(word.partition("=")[0])]
    missing = [flag for flag in flags if flag not in known]
    return f"hive {' '.join(path)} has no {missing[0]}" if missing else ""


def _single(word: str) -> list[str]:
    """The flags that a word is.

    >>> _single("-it"), _single("--json")
    (['-i', '-t'], ['--json'])
    """
    return [word] if word.startswith("--") else [f"-{letter}" for letter in word[1:]]


PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_types_is_there_with_its_flags(page: str) -> None:
    lines = list(typed((ROOT / page).read_text()))
    wrong = {line: said for line in lines for words in calls(line) if (said := wrong_with(words))}
    assert not wrong


def test_there_are_commands_in_the_book() -> None:
    assert sum(len(list(typed((ROOT / page).read_text()))) for page in PAGES) > 100
