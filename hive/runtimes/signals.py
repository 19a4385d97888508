"""The way to stop an agent without a cgroup: its processes found by walking /proc, stopped and continued by signals."""

from __future__ import annotations

import signal

from hive.host.memory import held_by
from hive.host.process import TICK_US, Identity, ProcessStat, ProcessTable, has_environment, is_stopped, real_uid


class SignalGroup:
    """All processes of one agent, as far as /proc tells.

    A process belongs to the agent if it is of the session the helper made, below a process that is, of the agent's
    own uid, carries the agent's mark in its environment, or was found so before. The limit: where agents have no uid
    of their own, a process that clears its environment, leaves the session and loses its parent between two walks
    is not found again.
    """

    how = "signals"

    def __init__(self, leader: Identity, *, uid: int | None, mark: str) -> None:
        """`mark`: the `NAME=value` in the environment of everything started for this agent."""
        self._leader = leader
        self._uid = uid
        self._mark = mark
        self._seen: dict[int, int] = {leader.pid: leader.start_ticks}
        self._looked_at: dict[int, int] = {}
        self._sent_stop = False

    def __repr__(self) -> str:
        return f"<SignalGroup of {self._leader.pid}, {len(self._seen)} seen>"

    def members(self, snapshot: ProcessTable) -> list[ProcessStat]:
        """The members alive in this walk; remembered for the next one."""
        processes = snapshot.processes
        seen = {pid for pid, start in self._seen.items() if pid in processes and processes[pid].start_ticks == start}
        found = snapshot.with_descendants(seen | self._session(snapshot) | self._newcomers(snapshot))
        members = [stat for pid in found if (stat := processes[pid]).alive]
        self._seen = {stat.pid: stat.start_ticks for stat in members}
        leader = processes.get(self._leader.pid)
        if leader is not None and leader.start_ticks == self._leader.start_ticks:
            self._seen[leader.pid] = leader.start_ticks
        return members

    def _newcomers(self, snapshot: ProcessTable) -> set[int]:
        """New members: processes not looked at before with the agent's uid or mark, which a fork hands down."""
        new = [stat.pid for stat in snapshot.processes.values() if self._looked_at.get(stat.pid) != stat.start_ticks]
        self._looked_at = {stat.pid: stat.start_ticks for stat in snapshot.processes.values()}
        return {pid for pid in new if self._carries_uid_or_mark(pid)}

    def _carries_uid_or_mark(self, pid: int) -> bool:
        return (self._uid is not None and real_uid(pid) == self._uid) or has_environment(pid, self._mark)

    def _session(self, snapshot: ProcessTable) -> set[int]:
        """Once the leader is gone its number may name a foreign session: then only what carries the mark counts."""
        in_session = {
            pid
            for pid in snapshot.sessions.get(self._leader.pid, ())
            if snapshot.processes[pid].start_ticks >= self._leader.start_ticks
        }
        leader = snapshot.processes.get(self._leader.pid)
        if leader is None:
            return {pid for pid in in_session if has_environment(pid, self._mark)}
        return in_session if leader.start_ticks == self._leader.start_ticks else set()

    def pids(self) -> list[int]:
        return [stat.pid for stat in self.members(ProcessTable())]

    def freeze(self) -> None:
        """SIGSTOP to every member that still runs; call it again until `is_frozen`."""
        self._sent_stop = True
        for stat in self.members(ProcessTable()):
            if not is_stopped(stat.pid):
                Identity.of(stat).send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Sends SIGCONT to every member, also to one the agent had stopped itself: the state does not tell them apart.

        To those that do not look stopped too: a SIGSTOP may be pending, which SIGCONT takes back. No walk: every
        process stopped here was seen before, and what is stopped has no new children.
        """
        if self._sent_stop or not self.is_thawed():
            self._sent_stop = False
            for who in self._seen_before():
                who.send(signal.SIGCONT)

    def _seen_before(self) -> list[Identity]:
        return [Identity(pid, start, self._leader.boot) for pid, start in self._seen.items()]

    def is_frozen(self) -> bool:
        """Whether nothing of it runs.

        Two walks: a child born during the first, of a parent that was stopped before it was read, shows in the
        second; nothing that is stopped has another.
        """
        first = self.members(ProcessTable())
        if not first or not all(is_stopped(stat.pid) for stat in first):
            return False
        return all(is_stopped(stat.pid) for stat in self.members(ProcessTable()))

    def is_thawed(self) -> bool:
        stats = [stat for who in self._seen_before() if (stat := who.stat()) is not None]
        return not any(_waits_for_cont(stat) for stat in stats)

    def signal(self, signum: int) -> None:
        for stat in self.members(ProcessTable()):
            Identity.of(stat).send(signum)

    def kill(self) -> None:
        """SIGKILL to all found now; repeat until `pids` is empty, for one may have forked meanwhile."""
        self.signal(signal.SIGKILL)

    def usage(self, snapshot: ProcessTable) -> tuple[int, int, int, int]:
        """(CPU time in µs of the living and of the children they waited for, RSS in bytes, living processes, swap)."""
        members = self.members(snapshot)
        ticks = sum(stat.cpu_ticks + stat.waited_cpu_ticks for stat in members)
        swap_bytes = held_by(stat.pid for stat in members).swap_bytes
        return ticks * TICK_US, sum(stat.rss_bytes for stat in members), len(members), swap_bytes

    def looks_frozen(self, snapshot: ProcessTable) -> bool:
        """`is_frozen` by one walk that may serve many agents: good enough to show, not to rely on."""
        members = self.members(snapshot)
        return bool(members) and all(is_stopped(stat.pid) for stat in members)

    def was_asked_to_freeze(self) -> bool:
        """Whether any of it was stopped; by a walk, for a helper that was not there then."""
        return any(is_stopped(stat.pid) for stat in self.members(ProcessTable()))

    def remove(self) -> None:
        """There is nothing to remove."""


def _waits_for_cont(stat: ProcessStat) -> bool:
    """Whether it is in state T; a process whose first thread has ended shows Z, so its other threads are asked."""
    return stat.state == "T" or (stat.state == "Z" and stat.alive and is_stopped(stat.pid))
