"""The helper's record of requests and their outcomes: one line for each verb that acts."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from hive.domain import is_name
from hive.holders.lease_socket import LeaseCaller
from hive.link.execution import Execute
from hive.link.helper import (
    AskListeners,
    BackendStart,
    BackendStop,
    Confirm,
    Define,
    Freeze,
    PageOut,
    Reconcile,
    Remove,
    Start,
    Stop,
    Thaw,
)
from hive.link.leases import LeaseEnd, LeaseExpect, LeaseForget
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Failed
from hive.link.server import peer_of
from hive.link.slots import SlotPrepare, SlotStart, SlotStop
from hive.runtimes import home
from hive.runtimes.log_process import open_log
from hive.slots.slot_run import SLOT_ID

log = logging.getLogger("hive.sandbox")
audit = logging.getLogger("hive.sandbox.audit")

AGENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
MAX_BYTES = 4 * 1024 * 1024
"""Of the file under `hive up`: some 30,000 lines, of which the later half is kept."""
VERBS: dict[type[LinkMessage], str] = {
    Define: "define",
    Start: "start",
    Stop: "stop",
    Freeze: "freeze",
    Confirm: "confirm",
    Thaw: "thaw",
    PageOut: "page_out",
    Remove: "remove",
    Execute: "execute",
    Reconcile: "reconcile",
    AskListeners: "listeners",
    BackendStart: "backend_start",
    BackendStop: "backend_stop",
    SlotPrepare: "slot_prepare",
    SlotStart: "slot_start",
    SlotStop: "slot_stop",
    LeaseExpect: "lease_expect",
    LeaseEnd: "lease_end",
    LeaseForget: "lease_forget",
}
"""Verbs that change nothing are not in it: `AskStat` comes every second, `Dial` with every call of some agents."""


class LinkPeer(NamedTuple):
    """The process at the other end of a link, by the kernel; `role` is its own claim."""

    role: str
    pid: int
    uid: int

    @classmethod
    def of(cls, link: Link, role: str) -> LinkPeer:
        with socket.socket(fileno=os.dup(link.fileno())) as sock:
            pid, uid, _ = peer_of(sock)
        return cls(role, pid, uid)


class Audit:
    """Writes to the logger `hive.sandbox.audit`: to stderr with the rest (the journal), or to a file of its own."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, made 0600; None where stderr is read by a journal and not by a person. Raises OSError."""
        self._path = path
        audit.setLevel(logging.INFO)  # however little the rest says
        self._handler: logging.Handler | None = None
        if path is not None:
            self._handler = _File(path)
            audit.addHandler(self._handler)
            audit.propagate = False

    def __repr__(self) -> str:
        return f"<Audit to {self._path or 'stderr'}>"

    def close(self) -> None:
        if self._handler is not None:
            audit.removeHandler(self._handler)
            self._handler.close()
            audit.propagate = True

    def trim(self) -> None:
        """Cuts the file back if it is too long. Raises OSError."""
        if self._path is not None:
            home.trim_log(self._path, MAX_BYTES)

    def noted(self, message: LinkMessage, name: str, peer: LinkPeer, reply: LinkReply) -> LinkReply:
        """`reply`, with the line written after the answer was given: no caller waits for it. `name`: the agent's."""
        if (verb := VERBS.get(type(message))) is None:
            return reply
        began = time.monotonic()

        def answer(outcome: LinkMessage, descriptors: Sequence[int] = ()) -> None:
            reply(outcome, descriptors)
            took_ms = (time.monotonic() - began) * 1000
            agent = getattr(message, "agent", "-")
            audit.info(
                "audit verb=%s agent=%s name=%s by=%s pid=%d uid=%d outcome=%s took_ms=%.2f",
                verb,
                agent if agent == "-" or AGENT_ID.fullmatch(agent) else "?",
                name if name == "-" or is_name(name) or SLOT_ID.fullmatch(name) else "?",
                peer.role,
                peer.pid,
                peer.uid,
                outcome.code if isinstance(outcome, Failed) else "ok",
                took_ms,
            )

        return answer

    def entered(self, lease: str, caller: LeaseCaller, outcome: str) -> None:
        """A process showed a nonce at lease.sock; `outcome`: `ok`, or the code of the refusal."""
        audit.info(
            "audit verb=lease_enter agent=- name=%s by=holder pid=%d uid=%d outcome=%s took_ms=0.00",
            lease,
            caller.main.pid,
            caller.uid,
            outcome,
        )


class _File(logging.StreamHandler[TextIO]):
    """Appends to a file that may be cut back under its hands; a full disk is told once, not with every line."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_log(path, more=os.O_APPEND), "w")
        super().__init__(self._file)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002 - the signature is logging's
        if not self._failed:
            self._failed = True
            log.error("audit_not_written error=%s", sys.exc_info()[1])

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):  # a line the full disk did not take
            self._file.close()
