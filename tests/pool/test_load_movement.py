"""The progress of a load: a table of what servers look like while they load, second by second."""

from __future__ import annotations

import pytest

from hive.pool.load_movement import GROWS_BYTES, STILL_S, LoadMovement
from hive.pool.state import MIB

PROBED_CPU = 0.008
"""CPU share of a supervisor that asks for the health all the time."""


def stood(cpu: float, grows: float, seconds: int = 300, *, bytes: int | None = 500 * MIB) -> float:
    """Seconds for which a load stands still at its end, of a server that uses so much of a core and takes so many bytes
    a second."""
    load = LoadMovement()
    for second in range(seconds):
        at = None if bytes is None else int(bytes + grows * second)
        load.saw(cpu_s=2.0 + cpu * second if cpu else 0.0, bytes=at, now=1000.0 + second)
    return load.stood_s(1000.0 + seconds - 1)


@pytest.mark.parametrize(
    ("cpu", "grows", "stands"),
    [
        pytest.param(PROBED_CPU, 0.0, True, id="stopped, or waits for what does not come"),
        pytest.param(PROBED_CPU, 300.0, True, id="its supervisor's memory breathes"),
        pytest.param(1.0, 0.0, False, id="vLLM compiles for minutes"),
        pytest.param(0.03, 0.0, False, id="it works on a busy machine"),
        pytest.param(PROBED_CPU, 100_000.0, False, id="weights from a disk of 100 KB/s"),
        pytest.param(0.5, 1e9, False, id="weights from a fast disk"),
        pytest.param(PROBED_CPU, -1e6, False, id="buffers of the load are given back"),
    ],
)
def test_a_load_stands_still_if_it_neither_computes_nor_takes_memory(cpu: float, grows: float, stands: bool) -> None:
    assert (stood(cpu, grows) >= STILL_S) is stands


def test_what_is_not_known_is_no_standing_still() -> None:
    assert stood(0.0, 0.0) == 0.0
    assert stood(PROBED_CPU, 0.0, bytes=None) == 0.0


def test_it_stands_still_from_its_last_move_on_and_goes_on_where_it_moves_again() -> None:
    load = LoadMovement()
    for now in range(40):
        load.saw(cpu_s=1.0 + now, bytes=MIB, now=now)
    for now in range(40, 120):
        load.saw(cpu_s=40.0, bytes=MIB + GROWS_BYTES - 1, now=now)
    assert 75.0 <= load.stood_s(119.0) <= 85.0
    load.saw(cpu_s=40.0, bytes=MIB + 2 * GROWS_BYTES, now=120.0)
    assert load.stood_s(120.0) == 0.0


def test_after_a_time_in_which_nobody_looked_the_cpu_of_all_of_it_is_compared() -> None:
    load = LoadMovement()
    load.saw(cpu_s=1.0, bytes=MIB, now=0.0)
    load.saw(cpu_s=9.0, bytes=MIB, now=100.0)
    assert load.stood_s(100.0) == 0.0
