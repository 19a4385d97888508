"""The whole Hive: its health, its backend, what was used, what happened."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import typer

from hive.cli.call import Answer, Call
from hive.cli.text import fields, harmless, one_line, size, span, table


def status(call: Call) -> None:
    """Shows whether Hive is well, and which Hive that is.

    The exit code is 0 also where something is degraded: it could be asked.

    Examples:
      hive status
      hive status --json | jq -e '.status == "ok"'
    """
    client = call.client
    health = client.get("/api/health")
    agents = client.get("/api/agents")["agents"]
    counts = dict(Counter(agent["status"] for agent in agents))
    answer = {**_renamed(health, "hive_version"), "socket": str(client.path), "agents": counts}
    call.show("status", answer, lambda: _status(answer))


def backend_status(call: Call) -> None:
    """Shows the inference server Hive stands in front of, how much it works on at once, and its models.

    Examples:
      hive backend status
      hive backend status --json | jq -e '.warning == ""'
    """
    answer = _renamed(call.client.get("/api/system/inference"), "backend_version")
    call.show("backend.status", answer, lambda: _backend(answer))


def events(
    call: Call,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as things happen.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", metavar="N", min=0, help="Past events.")] = 20,
) -> None:
    """Prints what happened to the agents, and why. With --json one object a line.

    Examples:
      hive events
      hive events -f --json | jq -r 'select(.kind == "agent.paused") | .name'
    """
    for event in call.client.events(tail=tail, follow=follow):
        call.line("event", event, lambda event=event: _event(event))  # type: ignore[misc]


def _renamed(answer: Answer, name: str) -> Answer:
    """`version` is the schema's in what a command prints, so the daemon's gets another name."""
    return {(name if key == "version" else key): value for key, value in answer.items()}


def _status(answer: Answer) -> str:
    proxy, backend = answer["proxy"], answer["backend"]
    agents = ", ".join(f"{count} {status}" for status, count in sorted(answer["agents"].items()))
    ports = f"agents on 127.0.0.1:{proxy['port']}, callers on 127.0.0.1:{proxy['ingress_port']}"
    pairs = [
        ("Status", ": ".join([answer["status"], "; ".join(answer["problems"])]) if answer["problems"] else "ok"),
        ("Socket", answer["socket"]),
        ("Daemon", f"{answer['hive_version']}, pid {answer['pid']}, up {span(time.time() - answer['started_at'])}"),
        ("Proxy", ports if proxy["connected"] else "not connected"),
        ("Helper", _helper(answer)),
        ("Redis", _redis(answer["redis"])),
        ("Backend", "none" if backend is None else _backend_line(backend, backend["version"], up=backend["up"])),
        ("Agents", agents or "none"),
        ("Isolation", answer["isolation"]),
        ("Limits", answer["limits"]),
        ("Metering", "on" if answer["token_tracking"] else "off (token_tracking = false)"),
        ("State", answer["state_dir"]),
    ]
    return fields(pairs)


def _helper(answer: Answer) -> str:
    if not answer["helper"]["enabled"]:
        return "none: this Hive runs no agents itself"
    return f"connected, freezer {answer['freezer']}" if answer["helper"]["connected"] else "not connected"


def _redis(redis: Answer) -> str:
    """`redis:6379, up`, or why not."""
    if redis["up"]:
        return f"{redis['at']}, up"
    why = harmless(redis["why"]) or "not asked yet"
    return f"{redis['at']}, DOWN: {why} (requests flow, their usage waits)"


def _backend_line(backend: Answer, version: str, *, up: bool) -> str:
    label = backend["label"] or backend.get("kind") or backend.get("backend")
    where = "" if backend["address"] in str(label) else f" at {backend['address']}"
    return ", ".join(
        part for part in (f"{label}{where}", f"version {version}" if version else "", "up" if up else "DOWN") if part
    )


def _backend(answer: Answer) -> str:
    job = answer["switch"]
    switching = [] if job is None else [f"Switching (job {job['id']}): {one_line(job['progress'])}"]
    if answer["backend"] is None:
        return "\n".join([*switching, "no backend"])
    lines = [*switching, harmless(_backend_line(answer, answer["backend_version"], up=answer["running"]))]
    slots = "no limit" if answer["slots"] is None else f"{answer['slots']} at once"
    source = f" ({answer['slots_from']})" if answer["slots_from"] not in ("", slots) else ""
    lines.append(
        fields(
            [
                ("Requests", slots + source),
                ("Priorities", "passed on to its own queue" if answer["priority"] else "kept in Hive's queue"),
                ("Prefix cache", answer["prefix_cache"]),
                ("Warning", answer["warning"]),
            ]
        )
    )
    rows = [[model["name"], size(model.get("size_bytes")), model.get("owned_by") or ""] for model in answer["models"]]
    if rows:
        lines += ["", table(["MODEL", "SIZE", "OWNED BY"], rows)]
    return "\n".join(lines)


def _event(event: Answer) -> str:
    if event["kind"] == "events.dropped":
        return f"({event['count']} events dropped: this reader is too slow)"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    change = f" {event['from']} → {event['to']}" if event.get("from") and event.get("to") else ""
    outcome = f" [{event['outcome']}]" if event.get("outcome") not in (None, "", "ok") else ""
    why = f": {event['reason']}" if event.get("reason") else ""
    who = event.get("name") or event.get("agent") or ""
    return harmless(f"{at}  {event['kind']}  {who}{change}{outcome}{why}".rstrip())
