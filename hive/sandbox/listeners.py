"""The agents' own sockets: bound here, kept here, handed to the proxy. A connection to one is that agent's."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

from hive.domain import INNER_PORT
from hive.errors import BadRequest, WrongState
from hive.link.helper import Listener, ListenerGone
from hive.link.link import Link
from hive.link.server import PATH_MAX_BYTES, bind_private
from hive.runtimes.jail import bind_in, unlink_in

INNER_PATH = f"inner:127.0.0.1:{INNER_PORT}"


class Bound(NamedTuple):
    """One agent's socket; `jail`: the trusted directory above it where it lies in a jail."""

    path: Path
    sock: socket.socket
    jail: Path | None


class Listeners:
    """One listening AF_UNIX socket per agent, 0600 and the agent's, in a directory where the agent may not write, or
    in its jail; for a running agent with a network of its own one more, a TCP one inside that network.

    The proxy serves them; while it is away callers wait in the backlog, because the socket stays open here.
    """

    def __init__(self) -> None:
        self._bound: dict[str, Bound] = {}
        self._at: dict[Path, str] = {}
        self._inner: dict[str, socket.socket] = {}
        self._followers: set[Link] = set()

    def __repr__(self) -> str:
        inner = f" and {len(self._inner)} inner" if self._inner else ""
        return f"<Listeners {len(self._bound)} bound{inner}, {len(self._followers)} followers>"

    def bind(self, agent: str, path: Path, *, uid: int | None, gid: int | None, jail: Path | None = None) -> None:
        """Makes the socket (over an old one's name) and tells the followers; bound there already: only sets its owner.

        `jail`: below this directory the agent may write, and `path` may be of any length (see `bind_in`); such a socket
        is made again each time, because a jail may have been, and before the guest can connect. A connection there is
        the agent's, as on its socket outside.

        Raises BadRequest for a path the kernel cannot hold or a jail that cannot be trusted, WrongState where another
        agent has it, OSError.
        """
        owner = None if uid is None else (uid, uid if gid is None else gid)
        old = self._bound.get(agent)
        if old is not None and (old.path, old.jail, jail) == (path, None, None):
            if owner is not None:
                os.chown(path, *owner, follow_symlinks=False)
            return
        if (other := self._at.get(path, agent)) != agent:
            raise WrongState(f"the socket of {agent} would be that of {other}")
        if jail is None and len(os.fsencode(path)) > PATH_MAX_BYTES:
            raise BadRequest(f"{path} has more than {PATH_MAX_BYTES} bytes", hint="Use a shorter runtime directory.")
        sock = bind_private(path, owner=owner) if jail is None else bind_in(jail, path, owner=owner)
        if old is not None:
            self._at.pop(old.path, None)
        self._bound[agent] = Bound(path, sock, jail)
        self._at[path] = agent
        for link in self._followers:
            self._hand(link, agent)
        if old is not None:
            old.sock.close()
            if old.path != path:
                for link in self._followers:
                    link.tell(ListenerGone(agent=agent, path=str(old.path)))
                _unlink(old)

    def _hand(self, link: Link, agent: str) -> None:
        bound = self._bound[agent]
        link.tell(Listener(agent=agent, path=str(bound.path)), [bound.sock.fileno()])

    def keep_inner(self, agent: str, sock: socket.socket) -> None:
        """Takes over what listens inside the agent's network, in place of an earlier one, and tells the followers."""
        old = self._inner.get(agent)
        self._inner[agent] = sock
        for link in self._followers:
            self._hand_inner(link, agent)
        if old is not None:
            old.close()

    def _hand_inner(self, link: Link, agent: str) -> None:
        link.tell(Listener(agent=agent, path=INNER_PATH), [self._inner[agent].fileno()])

    def drop_inner(self, agent: str) -> None:
        """The agent ended, and its network with it."""
        if (sock := self._inner.pop(agent, None)) is None:
            return
        sock.close()
        for link in self._followers:
            link.tell(ListenerGone(agent=agent, path=INNER_PATH))

    def follow(self, link: Link) -> None:
        """Hands all sockets to `link` now, and every later one as it comes."""
        self._followers.add(link)
        for agent in self._bound:
            self._hand(link, agent)
        for agent in self._inner:
            self._hand_inner(link, agent)

    def unfollow(self, link: Link) -> None:
        self._followers.discard(link)

    def drop(self, agent: str) -> None:
        """Closes and unlinks the agent's sockets."""
        self.drop_inner(agent)
        if agent not in self._bound:
            return
        bound = self._bound.pop(agent)
        self._at.pop(bound.path, None)
        bound.sock.close()
        _unlink(bound)
        for link in self._followers:
            link.tell(ListenerGone(agent=agent))

    def close(self) -> None:
        """Drops all, without a word: the helper leaves, and the next one binds them again."""
        self._followers.clear()
        for agent in {*self._bound, *self._inner}:
            self.drop(agent)


def _unlink(bound: Bound) -> None:
    if bound.jail is None:
        with contextlib.suppress(FileNotFoundError):
            bound.path.unlink()
    else:
        with contextlib.suppress(BadRequest, OSError):  # the jail is gone, or its user has made it unrecognisable
            unlink_in(bound.jail, bound.path)


def clear_directory(directory: Path, keep: set[Path]) -> None:
    """Unlinks what earlier helpers left: half-made sockets, those of agents that are gone. Directories stay."""
    for path in directory.iterdir():
        if path not in keep and not path.is_dir():
            path.unlink()
