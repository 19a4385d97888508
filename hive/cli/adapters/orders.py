"""Commands of adapters: listing and bringing them, loading, unloading and removing them."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall, completed, model_names
from hive.cli.following import followed
from hive.cli.model import NoWait
from hive.cli.op_options import BreakGlass, OpToken, headers_of
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, ago, fields, one_line, size, span
from hive.errors import NotFound, UsageError
from hive.terminal_text import counted

ORDER_S = 60.0
CANCEL_S = 60.0
SHORT = 12
"""Digits of a digest that are shown in a list."""
PULL = "adapter.pull"


def adapter_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completion of an adapter's name."""
    return completed(ctx, incomplete, lambda client: client.get("/api/adapters", timeout_s=0.2)["adapters"])


AdapterName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="As `hive adapter list` names it.", autocompletion=adapter_names, show_default=False
    ),
]
Digest = Annotated[
    str,
    typer.Option("--digest", metavar="HEX", help="The build whose digest begins so.", show_default=False),
]


def list_adapters(call: CommandCall) -> None:
    """Lists the adapters: on which model, which build of each is loaded, and whose key signed it.

    A request asks for an adapter by its name, as for a model.

    Examples:
      hive adapter list
      hive adapter list --json | jq -r '.adapters[] | select(.served) | .name'
    """
    answer = call.client.get("/api/adapters")
    call.show("adapter.list", answer, lambda: _listed(answer, time.time()))
    if not answer["enabled"]:
        call.say("none can be brought: [adapters] dir, the directory they may come from, is empty")


def show(call: CommandCall, name: AdapterName) -> None:
    """Shows all that is known of one adapter: its builds, their files, and what is loaded.

    Examples:
      hive adapter show legal
      hive adapter show legal --json | jq -r .served.digest
    """
    view = call.client.get(_path_of(name))
    call.show("adapter.show", view, lambda: _shown(view, time.time()))


def pull(
    call: CommandCall,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A GGUF file or a directory, below [adapters] dir.", show_default=False),
    ],
    base: Annotated[
        str,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The model that it is an adapter on.",
            autocompletion=model_names,
            show_default=False,
        ),
    ] = "",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What it is called; else as its path is.")] = "",
    no_wait: NoWait = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="End the pull that is under way.")] = False,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Brings an adapter from the directory that [adapters] dir names: copied, checked as a copy, installed whole.

    One GGUF file for llama-server, or a directory with adapter_config.json and *.safetensors for vLLM; beside it
    model.sig, its signature (hive adapter sign). Nothing is loaded by it. Ctrl-C ends the looking, not the pull.

    Examples:
      hive adapter pull legal-v2 --base qwen3-8b --name legal
      hive adapter pull tone.gguf --base llama3.2
      hive adapter pull legal-v2 --cancel
    """
    client = call.client
    if cancel:
        job = client.delete(f"/api/jobs/{quote(_under_way(call, path, name))}", timeout_s=CANCEL_S)
        call.show("adapter.pull", job, lambda: one_line(job["error"]["message"] if job["error"] else _pulled(job)))
        return
    if not base:
        raise UsageError("--base: which model is it an adapter on?", hint="hive model list")
    order = {"path": path, "base": base, **({"name": name} if name else {})}
    job = client.post("/api/adapters", order, timeout_s=ORDER_S, headers=headers_of(op_token, break_glass))
    if not no_wait:
        goes_on = f"the pull goes on: `hive adapter pull {path} --cancel` ends it, `hive adapter list` shows it"
        job = followed(call, job, goes_on=goes_on)
    call.show("adapter.pull", job, lambda: _pulled(job))
    if job["state"] == "done":
        call.say(f"next: hive adapter load {job['result']['model']}")


def load(
    call: CommandCall,
    name: AdapterName,
    digest: Digest = "",
    no_wait: NoWait = False,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Loads an adapter, the build that was installed last. Requests for its name are answered by it from then on.

    Another build that is loaded answers until then, and leaves once its last request has ended. No request fails, and
    the model itself serves on. Ctrl-C ends the looking, not the load.

    Examples:
      hive adapter load legal
      hive adapter load legal --digest 3f9a0c
      hive adapter load legal --no-wait --json | jq -r .id
    """
    order, headers = {"digest": digest}, headers_of(op_token, break_glass)
    job = call.client.post(f"{_path_of(name)}/load", order, timeout_s=ORDER_S, headers=headers)
    if not no_wait:
        goes_on = f"the load goes on: `hive adapter show {name}` shows how it is"
        job = followed(call, job, goes_on=goes_on)
    call.show("adapter.load", job, lambda: _told(job, "loaded"))


def unload(
    call: CommandCall,
    name: AdapterName,
    no_wait: NoWait = False,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Unloads an adapter. Requests it works on end first; what later ones get says [adapters] fallback.

    It stays installed.

    Examples:
      hive adapter unload legal
    """
    headers = headers_of(op_token, break_glass)
    job = call.client.post(f"{_path_of(name)}/unload", timeout_s=ORDER_S, headers=headers)
    if not no_wait:
        job = followed(call, job, goes_on="it is unloaded all the same")
    call.show("adapter.unload", job, lambda: _told(job, "unloaded"))


def remove(
    call: CommandCall,
    name: AdapterName,
    digest: Digest = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Removes an adapter that is installed: all of its builds, or one. Not while it is loaded.

    Examples:
      hive adapter remove legal
      hive adapter remove legal --digest 3f9a0c --yes
    """
    client, headers = call.client, headers_of(op_token, break_glass)
    client.get(_path_of(name))  # a user asked below should not learn afterwards that there is none
    what = f"the build {digest} of the adapter {name}" if digest else f"the adapter {name}"
    call.confirm(f"Remove {one_line(what)}?", yes=yes)
    query = {"digest": digest} if digest else {}
    removed = client.delete(_path_of(name), timeout_s=ORDER_S, headers=headers, **query)
    call.show("adapter.remove", removed, lambda: _removed(removed))


def keys(call: CommandCall) -> None:
    """Lists the keys that adapters are signed with: which are trusted, which are revoked, and what each has signed.

    Examples:
      hive adapter keys
    """
    answer = call.client.get("/api/adapters/keys")
    call.show("adapter.keys", answer, lambda: _keys(answer))


def _path_of(name: str) -> str:
    if not name:
        raise UsageError("an empty name names no adapter")
    return f"/api/adapters/{quote(name, safe='')}"


def _under_way(call: CommandCall, path: str, name: str) -> str:
    """The id of the running pull of this adapter. Raises NotFound."""
    meant = {name or path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")}
    for job in call.client.get("/api/jobs", limit=1000)["jobs"]:
        if job["kind"] == PULL and job["state"] == "running" and job["about"] in meant:
            return str(job["id"])
    raise NotFound(f"no pull of {path} is under way")


def _listed(answer: Answer, now: float) -> str:
    if not answer["adapters"]:
        return "there is no adapter: hive adapter pull PATH --base MODEL"
    heads = ["ADAPTER", "BASE", "STATE", "DIGEST", "RANK", "SIZE", "SIGNED BY", "SINCE"]
    rows, whys = list[list[str]](), list[str]()
    for adapter in answer["adapters"]:
        builds = adapter["installed"]
        served = adapter["served"]
        digest = served["digest"] if served else builds[0]["digest"] if builds else ""
        build = next((one for one in builds if one["digest"] == digest), None)
        rows.append(
            [
                adapter["name"],
                adapter["base"],
                adapter["state"],
                digest[:SHORT] or UNKNOWN,
                str(build["rank"]) if build else UNKNOWN,
                size(build["size_bytes"]) if build else UNKNOWN,
                _signer(build) if build else UNKNOWN,
                ago(served["since"], now) if served else UNKNOWN,
            ]
        )
        if adapter["last_error"]:
            whys.append(one_line(f"{adapter['name']}: {adapter['last_error']}"))
        elif build and build["why_not"]:
            whys.append(one_line(f"{adapter['name']}: {build['why_not']}"))
        if served and builds and builds[0]["digest"] != digest:
            whys.append(f"{adapter['name']}: {builds[0]['digest'][:SHORT]} is installed, and not loaded yet")
    return "\n".join([fitted(heads, rows, drop=["SINCE", "SIZE", "RANK", "SIGNED BY"]), *whys])


def _signer(build: Answer) -> str:
    """
    >>> _signer({"signature": "verified", "key_id": "3f9a0c11223344"}), _signer({"signature": "unsigned", "key_id": ""})
    ('3f9a0c112233', 'unsigned')
    """
    return str(build["key_id"][:SHORT]) if build["signature"] == "verified" else "unsigned"


def _shown(view: Answer, now: float) -> str:
    served = view["served"]
    told = [
        ("Adapter", view["name"]),
        ("Base", view["base"]),
        ("State", view["state"]),
        ("Loaded", f"{served['digest'][:SHORT]} at {served['where']}, {ago(served['since'], now)}" if served else ""),
        ("Charged", size(served["charged_bytes"]) if served and served["charged_bytes"] is not None else ""),
        ("Ordered by", view["deployed_by"]),
        ("Approved by", view["approved_by"]),
        ("Last error", view["last_error"]),
        ("Files", view["path"]),
        *(("File", f"{file['path']}, {size(file['size_bytes'])}, {file['sha256'][:SHORT]}") for file in view["files"]),
    ]
    heads = ["DIGEST", "FORMAT", "RANK", "SIZE", "SIGNED BY", "INSTALLED", "WHY NOT"]
    rows = [
        [
            build["digest"][:SHORT],
            build["format"],
            str(build["rank"]),
            size(build["size_bytes"]),
            _signer(build),
            ago(build["installed_at"], now),
            build["why_not"] or UNKNOWN,
        ]
        for build in view["installed"]
    ]
    text = fields([(label, one_line(value)) for label, value in told])
    return f"{text}\n\n{fitted(heads, rows, drop=['WHY NOT', 'FORMAT'])}" if rows else text


def _keys(answer: Answer) -> str:
    if not answer["keys"]:
        return f"there is no key in {answer['dir']}: hive adapter trust FILE"
    rows = [
        [key["id"], "revoked" if key["revoked"] else "trusted", ", ".join(key["adapters"]) or UNKNOWN]
        for key in answer["keys"]
    ]
    return fitted(["KEY", "STATE", "SIGNED"], rows, drop=["SIGNED"])


def _pulled(job: Answer) -> str:
    if job["state"] == "running":
        return f"job {job['id']}: {one_line(job['progress'])}"
    result = job["result"]
    signed = f"signed by {result['key_id'][:SHORT]}" if result["signature"] == "verified" else "unsigned"
    much = f"rank {result['rank']}, {size(result['size_bytes'])}, {signed}"
    return one_line(f"{result['model']}@{result['digest'][:SHORT]} on {result['base']} is installed: {much}")


def _removed(removed: Answer) -> str:
    """
    >>> _removed({"name": "legal", "digests": ["a", "b"], "freed_bytes": 2048})
    '2 builds of legal are removed, 2.0 KiB are free'
    """
    count = len(removed["digests"])
    builds, verb, freed = counted(count, "build"), "is" if count == 1 else "are", size(removed["freed_bytes"])
    return one_line(f"{builds} of {removed['name']} {verb} removed, {freed} are free")


def _told(job: Answer, done: str) -> str:
    """
    >>> _told({"state": "done", "result": {"model": "a", "digest": "3f", "changed": True, "took_s": 1.0}}, "loaded")
    'a@3f is loaded, after 1s'
    >>> _told({"state": "done", "result": {"model": "a", "changed": False}}, "unloaded")
    'a was unloaded already'
    """
    if job["state"] == "running":
        return f"job {job['id']}: {one_line(job['progress'])}"
    result = job["result"]
    name = f"{result['model']}@{result['digest'][:SHORT]}" if "digest" in result else result["model"]
    if not result.get("changed", True):
        return one_line(f"{name} was {done} already")
    took = f", after {span(result['took_s'])}" if "took_s" in result else ""
    return one_line(f"{name} is {done}{took}")
