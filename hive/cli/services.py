"""Commands that start a process: `hive up` and its parts, for those who type them (service_starts.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hive.cli import service_starts
from hive.cli.call import STATE_DIR
from hive.domain import Isolation

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
    return service_starts.proxy(
        state_dir=state_dir,
        runtime_dir=runtime_dir,
        config=config,
        port=port,
        ingress_port=ingress_port,
        move_ports=move_ports,
        appliance=appliance,
        watch_fd=watch_fd,
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
    return service_starts.daemon(
        state_dir=state_dir,
        runtime_dir=runtime_dir,
        config=config,
        backend=backend,
        backend_found=backend_found,
        isolation=isolation,
        api_port=api_port,
        appliance=appliance,
        watch_fd=watch_fd,
    )


def sandbox(
    state_dir: StateDir,
    runtime_dir: RuntimeDir,
    config: Config = None,
    appliance: Appliance = False,
    watch_fd: WatchFd = None,
) -> int:
    """Runs the helper, a service: it starts, stops, freezes and thaws agents and owns their sockets.

    Examples:
      hive sandbox --state-dir /var/lib/hive --runtime-dir /run/hive
    """
    return service_starts.sandbox(
        state_dir=state_dir, runtime_dir=runtime_dir, config=config, appliance=appliance, watch_fd=watch_fd
    )


def sandbox_thaw(
    state_dir: StateDir, runtime_dir: RuntimeDir, config: Config = None, appliance: Appliance = False
) -> int:
    """Thaws every agent, where a helper was killed: what is frozen cannot be stopped.

    Examples:
      hive sandbox-thaw --state-dir /var/lib/hive --runtime-dir /run/hive
    """
    return service_starts.sandbox_thaw(state_dir=state_dir, runtime_dir=runtime_dir, config=config, appliance=appliance)


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
    return service_starts.demo_backend(
        socket=socket, port=port, listen=listen, tokens_per_s=tokens_per_s, shared=shared, watch_fd=watch_fd
    )
