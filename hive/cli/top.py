"""`hive top`: the whole box, live or once."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from hive.cli.call import CommandCall


def top(
    call: CommandCall,
    once: Annotated[bool, typer.Option("--once", "-1", help="Print it once; so it does where no terminal is.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="S", min=0.2, help="Seconds between looks.")] = 1.0,
    readonly: Annotated[bool, typer.Option("--readonly", help="Without the keys that change something.")] = False,
    no_unicode: Annotated[bool, typer.Option("--no-unicode", help="ASCII only.")] = False,
) -> int:
    """Shows every agent, the backend and the queue on one screen. Live, with keys that pause, resume, start and stop.

    Above the agents: GPUs by who holds their memory, the models that share it, tokens a second, each tenant's queue.
    Where the daemon is down it shows what SQLite says, and that it does. NO_COLOR is honoured.

    Examples:
      hive top
      hive top --readonly --interval 5
      hive top --once
      hive top --json | jq '.agents[] | select(.status == "paused") | .name'
    """
    import msgspec

    from hive.paths import api_sockets, refuse_missing
    from hive.tui import opening
    from hive.tui.panes import plain
    from hive.tui.source import Source

    sockets = api_sockets(socket=call.socket, state_dir=call.state_dir, uid=os.geteuid(), env=os.environ)
    if call.socket is None:
        refuse_missing(call.state_dir, sockets)
    source = Source(sockets, call.state_dir, uid=os.geteuid(), env=os.environ)
    if once or call.as_json or not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        first = source.look()
        width = shutil.get_terminal_size((120, 40)).columns
        call.show("top", msgspec.to_builtins(first), lambda: plain(first, width, unicode=not no_unicode))
        return 0
    application, first = opening.load(source, sys.stderr, unicode=not no_unicode)
    app = application(source, first, interval_s=interval, readonly=readonly, unicode=not no_unicode)
    app.run()
    return app.return_code or 0
