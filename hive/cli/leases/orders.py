"""Leases: who holds memory of the pool, who waits; ending one; and those that something else than a program holds."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.amounts import mib_in, seconds_in
from hive.cli.call import Answer, CommandCall
from hive.cli.leases.run import BandOption, Gpus, Longest, NoWait, Vram, Wait, Whole, waited_for
from hive.cli.op_options import BreakGlass, OpToken, headers_of
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, ago, fields, one_line, size, span
from hive.errors import UsageError, with_code

HEADERS = ("LEASE", "STATE", "MEMORY", "SEEN", "BAND", "USER", "SINCE", "ENDS", "PROGRAM", "WHY")
DROPPED = ("BAND", "SINCE", "SEEN", "USER", "ENDS", "PROGRAM", "WHY")
"""Columns in the order in which they give way on a narrow terminal."""
COLOURS = {"running": "32", "overdue": "1;31", "ended": "2"}
"""Of a state; any other one is on its way from one to another: yellow."""
MIB = 1 << 20

LeaseId = Annotated[
    str, typer.Argument(metavar="LEASE", help="As `hive lease list` names it: l-17.", show_default=False)
]
Token = Annotated[int, typer.Option("--token", metavar="N", min=1, help="The lease's own, as `take` printed it.")]


def take(
    call: CommandCall,
    vram: Vram,
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="Overdue if it is not renewed within.")] = "60s",
    gpus: Gpus = 1,
    band: BandOption = "normal",
    wait: Wait = "1h",
    no_wait: NoWait = False,
    longest: Longest = "",
    whole: Whole = False,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What it is called in lists.")] = "",
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Takes a lease for what is no program of this box: a container, another machine's client, a service.

    It has to be renewed within --ttl, with its token. Past that it is overdue: its memory is given to nobody until
    Hive sees that it is free. A program of this box is better off with `hive lease run`, which needs no renewal.

    Examples:
      hive lease take --vram 8G --ttl 60s --label comfyui
      lease=$(hive lease take --vram 8G --ttl 2m --json)
      hive lease renew "$(jq -r .id <<<"$lease")" --token "$(jq -r .token <<<"$lease")"
    """
    order = {
        "mb": mib_in(vram, "--vram"),
        "gpus": gpus,
        "band": band,
        "wait_s": 0.0 if no_wait else seconds_in(wait, "--wait"),
        "max_s": seconds_in(longest, "--max") if longest else None,
        "all": whole,
        "kind": "held",
        "label": one_line(label),
        "ttl_s": seconds_in(ttl, "--ttl"),
    }
    headers = headers_of(op_token, break_glass)
    lease = waited_for(call, call.client.post("/api/leases", order, headers=headers), granted="running")
    call.show("lease.take", lease, lambda: _taken(lease))


def renew(
    call: CommandCall,
    lease: LeaseId,
    token: Token,
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="TIME", help="From now; else as before.", show_default=False)
    ] = "",
) -> None:
    """Renews a lease that was taken: it lives for another --ttl. An overdue one goes on.

    Exit code 1 with `stale_token` says that it is over, and its memory somebody else's.

    Examples:
      hive lease renew l-17 --token 17
      hive lease renew l-17 --token 17 --ttl 10m
    """
    body = {"token": token, "ttl_s": seconds_in(ttl, "--ttl") if ttl else None}
    answer = call.client.post(f"{_path_of(lease)}/renew", body)
    call.show("lease.renew", answer, lambda: f"{answer['id']} is held until it is renewed, {_ends(answer)} from now")


def release(call: CommandCall, lease: LeaseId, token: Token) -> None:
    """Gives a lease back that was taken, or leaves the line.

    Examples:
      hive lease release l-17 --token 17
    """
    answer = call.client.delete(_path_of(lease), token=token)
    call.show("lease.release", answer, lambda: f"{answer['id']} is given back")


def list_leases(
    call: CommandCall,
    ended: Annotated[int, typer.Option("--ended", metavar="N", min=0, max=1000, help="The last that are over.")] = 0,
) -> None:
    """Lists the leases: who waits in line, who holds memory, and why.

    MEMORY is what a lease was granted on each of its GPUs, SEEN what it was seen to have of it.

    Examples:
      hive lease list
      hive lease list --ended 20 --json | jq -r '.leases[] | select(.code == "lease_preempted") | .label'
    """
    answer = call.client.get("/api/leases", ended=ended)
    call.show("lease.list", answer, lambda: _listed(answer["leases"]))


def show(call: CommandCall, lease: LeaseId) -> None:
    """Shows one lease, an ended one too: where it is, for whom, until when, and why.

    Examples:
      hive lease show l-17
    """
    answer = call.client.get(_path_of(lease))
    call.show("lease.show", answer, lambda: _shown(answer))


def end(call: CommandCall, lease: LeaseId, op_token: OpToken = None, break_glass: BreakGlass = "") -> None:
    """Ends a lease, whoever holds it. Its program gets SIGTERM, and SIGKILL after its grace; one in line leaves it.

    Of one that was taken Hive has no program to end: its holder is told when it renews it.

    Examples:
      hive lease end l-17
    """
    answer = call.client.delete(_path_of(lease), headers=headers_of(op_token, break_glass), end=1)
    call.show("lease.end", answer, lambda: f"{answer['id']} {_is(answer['state'])}")


def _is(state: str) -> str:
    return "has ended" if state == "ended" else "is being ended"


def _path_of(lease: str) -> str:
    if not lease:
        raise UsageError("an empty id names no lease", hint="hive lease list")
    return f"/api/leases/{quote(lease, safe='')}"


def _taken(lease: Answer) -> str:
    devices = lease["environment"].get("CUDA_VISIBLE_DEVICES", "")
    return fields(
        [
            ("Lease", lease["id"]),
            ("Token", str(lease["token"])),
            ("Memory", memory_of(lease)),
            ("CUDA_VISIBLE_DEVICES", devices or "none: it is of the host's memory"),
            ("Renew within", _ends(lease)),
        ]
    )


def memory_of(lease: Answer) -> str:
    """
    >>> memory_of({"mb": 8192, "wanted_gpus": 2, "gpus": []}), memory_of({"mb": 512, "wanted_gpus": 1, "gpus": ["cpu"]})
    ('8.0 GiB on each of 2', '512 MiB')
    """
    return size(lease["mb"] * MIB) + (f" on each of {lease['wanted_gpus']}" if lease["wanted_gpus"] > 1 else "")


def _ends(lease: Answer) -> str:
    return UNKNOWN if lease["until"] is None else span(max(0.0, lease["until"] - time.time()))


def state_of_lease(lease: Answer) -> str:
    """
    >>> waits = {"state": "waiting", "place": 2, "ready_in_s": 34.0, "preemptible": False}
    >>> state_of_lease(waits), state_of_lease({**waits, "state": "running", "place": None, "preemptible": True})
    ('waiting, place 2, in about 34s', 'running, preemptible')
    """
    told = [lease["state"]]
    if lease["place"] is not None:
        told.append(f"place {lease['place']}")
        if lease["ready_in_s"] is not None:
            told.append(f"in about {span(lease['ready_in_s'])}")
    return ", ".join([*told, "preemptible"] if lease["preemptible"] else told)


def _listed(leases: list[Answer]) -> str:
    if not leases:
        return "nobody holds a lease, and nobody waits for one"
    rows = [
        [
            lease["id"],
            state_of_lease(lease),
            memory_of(lease),
            UNKNOWN if lease["used_mb"] is None else size(lease["used_mb"] * MIB),
            lease["band"],
            lease["user"],
            ago(lease["granted_at"] or lease["since"], time.time()),
            _ends(lease),
            one_line(lease["label"]),
            one_line(lease["why"]),
        ]
        for lease in leases
    ]
    return fitted(HEADERS, rows, drop=DROPPED, prose="WHY", colour=_colour)


def _colour(header: str, cell: str) -> str:
    return COLOURS.get(cell.partition(",")[0], "33") if header == "STATE" else ""


def _shown(lease: Answer) -> str:
    now = time.time()
    bound = "no end can be seen" if lease["bound_s"] is None else f"at most {span(lease['bound_s'])}"
    pairs = [
        ("Lease", f"{lease['id']}, token {lease['token']}"),
        ("State", state_of_lease(lease)),
        ("Why", one_line(with_code(lease["why"], lease["code"]) if lease.get("code") else lease["why"])),
        ("Program", one_line(lease["label"])),
        ("User", lease["user"]),
        ("Memory", memory_of(lease) + (f" in {', '.join(lease['gpus'])}" if lease["gpus"] else "")),
        ("Seen", "" if lease["used_mb"] is None else size(lease["used_mb"] * MIB)),
        ("Held by", lease["held_by"]),
        ("Its limit", _kept_by(lease)),
        ("Band", lease["band"]),
        ("Asked for", ago(lease["since"], now)),
        ("Waits", bound if lease["place"] is not None else ""),
        ("Before it", one_line(", ".join(lease["before"]))),
        ("Granted", "" if lease["granted_at"] is None else ago(lease["granted_at"], now)),
        ("Ends in", "" if lease["until"] is None else _ends(lease)),
        ("Ended", "" if lease["ended_at"] is None else ago(lease["ended_at"], now)),
    ]
    return fields([(name, text) for name, text in pairs if text])


def _kept_by(lease: Answer) -> str:
    if lease["state"] in ("waiting", "ended"):
        return ""
    if lease["kind"] == "held":
        return "its word alone: told, not enforced"
    return lease["enforced"] or "told, not enforced"
