"""Orders about models in memory: load, unload, pin, unpin; and what the server of one wrote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall, Tail, loadable_names, out, pool_model_names
from hive.cli.following import followed
from hive.cli.model import NoWait
from hive.cli.op_options import BreakGlass, OpToken, headers_of, token_in
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, ago, harmless, one_line, span
from hive.errors import UsageError

ORDER_S = 60.0

AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="As `hive pool` or `hive model list` names it.",
        autocompletion=loadable_names,
        show_default=False,
    ),
]
OfPool = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="As `hive pool` names it.", autocompletion=pool_model_names, show_default=False
    ),
]


def load(
    call: CommandCall,
    model: AnyModel,
    evict: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="That one leaves first, and comes back if the load fails.",
            autocompletion=loadable_names,
            show_default=False,
        ),
    ] = "",
    context: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of one request that it has to take.")
    ] = None,
    quantization: Annotated[
        str, typer.Option(metavar="Q", help="Its variant, such as awq-4bit.", show_default=False)
    ] = "",
    no_wait: NoWait = False,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Loads a model, as a request for it would: what is in its way leaves when its turn is over.

    Of the pool (hive pool), or of Ollama or llama-server where that is in use. `hive pool explain MODEL` says how long
    it will take. Ctrl-C ends the looking, not the load. What is wrong with --evict, --context or
    --quantization is refused before anything moves.

    Examples:
      hive model load qwen3-32b
      hive model load qwen3-32b --no-wait --json | jq .eta_s
      hive model load qwen3-32b --evict qwen3-8b --context 32768
    """
    wish = {"evictModel": evict or None, "maxContextLength": context, "quantization": quantization or None}
    if given := {name: value for name, value in wish.items() if value is not None}:
        job = _wished(call, {"modelId": model, **given}, op_token, break_glass)
    else:
        headers = headers_of(op_token, break_glass)
        job = call.client.post(f"{_path_of(model)}/load", timeout_s=ORDER_S, headers=headers)
    if not no_wait:
        job = followed(
            call, job, goes_on=f"the load goes on: `hive pool` shows it, `hive model unload {model}` ends it"
        )
    call.show("model.load", job, lambda: _told(job, "loaded"))


def unload(
    call: CommandCall,
    model: AnyModel,
    force: Annotated[bool, typer.Option("--force", help="Also where it is pinned, which ends the pin.")] = False,
    no_wait: NoWait = False,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Unloads a model. Requests it works on end first; those that come meanwhile wait until it is loaded again.

    A request for it loads it again.

    Examples:
      hive model unload qwen3-32b
      hive model unload qwen3-32b --force --no-wait
    """
    headers = headers_of(op_token, break_glass)
    job = call.client.post(f"{_path_of(model)}/unload", {"force": force}, timeout_s=ORDER_S, headers=headers)
    if not no_wait:
        job = followed(call, job, goes_on="it is unloaded all the same")
    call.show("model.unload", job, lambda: _told(job, "unloaded"))


def pin(call: CommandCall, model: OfPool, op_token: OpToken = None, break_glass: BreakGlass = "") -> None:
    """Keeps a model of the pool loaded, from now on and after a restart: it never leaves for another one.

    `pin = true` below [model NAME] in hive.conf does the same where this was never said.

    Examples:
      hive model pin qwen3-8b
    """
    _pinned(call, model, "pin", headers_of(op_token, break_glass))


def unpin(call: CommandCall, model: OfPool, op_token: OpToken = None, break_glass: BreakGlass = "") -> None:
    """Ends a pin: the model stays loaded until its memory is wanted.

    Examples:
      hive model unpin qwen3-8b
    """
    _pinned(call, model, "unpin", headers_of(op_token, break_glass))


def deployed(call: CommandCall) -> None:
    """Lists the models that were ordered to be loaded, and by whom: what became of each.

    A load, a pin and a switch of the inference server deploy a model; hive model unload ends that. One that left for
    another model (evicted) is loaded again by a request; one that is absent has the reason below the table.

    Examples:
      hive model deployed
      hive model deployed --json | jq -r '.deployed[] | select(.state != "loaded") | .name'
    """
    answer = call.client.get("/api/models/deployed")
    call.show("model.deployed", answer, lambda: _deployed(answer, time.time()))


def logs(call: CommandCall, model: OfPool, tail: Tail = 100) -> None:
    """Prints what the server of one model of the pool wrote last.

    Of the inference server that is in use beside the pool: hive backend logs.

    Examples:
      hive model logs qwen3-32b
      hive model logs qwen3-32b -n 20
    """
    found = call.client.lines(f"{_path_of(model)}/log", lines=tail)
    text = b"".join(found).decode(errors="replace")
    if call.as_json:
        call.show("model.logs", {"lines": text.splitlines()}, lambda: text)
    else:
        out(harmless(text), end="" if text.endswith("\n") or not text else "\n")


def _pinned(call: CommandCall, model: str, order: str, headers: dict[str, str]) -> None:
    slot = call.client.post(f"{_path_of(model)}/{order}", headers=headers)
    call.show(f"model.{order}", slot, lambda: one_line(f"{slot['model']} is {order}ned; it is {slot['state']}"))


def _deployed(answer: Answer, now: float) -> str:
    rows = answer["deployed"]
    if not rows:
        return "nothing was ordered to be loaded: hive model load MODEL"
    heads = ["MODEL", "STATE", "BACKEND", "BY", "SIGNED BY", "AT", "DIGEST"]
    cells = [
        [
            row["name"],
            row["state"],
            row["backend"],
            row["deployed_by"],
            row["signature"] or UNKNOWN,
            ago(row["at"], now),
            row["digest"].removeprefix("sha256:")[:12] or UNKNOWN,
        ]
        for row in rows
    ]
    whys = [one_line(f"{row['name']}: {row['last_error']}") for row in rows if row["last_error"]]
    return "\n".join([fitted(heads, cells, drop=["DIGEST", "SIGNED BY", "BACKEND", "AT"]), *whys])


def _wished(call: CommandCall, order: dict[str, Any], op_token: Path | None, break_glass: str) -> Answer:
    """The job of a load that says more than its model. Its token is over all that it says."""
    if break_glass:
        raise UsageError("--break-glass is for a load without --evict, --context and --quantization")
    _path_of(order["modelId"])
    if op_token is not None:
        order["verifiedOpToken"] = token_in(op_token)
    task = call.client.post("/v1/models/load", order, timeout_s=ORDER_S)
    return call.client.get(f"/api/jobs/{quote(task['taskId'].removeprefix('load-'))}")


def _path_of(model: str) -> str:
    if not model:
        raise UsageError("an empty name names no model")
    return f"/api/models/{quote(model, safe='')}"


def _told(job: Answer, done: str) -> str:
    """
    >>> _told({"state": "done", "result": {"model": "m", "changed": True, "took_s": 12.3}}, "loaded")
    'm is loaded, after 12s'
    >>> _told({"state": "done", "result": {"model": "m", "changed": False}}, "unloaded")
    'm was unloaded already'
    """
    if job["state"] == "running":
        return f"job {job['id']}: {one_line(job['progress'])}" + _left(job["eta_s"])
    result = job["result"]
    if not result.get("changed", True):
        return one_line(f"{result['model']} was {done} already")
    took = f", after {span(result['took_s'])}" if "took_s" in result else ""
    return one_line(f"{result['model']} is {done}{took}")


def _left(eta_s: float | None) -> str:
    return "" if not eta_s else f" (at most {span(eta_s)})"
