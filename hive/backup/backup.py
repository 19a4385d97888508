"""`hive backup`: the database by SQLite's own backup, the configuration, and where they are asked for the secrets, and
what agents had kept of their responses.

Agents' homes, images and models are not in it: they are the operator's files. Nor is live state: Redis and the helper's
table are made anew, and what the usage spool holds is in the database within seconds.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from hive.backup import archive
from hive.backup.archive import ArchiveManifest, Packed
from hive.build import version
from hive.errors import HiveError, NotFound
from hive.files.backup_contents import DATABASE, RESPONSES, STORES, HiveFiles
from hive.files.offline_audit import noted
from hive.host.files import translated
from hive.store import explain
from hive.store.migrations import schema_of

Found = TypeVar("Found")


def backup(place: HiveFiles, target: Path, *, with_secrets: bool, with_responses: bool = False) -> ArchiveManifest:
    """Writes `target`, mode 0600; the daemon may run meanwhile. What is not there is left out, but the database.

    Raises NotFound (no database), WrongState (there is something at `target`), NotPermitted, StoreFull, HiveError (the
    database is damaged).
    """
    with noted(place.database, "backup", file=str(target), secrets=with_secrets, responses=with_responses):
        return _backup(place, target, with_secrets=with_secrets, with_responses=with_responses)


def _backup(place: HiveFiles, target: Path, *, with_secrets: bool, with_responses: bool) -> ArchiveManifest:
    contents: dict[str, Path | bytes] = {}
    for part in (*place.parts.values(), *place.models()):
        if part.name in STORES or (part.is_secret and not with_secrets):
            continue
        with translated(part.path), contextlib.suppress(FileNotFoundError):
            contents[part.name] = part.path.read_bytes()
    with ExitStack() as copies:
        if not place.database.exists():
            hint = "which Hive is meant is said with --state-dir"
            raise NotFound(f"there is no {place.database}: nothing to keep", hint=hint)
        stores = dict[str, Path | bytes]()
        stores[DATABASE], schema = copies.enter_context(_snapshot(place.database, target, schema_of))
        kept = place.parts[RESPONSES].path
        if with_responses and kept.exists():
            stores[RESPONSES], _ = copies.enter_context(_snapshot(kept, target, lambda _: None))

        def describe(files: list[Packed]) -> ArchiveManifest:
            return ArchiveManifest(
                hive=version(),
                schema=schema.taken,
                readable_from=schema.readable_from,
                kind=place.kind,
                source=str(place.paths.state),
                made_at=time.time(),
                secrets=any(name.startswith("secrets/") for name in contents),
                files=files,
            )

        return archive.write(target, {**stores, **contents}, describe)


@contextmanager
def _snapshot(
    database: Path, target: Path, look: Callable[[sqlite3.Connection], Found]
) -> Iterator[tuple[Path, Found]]:
    """A copy of the database as it is at one moment, beside `target`, sound and in one file, and what `look` finds in
    it; gone afterwards.

    The copy is made in one step: in WAL mode that keeps no writer waiting, and needs no second try when one writes.
    """
    if not database.exists():
        raise NotFound(f"there is no {database}: nothing to keep", hint="which Hive is meant is said with --state-dir")
    if not target.parent.is_dir():
        raise NotFound(f"there is no directory {target.parent}", hint="make it, or name another place for the backup")
    copy = target.with_name(f".{target.name}.{database.name}")
    with translated(copy):
        _clear(copy)
        os.close(os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        yield copy, _copied(database, copy, look)
    finally:
        _clear(copy)


def _copied(database: Path, copy: Path, look: Callable[[sqlite3.Connection], Found]) -> Found:
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as source,
            contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as target,
        ):
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
            found = target.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise HiveError(f"{database} is damaged: {found}", hint="hive doctor sqlite.integrity")
            return look(target)
    except sqlite3.Error as error:
        raise explain.sqlite_error(error, database) from error


def _clear(copy: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            copy.with_name(copy.name + suffix).unlink()
