"""A short run of each fuzz target from the kept corpus; HIVE_FUZZ_SECONDS makes it longer. `.ci/run` adds minutes."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.fuzzing import fuzz, seeds
from tests.fuzz.targets import TARGETS

SECONDS = float(os.environ.get("HIVE_FUZZ_SECONDS", "1"))


@pytest.mark.timeout(SECONDS * 3 + 120)
@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_break_what_must_hold_of_a_parser(target: str) -> None:
    assert len(seeds(target)) >= 5
    assert fuzz(target, SECONDS) > 0
