"""`hive restore`: what a backup holds takes the place of what is there, all of it or nothing.

What a kill -9 leaves:

    before the plan is written: everything as it was, and files `.NAME.hive-restore`, which the next call removes.
    after that: some files may be the new ones already. The plan, `hive.db.restoring`, says so: as long as it is there
    no daemon opens the database, and the next `hive restore` (with `--finish` where it has no other file to restore)
    brings it to its end.

So no Hive ever runs on a mixture. What was there before stays beside: `NAME.before-restore-TIME`. With the database go
the heads of its audit table (`audit.heads`), which of another table would say that it was tampered with, and its second
copy, from which the daemon would bring it up to date again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from hive.backup import archive
from hive.backup.archive import ArchiveManifest
from hive.errors import BadRequest, ConfigError, NotFound, WrongState
from hive.files import secrets
from hive.files.backup_contents import DATABASE, DESCRIBED, RESPONSES, STORES, BackupPart, HiveFiles, is_model_file
from hive.files.offline_audit import noted
from hive.host.files import Owner, sync, translated, write_whole
from hive.paths import make_private
from hive.settings.file import load_text
from hive.store import cache_epochs, runtime_settings
from hive.store.anchors import anchors_of
from hive.store.database import plan_of
from hive.store.lock import Lock
from hive.store.migrations import refuse_newer, schema_of
from hive.store.responses import VERSION as RESPONSES_VERSION
from hive.store.second_copy import copy_of

Found = TypeVar("Found")
CONF = "hive.conf"
STAGED = ".hive-restore"
SIDES = ("-wal", "-shm", "-journal")
FS_IOC_GETFLAGS, FS_APPEND_FL = 0x80086601, 0x20
"""linux/fs.h, of 64 bits; what `lsattr` reads, and its `a`."""
NO_BOOT = "restored"
"""The id of no boot: no process of what ran when the backup was made is expected to live."""


class RestorePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The files that are replaced, by their names in the backup, and what the old ones are called from then on.

    No path is in it: it lies where the daemon may write, and is carried out by root.
    """

    names: list[str]
    gone: list[str] = []
    """Files of models.d and templates.d that the backup does not have."""
    stamp: Annotated[str, msgspec.Meta(pattern="^[0-9T]{15}(-[0-9]{1,6})?$")]


class RestoreDone(NamedTuple):
    """`replaced`: name in the backup → where it went. `left_out`: names that have no place here. `kept`: what was
    there before. `finished`: an earlier restore that was cut short came to its end first."""

    manifest: ArchiveManifest | None
    replaced: dict[str, Path]
    left_out: list[str]
    kept: list[Path]
    finished: list[Path]


def look(place: HiveFiles, source: Path) -> RestoreDone:
    """Checks all that `restore` would do, and changes nothing. Raises as it does, but for locks."""
    if not source.exists():
        raise NotFound(f"there is no {source}")
    with tempfile.TemporaryDirectory(prefix="hive-restore-") as name:
        numbers = count()
        manifest, parts = _staged(place, source, lambda _: Path(name, str(next(numbers))))
    return RestoreDone(manifest, {part.name: part.path for part in parts}, _left_out(manifest, parts), [], [])


def restore(place: HiveFiles, source: Path | None) -> RestoreDone:
    """Restores `source`; with None only brings to its end what was cut short.

    Raises WrongState where a daemon runs on this state, or a newer Hive wrote the backup; BadRequest where it is not
    whole or what is in it is wrong; NotFound, NotPermitted, StoreFull.
    """
    if source is not None and not source.exists():
        raise NotFound(f"there is no {source}")
    _make_directories(place)
    with noted(place.database, "restore", file=str(source or "")) as about:
        done = _restore(place, source)
        about |= {
            "made_at": None if done.manifest is None else done.manifest.made_at,
            "replaced": sorted(done.replaced),
            "finished": len(done.finished),
        }
    return done


def _restore(place: HiveFiles, source: Path | None) -> RestoreDone:
    with _held(place):
        _refuse_append_only(anchors_of(place.database))
        finished = finish(place)
        _remove_staged(place)
        if source is None:
            return RestoreDone(None, {}, [], [], finished)
        try:
            manifest, parts = _staged(place, source, _staging_made)
            _note_put_back([_staging(part) for part in parts if part.name == DATABASE])
            for part in parts:
                _give(_staging(part), part)
            for part in parts:
                if part.name in STORES:
                    _fold(part.path)
        except BaseException:
            _remove_staged(place)
            raise
        gone = _gone(place, parts)
        plan = RestorePlan(
            names=[part.name for part in parts],
            gone=[part.name for part in gone],
            stamp=_free_stamp([*parts, *gone]),
        )
        _write_plan(place, plan)
        finish(place)
        kept = [path for part in (*parts, *gone) if os.path.lexists(path := _kept(part, plan.stamp))]
        beside = (_kept_heads(place.database, plan.stamp), _stamped(copy_of(place.database), plan.stamp))
        kept += [path for path in beside if os.path.lexists(path)]
        if place.layout is not None and any(part.is_secret for part in parts):
            secrets.write_acl(place.layout)
    return RestoreDone(manifest, {part.name: part.path for part in parts}, _left_out(manifest, parts), kept, finished)


def finish(place: HiveFiles) -> list[Path]:
    """Carries out a plan that is there, however far it came before; the paths it replaced. Raises as `restore` does."""
    path = plan_of(place.database)
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=RestorePlan)
        parts = [_part(place, name) for name in plan.names]
        gone = [part for name in plan.gone if (part := _part(place, name)).describes_models]
    except FileNotFoundError:
        return []
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="what was there is in NAME.before-restore-…"
        ) from None
    for part in parts:
        with translated(part.path):
            _carry_out(part, plan.stamp)
    for part in gone:
        with translated(part.path), contextlib.suppress(FileNotFoundError):
            os.rename(part.path, _kept(part, plan.stamp))
            sync(part.path.parent)
    with translated(path):
        path.unlink()
        sync(path.parent)
    return [part.path for part in parts]


def _part(place: HiveFiles, name: str) -> BackupPart:
    """Raises KeyError."""
    found = place.part(name)
    if found is None:
        raise KeyError(name)
    return found


def _carry_out(part: BackupPart, stamp: str) -> None:
    """Any part of it may have been done before. At no point there is no file where there was one."""
    path, staged, kept = part.path, _staging(part), _kept(part, stamp)
    if not staged.exists():
        return
    if part.name == DATABASE:
        with contextlib.suppress(FileNotFoundError):
            os.rename(anchors_of(path), _kept_heads(path, stamp))
        with contextlib.suppress(FileNotFoundError):
            os.rename(copy_of(path), _stamped(copy_of(path), stamp))
    if part.name in STORES:
        for side in SIDES:
            # Of a database that could not be folded: SQLite would play these into the new one.
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{side}", f"{kept}{side}")
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        os.link(path, kept, follow_symlinks=False)
    os.rename(staged, path)
    sync(path.parent)


# --- before the plan -----------------------------------------------------------------------------------------------


def _staged(
    place: HiveFiles, source: Path, target_of: Callable[[BackupPart], Path]
) -> tuple[ArchiveManifest, list[BackupPart]]:
    """Everything in the archive that has a place here, each at its target, and found to be right."""
    targets: dict[str, Path] = {}

    def choose(manifest: ArchiveManifest) -> Mapping[str, Path]:
        names = [packed.name for packed in manifest.files]
        if DATABASE not in names:
            raise BadRequest("there is no database in this backup")
        targets.update({part.name: target_of(part) for name in names if (part := place.part(name)) is not None})
        return targets

    manifest = archive.read(source, choose)
    parts = [part for packed in manifest.files if (part := place.part(packed.name)) is not None]
    for part in parts:
        if part.name == DATABASE:
            check_database(targets[part.name])
            _forget_words(targets[part.name])
        elif part.name == RESPONSES:
            check_responses(targets[part.name])
        else:
            part.check(targets[part.name].read_bytes())
    _check_models(targets)
    return manifest, parts


def _check_models(targets: Mapping[str, Path]) -> None:
    """Raises BadRequest where no daemon would start with these files of models.d and templates.d."""
    files = {name: path for name, path in targets.items() if is_model_file(name)}
    text = targets[CONF].read_text() if CONF in targets else ""
    try:
        load_text(text, env={}, model_files=files.values())
    except ConfigError as error:
        said = error.message
        for name, path in files.items():
            said = said.replace(str(path), name)
        raise BadRequest(f"a description in it is wrong: {said}") from None


def _gone(place: HiveFiles, parts: list[BackupPart]) -> list[BackupPart]:
    """Those of models.d and templates.d that were not there when the backup was made: with hive.conf, it says all."""
    names = {part.name for part in parts}
    if CONF not in names:
        return []
    return [part for part in place.models() if part.name not in names]


def check_database(path: Path) -> None:
    """Raises BadRequest where it is no sound database of a Hive, WrongState where a newer one wrote it."""
    refuse_newer(_checked(path, "agents", schema_of))


def _forget_words(path: Path) -> None:
    """The restored Hive is another box to operation tokens: those used since the backup would be good again. Nor is
    what was signed then the signers' word now: they may have taken it back since, by a signed unload."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        tables = {name for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "op_box" in tables:
            conn.execute("DELETE FROM op_box")
        if "deployments" in tables:
            conn.execute("UPDATE deployments SET signature = ''")
    for side in SIDES:
        path.with_name(path.name + side).unlink(missing_ok=True)


def check_responses(path: Path) -> None:
    """Raises as `check_database`."""
    version = _checked(path, "responses", lambda conn: int(conn.execute("PRAGMA user_version").fetchone()[0]))
    if version > RESPONSES_VERSION:
        raise WrongState("the responses in it were written by a newer Hive", hint="restore with that version")


def _checked(path: Path, table: str, look: Callable[[sqlite3.Connection], Found]) -> Found:
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
            found = conn.execute("PRAGMA quick_check(1)").fetchone()[0]
            looked = look(conn)
            names = {(kind, name) for kind, name in conn.execute("SELECT type, name FROM sqlite_master")}
    except sqlite3.Error as error:
        raise BadRequest(f"the database in it is none: {error}") from None
    finally:
        for side in SIDES:
            path.with_name(path.name + side).unlink(missing_ok=True)
    if found != "ok" or ("table", table) not in names or {kind for kind, _ in names} & {"trigger", "view"}:
        raise BadRequest(f"the database in it is none of Hive's: {found}")
    return looked


def _note_put_back(databases: Iterable[Path]) -> None:
    """Has what was flushed since the backup was made stay so, and what ran then started again, as after a boot."""
    for path in databases:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
            now = time.time()
            cache_epochs.note_put_back(conn, now)
            runtime_settings.put(conn, runtime_settings.BOOT, NO_BOOT, actor="hive restore", now=now)


def _fold(database: Path) -> None:
    """The old one in a single file, so that nothing of it is left beside the new one. One that is damaged is moved
    as it is."""
    if not database.exists():
        return
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(database, isolation_level=None)) as conn,
    ):
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        conn.execute("PRAGMA journal_mode = DELETE")


def _make_directories(place: HiveFiles) -> None:
    """A `hive up` may be new; an installed Hive has its directories. Raises NotFound."""
    if place.layout is None and not place.paths.state.exists():
        make_private(place.paths.state, uid=os.geteuid(), mode=0o711 if os.geteuid() == 0 else 0o700)
    for part in place.parts.values():
        if not part.path.parent.is_dir():
            raise NotFound(f"there is no {part.path.parent}", hint="hive install makes it")


@contextmanager
def _held(place: HiveFiles) -> Iterator[None]:
    """Keeps others from this state meanwhile. Raises WrongState naming the one that uses it."""
    with ExitStack() as held:
        lock_path = place.database.with_name(f"{place.database.name}.lock")
        lock = Lock(lock_path, what="the database")
        held.callback(lock.release)
        if os.geteuid() == 0:
            os.chown(lock_path, *_owner_of(lock_path.parent), follow_symlinks=False)
        if place.layout is None:
            up = Lock(place.paths.state / "up.lock", what="this state directory")
            held.callback(up.release)
        yield


def _refuse_append_only(heads: Path) -> None:
    """Once the plan is written it must be possible to move them. Raises WrongState."""
    flags = array("i", [0])
    try:
        fd = os.open(heads, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
        finally:
            os.close(fd)
    except OSError:  # it is not there, or this file system knows no such attributes
        return
    if flags[0] & FS_APPEND_FL:
        raise WrongState(f"{heads} can only be appended to, and has to be moved away", hint=f"chattr -a {heads}")


def _write_plan(place: HiveFiles, plan: RestorePlan) -> None:
    """From here on it is carried out, whatever happens."""
    for directory in {_part(place, name).path.parent for name in plan.names}:
        with translated(directory):
            sync(directory)
    content = msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"
    write_whole(plan_of(place.database), content, mode=0o600, owner=_owner_of(place.database.parent))


def _remove_staged(place: HiveFiles) -> None:
    for part in place.parts.values():
        with translated(part.path), contextlib.suppress(FileNotFoundError):
            _staging(part).unlink()
    if place.layout is not None:
        for path in (path for one in DESCRIBED for path in place.layout.at(one).glob(f".*{STAGED}")):
            with translated(path):
                path.unlink(missing_ok=True)


def _give(staged: Path, part: BackupPart) -> None:
    """The owner and mode of the file it replaces; of a new one, its directory's owner."""
    mode, owner = part.mode, _owner_of(part.path.parent)
    with translated(staged):
        if os.path.lexists(part.path):
            found = part.path.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise BadRequest(f"{part.path} is no plain file; it is not replaced")
            owner = found.st_uid, found.st_gid
            mode = mode if part.is_secret else stat.S_IMODE(found.st_mode)
        fd = os.open(staged, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.geteuid() == 0:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)


def _owner_of(path: Path) -> Owner:
    found = path.stat()
    return found.st_uid, found.st_gid


def _staging(part: BackupPart) -> Path:
    return part.path.with_name(f".{part.path.name}{STAGED}")


def _staging_made(part: BackupPart) -> Path:
    """Makes models.d or templates.d, where it is not there, for what is staged in it."""
    if part.describes_models:
        directory = part.path.parent
        with translated(directory):
            if not directory.is_dir():
                directory.mkdir()
                directory.chmod(0o755)  # whatever the umask: the services read it as other users
    return _staging(part)


def _kept(part: BackupPart, stamp: str) -> Path:
    return _stamped(part.path, stamp)


def _kept_heads(database: Path, stamp: str) -> Path:
    return _stamped(anchors_of(database), stamp)


def _stamped(path: Path, stamp: str) -> Path:
    return path.with_name(f"{path.name}.before-restore-{stamp}")


def _free_stamp(parts: list[BackupPart]) -> str:
    """The time, and a number where somebody restored within the same second."""
    now = time.strftime("%Y%m%dT%H%M%S")
    stamps = (now if number == 0 else f"{now}-{number}" for number in count())
    old = [part.path for part in parts]
    old += [beside(part.path) for part in parts if part.name == DATABASE for beside in (anchors_of, copy_of)]
    return next(stamp for stamp in stamps if not any(os.path.lexists(_stamped(path, stamp)) for path in old))


def _left_out(manifest: ArchiveManifest, parts: list[BackupPart]) -> list[str]:
    there = {part.name for part in parts}
    return [packed.name for packed in manifest.files if packed.name not in there]
