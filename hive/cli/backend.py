"""The inference server behind Hive: which there are, and switching to another one."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall, Tail, out
from hive.cli.following import error_of, looked_at
from hive.cli.op_options import BreakGlass, OpToken, headers_of
from hive.cli.terminal import fitted
from hive.cli.text import harmless, one_line, span
from hive.errors import NotFound, UsageError

LOOK_S = 0.3
CANCEL_S = 600.0

SERVED = ("ollama", "vllm", "llama", "demo")
KINDS = ("ollama", "vllm", "llama", "remote", "demo")


def served(incomplete: str) -> list[str]:
    """Completion of a server that has a log."""
    return [name for name in SERVED if name.startswith(incomplete)]


def kinds(incomplete: str) -> list[str]:
    """Completion of what can be switched to by its kind."""
    return [name for name in KINDS if name.startswith(incomplete)]


Kind = Annotated[
    str | None,
    typer.Argument(
        metavar="|".join(SERVED), help="Which one; else the one in use.", autocompletion=served, show_default=False
    ),
]


def list_backends(call: CommandCall) -> None:
    """Lists the inference servers that can be switched to, which of them answer, and which one is in use.

    An installed Hive has its services; under `hive up` it is whatever answers at a known address.

    Examples:
      hive backend list
      hive backend list --json | jq -r '.backends[] | select(.in_use) | .backend'
    """
    answer = call.client.get("/api/system/backends")
    call.show("backend.list", answer, lambda: _listed(answer["backends"]))


def switch(
    call: CommandCall,
    to: Annotated[
        str | None,
        typer.Argument(
            metavar=f"[URL|{'|'.join(KINDS)}]",
            help="Which inference server.",
            autocompletion=kinds,
            show_default=False,
        ),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Only begin it.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Go back, where one is under way.")] = False,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Switches to another inference server. Requests wait meanwhile.

    What is under way at the old one finishes (switch_drain_s in hive.conf). The new one has to answer, to offer a model
    and to generate a token; where it does not, the old one is back, the last lines of the new one are shown, and the
    exit code is 6. Ctrl-C ends the waiting, not the switch.

    Examples:
      hive backend switch vllm
      hive backend switch http://127.0.0.1:8000
      hive backend switch https://api.example.com/v1
      hive backend switch llama --no-wait
      hive backend switch --cancel
    """
    if (to is None) is not cancel:
        raise UsageError("name what to switch to" if to is None else "--cancel needs no inference server")
    client = call.client
    if cancel:
        running = client.get("/api/system/inference")["switch"]
        if running is None:
            raise NotFound("no switch is under way")
        job = client.delete(f"/api/jobs/{quote(running['id'])}", timeout_s=CANCEL_S)
        call.show("backend.switch", job, lambda: _cancelled(job))
        return
    headers = headers_of(op_token, break_glass)
    job = client.post("/api/system/inference", {"backend": to}, headers=headers)
    if not no_wait:
        job = _ended(call, job)
    call.show("backend.switch", job, lambda: _switched(job))


def logs(
    call: CommandCall,
    backend: Kind = None,
    tail: Tail = 100,
) -> None:
    """Prints what an inference server that Hive started wrote last.

    Examples:
      hive backend logs
      hive backend logs vllm -n 20
    """
    lines = list(call.client.lines("/api/system/backends/logs", backend=backend, tail=tail))
    text = b"".join(lines).decode(errors="replace")
    if call.as_json:
        call.show("backend.logs", {"lines": text.splitlines()}, lambda: text)
    else:
        out(harmless(text), end="")


def _ended(call: CommandCall, job: Answer) -> Answer:
    """The job, done. Says how far it is. Raises what it ended with, and what it wrote last."""
    said = ""
    try:
        while job["state"] == "running":
            if job["progress"] != said:
                said = job["progress"]
                call.say(said + _left(job["eta_s"]))
            time.sleep(LOOK_S)
            job = looked_at(call, job["id"])
    except KeyboardInterrupt:
        call.say(
            "the switch goes on: `hive backend status` shows how far it is, `hive backend switch --cancel` ends it"
        )
        raise
    if job["state"] != "done":
        raise error_of(job["error"])
    return job


def _left(eta_s: float | None) -> str:
    return "" if not eta_s else f" (about {span(eta_s)} left)"


def _switched(job: Answer) -> str:
    if job["state"] == "running":
        return f"job {job['id']}: {one_line(job['progress'])}"
    result: dict[str, Any] = job["result"]
    if not result["changed"]:
        return f"{result['backend']} is in use already"
    cut = "" if not result["cut"] else f", {result['cut']} of its requests did not end in time"
    before = f" (was {result['from']})" if result["from"] else ""
    note = f"; {result['note']}" if result.get("note") else ""  # a job of an older Hive has none
    return one_line(f"{result['backend']} is in use now{before}, after {span(result['took_s'])}{cut}{note}")


def _cancelled(job: Answer) -> str:
    return one_line(job["error"]["message"] if job["error"] else _switched(job))


def _listed(backends: list[Answer]) -> str:
    rows = [
        [
            backend["backend"],
            backend["unit"] or backend["address"],
            backend["state"],
            "yes" if backend["answers"] else "no",
            backend["version"] or "-",
            "*" if backend["in_use"] else "",
        ]
        for backend in backends
    ]
    headers = ["BACKEND", "WHERE", "STATE", "ANSWERS", "VERSION", "IN USE"]
    return fitted(headers, rows, drop=("VERSION", "WHERE", "ANSWERS"))
