"""Models: which of those that are there a request is given."""

from __future__ import annotations

from typing import Annotated

import typer

from hive.cli.call import Answer, Call
from hive.cli.text import one_line
from hive.errors import NotFound, UsageError

TIERS = ("low", "medium", "high")


def route(
    call: Call,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As a request names it.", show_default=False)],
    tier: Annotated[str, typer.Option(metavar="|".join(TIERS), help="Of an agent of this tier.")] = "medium",
) -> None:
    """Explains which model a request is given, step by step. Nothing is asked of the model.

    Exit code 3 where the request would be refused.

    Examples:
      hive model route llama3.2 --tier low
      hive model route llama3.2 --tier low --json | jq -r .model
    """
    if tier not in TIERS:
        raise UsageError(f"there is no tier {tier!r}", hint=f"the tiers are {', '.join(TIERS)}")
    answer = call.client.get("/api/models/route", model=model, tier=tier)
    if not answer["model"]:
        for step in answer["steps"][:-1]:
            call.say(one_line(step))
        raise NotFound(answer["why"], hint=answer["hint"])
    call.show("model.route", answer, lambda: _steps(answer))


def _steps(answer: Answer) -> str:
    return "\n".join(one_line(step) for step in answer["steps"])
