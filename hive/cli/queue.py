"""Requests under way: waiting for the model or running, and ending one."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.terminal import fitted, legend
from hive.cli.text import fields, milliseconds, number, one_line, table
from hive.errors import UsageError

DROPPED = ("TENANT", "ENDPOINT", "IN LINE", "MODEL", "AGE")
"""Columns that give way where the terminal is narrow, the first one first."""
COUNTS = ("tokens_in", "tokens_out", "cached_tokens")

RequestId = Annotated[
    str, typer.Argument(metavar="ID", help="Of the request, as X-Request-Id says it.", show_default=False)
]


def list_requests(call: CommandCall) -> None:
    """Lists the requests to the model that are under way, the oldest first, and how the queue stands.

    A request waits in line for a turn while it is queued, or for its model to be loaded, which is said then; parked is
    one whose agent is just being woken.

    LOADS are the seconds of models' loads that a tenant's requests have caused since the proxy was started: they are
    charged to it as tokens.
    Audio and images count as tokens too, by the seconds that their server needs for them; where there are such models,
    the last table says how they compare.

    Examples:
      hive queue
      hive queue --json | jq '.requests[] | select(.state == "queued") | .name'
    """
    answer = call.client.get("/api/queue")
    call.show("queue.list", answer, lambda: _listed(answer))
    legend(call, "LOADS count since the proxy was started" if _has_loads(_at_work(answer)) else "")


def show(call: CommandCall, request: RequestId) -> None:
    """Shows one request, under way or ended: whose it was, how long it waited, what it cost.

    Examples:
      hive queue show 69214ae1c0ffee-42
    """
    answer = call.client.get(_path(request))
    call.show("queue.show", answer, lambda: _shown(answer))


def cancel(call: CommandCall, request: RequestId) -> None:
    """Ends a request that is under way. Its client gets an error, or a stream that is cut.

    Examples:
      hive queue cancel 69214ae1c0ffee-42
    """
    answer = call.client.delete(_path(request))
    call.show("queue.cancel", answer, lambda: f"{answer['cancelled']} is ended")


def _path(request: str) -> str:
    if not request:
        raise UsageError("an empty id names no request", hint="hive queue lists those under way")
    return f"/api/requests/{quote(request, safe='')}"


def _listed(answer: Answer) -> str:
    limit = "" if answer["slots"] is None else f" of {answer['slots']}"
    pace = "" if answer["drain_per_s"] is None else f", {answer['drain_per_s']:.2g} turns a second"
    lines = [f"{answer['running']}{limit} running, {answer['waiting']} waiting{pace}"]
    if tenants := _at_work(answer):
        headers = ["TENANT", "WEIGHT", "RUNNING", "WAITING", "TOKENS AHEAD"]
        if loads := _has_loads(tenants):
            headers.append("LOADS")
        lines += ["", table(headers, [_tenant_row(tenant, loads=loads) for tenant in tenants])]
    if any(one["unit"] != "tokens" for one in answer["work"]):
        lines += ["", compared(answer)]
    if answer["requests"]:
        headers = ["REQUEST", "AGENT", "TENANT", "MODEL", "ENDPOINT", "STATE", "AGE", "IN LINE"]
        lines += ["", fitted(headers, [_row(request) for request in answer["requests"]], drop=DROPPED)]
    if answer["left_out"]:
        lines.append(f"and {answer['left_out']} more")
    return "\n".join(lines)


def _at_work(answer: Answer) -> list[Answer]:
    """The tenants that are shown."""
    return [tenant for tenant in answer["tenants"] if tenant["running"] or tenant["waiting"]]


def _has_loads(tenants: list[Answer]) -> bool:
    """Whether there is a column for them."""
    return any(tenant["load_s"] for tenant in tenants)


HEADERS = ("SERVER", "IN 1 S", "COUNTS AS")
UNITS = {"tokens": ("tokens", 1.0), "audio_s": ("s of audio", 1.0), "pixel_steps": ("Mpixel-steps", 1e6)}


def compared(answer: Answer) -> str:
    """Tells what a second of each server's work is, and what it counts as in everybody's account.

    >>> print(compared({"tokens_per_gpu_s": 240.0, "work": [
    ...     {"model": "qwen3-8b", "unit": "tokens", "per_s": 240.0, "is_measured": True},
    ...     {"model": "whisper-base", "unit": "audio_s", "per_s": 31.0, "is_measured": True},
    ...     {"model": "sdxl", "unit": "pixel_steps", "per_s": 2e6, "is_measured": False}]}))
    1 s of a server's work counts as 240 tokens
    SERVER        IN 1 S              COUNTS AS
    qwen3-8b      240 tokens          1 token = 1
    whisper-base  31 s of audio       1 s of audio = 7.7
    sdxl          2 Mpixel-steps (?)  1 Mpixel-step = 120
    (?) not measured yet
    """
    per_gpu_s, rows = answer["tokens_per_gpu_s"], []
    shown = [one for one in answer["work"] if one["model"] or one["is_measured"]]
    for one in shown:
        words, size = UNITS[one["unit"]]
        counts = 1.0 if one["unit"] == "tokens" else per_gpu_s * size / one["per_s"]
        singular = words if one["unit"] == "audio_s" else words[:-1]
        guess = "" if one["is_measured"] else " (?)"
        done = f"{_figure(one['per_s'] / size)} {words}{guess}"
        rows.append([one_line(one["model"]) or "in use", done, f"1 {singular} = {_figure(counts)}"])
    first, rest = f"1 s of a server's work counts as {_figure(per_gpu_s)} tokens", table(HEADERS, rows)
    last = [] if all(one["is_measured"] for one in shown) else ["(?) not measured yet"]
    return "\n".join([first, rest, *last])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _tenant_row(tenant: dict[str, Any], *, loads: bool) -> list[str]:
    row = [
        tenant["name"],
        f"{tenant['weight']:g}",
        str(tenant["running"]),
        str(tenant["waiting"]),
        number(round(tenant["tokens_ahead"])),
    ]
    return [*row, f"{tenant['load_s']:.0f} s"] if loads else row


def _row(request: dict[str, Any]) -> list[str]:
    return [
        request["id"],
        one_line(request["name"]),
        one_line(request["tenant"]),
        one_line(request["model"]) or "-",
        request["endpoint"] or "-",
        one_line(request["waits_for"]) or request["state"],
        milliseconds(request["duration_ms"]),
        milliseconds(request["queue_ms"]),
    ]


def _model(answer: Answer) -> str:
    """The model that served it, with the name it was asked by where that is another.

    >>> _model({"model": "qwen3-8b", "asked": "task:plan", "rung": 1, "far": False})
    'qwen3-8b (asked for task:plan, rung 1)'
    """
    told = one_line(answer["model"])
    asked = answer["asked"] if answer["asked"] != answer["model"] else None
    notes = [f"asked for {one_line(asked)}"] if asked else []
    notes += [f"rung {answer['rung']}"] if answer["rung"] is not None else []
    notes += ["left the box"] if answer["far"] else []
    return f"{told} ({', '.join(notes)})" if notes else told


def _units(answer: Answer) -> list[tuple[str, str]]:
    """The line of its cost where that is no tokens, in place of the one of tokens.

    >>> _units({"unit": "images", "amount": 2.0, "work": 13107200.0, "estimated": True})
    [('Images', '2, 13.1 Mpixel-steps (estimated)')]
    """
    amount, estimated = answer["amount"], " (estimated)" if answer["estimated"] else ""
    if amount is None or answer["unit"] not in ("audio_s", "images"):
        return []
    if answer["unit"] == "audio_s":
        return [("Audio", f"{amount:.1f} s{estimated}")]
    steps = "" if answer["work"] is None else f", {answer['work'] / 1e6:.1f} Mpixel-steps"
    return [("Images", f"{amount:g}{steps}{estimated}")]


def _shown(answer: Answer) -> str:
    tokens = [f"{number(answer[count])} {count.replace('_', ' ')}" for count in COUNTS if answer[count] is not None]
    state = answer["state"] + (f", {one_line(answer['waits_for'])}" if answer["waits_for"] else "")
    if state == "ended":
        state = f"ended with {answer['status']}" + (", its client did not get a whole answer" if answer["cut"] else "")
    pairs = [
        ("Request", answer["id"]),
        ("State", state),
        ("Agent", one_line(answer["name"] or f"{answer['agent']} (removed)")),
        ("Tenant", one_line(answer["tenant"])),
        ("Model", _model(answer)),
        ("Asked", answer["endpoint"]),
        ("Backend", answer["backend"] or ""),
        ("Took", milliseconds(answer["duration_ms"])),
        ("In line", milliseconds(answer["queue_ms"])),
        ("First byte", milliseconds(answer["ttft_ms"])),
        *_units(answer),
        ("Tokens", ", ".join(tokens) + (" (estimated)" if answer["estimated"] else "")),
        ("Its own id", one_line(answer["client_request_id"] or "")),
    ]
    return fields(pairs)
