"""What to type next: for each thing that is wrong with a Hive, the command that says why or changes it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote
from typing import Any, NamedTuple

from hive.domain import TRY_OUT

DAEMON = "hive-daemon.service"
LOW_BYTES = 100 * 1024 * 1024
"""What `hive doctor` takes for a disk on which writes fail soon."""


class Problem(NamedTuple):
    """One thing that is not as it should be, and what to type about it."""

    problem: str
    command: str


class Where(NamedTuple):
    """`installed`: its services are units of systemd. `composed`: they are containers. Neither: it is a `hive up`.

    `option`: what names it on a command line that talks to it, with a space before it; `files`: on one that works on
    its files.
    """

    installed: bool = False
    composed: bool = False
    option: str = ""
    files: str = ""

    def look(self, service: str) -> str:
        """The command that says what a service does, and why it ended.

        >>> Where(installed=True).look("daemon"), Where(composed=True).look("redis")
        ('systemctl status hive-daemon', 'docker compose logs redis')
        >>> Where(option=" --state-dir /srv/h").look("proxy")
        'hive logs proxy --state-dir /srv/h'
        """
        if self.installed:
            return f"systemctl status hive-{service}"
        return f"docker compose logs {service}" if self.composed else f"hive logs {service}{self.option}"

    def start(self) -> str:
        if self.installed:
            return "sudo systemctl start hive.target"
        return "docker compose up --detach" if self.composed else f"hive up{self.files}"

    def finish_restore(self) -> str:
        return f"{'sudo ' if self.installed else ''}hive restore --finish{self.files}"

    def restore(self) -> str:
        """What brings a backup back. No daemon may run meanwhile, and the command says so."""
        return f"{'sudo ' if self.installed else ''}hive restore FILE{self.files}"

    def restart(self) -> str:
        if self.installed:
            return "sudo systemctl restart hive-daemon"
        return "docker compose restart daemon" if self.composed else self.look("daemon")

    def hive(self, words: str) -> str:
        """
        >>> Where(option=" --state-dir /srv/h").hive("backend list")
        'hive backend list --state-dir /srv/h'
        """
        return f"hive {words}{self.option}"


# --- what the daemon complains about -----------------------------------------------------------------------------


def about(problem: str, health: Mapping[str, Any], where: Where) -> str:
    """The command for one of `GET /api/health`'s problems.

    >>> about("the proxy is not connected: no request is served", {}, Where())
    'hive logs proxy'
    >>> about("usage waits, it cannot be written: the disk of /s/hive.db is full", {"state_dir": "/s"}, Where())
    'df -h /s'
    >>> about("the database was damaged (it is empty) and is begun anew", {}, Where(files=" --state-dir /s"))
    'hive restore FILE --state-dir /s'
    >>> about("something new", {}, Where(option=" --state-dir /s"))
    'hive doctor --state-dir /s'
    """
    is_full = any(word in problem for word in ("is full", "no space left"))
    found = (
        ("the database is damaged", where.restart()),
        ("the database ", where.restore()),
        ("the proxy is not connected", where.look("proxy")),
        ("the helper is not connected", where.look("sandbox")),
        ("Redis ", where.look("redis") if _is_own_redis(health) else where.hive("doctor redis")),
        ("usage waits", _df(str(health.get("state_dir"))) if is_full else where.hive("doctor sqlite disk")),
        ("switching to ", where.hive("backend status")),
        ("no inference server was started: none is installed", TRY_OUT),
        ("no inference server was started", where.hive("backend list")),
        ("the backend does not answer", _about_backend(health.get("backend") or {}, where)),
    )
    return next((command for begins, command in found if problem.startswith(begins)), where.hive("doctor"))


def of_disk(state_dir: str, free_bytes: int | None) -> list[Problem]:
    """The daemon itself notices only when something could not be written.

    >>> of_disk("/s", 50 << 20), of_disk("/s", 50 << 30), of_disk("/s", None)
    ([Problem(problem='the disk of /s has 50 MiB left', command='df -h /s')], [], [])
    """
    if free_bytes is None or free_bytes >= LOW_BYTES:
        return []
    return [Problem(f"the disk of {state_dir} has {free_bytes >> 20} MiB left", _df(state_dir))]


def _df(directory: str) -> str:
    return f"df -h {quote(directory)}"


def _is_own_redis(health: Mapping[str, Any]) -> bool:
    """Not that of REDIS_URL, of which Hive knows nothing but that it does not answer."""
    return str((health.get("redis") or {}).get("at", "/")).startswith("/")


def _about_backend(backend: Mapping[str, Any], where: Where) -> str:
    """One that Hive did not start has no log here."""
    has_log = backend.get("kind") == "demo" and not where.installed
    return where.look("backend") if has_log else where.hive("doctor backend")


# --- what is seen where it does not answer -----------------------------------------------------------------------


def of_silence(seen: Any, *, code: str, where: Where) -> list[Problem]:
    """What is wrong, the cause before what comes of it. `seen`: hive.appliance.standing.Standing.

    `code`: of the error with which the daemon did not answer.
    """
    return list(_of_silence(seen, code, where))


def _of_silence(seen: Any, code: str, where: Where) -> Iterator[Problem]:
    if code == "not_permitted":
        yield Problem("this user may not ask the daemon", f"sudo hive status{where.option}")
        return
    if seen.kind == "none":
        yield Problem("no Hive runs here, and none is installed", "hive up --demo")
        return
    if seen.missing and seen.held_by is None:
        yield Problem(seen.missing, where.start())
        return
    yield from _of_database(seen.recorded, where)
    yield from of_disk(str(seen.state), seen.free_bytes)
    daemon = _of_daemon(seen, code, where)
    yield daemon
    for unit in seen.units or ():
        # Who starts all of it starts those that only do not run.
        is_wrong = unit.active != "active" and not (unit.active == "inactive" and daemon.command == where.start())
        if is_wrong and unit.name != DAEMON:
            yield Problem(_said(unit), f"systemctl status {unit.name.removesuffix('.service')}")
    if seen.units is None and seen.held_by is not None:
        for part in seen.parts:
            if part.state == "down":
                named = "Redis" if part.name == "redis" else f"the {part.name}"
                service = "sandbox" if part.name == "helper" else part.name
                yield Problem(f"{named} is down: {part.why}", where.look(service))


def _of_daemon(seen: Any, code: str, where: Where) -> Problem:
    unit = next((unit for unit in seen.units or () if unit.name == DAEMON), None)
    if code == "timeout":
        again = where.restart() if where.installed else where.look("daemon")
        return Problem("the daemon listens, and does not answer", again)
    if unit is not None and unit.active == "inactive":
        stands_alone = any(other.active == "active" for other in seen.units)
        return Problem(_said(unit) if stands_alone else "this Hive does not run", where.start())
    if unit is not None:
        return Problem(_said(unit), where.look("daemon"))
    if seen.held_by is not None:
        who = f"hive up (pid {seen.held_by})" if seen.held_by else "a hive up"
        return Problem(f"{who} runs, and its daemon does not: it is started again within seconds", where.look("daemon"))
    if seen.recorded is not None and seen.recorded.may_not:
        return Problem("this Hive does not run, as far as this user may see", f"sudo hive status{where.option}")
    return Problem("this Hive does not run", where.start())


def _said(unit: Any) -> str:
    return f"{unit.name} is {unit.active}{f' ({unit.why})' if unit.why else ''}"


def _of_database(recorded: Any, where: Where) -> Iterator[Problem]:
    if recorded is None or not recorded.why or recorded.may_not:
        return
    if recorded.is_cut_short:
        yield Problem(f"a restore of {recorded.path} was cut short: no daemon opens it", where.finish_restore())
    elif recorded.is_damaged:
        yield Problem(
            f"{recorded.why}; a daemon that starts moves it aside and begins anew",
            where.hive("doctor sqlite.integrity"),
        )
    else:
        yield Problem(f"{recorded.path} cannot be read: {recorded.why}", where.hive("doctor sqlite"))
