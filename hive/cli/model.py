"""Commands of models: listing them and their users, bringing and removing some."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall, model_names
from hive.cli.following import followed
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, ago, fields, number, one_line, size, span
from hive.errors import ModelNotFound, NotFound, UsageError

TIERS = ("low", "medium", "high")
ASK_S = 60.0
CANCEL_S = 60.0
PULL = "model.pull"
PATHS = ("/", "./", "../", "~")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="As `hive model list` names it.", autocompletion=model_names, show_default=False
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Also where it is in use.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Only begin it.")]


def list_models(call: CommandCall) -> None:
    """Lists the models behind Hive: how large they are, which are in memory, which tier is given which.

    It is what the inference server said last; where that does not answer just now the list says so. Models of the pool
    (hive pool) are there with their state.

    Examples:
      hive model list
      hive model list --json | jq -r '.models[] | select(.loaded) | .name'
    """
    answer = call.client.get("/api/models")
    _show_list(call, "model.list", answer | {"pool": _in_pool(call)})


def refresh(call: CommandCall) -> None:
    """Asks the inference server what models it offers now, and lists them.

    Hive does so by itself every 5 minutes (models_refresh_s), after a switch, and where a request names a model that is
    not in the list.

    Examples:
      hive model refresh
    """
    answer = call.client.post("/api/models/refresh", timeout_s=ASK_S)
    _show_list(call, "model.refresh", answer | {"pool": _in_pool(call)})


def show(call: CommandCall, model: ModelName) -> None:
    """Shows all that is known of one model: who is given it, by which names, what belongs to it.

    Examples:
      hive model show llama3.2
      hive model show llama3.2 --json | jq '.agents[].name'
    """
    view = call.client.get(_path_of(model))
    call.show("model.show", view, lambda: _shown(view))


def pull(
    call: CommandCall,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|PATH", help="A name for Ollama to fetch, or files of this box.")
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What files are called; else as they are.")] = "",
    link: Annotated[bool, typer.Option("--link", help="Files are linked, not copied: the same disk.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Files replace what has that name.")] = False,
    no_wait: NoWait = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="End the pull that is under way.")] = False,
) -> None:
    """Brings a model: by its name where Ollama is in use, else from files of this box.

    A path (beginning with /, ./, ../ or ~) is a GGUF file, the first of its shards, or a directory with config.json and
    *.safetensors. It is checked and copied to where the inference servers read models, whole or not at all. Ctrl-C ends
    the looking, not the pull.

    Examples:
      hive model pull llama3.2
      hive model pull /srv/incoming/Qwen3-8B-Q4_K_M.gguf --name qwen3-8b
      hive model pull llama3.2 --cancel
    """
    client, path = call.client, str(Path(model).expanduser().absolute()) if model.startswith(PATHS) else model
    if cancel:
        job = client.delete(f"/api/jobs/{quote(_under_way(call, path, name))}", timeout_s=CANCEL_S)
        call.show("model.pull", job, lambda: one_line(job["error"]["message"] if job["error"] else _pulled(job)))
        return
    order = {"model": path, "name": name, "link": link, "force": force}
    job = client.post("/api/models", order, timeout_s=ASK_S)
    if not no_wait:
        goes_on = f"the pull goes on: `hive model pull {model} --cancel` ends it, `hive model list` shows what is there"
        job = followed(call, job, goes_on=goes_on)
    call.show("model.pull", job, lambda: _pulled(job))
    if job["state"] == "done" and job["result"]["next"]:
        call.say(f"next: {job['result']['next']}")


def remove(
    call: CommandCall,
    model: ModelName,
    force: Force = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    no_wait: NoWait = False,
) -> None:
    """Removes a model: Ollama's own, or its files where `hive model pull` puts them.

    One that is in memory, that a living agent has for its own, or that hive.conf names is removed with --force alone.

    Examples:
      hive model remove qwen3-8b
      hive model remove llama3.2 --yes --force
    """
    client = call.client
    client.get("/api/models")  # a user asked below should not learn afterwards that no daemon is there
    call.confirm(f"Remove the model {one_line(model)}?", yes=yes)
    job = client.delete(_path_of(model), timeout_s=ASK_S, force=int(force))
    if not no_wait:
        job = followed(call, job, goes_on="it is removed all the same")
    call.show("model.remove", job, lambda: _removed(job))


def route(
    call: CommandCall,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As a request names it.", autocompletion=model_names, show_default=False),
    ],
    tier: Annotated[str, typer.Option(metavar="|".join(TIERS), help="Of an agent of this tier.")] = "medium",
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Within the limits of this tenant.", show_default=False),
    ] = None,
) -> None:
    """Explains which model a request is given, step by step. Nothing is asked of the model.

    Exit code 3 where the request would be refused.

    Examples:
      hive model route llama3.2 --tier low
      hive model route llama3.2 --tier low --tenant acme
      hive model route llama3.2 --tier low --json | jq -r .model
    """
    if tier not in TIERS:
        raise UsageError(f"there is no tier {tier!r}", hint=f"the tiers are {', '.join(TIERS)}")
    answer = call.client.get("/api/models/route", model=model, tier=tier, tenant=tenant)
    if not answer["model"]:
        for step in answer["steps"][:-1]:
            call.say(one_line(step))
        raise ModelNotFound(answer["why"], hint=answer["hint"])
    call.show("model.route", answer, lambda: _steps(answer))


def _path_of(model: str) -> str:
    if not model:
        raise UsageError("an empty name names no model")
    return f"/api/models/{quote(model, safe='')}"


def _under_way(call: CommandCall, path: str, name: str) -> str:
    """The id of the running pull of this model. Raises NotFound."""
    meant = {path, name, Path(path).name, Path(path).name.removesuffix(".gguf")} - {""}
    for job in call.client.get("/api/jobs", limit=1000)["jobs"]:
        if job["kind"] == PULL and job["state"] == "running" and meant & _names(job):
            return str(job["id"])
    raise NotFound(f"no pull of {path} is under way")


def _names(job: Answer) -> set[str]:
    about = job["about"]
    return {about, about.removesuffix(".gguf")}


def _in_pool(call: CommandCall) -> list[Answer]:
    """Model and state of each slot of the pool."""
    slots = call.client.get("/api/pool")["slots"]
    return [{name: slot[name] for name in ("model", "state", "pinned")} for slot in slots]


def _show_list(call: CommandCall, schema: str, answer: Answer) -> None:
    call.show(schema, answer, lambda: _listed(answer))
    if answer["stale"] and (answer["backend"] is not None or not answer["pool"]):
        call.say(f"stale: {answer['stale']}")
    if answer["seen_at"] is not None:
        call.say(f"from {answer['label']}, {ago(answer['seen_at'], time.time())}")


def _listed(answer: Answer) -> str:
    tiers = ["TIERS"] if answer["routing"] else []
    adapters = {model["name"] for model in answer["models"] if model["parent"]}
    pool = {_asked_as(slot["model"], adapters): slot for slot in answer["pool"]}
    states = ["POOL"] if pool else []
    heads = ["MODEL", "SIZE", "QUANTIZATION", "PARAMETERS", "LOADED", *states, *tiers, "ALIASES"]
    rows = [
        [
            model["name"],
            size(model["size_bytes"]),
            model["quantization"] or UNKNOWN,
            weights(model["parameters"]),
            _loaded(model),
            *([_pooled(pool.get(model["name"]))] if pool else []),
            *([", ".join(model["tiers"]) or UNKNOWN] if tiers else []),
            ", ".join(model["aliases"]) or UNKNOWN,
        ]
        for model in answer["models"]
    ]
    names = {model["name"] for model in answer["models"]}
    rows += [_only_in_pool(slot, heads) for name, slot in pool.items() if name not in names]
    besides = [f"{name} ({size(bytes_)})" for name, bytes_ in answer["files"].items() if name not in names]
    told = f"\nnot offered, but in {answer['directory']}: {one_line(', '.join(besides))}" if besides else ""
    drop = ("PARAMETERS", "ALIASES", "LOADED", "TIERS", "QUANTIZATION", "POOL")
    return fitted(heads, rows, drop=[head for head in drop if head in heads]) + told


def _asked_as(model: str, adapters: set[str]) -> str:
    """The name by which requests ask for a model of the pool, which for an adapter's server is the adapter's.

    >>> _asked_as("legal@0123456789ab", {"legal"}), _asked_as("tiny@main", {"legal"})
    ('legal', 'tiny@main')
    """
    name = model.rpartition("@")[0]
    return name if name in adapters else model


def _pooled(slot: Answer | None) -> str:
    """The state of a model of the pool.

    >>> _pooled({"state": "ready", "pinned": True}), _pooled(None)
    ('ready, pinned', '-')
    """
    if slot is None:
        return UNKNOWN
    return f"{slot['state']}, pinned" if slot["pinned"] else str(slot["state"])


def _only_in_pool(slot: Answer, heads: list[str]) -> list[str]:
    """The row of a model that the inference server in use does not offer."""
    told = {
        "MODEL": slot["model"],
        "LOADED": "yes" if slot["state"] in ("ready", "draining") else "no",
        "POOL": _pooled(slot),
    }
    return [told.get(head, UNKNOWN) for head in heads]


def weights(count: int | None) -> str:
    """Number of weights, as models are named after it.

    >>> weights(8_030_261_248), weights(134_515_008), weights(159_000), weights(None)
    ('8.0B', '135M', '159K', '-')
    """
    if count is None:
        return UNKNOWN
    for least, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= least:
            return f"{count / least:.1f}{unit}" if unit == "B" else f"{count / least:.0f}{unit}"
    return str(count)


def _loaded(model: Answer) -> str:
    """The answer to "is it in memory", in a word.

    >>> _loaded({"leaves": "Ollama sends it to h", "loaded": False}), _loaded({"leaves": "", "loaded": True})
    ('elsewhere', 'yes')
    """
    if model.get("leaves"):
        return "elsewhere"
    return UNKNOWN if model["loaded"] is None else "yes" if model["loaded"] else "no"


def _shown(view: Answer) -> str:
    created = time.strftime("%Y-%m-%d", time.gmtime(view["created"])) if view["created"] else ""
    seen = ago(view["seen_at"], time.time())
    agents = [
        f"{one['name']} ({one['status']}, tier {one['tier']}, tenant {one['tenant']}, as {one['asks']})"
        for one in view["agents"]
    ]
    told = [
        ("Model", view["name"]),
        ("Size", size(view["size_bytes"])),
        ("Quantization", view["quantization"]),
        ("Parameters", number(view["parameters"]) if view["parameters"] is not None else ""),
        ("Created", created),
        ("Owned by", view["owned_by"]),
        ("Adapter on", view["parent"]),
        ("Loaded", _loaded(view)),
        ("Leaves the box", view.get("leaves", "")),
        ("Base", view["base"]),
        ("Variants", ", ".join(view["variants"])),
        ("Adapters", ", ".join(view["adapters"])),
        ("Aliases", ", ".join(view["aliases"])),
        ("Given to", f"tier {', '.join(view['tiers'])}" if view["tiers"] else "no tier"),
        *(("Agent" if place else "Agents", line) for place, line in enumerate(agents)),
        ("File", view["file"]),
        ("Backend", f"{view['backend']}, {seen}" if view["backend"] else "none"),
        ("Stale", view["stale"]),
    ]
    return fields(told)


def _pulled(job: Answer) -> str:
    if job["state"] == "running":
        return f"job {job['id']}: {one_line(job['progress'])}"
    result = job["result"]
    left = f"; left out: {', '.join(result['left_out'])}" if result.get("left_out") else ""
    where = f" in {result['file']}" if result["file"] else ""
    much = f", {size(result['size_bytes'])}" if result["size_bytes"] else ""
    return one_line(f"{result['model']} is there{where}{much}, after {span(result['took_s'])}{left}")


def _removed(job: Answer) -> str:
    if job["state"] == "running":
        return f"job {job['id']}: {one_line(job['progress'])}"
    freed = job["result"]["freed_bytes"]
    return one_line(f"{job['result']['model']} is removed" + (f", {size(freed)} are free" if freed else ""))


def _steps(answer: Answer) -> str:
    return "\n".join(one_line(step) for step in answer["steps"])
