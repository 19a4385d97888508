"""Every code is explained, and every explanation is of a code: docs/reference/errors.md is made of the same table.

`python tests/test_explain.py` writes that page anew.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from hive.api.responses import failure
from hive.cli.lazy import CommandTable, LazyCommand, load
from hive.cli.main import HIVE
from hive.conditions import TABLE
from hive.dialects.errors import render
from hive.domain import Dialect
from hive.errors import HiveError, NotFound, all_errors
from hive.explain import page
from hive.explain.book import BOOK, CHAPTERS, EXITS, every_code, find
from hive.explain.code_text import carried
from hive.holders.lease_socket import OtherNamespace
from hive.settings.rows import rows_of
from hive.settings.table import SECTIONS
from hive.up.children import ChildFailed
from tests.source_trees import ROOT, source_trees

DOCUMENT = ROOT / "docs/reference/errors.md"
OUTSIDE = (ChildFailed, OtherNamespace)
"""Classes of errors that are defined where they are raised, and have a code of their own."""
ENDS = {"FailReason", "LoopFailure"}
"""Enumerations whose words become the code of a job that failed."""
LEASE_ENDS = {"_end", "_ending", "_leave_line", "_release", "_over"}
"""Methods of hive/pooling/leases.py whose last argument is the code of an end."""
FAULTS = {"EngineFault", "WorkflowRefused"}


# --- the codes in the tree -----------------------------------------------------------------------------------------


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): tree
        for path, tree in source_trees().items()
        if "explain" not in path.relative_to(ROOT / "hive").parts
    }


@cache
def constants() -> dict[str, str]:
    """Names of modules for a text: `WORKER_RESTARTED`."""
    found = {}
    for tree in trees().values():
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found[node.targets[0].id] = node.value.value
    return found


def texts(node: ast.expr | None) -> Iterator[str]:
    """The texts that an expression can be, as far as they are written there or have a name.

    >>> list(texts(ast.parse("'a' if x else y or 'b'", mode="eval").body))
    ['a', 'b']
    """
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from texts(body)
            yield from texts(orelse)
        case ast.BoolOp(values=values):
            for value in values:
                yield from texts(value)
        case ast.Name(id=name) if name.isupper() and name in constants():
            yield constants()[name]


def is_code(node: ast.expr) -> bool:
    """Whether an expression is called code: `code`, `error.code`, `told["code"]`."""
    match node:
        case ast.Name(id="code") | ast.Attribute(attr="code") | ast.Subscript(slice=ast.Constant(value="code")):
            return True
        case _:
            return False


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def codes_in(tree: ast.AST, *, of_leases: bool = False) -> Iterator[str]:
    """The codes that are written in a module.

    >>> source = '''
    ... class A(B):
    ...     code = "a"
    ... error.code = "b"
    ... answer(code="c", told={"code": "d"})
    ... if told["code"] == "e": raise by_code("f")
    ... raise EngineFault(400, f"x", "g")
    ... code = "h" if full else "i"
    ... '''
    >>> sorted(codes_in(ast.parse(source)))
    ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i']
    """
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value) if any(map(is_code, targets)):
                yield from texts(value)
            case ast.AnnAssign(target=target, value=value) if is_code(target):
                yield from texts(value)
            case ast.keyword(arg="code", value=value):
                yield from texts(value)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "code":
                        yield from texts(value)
            case ast.Compare(left=left, comparators=others) if is_code(left):
                for other in others:
                    yield from texts(other)
            case ast.Call():
                yield from _codes_of_call(node, of_leases=of_leases)
            case ast.ClassDef(name=name, body=body) if name in ENDS:
                for statement in body:
                    if isinstance(statement, ast.Assign):
                        yield from texts(statement.value)


def _codes_of_call(call: ast.Call, *, of_leases: bool) -> Iterator[str]:
    name = name_of(call)
    if name in FAULTS and len(call.args) > 2:
        yield from texts(call.args[2])
    elif name == "by_code" or (name == "failed" and len(call.args) > 1):
        yield from texts(call.args[0])
    elif of_leases and name in LEASE_ENDS:
        yield from texts(call.args[-1])


@cache
def written() -> dict[str, list[str]]:
    """Each code in the tree, with its files."""
    found = defaultdict(list)
    for path, tree in trees().items():
        for code in codes_in(tree, of_leases=path == "hive/pooling/leases.py"):
            if re.fullmatch("[a-z][a-z0-9_]*", code):
                found[code].append(path)
    return found


NO_CODES = {
    "en": "a language",
}
"""Words in such a place that are no codes of errors; what they are."""


def test_there_are_codes_of_every_kind() -> None:
    """A walk that finds nothing would hold the table against nothing."""
    for code in ("other_namespace", "lease_preempted", "comfyui_failed", "stall_timeout", "worker_restarted"):
        assert code in written()
    assert {"out_of_memory", "engine_failed", "server_error", "child_failed"} <= written().keys()


def test_no_code_is_without_a_text() -> None:
    known = BOOK.keys() | TABLE.keys() | NO_CODES.keys()
    assert {code: paths for code, paths in written().items() if code not in known} == {}
    assert {cls.__name__ for cls in all_errors() if cls.code not in BOOK} == set()


def test_no_text_is_without_a_code() -> None:
    assert [code for code in BOOK if code not in written()] == []


def test_a_class_outside_of_the_tree_of_errors_carries_what_its_text_says() -> None:
    for cls in OUTSIDE:
        assert cls.code not in {one.code for one in all_errors()}
        has = carried(cls.code, BOOK[cls.code])
        assert (has.statuses, has.exit_codes) == ((cls.status,), (cls.exit_code,))


def test_every_class_of_an_error_is_looked_at() -> None:
    """A class elsewhere that has a code of its own has to be among `OUTSIDE`."""
    roots = {cls.__name__ for cls in all_errors()}
    found = {
        node.name
        for path, tree in trees().items()
        if path != "hive/errors.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in roots for base in node.bases)
        and list(codes_in(ast.Module(node.body, [])))
    }
    assert found == {cls.__name__ for cls in OUTSIDE}


def test_a_runners_fault_has_the_status_that_its_text_says() -> None:
    wrong = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node) in FAULTS and len(node.args) > 2:
                status = node.args[0]
                for code in texts(node.args[2]):
                    statuses = carried(code, BOOK[code]).statuses
                    if isinstance(status, ast.Constant) and status.value not in statuses:
                        wrong.append(f"{path}:{node.lineno}: {code} with {status.value!r}, explained with {statuses}")
    assert wrong == []


# --- the texts -----------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, LazyCommand]]:
    def below(group: CommandTable, words: tuple[str, ...]) -> Iterator[tuple[str, LazyCommand]]:
        for name, entry in group.entries.items():
            if isinstance(entry, CommandTable):
                yield from below(entry, (*words, name))
            else:
                yield " ".join((*words, name)), entry

    return below(HIVE, ())


COMMANDS = dict(commands())
GROUPS = {name for name, entry in HIVE.entries.items() if isinstance(entry, CommandTable)}
TYPED = re.compile(r"`(?:sudo )?hive(?: ([^`]*))?`")


def wrong_command(words: list[str]) -> str:
    """The fault in the words of a command behind `hive`; empty for none."""
    words = words[: words.index("--")] if "--" in words else words
    if not words or words[0].startswith("-"):
        return ""
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), "")
    if not name:
        group = HIVE.entries.get(words[0])
        is_default = isinstance(group, CommandTable) and group.default and len(words) == 1
        return "" if is_default else "no such command"
    known = {flag for param in load(name.split()[-1], COMMANDS[name]).params for flag in param.opts} | {"--help"}
    unknown = [word for word in words if word.startswith("-") and word not in known]
    return f"no such options: {unknown}" if unknown else ""


def test_every_command_that_is_told_exists_with_its_options() -> None:
    wrong = []
    for code, told in BOOK.items():
        for text in (told.means, *told.causes, *told.cures, told.again, told.told_in):
            for typed in TYPED.findall(text):
                if why := wrong_command(shlex.split(typed)):
                    wrong.append(f"{code}: hive {typed}: {why}")
    assert wrong == []


@pytest.mark.parametrize("words", ["agent no-such", "agent list --no-such", "no-such"])
def test_a_command_that_is_not_there_is_seen(words: str) -> None:
    assert wrong_command(words.split())


SETTING = re.compile(r"`\[(\w+)\] (\w+)(?: = \w+)?`")


def test_every_setting_that_is_told_exists() -> None:
    known = {(section, key) for section, struct in SECTIONS.items() for key in rows_of(section, struct)}
    told = " ".join(text for one in BOOK.values() for text in (one.means, *one.causes, *one.cures, one.again))
    assert [found for found in SETTING.findall(told) if found not in known] == []


def test_each_says_what_it_means_why_and_what_to_do() -> None:
    wrong = []
    for code, told in BOOK.items():
        assert told.means.endswith("."), code
        assert told.causes, code
        assert told.cures, code
        assert told.again, code
        assert not told.again.endswith("."), code
        has = carried(code, told)
        assert has.exit_codes, code
        assert set(has.exit_codes) <= EXITS.keys(), code
        assert has.statuses or told.told_in, code
        texts_ = (told.means, *told.causes, *told.cures, told.again)
        wrong += [f"{code}: {text}" for text in texts_ if text.count("`") % 2 or "  " in text or "<" in text]
        wrong += [f"{code}: {text}" for text in (*told.causes, *told.cures) if text.endswith(".")]
    assert wrong == []


def test_codes_are_words_and_stand_in_one_chapter() -> None:
    assert sum(map(len, CHAPTERS.values())) == len(BOOK)
    assert [code for code in every_code() if not re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", code)] == []


def test_exit_codes_are_those_that_the_command_line_has() -> None:
    assert {cls.exit_code for cls in all_errors()} <= EXITS.keys()


def test_conditions_are_explained_from_their_own_table() -> None:
    assert "Redis at AT is down" in page.text_of("redis_down")
    assert "    hive logs redis" in page.text_of("redis_down")
    assert [code for code in TABLE if not page.sentence_of(code)] == []


def test_what_is_both_an_error_and_a_condition_is_told_as_both() -> None:
    both = page.text_of("backend_switching")
    assert "Usual causes:" in both
    assert "A condition (warning)" in both


# --- finding one ---------------------------------------------------------------------------------------------------


def test_a_status_and_an_exit_code_list_those_that_carry_it() -> None:
    assert {"saturated", "queue_full", "not_ready", "model_cold"} <= set(find("503"))
    assert {"not_found", "model_not_found"} <= set(find("3")) == set(find("404"))
    assert find("127") == []


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("not_fond", "`not_found`"),
        ("Not-Foud", "`not_found`"),
        ("token", "`stale_token`"),
        ("redis_dwn", "`redis_down`"),
        ("zzzzzz", "hive explain lists all"),
    ],
)
def test_an_unknown_word_is_not_found_with_the_nearest_codes(word: str, near: str) -> None:
    with pytest.raises(NotFound) as raised:
        find(word)
    assert near in raised.value.hint


@pytest.mark.parametrize("number", ["404040", "299", "9", "599"])
def test_a_number_that_no_code_has_is_not_found(number: str) -> None:
    with pytest.raises(NotFound):
        find(number)


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", [Dialect.OPENAI, Dialect.ANTHROPIC, Dialect.OLLAMA])
def test_every_error_of_the_proxy_has_its_code_in_every_dialect(dialect: Dialect) -> None:
    for cls in all_errors():
        told = json.loads(render(cls(), dialect))
        code = told["code"] if dialect is Dialect.OLLAMA else told["error"]["code"]
        assert find(code) == [cls.code]


def test_an_error_of_the_api_has_its_code_in_both_shapes() -> None:
    for cls in all_errors():
        error: HiveError = cls("it is so")
        assert json.loads(bytes(failure(error, "/api/agents").body))["code"] == cls.code
        assert json.loads(bytes(failure(error, "/v1/models/load").body))["error"]["code"] == cls.code


# --- docs ----------------------------------------------------------------------------------------------------------


def test_the_document_is_the_table() -> None:
    assert DOCUMENT.read_text() == page.document(), "python tests/test_explain.py"


def test_the_document_has_every_code_as_a_heading_and_its_text_as_hive_explain_prints_it() -> None:
    text = DOCUMENT.read_text()
    for code in every_code():
        assert text.count(f"\n### {code}\n\n{page.text_of(code)}\n") == 1, code


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(page.document())
