"""The part of the API that runs programs inside agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.exec_stream import Upgraded
from hive.api.params import Flag, Number, Text, Words, named
from hive.api.routes import STREAM, RouteRow
from hive.control.executing import ExecOrder, about
from hive.domain import Role
from hive.errors import BadRequest
from hive.link.execution import TerminalSize
from hive.shapes.exec_frames import PROTOCOL

if TYPE_CHECKING:
    from hive.api.services import Services

WORDS_MAX = 1000
SIDE_MAX = 10_000
COMMAND = Words("command", "The program and its arguments, each a parameter of its own.", most=WORDS_MAX)
INPUT = Flag("stdin", "1: its stdin is what its caller sends; else it is at its end.")
TERMINAL = Flag("tty", "1: it gets a terminal.")
ROWS = Number("rows", "Of that terminal.", default=24, most=SIDE_MAX, least=1)
COLUMNS = Number("columns", "Of that terminal.", default=80, most=SIDE_MAX, least=1)
KIND = Text("term", "What that terminal is (`TERM`).")


class ExecApi:
    """The one handler."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                "POST",
                "/api/agents/{ref}/exec",
                Role.OPERATOR,
                "exec",
                self.exec,
                "Run a program inside an agent.",
                STREAM,
                query=(COMMAND, INPUT, TERMINAL, ROWS, COLUMNS, KIND),
                statuses=(101,),
                errors=(501,),
            )
        ]

    async def exec(self, request: Request) -> Response:
        """It wakes the agent, and keeps it awake while it runs: with the agent's user, control group, namespaces and
        filters, and no right the agent has not. Which programs there may be, the policy of the host says.

        The request asks for an upgrade (`Connection: Upgrade`, `Upgrade: hive-exec`) and waits for 101. Then both sides
        send frames: a byte for the kind, four for the length (big-endian), the payload, 64 KiB at most. To Hive: 0, a
        piece of stdin, empty for its end; 4, the size of the terminal, rows and columns of two bytes. From Hive: 1 and
        2, pieces of stdout and stderr; 3, so many bytes of stdin were taken (four bytes); last 5, JSON with `exit_code`
        (128 and the signal for one that ended so), or an error as of any answer. At most 256 KiB of stdin may be under
        way that were not taken. The program ends with the connection.
        """
        command = COMMAND.of(request)
        if request.headers.get("upgrade", "").lower() != PROTOCOL:
            raise BadRequest(f"a program is run on a connection of its own: Upgrade: {PROTOCOL}")
        terminal = None
        if TERMINAL.of(request):
            kind = KIND.of(request) or TerminalSize().kind
            terminal = TerminalSize(rows=ROWS.of(request), columns=COLUMNS.of(request), kind=kind[:64])
        order = ExecOrder(command, has_input=INPUT.of(request), terminal=terminal)
        note(request, **about(order))
        return Upgraded(await self._services.executor.begin(named(request), order, actor(request)))
