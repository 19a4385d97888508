"""The commands for the prompt cache: what inference servers keep of prompts."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.op_options import BreakGlass, OpToken, headers_of
from hive.cli.terminal import legend
from hive.cli.text import UNKNOWN, one_line, span, table
from hive.errors import UsageError
from hive.terminal_text import counted

HEADERS = ("MODEL", "BACKEND", "REQUESTS", "TOKENS", "REUSED", "HIT RATE", "FLUSHED BY")
PARKED_HEADERS = ("AFTER A SLEEP", "TIMES", "TOKENS", "REUSED", "HIT RATE")
FLUSH_HEADERS = ("FLUSHED", "NAME", "AGO", "BY")
WITHIN_S = 30.0


def show(call: CommandCall) -> None:
    """Shows what was reused of prompts, model by model, and what was flushed last.

    REQUESTS are those whose server told what it reused, TOKENS those of their prompts. All are since Hive was started.

    Examples:
      hive cache
      hive cache show --json | jq '.models[] | {model, hit_rate}'
    """
    answer = call.client.get("/api/cache")
    call.show("cache.show", answer, lambda: _shown(answer, time.time()))
    legend(call, "counted since Hive was started" if answer["models"] else "")


def flush(
    call: CommandCall,
    everything: Annotated[bool, typer.Option("--all", help="All that any server keeps.")] = False,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="What is kept for this model.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="What is kept for this tenant.")] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="What requests with this X-Cache-Tag left, of all tenants.")
    ] = None,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Ends the reuse of earlier prompts. No request is ended, and none is kept waiting.

    Returns once that is so; after 5 s it says which job goes on: a llama-server's slot is erased when the request is
    over that is there. Exit code 4 where nothing of it can be flushed.

    Examples:
      hive cache flush --tenant acme
      hive cache flush --all --json | jq .flushed
    """
    named = {"model": model, "tenant": tenant, "tag": tag}
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) + everything != 1:
        raise UsageError("one of --all, --model, --tenant and --tag", hint="hive cache flush --help")
    scope = next(iter(given), "all")
    headers = headers_of(op_token, break_glass)
    answer = call.client.post("/api/cache/flush", {"scope": scope, **given}, timeout_s=WITHIN_S, headers=headers)
    call.show("cache.flush", answer, lambda: _flushed(answer))


def _parked(told: Answer) -> list[str]:
    """Lines on what agents found of their slots after their sleeps."""
    rows = [
        [
            found,
            str(one["sleeps"]),
            str(one["tokens"]),
            str(one["tokens_reused"]),
            UNKNOWN if one["hit_rate"] is None else f"{one['hit_rate']:.0%}",
        ]
        for found, one in told["first_requests"].items()
        if one["sleeps"]
    ]
    share = "" if told["found_share"] is None else f", {told['found_share']:.0%} found what they left"
    said = f"slots of {told['saved']} of {told['sleeps']} sleeps were kept, {told['files']} are{share}"
    return [table(PARKED_HEADERS, rows), said] if rows else [said]


def _shown(answer: Answer, now: float) -> str:
    rows = [
        [
            one["model"],
            one["backend"],
            *(UNKNOWN if one[key] is None else str(one[key]) for key in ("requests", "tokens", "tokens_reused")),
            UNKNOWN if one["hit_rate"] is None else f"{one['hit_rate']:.0%}",
            one["why_not"] or one["flushed_by"],
        ]
        for one in answer["models"]
    ]
    parts = [table(HEADERS, [[one_line(cell) for cell in row] for row in rows]) if rows else "there is no model"]
    if answer["flushes"]:
        done = [[one["scope"], one["name"], span(max(0.0, now - one["at"])), one["actor"]] for one in answer["flushes"]]
        parts.append(table(FLUSH_HEADERS, [[one_line(cell) for cell in row] for row in done]))
    if answer["parking"] is not None:
        parts += _parked(answer["parking"])
    if answer["flushing"]:
        parts.append(f"under way: {', '.join(answer['flushing'])}")
    return "\n\n".join(parts)


def _flushed(answer: Answer) -> str:
    """
    >>> told = {"scope": "tenant", "name": "acme", "left_out": [], "id": "a1", "entries_removed": 2}
    >>> _flushed(told | {"flushed": True}), _flushed(told | {"flushed": False})
    ('tenant acme is flushed: 2 prompts erased', 'tenant acme is being flushed: job a1 waits for requests under way')
    """
    what = f"{answer['scope']} {answer['name']}".strip()
    if not answer["flushed"]:
        return one_line(f"{what} is being flushed: job {answer['id']} waits for requests under way")
    count = answer["entries_removed"]
    many = "" if not count else f": {counted(count, 'prompt')} erased"
    left = "".join(f"\nleft out: {one}" for one in answer["left_out"])
    return "\n".join(one_line(line) for line in f"{what} is flushed{many}{left}".splitlines())
