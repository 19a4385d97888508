"""Templates: processes with their packages imported, which agents are forked from."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.call import COMPLETED_WITHIN_S, Answer, CommandCall, completed
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, ago, fields, number, one_line, size, span
from hive.client.client import Client
from hive.errors import UsageError

HEADERS = ("TEMPLATE", "STATE", "STAGE", "AGENTS", "HELD", "SHARED", "SAVED", "PACKAGES", "OWNER", "WHY")
DROPPED = ("OWNER", "PACKAGES", "STAGE", "SHARED", "HELD", "WHY")
"""Columns in the order in which they give way on a narrow terminal."""
COLOURS = {"ready": "32", "failed": "1;31", "ended": "1;31", "none": "2"}
"""Of a state; any other one is on its way from one to another: yellow."""
START_S = 160.0


def template_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completion of a template."""
    return completed(ctx, incomplete, _all)


def _all(client: Client) -> list[Answer]:
    return list(client.get("/api/templates", timeout_s=COMPLETED_WITHIN_S)["templates"])


TemplateName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="As `hive template` names it.", autocompletion=template_names, show_default=False
    ),
]


def list_templates(call: CommandCall) -> None:
    """Lists the templates: how each is, how many agents were forked from it, and what that saves.

    HELD is the memory of the template itself, SHARED the part of it that its agents have too, SAVED what they would
    hold besides were they ordinary programs, less what the template holds. PACKAGES is the age of the youngest change
    among its packages; `stale` says that one, or its script, changed since it started. STAGE says where it stops: with
    its packages imported, or ready, inside its agents' script at `hive.ready()`.

    Examples:
      hive template
      hive template list --json | jq -r '.templates[] | select(.is_stale) | .name'
    """
    answer = call.client.get("/api/templates")
    call.show("template.list", answer, lambda: _listed(answer["templates"]))


def show(call: CommandCall, name: TemplateName) -> None:
    """Shows one template: what hive.conf says of it, its process, its agents, and what they share.

    Examples:
      hive template show langgraph
      hive template show langgraph --json | jq '{state, why, saved_bytes}'
    """
    answer = call.client.get(_path_of(name))
    call.show("template.show", answer, lambda: _shown(answer))


def restart(call: CommandCall, name: TemplateName) -> None:
    """Starts a template anew, as after its packages were updated, or where it has failed.

    Agents that start from now on are forked from the new process. Those of the old one stay with it, and with its
    packages, until they are started again themselves.

    Examples:
      hive template restart langgraph
      hive template restart langgraph && hive agent restart alice
    """
    answer = call.client.post(f"{_path_of(name)}/restart", timeout_s=START_S)
    call.show("template.restart", answer, lambda: _restarted(answer))


def _path_of(name: str) -> str:
    if not name:
        raise UsageError("an empty name names no template", hint="hive template list")
    return f"/api/templates/{quote(name, safe='')}"


def _listed(templates: list[Answer]) -> str:
    if not templates:
        return "there is no template: hive.conf describes them, [template NAME]"
    now = time.time()
    rows = [
        [
            template["name"],
            state_of_template(template),
            template["stage"],
            agents_of(template),
            size(template["held_bytes"]) if template["held_bytes"] else UNKNOWN,
            size(template["shared_bytes"]) if template["shared_bytes"] else UNKNOWN,
            saved_in_words(template),
            ago(template["packages_at"], now) or UNKNOWN,
            template["owner"] or UNKNOWN,
            template["why"],
        ]
        for template in templates
    ]
    cells = [[one_line(cell) for cell in row] for row in rows]
    return fitted(HEADERS, cells, drop=DROPPED, prose="WHY", colour=colour_of)


def state_of_template(template: Answer) -> str:
    """
    >>> state_of_template({"state": "ready", "is_stale": True}), state_of_template({"state": "none", "is_stale": False})
    ('ready, stale', 'none')
    """
    return f"{template['state']}, stale" if template["is_stale"] else str(template["state"])


def agents_of(template: Answer) -> str:
    """The agents that were forked from it, of those that name it.

    >>> agents_of({"agents": ["a"], "named_by": ["a", "b"], "older": []})
    '1 of 2'
    >>> agents_of({"agents": ["a", "b"], "named_by": ["a", "b"], "older": ["a"]})
    '2 of 2, 1 older'
    """
    older = f", {number(len(template['older']))} older" if template["older"] else ""
    return f"{number(len(template['agents']))} of {number(len(template['named_by']))}{older}"


def saved_in_words(template: Answer) -> str:
    """
    >>> saved_in_words({"saved_bytes": -(1 << 20), "held_bytes": 1 << 20, "shared_bytes": 0})
    '-1.0 MiB'
    """
    if not template["held_bytes"]:
        return UNKNOWN
    saved = template["saved_bytes"]
    return size(saved) if saved >= 0 else f"-{size(-saved)}"


def colour_of(header: str, cell: str) -> str:
    return COLOURS.get(cell.partition(",")[0], "33") if header == "STATE" else ""


def _shown(template: Answer) -> str:
    now = time.time()
    limit = f"{template['memory_mb']} MiB at most" if template["memory_mb"] else ""
    block = "" if template["first_uid"] is None else f"{template['first_uid']} to {_last_uid(template)}"
    pairs = [
        ("Template", template["name"]),
        ("State", state_of_template(template) + (f" for {span(now - template['since'])}" if template["since"] else "")),
        ("Why", template["why"]),
        ("Owner", template["owner"] and f"tenant {template['owner']}"),
        ("Python", template["python"] or "described no more"),
        ("Imports", ", ".join(template["imports"])),
        ("Warmed by", ", ".join(template["warm"])),
        ("Stage", f"ready, in {template['script']}" if template["script"] else template["stage"]),
        ("Environment", ", ".join(template["env"])),
        ("Process", "" if template["pid"] is None else f"pid {template['pid']}"),
        ("Users", block),
        ("Held", ", ".join(filter(None, (size(template["held_bytes"]), limit, "pinned" if template["pin"] else "")))),
        ("Shared", size(template["shared_bytes"])),
        ("Saved", saved_in_words(template)),
        ("Packages", f"changed {ago(template['packages_at'], now)}" if template["packages_at"] else ""),
        ("Stale", f"hive template restart {template['name']}" if template["is_stale"] else ""),
        ("Agents", ", ".join(template["agents"])),
        ("Of an older", ", ".join(template["older"])),
        ("Ordinary", ", ".join(sorted({*template["named_by"]} - {*template["agents"]}))),
    ]
    return fields([(name, one_line(value)) for name, value in pairs])


def _last_uid(template: Answer) -> int:
    return int(template["first_uid"]) + int(template["uids"]) - 1


def _restarted(template: Answer) -> str:
    if template["state"] == "failed":
        return one_line(f"{template['name']} does not start: {template['why']}; its agents are ordinary programs")
    stay = f"; {', '.join(template['older'])} stay with the old one" if template["older"] else ""
    return one_line(f"{template['name']} is {template['state']}, for agents that start from now on{stay}")
