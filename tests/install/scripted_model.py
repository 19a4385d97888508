"""A stand-in for `hive run-model ID --grant … --socket … --state-dir …`: the real supervisor of a scripted server.

The server's flags are in /srv/flags/ID. The grant must be there, or come, and be readable, as for the real one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from hive.backends.command_line import Launch
from hive.errors import HiveError
from hive.host.notify import Notifier
from hive.link.slots import SlotGrant, mark_of
from hive.worker.lifeline import Lifeline
from hive.worker.profile import TimeoutProfile
from hive.worker.supervisor import supervise
from hive.worker.waiting import is_awaited, wait_for_grant

SERVER = Path(__file__).parents[1] / "fakes" / "scripted_server.py"


def main(words: list[str]) -> int:
    named = dict(zip(words[2::2], words[3::2], strict=True))
    slot, socket, state = words[1], Path(named["--socket"]), Path(named["--state-dir"])
    notifier = Notifier(os.environ, pid=os.getpid())
    line = Lifeline.forked(grace_s=2.0)
    file = Path(named["--grant"])
    if is_awaited(file, mark_of(file)) and not wait_for_grant(file, mark_of(file), warden=line.process.pid):
        return 0
    grant = msgspec.json.decode(file.read_bytes(), type=SlotGrant)
    print(f"the supervisor of {slot} begins with {grant.accounts}", flush=True)
    flags = Path("/srv/flags", slot).read_text().split()
    server = [sys.executable, "-I", "-S", str(SERVER), "--socket", str(socket), "--pids", str(state / "pids"), *flags]
    try:
        made = Launch(tuple(server), dict(os.environ), (), socket)
        return asyncio.run(supervise(made, TimeoutProfile(), notifier, line=line))
    except HiveError as error:
        print(f"refused: {error.message}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
