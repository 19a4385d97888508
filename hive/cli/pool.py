"""The pool of models: what is loaded in whose memory, and why."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall, pool_model_names
from hive.cli.status import speculation
from hive.cli.terminal import drawn_again, fitted
from hive.cli.text import UNKNOWN, one_line, size, span
from hive.errors import UsageError
from hive.terminal_text import counted, shares

BANDS = ("high", "normal", "low")
LOOK_S = 2.0
"""Between two looks of --watch."""
HOST = "cpu"
BAR = 24
SIGNS = "█▓▚▒░"
"""Memory that models hold, that is booked for them besides, that leases and that others hold, and that is free."""
LEGEND = "█ models  ▓ booked  ▚ leases  ▒ others  ░ free"
COLOURS = {"ready": "32", "running": "32", "failed": "1;31", "overdue": "1;31", "cold": "2", "asleep": "36"}
"""Of a state; any other one is on its way from one to another: yellow."""
ACCOUNT_HEADERS = ("MEMORY", "USE", "MODELS", "BOOKED", "LEASES", "OTHERS", "FREE", "TOTAL")
HEADERS = ("MODEL", "STATE", "MEMORY", "IN FLIGHT", "WAITING", "AUDIENCE", "TURN", "LOAD", "WHY")
DROPPED = ("LOAD", "TURN", "AUDIENCE", "WAITING", "IN FLIGHT", "WHY")
"""Columns in the order in which they give way on a narrow terminal."""
NAME_MAX = 40
"""Characters of a lease's name in the list; `hive lease show` has all of it."""

PoolModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="As `hive pool` names it.", autocompletion=pool_model_names, show_default=False
    ),
]


def bands(incomplete: str) -> list[str]:
    """Completion of a band."""
    return [band for band in BANDS if band.startswith(incomplete)]


def show(
    call: CommandCall,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="On a terminal: again every 2 s, until Ctrl-C.")] = False,
) -> None:
    """Shows whose memory the models are in, what is free, and each model with the reason for its state.

    A line for each GPU, or for the host's memory, and one for each model of [model NAME] in hive.conf. BOOKED is what
    the models were promised, MODELS what they were seen to hold of it. A model is not unloaded for another one within
    its TURN while it has an AUDIENCE: clients that will probably ask it again soon.

    Examples:
      hive pool
      hive pool --watch
      hive pool --json | jq -r '.slots[] | select(.state == "ready") | .model'
    """
    if watch:
        if call.as_json or not sys.stdout.isatty():
            raise UsageError(
                "--watch draws on a terminal: without --json", hint="hive events --follow --json goes into a pipe"
            )
        drawn_again(lambda: _screen(call), every_s=LOOK_S)
        return
    view = call.client.get("/api/pool")
    call.show("pool.show", view, lambda: shown(view))


def explain(
    call: CommandCall,
    model: PoolModel,
    band: Annotated[
        str, typer.Option(metavar="|".join(BANDS), help="For a request of this band.", autocompletion=bands)
    ] = "normal",
) -> None:
    """Explains why a model is where it is, what would leave for it, and how long a request for it would wait at most.

    Nothing is loaded or unloaded. Where no end of the wait can be seen it says what is in the way.

    Examples:
      hive pool explain qwen3-32b
      hive pool explain qwen3-32b --band high --json | jq .bound_s
    """
    if band not in BANDS:
        raise UsageError(f"there is no band {band!r}", hint=f"the bands are {', '.join(BANDS)}")
    if not model:
        raise UsageError("an empty name names no model")
    answer = call.client.get(f"/api/pool/models/{quote(model, safe='')}/explain", band=band)
    call.show("pool.explain", answer, lambda: "\n".join(one_line(line) for line in _kept(answer["lines"])))


def _kept(lines: list[str]) -> list[str]:
    return [line for line in lines if line]


def _screen(call: CommandCall) -> str:
    width = shutil.get_terminal_size().columns
    view = call.client.get("/api/pool")
    title = f"{time.strftime('%H:%M:%S')}  {counted(len(view['slots']), 'model')}; Ctrl-C ends this"
    return f"{title[:width]}\n\n{shown(view)}"


def shown(view: Answer) -> str:
    """Both tables: complete for a file or a pipe, on a terminal as wide as that is and with its states in colour."""
    if not view["enabled"]:
        return one_line(f"there is no pool: {view['why_not']}")
    parts = [_accounts(view["accounts"])] if view["accounts"] else ["no memory is known to put a model into"]
    rows = [_row(slot) for slot in view["slots"]] + [_service(service) for service in view["backends"]]
    rows += [_lease(lease) for lease in view["leases"]]
    parts.append(fitted(HEADERS, rows, drop=DROPPED, prose="WHY", colour=colour_of))
    return "\n\n".join(parts)


def _accounts(accounts: list[Answer]) -> str:
    rows = [
        [
            name_of(account),
            bar_of(account, BAR),
            size(account["measured_bytes"]),
            size(account["charged_bytes"]),
            size(account["leased_bytes"]),
            size(account["foreign_bytes"]),
            free(account["free_bytes"]),
            size(account["total_bytes"]),
        ]
        for account in accounts
    ]
    told = fitted(ACCOUNT_HEADERS, rows, drop=("OTHERS", "LEASES", "BOOKED", "MODELS", "USE"))
    unknown = [name_of(account) for account in accounts if not is_measured(account)]
    silent = f"\nunmeasured, so that the books alone decide: {one_line(', '.join(unknown))}" if unknown else ""
    return f"{told}\n{LEGEND}{silent}"


def is_measured(account: Answer) -> bool:
    """Whether more than the books is known of it. Of the host's memory the models' own part is enough.

    >>> host = {"id": "cpu", "used_bytes": None, "measured_bytes": 7}
    >>> is_measured(host), is_measured({**host, "id": "GPU-1"})
    (True, False)
    """
    return account["used_bytes"] is not None or (account["id"] == HOST and account["measured_bytes"] is not None)


def name_of(account: Answer) -> str:
    """
    >>> name_of({"id": "GPU-5a1c2b3d-0000", "name": "NVIDIA H200"}), name_of({"id": "cpu", "name": "host memory"})
    ('H200 GPU-5a1c2b3d', 'host memory')
    """
    if account["id"] == HOST:
        return str(account["name"])
    return f"{account['name'].removeprefix('NVIDIA ')} {account['id'][:12]}".strip()


def free(count: int) -> str:
    """Bytes that may be below 0, where more is used than there should be.

    >>> free(1 << 30), free(-(1 << 30))
    ('1.0 GiB', '-1.0 GiB')
    """
    return size(count) if count >= 0 else f"-{size(-count)}"


def bar_of(account: Answer, width: int) -> str:
    """The memory of one account by its holders; what is booked and not seen to be held comes after what is.

    >>> account = {"total_bytes": 100, "measured_bytes": 30, "charged_bytes": 50, "foreign_bytes": 10}
    >>> bar_of(account | {"leased_bytes": 20}, 10)
    '███▓▓▚▚▒░░'
    """
    held = account["measured_bytes"] or 0
    cells = shares(
        [held, max(0, account["charged_bytes"] - held), account["leased_bytes"], account["foreign_bytes"]],
        account["total_bytes"],
        width,
    )
    return "".join(sign * count for sign, count in zip(SIGNS, (*cells, width - sum(cells)), strict=True))


def state_of(slot: Answer) -> str:
    """
    >>> state_of({"state": "loading", "loading_s": 14.2, "load_s": 47.0, "pinned": True})
    'loading 14s of 47s, pinned'
    >>> state_of({"state": "asleep", "loading_s": None, "wake_s": 2.1, "pinned": False})
    'asleep, wakes in 2s'
    """
    told = slot["state"]
    if slot["loading_s"] is not None:
        told += f" {span(slot['loading_s'])} of {span(slot['load_s'])}"
    elif slot["state"] == "asleep" and slot["wake_s"] is not None:
        told += f", wakes in {span(slot['wake_s'])}"
    return f"{told}, pinned" if slot["pinned"] else str(told)


def colour_of(header: str, cell: str) -> str:
    """SGR codes of a cell.

    >>> colour_of("STATE", "ready, pinned"), colour_of("STATE", "draining"), colour_of("MODEL", "ready")
    ('32', '33', '')
    """
    return COLOURS.get(cell.partition(" ")[0].rstrip(","), "33") if header == "STATE" else ""


def _row(slot: Answer) -> list[str]:
    charged = sum(grant["charged_bytes"] for grant in slot["grants"])
    needs = size(slot["need_bytes"]) if slot["need_bytes"] else UNKNOWN
    return [
        slot["model"],
        state_of(slot),
        size(charged) if slot["grants"] else f"({needs})",
        str(slot["in_flight"]),
        str(slot["waiting"]),
        str(slot["audience"]),
        UNKNOWN if slot["turn_ends_in_s"] is None else span(slot["turn_ends_in_s"]),
        f"{slot['load_s']:.2g}s" if slot["load_s"] < 10 else span(slot["load_s"]),
        _why(slot),
    ]


def _service(service: Answer) -> list[str]:
    """A service of `hive backend`, which stands in the same memory; or the cluster in use, which has none here.

    >>> _service({"kind": "vllm", "state": "ready", "grants": [], "slots": 8, "why": "2 of 2 replicas"})[::8]
    ['vllm (hive backend)', '8 at once: 2 of 2 replicas']
    """
    charged = sum(grant["charged_bytes"] for grant in service["grants"])
    held = size(charged) if service["grants"] else UNKNOWN
    unknown = [UNKNOWN] * (len(HEADERS) - 4)
    places = service.get("slots")
    why = service["why"] if places is None else f"{places} at once: {service['why']}"
    return [f"{service['kind']} (hive backend)", service["state"], held, *unknown, why]


def _lease(lease: Answer) -> list[str]:
    """A program that is no model, or waits for the memory to be one here."""
    charged = sum(grant["charged_bytes"] for grant in lease["grants"])
    unknown = [UNKNOWN] * (len(HEADERS) - 4)
    name = one_line(f"lease {lease['id']} {lease['label']}".strip())
    return [
        name if len(name) <= NAME_MAX else f"{name[: NAME_MAX - 1]}…",
        lease["state"],
        size(charged) if charged else f"({size(lease['need_bytes'])})",
        *unknown,
        lease["why"],
    ]


def _why(slot: Answer) -> str:
    """The reason, with the last failure where it is not about that anyway."""
    again = "" if slot["retry_in_s"] is None else f", again in {span(slot['retry_in_s'])}"
    failed = slot["last_error"] if slot["state"] in ("failed", "cold") and slot["last_error"] not in slot["why"] else ""
    drafts = f"; {said}" if slot["state"] == "ready" and (said := speculation(slot.get("speculation"))) else ""
    return f"{slot['why']}{again if failed else ''}" + (f": {failed}" if failed else "") + drafts
