"""`hive up`: one foreground command that starts every process of Hive, keeps them running and ends them in order.

It composes nothing: each process is `python -m hive …`, known here by its command line and by what it answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hive.backends.ask import parse_address
from hive.backends.kinds import SPECS, spec_of
from hive.backends.recognise import (
    CANDIDATES,
    NAME_WHAT_IS_BEHIND,
    find,
    look,
    recognise,
    why_no_hive,
    why_unknown,
)
from hive.demo.callers import demo_config
from hive.domain import BackendInfo, Isolation
from hive.errors import DependencyDown, NotSupported, StoreFull, UsageError
from hive.files import log_file, up_flags
from hive.files.log_file import LogFile
from hive.files.ports import Ports, Remembered, choose_ports, recall
from hive.host.access import NO_ACCESS, RemoteAccess, access_of
from hive.host.credentials import credential
from hive.log_lines import PrefixedLines
from hive.paths import default_state_dir, runtime_dir
from hive.settings.file import Loaded, load
from hive.settings.table import Paths
from hive.store.redis_at import URL, redis_at
from hive.up import directories, lock, scope
from hive.up.screen import Screen
from hive.up.services import REDIS, UpPlan
from hive.up.supervisor import Supervisor

USE_DEMO = "`hive up --backend demo` needs no model"
log = logging.getLogger("hive.up")


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `hive up`. None: as the settings say.

    `backend`: a URL, an address, a kind, or `demo`. `exit_after_s`: seconds after which it ends by itself.
    `json`: one JSON object on stdout at the end, everything else on stderr.
    """

    demo: bool = False
    backend: str | None = None
    state_dir: Path | None = None
    config: Path | None = None
    exit_after_s: float | None = None
    json: bool = False
    port: int | None = None
    ingress_port: int | None = None
    api_port: int | None = None


def main(options: UpOptions) -> int:
    """Runs until it is told to end. 0 after an orderly end, 130 if that was cut short by a second Ctrl-C.

    Raises HiveError where Hive does not come up; then nothing is left running.
    """
    os.umask(0o077)
    loaded = load(options.config, env=os.environ, flags=_flags(options))
    if options.exit_after_s is not None and not 0 < options.exit_after_s < math.inf:
        raise UsageError("--exit-after takes seconds above 0")
    redis = _other_redis()
    uid = os.getuid()
    # A link means its target, whose owner is looked at there.
    state = Path(os.path.realpath(options.state_dir or default_state_dir(uid, os.environ)))
    paths = Paths(state, runtime_dir(options.state_dir, uid, os.environ))
    why_not_deep = scope.enter(state)
    screen = Screen(json=options.json)
    _log_to(screen)
    asked = options.backend or _asked_backend(loaded)
    is_named = bool(set(asked or "") & set(":./") or loaded.settings.inference.backend_url)
    serves = options.backend is not None or loaded.settings.inference.enabled != "false"
    if options.demo and not serves:
        raise UsageError(
            "the demo needs a backend, and the settings say enabled = false", hint="give one with --backend"
        )
    backend = asyncio.run(_backend(asked, loaded)) if serves else None
    directories.make_state(paths, uid=uid)
    with ExitStack() as cleanup:
        lock_fd = lock.take(paths.state / "up.lock", say=lambda text: screen.say("up", text))
        watch_fd, watched = os.pipe()
        for descriptor in (lock_fd, watch_fd, watched):
            cleanup.callback(os.close, descriptor)
        cleanup.callback(directories.clear, paths)
        cleanup.callback(screen.close)
        directories.make_rest(paths, uid=uid)
        kept = LogFile(paths.state / log_file.NAME)
        cleanup.callback(kept.close)
        screen.keep(kept)
        plan = UpPlan(
            paths=paths,
            config=_config(options, loaded, paths),
            isolation=Isolation.UID if uid == 0 else Isolation.NONE,
            backend=backend,
            is_found=backend is not None and not is_named,
            watch_fd=watch_fd,
            serves=serves,
            has_pool=_has_pool(options, loaded),
            why_not_deep=why_not_deep,
            redis=redis,
        )
        return asyncio.run(_run(options, loaded, plan, lock_fd, screen))


async def _run(options: UpOptions, loaded: Loaded, plan: UpPlan, lock_fd: int, screen: Screen) -> int:
    asked = Ports(loaded.settings.proxy.port, loaded.settings.proxy.ingress_port, loaded.settings.api.port)
    remembered = recall(plan.paths.state / "ports.json")
    again = flags_again(options, plan.paths.state)
    up_flags.keep(plan.paths.state / up_flags.NAME, again)
    supervisor = Supervisor(
        plan,
        ports=Remembered(asked=asked, got=choose_ports(asked, remembered)),
        screen=screen,
        inherit=(lock_fd, plan.watch_fd),
        stop_grace_s=loaded.settings.agents.stop_grace_s,
        drain_s=loaded.settings.proxy.drain_s,
        default_state=options.state_dir is None,
        again=again,
    )
    return await supervisor.run(demo=options.demo, exit_after_s=options.exit_after_s, json=options.json)


def flags_again(options: UpOptions, state: Path) -> str:
    """The flags with which `hive up` goes on where it ended, as a shell takes them; `state`: what its state directory
    really is. A URL that may have a password in it is left out.

    >>> flags_again(UpOptions(demo=True), Path("/s"))
    ' --demo'
    >>> flags_again(UpOptions(state_dir=Path("x y"), config=Path("/c.conf"), port=1, api_port=0), Path("/s/x y"))
    " --state-dir '/s/x y' --config /c.conf --port 1 --api-port 0"
    """
    has_password = options.backend is not None and "@" in options.backend
    said = {
        "--backend": None if has_password else options.backend,
        "--state-dir": None if options.state_dir is None else state,
        "--config": None if options.config is None else options.config.absolute(),
        "--port": options.port,
        "--ingress-port": options.ingress_port,
        "--api-port": options.api_port,
    }
    words = [f" {flag} {shlex.quote(str(value))}" for flag, value in said.items() if value is not None]
    return "".join([" --demo" if options.demo else "", *words])


def _has_pool(options: UpOptions, loaded: Loaded) -> bool:
    """Whether models are described, and nobody has asked for the demo backend besides."""
    settings = loaded.settings
    return bool(settings.models) and settings.pool.enabled and options.backend is None and not options.demo


def _flags(options: UpOptions) -> dict[str, object]:
    return {
        "proxy.port": options.port,
        "proxy.ingress_port": options.ingress_port,
        "api.port": options.api_port,
    }


def _other_redis() -> str:
    """The address of the Redis of REDIS_URL; empty where we start our own. DependencyDown where there is none."""
    if os.environ.get(URL):
        return str(redis_at(Path(), "up", os.environ, credential))
    if shutil.which(REDIS) is None:
        raise DependencyDown(
            f"{REDIS} is not installed",
            hint=f"type: sudo apt-get install -y redis-server (Hive runs one of its own), or set {URL}",
        )
    return ""


async def _backend(asked: str | None, loaded: Loaded) -> BackendInfo | None:
    inference = loaded.settings.inference
    access = access_of(inference, os.environ)
    configured = _configured_address(loaded)
    return await choose_backend(asked, configured=configured, url=inference.backend_url, access=access)


def _asked_backend(loaded: Loaded) -> str | None:
    kind = loaded.settings.inference.backend
    return None if kind == "auto" else kind


def _configured_address(loaded: Loaded) -> str | None:
    """`host:port` where hive.conf or the environment names one."""
    if loaded.origins.keys().isdisjoint({"inference.host", "inference.port"}):
        return None
    return f"{loaded.settings.inference.host}:{loaded.settings.inference.port}"


def _config(options: UpOptions, loaded: Loaded, paths: Paths) -> Path | None:
    """The file the processes read: the one given, with the demo's settings added to a copy. Raises StoreFull."""
    if not options.demo:
        return loaded.file.absolute() if loaded.file is not None else None
    written = paths.state / "demo.conf"
    try:
        text = loaded.file.read_text() if loaded.file is not None else ""
        written.write_text(demo_config(text, list(loaded.origins)))
    except OSError as error:
        raise StoreFull(f"cannot write {written}: {error.strerror}") from None
    return written


class _ToScreen(logging.Handler):
    """Sends the log lines of `hive up` itself to the place of its children's lines."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(PrefixedLines())
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._screen.say("up", line)


def _log_to(screen: Screen) -> None:
    hive = logging.getLogger("hive")
    hive.handlers[:] = [_ToScreen(screen)]
    hive.setLevel(logging.INFO)
    hive.propagate = False


async def choose_backend(
    asked: str | None, *, configured: str | None, url: str = "", access: RemoteAccess = NO_ACCESS
) -> BackendInfo | None:
    """The backend to use, None for the demo backend.

    `asked`: a kind, `demo`, a URL or an address, None for whatever answers. `configured`: the address hive.conf
    names, looked at first; `url`: the one it names as `backend_url`, which counts where nothing else is asked for.
    `access`: the key and the authorities for a server that was named.

    Raises UsageError (no address), DependencyDown (what was asked for does not answer), NotSupported (it is a Hive),
    ConfigError.
    """
    spec = SPECS.get(asked or "")
    if url and (asked in (None, "auto") or (spec is not None and spec.is_remote)):
        asked, spec = url, None
    candidates = (configured, *CANDIDATES) if configured is not None else CANDIDATES
    if asked is None or asked == "auto":
        found = await find(candidates)
        return None if found is not None and spec_of(found.kind).is_canned else found
    if spec is not None:
        return None if spec.is_canned else await _of_kind(spec.kind, candidates)
    address = parse_address(asked)
    looked = await look(address, access)
    if looked.is_hive:
        raise NotSupported(why_no_hive(address), hint=NAME_WHAT_IS_BEHIND)
    if looked.info is None:
        why = await why_unknown(address, access)
        raise DependencyDown(f"no inference server answers at {address}: {why}", hint=f"start it; {USE_DEMO}")
    return looked.info


async def _of_kind(kind: str, candidates: tuple[str, ...]) -> BackendInfo:
    found = await asyncio.gather(*(recognise(address) for address in candidates))
    for info in found:
        if info is not None and info.kind == kind:
            return info
    raise DependencyDown(
        f"no {kind} answers at {', '.join(candidates)}", hint=f"start it, or give its URL with --backend; {USE_DEMO}"
    )
