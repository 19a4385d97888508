"""Agents as they are described: created, applied from TOML, exported."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.agents.spec import PLAIN, PROMPT_MAX_BYTES, SCRIPT, TOML_MAX_BYTES, check, check_toml, to_toml
from hive.cli.agents.steer import seen_again
from hive.cli.call import AgentName, Answer, CommandCall
from hive.cli.text import AT_REST, harmless
from hive.client.client import path_of
from hive.domain import AgentSpec, CloudUse, DockerSpec, Limits, RestartPolicy, RuntimeKind, SleepDepth, Tier
from hive.errors import BadRequest, UsageError

START_S = 160.0
IN_FLAGS = {
    "command: empty": "hive agent create NAME -- /usr/bin/python3 /srv/agent.py",
    "docker: missing": "say --image",
    "template: the runtime": "--template goes with processes: leave out --runtime and --image",
    "docker: the runtime": "--image goes with --runtime docker",
}
"""A fault in a description → the flags to type about it."""
MEMORY = typer.Option(metavar="N(k|m|g)", help="At most so much RAM, like 512m.")
CPUS = typer.Option(metavar="N", help="At most so many cores, like 1.5.")
PIDS = typer.Option(metavar="N", help="At most so many processes and threads.")
PORT = typer.Option(metavar="N", min=1, max=65535, help="Where it listens for callers.")
TIER = typer.Option(help="How many of its requests may be at the backend at once.")
TENANT = typer.Option(metavar="NAME", help="Whom it belongs to.")
MODEL = typer.Option(metavar="MODEL", help="Used where a request names none.")
RESTART = typer.Option(help="When its command ends.")
IDLE = typer.Option(metavar="S", min=0, help="Seconds of quiet before it sleeps; 0 is never.")
DEEPEST = typer.Option(help="How deep it may sleep: light or deep.")
"""Options of `create` that `edit` has, too."""
_MIB = {"k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([kmgt])(?:i?b)?", re.IGNORECASE)


def create(
    call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A letter a-z, then up to 39 of a-z, 0-9 and -.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="What it runs; write `--` before it.")
    ] = None,
    runtime: Annotated[
        RuntimeKind | None, typer.Option(help="What it runs in; process, unless --image says docker.")
    ] = None,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Of a docker agent: its container image.")] = None,
    mount: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PATH[:ro]", help="Of a docker agent: a directory of this host.")
    ] = None,
    memory: Annotated[str | None, MEMORY] = None,
    cpus: Annotated[float | None, CPUS] = None,
    pids: Annotated[int | None, PIDS] = None,
    no_network: Annotated[bool, typer.Option("--no-network", help="It reaches Hive and nothing else.")] = False,
    port: Annotated[int | None, PORT] = None,
    tier: Annotated[Tier, TIER] = Tier.MEDIUM,
    tenant: Annotated[str, TENANT] = "default",
    model: Annotated[str | None, MODEL] = None,
    restart: Annotated[RestartPolicy, RESTART] = RestartPolicy.NO,
    autostart: Annotated[bool, typer.Option("--autostart", help="Started when the host boots, too.")] = False,
    idle: Annotated[float | None, IDLE] = None,
    deepest: Annotated[SleepDepth, DEEPEST] = SleepDepth.DEEP,
    cid: Annotated[
        int | None, typer.Option(metavar="N", min=3, max=2**32 - 2, help="AF_VSOCK context id of its machine.")
    ] = None,
    system_prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What its conversations begin with, word for word.")
    ] = None,
    prewarm: Annotated[
        bool, typer.Option("--prewarm", help="The backend reads it at each start and wake, before the agent asks.")
    ] = False,
    cloud: Annotated[
        CloudUse | None, typer.Option(help="Narrows how far its requests may go; as box and tenant say if not given.")
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most so many tokens a day, in and out.")
    ] = None,
    tokens_per_month: Annotated[int | None, typer.Option(metavar="N", min=1, help="The same for a month.")] = None,
    cloud_tokens_per_day: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The same of requests that leave the box.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Forked from this template: COMMAND is then a script of Python, and its own."
        ),
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="For its environment.")] = None,
) -> None:
    """Creates an agent and starts it; one that ends within half a second is told with its last line.

    It finds the model at OPENAI_BASE_URL, OPENAI_API_KEY and OLLAMA_HOST; a process runs in a directory of its own, so
    give full paths. What flags do not cover, `hive agent apply` takes from a file.

    Examples:
      hive agent create alice -- /usr/bin/python3 /srv/alice.py
      hive agent create bob --port 9000 --idle 60 -e LOG=debug -- /srv/bob serve
      hive agent create dora --template langgraph -- dora.py --verbose
      hive agent create carol --image python:3.12-slim --memory 512m --cpus 1.5 -- python3 -m http.server
    """
    spec = AgentSpec(
        name=name,
        command=(command or []) if template is None else located(command or []),
        runtime=runtime or (RuntimeKind.PROCESS if image is None else RuntimeKind.DOCKER),
        docker=_docker(image, mount or []),
        limits=Limits(memory_mb=None if memory is None else mebibytes(memory), cpu=cpus, pids=pids),
        egress=[] if no_network else None,
        port=port,
        tier=tier,
        tenant=tenant,
        model=model,
        restart=restart,
        autostart=autostart,
        idle_s=idle,
        deepest=deepest,
        cid=cid,
        env=dict(_pair(item) for item in env or []),
        system_prompt=None if system_prompt_file is None else _prompt(system_prompt_file),
        prewarm_on_start=prewarm,
        cloud=cloud,
        tokens_per_day=tokens_per_day,
        tokens_per_month=tokens_per_month,
        cloud_tokens_per_day=cloud_tokens_per_day,
        template=template,
    )
    if prewarm and spec.system_prompt is None:
        raise UsageError("--prewarm: there is no prompt to be read", hint="say --system-prompt-file")
    if spec.runtime is RuntimeKind.FIRECRACKER:
        raise UsageError("a firecracker agent is described in a file", hint="hive agent apply FILE")
    view = call.client.post("/api/agents", plain(_checked(spec)), timeout_s=START_S)
    view = seen_again(call, view)
    call.show("agent.create", view, lambda: f"{view['name']} is {view['status']}")


def apply(
    call: CommandCall,
    file: Annotated[str, typer.Argument(metavar="FILE", help="TOML, or JSON; `-` reads stdin.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would change.")] = False,
) -> None:
    """Makes an agent what a file describes: created if it is not there, else changed; says what that means.

    A new agent is not started by it, and a changed one runs on as it was until it is restarted. A new external one may
    ask the model at once: Hive starts nothing of it.

    Examples:
      hive agent apply alice.toml
      hive agent apply --dry-run alice.toml
      hive agent export alice | sed s/alice/bob/ | hive agent apply -
    """
    spec = _read(file)
    path = path_of(spec.name)
    answer = call.client.put(path, plain(spec), timeout_s=START_S, dry_run=int(dry_run))
    call.show("agent.apply", answer, lambda: plan_text(spec.name, answer))


def export(call: CommandCall, name: AgentName) -> None:
    """Prints an agent's description as TOML that `hive agent apply` takes.

    Examples:
      hive agent export alice > alice.toml
    """
    with call.about(name):
        spec = of_view(call.client.get(path_of(name)))
    call.show("agent.export", plain(spec), lambda: to_toml(spec).rstrip())


def located(command: list[str]) -> list[str]:
    """The command of a template's agent with its script's full path, where that is a file of this directory's.

    >>> located(["-m", "agent"]), located(["/srv/a.py", "b.py"])
    (['-m', 'agent'], ['/srv/a.py', 'b.py'])
    """
    at = 1 if command[:1] and command[0] in PLAIN else 0
    if len(command) > at and command[at].endswith(SCRIPT) and os.path.isfile(command[at]):
        return [*command[:at], os.path.abspath(command[at]), *command[at + 1 :]]
    return command


def _checked(spec: AgentSpec) -> AgentSpec:
    """Checks as `check` does, with hints for a user of flags. Raises BadRequest."""
    try:
        return check(spec)
    except BadRequest as error:
        error.hint = IN_FLAGS.get(error.message.split(" is ")[0], error.hint)
        raise


def _pair(item: str) -> tuple[str, str]:
    name, found, value = item.partition("=")
    if not found:
        raise UsageError(f"--env {item}: expected NAME=VALUE")
    return name, value


def _prompt(path: Path) -> str:
    """The file as it is: a prompt that differs in its last line break is another one."""
    try:
        with path.open("rb") as file:
            return file.read(PROMPT_MAX_BYTES + 1).decode()
    except OSError as error:
        raise UsageError(f"--system-prompt-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"--system-prompt-file {path}: not UTF-8, or longer than {PROMPT_MAX_BYTES} bytes") from None


def read_toml(file: str) -> str:
    """The text of a file, `-` for stdin. Raises UsageError, BadRequest."""
    try:
        data = sys.stdin.buffer.read(TOML_MAX_BYTES + 1) if file == "-" else _bytes_of(Path(file))
        return data.decode()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{file}: not UTF-8") from None


def _read(file: str) -> AgentSpec:
    text = read_toml(file)
    try:
        return check_toml(text)
    except BadRequest as error:
        raise BadRequest(f"{'stdin' if file == '-' else file}: {error.message}", hint=error.hint) from None


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(TOML_MAX_BYTES + 1)


def of_view(view: Answer) -> AgentSpec:
    """The description in what the daemon shows of an agent."""
    import msgspec

    return msgspec.convert({field: view[field] for field in AgentSpec.__struct_fields__}, AgentSpec)


def plain(spec: AgentSpec) -> dict[str, Any]:
    """The description as JSON has it."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(spec)
    return plain


def _docker(image: str | None, mounts: list[str]) -> DockerSpec | None:
    if image is None and mounts:
        raise UsageError("--mount: only a docker agent has mounts", hint="say --image")
    return None if image is None else DockerSpec(image=image, mounts=mounts)


def mebibytes(text: str) -> int:
    """MiB of a size as docker takes it.

    >>> mebibytes("512m"), mebibytes("1.5GiB")
    (512, 1536)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"--memory {text}: expected a number with k, m or g, like 512m")
    return round(float(match[1]) * _MIB[match[2].lower()])


def plan_text(name: str, answer: Answer) -> str:
    """The changes made, or to be made, a line for each field."""
    would = "would be " if answer["dry_run"] else "is "
    if not answer["created"] and not answer["changes"]:
        return f"{name} {would}unchanged"
    lines = [f"{name} {would}created" if answer["created"] else f"{name} {would}changed:"]
    for change in answer["changes"]:
        before = "" if answer["created"] else f"{_value(change['from'])} → "
        when = " (from its next start)" if change["at_restart"] else ""
        lines.append(f"  {change['field']}: {before}{_value(change['to'])}{when}")
    if answer["restart_needed"]:
        lines.append("a restart would be needed" if answer["dry_run"] else f"`hive agent restart {name}` makes it so")
    elif answer["created"] and not answer["dry_run"] and answer["agent"]["status"] in AT_REST:
        lines.append(f"`hive agent start {name}` starts it")
    return harmless("\n".join(lines))


def _value(value: Any) -> str:
    """One value of a description for people.

    >>> _value({"memory_mb": 512, "cpu": None, "user": ""}), _value(["/bin/x", "-v"]), _value(None), _value(False)
    ('memory_mb 512', '/bin/x -v', 'none', 'false')
    """
    match value:
        case dict():
            return ", ".join(f"{key} {_value(it)}" for key, it in value.items() if it not in (None, "")) or "none"
        case list():
            return " ".join(map(str, value)) or "[]"
        case bool():
            return "true" if value else "false"
        case _:
            return "none" if value is None else str(value)
