"""Spreading of the tests over processes (pytest-xdist), and the choice of those that `--quick` and `--engines` run.

A test file is one piece of work: its module fixtures exist once. The longest files come first, so that no worker is
left alone with one at the end; how long each takes is in times.json, which `--measure` writes.
"""

from __future__ import annotations

import gc
import json
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import cache
from itertools import compress, product
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark.expression import Expression
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests import huge_pages
from tests.examples import is_in_part, is_tried

ROOT = Path(__file__).parents[1]
TIMES = Path(__file__).with_name("times.json")
"""Seconds of each file with tests, from a run of all of them: `{"tests/cli/test_top.py": 1.2}`."""
UNKNOWN_S = 5.0
"""Seconds that a file is taken for that was not measured yet."""
SHARED = {
    "vllm_server": re.compile(r"\bvllm_server\b"),
    "source trees": re.compile(r"\btests\.source_trees\b"),
}
"""Group → what its files name; one worker has it. A server of the whole run that takes 2 GB and a minute to start; the
sources of Hive, parsed."""
APART = ("chaos", "bare", "systemd", "vsock", "ray")
"""Markers of the suites that only .ci/run runs as a whole."""
ENGINES = ("engines", "vllm", "diffusers", "docker")
"""Markers of the suite of `--engines`: what the default one has no time for."""
IS_MARKED = re.compile(r"\bmark\.(\w+)")
CHOOSING = ("-m", "-k", "-x", "-s", "--exitfirst", "--maxfail", "--lf", "--last-failed", "--sw", "--stepwise")
"""Words of a command line that say: a few tests, and I am looking at them."""
QUICK_BELOW_S = 1.8
"""Seconds that a file takes at most that `--quick` runs: most tests a second come from those."""
QUICK_ROOMS = ("agents", "dialects", "models", "store", "wire")
"""A file of these that was not measured yet is quick: what decides, and what starts nothing dear."""
ALWAYS_QUICK = (
    *("tests/test_layers.py", "tests/test_docs.py", "tests/test_cli_contract.py"),
    "tests/journeys/test_model_routing.py",
)
"""Tests that hold the whole together, and the way of a request through all of it."""


@cache
def times() -> Mapping[str, float]:
    found: dict[str, float] = json.loads(TIMES.read_text())
    return found


@cache
def group_of(file: str) -> str:
    """The piece of work a file belongs to: itself, or the group that shares a dear server."""
    text = (ROOT / file).read_text() if file.endswith(".py") and (ROOT / file).exists() else ""
    return next((group for group, named in SHARED.items() if named.search(text)), file)


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Whole files (or groups of them) go to the workers, the longest first."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._places: dict[WorkerController, dict[str, int]] = {}
        """Of each test in what a worker has collected; 13,000 look-ups in that list took seconds."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = max(self.workqueue, key=self._expected_s)
        unit = self.assigned_work.setdefault(node, {})[scope] = self.workqueue.pop(scope)
        if node not in self._places:
            self._places[node] = {nodeid: place for place, nodeid in enumerate(self.registered_collections[node])}
        places = self._places[node]
        node.send_runtest_some([places[nodeid] for nodeid, completed in unit.items() if not completed])

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Notes the end of a test, and forgets the work that is over: all that is left is counted at each of these."""
        super().mark_test_complete(node, item_index, duration)
        work = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(work[scope].values()):
            del work[scope]

    def _expected_s(self, scope: str) -> float:
        files = {nodeid.partition("::")[0] for nodeid in self.workqueue[scope]}
        return sum(times().get(file, UNKNOWN_S) for file in files)


def worker_count(words: Sequence[str], cores: int, memory_gib: float = 16.0) -> int:
    """The number of processes that run what a command line asks for; 0: the one that was started.

    Parts of the suite chosen by hand run in it: there a debugger works, output is seen, and few tests gain nothing.
    Three more than there are cores, as the tests wait more than they work (with one more, two cores had nothing to do
    for 30 % of a run that still had the real engines, which work more); each with what it starts has 2 GiB.

    >>> worker_count([], cores=2), worker_count(["-q", "tests/cli"], cores=2)
    (5, 5)
    >>> worker_count(["tests/cli/test_top.py"], cores=2), worker_count(["-m", "chaos"], cores=2)
    (0, 0)
    """
    chosen = any(word.startswith(CHOOSING) or re.search(r"^[^-].*\.py(::|$)", word) for word in words)
    count = min(cores + 3, int(memory_gib // 2))
    return 0 if chosen or count < 2 else count


def engines_only() -> str:
    """The words of `-m` for the suite with real engines."""
    return f"({' or '.join(ENGINES)}) and not ({' or '.join(APART)})"


def holds(expression: str, marked: Collection[str]) -> bool:
    """Whether `-m` asks for a test with these markers.

    >>> holds("docker and not chaos", ["docker"]), holds("docker and not chaos", ["docker", "chaos"])
    (True, False)
    """

    def is_marked(name: str, /, **_: str | int | bool | None) -> bool:
        return name in marked

    return Expression.compile(expression).evaluate(is_marked)


def may_match(expression: str, marked: Collection[str]) -> bool:
    """Whether a test of a file may be one that `-m` asks for, by the markers of suites that the file names.

    A file that a run has nothing of is not read in: a suite of 80 tests collected 18,000, 12 s of CPU time in each of
    its processes.

    >>> may_match("chaos", ["llama"]), may_match("chaos", ["llama", "chaos"]), may_match("not chaos", ["chaos"])
    (False, True, True)
    >>> may_match("docker and not chaos", ["docker", "chaos"]), may_match("asyncio", [])
    (True, True)
    """
    if not expression:
        return True
    named = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    open_ones = sorted(named.intersection(marked) | (named - set(APART) - set(ENGINES)))
    chosen = product((False, True), repeat=len(open_ones))
    return any(holds(expression, set(compress(open_ones, values))) for values in chosen)


def is_quick(file: str) -> bool:
    """Whether `--quick` runs a file: by its time, and where that is not known by its room.

    >>> [is_quick(f"tests/{file}.py") for file in ("dialects/test_new", "journeys/test_new", "test_layers")]
    [True, False, True]
    """
    known = times().get(file)
    in_quick_room = file.split("/")[1] in QUICK_ROOMS or file.startswith("hive/")
    return file in ALWAYS_QUICK or (in_quick_room if known is None else known < QUICK_BELOW_S)


class Measure:
    """Writes how long each file took, when all of a run has passed through the controlling process.

    What the run had nothing of, as the suites apart, keeps the time it had.
    """

    def __init__(self) -> None:
        self._spent_s: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._spent_s[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {file: spent_s for file, spent_s in times().items() if (ROOT / file).exists()}
        found = kept | {file: round(spent_s, 1) for file, spent_s in self._spent_s.items()}
        TIMES.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hive")
    group.addoption("--quick", action="store_true", help="only the tests that find most in two minutes")
    group.addoption("--engines", action="store_true", help="only the tests with real inference engines and containers")
    group.addoption("--measure", action="store_true", help=f"write {TIMES.name} anew from this run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--engines"):
        config.option.markexpr = engines_only()
    gc.disable()  # until all is collected: what comes of it stays, and each look through it finds nothing
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Measure())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py":
        return None
    if config.getoption("--quick") and not is_quick(str(collection_path.relative_to(ROOT))):
        return True
    return not may_match(config.option.markexpr, IS_MARKED.findall(collection_path.read_text())) or None


T = TypeVar("T")
Collecting = Generator[None, pytest.CollectReport, pytest.CollectReport]


def turned(found: list[T], share: int, count: int) -> list[T]:
    """The same, begun at that share of it.

    >>> turned(["a", "b", "c", "d"], 1, 2)
    ['c', 'd', 'a', 'b']
    """
    begin = len(found) * share // count
    return found[begin:] + found[:begin]


def worker_share(config: pytest.Config) -> tuple[int, int]:
    """Number of this process among those that run tests, and how many those are."""
    told = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    return int(told["workerid"].removeprefix("gw")), int(told["workercount"])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Lets each process begin elsewhere in the directory of the tests.

    In a fresh tree pytest rewrites the assertions of a file where it first sees it, 24 s for all of them; so each
    process finds most of it done by the others.
    """
    report = yield
    if isinstance(collector, pytest.Dir) and collector.path == TIMES.parent:
        report.result = turned(report.result, *worker_share(collector.config))
    return report


def tried(cases: Sequence[tuple[str, int]]) -> list[bool]:
    """A mark for each case that is tried, of tests with their `breadth`."""
    count: defaultdict[str, int] = defaultdict(int)
    found = []
    for test, breadth in cases:
        found.append(is_tried(count[test], breadth))
        count[test] += 1
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the files into the order that is the same in all processes; leaves out what `breadth` and `wide` mark."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0])
    marked = [(item, marker.args[0]) for item in items if (marker := item.get_closest_marker("breadth"))]
    chosen = tried([(_test_of(item), breadth) for item, breadth in marked])
    left_out = {item for (item, _), is_chosen in zip(marked, chosen, strict=True) if not is_chosen}
    left_out |= {item for item in items if item.get_closest_marker("wide") and not is_in_part(_test_of(item))}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _test_of(item: pytest.Item) -> str:
    """The name of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def pytest_collection_finish() -> None:
    """Leaves what was collected, 600,000 objects, out of every later garbage collection: an eighth of the CPU time.

    And makes it cheap to fork with (huge_pages.py).
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    huge_pages.collapse()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leaves out what a file leaves for good, too: late in a run, a look at the open descriptors collected for 4 s."""
    if nextitem is None or nextitem.path != item.path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of loops that were closed; no fault of the next file
            gc.collect()
        gc.freeze()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return worker_count(config.invocation_params.args, len(os.sched_getaffinity(0)), memory_gib)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LongestFirst:
    return LongestFirst(config, log)
