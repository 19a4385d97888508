"""Parking that is off, over a real database and disk: nothing that was kept outlives the setting."""

# ruff: noqa: ASYNC240 - a test looks at a small file

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.lifecycle.parked_files import BEGINS, ParkedFiles
from hive.lifecycle.parking import Parking
from hive.link.proxy_link import ProxyGates
from hive.models.cache_epochs import FlushKind, FlushScope
from hive.settings.table import InferenceSection, Settings
from hive.store import parked_slots as store
from hive.store.database import Database
from hive.store.parked_slots import ParkedSlot
from tests.lifecycle.test_parked_files import CONTENTS, KEY, NAME, ROW


class Lives(dict[str, Any]):
    """The roster of one agent."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


class Life(msgspec.Struct):
    agent: Any


class Named(msgspec.Struct):
    id: str


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database.open(tmp_path / "hive.db")
    yield made
    made.close()


async def kept(database: Database, directory: Path) -> ParkedSlot:
    """A slot that an earlier daemon has kept."""
    files = ParkedFiles(directory, KEY)
    files.prepare([])
    (directory / "engine" / NAME).write_bytes(CONTENTS)
    row = files.take_in(NAME, files.placed(ROW))
    await database.write(lambda conn: store.put(conn, row))
    return row


def parking(database: Database, directory: str) -> Parking:
    proxy: Any = ProxyGates(epoch="d", events=None)  # type: ignore[arg-type]
    settings = Settings(inference=InferenceSection(llama_slot_dir=directory))
    lives: Any = Lives({ROW.agent: Life(Named(ROW.agent))})
    nothing: Any = None
    return Parking(
        key=KEY,
        settings=lambda: settings,
        roster=lives,
        active=nothing,
        pool=nothing,
        proxy_link=proxy,
        database=database,
    )


@pytest.mark.parametrize("case", ["empty", "open to others", "another"])
async def test_off_leaves_nothing_that_an_earlier_daemon_kept(database: Database, tmp_path: Path, case: str) -> None:
    row = await kept(database, tmp_path / "kept")
    if case == "open to others":
        (tmp_path / "kept").chmod(0o755)
    here = parking(database, {"empty": "", "another": str(tmp_path / "new")}.get(case, str(tmp_path / "kept")))
    await here.begin()
    assert here.is_on is (case == "another")
    assert not Path(row.file).exists()
    assert await database.read(store.rows) == []


async def test_a_flush_drops_its_rows_whatever_lies_in_the_engines_directory(
    database: Database, tmp_path: Path
) -> None:
    row = await kept(database, tmp_path / "kept")
    here = parking(database, str(tmp_path / "kept"))
    await here.begin()
    engine = tmp_path / "kept" / "engine"
    (engine / f"{BEGINS}a" / "inner").mkdir(parents=True)
    scope = FlushScope(FlushKind.TENANT, "u")
    await here.flush(scope, groups=["tenant u"], server="")
    assert Path(row.file).exists()
    engine.rename(tmp_path / "away")
    engine.write_text("no directory")
    with pytest.raises(NotADirectoryError):
        await here.flush(FlushScope(FlushKind.TENANT, "t"), groups=[row.group], server="")
    assert not Path(row.file).exists()
    assert await database.read(store.rows) == []


async def test_on_keeps_it_and_a_flush_of_others_leaves_it(database: Database, tmp_path: Path) -> None:
    row = await kept(database, tmp_path / "kept")
    here = parking(database, str(tmp_path / "kept"))
    await here.begin()
    for scope, groups, server in (
        (FlushScope(FlushKind.TENANT, "u"), ["tenant u"], ""),
        (FlushScope(FlushKind.MODEL, "m"), [], "m-1"),
    ):
        with here.flushing(scope, groups=groups, server=server):
            await here.flush(scope, groups=groups, server=server)
        assert Path(row.file).exists()
    late = tmp_path / "kept" / "engine" / f"{BEGINS}that-a-lost-daemon-had-asked-for"
    late.write_bytes(CONTENTS)
    scope = FlushScope(FlushKind.TENANT, "t")
    await here.flush(scope, groups=[row.group], server="")
    assert not Path(row.file).exists()
    assert not late.exists()
    assert await database.read(store.rows) == []
