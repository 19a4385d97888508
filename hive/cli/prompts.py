"""System prompts: the agents that share them, and their state at the backend."""

from __future__ import annotations

import time
from typing import Any

from hive.cli.call import Answer, CommandCall
from hive.cli.terminal import fitted, legend
from hive.cli.text import ago, number, one_line

NAMES_SHOWN = 3
DROPPED = ("TENANTS", "BYTES", "REUSED", "WARM", "MODEL", "STATE")
"""Columns that give way where the terminal is narrow, the first one first."""
HEADERS = ["PROMPT", "BYTES", "AGENTS", "TENANTS", "MODEL", "WARM", "REUSED", "STATE"]


def prompts(call: CommandCall) -> None:
    """Lists the system prompts of living agents: who shares one, and whether the backend has read it already.

    Agents of one tenant (or cache_group) share what the backend keeps of a prompt. The text is never shown here. REUSED
    are tokens that the backend had kept for these agents' requests, since it is up.

    Examples:
      hive model prompts
      hive model prompts --json | jq '.prompts[] | select(.warm_since == null) | .agents'
    """
    answer = call.client.get("/api/prompts")
    call.show("model.prompts", answer, lambda: _listed(answer))
    legend(call, "REUSED counts since the backend is up" if answer["prompts"] else "")


def _listed(answer: Answer) -> str:
    if not answer["prompts"]:
        return "no living agent has a system prompt; `hive agent create --system-prompt-file FILE` gives it one"
    return fitted(HEADERS, [_row(prompt) for prompt in answer["prompts"]], drop=DROPPED, prose="STATE")


def _row(prompt: dict[str, Any]) -> list[str]:
    agents: list[str] = prompt["agents"]
    more = f" and {len(agents) - NAMES_SHOWN} more" if len(agents) > NAMES_SHOWN else ""
    return [
        prompt["hash"],
        number(prompt["bytes"]),
        one_line(", ".join(agents[:NAMES_SHOWN]) + more),
        one_line(", ".join(prompt["tenants"])),
        one_line(prompt["model"]) or "-",
        "-" if prompt["warm_since"] is None else ago(prompt["warm_since"], time.time()),
        number(prompt["tokens_reused"]),
        one_line(prompt["why"]),
    ]
