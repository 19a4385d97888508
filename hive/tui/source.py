"""Where a Snapshot comes from: the daemon, or SQLite and Redis where that is down. Blocking; only reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from hive.control.client import Client, find
from hive.domain import Agent
from hive.errors import DependencyDown, HiveError
from hive.places import APPLIANCE_RUNTIME, default_state_dir, runtime_dir
from hive.settings import Paths
from hive.store import agents, audit
from hive.store.audit import AuditRow
from hive.tui.snapshot import Answer, Answers, Snapshot, View, Views, from_api, from_store

ANSWER_S = 5.0
EVENTS = 50
APPLIANCE_STATE = Path("/var/lib/hive")
"""`StateDirectory=` of the installed services."""
VIEWER = "viewer"
"""Of the ACL: it may read, and any password is right; the mode of the socket says who gets that far."""


class Source:
    """One Hive. `look` is called by one thread at a time."""

    def __init__(self, sockets: list[Path], state_dir: Path | None, *, uid: int, env: Mapping[str, str]) -> None:
        self._sockets = sockets
        self._places = places_of(sockets, state_dir, uid=uid, env=env)
        self._before: Snapshot | None = None
        self._client: Client | None = None

    def __repr__(self) -> str:
        return f"<Source {' or '.join(map(str, self._sockets))}>"

    @property
    def client(self) -> Client:
        """Of the daemon that answered last. Raises DependencyDown where none does."""
        if self._client is None:
            self._client = Client(find(self._sockets).path, timeout_s=ANSWER_S)
        return self._client

    def look(self) -> Snapshot:
        """Raises DependencyDown where neither the daemon answers nor its database can be read, else what came up."""
        try:
            snapshot = self._ask()
        except DependencyDown as down:
            self._client = None
            snapshot = self._read(down)
        self._before = snapshot
        return snapshot

    def _ask(self) -> Snapshot:
        client = self.client
        health = client.get("/api/health")
        paths = Paths(
            Path(health["state_dir"]),
            Path(health["runtime_dir"]),
            apart=health["runtime_dir"] == str(APPLIANCE_RUNTIME),
        )
        self._places = [paths]  # as it says itself: where it goes down, its database is found
        answers = Answers(
            health=health,
            agents=_agents(client),
            inference=client.get("/api/system/inference"),
            memory=client.get("/api/system/memory"),
            stats=client.get("/api/stats"),
            events=list(client.events(tail=EVENTS)),
            queue=_queue(paths),
        )
        return from_api(answers, place=str(client.path), now=time.time(), before=self._before)

    def _read(self, down: DependencyDown) -> Snapshot:
        paths = next((paths for paths in self._places if os.path.exists(paths.database)), None)
        if paths is None:
            raise down
        found, acts = read(paths.database)
        why = f"the daemon is down: this is what {paths.database} says, and nothing can be changed"
        return from_store(
            found,
            acts,
            place=str(paths.database),
            now=time.time(),
            why=why,
            activity=_activity(paths),
            queue=_queue(paths),
        )


def places_of(sockets: list[Path], state_dir: Path | None, *, uid: int, env: Mapping[str, str]) -> list[Paths]:
    """Where the files of the Hive with one of these sockets are; empty where nothing says so.

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


def read(path: Path) -> tuple[list[Agent], list[AuditRow]]:
    """All agents and the last acts. Raises DependencyDown where it cannot be read, and says why."""
    try:
        with _opened(path) as conn:
            return agents.all(conn), audit.tail(conn, EVENTS)
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, LookupError, OSError) as error:
        hint = "`hive status` says how the daemon is; root may read every Hive's database"
        raise DependencyDown(f"the daemon is down, and {path} cannot be read: {error}", hint=hint) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Read-only. A WAL whose last writer closed cleanly is gone, and only then nothing is missed with `immutable`:
    without it such a file cannot be opened by a user who may not write, and leaves files behind for one who may."""
    wal = path.with_name(f"{path.name}-wal")
    is_whole = not wal.exists() or wal.stat().st_size == 0
    conn = sqlite3.connect(f"{path.as_uri()}?mode=ro{'&immutable=1' if is_whole else ''}", uri=True, timeout=1.0)
    try:
        conn.row_factory = sqlite3.Row
        yield conn
    finally:
        conn.close()


def _agents(client: Client) -> list[View]:
    """As `client.get`, in a fifth of its time: with a thousand agents this answer is a megabyte, once a second."""
    data = b"".join(client.lines("/api/agents", silence_s=ANSWER_S))
    try:
        return _decode_views(data).agents
    except msgspec.MsgspecError as error:
        hint = "`hive status` names its version, `hive version` that of this command"
        raise DependencyDown(f"what answers at {client.path} is no Hive of this version: {error}", hint=hint) from error


_decode_views = msgspec.json.Decoder(Views).decode


def _queue(paths: Paths) -> Answer | None:
    """The proxy's, None where it cannot be asked: it is a service of its own, and its socket is not everybody's."""
    try:
        return Client(paths.admin_socket, timeout_s=1.0).get("/queue")
    except HiveError:
        return None


def _activity(paths: Paths) -> dict[str, float]:
    """Agent id → when it was last active, empty where Redis does not say."""
    socket = paths.redis_socket
    if not os.path.exists(socket):
        return {}
    return asyncio.run(_asked(socket, user=VIEWER if paths.apart else ""))


async def _asked(socket: Path, *, user: str) -> dict[str, float]:
    from hive.store.live import Live  # redis: 85 ms that only a daemon that is down costs
    from hive.store.redis_at import RedisAt

    live = Live(RedisAt(str(socket), user, user), op_timeout_s=0.5)
    try:
        return await live.activity()
    except DependencyDown:
        return {}
    finally:
        await live.close()
