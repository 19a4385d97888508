"""The agents' own sockets: bound here, kept here, handed to the proxy. Whoever connects to one is that agent."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from hive.errors import BadRequest, WrongState
from hive.link.link import Link
from hive.link.messages import Listener, ListenerGone
from hive.link.server import PATH_MAX_BYTES, bind_private


class Listeners:
    """One listening AF_UNIX socket per agent, 0600 and the agent's, in a directory where the agent may not write.

    The proxy serves them; while it is away callers wait in the backlog, because the socket stays open here.
    """

    def __init__(self) -> None:
        self._bound: dict[str, tuple[Path, socket.socket]] = {}
        self._followers: set[Link] = set()

    def __repr__(self) -> str:
        return f"<Listeners {len(self._bound)} bound, {len(self._followers)} followers>"

    def bind(self, agent: str, path: Path, *, uid: int | None, gid: int | None) -> None:
        """Makes the socket (over an old one's name) and tells the followers; bound already: only its owner is set.

        Raises BadRequest for a path the kernel cannot hold, WrongState where another agent has it, OSError.
        """
        owner = None if uid is None else (uid, uid if gid is None else gid)
        if agent in self._bound:
            if owner is not None:
                os.chown(path, *owner, follow_symlinks=False)
            return
        if len(os.fsencode(path)) > PATH_MAX_BYTES:
            raise BadRequest(f"{path} has more than {PATH_MAX_BYTES} bytes", hint="Use a shorter runtime directory.")
        if (other := next((name for name, (taken, _) in self._bound.items() if taken == path), None)) is not None:
            raise WrongState(f"the socket of {agent} would be that of {other}")
        self._bound[agent] = (path, bind_private(path, owner=owner))
        for link in self._followers:
            self._hand(link, agent)

    def _hand(self, link: Link, agent: str) -> None:
        path, sock = self._bound[agent]
        link.tell(Listener(agent=agent, path=str(path)), [sock.fileno()])

    def follow(self, link: Link) -> None:
        """Hands all sockets to `link` now, and every later one as it comes."""
        self._followers.add(link)
        for agent in self._bound:
            self._hand(link, agent)

    def unfollow(self, link: Link) -> None:
        self._followers.discard(link)

    def drop(self, agent: str) -> None:
        """Closes and unlinks the agent's socket."""
        if agent not in self._bound:
            return
        path, sock = self._bound.pop(agent)
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        for link in self._followers:
            link.tell(ListenerGone(agent=agent))

    def close(self) -> None:
        """Drops all, without a word: the helper leaves, and the next one binds them again."""
        self._followers.clear()
        for agent in list(self._bound):
            self.drop(agent)


def clear_directory(directory: Path, keep: set[Path]) -> None:
    """Unlinks what earlier helpers left: half-made sockets, those of agents that are gone."""
    for path in directory.iterdir():
        if path not in keep:
            path.unlink()
