"""The decision what a deployment on record is, by what the servers really have. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from hive.domain import DeploymentState

CHANGED = "its files have changed since it was deployed"
NOT_AGAIN = "it was not loaded again after a restart: [registry] restore = false"
LEFT = "its memory was wanted for another model, or it was idle: a request loads it again"


class Place(StrEnum):
    """Place of a model, as its server says: `moving` is between two of these, `unknown` is not told just now."""

    LOADED = "loaded"
    LOADING = "loading"
    MOVING = "moving"
    GONE = "gone"
    UNKNOWN = "unknown"


class SeenModel(NamedTuple):
    """A model as it was looked at. `why`: why it is gone, or cannot be loaded, a clause, else empty; `is_refused`: it
    cannot be loaded as things are. `digest`: of its files now, empty where that is not known."""

    place: Place
    why: str = ""
    is_refused: bool = False
    digest: str = ""


class ComparedDeployment(NamedTuple):
    """The row from now on. `loads`: the model is to be loaded again; `ends`: the row is to be taken away."""

    state: DeploymentState
    last_error: str = ""
    loads: bool = False
    ends: bool = False


def compared(
    state: DeploymentState, last_error: str, digest: str, seen: SeenModel, *, at_start: bool, restore: bool
) -> ComparedDeployment:
    """The row of a deployment after a look at its server. `at_start`: its state was written by an earlier daemon.

    >>> gone, loaded = SeenModel(Place.GONE, digest="d"), SeenModel(Place.LOADED, digest="d")
    >>> compared(DeploymentState.LOADING, "", "d", loaded, at_start=False, restore=False).state
    <DeploymentState.LOADED: 'loaded'>
    >>> compared(DeploymentState.LOADED, "", "d", gone, at_start=False, restore=True).state
    <DeploymentState.EVICTED: 'evicted'>

    After a restart it is loaded again, if that is wanted and it is still what was deployed.

    >>> compared(DeploymentState.LOADED, "", "d", gone, at_start=True, restore=True).loads
    True
    >>> compared(DeploymentState.LOADED, "", "d", gone, at_start=True, restore=False).last_error
    'it was not loaded again after a restart: [registry] restore = false'
    >>> compared(DeploymentState.LOADED, "", "other", gone, at_start=True, restore=True).last_error
    'its files have changed since it was deployed'

    An unload that an earlier daemon was about is over where the model is gone, else it was lost.

    >>> compared(DeploymentState.UNLOADING, "", "d", gone, at_start=True, restore=True).ends
    True
    """
    stays = ComparedDeployment(state, last_error)
    has_changed = bool(digest) and bool(seen.digest) and digest != seen.digest
    is_unloading = state is DeploymentState.UNLOADING
    match seen.place:
        case Place.UNKNOWN | Place.MOVING:
            return stays
        case Place.LOADED | Place.LOADING if is_unloading and not at_start:
            return stays  # the order is under way
        case Place.LOADED:
            return ComparedDeployment(DeploymentState.LOADED, CHANGED if has_changed else "")
        case Place.LOADING:
            return ComparedDeployment(DeploymentState.LOADING)
        case Place.GONE:
            if is_unloading:
                return stays._replace(ends=at_start)
            return _gone_at_start(stays, seen, has_changed, restore) if at_start else _gone(stays, seen)


def _gone_at_start(stays: ComparedDeployment, seen: SeenModel, has_changed: bool, restore: bool) -> ComparedDeployment:
    if stays.state in (DeploymentState.EVICTED, DeploymentState.FAILED):
        return stays
    if has_changed:
        return ComparedDeployment(DeploymentState.ABSENT, CHANGED)
    if seen.is_refused:
        return ComparedDeployment(DeploymentState.ABSENT, seen.why)
    if restore:
        return ComparedDeployment(DeploymentState.LOADING, loads=True)
    return ComparedDeployment(DeploymentState.ABSENT, seen.why or NOT_AGAIN)


def _gone(stays: ComparedDeployment, seen: SeenModel) -> ComparedDeployment:
    if stays.state not in (DeploymentState.LOADED, DeploymentState.LOADING):
        return stays
    if seen.why:
        return ComparedDeployment(DeploymentState.FAILED, seen.why)
    if stays.state is DeploymentState.LOADED:
        return ComparedDeployment(DeploymentState.EVICTED, LEFT)
    return stays  # the order that loads it is about to begin, or has just ended
