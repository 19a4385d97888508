"""The whole Hive: its health, its backend, what was used, what happened."""

from __future__ import annotations

import os
import textwrap
import time
from collections import Counter
from typing import Annotated, Any

import typer

from hive.cli import cluster
from hive.cli.call import Answer, CommandCall, agent_names
from hive.cli.text import ago, fields, harmless, one_line, size, span, table
from hive.conditions import FoundCondition, Where, conditions_in, where_is
from hive.errors import HiveError, with_code
from hive.paths import APPLIANCE_RUNTIME
from hive.terminal_text import counted

ANSWER_S = 5.0
"""A daemon that says nothing of itself within this hangs."""
LIST_S = 30.0
WIDTH = 80


def status(call: CommandCall) -> int:
    """Shows whether Hive is well, and which Hive that is.

    Under each thing that is wrong stands what to type next. The exit code is 0 also where something is degraded: the
    daemon could be asked. Where it could not, the screen says what can be seen from outside, and the exit code why: 5
    where no daemon answers, 4 where this user may not ask it, 7 where it hangs.

    Examples:
      hive status
      hive status --json | jq -e '.status == "ok"'
      hive status --json | jq -r '.next[].command'
    """
    try:
        client = call.client
        health = client.get("/api/health", timeout_s=ANSWER_S)
        agents = client.agents_in_short(timeout_s=LIST_S)
    except HiveError as error:
        return _silent(call, error)
    counts = dict(Counter(agent["status"] for agent in agents))
    answer = {
        **_renamed(health, "hive_version"),
        "socket": str(client.path),
        "agents": counts,
        **_wrong(conditions_in(health), where_of(call, apart=health["runtime_dir"] == str(APPLIANCE_RUNTIME))),
    }
    call.show("status", answer, lambda: _status(answer))
    return 0


def where_of(call: CommandCall, *, apart: bool) -> Where:
    """The form of commands about the Hive of this call."""
    socket = call.socket or os.environ.get("HIVE_SOCKET", "")  # which sudo does not pass on
    return where_is(apart=apart, state_dir=call.state_dir, socket=str(socket), is_root=os.geteuid() == 0)


def _wrong(found: list[FoundCondition], where: Where) -> Answer:
    """The part of an answer that is about `found`."""
    from msgspec import to_builtins

    found = [one.at(where) for one in found]
    return {
        "problems": [one.text for one in found],
        "next": [{"problem": one.text, "command": one.fix} for one in found],
        "conditions": [to_builtins(one) for one in found],
    }


def backend_status(call: CommandCall) -> None:
    """Shows the inference server Hive stands in front of, how much it works on at once, and its models.

    Of a cluster: its replicas, its nodes, and what waits in its own queue.

    Examples:
      hive backend status
      hive backend status --json | jq -e '.warning == ""'
    """
    answer = _renamed(call.client.get("/api/system/inference"), "backend_version")
    call.show("backend.status", answer, lambda: _backend(answer))


def events(
    call: CommandCall,
    agent: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Those of this agent alone; of one that was removed, by its id.",
            autocompletion=agent_names,
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as things happen.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", metavar="N", min=0, max=10_000, help="Past events.")] = 20,
) -> None:
    """Prints what happened to the agents, and why; also to models, adapters and leases. With --json one object a line.

    Examples:
      hive events
      hive events alice -n 100
      hive events -f --json | jq -r 'select(.kind == "agent.paused") | .name'
    """
    with call.about(agent or ""):
        for event in call.client.events(agent, tail=tail, follow=follow):
            call.line("event", event, lambda event=event: _event(event))  # type: ignore[misc]


def _renamed(answer: Answer, name: str) -> Answer:
    """`version` is the schema's in what a command prints, so the daemon's gets another name."""
    return {(name if key == "version" else key): value for key, value in answer.items()}


def _status(answer: Answer) -> str:
    proxy, backend = answer["proxy"], answer["backend"]
    ports = f"agents on 127.0.0.1:{proxy['port']}, callers on 127.0.0.1:{proxy['ingress_port']}"
    pairs = [
        ("Status", answer["status"]),
        ("Socket", answer["socket"]),
        ("Daemon", f"{answer['hive_version']}, pid {answer['pid']}, up {span(time.time() - answer['started_at'])}"),
        ("Proxy", ports if proxy["connected"] else "not connected"),
        ("API", _api(answer.get("api"))),
        ("Helper", _helper(answer)),
        ("Redis", _redis(answer["redis"])),
        ("Backend", "none" if backend is None else _backend_line(backend, backend["version"], up=backend["up"])),
        *([("Cluster", cluster.replicas(told))] if (told := (backend or {}).get("cluster")) else []),
        *([("Pool", _pool(pool))] if (pool := answer.get("pool")) else []),
        ("Agents", _counted(answer["agents"])),
        ("Isolation", answer["isolation"]),
        ("Limits", answer["limits"]),
        ("Metering", "on" if answer["token_tracking"] else "off (token_tracking = false)"),
        ("State", answer["state_dir"]),
    ]
    return "\n".join([fields(pairs), *_todo(answer["conditions"])])


def _pool(pool: Answer) -> str:
    """The models of the pool, counted.

    >>> _pool({"models": 3, "loaded": 1, "failed": ["qwen3-8b"]})
    '3 models, 1 loaded, failed: qwen3-8b'
    """
    failed = f", failed: {', '.join(pool['failed'])}" if pool["failed"] else ""
    return f"{counted(pool['models'], 'model')}, {pool['loaded']} loaded{failed}"


def _counted(agents: dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(agents.items())) or "none"


def _todo(found: list[Answer]) -> list[str]:
    """Each condition with its code, and under it what to type."""
    lines = [""] if found else []
    for one in found:
        said = with_code(one_line(one["text"]), one["code"])
        lines += textwrap.wrap(said, WIDTH, break_long_words=False, break_on_hyphens=False)
        lines.append(f"    {one_line(one['fix'])}")
    return lines


# --- where no daemon answers --------------------------------------------------------------------------------------


def _silent(call: CommandCall, error: HiveError) -> int:
    """Shows what can be seen all the same. Returns the exit code."""
    from hive.doctor.offline_status import conditions_of, look

    seen = look(socket=call.socket, state_dir=call.state_dir, uid=os.geteuid(), env=dict(os.environ))
    where = where_of(call, apart=seen.kind == "appliance")._replace(flags=seen.up_flags)
    answer: Answer = {
        "status": "down" if error.code != "not_permitted" else "unknown",
        **_wrong(conditions_of(seen, error.code), where),
        "why": error.message,
        "code": error.code,
        "kind": str(seen.kind),
        "tried": seen.tried,
        "parts": {part.name: {"state": part.state, "why": part.why} for part in seen.parts},
        "units": None if seen.units is None else {unit.name: unit.active for unit in seen.units},
        "hive_up_pid": seen.held_by,
        "agents": None if seen.recorded is None else seen.recorded.agents,
        "database": None if seen.recorded is None else str(seen.recorded.path),
        "last_event_at": seen.recorded.last[0] if seen.recorded is not None and seen.recorded.last else None,
        "state_dir": None if seen.state is None else str(seen.state),
    }
    call.show("status", answer, lambda: _silence(answer, seen, time.time()))
    return error.exit_code


def _silence(answer: Answer, seen: Any, now: float) -> str:
    pairs = [
        ("Status", answer["status"]),
        *[("Socket", f"{path}: {why}") for path, why in seen.tried.items()],
        ("Daemon", {"timeout": "hangs", "not_permitted": "may not be asked"}.get(answer["code"], "does not answer")),
        *[(part.name.capitalize(), f"{part.state}: {part.why}" if part.why else part.state) for part in seen.parts],
        ("Units", ", ".join(f"{unit.name.removesuffix('.service')} {unit.active}" for unit in seen.units or ())),
        ("Agents", _recorded(seen.recorded, now)),
        ("State", answer["state_dir"] or ""),
    ]
    return "\n".join([fields(pairs), *_todo(answer["conditions"])])


def _recorded(recorded: Any, now: float) -> str:
    if recorded is None:
        return ""
    if recorded.agents is None:
        return f"unknown: {recorded.why}"
    if recorded.living is None:
        known = "as the database has them"
    else:
        known = "without a Hive" if recorded.living else "and no process of one lives"
    if recorded.last is None:
        return f"{_counted(recorded.agents)}, {known}"
    at, act, name = recorded.last
    return f"{_counted(recorded.agents)}, {known}; last {ago(at, now)}: {act} {name}"


# --- what is shown of a Hive that answers --------------------------------------------------------------------------


def _api(api: Answer | None) -> str:
    """Its address on TCP; empty if the daemon is older than that.

    >>> _api({"listen": "127.0.0.1", "port": 3000}), _api({"listen": "::1", "port": None}), _api(None)
    ('http://127.0.0.1:3000, with a token', 'on its socket only', '')
    """
    if api is None:
        return ""
    if api["port"] is None:
        return "on its socket only"
    address = f"[{api['listen']}]" if ":" in api["listen"] else api["listen"]
    return f"http://{address}:{api['port']}, with a token"


def _helper(answer: Answer) -> str:
    if not answer["helper"]["enabled"]:
        return "none: this Hive runs no agents itself"
    return f"connected, freezer {answer['freezer']}" if answer["helper"]["connected"] else "not connected"


def _redis(redis: Answer) -> str:
    """`redis:6379, up`, or why not."""
    if redis["up"]:
        return f"{redis['at']}, up"
    why = harmless(redis["why"]) or "not asked yet"
    return f"{redis['at']}, DOWN: {why} (requests flow and are counted)"


def _backend_line(backend: Answer, version: str, *, up: bool) -> str:
    label = backend["label"] or backend.get("kind") or backend.get("backend")
    where = "" if backend["address"] in str(label) else f" at {backend['address']}"
    return ", ".join(
        part for part in (f"{label}{where}", f"version {version}" if version else "", "up" if up else "DOWN") if part
    )


def speculation(told: Answer | None) -> str:
    """The share of guessed tokens that was right; empty where a server does not speculate.

    >>> speculation({"drafted": 200, "accepted": 130, "rate": 0.66, "warning": ""})
    "130 of 200 drafted tokens accepted since its server's start, 66% in the last 10 minutes"
    """
    if told is None:
        return ""
    lately = "" if told["rate"] is None else f", {told['rate']:.0%} in the last 10 minutes"
    of = f"{told['accepted']} of {told['drafted']} drafted tokens accepted since its server's start"
    said = of + lately if told["drafted"] else ""
    return "; ".join(part for part in (said, told["warning"]) if part)


def _takes(told: Answer) -> str:
    """Fields beside OpenAI's, and where that is known from; empty where it is not."""
    if told["fields"] is None:
        return ""
    return f"{', '.join(['OpenAI fields', *told['fields']])} ({told['found']})"


def _backend(answer: Answer) -> str:
    job = answer["switch"]
    switching = [] if job is None else [f"Switching (job {job['id']}): {one_line(job['progress'])}"]
    if answer["backend"] is None:
        return "\n".join([*switching, "no backend"])
    lines = [*switching, harmless(_backend_line(answer, answer["backend_version"], up=answer["running"]))]
    places = "no limit" if answer["slots"] is None else f"{answer['slots']} at once"
    source = f" ({answer['slots_from']})" if answer["slots_from"] not in ("", places) else ""
    lines.append(
        fields(
            [
                ("Requests", places + source),
                *cluster.pairs(answer.get("cluster"), time.time()),
                ("Priorities", "passed on to its own queue" if answer["priority"] else "kept in Hive's queue"),
                ("Prefix cache", answer["prefix_cache"]),
                ("Speculation", speculation(answer.get("speculation"))),
                ("Takes", _takes(answer["capabilities"])),
                ("Warning", answer["warning"]),
            ]
        )
    )
    if machines := cluster.nodes(answer.get("cluster")):
        lines += ["", machines]
    rows = [[model["name"], size(model.get("size_bytes")), model.get("owned_by") or ""] for model in answer["models"]]
    if rows:
        lines += ["", table(["MODEL", "SIZE", "OWNED BY"], rows)]
    return "\n".join(lines)


def _event(event: Answer) -> str:
    if event["kind"] == "events.dropped":
        return f"({counted(event['count'], 'event')} dropped: this reader is too slow)"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    change = f" {event['from']} → {event['to']}" if event.get("from") and event.get("to") else ""
    outcome = f" [{event['outcome']}]" if event.get("outcome") not in (None, "", "ok") else ""
    why = f": {event['reason']}" if event.get("reason") else ""
    who = event.get("name") or event.get("agent") or ""
    return harmless(f"{at}  {event['kind']}  {who}{change}{outcome}{why}".rstrip())
