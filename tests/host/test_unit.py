"""Agents as units of a real systemd: unit_*_inside.py, run in a machine of its own, told here test by test."""

from __future__ import annotations

import ast
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.host import systemd_machine

INSIDE = (
    "unit_life_inside.py",
    "unit_apart_inside.py",
    "unit_exec_inside.py",
    "unit_logs_inside.py",
    "unit_inference_inside.py",
)
JOB = """
export PYTHONPATH={packages}:{hive}:{hive}/tests
export PYTHONDONTWRITEBYTECODE=1
mkdir --mode=711 /var/lib/hive /run/hive
cd {hive} && timeout 700 python3 -m pytest -q -m '' --noconftest --durations=10 \\
    -p no:cacheprovider -p no:hypothesispytest -p tests.host.unit_agents --junitxml=/out/junit.xml \\
    {files}
journalctl --unit='hive-agent@*' --lines=200 --no-pager
"""


def names_in(files: Sequence[str]) -> list[str]:
    """The tests in these files of this directory."""
    return [
        node.name
        for file in files
        for node in ast.parse(Path(__file__).with_name(file).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]


NAMES = names_in(INSIDE)

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(850)]


class Results:
    """The result of each test inside; one with parameters has several."""

    def __init__(self, console: str, report: Path) -> None:
        self.console = console
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ()
        self.cases: dict[str, list[ElementTree.Element]] = {}
        for case in cases:
            self.cases.setdefault(case.attrib["name"].partition("[")[0], []).append(case)

    def tell(self, name: str) -> None:
        """Fails or skips as the test of this name did inside."""
        cases = self.cases.get(name, [])
        assert cases, self.console
        for case in cases:
            for failed in (*case.iter("failure"), *case.iter("error")):
                pytest.fail(f"{case.attrib['name']}\n{failed.text}", pytrace=False)
        if all(skipped := [part.attrib["message"] for part in case.iter("skipped")] for case in cases):
            pytest.skip(skipped[0])


def run_inside(files: Sequence[str], *, hybrid: bool = False) -> Iterator[Results]:
    """Runs these files of this directory in one machine; `hybrid`: one with v1's control groups beside v2's."""
    if reason := systemd_machine.why_not() or (hybrid and systemd_machine.why_not_hybrid()):
        pytest.skip(reason)
    systemd_machine.make_root()
    there = {"packages": systemd_machine.PACKAGES_THERE, "hive": systemd_machine.HIVE_THERE}
    job = JOB.format(**there, files=" ".join(f"tests/host/{name}" for name in files))
    with tempfile.TemporaryDirectory(prefix="hive-unit-") as name:
        console = systemd_machine.run(job, Path(name), limit_s=750, hybrid=hybrid)
        print(console)
        yield Results(console, Path(name) / "junit.xml")


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    yield from run_inside(INSIDE)


@pytest.mark.parametrize("name", NAMES)
def test_under_systemd(results: Results, name: str) -> None:
    results.tell(name)
