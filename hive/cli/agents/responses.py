"""An agent's kept responses: how much there is, and deleting it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from hive.cli.call import AgentName, Answer, CommandCall
from hive.cli.text import ago, fields, number, size
from hive.client.client import path_of
from hive.terminal_text import counted


def responses(
    call: CommandCall,
    name: AgentName,
    delete: Annotated[bool, typer.Option("--delete", help="Delete all of them instead.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Shows how much is kept of an agent's responses (/v1/responses), for previous_response_id. Never what is in them.

    Nothing is kept unless an operator says how much may be (responses_kept_mb in hive.conf). They are deleted with
    their agent, and are in a backup with --with-responses only.

    Examples:
      hive agent responses alice
      hive agent responses alice --delete --yes
    """
    path = path_of(name, "responses")
    with call.about(name):
        if not delete:
            answer = call.client.get(path)
            call.show("agent.responses", answer, lambda: _shown(answer))
            return
        call.confirm(f"Delete what is kept of {name}'s responses?", yes=yes)
        answer = call.client.delete(path)
    call.show("agent.responses", answer, lambda: _deleted(answer))


def _deleted(answer: Answer) -> str:
    """
    >>> _deleted({"deleted": 1, "name": "ann"}), _deleted({"deleted": 0, "name": "ann"})
    ('1 response of ann is deleted', '0 responses of ann are deleted')
    """
    name = answer["name"]
    return counted(answer["deleted"], f"response of {name} is deleted", f"responses of {name} are deleted")


def _shown(answer: Answer) -> str:
    oldest_at, most = answer["oldest_at"], answer["most_bytes"]
    bound = (
        f"{size(most)} for {counted(answer['most_days'], 'day')}"
        if most
        else "none are kept (proxy.responses_kept_mb is 0)"
    )
    return fields(
        [
            ("Responses", number(answer["responses"])),
            ("Size", size(answer["bytes"])),
            ("Oldest", "" if oldest_at is None else ago(oldest_at, time.time())),
            ("At most", bound),
        ]
    )
