"""The source of a Snapshot: the daemon, or SQLite and Redis where that is down. Blocking; only reads.

A daemon that answers is asked for everything: it alone knows the present state of an agent, and tells also users that
may not read its files. That this costs next to nothing is the business of Watch and of control/change_feed.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hive.client.client import Client, find
from hive.conditions import Where, condition, where_is
from hive.domain import Agent
from hive.errors import DependencyDown, HiveError, NotPermitted, TimedOut, WrongState
from hive.paths import APPLIANCE_RUNTIME, default_state_dir, runtime_dir
from hive.settings.table import Paths
from hive.tui.snapshot import Answer, Answers, Snapshot, from_api, from_store
from hive.tui.watch import ANSWER_S, Watch

if TYPE_CHECKING:
    from hive.store.audit import AuditRecord
    from hive.store.viewer import SeenLive, Viewer

APPLIANCE_STATE = Path("/var/lib/hive")
"""`StateDirectory=` of the installed services."""


class Source:
    """One Hive. `look` is called by one thread at a time."""

    def __init__(self, sockets: list[Path], state_dir: Path | None, *, uid: int, env: Mapping[str, str]) -> None:
        self._sockets = sockets
        self._places = places_of(sockets, state_dir, uid=uid, env=env)
        self._named = (state_dir, str(sockets[0]) if len(sockets) == 1 else "", uid == 0)
        self._before: Snapshot | None = None
        self._watch: Watch | None = None
        self._stored = Stored()
        self.looked_at: float | None = None
        """Time of the last look, by the clock of `since_boot_s`; None before the first."""

    def __repr__(self) -> str:
        return f"<Source {' or '.join(map(str, self._sockets))}>"

    @property
    def client(self) -> Client:
        """The client of the daemon that answered last. Raises DependencyDown where none does."""
        return self._watched().client

    def _watched(self) -> Watch:
        # Its own name for it: the thread that looks forgets the watch whenever a daemon does not answer.
        watch = self._watch
        if watch is None:
            watch = self._watch = Watch(Client(find(self._sockets).path, timeout_s=ANSWER_S))
        return watch

    def look(self, shown: Collection[str] | None = None) -> Snapshot:
        """Everything as it is. `shown`: ids of the agents on the screen, None for all (see `Watch.ask`).

        Raises DependencyDown where neither the daemon answers nor its database can be read, WrongState where what
        answers is another version, NotPermitted.
        """
        try:
            snapshot = self._ask(shown)
        except (DependencyDown, TimedOut) as down:
            self._watch = None
            snapshot = self._read(down)
        self._before, self.looked_at = snapshot, since_boot_s()
        return snapshot

    def _ask(self, shown: Collection[str] | None) -> Snapshot:
        watch = self._watched()
        try:
            snapshot, paths = self._snapshot_of(watch.ask(shown), place=str(watch.client.path))
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
            hint = "`hive status` names its version, `hive version` that of this command"
            told = f"what answers at {watch.client.path} is no Hive of this version: {error!r}"
            raise WrongState(told, hint=hint) from error
        self._places = [paths]  # as it says itself: where it goes down, its database is found
        return snapshot

    def _snapshot_of(self, answers: Answers, *, place: str) -> tuple[Snapshot, Paths]:
        state, runtime = Path(answers.health["state_dir"]), Path(answers.health["runtime_dir"])
        paths = Paths(state, runtime, apart=runtime == APPLIANCE_RUNTIME)
        asked = msgspec.structs.replace(answers, queue=_queue(paths))
        where = self._where(apart=paths.apart)
        return from_api(asked, place=place, now=time.time(), before=self._before, where=where), paths

    def _where(self, *, apart: bool) -> Where:
        state_dir, socket, is_root = self._named
        return where_is(apart=apart, state_dir=state_dir, socket=socket, is_root=is_root)

    def _read(self, down: HiveError) -> Snapshot:
        """`down`: why the daemon was not to be had."""
        paths = next((paths for paths in self._places if os.path.exists(paths.database)), None)
        if paths is None:
            closed = next((paths.database for paths in self._places if _is_closed(paths.database)), None)
            if closed is None:
                raise down
            raise NotPermitted(f"{down.message}, and this user may not read {closed}", hint="root may")
        found, acts = self._stored.look(paths)
        how = "does not answer" if isinstance(down, TimedOut) else "is down"
        return from_store(
            found,
            acts,
            place=str(paths.database),
            now=time.time(),
            wrong=condition("shown_from_database", how=how, path=paths.database).at(self._where(apart=paths.apart)),
            queue=_queue(paths),
        )


class Stored:
    """SQLite, read again only once it was written to, and what Redis has besides."""

    def __init__(self) -> None:
        self._as_of: Hashable = None
        self._found: tuple[list[Agent], list[AuditRecord]] = ([], [])
        self._viewer: Viewer | None = None

    def look(self, paths: Paths) -> tuple[list[Agent], list[AuditRecord]]:
        """All agents, and the last acts. Raises DependencyDown."""
        from hive.tui.stored import read, stamp  # a seventh of the start that only a daemon that is down costs

        as_of = (paths, stamp(paths.database))
        if as_of != self._as_of:
            self._found, self._as_of = read(paths.database), as_of
        agents, acts = self._found
        seen = self._seen(paths)
        return agents if seen is None else [with_seen(agent, seen) for agent in agents], acts

    def _seen(self, paths: Paths) -> SeenLive | None:
        """None where Redis does not say, or is not to be asked by this user."""
        socket = str(paths.redis_socket)
        if not os.path.exists(socket):
            return None
        from hive.store.viewer import VIEWER, Viewer  # only a daemon that is down costs this

        if self._viewer is None or self._viewer.socket != socket:
            if self._viewer is not None:
                self._viewer.close()
            self._viewer = Viewer(socket, user=VIEWER if paths.apart else "")
        try:
            return self._viewer.look()
        except DependencyDown:
            return None


def with_seen(agent: Agent, seen: SeenLive) -> Agent:
    """The agent with its last activity, of which SQLite knows only what ended, and its counts.

    A count in Redis is for display, and a Redis that began anew begins at 0: the higher one is nearer to the truth.
    """
    active_at, counted = seen.active_at.get(agent.id), seen.counted.get(agent.id)
    if active_at is None or counted is None:
        return agent
    return msgspec.structs.replace(
        agent,
        last_active_at=max(agent.last_active_at or 0.0, active_at),
        tokens_in=max(agent.tokens_in, counted.tokens_in),
        tokens_out=max(agent.tokens_out, counted.tokens_out),
        requests=max(agent.requests, counted.requests),
    )


def places_of(sockets: list[Path], state_dir: Path | None, *, uid: int, env: Mapping[str, str]) -> list[Paths]:
    """The directories of the Hive with one of these sockets; empty where nothing names them.

    >>> [str(p.database) for p in places_of([Path("/run/hive/hive.sock")], None, uid=0, env={})]
    ['/var/lib/hive/daemon/hive.db']
    >>> places_of([Path("/elsewhere/hive.sock")], None, uid=0, env={})
    []
    """
    found = []
    for socket in sockets:
        runtime = socket.parent
        if state_dir is not None:
            found.append(Paths(state_dir, runtime))
        elif runtime == APPLIANCE_RUNTIME:
            found.append(Paths(APPLIANCE_STATE, runtime, apart=True))
        elif runtime == runtime_dir(None, uid, env):
            found.append(Paths(default_state_dir(uid, env), runtime))
    return found


def since_boot_s() -> float:
    """A clock that is never set, and that goes on while the host is suspended, as the one of `Snapshot.at` does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_closed(path: Path) -> bool:
    """Whether it cannot be seen from here because a directory above it lets this user not in."""
    there = next((above for above in path.parents if os.path.isdir(above)), path)
    return not os.access(there, os.X_OK)


def _queue(paths: Paths) -> Answer | None:
    """The proxy's, None where it cannot be asked: it is a service of its own, and its socket is not open to all."""
    try:
        return Client(paths.admin_socket, timeout_s=1.0).get("/queue")
    except HiveError:
        return None
