"""Agents as they are described: created, applied from TOML, exported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.agents.spec import TOML_MAX_BYTES, changed_fields, check, check_toml, to_toml
from hive.cli.agent import refuse_failed
from hive.cli.call import AgentName, Answer, Call
from hive.control.client import path_of
from hive.domain import AgentSpec, RestartPolicy, Tier
from hive.errors import BadRequest, NotFound, UsageError

START_S = 60.0


def create(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A letter a-z, then up to 39 of a-z, 0-9 and -.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What it runs; write `--` before it.")],
    port: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=65535, help="Where it listens for callers.")
    ] = None,
    tier: Annotated[Tier, typer.Option(help="How many of its requests may be at the backend at once.")] = Tier.MEDIUM,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whom it belongs to.")] = "default",
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Used where a request names none.")] = None,
    restart: Annotated[RestartPolicy, typer.Option(help="When its command ends.")] = RestartPolicy.NO,
    idle: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds of quiet before it sleeps; 0 is never.")
    ] = None,
    cid: Annotated[
        int | None, typer.Option(metavar="N", min=3, max=2**32 - 2, help="AF_VSOCK context id of its machine.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="For its environment.")] = None,
) -> None:
    """Creates an agent and starts it.

    It finds the model at OPENAI_BASE_URL, OPENAI_API_KEY and OLLAMA_HOST; it runs in a directory of its own, so give
    full paths.

    Examples:
      hive agent create alice -- /usr/bin/python3 /srv/alice.py
      hive agent create bob --port 9000 --idle 60 -e LOG=debug -- /srv/bob serve
    """
    spec = AgentSpec(
        name=name,
        command=command,
        port=port,
        tier=tier,
        tenant=tenant,
        model=model,
        restart=restart,
        idle_s=idle,
        cid=cid,
        env=dict(_pair(item) for item in env or []),
    )
    view = call.client.post("/api/agents", _plain(check(spec)), timeout_s=START_S)
    refuse_failed(view)
    call.show("agent.create", view, lambda: f"{view['name']} is {view['status']}")


def apply(
    call: Call,
    file: Annotated[str, typer.Argument(metavar="FILE", help="TOML; `-` reads stdin.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would change.")] = False,
) -> None:
    """Makes an agent what a file describes: created if it is not there, else changed.

    A changed agent runs on as it was until it is restarted.

    Examples:
      hive agent apply alice.toml
      hive agent apply --dry-run alice.toml
      hive agent export alice | sed s/alice/bob/ | hive agent apply -
    """
    spec = _read(file)
    answer = _compared(call, spec) if dry_run else call.client.put(path_of(spec.name), _plain(spec), timeout_s=START_S)
    call.show("agent.apply", answer, lambda: _applied(spec.name, answer, dry_run=dry_run))


def export(call: Call, name: AgentName) -> None:
    """Prints an agent's description as TOML that `hive agent apply` takes.

    Examples:
      hive agent export alice > alice.toml
    """
    with call.about(name):
        spec = _spec_of(call.client.get(path_of(name)))
    call.show("agent.export", _plain(spec), lambda: to_toml(spec).rstrip())


def _pair(item: str) -> tuple[str, str]:
    name, found, value = item.partition("=")
    if not found:
        raise UsageError(f"--env {item}: expected NAME=VALUE")
    return name, value


def _read(file: str) -> AgentSpec:
    try:
        data = sys.stdin.buffer.read(TOML_MAX_BYTES + 1) if file == "-" else _bytes_of(Path(file))
        return check_toml(data.decode())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{file}: not UTF-8") from None
    except BadRequest as error:
        raise BadRequest(f"{'stdin' if file == '-' else file}: {error.message}", hint=error.hint) from None


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(TOML_MAX_BYTES + 1)


def _spec_of(view: Answer) -> AgentSpec:
    import msgspec

    return msgspec.convert({field: view[field] for field in AgentSpec.__struct_fields__}, AgentSpec)


def _plain(spec: AgentSpec) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(spec)
    return plain


def _compared(call: Call, spec: AgentSpec) -> Answer:
    try:
        old = _spec_of(call.client.get(path_of(spec.name)))
    except NotFound:
        return {"dry_run": True, "created": True, "changed": [], "restart_needed": False}
    changed = changed_fields(old, spec)
    return {"dry_run": True, "created": False, "changed": changed, "restart_needed": bool(changed)}


def _applied(name: str, answer: Answer, *, dry_run: bool) -> str:
    would = "would be " if dry_run else ""
    if answer["created"]:
        return f"{name} {would or 'is '}created"
    if not answer["changed"]:
        return f"{name} {would or 'is '}unchanged"
    later = f"; `hive agent restart {name}` makes it run so" if answer["restart_needed"] and not dry_run else ""
    return f"{name} {would or 'is '}changed: {', '.join(answer['changed'])}{later}"
