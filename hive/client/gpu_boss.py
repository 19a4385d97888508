"""Leases for programs in Python: memory of the pool for what runs here, renewed by itself as long as it is held.

    from hive.client.gpu_boss import GPUBoss

    with GPUBoss().acquire(vram_mb=8192, label="train") as lease:
        os.environ.update(lease.environment)  # before CUDA is used the first time
        train()

In code with a loop: `async with`. A program that can be started anew is better off with `hive lease run`, which Hive
itself ends and whose end Hive itself sees.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from hive.client.client import Client, find
from hive.errors import DependencyDown, HiveError, LeaseWaited, StaleToken, WrongState, by_code
from hive.paths import api_sockets

TTL_S = 60.0
RENEWALS = 3
"""In each time to live: one that is lost does no harm."""
AGAIN_S = 0.5
SILENCE_S = 60.0
DAEMON_WITHIN_S = 30.0
"""A daemon that ends while one waits is started again, and knows its line."""


class GPUBoss:
    """The way to leases of one Hive. `socket`: its API's; else the one that the command line would find."""

    def __init__(self, socket: Path | str | None = None) -> None:
        """Raises DependencyDown where no Hive answers."""
        given = None if socket is None else Path(socket)
        self.client = find(api_sockets(socket=given, uid=os.getuid(), env=os.environ))

    def __repr__(self) -> str:
        return f"<GPUBoss at {self.client.path}>"

    def acquire(
        self,
        vram_mb: int,
        *,
        gpus: int = 1,
        band: str = "normal",
        wait_s: float = 3600.0,
        max_s: float | None = None,
        whole: bool = False,
        label: str = "",
        ttl_s: float = TTL_S,
        on_lost: Callable[[HiveError], None] | None = None,
        op_token: str = "",
    ) -> GpuLease:
        """A lease to be entered by `with` or `async with`, which waits for it; nothing is asked before.

        `vram_mb`: on each of `gpus` GPUs. `wait_s`: 0 takes what is free now. `whole`: more of a GPU than [lease]
        share. `on_lost`: called, in a thread, once it cannot be renewed any more: the memory may be somebody else's.
        `op_token`: the word of the signers where the box has a rule for `lease-take`; it is good for one lease.
        """
        order = {
            "mb": vram_mb,
            "gpus": gpus,
            "band": band,
            "wait_s": wait_s,
            "max_s": max_s,
            "all": whole,
            "kind": "held",
            "label": label,
            "ttl_s": ttl_s,
        }
        return GpuLease(self.client, order, ttl_s, on_lost, op_token)

    def release(self, lease: GpuLease) -> None:
        """Gives a lease back that was taken by `take` and is in no `with`."""
        lease.release()


class GpuLease:
    """One lease. `id`, `token`, `gpus`, `environment`: of it, once it is held. `lost`: why it is held no longer, None
    while it is."""

    def __init__(
        self,
        client: Client,
        order: dict[str, Any],
        ttl_s: float,
        on_lost: Callable[[HiveError], None] | None,
        op_token: str = "",
    ) -> None:
        self._client = client
        self._order = order
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._op_token = op_token
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None
        self.id = ""
        self.token = 0
        self.gpus: list[str] = []
        self.environment: dict[str, str] = {}
        self.lost: HiveError | None = None

    def __repr__(self) -> str:
        return f"<GpuLease {self.id or 'not taken'} {'held' if self.is_held else 'not held'}>"

    @property
    def is_held(self) -> bool:
        return self._thread is not None and self.lost is None

    def take(self) -> GpuLease:
        """Waits until it is granted, and renews it from then on. Raises LeaseWaited, LeaseTooLarge, NotPermitted,
        DependencyDown; OpTokenRequired and its siblings where it is governed."""
        asked = lease = self._client.post("/api/leases", self._order, op_token=self._op_token)
        self.id, self.token = asked["id"], asked["token"]
        try:
            for lease in self._followed(asked):  # noqa: B007 - the last one is how it ended
                if self._leave.is_set():
                    raise LeaseWaited("it was released while it waited")
        except BaseException:
            self._give_back()
            raise
        if lease["state"] != "running":
            raise _ended(lease)
        self.gpus, self.environment = lease["gpus"], lease["environment"]
        self._thread = threading.Thread(target=self._renew, name=f"renew {self.id}", daemon=True)
        self._thread.start()
        return self

    def release(self) -> None:
        """Gives it back; nothing where that is done. Where it cannot be said, its time to live ends it."""
        self._leave.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            if self.lost is None:
                self._give_back()

    def check(self) -> None:
        """Raises the error by which it was lost, if it was."""
        if self.lost is not None:
            raise self.lost

    def __enter__(self) -> GpuLease:
        return self.take()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.release()

    async def __aenter__(self) -> GpuLease:
        try:
            return await asyncio.to_thread(self.take)
        except asyncio.CancelledError:
            self._leave.set()  # the thread that waits sees it with the next line, and gives it back
            raise

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await asyncio.to_thread(self.release)

    # --- the wait, and the renewals ------------------------------------------------------------------------------

    def _followed(self, lease: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The lease at each change, until it waits no more: also over a restart of the daemon."""
        yield lease
        until = time.monotonic() + DAEMON_WITHIN_S
        while lease["state"] == "waiting":
            try:
                for row in self._client.lines(f"{self._path}/wait", silence_s=SILENCE_S):
                    lease = json.loads(row)
                    until = time.monotonic() + DAEMON_WITHIN_S
                    yield lease
            except DependencyDown:
                if time.monotonic() > until:
                    raise
            if lease["state"] == "waiting":
                time.sleep(AGAIN_S)

    def _renew(self) -> None:
        while not self._leave.wait(self._ttl_s / RENEWALS):
            try:
                self._client.post(f"{self._path}/renew", {"token": self.token}, timeout_s=self._ttl_s)
            except (StaleToken, WrongState) as error:
                self.lost = error
                if self._on_lost is not None:
                    self._on_lost(error)
                return
            except HiveError:
                continue  # the daemon is away: it is told with the next one, or it is overdue

    def _give_back(self) -> None:
        with suppress(HiveError):
            self._client.delete(self._path, token=self.token)

    @property
    def _path(self) -> str:
        return f"/api/leases/{quote(self.id)}"


def _ended(lease: dict[str, Any]) -> HiveError:
    """The error that a wait ended with."""
    return by_code(lease["code"])(lease["why"] or f"{lease['id']} is {lease['state']}")
