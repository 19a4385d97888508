"""Starts of the services, without Typer: `hive daemon` and its kind, as units and supervisor write them.

Typer and what it imports are 1.8 MiB and 45 ms of CPU of each process, measured with benchmarks/memory.py. Words that
are written in another way are Typer's to read (services.py, run_model.py, run_jobs.py), which calls the same functions.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hive.domain import BackendKind, Isolation
from hive.errors import UsageError
from hive.log_lines import JsonLines, PrefixedLines, goes_to_journal
from hive.settings.file import Loaded, load, rules_file
from hive.settings.table import Paths

if TYPE_CHECKING:
    from hive.settings.table import Settings

log = logging.getLogger("hive.cli")


def proxy(
    *,
    state_dir: Path,
    runtime_dir: Path,
    config: Path | None = None,
    port: int | None = None,
    ingress_port: int | None = None,
    move_ports: bool = False,
    appliance: bool = False,
    watch_fd: int | None = None,
) -> int:
    """Runs the data plane. Raises HiveError."""
    flags: dict[str, object] = {"proxy.port": port, "proxy.ingress_port": ingress_port}
    settings = _loaded(config, flags).settings
    log_events(as_json=appliance, of_up=watch_fd is not None)
    _warn_of_secrets("REDIS_URL")
    from hive.proxy.server import main

    _keep_imports()
    return main(
        Paths(state_dir, runtime_dir, apart=appliance),
        settings,
        port=port,
        ingress_port=ingress_port,
        move_ports=move_ports,
        watch_fd=watch_fd,
        load=lambda: _loaded(config, flags).settings,
    )


def daemon(
    *,
    state_dir: Path,
    runtime_dir: Path,
    config: Path | None = None,
    backend: str | None = None,
    backend_found: bool = False,
    isolation: Isolation = Isolation.NONE,
    api_port: int | None = None,
    appliance: bool = False,
    watch_fd: int | None = None,
) -> int:
    """Runs the control plane. Raises HiveError."""
    loaded = _loaded(config, {"api.port": api_port})
    chosen = None if backend is None else backend_of(backend)
    log_events(as_json=appliance, of_up=watch_fd is not None)
    _warn_of_secrets("REDIS_URL", "HIVE_INTERNAL_TOKEN")
    from hive.daemon import main

    _keep_imports()
    return main(
        Paths(state_dir, runtime_dir, apart=appliance),
        loaded.settings,
        move_api=not appliance,
        backend=chosen,
        is_found=backend_found,
        isolation=isolation,
        origins=loaded.origins,
        watch_fd=watch_fd,
        rules=rules_file(config),
        load=lambda: _loaded(config, {"api.port": api_port}),
        config_file=loaded.file,
    )


def sandbox(
    *,
    state_dir: Path,
    runtime_dir: Path,
    config: Path | None = None,
    appliance: bool = False,
    watch_fd: int | None = None,
) -> int:
    """Runs the helper. Raises HiveError."""
    settings = _loaded(config).settings
    log_events(as_json=appliance, of_up=watch_fd is not None)
    from hive.sandbox.server import main

    _keep_imports()
    main(Paths(state_dir, runtime_dir, apart=appliance), settings, watch_fd, config)
    return 0


def sandbox_thaw(*, state_dir: Path, runtime_dir: Path, config: Path | None = None, appliance: bool = False) -> int:
    """Thaws every agent. Raises HiveError."""
    settings = _loaded(config).settings
    log_events(as_json=appliance)
    from hive.sandbox.thawing import main

    _keep_imports()
    return main(Paths(state_dir, runtime_dir, apart=appliance), settings)


def demo_backend(
    *,
    socket: Path | None = None,
    port: int | None = None,
    listen: str = "127.0.0.1",
    tokens_per_s: float | None = None,
    shared: bool = False,
    watch_fd: int | None = None,
) -> int:
    """Runs an inference server with canned text. Raises HiveError."""
    log_events(of_up=watch_fd is not None)
    from hive.demo.server import TOKENS_PER_S, main

    _keep_imports()
    speed = tokens_per_s or TOKENS_PER_S
    return main(socket=socket, port=port, host=listen, watch_fd=watch_fd, tokens_per_s=speed, shared=shared)


def run_model(
    slot: str,
    *,
    grant: Path,
    socket: Path,
    state_dir: Path,
    hive_state_dir: Path | None = None,
    config: Path | None = None,
) -> int:
    """Runs the server of one model of the pool. Raises HiveError."""
    from hive.up.run_model import supervised

    def settings() -> Settings:
        return _loaded(config).settings

    _keep_imports()
    return supervised(slot, settings, grant=grant, socket=socket, state=state_dir, hive_state=hive_state_dir)


def jobs(*, link_fd: int | None = None) -> int:
    """Runs the loops of model jobs. Raises HiveError."""
    log_events(of_up=True)
    from hive.jobs.process import main

    _keep_imports()
    return main(link_fd)


STARTS: Mapping[str, Callable[..., int]] = {
    "proxy": proxy,
    "daemon": daemon,
    "sandbox": sandbox,
    "sandbox-thaw": sandbox_thaw,
    "demo-backend": demo_backend,
    "run-model": run_model,
    "jobs": jobs,
}


def plain_start(words: Sequence[str]) -> Callable[[], int] | None:
    """Reads what `words` start; None where Typer has to read them, and to say what is wrong with them.

    >>> plain_start(["sandbox", "--state-dir", "/s", "--runtime-dir", "/r", "--watch-fd", "7"]).keywords["watch_fd"]
    7
    >>> plain_start(["sandbox", "--state-dir", "/s"]), plain_start(["sandbox", "--help"]), plain_start(["ps"])
    (None, None, None)
    >>> plain_start(["jobs", "--link-fd=5"]), plain_start(["jobs", "--link-fd", "-1"])
    (None, None)
    """
    start = STARTS.get(words[0]) if words else None
    if start is None or (read := _plain_words(words[1:])) is None:
        return None
    arguments, options = read
    try:
        inspect.signature(start).bind(*arguments, **options)
    except TypeError:
        return None
    return partial(start, *arguments, **options)


def _plain_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]] | None:
    """Arguments, and options by their names in Python; None for a word or a value that is not as a unit writes it."""
    arguments: list[str] = []
    options: dict[str, Any] = {}
    left = iter(words)
    for word in left:
        name = word.removeprefix("--").replace("-", "_")
        if word in FLAGS:
            value: Any = True
        elif (read := VALUES.get(word)) is not None:
            try:
                value = read(next(left, ""))
            except ValueError:
                return None
        elif word.startswith("-"):
            return None
        else:
            arguments.append(word)
            continue
        if name in options:
            return None
        options[name] = value
    return arguments, options


def _path(text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError(text)
    return Path(text)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


def _port(text: str) -> int:
    if (found := _number(text)) > 65535:
        raise ValueError(text)
    return found


VALUES: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(("--state-dir", "--hive-state-dir", "--runtime-dir", "--config", "--socket", "--grant"), _path),
    **dict.fromkeys(("--port", "--ingress-port", "--api-port"), _port),
    **dict.fromkeys(("--watch-fd", "--link-fd"), _number),
    "--isolation": Isolation,
    "--backend": str,
}
"""Readers of the values of options. Each raises ValueError for one that Typer has to look at."""
FLAGS = ("--appliance", "--move-ports", "--backend-found", "--shared")


def _keep_imports() -> None:
    """Begins to look for garbage, and never in what has been imported (entry.py has turned it off)."""
    gc.freeze()
    gc.enable()


def log_events(*, as_json: bool = False, of_up: bool = False) -> None:
    """Hive's own events on stderr, one a line: as JSON where a journal or a program reads them. `of_up`: for `hive up`,
    which is told how grave each is."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    level = os.environ.get("LOG_LEVEL", "").upper()
    logging.getLogger("hive").setLevel(level if level in ("DEBUG", "WARNING", "ERROR") else logging.INFO)
    as_json = as_json or os.environ.get("LOG_FORMAT", "").lower() == "json"
    to_journal = goes_to_journal(sys.stderr.fileno(), os.environ)
    formatter: logging.Formatter | None = PrefixedLines() if of_up else None
    if as_json or to_journal:
        formatter = JsonLines(prefixed=to_journal or of_up)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)


def _warn_of_secrets(*names: str) -> None:
    """The environment is for trying things out: no other command reads a credential (host/credentials.py)."""
    for name in names:
        value = os.environ.get(name, "")
        if value and ("://" not in value or "@" in value):
            log.warning("secret_in_environment name=%s instead='a file in $CREDENTIALS_DIRECTORY'", name)


def backend_of(text: str) -> tuple[BackendKind, str]:
    """`KIND=ADDRESS` taken apart; an address is `host:port`, an absolute socket path or a URL. Raises UsageError.

    >>> backend_of("llama=/run/llama.sock")
    (<BackendKind.LLAMA: 'llama'>, '/run/llama.sock')
    """
    kind, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    is_url = address.startswith(("https://", "http://"))
    if kind not in list(BackendKind) or not (is_url or address.startswith("/") or (host and port.isdigit())):
        kinds = ", ".join(BackendKind)
        raise UsageError(f"--backend {text}: expected KIND=HOST:PORT or KIND=/PATH, KIND one of {kinds}")
    return BackendKind(kind), address


def _loaded(config: Path | None, flags: dict[str, object] | None = None) -> Loaded:
    return load(config, env=os.environ, flags=flags)
