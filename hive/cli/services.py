"""Commands that start a process: `hive up` and its parts. Each composition root is imported when it runs."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hive.cli.call import STATE_DIR
from hive.domain import BackendKind, Isolation
from hive.errors import UsageError
from hive.log_lines import JsonLines, PrefixedLines, goes_to_journal
from hive.settings.file import Loaded, load, rules_file
from hive.settings.table import Paths

log = logging.getLogger("hive.cli")

StateDir = Annotated[Path, typer.Option(metavar="DIR", help="What survives a restart.")]
RuntimeDir = Annotated[Path, typer.Option(metavar="DIR", help="Where the sockets are.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of /etc/hive/hive.conf.")]
Appliance = Annotated[bool, typer.Option("--appliance", help="Each service is a user of its own, as installed.")]
ApiPort = Annotated[
    int | None, typer.Option(metavar="N", min=0, max=65535, help="Where the API is on TCP; 0: nowhere.")
]
WatchFd = Annotated[int | None, typer.Option(metavar="FD", help="Ends when this pipe does: its parent is gone.")]


def up(
    demo: Annotated[bool, typer.Option("--demo", help="With three sample agents and a live table.")] = False,
    backend: Annotated[
        str | None,
        typer.Option(metavar="URL|ollama|vllm|llama|remote|demo", help="Instead of the one found on this machine."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            readable=False,
            envvar=STATE_DIR,
            show_envvar=False,
            help=f"What survives a restart (or {STATE_DIR}).",
        ),
    ] = None,
    config: Config = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Where agents reach the model.")
    ] = None,
    ingress_port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Where callers reach agents.")
    ] = None,
    api_port: ApiPort = None,
    exit_after: Annotated[float | None, typer.Option(metavar="S", help="End after this many seconds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> int:
    """Starts a whole Hive in the foreground and ends it with Ctrl-C.

    A real Ollama, vLLM or llama-server on this machine is found and used; else a demo backend with canned text is
    started, and labelled as such.

    Examples:
      hive up
      hive up --demo
      hive up --backend http://127.0.0.1:8000
      hive up --demo --exit-after 60 --json
    """
    from hive.up.up import UpOptions, main

    return main(
        UpOptions(
            demo=demo,
            backend=backend,
            state_dir=state_dir,
            config=config,
            exit_after_s=exit_after,
            json=as_json,
            port=port,
            ingress_port=ingress_port,
            api_port=api_port,
        )
    )


def proxy(
    state_dir: StateDir,
    runtime_dir: RuntimeDir,
    config: Config = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Where agents reach the model.")
    ] = None,
    ingress_port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Where callers reach agents.")
    ] = None,
    move_ports: Annotated[bool, typer.Option("--move-ports", help="A taken port moves up by one.")] = False,
    appliance: Appliance = False,
    watch_fd: WatchFd = None,
) -> int:
    """Runs the data plane, a service: between every agent and the model.

    Examples:
      hive proxy --state-dir /var/lib/hive --runtime-dir /run/hive
    """
    flags: dict[str, object] = {"proxy.port": port, "proxy.ingress_port": ingress_port}
    settings = _loaded(config, flags).settings
    _log_events(as_json=appliance, of_up=watch_fd is not None)
    _warn_of_secrets("REDIS_URL")
    from hive.proxy.server import main

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
    state_dir: StateDir,
    runtime_dir: RuntimeDir,
    config: Config = None,
    backend: Annotated[str | None, typer.Option(metavar="KIND=ADDRESS", help="The inference server.")] = None,
    backend_found: Annotated[bool, typer.Option("--backend-found", help="It was found; nobody named it.")] = False,
    isolation: Annotated[Isolation, typer.Option(help="What keeps agents apart.")] = Isolation.NONE,
    api_port: ApiPort = None,
    appliance: Appliance = False,
    watch_fd: WatchFd = None,
) -> int:
    """Runs the control plane, a service: agents' states, sleep and wake, usage, the REST API.

    A taken port of the API moves up by one, except with --appliance: there the daemon does not start.

    Examples:
      hive daemon --state-dir /var/lib/hive --runtime-dir /run/hive --backend ollama=127.0.0.1:11434
    """
    loaded = _loaded(config, {"api.port": api_port})
    chosen = None if backend is None else backend_of(backend)
    _log_events(as_json=appliance, of_up=watch_fd is not None)
    _warn_of_secrets("REDIS_URL", "HIVE_INTERNAL_TOKEN")
    from hive.daemon import main

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
    state_dir: StateDir,
    runtime_dir: RuntimeDir,
    config: Config = None,
    appliance: Appliance = False,
    watch_fd: WatchFd = None,
) -> None:
    """Runs the helper, a service: it starts, stops, freezes and thaws agents and owns their sockets.

    Examples:
      hive sandbox --state-dir /var/lib/hive --runtime-dir /run/hive
    """
    settings = _loaded(config).settings
    _log_events(as_json=appliance, of_up=watch_fd is not None)
    from hive.sandbox.server import main

    main(Paths(state_dir, runtime_dir, apart=appliance), settings, watch_fd, config)


def sandbox_thaw(
    state_dir: StateDir, runtime_dir: RuntimeDir, config: Config = None, appliance: Appliance = False
) -> int:
    """Thaws every agent, where a helper was killed: what is frozen cannot be stopped.

    Examples:
      hive sandbox-thaw --state-dir /var/lib/hive --runtime-dir /run/hive
    """
    settings = _loaded(config).settings
    _log_events(as_json=appliance)
    from hive.sandbox.thawing import main

    return main(Paths(state_dir, runtime_dir, apart=appliance), settings)


def demo_backend(
    socket: Annotated[Path | None, typer.Option(metavar="PATH", help="Unix socket to listen at.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", min=0, max=65535, help="TCP port instead.")] = None,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", help="IP address of that port.")] = "127.0.0.1",
    tokens_per_s: Annotated[float | None, typer.Option(metavar="N", help="How fast it talks.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="The socket is for its group, too.")] = False,
    watch_fd: WatchFd = None,
) -> int:
    """Runs an inference server with canned text, for trying Hive out without a model.

    Examples:
      hive demo-backend --port 11434
    """
    _log_events(of_up=watch_fd is not None)
    from hive.demo.server import TOKENS_PER_S, main

    speed = tokens_per_s or TOKENS_PER_S
    return main(socket=socket, port=port, host=listen, watch_fd=watch_fd, tokens_per_s=speed, shared=shared)


def _log_events(*, as_json: bool = False, of_up: bool = False) -> None:
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
