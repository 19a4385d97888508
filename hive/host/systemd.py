"""systemd as PID 1, through its own programs: transient services, what became of them, and their lines in the journal.

The programs speak to it over a private socket, so no D-Bus library is needed and no bus has to run. Written for and
tested with systemd 252. Each call takes 5 to 20 ms.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hive.domain import PROGRAM_PATH
from hive.errors import BadRequest, DependencyDown, HiveError, NotFound, NotPermitted, TimedOut, WrongState
from hive.host.process import exit_code, spawn

BOOTED = Path("/run/systemd/system")
"""There if and only if systemd is PID 1 (sd_booted(3))."""
CALL_S = 10.0
"""Seconds one call may take; systemctl itself waits 25 s for PID 1, and for a job as long as the unit lets it."""
START_S = 30.0
OLDEST = 252
"""An installed Hive's units ask for what this version has first: Debian 12's."""
UNIT_START_S = 90.0
"""For a unit of systemd's own: those that conflict with it are stopped first, which their TimeoutStopSec= bounds."""
KILLED_S = 10.0
"""From SIGKILL to the end of everything in the unit: a large GPU context takes seconds to tear down."""
NOTICES_S = 5.0
"""PID 1 may take so long to notice that a process ended."""
HOW_IT_ENDED = ("LoadState", "MainPID", "ExecMainPID", "ExecMainCode", "ExecMainStatus", "Result")
NOT_EXECUTED = range(200, 244)
LOOK_S = 0.1
IN_THE_WAY = "is destructive"
"""systemd carries out jobs that no other may replace: a stop under way, a shutdown."""
JOBS_S = 15.0
"""Until those are done, where the machine does not go down: a unit that is stopped has mostly ended by then."""

Properties = Sequence[tuple[str, str]]
"""(name, value) as a unit file has them, a name as often as needed."""

_ANSWERS: tuple[tuple[str, type[HiveError]], ...] = (
    ("access denied", NotPermitted),
    ("authentication is required", NotPermitted),
    ("operation not permitted", NotPermitted),
    ("insufficient permissions", NotPermitted),
    (IN_THE_WAY, DependencyDown),
    ("no journal files were", DependencyDown),
    ("failed to connect to bus", DependencyDown),
    ("has not been booted with systemd", DependencyDown),
    ("connection timed out", DependencyDown),
    ("transport endpoint", DependencyDown),
    ("already loaded", WrongState),
    ("already exists", WrongState),
    ("not loaded", NotFound),
    ("could not be found", NotFound),
    ("not found", NotFound),
    ("unknown assignment", BadRequest),
    ("failed to parse", BadRequest),
    ("invalid argument", BadRequest),
)
"""Output of systemd's programs → Hive's error for it; the first that fits counts."""


def is_booted() -> bool:
    """Whether systemd is PID 1 here."""
    return BOOTED.is_dir()


# --- what to say -------------------------------------------------------------------------------------------------


def quoted(word: str | Path) -> str:
    """One word of a value that systemd splits at spaces and colons (systemd.syntax(7), "Quoting").

    >>> quoted("/srv/a b:c"), quoted('/srv/a"b')
    ('"/srv/a b:c"', '"/srv/a\\\\"b"')
    """
    text = os.fspath(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def transient(
    unit: str,
    description: str,
    properties: Properties,
    command: Sequence[str],
    *,
    slice_: str,
    waits: bool = True,
) -> list[str]:
    """The call that makes and starts a transient service; it returns once `command` was executed, or could not be.

    Not `waits`: once systemd has been told.

    systemd replaces `$name` in the command (systemd.service(5)).

    >>> transient("a.service", "An A", [("MemoryMax", "64M")], ["/bin/true"], slice_="b.slice")[3:]
    ['--unit=a.service', '--description=An A', '--slice=b.slice', '--property=MemoryMax=64M', '--', '/bin/true']
    """
    options = [f"--property={name}={value}" for name, value in properties]
    named = [f"--unit={unit}", f"--description={description}", f"--slice={slice_}"]
    how = [] if waits else ["--no-block"]
    return ["systemd-run", "--quiet", "--no-ask-password", *how, *named, *options, "--", *command]


def journal_command(
    unit: str, *, lines: int | None = None, follow: bool = False, only_its_own: bool = False
) -> list[str]:
    """The call that prints what `unit` wrote, and what systemd said of it, oldest first: the text alone.

    `lines`: only so many, the last ones. `only_its_own`: without what systemd said. It takes root or the group
    systemd-journal. This is what stands in for an agent's log file where its output goes to the journal.

    >>> journal_command("a.service", lines=5)
    ['journalctl', '--quiet', '--no-pager', '--output=cat', '--unit=a.service', '--lines=5']
    """
    which = f"_SYSTEMD_UNIT={unit}" if only_its_own else f"--unit={unit}"
    command = ["journalctl", "--quiet", "--no-pager", "--output=cat", which]
    if lines is not None:
        command.append(f"--lines={lines}")
    # `--follow` alone shows this boot only (journalctl(1) 252, which `--boot=all` does not change).
    return [*command, "--follow", "--merge"] if follow else command


# --- what was said -----------------------------------------------------------------------------------------------


def parse_show(text: str) -> dict[str, str]:
    """`Name=value` lines of `systemctl show`; of a name that comes twice the last.

    >>> parse_show("MainPID=7\\nResult=success\\nEnvironment=A=b\\n")["Environment"]
    'A=b'
    """
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def parse_job(text: str, unit: str) -> str:
    """The type of the job that is there for `unit`, by what `systemctl list-jobs` prints; empty where there is none.

    >>> parse_job(" 1413 a.service restart running\\n 1414 b.service stop    waiting\\n", "a.service")
    'restart'
    """
    rows = [line.split() for line in text.splitlines()]
    return next((row[2] for row in rows if len(row) >= 4 and row[1] == unit), "")


def parse_systemd_version(text: str) -> int | None:
    """
    >>> parse_systemd_version("systemd 252 (252.39-1~deb12u2)\\n+PAM +AUDIT\\n"), parse_systemd_version("")
    (252, None)
    """
    words = text.split()
    return int(words[1]) if len(words) > 1 and words[0] == "systemd" and words[1].isdigit() else None


def parse_exposure(text: str) -> float | None:
    """
    >>> parse_exposure("✓ …\\n\\n→ Overall exposure level for a.service: 1.3 OK :-)\\n"), parse_exposure("")
    (1.3, None)
    """
    _, found, said = text.rpartition("Overall exposure level for ")
    number = said.partition(": ")[2].split(" ", 1)[0]
    return float(number) if found and number.replace(".", "", 1).isdigit() else None


def error_of(command: Sequence[str], text: str) -> HiveError:
    """The error a call that failed stands for, by what it printed.

    >>> type(error_of(["systemctl"], "Failed to stop a.service: Unit a.service not loaded.")).__name__
    'NotFound'
    """
    said = text.strip().splitlines()
    message = said[0] if said else f"{command[0]} failed without a word"
    kind = next((kind for words, kind in _ANSWERS if words in message.lower()), HiveError)
    return kind(f"systemd: {message}")


def seconds_since(monotonic_us: str) -> float | None:
    """Seconds since one of systemd's `…TimestampMonotonic=`; None for 0, which is never.

    >>> seconds_since("0"), seconds_since(""), seconds_since("1") > 0
    (None, None, True)
    """
    then = int(monotonic_us) if monotonic_us.isdigit() else 0
    return time.monotonic() - then / 1e6 if then else None


class ServiceEnd(NamedTuple):
    """The end of the main process of a service. `code`: as a shell counts. `why`: systemd's word (`Result=`):
    `success`, `exit-code`, `signal`, `oom-kill`, `timeout` …"""

    code: int
    why: str


def ended_of(shown: Mapping[str, str], pid: int) -> ServiceEnd | None:
    """The end of `pid` by the answer of `show` about its service; None where systemd has not noticed it, or forgot it.

    >>> killed = {"MainPID": "0", "ExecMainPID": "7", "ExecMainCode": "2", "ExecMainStatus": "9", "Result": "oom-kill"}
    >>> ended_of(killed, 7), ended_of({**killed, "MainPID": "7"}, 7)
    (ServiceEnd(code=137, why='oom-kill'), None)
    """
    code, status = shown.get("ExecMainCode", "0"), shown.get("ExecMainStatus", "0")
    if shown.get("MainPID") == str(pid) or shown.get("ExecMainPID") != str(pid) or code == "0":
        return None
    # CLD_EXITED is 1; CLD_KILLED and CLD_DUMPED, 2 and 3, come with a signal's number.
    return ServiceEnd(int(status) if code == "1" else exit_code(-int(status)), shown.get("Result", ""))


def was_executed(shown: Mapping[str, str]) -> bool:
    """Whether the program of a service was executed, by the answer of `show`, though its start is said to have failed.

    PID 1 may hear that a process has ended before it hears that it became the program (seen with 252, busy).
    What systemd could not execute ends with 200 to 243 (systemd.exec(5)).

    >>> ended = {"MainPID": "0", "ExecMainPID": "7", "ExecMainCode": "1", "ExecMainStatus": "127"}
    >>> was_executed(ended), was_executed({**ended, "ExecMainStatus": "226"}), was_executed({"ExecMainPID": "0"})
    (True, False, False)
    """
    ended = ended_of(shown, int(shown.get("ExecMainPID") or 0))
    return ended is not None and ended.code not in NOT_EXECUTED


# --- asking ------------------------------------------------------------------------------------------------------


async def start(unit: str, description: str, properties: Properties, command: Sequence[str], *, slice_: str) -> None:
    """Makes and starts a transient service; returns once `command` was executed in it.

    Raises WrongState where there is such a unit, BadRequest (a property), NotPermitted, DependencyDown, TimedOut,
    HiveError (its namespaces could not be made: its journal says more).
    """
    try:
        await _call_between_jobs(transient(unit, description, properties, command, slice_=slice_), limit_s=START_S)
    except HiveError as error:
        if type(error) is not HiveError or not was_executed(await show(unit, *HOW_IT_ENDED)):
            raise


async def begin(unit: str, description: str, properties: Properties, command: Sequence[str], *, slice_: str) -> None:
    """Makes a transient service, and does not wait for its start. Raises as `start` does, where it cannot be made."""
    call = transient(unit, description, properties, command, slice_=slice_, waits=False)
    await _call_between_jobs(call, limit_s=START_S)


async def show(unit: str, *names: str) -> dict[str, str]:
    """The properties named of a unit; defaults where there is none (`LoadState=not-found`)."""
    return parse_show(await _call(["systemctl", "show", unit, *(f"--property={name}" for name in names)]))


async def find_end(unit: str, pid: int | None = None) -> tuple[ServiceEnd | None, str]:
    """The end of a unit's main process, which is over, and the unit's `InvocationID`: once PID 1 has noticed.

    `pid`: its process where that is known. None where systemd does not know the unit any more, or does not notice in
    time. Raises HiveError.
    """
    until = time.monotonic() + NOTICES_S
    while True:
        shown = await show(unit, *HOW_IT_ENDED, "InvocationID")
        ended = ended_of(shown, int(shown.get("ExecMainPID") or 0) if pid is None else pid)
        if ended is not None or shown.get("LoadState") == "not-found" or time.monotonic() > until:
            return ended, shown.get("InvocationID", "")


async def stop(unit: str) -> None:
    """Stops it and waits; not there is stopped."""
    await _call_if_there(["systemctl", "stop", "--quiet", unit])


async def forget(unit: str) -> None:
    """Stops it, and forgets that it failed: a transient unit is gone then, and its name free."""
    await stop(unit)
    await _call_if_there(["systemctl", "reset-failed", "--quiet", unit])


async def start_unit(unit: str, *, limit_s: float = UNIT_START_S) -> None:
    """Starts a unit that is installed; returns once it is running, also where it was.

    However often it was started lately: StartLimitBurst= is against what restarts by itself. Raises NotFound where
    there is none, TimedOut, DependencyDown, HiveError where it failed (its journal says why).
    """
    await _call_if_there(["systemctl", "reset-failed", "--quiet", unit])
    await _call_between_jobs(["systemctl", "start", "--quiet", "--no-ask-password", unit], limit_s=limit_s)


async def units_like(pattern: str) -> list[str]:
    """The names of all units of this pattern that systemd knows now: those that run, and those that failed."""
    listed = await _call(["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", pattern])
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


async def is_being_restarted(unit: str) -> bool:
    """Whether what ends it now starts it again: a restart, not a stop."""
    return parse_job(await _call(["systemctl", "list-jobs", "--no-legend", unit]), unit) == "restart"


async def end_unit(unit: str, *, grace_s: float) -> None:
    """Stops a unit: SIGTERM, and after `grace_s` SIGKILL to all of it, whatever its TimeoutStopSec= says.

    Returns once nothing of it is left; not there is ended. Raises TimedOut where SIGKILL does not help.
    """
    await _call_if_there(["systemctl", "stop", "--quiet", "--no-block", unit])
    if await _ended_within(unit, grace_s):
        return
    await _call_if_there(["systemctl", "kill", "--kill-whom=all", "--signal=SIGKILL", unit])
    if not await _ended_within(unit, KILLED_S):
        raise TimedOut(f"{unit} lives {KILLED_S:g} s after SIGKILL", hint=f"systemctl status {unit}")


async def _ended_within(unit: str, limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while (await show(unit, "ActiveState")).get("ActiveState") not in ("inactive", "failed"):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(LOOK_S)
    return True


async def sync_journal() -> None:
    """Returns once what was printed until now can be read in the journal."""
    await _call(["journalctl", "--quiet", "--sync"])


async def read_journal(unit: str, *, lines: int, only_its_own: bool = False) -> str:
    """The last `lines` of what it wrote, and of what systemd said of it unless `only_its_own`."""
    return await _call(journal_command(unit, lines=lines, only_its_own=only_its_own))


async def read_service(unit: str, *, lines: int, since: float | None = None, only_its_own: bool = False) -> str:
    """The last `lines` a service with `SyslogIdentifier=` wrote, since this Unix time where one is given; also those of
    which journald does not know that they are its. `only_its_own`: without what systemd says of it.

    It learns the unit of a line from the process that wrote it, too late where that ended at once or the machine is
    busy (seen with 252 at 300 ms). The identifier and the user come with the stream, which systemd opened.
    """
    await sync_journal()
    shown = await show(unit, "SyslogIdentifier", "User")
    matches = [f"_SYSTEMD_UNIT={unit}"] + ([] if only_its_own else ["+", "_PID=1", f"UNIT={unit}"])
    if identifier := shown.get("SyslogIdentifier"):
        matches += ["+", "_TRANSPORT=stdout", f"SYSLOG_IDENTIFIER={identifier}", f"_UID={_uid_of(shown.get('User'))}"]
    options = ["--quiet", "--no-pager", "--output=cat", f"--lines={lines}"]
    options += [] if since is None else [f"--since=@{since:.6f}"]
    return await _call(["journalctl", *options, *matches])


def _uid_of(user: str | None) -> int:
    try:
        return pwd.getpwnam(user).pw_uid if user else 0
    except KeyError:
        return 0


async def read_invocation(invocation: str, *, lines: int = 20) -> str:
    """The last `lines` of one run of a unit (`InvocationID=`), all it has written until now."""
    await sync_journal()
    options = ["--quiet", "--no-pager", "--output=cat", f"--lines={lines}"]
    return await _call(["journalctl", *options, f"_SYSTEMD_INVOCATION_ID={invocation}"])


async def _call_between_jobs(command: Sequence[str], *, limit_s: float) -> None:
    """`_call`, again while jobs are in the way that no other may replace. Raises DependencyDown after JOBS_S."""
    until = time.monotonic() + JOBS_S
    while True:
        try:
            await _call(command, limit_s=limit_s)
        except DependencyDown as error:
            if IN_THE_WAY not in error.message or time.monotonic() > until:
                raise
        else:
            return
        await asyncio.sleep(LOOK_S)


async def _call_if_there(command: Sequence[str]) -> None:
    try:
        await _call(command)
    except NotFound:
        return


async def _call(command: Sequence[str], *, limit_s: float = CALL_S) -> str:
    """Runs a program; returns its output. Raises TimedOut (it is killed then) and the error `error_of` finds for it."""
    loop = asyncio.get_running_loop()
    output = os.memfd_create(command[0], os.MFD_CLOEXEC)
    pidfd = -1
    try:
        child = spawn(command, env={"PATH": PROGRAM_PATH, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0"}, stdout_fd=output)
        pidfd = os.pidfd_open(child.pid)
        over = asyncio.Event()
        loop.add_reader(pidfd, over.set)
        try:
            async with asyncio.timeout(limit_s):
                await over.wait()
        except TimeoutError:
            raise TimedOut(f"{command[0]} did not come to an end within {limit_s:g} s") from None
        finally:
            loop.remove_reader(pidfd)
            if child.poll() is None:
                child.kill()
                child.wait()
        text = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
    finally:
        os.close(output)
        if pidfd >= 0:
            os.close(pidfd)
    if child.returncode != 0:
        raise error_of(command, text)
    return text
