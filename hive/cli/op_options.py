"""Options of every governed order: the word of its signers, or a reason to do without."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated

import typer

from hive.errors import NotFound, NotPermitted, UsageError

FILE_MAX_BYTES = 12 * 1024
"""Of an operation: as base64url it has 16 Ki characters, and no box takes more."""

OpToken = Annotated[
    Path | None,
    typer.Option("--op-token", metavar="FILE", help="The word of its signers, from hive op sign.", show_default=False),
]
BreakGlass = Annotated[
    str,
    typer.Option(
        "--break-glass", metavar="REASON", help="Without their word: root alone, and noted.", show_default=False
    ),
]


def headers_of(op_token: Path | None, break_glass: str) -> dict[str, str]:
    """The headers an order brings with it. Raises UsageError, NotFound, NotPermitted."""
    if op_token is not None and break_glass:
        raise UsageError("either --op-token or --break-glass")
    if op_token is not None:
        return {"X-Hive-Op-Token": token_in(op_token)}
    if break_glass and not (break_glass.isprintable() and break_glass.isascii()):
        raise UsageError("--break-glass: a line of printable ASCII characters")
    return {"X-Hive-Break-Glass": break_glass} if break_glass else {}


def token_in(path: Path) -> str:
    """The token in a file, as it is sent. Raises NotFound, NotPermitted, UsageError."""
    data = read(path, FILE_MAX_BYTES, "an operation token")
    return base64.urlsafe_b64encode(data.strip()).decode().rstrip("=")


def read(path: Path, most: int, what: str) -> bytes:
    """The file. Raises NotFound, NotPermitted, UsageError where it is larger."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except OSError as error:
        raise NotPermitted(f"cannot read {path}: {error.strerror}") from None
    if len(data) > most:
        raise UsageError(f"{path} is larger than {what} is")
    return data
