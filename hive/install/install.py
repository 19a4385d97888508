"""`hive install` and `hive uninstall`: named steps, each of which can be asked, done, done again and undone.

What an interruption leaves, wherever it comes: files are there whole or not at all, `current` is the old version or the
new one, the manifest knows everything that was made. The same command again ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from hive import __version__
from hive.build import in_environment
from hive.errors import AS_ROOT, DependencyDown, HiveError, NotFound, NotPermitted, RolledBack, UsageError, WrongState
from hive.files import layout, share
from hive.files.layout import Layout
from hive.host import program, systemd
from hive.host.files import remove
from hive.install.manifest import mark_at
from hive.install.running import Reload, StartStep
from hive.install.selfcheck import SelfCheck
from hive.install.step_list import STEPS
from hive.install.steps import Box, Configuration, FilesStep, InstallStep, LinksStep, enabled, refuse_strangers
from hive.install.steps_system import (
    Directories,
    EarlierSecrets,
    Leftovers,
    OldVersions,
    Secrets,
    SwapOffer,
    Users,
    previous,
    remove_code,
    version_links,
)

NO_PAGES = "scdoc is not installed: there are no man pages (apt-get install scdoc, then run the installer again)"
NO_PAGES_YET = "scdoc is not installed now; where it is by then, as after ./install.sh, the man pages are written, too"
"""The same before anything is done: install.sh installs scdoc first, and a dry run of it has just said so."""

NAMED = 3
"""Number of files of one directory that are named while they are written."""
_WRITTEN = re.compile(r"(write|replace) (/.*)/[^/, ]+")


class StepDone(NamedTuple):
    """A step, what it would change or has changed, and what a person should know."""

    step: str
    changes: list[str]
    notices: list[str]


def open_box(place: Layout, *, say: Callable[[str], None], otherwise: Callable[[Layout], str] | None = None) -> Box:
    """The box for installing or removing: its version is the one with this environment.

    `otherwise`: names the version where it is none below /opt/hive/versions; that is enough to look and to remove.
    Raises UsageError, ConfigError.
    """
    version = place.version_of(Path(sys.prefix))
    if version is None and otherwise is None:
        raise UsageError(
            f"{sys.prefix} is no installed version of Hive (those are in {place.at(layout.VERSIONS)})",
            hint="./install.sh in Hive's sources puts one there and installs it",
        )
    named = version or (otherwise(place) if otherwise is not None else "")
    return Box(place, version=named, share=share.directory(), say=say)


def next_version(place: Layout) -> str:
    """Name of this code there, as install.sh numbers its environments."""
    numbers = itertools.count(1)
    return next(name for n in numbers if not place.at(place.version(name := f"{__version__}-{n}")).exists())


def current_version(place: Layout) -> str:
    """The one that is in force; what would be the next where none is."""
    return os.path.basename(mark_at(place.at(layout.CURRENT))) or next_version(place)


def refuse_nothing(box: Box, *, purge: bool) -> None:
    """Raises NotFound where there is nothing to remove, before anybody is asked about it."""
    manifest, kept = box.manifest, (layout.CONF_FILE, layout.POLICY_FILE)
    made = [path for path in manifest.files if purge or path not in kept]
    if made or manifest.users or manifest.groups or box.at(layout.CODE).exists():
        return
    left = [path for path in (layout.CONFIGURATION, layout.STATE) if box.at(path).exists()]
    if left and purge:
        return
    hint = f"{', '.join(left)} stayed: hive uninstall --purge removes them, too" if left else "hive up needs none"
    raise NotFound(f"Hive is not installed in {box.layout.root}: there is nothing to remove", hint=hint)


def steps_of(box: Box) -> list[InstallStep]:
    """All of it, in the order in which it is done. What runs goes on as it was until `start`."""

    def units() -> list[share.Managed]:
        return share.units(box.share)

    files = [
        FilesStep(box, "units", units),
        FilesStep(box, "redis", lambda: [share.redis_conf(box.share)]),
        FilesStep(box, "manual", lambda: share.manual(box.share), notice=NO_PAGES),
        FilesStep(box, "completions", share.completions),
    ]
    links = [
        LinksStep(box, "version", lambda: version_links(box)),
        LinksStep(box, "enable", lambda: enabled(units(), layout.TARGET)),
    ]
    configuration = Configuration(box)

    def wanted() -> set[str]:
        managed = {file.path for step in files for file in step.wanted}
        return managed | {path for step in links for path in step.wanted} | set(configuration.paths)

    def in_use() -> set[str]:
        return {box.version, box.manifest.running, os.path.basename(mark_at(box.at(layout.CURRENT)))}

    failed = OldVersions(box, "failed versions", kept=in_use)
    old = OldVersions(box, "old versions", kept=lambda: {box.version})
    system: list[InstallStep] = [Users(box), Directories(box), configuration, Secrets(box), StartStep(box), Reload(box)]
    made: list[InstallStep] = [
        failed,
        SelfCheck(box),
        *system,
        *files,
        *links,
        Leftovers(box, wanted),
        old,
        SwapOffer(box),
    ]
    by_name = {step.name: step for step in made}
    return [by_name.pop(name) for name in STEPS]


def plan(box: Box) -> list[StepDone]:
    """The acts of `install`, if it ran now. Raises WrongState where something of somebody else's is in the way."""
    steps = steps_of(box)
    refuse_strangers(steps)
    return [StepDone(step.name, step.plan(), _beforehand(step.notices())) for step in steps]


def _beforehand(notices: list[str]) -> list[str]:
    """
    >>> _beforehand(["x", NO_PAGES]) == ["x", NO_PAGES_YET]
    True
    """
    return [NO_PAGES_YET if line == NO_PAGES else line for line in notices]


def install(box: Box, *, steps: Sequence[InstallStep] | None = None) -> list[StepDone]:
    """Does what is not done yet; returns what that was, and says it as it is done.

    Where a later version does not come up, the one before it is put back. Raises NotPermitted, DependencyDown,
    WrongState, RolledBack, HiveError.
    """
    check_host(box.layout)
    os.umask(0o022)
    with _alone(box.layout):
        todo = steps_of(box) if steps is None else steps
        refuse_strangers(todo)
        before = previous(box)
        try:
            return _do(box, todo)
        except HiveError as error:
            if not before or box.manifest.settled:
                raise
            _go_back(box, before, error)


def _do(box: Box, steps: Sequence[InstallStep]) -> list[StepDone]:
    done = []
    for step in steps:
        changes = step.plan()
        for line in shortened(changes):
            box.say(f"{step.name}: {line}")
        if changes:
            step.do()
        notices = step.notices()
        for line in notices:
            box.say(f"{step.name}: note: {line}")
        done.append(StepDone(step.name, changes, notices))
    box.settle()
    return done


def shortened(changes: Sequence[str]) -> list[str]:
    """The changes as they are said while they are made: many files written to one directory are one line.

    >>> shortened(["write /m/a.1", "write /m/b.1", "write /m/c.1", "write /m/d.1", "write /c/hive"])
    ['write 4 files in /m', 'write /c/hive']
    """
    groups: dict[str, list[str]] = {}
    for line in changes:
        found = _WRITTEN.fullmatch(line)
        groups.setdefault(line if found is None else f"{found[1]} * in {found[2]}", []).append(line)
    return [
        said
        for head, lines in groups.items()
        for said in ([head.replace("*", f"{len(lines)} files", 1)] if len(lines) > NAMED else lines)
    ]


def _go_back(box: Box, before: str, error: HiveError) -> NoReturn:
    """The version before this one, with its own files, as it was."""
    box.say(f"version {box.version} failed: {error.message}")
    box.say(f"going back to {before}")
    older = Box(box.layout, version=before, share=in_environment(box.at(box.layout.version(before))), say=box.say)
    older.manifest.settled = False
    kept = [step for step in steps_of(older) if step.name not in ("failed versions", "self-check", "old versions")]
    try:
        _do(older, [EarlierSecrets(older) if step.name == EarlierSecrets.name else step for step in kept])
    except HiveError as worse:
        raise HiveError(
            f"version {box.version} failed ({error.message}), and going back to {before} did, too: {worse.message}",
            hint="hive doctor",
        ) from worse
    raise RolledBack(
        f"version {box.version} failed, {before} is in force again: {error.message}", hint=error.hint
    ) from error


def plan_removal(box: Box, *, purge: bool) -> list[StepDone]:
    """The acts of `uninstall`, if it ran now."""
    return [*(StepDone(step.name, step.plan_undo(purge=purge), []) for step in _backwards(box)), _last(box)]


def _last(box: Box) -> StepDone:
    """Lines of what goes when every step is undone, the environments last."""
    directories = [f"remove {path}, where it is empty by then" for path in reversed(box.manifest.directories)]
    return StepDone("code", [*directories, f"remove {layout.CODE}"], [])


def uninstall(box: Box, *, purge: bool) -> list[StepDone]:
    """Undoes every step. Without `purge` configuration, secrets and state stay, with it nothing that Hive made.

    Raises NotPermitted, HiveError.
    """
    check_host(box.layout)
    with _alone(box.layout):
        done = []
        came = _packages(box) if purge else []
        for step in _backwards(box):
            changes = step.plan_undo(purge=purge)
            for line in changes:
                box.say(f"{step.name}: {line}")
            step.undo(purge=purge)
            done.append(StepDone(step.name, changes, []))
        if came:
            box.say(f"note: came with Hive: {' '.join(came)} (./install.sh --uninstall --purge removes them)")
        last = _last(box)
        for line in last.changes:
            box.say(f"{last.step}: {line}")
        _forget_box(box, purge=purge)
        return [*done, last]


def _backwards(box: Box) -> list[InstallStep]:
    """`version` is undone last: until then the same command can be typed again."""
    steps = list(reversed(steps_of(box)))
    return [*(step for step in steps if step.name != "version"), *(step for step in steps if step.name == "version")]


def _packages(box: Box) -> list[str]:
    """The packages that install.sh had apt install."""
    try:
        return box.at(layout.PACKAGES).read_text().split()
    except OSError:
        return []


def _forget_box(box: Box, *, purge: bool) -> None:
    """The manifest after everything it speaks of, the environments last, this one among them."""
    box.take_directories_away()
    if purge:
        remove(box.at(layout.MANIFEST))
        with contextlib.suppress(OSError):
            box.at(layout.STATE).rmdir()
    else:
        box.manifest.save(box.layout)
    remove_code(box)


def check_host(place: Layout) -> None:
    """Raises NotPermitted, DependencyDown where Hive cannot be installed into this root."""
    if not place.live:
        if not place.root.is_dir():
            raise WrongState(f"{place.root} is no directory", hint="--prefix takes the root of an image")
        return
    if os.geteuid() != 0:
        raise NotPermitted("installing takes root", hint=AS_ROOT)
    if not systemd.is_booted():
        raise DependencyDown("systemd is not PID 1 here", hint="`hive up` works without it; an image takes --prefix")
    said = program.run(["systemctl", "--version"]).text
    if (systemd.parse_systemd_version(said) or 0) < systemd.OLDEST:
        raise DependencyDown(f"systemd {systemd.OLDEST} or newer is needed, here is {' '.join(said.split()[:2])}")


@contextmanager
def _alone(place: Layout) -> Iterator[None]:
    """One installer in a root at a time. The lock is on the root itself, so that nothing is left behind."""
    fd = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WrongState(f"another installer is at work in {place.root}", hint="wait for it") from None
    else:
        yield
    finally:
        os.close(fd)
