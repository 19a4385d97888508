"""`hive template check`: starts templates as hive.conf describes them, here and now, without a Hive."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.config import File
from hive.cli.text import one_line, span
from hive.errors import HiveError, NotFound, did_you_mean

if TYPE_CHECKING:
    from hive.settings.templates import TemplateRow

LIMIT_S = 120.0
PACKET_BYTES = 64 * 1024
NOBODY = 65534
"""The user that it runs as where root asks: what packages do at their import is not root's word."""


def check(
    call: CommandCall,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Which; all that are described if none is named.")
    ] = None,
    config: File = None,
) -> int:
    """Checks templates by starting each: its imports are done, it is warmed, and then it ends. One with a script runs
    that until `hive.ready()`.

    It runs as this user, as nobody where this is root; in Hive it has a user, a network and a memory limit of its own
    besides. What cannot start is told with its reason: agents of it would be ordinary programs. Exit code 1 then.

    Examples:
      hive template check
      hive template check langgraph --config ./hive.conf
    """
    from hive.settings.file import load

    loaded = load(config, env=os.environ)
    described = loaded.settings.templates
    for name in names or []:
        if name not in described:
            there = did_you_mean(name, list(described)) or f"there are {', '.join(described)}"
            raise NotFound(
                f"there is no template {name}", hint=there if described else "none is described: [template NAME]"
            )
    found = [_tried(name, described[name]) for name in names or described]
    answer: Answer = {"file": str(loaded.file) if loaded.file else None, "templates": found}
    call.show("template.check", answer, lambda: "\n".join(map(_said, found)) or "no template is described")
    return 0 if all(one["ok"] for one in found) else 1


def _tried(name: str, row: TemplateRow) -> Answer:
    python = os.path.join(row.python, "bin", "python") if os.path.isdir(row.python) else row.python
    try:
        told = _started(python, row)
    except HiveError as error:
        told = {"failed": error.message}
    ready: dict[str, Any] = told.get("ready", {})
    return {
        "name": name,
        "ok": "ready" in told,
        "why": told.get("failed", ""),
        "python": python,
        "script": row.script,
        "stage": "ready" if row.script else "packages",
        "version": ready.get("python", ""),
        "imports_s": ready.get("imports_s"),
        "notes": ready.get("notes", []),
    }


def _started(python: str, row: TemplateRow) -> dict[str, Any]:
    """The first word of the fork server. Raises HiveError."""
    from hive.domain import PROGRAM_PATH
    from hive.host.process import spawn
    from hive.settings.templates import described_env, listed
    from hive.templates import handed_over

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output = os.memfd_create("template", os.MFD_CLOEXEC)
    user = NOBODY if os.geteuid() == 0 else None
    with ours:
        try:
            with theirs, handed_over.opened_fork_server() as program:
                child = spawn(
                    handed_over.command(python, program, theirs.fileno()),
                    env={"PATH": PROGRAM_PATH, "LANG": "C.UTF-8", **described_env(row.env)},
                    cwd="/",
                    uid=user,
                    gid=user,
                    stdout_fd=output,
                    keep_fds=[theirs.fileno(), program],
                )
            try:
                return _answer(ours, row, listed(row.imports), listed(row.warm)) or _last_words(output)
            finally:
                ours.close()
                child.kill()
                child.wait()
        finally:
            os.close(output)


def _answer(line: socket.socket, row: TemplateRow, imports: list[str], warm: list[str]) -> dict[str, Any]:
    """Empty where it ended without a word."""
    order = {"imports": imports, "warm": warm, "user_namespace": False, "own_network": False, "pin": row.pin}
    order |= {"script": row.script, "filter": None}
    line.settimeout(LIMIT_S)
    try:
        line.send(json.dumps({"start": order}).encode())
        data = line.recv(PACKET_BYTES)
        return dict(json.loads(data)) if data else {}
    except TimeoutError:
        late = "its script does not call hive.ready()" if row.script else "its imports do not come to an end"
        return {"failed": f"{late} within {LIMIT_S:g} s"}
    except (ConnectionError, ValueError):
        return {}


def _last_words(output: int) -> dict[str, Any]:
    text = os.pread(output, PACKET_BYTES, max(0, os.fstat(output).st_size - PACKET_BYTES)).decode(errors="replace")
    lines = text.strip().splitlines()
    return {"failed": f"it ended: {lines[-1]}" if lines else "it ended without a word"}


def _said(one: Answer) -> str:
    """
    >>> print(_said({"name": "lg", "ok": False, "why": "import x failed: no", "python": "/v/bin/python"}))
    lg does not start: import x failed: no; its agents would be ordinary programs
    """
    if not one["ok"]:
        return one_line(f"{one['name']} does not start: {one['why']}; its agents would be ordinary programs")
    notes = "".join(f"; {note}" for note in one["notes"])
    version = f"Python {one['version']} ({one['python']})"
    took = span(one["imports_s"])
    how = f"ready in {one['script']} after {took}" if one["script"] else f"its imports took {took}"
    return one_line(f"{one['name']} starts: {version}, {how}{notes}")
