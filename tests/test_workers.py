"""The spread of the tests over processes, and the choice of `--quick`."""

from __future__ import annotations

import gc
import re
import tomllib
from itertools import compress, product

import pytest

from tests import conftest, workers
from tests.examples import examples, is_in_part
from tests.workers import (
    ALWAYS_QUICK,
    APART,
    ENGINES,
    IS_MARKED,
    ROOT,
    engines_only,
    group_of,
    holds,
    is_quick,
    times,
    tried,
    worker_count,
)

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
QUICK_S = 180.0
"""Seconds of work in `--quick` at most; most of it waits, and several processes share it."""


def test_some_hundred_files_were_measured() -> None:
    """A list nobody renews says nothing: `./install.sh test --measure` writes it."""
    measured = [file for file in FILES if file in times()]
    assert len(measured) >= 0.8 * len(FILES), sorted(set(FILES) - set(measured))


def test_the_quick_tests_end_in_time() -> None:
    assert sum(times().get(file, 0.0) for file in FILES if is_quick(file)) <= QUICK_S


def test_what_is_always_quick_exists() -> None:
    assert set(ALWAYS_QUICK) <= set(FILES)


def test_files_that_share_a_vllm_are_one_group_and_others_are_alone() -> None:
    assert (
        group_of("tests/journeys/test_sdk_vllm.py") == group_of("tests/journeys/test_prewarm_vllm.py") == "vllm_server"
    )
    assert group_of("tests/test_docs.py") == "tests/test_docs.py"
    assert group_of("hive/errors.py") == "hive/errors.py"


def test_the_default_suite_leaves_out_what_the_others_run() -> None:
    """Nothing is in two suites or in none: each test is one of the default suite, of --engines or of .ci/run alone."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    default, runs = told[told.index("-m") + 1], (ROOT / ".ci/run").read_text()
    assert default == f"not ({' or '.join((*APART, *ENGINES))})"
    assert " beside tests tests tests -n" in runs
    assert " beside engines tests engines --engines -n" in runs
    alone = re.findall(r"^\w+=\(-m '?([\w ]+?)'? --", runs, re.M)
    suites = [default, engines_only(), " or ".join(alone)]
    for values in product((False, True), repeat=len(APART) + len(ENGINES)):
        marked = set(compress((*APART, *ENGINES), values))
        assert sum(holds(suite, marked) for suite in suites) == 1, marked


def test_markers_of_suites_are_named_where_the_tests_are() -> None:
    """A file without them is not read in for such a suite, so they must not come from elsewhere."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    named = {path.name: {*IS_MARKED.findall(path.read_text())} & {*APART, *ENGINES} for path in files}
    assert {name: found for name, found in named.items() if found} == {}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("", 5),
        ("-n auto -o cache_dir=.pytest_cache/tests", 5),
        ("tests/cli hive", 5),
        ("tests/cli/test_top.py", 0),
        ("tests/cli/test_top.py::test_x", 0),
        ("--ignore=tests/cli/test_top.py", 5),
        ("-m chaos", 0),
        ("-k top", 0),
        ("-x", 0),
        ("--engines", 5),
        ("--last-failed", 0),
    ],
)
def test_what_is_chosen_by_hand_runs_in_one_process(words: str, count: int) -> None:
    assert worker_count(words.split(), cores=2) == count


def test_small_memory_bounds_the_processes() -> None:
    assert [worker_count([], cores=16, memory_gib=gib) for gib in (2.0, 8.0, 64.0)] == [0, 4, 19]


def test_what_pytest_asks_is_known_to_it() -> None:
    """The garbage collector was told what to leave out by a hook that conftest.py did not have: nobody called it."""
    asked = {name for name in vars(workers) if name.startswith("pytest_")}
    assert asked == {name for name in vars(conftest) if name.startswith("pytest_")}


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("", [True, True, False, False, True, False]),
        ("all", [True] * 6),
        ("7", [True, True, False, False, True, False]),
        ("1/2", [True, True, False, False, True, True]),
        ("2/2", [True, True, True, True, False, False]),
    ],
)
def test_of_a_test_with_breadth_every_nth_case_is_tried_or_a_part_or_all(
    monkeypatch: pytest.MonkeyPatch, wanted: str, chosen: list[bool]
) -> None:
    monkeypatch.setenv("HIVE_EXAMPLES", wanted)
    assert tried([("a", 3), ("b", 2), ("a", 3), ("b", 2), ("b", 2), ("a", 3)]) == chosen


def test_the_parts_of_what_is_wide_are_all_of_it_and_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tests/test_a.py::test_{number}" for number in range(100)]

    def chosen(wanted: str) -> set[str]:
        monkeypatch.setenv("HIVE_EXAMPLES", wanted)
        return set(filter(is_in_part, names))

    first, second = chosen("1/2"), chosen("2/2")
    assert (first | second, first & second) == (set(names), set())
    assert 20 < len(first) < 80
    assert (chosen(""), chosen("7"), chosen("all")) == (set(), set(), set(names))


@pytest.mark.parametrize(("wanted", "count"), [("", 50), ("all", 200), ("7", 7), ("1/2", 100), ("2/2", 100)])
def test_a_part_of_the_examples_of_hypothesis_is_tried(
    monkeypatch: pytest.MonkeyPatch, wanted: str, count: int
) -> None:
    monkeypatch.setenv("HIVE_EXAMPLES", wanted)
    assert examples(200) == count


def test_what_was_collected_is_left_out_of_garbage_collection() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
