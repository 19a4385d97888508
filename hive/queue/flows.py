"""The tables of flows and tenants, the same for all lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hive.queue.fair_share import Account, Flow, Level, Line, Share, SharePosition, TenantFlows

EXTRA_FLOWS = 256
"""Flows kept of agents under another tenant than their own (an operator may name any)."""
REBASE_TOKENS = 1e12
"""Counters start anew from here; a float holds thousandths of a token up to 2**43, about 9e12."""


class Flows:
    """Every flow by agent and tenant, every tenant by name.

    The first flow of an agent is its own and stays until it is forgotten; of the others the last used `EXTRA_FLOWS`
    do. One that was dropped works on, and is kept again when it has to wait.
    """

    def __init__(self) -> None:
        self.lines: dict[Line, None] = {}
        self.tenants: dict[str, TenantFlows] = {}
        self.by_key: dict[tuple[str, str], Flow] = {}
        self._own: dict[str, Flow] = {}
        self._extra: dict[Flow, None] = {}

    def __repr__(self) -> str:
        return f"<Flows {len(self.by_key)} of {len(self.tenants)} tenants, {len(self._extra)} extra>"

    def tenant(self, name: str, weight: float) -> TenantFlows:
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantFlows(name, 1.0 / weight)
        else:
            found.use_price(1.0 / weight)
        return found

    def flow(self, agent: str, tenant: str, *, limit: int, weight: float) -> Flow:
        owner = self.tenant(tenant, weight)
        flow = self.by_key.get((agent, tenant))
        if flow is None:
            flow = Flow(agent, owner, limit)
            self._keep(flow)
        if self._own.setdefault(agent, flow) is flow:
            self._extra.pop(flow, None)
        else:
            self._use_extra(flow)
        return flow

    def move(self, flow: Flow, tenant: str, weight: float) -> None:
        if flow.tenant != tenant:
            old = flow.owner
            self._drop(flow)
            for line in self.lines:
                flow.stand(line)  # a newcomer has its rank from this moment, also where it has not asked yet
            flow.attach(self.tenant(tenant, weight))
            self._keep(flow)
            self.drop_unused(old)
        self.tenant(tenant, weight)

    def forget(self, flow: Flow) -> None:
        """The agent's other flows too, where this was its own."""
        self._drop(flow)
        if self._own.get(flow.agent) is flow:
            del self._own[flow.agent]
            for extra in [extra for extra in self._extra if extra.agent == flow.agent]:
                self._drop(extra)

    def keep_again(self, flow: Flow) -> None:
        """A dropped flow is still used, by a connection that knew it."""
        old = flow.owner
        flow.attach(self.tenant(flow.tenant, 1.0 / old.price))
        if (flow.agent, flow.tenant) not in self.by_key:
            self._keep(flow)
            self._use_extra(flow)
        self.drop_unused(old)

    def drop_unused(self, tenant: TenantFlows) -> None:
        """A tenant without agents, in the lines where nothing of it waits any more (a forgotten agent's requests
        may)."""
        if tenant.flows:
            return
        if not any(line.waiting for line in tenant.lines.values()):
            if self.tenants.get(tenant.name) is tenant:
                del self.tenants[tenant.name]
            return
        for line in [line for line, of_tenant in tenant.lines.items() if not of_tenant.waiting]:
            tenant.leave_line(line)

    def close(self, line: Line) -> None:
        """The line is no more; nothing waits there."""
        del self.lines[line]
        for flow in self.by_key.values():
            flow.leave_line(line)
        for tenant in self.tenants.values():
            tenant.leave_line(line)

    def rebase(self, line: Line, level: Level) -> None:
        """Lowers all counters of a band of a line by what the least served has settled; the order of turns does not
        change."""
        rank = level.rank
        accounts = {
            of_tenant.accounts[rank]: None
            for tenant in self.tenants.values()
            if (of_tenant := tenant.lines.get(line)) is not None
        } | level.ready
        positions = {
            position: None
            for flow in self.by_key.values()
            if (standing := flow.standings.get(line)) is not None and (position := standing.positions[rank]) is not None
        }
        for account in accounts:
            for position in {position: None for position in positions if position.account is account} | account.ready:
                position.set_at(max(position.settled - account.floor, -REBASE_TOKENS))
            account.floor = 0.0
            account.set_at(max(account.settled - level.floor, -REBASE_TOKENS))
        level.floor = 0.0

    def rescale(self, lines: Iterable[Line], factor: float, running: Iterable[SharePosition]) -> None:
        """Multiplies all that is counted in these lines: a second of their work is worth so many more tokens from now
        on. Their order does not change, and what counts of other lines stays. `running`: the positions of requests
        there; their expectations are the caller's."""
        rescaled, positions = set(lines), dict.fromkeys(running)
        for flow in self.by_key.values():
            positions |= dict.fromkeys(one for standing in flow.standings.values() for one in standing.held)
        for tenant in self.tenants.values():
            for of_tenant in tenant.lines.values():
                positions |= dict.fromkeys(one for standing in of_tenant.waits for one in standing.held)
        accounts = dict.fromkeys(position.account for position in positions)
        for tenant in self.tenants.values():
            accounts |= {one: None for of_tenant in tenant.lines.values() for one in of_tenant.accounts}
        levels = {level for line in rescaled for level in line.levels}
        shares: dict[Share, Account] = {account: account for account in accounts}
        shares |= {position: position.account for position in positions}
        elsewhere = {share: share.counted_elsewhere() for share in shares if share.siblings}
        for share, account in shares.items():
            if account.level in levels:
                share.scale(factor)
        for level in levels:
            level.floor *= factor
        for share, counted in elsewhere.items():
            share.count_elsewhere(counted)

    def _keep(self, flow: Flow) -> None:
        key = (flow.agent, flow.tenant)
        flow.owner.flows += 1  # first, or dropping the other one would drop the tenant
        if key in self.by_key:
            self._drop(self.by_key[key])
        self.by_key[key] = flow
        flow.kept = True

    def _drop(self, flow: Flow) -> None:
        """Removes the flow from the tables."""
        if flow.kept:
            flow.kept = False
            del self.by_key[(flow.agent, flow.tenant)]
            self._extra.pop(flow, None)
            flow.owner.flows -= 1
            self.drop_unused(flow.owner)

    def _use_extra(self, flow: Flow) -> None:
        """The last used is dropped last; one that runs or waits is not dropped."""
        self._extra.pop(flow, None)
        self._extra[flow] = None
        if len(self._extra) > EXTRA_FLOWS:
            idle = (old for old in self._extra if old is not flow and not (old.running or old.waiting))
            if (oldest := next(idle, None)) is not None:
                self._drop(oldest)
