"""The command line of every process `hive up` runs. Pure: the same plan, the same commands."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from hive.domain import BackendInfo, Isolation
from hive.files.ports import Ports
from hive.settings.table import Paths

REDIS = "redis-server"
DEMO_SOCKET = "demo.sock"
ORDER = ("proxy", "daemon", "sandbox", "backend", "redis")
"""In this order they are ended: none loses what it still has to send to the next."""


class UpPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided before the first process starts.

    `backend`: the real one, None where the demo backend is to be started; `is_found`: nobody named it. `serves`: False
    where the settings say `enabled = false`, then there is no backend at all. `has_pool`: models are described, so
    nobody misses the demo backend. `watch_fd`: a pipe whose end says that `hive up` is gone. `why_not_deep`: why no
    agent can sleep deep here, a sentence; empty where they can. `redis`: where the Redis of REDIS_URL is, without its
    password; empty where one of our own is started.
    """

    paths: Paths
    config: Path | None
    isolation: Isolation
    backend: BackendInfo | None
    watch_fd: int
    is_found: bool = False
    serves: bool = True
    has_pool: bool = False
    why_not_deep: str = ""
    redis: str = ""

    @property
    def starts_demo(self) -> bool:
        return self.serves and self.backend is None and not self.has_pool

    @property
    def demo_socket(self) -> Path:
        return self.paths.runtime / DEMO_SOCKET

    @property
    def backend_argument(self) -> str:
        """`KIND=ADDRESS` as the daemon takes it."""
        if self.backend is None:
            return f"demo={self.demo_socket}"
        return f"{self.backend.kind}={self.backend.address}"


def redis_command(paths: Paths) -> list[str]:
    """A Redis for us alone: no TCP port, nothing on disk (what it holds can be rebuilt), refuses rather than evicts."""
    return [
        REDIS,
        *("--port", "0", "--unixsocket", str(paths.redis_socket), "--unixsocketperm", "700"),
        *("--save", "", "--appendonly", "no", "--dir", str(paths.redis_dir)),
        *("--maxmemory", "64mb", "--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--loglevel", "warning", "--logfile", ""),
    ]


def hive_command(plan: UpPlan, *words: str) -> list[str]:
    """`python -m hive …` by this very interpreter; -P so that the working directory cannot shadow a module."""
    return [sys.executable, "-P", "-m", "hive", *words, "--watch-fd", str(plan.watch_fd)]


def demo_backend_command(plan: UpPlan) -> list[str]:
    return hive_command(plan, "demo-backend", "--socket", str(plan.demo_socket))


def sandbox_command(plan: UpPlan) -> list[str]:
    return hive_command(plan, "sandbox", *_common(plan))


def daemon_command(plan: UpPlan, *, api_port: int) -> list[str]:
    """A taken port of the API moves up by one, at every start: no agent knows it."""
    backend: tuple[str, ...] = (
        ("--backend", plan.backend_argument) if plan.starts_demo or plan.backend is not None else ()
    )
    backend += ("--backend-found",) if plan.is_found else ()
    api = ("--api-port", str(api_port))
    return hive_command(plan, "daemon", *_common(plan), *backend, "--isolation", str(plan.isolation), *api)


def proxy_command(plan: UpPlan, ports: Ports, *, move: bool) -> list[str]:
    """`move`: a taken port moves up by one. Only before the first time: later, agents know the port."""
    given = ("--port", str(ports.proxy), "--ingress-port", str(ports.ingress))
    return hive_command(plan, "proxy", *_common(plan), *given, *(["--move-ports"] if move else []))


def _common(plan: UpPlan) -> list[str]:
    where = ["--state-dir", str(plan.paths.state), "--runtime-dir", str(plan.paths.runtime)]
    return where if plan.config is None else [*where, "--config", str(plan.config)]
