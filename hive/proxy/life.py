"""The life of the proxy process: ready, well, reloading, leaving; told to systemd if it asked.

SIGTERM (SIGINT, the parent's end) drains, a second one ends at once. SIGHUP reads the configuration again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from hive.errors import HiveError
from hive.host.loop_lag import Pulse
from hive.host.notify import Notifier
from hive.proxy.metrics import Metrics
from hive.settings.table import SECTIONS, Settings

log = logging.getLogger("hive.proxy")

BOUND = {
    "inference": frozenset({"vsock_port"}),
    "proxy": frozenset({"port", "ingress_port", "vsock"}),
    "runner": frozenset({"port", "listen"}),
}
"""Keys that say where the proxy listens: they wait for its restart."""
READ = {
    "inference": frozenset({"default_model", "token_tracking", "backend_limit_name", "cloud", "first_byte_s"}),
    "pool": frozenset({"load_depth", "load_wait_s"}),
    **{
        section: frozenset(SECTIONS[section].__struct_fields__)
        for section in SECTIONS
        if section in ("proxy", "budget", "images") or section.startswith("grammar_")
    },
}
"""Keys the proxy reads at all; the others are the daemon's and the helper's."""

Load = Callable[[], Settings]


class ProxyLife(Protocol):
    """A server that is kept alive here."""

    configured: Settings
    """The settings from flags, environment and file."""
    metrics: Metrics

    def start(self, on_ready: Callable[[], None]) -> None:
        """Listens; calls `on_ready` once when it knows its agents, or has waited long enough for them."""
        ...

    def use_settings(self, settings: Settings) -> None: ...

    def what_is_wrong(self) -> str:
        """The reason why its watchdog should end the process, empty if all is well."""
        ...

    async def stop(self, hurry: asyncio.Event) -> None:
        """Ends what is in flight; at once when `hurry` is set."""
        ...


async def live(server: ProxyLife, notifier: Notifier, *, load: Load | None = None, watch_fd: int | None = None) -> None:
    """Runs `server` until it is told to leave and has left. Raises what `start` raises."""
    loop = asyncio.get_running_loop()
    leave, hurry = asyncio.Event(), asyncio.Event()

    def told_to_leave() -> None:
        (hurry if leave.is_set() else leave).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told_to_leave)
    loop.add_signal_handler(signal.SIGHUP, reload, server, notifier, load)
    if watch_fd is not None:
        loop.add_reader(watch_fd, _parent_gone, loop, watch_fd, leave.set)
    pulse = Pulse(notifier, on_lag=server.metrics.lag, what_is_wrong=server.what_is_wrong)
    try:
        server.start(lambda: _say_ready(notifier))
        await leave.wait()
        loop.remove_signal_handler(signal.SIGHUP)
        notifier.stopping("draining")
        await server.stop(hurry)
    finally:
        pulse.close()
        notifier.close()


def _say_ready(notifier: Notifier) -> None:
    notifier.ready("serving")


def _parent_gone(loop: asyncio.AbstractEventLoop, watch_fd: int, leave: Callable[[], None]) -> None:
    if not os.read(watch_fd, 4096):
        loop.remove_reader(watch_fd)
        leave()


# --- the configuration is read again -----------------------------------------------------------------------------


def reload(server: ProxyLife, notifier: Notifier, load: Load | None) -> None:
    """Takes over the configuration on disk if all of it is right; else all stays as it is, and is said."""
    if load is None:
        log.warning("config_not_reloaded reason='there is no file to read again'")
        return
    notifier.reloading()
    status = "serving"
    try:
        found = load()
        changes = changed(server.configured, found)
        server.use_settings(with_bound_keys_of(server.configured, found))
    except HiveError as error:
        server.metrics.reload_failed()
        status = "serving with the old configuration: the new one is wrong"
        log.error("config_reload_failed error=%r old_stays=true", error.message)
    else:
        server.metrics.reloaded()
        log.info("config_reloaded %s", changes)
    finally:
        notifier.ready(status)


class SettingChanges(msgspec.Struct, frozen=True):
    """Keys that changed: taken over now, waiting for the proxy's restart, read by other processes of Hive only."""

    live: list[str] = []
    restart: list[str] = []
    others: list[str] = []

    def __str__(self) -> str:
        words = (("applied", self.live), ("needs_restart", self.restart), ("not_the_proxys", self.others))
        return " ".join(f"{word}={','.join(keys)}" for word, keys in words if keys) or "changed=nothing"


def changed(old: Settings, new: Settings) -> SettingChanges:
    """The keys that differ, by the effect of the change: applied, or needs a restart.

    >>> proxy = Settings().proxy
    >>> new = Settings(proxy=msgspec.structs.replace(proxy, port=1, queue_depth=2))
    >>> str(changed(Settings(), new))
    'applied=proxy.queue_depth needs_restart=proxy.port'
    """
    changes = SettingChanges([], [], [])
    for section in SECTIONS:
        was, now = getattr(old, section), getattr(new, section)
        for key in was.__struct_fields__:
            if getattr(was, key) == getattr(now, key):
                continue
            fate = changes.others
            if key in BOUND.get(section, ()):
                fate = changes.restart
            elif key in READ.get(section, ()):
                fate = changes.live
            fate.append(f"{section}.{key}")
    waits_s = ({name: row.first_byte_s for name, row in settings.models.items()} for settings in (old, new))
    changes.live.extend(f"[model {name}] first_byte_s" for name in _differ(*waits_s) if name in new.models)
    changes.live.extend(f"[tenant {name}]" for name in _differ(old.tenants, new.tenants))
    changes.live.extend(f"[task {name}]" for name in _differ(old.tasks, new.tasks))
    changes.live.extend(f"[fields {target}]" for target in _differ(old.fields, new.fields))
    return changes


def _differ(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Keys with different values."""
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def with_bound_keys_of(old: Settings, new: Settings) -> Settings:
    """`new`, but for the keys a running proxy cannot change: the settings are what is in force.

    >>> new = Settings(proxy=msgspec.structs.replace(Settings().proxy, port=1, queue_depth=2))
    >>> both = with_bound_keys_of(Settings(), new)
    >>> both.proxy.port, both.proxy.queue_depth
    (11435, 2)
    """
    for section, keys in BOUND.items():
        was = getattr(old, section)
        kept = msgspec.structs.replace(getattr(new, section), **{key: getattr(was, key) for key in keys})
        new = msgspec.structs.replace(new, **{section: kept})
    return new
