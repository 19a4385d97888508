"""Plain words: the openings of docstrings, and the glossary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.source_trees import HIVE, ROOT, source_trees

FORBIDDEN = re.compile(
    r"(who|whom|whose|whoever|whomever|what|whatever|whether|where|wherever|how|however|which|whichever|when|whenever"
    r"|that|why)\b",
    re.IGNORECASE,
)
"""Openings that begin a clause. A docstring begins with a verb or a noun: it says what the thing does or is."""

TERM = re.compile(r"- \*\*([^*]+)\*\*: \S.*")
FIRST_TERM = "adapter"

README_TERMS = (
    "agent",
    "backend",
    "caller",
    "daemon",
    "gate",
    "ingress",
    "link",
    "model",
    "proxy",
    "queue",
    "sandbox",
    "spool",
    "usage",
    "wake",
)
"""Terms that README uses before it explains them, or without it."""


# --- openings ----------------------------------------------------------------------------------------------------


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Expr, str]]:
    """Each bare string of a module: the node it stands in, its statement and its text.

    A string after an assignment describes what was assigned; it is a docstring too.
    """
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield node, statement, statement.value.value


def is_predicate(node: ast.AST, statement: ast.Expr) -> bool:
    """Whether `statement` is the docstring of a function that returns a bool."""
    return (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body[0] is statement
        and isinstance(node.returns, ast.Name)
        and node.returns.id == "bool"
    )


def wrong_openings(tree: ast.AST) -> list[str]:
    """`line: first words` of each docstring that begins with a forbidden word.

    >>> wrong_openings(ast.parse('def first(): "What is first."'))
    ['1: What is first.']
    >>> wrong_openings(ast.parse('def is_first() -> bool: "Whether it is."; X = 1; "The first of all."'))
    []
    >>> wrong_openings(ast.parse('def is_first() -> bool: "Whether it is."; X = 1; "Whether it was."'))
    ['1: Whether it was.']
    """
    wrong = []
    for node, statement, text in docstrings(tree):
        opening = FORBIDDEN.match(text.lstrip())
        if opening and not (opening[0] == "Whether" and is_predicate(node, statement)):
            wrong.append(f"{statement.lineno}: {text.strip().splitlines()[0][:60]}")
    return wrong


@pytest.mark.parametrize("room", ["", *sorted(path.parent.name for path in HIVE.glob("*/__init__.py"))])
def test_docstrings_open_with_a_verb_or_a_noun(room: str) -> None:
    place = HIVE / room
    trees = {path: tree for path, tree in source_trees().items() if place in (path.parents if room else [path.parent])}
    assert trees, f"no room hive/{room}"
    _hold_openings_of(trees)


@pytest.mark.wide
@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_docstrings_of_tests_do_so_too(folder: str) -> None:
    _hold_openings_of({path: ast.parse(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))})


def _hold_openings_of(trees: Mapping[Path, ast.AST]) -> None:
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path, tree in trees.items() for line in wrong_openings(tree)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "is_wrong"),
    [
        ('"""Who waits."""', True),
        ('"""The waiting requests."""', False),
        ('"""Whoever comes."""', True),
        ('"""However, it is so."""', True),
        ('"""Thatched roofs."""', False),
        ('"""\n    When it ends.\n    """', True),
        ('X = 1\n"""Which it is."""', True),
        ('class A:\n    x: int = 0\n    """Where it is."""', True),
        ('class A:\n    def __init__(self) -> None:\n        self.x = 0\n        """How long it is."""', True),
        ('def f() -> bool:\n    """Whether it is."""', False),
        ('async def f() -> bool:\n    """Whether it is."""', False),
        ('def f() -> str:\n    """Whether it is."""', True),
        ('def f() -> bool:\n    """What it is."""', True),
        ('X = 1\n"""Whether it is."""', True),
    ],
)
def test_openings_are_judged_by_their_first_word(source: str, is_wrong: bool) -> None:
    assert bool(wrong_openings(ast.parse(source))) is is_wrong


# --- names ---------------------------------------------------------------------------------------------------------


def class_names(tree: ast.AST) -> Iterator[str]:
    """The public names of the classes and named types of a file.

    >>> [list(class_names(ast.parse(f"class {name}: pass"))) for name in ("A", "_B")]
    [['A'], []]
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def test_no_public_class_name_stands_twice_in_the_tree() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in source_trees().items():
        for name in class_names(tree):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(found)}" for name, found in twice.items())


# --- the glossary ------------------------------------------------------------------------------------------------


@cache
def glossary() -> tuple[str, ...]:
    """The lines of the glossary below its introduction."""
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("- "))
    return tuple(lines[begin:])


def terms() -> list[str]:
    return [match[1] for line in glossary() if (match := TERM.fullmatch(line))]


@cache
def words_of_the_product() -> str:
    """Code, documents and man pages, the glossary apart, as words in lower case."""
    files = [
        *HIVE.rglob("*.py"),
        *(path for path in (ROOT / "docs").rglob("*.md") if path.name != "glossary.md"),
        *(ROOT / "man").glob("*.scd"),
        *(ROOT / name for name in ("README.md", "SPECIFICATION.md", "CONTRIBUTING.md")),
    ]
    text = re.sub("(?<=[a-z])(?=[A-Z])", " ", " ".join(path.read_text() for path in files))
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def occurs(term: str, text: str) -> bool:
    """Whether a term is in a text, with the endings of plural and verb."""
    words = r"\W+".join(re.escape(word) for word in term.lower().split())
    return re.search(rf"\b{words}(s|es|ed|d|ing)?\b", text) is not None


def test_each_term_of_the_glossary_has_one_line() -> None:
    wrong = [line for line in glossary() if not TERM.fullmatch(line)]
    assert not wrong
    assert terms()[0] == FIRST_TERM


def test_the_glossary_is_alphabetical() -> None:
    assert terms() == sorted(set(terms()), key=str.casefold)


@pytest.mark.parametrize("term", terms())
def test_each_term_of_the_glossary_is_used(term: str) -> None:
    assert occurs(term, words_of_the_product()), f"{term} is used nowhere: take it out of docs/glossary.md"


@pytest.mark.parametrize("term", README_TERMS)
def test_the_terms_of_the_readme_are_in_the_glossary(term: str) -> None:
    assert occurs(term, (ROOT / "README.md").read_text().lower()), f"README does not use {term} any more"
    assert term in terms()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_glossary_is_linked_before_its_terms_are_explained(document: str) -> None:
    before, link, _ = (ROOT / document).read_text().partition("](docs/glossary.md)")
    assert link
    assert "ingress" not in before
