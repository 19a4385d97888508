"""`hive explain`: a code's meaning, causes and cures."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer

from hive.cli.call import CommandCall
from hive.cli.terminal import fitted


def code_names(ctx: typer.Context, incomplete: str) -> list[str]:  # noqa: ARG001 - as typer calls it
    """Completion of a code."""
    from hive.explain.book import every_code

    return [code for code in every_code() if code.startswith(incomplete)]


def explain(
    call: CommandCall,
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]",
            help="As an error has it in brackets, or an HTTP status, or an exit code.",
            autocompletion=code_names,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Explains the code of an error: its meaning, its usual causes, and what to do.

    Without a code all are listed, each with a sentence; with an HTTP status or an exit code those that carry it. No
    Hive has to run. An unknown code is exit code 3, with the nearest ones.

    Examples:
      hive explain not_found
      hive explain 503
      hive explain --json | jq -r '.codes[].code'
    """
    from hive.explain.book import EXITS, every_code, find, number_of
    from hive.explain.page import WIDTH, as_json, sentence_of, text_of

    found = every_code() if code is None else find(code)
    number = None if code is None else number_of(code)
    meaning = "" if number is None else EXITS.get(number, "")
    is_one = code is not None and number is None

    def text() -> str:
        if is_one:
            width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
            return f"{found[0]}\n\n{text_of(found[0], width)}"
        head = [f"Exit code {number}: {meaning}", ""] if meaning else []
        rows = [[one, sentence_of(one)] for one in found]
        return "\n".join([*head, *([fitted(["CODE", "MEANING"], rows, prose="MEANING")] if rows else [])]).rstrip()

    call.show("explain", {"meaning": meaning, "codes": [as_json(one) for one in found]}, text)
