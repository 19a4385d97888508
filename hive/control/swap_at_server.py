"""Swaps at the inference server in use: one model leaves, another one is loaded, and where that fails the first comes
back. There is no reservation: such a server shares its memory out itself."""

from __future__ import annotations

import logging
from collections.abc import Collection

from hive.agents.transition_lock import outcome_of
from hive.backends.backend import BackendControl
from hive.backends.kinds import spec_of
from hive.errors import HiveError, NotSupported, WrongState

log = logging.getLogger("hive.daemon")


def leaves_at(server: BackendControl, leaving: str, coming: str, loaded: Collection[str] | None) -> str:
    """The model that has to leave; empty where it is not in memory. `loaded`: those that are, None where the server
    does not tell. Raises WrongState, NotSupported."""
    if leaving == coming:
        raise WrongState(f"{coming} cannot leave for itself")
    asking = spec_of(server.kind).asking
    if asking.unload is None:
        raise NotSupported(f"{leaving} is not unloaded on request: {asking.why_not_load}")
    return "" if loaded is not None and leaving not in loaded else leaving


async def swap_at(server: BackendControl, leaving: str, coming: str) -> None:
    """Returns once `coming` is in memory. Raises as `BackendControl.load`; then `leaving` was loaded again, or the
    error says that it was not."""
    try:
        await server.unload(leaving)
        await server.load(coming)
    except HiveError as error:
        back = await outcome_of(server.load(leaving))
        if isinstance(back, HiveError):
            error.message = f"{error.message}; and {leaving} is not loaded again: {back.message}"
        log.warning("swap_given_up coming=%s back=%s error=%s", coming, leaving, error.message)
        raise
