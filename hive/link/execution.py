"""Messages between daemon and helper about a program that is run inside an agent."""

from __future__ import annotations

import msgspec

from hive.link.message import LinkMessage


class TerminalSize(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal for a program: its size, and its kind (`TERM`)."""

    rows: int = 24
    columns: int = 80
    kind: str = "xterm"


class Execute(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Run `command` inside a running agent: its user, groups, control group, namespaces and filters, no more.

    `run` names it from now on. Answer: `Executing`, with its descriptors; `Executed` is told once it has ended. It ends
    with this link. `not_supported` where this kind of agent has no way in, `not_permitted` where the policy does not
    name the program, `not_found` where it is not there, `wrong_state` where the agent does not run or sleeps.
    """

    agent: str
    run: str
    command: list[str]
    terminal: TerminalSize | None = None


class Executing(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Carries the caller's descriptors. `form`: `pipes` (stdin, stdout, stderr), `terminal` (one, both ways), `engine`
    (one connection of the Docker engine: written is stdin, read are its frames, or plain bytes of a terminal)."""

    form: str


class EndExecution(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Kill the program and what it started. Answer: `Done` once nothing of it is left; of an unknown one too."""

    run: str


class Resize(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The terminal of this program has another size. Answer: `Done`."""

    run: str
    rows: int
    columns: int


class Executed(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The program ended, and nothing it started is left. `exit_code` as a shell counts, None if unknown."""

    run: str
    exit_code: int | None
