"""Deployments on record, after a look at their server."""

from __future__ import annotations

from itertools import product

import pytest

from hive.domain import DeploymentState
from hive.pool.deployed import CHANGED, LEFT, NOT_AGAIN, ComparedDeployment, Place, SeenModel, compared

S = DeploymentState
GONE = SeenModel(Place.GONE, digest="d")
ENDED = "its server ended with exit code 1"
REFUSED = SeenModel(Place.GONE, "there is no such file", is_refused=True)


def found(state: DeploymentState, seen: SeenModel, *, at_start: bool, restore: bool = False) -> ComparedDeployment:
    return compared(state, "before", "d", seen, at_start=at_start, restore=restore)


@pytest.mark.parametrize(
    ("state", "seen", "restore", "becomes"),
    [
        (S.LOADED, GONE, False, ComparedDeployment(S.ABSENT, NOT_AGAIN)),
        (S.LOADING, GONE, False, ComparedDeployment(S.ABSENT, NOT_AGAIN)),
        (S.LOADED, GONE, True, ComparedDeployment(S.LOADING, loads=True)),
        (S.LOADING, GONE, True, ComparedDeployment(S.LOADING, loads=True)),
        (S.ABSENT, GONE, True, ComparedDeployment(S.LOADING, loads=True)),
        (S.EVICTED, GONE, True, ComparedDeployment(S.EVICTED, "before")),
        (S.FAILED, GONE, True, ComparedDeployment(S.FAILED, "before")),
        (S.LOADED, REFUSED, True, ComparedDeployment(S.ABSENT, REFUSED.why)),
        (S.LOADED, GONE._replace(digest="e"), True, ComparedDeployment(S.ABSENT, CHANGED)),
        (S.LOADED, GONE._replace(digest=""), True, ComparedDeployment(S.LOADING, loads=True)),
        (S.UNLOADING, GONE, True, ComparedDeployment(S.UNLOADING, "before", ends=True)),
        (S.UNLOADING, SeenModel(Place.LOADED), False, ComparedDeployment(S.LOADED)),
        (S.EVICTED, SeenModel(Place.LOADING), False, ComparedDeployment(S.LOADING)),
    ],
)
def test_what_an_earlier_daemon_left(
    state: DeploymentState, seen: SeenModel, restore: bool, becomes: ComparedDeployment
) -> None:
    assert found(state, seen, at_start=True, restore=restore) == becomes


@pytest.mark.parametrize(
    ("state", "seen", "becomes"),
    [
        (S.LOADING, SeenModel(Place.LOADED, digest="d"), ComparedDeployment(S.LOADED)),
        (S.EVICTED, SeenModel(Place.LOADED, digest="e"), ComparedDeployment(S.LOADED, CHANGED)),
        (S.LOADED, GONE, ComparedDeployment(S.EVICTED, LEFT)),
        (S.LOADED, GONE._replace(why=ENDED), ComparedDeployment(S.FAILED, ENDED)),
        (S.LOADING, GONE._replace(why=ENDED), ComparedDeployment(S.FAILED, ENDED)),
        (S.LOADING, GONE, ComparedDeployment(S.LOADING, "before")),
        (S.ABSENT, GONE, ComparedDeployment(S.ABSENT, "before")),
        (S.UNLOADING, GONE, ComparedDeployment(S.UNLOADING, "before")),
        (S.UNLOADING, SeenModel(Place.LOADED), ComparedDeployment(S.UNLOADING, "before")),
    ],
)
def test_what_happens_while_the_daemon_runs(
    state: DeploymentState, seen: SeenModel, becomes: ComparedDeployment
) -> None:
    assert found(state, seen, at_start=False, restore=True) == becomes


def test_nothing_is_decided_on_what_is_not_known() -> None:
    for state, place, at_start in product(S, (Place.UNKNOWN, Place.MOVING), (True, False)):
        stays = found(state, SeenModel(place), at_start=at_start, restore=True)
        assert stays == ComparedDeployment(state, "before")


def test_a_second_look_finds_what_the_first_one_wrote() -> None:
    """Looked at once more, nothing is written again and nothing is loaded, whatever the row is and whatever is seen."""
    seen = [
        SeenModel(place, why, is_refused=bool(why), digest=digest)
        for place, why, digest in product(Place, ("", ENDED), ("", "d", "e"))
    ]
    for state, one, at_start, restore in product(S, seen, (True, False), (True, False)):
        first = found(state, one, at_start=at_start, restore=restore)
        if first.ends or first.loads:
            continue
        again = compared(first.state, first.last_error, "d", one, at_start=False, restore=restore)
        assert not again.loads
        assert compared(again.state, again.last_error, "d", one, at_start=False, restore=restore) == again
