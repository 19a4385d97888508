"""The promises of every runtime on units of a real systemd: unit_conformance_inside.py, told here test by test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host.test_unit import Results, names_in, run_inside
from tests.runtimes import test_conformance

INSIDE = ("unit_conformance_inside.py",)
NAMES = [*(name for name in vars(test_conformance) if name.startswith("test_")), *names_in(INSIDE)]

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(850)]


@pytest.fixture(scope="module", params=[False, True], ids=["v2", "hybrid"])
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    yield from run_inside(INSIDE, hybrid=request.param)


@pytest.mark.parametrize("name", NAMES)
def test_under_systemd(results: Results, name: str) -> None:
    results.tell(name)
