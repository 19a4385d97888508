"""Tells the proxy which models of a server that loads by itself may be asked, where a rule wants signed loads.

Ollama and a router of llama-server load whatever a request names. Under the rule a request may name only what was
loaded by a signed order, or is in memory now: what was there before the rule stays, and is loaded no second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from hive.backends.kinds import spec_of
from hive.control.active_backend import Active
from hive.domain import DeploymentState, ModelInfo
from hive.link.proxy_link import ProxyGates
from hive.link.signed_loads import SignedLoads
from hive.pooling.deployments import AT_SERVER, LOAD_RULE, Deployments
from hive.store.deployments import StoredDeployment

LOOK_S = 2.0
"""Under a rule the server is asked this often what it has in its memory."""


class LoadApprovals:
    """One for the daemon. `has_rule`: whether a rule asks for the signatures of an operation of this name."""

    def __init__(
        self, deployments: Deployments, *, active: Active, proxy_link: ProxyGates, has_rule: Callable[[str], bool]
    ) -> None:
        self._deployments = deployments
        self._active = active
        self._proxy_link = proxy_link
        self._has_rule = has_rule
        self._told = SignedLoads()
        self._seen: tuple[str, frozenset[str]] = ("", frozenset())
        """The address of a server, and what it had in its memory."""
        self._changed = asyncio.Event()
        deployments.on_change = self._changed.set

    def __repr__(self) -> str:
        return f"<LoadApprovals {self.now()}>"

    def now(self) -> SignedLoads:
        """State that holds, by what was seen last."""
        if not self._has_rule(LOAD_RULE):
            return SignedLoads()
        target, (_, models) = self._active.target, self._active.seen
        if target is None or spec_of(target.kind).asking.load is None:
            return SignedLoads(address="" if target is None else target.address, models=[])
        address, in_memory = self._seen
        loaded = in_memory if address == target.address else frozenset()
        return SignedLoads(address=target.address, models=may_be_asked(models, loaded, self._deployments.rows()))

    async def run(self) -> None:
        """Tells each change, until cancelled."""
        await self._active.known()
        while True:
            self._changed.clear()
            if self._has_rule(LOAD_RULE):
                target, loaded = self._active.target, await self._active.loaded()
                if target is not None and loaded is not None:
                    self._seen = target.address, loaded
            self.tell()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def tell(self, *, again: bool = False) -> None:
        """Tells it where that is news; `again`: to a proxy that has just come."""
        found = self.now()
        if again or found != self._told:
            self._told = found
            self._proxy_link.say(found)


def may_be_asked(models: Sequence[ModelInfo], loaded: Collection[str], rows: Sequence[StoredDeployment]) -> list[str]:
    """The names of those that are in memory, that were loaded by a signed order and are the same still, or that are
    answered elsewhere.

    >>> models = [ModelInfo(name=name, digest="d") for name in ("a", "b", "c")]
    >>> row = StoredDeployment(id="b@ollama", name="b", digest="d", backend="ollama", signature="ann", deployed_by="u",
    ...                        at=1.0, state=DeploymentState.LOADED)
    >>> may_be_asked(models, {"a"}, [row]), may_be_asked([ModelInfo(name="b", digest="other")], (), [row])
    (['a', 'b'], [])
    """
    signed = {
        (row.name, row.digest)
        for row in rows
        if AT_SERVER in row.id and row.signature and row.state is not DeploymentState.UNLOADING
    }
    return [
        model.name
        for model in models
        if model.name in loaded or (model.name, model.digest) in signed or model.remote_host
    ]
