"""Backup and restore: whole or not at all, of a Hive that runs and onto one that does not. Real databases and kills."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sqlite3
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

from hive.backup.archive import MANIFEST
from hive.backup.backup import backup
from hive.backup.restore import look, restore
from hive.cli.main import main
from hive.domain import Agent, AgentSpec, DeploymentState
from hive.errors import BadRequest, HiveError, NotFound, WrongState
from hive.files.backup_contents import DATABASE, RESPONSES, SECRET_NAMES, HiveFiles, installed, of_up, place_of
from hive.files.layout import (
    CONF_FILE,
    MODELS_D,
    POLICY_FILE,
    RULES_FILE,
    SECRETS,
    STATE,
    TARGET,
    TEMPLATES_D,
    UNITS,
    Layout,
)
from hive.files.secrets import SECRETS as ALL_SECRETS
from hive.files.secrets import generate
from hive.host.process import boot_id, is_same_boot
from hive.install import conf_file
from hive.settings.table import Paths
from hive.store import acts, agents, cache_epochs, deployments, op_nonces, responses, runtime_settings
from hive.store.acts import acts_of
from hive.store.anchors import anchors_of
from hive.store.database import Database, plan_of
from hive.store.deployments import StoredDeployment
from hive.store.migrations import STEPS, migrate, schema_of
from hive.store.responses import KeptResponse
from hive.store.responses_file import ResponsesFile
from tests.examples import examples
from tests.nobody import run_as_nobody

POLICY = 'programs = ["/usr/bin/python3"]\n'


def put_agent(database: Path, name: str) -> None:
    conn = sqlite3.connect(database, isolation_level=None)
    migrate(conn)
    agents.insert(conn, Agent(id=name, spec=AgentSpec(name=name, command=["true"]), created_at=1.0))
    conn.close()


def names_in(database: Path) -> list[str]:
    conn = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return [row[0] for row in conn.execute("SELECT name FROM agents ORDER BY name")]
    finally:
        conn.close()


@pytest.fixture
def up(tmp_path: Path) -> HiveFiles:
    """A `hive up` with an agent."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    place = of_up(Paths(state, tmp_path / "run"))
    put_agent(place.database, "ann")
    place.database.chmod(0o600)
    (state / "ports.json").write_text('{"asked":{"proxy":1,"ingress":2},"got":{"proxy":3,"ingress":4}}')
    (state / "box.key").write_bytes(bytes(range(32)))
    (state / "box.key").chmod(0o600)
    (state / "internal.token").write_text("hive_sesame_sesame")
    (state / "internal.token").chmod(0o600)
    return place


@pytest.fixture
def box(tmp_path: Path) -> HiveFiles:
    """An installed Hive in a root of its own, with an agent."""
    layout = Layout(tmp_path / "root")
    for path in (UNITS, f"{STATE}/daemon", "/etc/hive"):
        layout.at(path).mkdir(parents=True)
    (layout.at(UNITS) / TARGET).write_text("[Unit]\n")
    layout.at(CONF_FILE).write_text(conf_file.text())
    layout.at(POLICY_FILE).write_text(POLICY)
    layout.at(RULES_FILE).write_text("[rules.default]\nthreshold = 0\n")
    generate(layout)
    place = installed(layout)
    put_agent(place.database, "ann")
    return place


def model_file(place: HiveFiles, name: str, text: str = "") -> Path:
    """A file of models.d that describes one model of the same name, or what `text` says."""
    assert place.layout is not None
    path = place.layout.at(MODELS_D) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text or f'[model."{path.stem}"]\nfile = "/srv/{path.stem}.gguf"\n')
    return path


def tree_of(place: HiveFiles) -> dict[str, bytes]:
    """The content of a Hive: of the database its agents, because SQLite may write the same in other bytes."""
    found = {}
    for part in (*place.parts.values(), *place.models()):
        if part.path.exists():
            found[part.name] = (
                " ".join(names_in(part.path)).encode() if part.name == DATABASE else part.path.read_bytes()
            )
    return found


def leftovers(place: HiveFiles) -> list[str]:
    directories = {part.path.parent for part in place.parts.values()}
    if place.layout is not None and place.layout.at(MODELS_D).exists():
        directories.add(place.layout.at(MODELS_D))
    return [
        path.name
        for directory in directories
        for path in directory.iterdir()
        if "hive-restore" in path.name or "hive-new" in path.name or path.name.endswith(".restoring")
    ]


def test_a_restored_hive_is_another_box_to_operation_tokens(up: HiveFiles, tmp_path: Path) -> None:
    """Tokens that were used since the backup would be good again."""

    def box_in(database: Path) -> str | None:
        with contextlib.closing(sqlite3.connect(database)) as conn:
            row = conn.execute("SELECT id FROM op_box").fetchone()
        return None if row is None else str(row[0])

    with contextlib.closing(sqlite3.connect(up.database, isolation_level=None)) as conn:
        conn.row_factory = sqlite3.Row
        op_nonces.make_box(conn, "box-1", 1.0)
    backup(up, tmp_path / "b.tar", with_secrets=False)
    assert box_in(up.database) == "box-1"
    restore(up, tmp_path / "b.tar")
    assert (box_in(up.database), names_in(up.database)) == (None, ["ann"])


def test_what_was_signed_before_a_restore_is_not_signed_after_it(up: HiveFiles, tmp_path: Path) -> None:
    """A signed unload has taken the approval back since the backup; the row that came back had it again."""
    row = StoredDeployment(
        id="m-1",
        name="m",
        digest="d",
        path="/m.gguf",
        backend="llama",
        signature="ann, ben",
        deployed_by="uid:7",
        at=1.0,
        state=DeploymentState.LOADED,
    )
    with contextlib.closing(sqlite3.connect(up.database, isolation_level=None)) as conn:
        deployments.put(conn, row)
    backup(up, tmp_path / "b.tar", with_secrets=False)
    restore(up, tmp_path / "b.tar")
    with contextlib.closing(sqlite3.connect(up.database)) as conn:
        assert conn.execute("SELECT id, signature, deployed_by FROM deployments").fetchall() == [("m-1", "", "uid:7")]


# --- backup --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_secrets", [False, True])
@pytest.mark.parametrize("kind", ["up", "box"])
def test_what_is_kept_comes_back(kind: str, with_secrets: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    place: HiveFiles = request.getfixturevalue(kind)
    before = tree_of(place)
    manifest = backup(place, tmp_path / "b.tar", with_secrets=with_secrets)
    assert {packed.name for packed in manifest.files} == {
        name for name in before if with_secrets or not name.startswith("secrets/")
    }
    put_agent(place.database, "bob")
    for name, part in place.parts.items():
        if not part.is_secret and name != DATABASE:
            part.path.unlink(missing_ok=True)
    done = restore(place, tmp_path / "b.tar")
    assert tree_of(place) == before
    assert leftovers(place) == []
    (kept,) = [path for path in done.kept if path.name.startswith("hive.db")]
    assert names_in(kept) == ["ann", "bob"], "what was there is beside it"
    Database.open(place.database).close()


@pytest.mark.parametrize("kind", ["up", "box"])
async def test_responses_are_in_it_only_when_asked_for_and_come_back(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They are prompts and answers. The daemon has the file open meanwhile."""
    place: HiveFiles = request.getfixturevalue(kind)
    path = place.parts[RESPONSES].path

    async def keep(file: ResponsesFile, name: str) -> None:
        one = KeptResponse("ann", name, None, b'[{"role":"user","content":"a private question"}]', b'{"output":[]}')
        await file.do(lambda conn: responses.keep(conn, one, most_bytes=10_000_000, now=1.0))

    file = ResponsesFile(path)
    await keep(file, "r1")
    backup(place, tmp_path / "without.tar", with_secrets=True)
    manifest = backup(place, tmp_path / "with.tar", with_secrets=False, with_responses=True)
    assert RESPONSES in {packed.name for packed in manifest.files}
    assert [b"private question" in (tmp_path / f"{name}.tar").read_bytes() for name in ("without", "with")] == [
        False,
        True,
    ]
    await keep(file, "r2")
    for name, left in (("without", 2), ("with", 1)):
        file.close()
        assert (path in restore(place, tmp_path / f"{name}.tar").kept) is False
        file = ResponsesFile(path)
        assert (await file.do(lambda conn: responses.summed(conn, "ann"))).responses == left, name
    file.close()
    assert leftovers(place) == []
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


async def test_responses_that_are_none_are_refused_before_anything_is_touched(up: HiveFiles, tmp_path: Path) -> None:
    path = up.parts[RESPONSES].path
    sqlite3.connect(path).executescript("CREATE TABLE other (x);").close()
    backup(up, tmp_path / "b.tar", with_secrets=False, with_responses=True)
    before = path.read_bytes()
    with pytest.raises(BadRequest, match="none of Hive's"):
        restore(up, tmp_path / "b.tar")
    assert path.read_bytes() == before


def test_every_secret_of_a_box_is_a_part() -> None:
    assert set(SECRET_NAMES) == set(ALL_SECRETS)


def test_secrets_are_in_it_only_when_asked_for_and_it_is_its_users_alone(up: HiveFiles, tmp_path: Path) -> None:
    for with_secrets in (False, True):
        target = tmp_path / f"{with_secrets}.tar"
        backup(up, target, with_secrets=with_secrets)
        assert (b"hive_sesame_sesame" in target.read_bytes()) is with_secrets
        assert (bytes(range(32)) in target.read_bytes()) is with_secrets
        assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_it_is_never_written_over_something(up: HiveFiles, tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_text("mine")
    with pytest.raises(WrongState, match="is there already"):
        backup(up, tmp_path / "b.tar", with_secrets=False)
    assert (tmp_path / "b.tar").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "state"]


def test_without_a_database_there_is_nothing_to_keep(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing to keep"):
        backup(of_up(Paths(tmp_path, tmp_path)), tmp_path / "b.tar", with_secrets=False)


def test_a_damaged_database_is_not_passed_off_as_a_backup(up: HiveFiles, tmp_path: Path) -> None:
    data = bytearray(up.database.read_bytes())
    data[5000:9000] = b"\xff" * 4000
    up.database.write_bytes(data)
    with pytest.raises(HiveError, match="damaged"):
        backup(up, tmp_path / "b.tar", with_secrets=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


WRITES = """
import asyncio, sys
from pathlib import Path
from hive.domain import Agent, AgentSpec, DeploymentState
from hive.store import acts, agents, op_nonces, responses
from hive.store.acts import acts_of
from hive.store.anchors import anchors_of
from hive.store.database import Database
async def main():
    database = Database.open(Path(sys.argv[1]))
    print("open", flush=True)
    for n in range(1_000_000):
        pair = [Agent(id=f"{w}{n}", spec=AgentSpec(name=f"{w}{n}", command=["true"]), created_at=1.0) for w in "xy"]
        await database.write(lambda conn: [agents.insert(conn, agent) for agent in pair])
asyncio.run(main())
"""


def test_a_daemon_that_writes_all_the_while_is_kept_as_it_was_at_one_moment(up: HiveFiles, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITES, str(up.database)], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        try:
            for number in range(5):
                backup(up, tmp_path / f"{number}.tar", with_secrets=False)
            with pytest.raises(WrongState, match=f"in use by process {daemon.pid}"):
                restore(up, tmp_path / "0.tar")
        finally:
            daemon.kill()
    counts = []
    for number in range(5):
        other = of_up(Paths(tmp_path / f"s{number}", tmp_path / "run"))
        restore(other, tmp_path / f"{number}.tar")
        names = names_in(other.database)
        assert sum(name[0] == "x" for name in names) == sum(name[0] == "y" for name in names), "no half transaction"
        counts.append(len(names))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1], "it did write meanwhile"


# --- restore -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(up: HiveFiles, tmp_path: Path) -> Path:
    target = tmp_path / "b.tar"
    backup(up, target, with_secrets=True)
    return target


def rewritten(source: Path, change: Callable[[dict[str, Any], list[tuple[tarfile.TarInfo, bytes]]], None]) -> Path:
    """The archive with its manifest and members changed."""
    with tarfile.open(source) as tar:
        members = [(info, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    manifest = json.loads(members[0][1])
    change(manifest, members)
    members[0] = (members[0][0], json.dumps(manifest).encode())
    target = source.with_name("changed.tar")
    with tarfile.open(target, "w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target


def packed(name: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def replaced(name: str, data: bytes) -> Callable[[dict[str, Any], list[Any]], None]:
    def change(manifest: dict[str, Any], members: list[Any]) -> None:
        manifest["files"] = [packed(name, data) if f["name"] == name else f for f in manifest["files"]]
        members[:] = [(info, data if info.name == name else old) for info, old in members]

    return change


def with_member(name: str, data: bytes = b"x", **attributes: Any) -> Callable[[dict[str, Any], list[Any]], None]:
    def change(manifest: dict[str, Any], members: list[Any]) -> None:
        info = tarfile.TarInfo(name)
        for key, value in attributes.items():
            setattr(info, key, value)
        manifest["files"].append(packed(name, data))
        members.append((info, data))

    return change


def without_database(manifest: dict[str, Any], members: list[Any]) -> None:
    manifest["files"].pop(0)
    members.pop(1)


def database_with(sql: str) -> bytes:
    conn = sqlite3.connect(":memory:", isolation_level=None)
    migrate(conn)
    conn.executescript(sql)
    return conn.serialize()


def test_what_has_no_place_here_is_left_out_and_told(kept: Path, up: HiveFiles) -> None:
    done = restore(up, rewritten(kept, with_member("../../etc/passwd")))
    assert done.left_out == ["../../etc/passwd"]
    assert names_in(up.database) == ["ann"]


REFUSED: dict[str, tuple[Callable[[dict[str, Any], list[Any]], None], type[HiveError], str]] = {
    "another sum": (lambda m, _: m["files"][0].update(sha256="0" * 64), BadRequest, "not what was written"),
    "another size": (lambda m, _: m["files"][1].update(bytes=1), BadRequest, "not what was written"),
    "more than there is": (lambda m, _: m["files"][0].update(bytes=1 << 40), BadRequest, "shorter"),
    "less than nothing": (lambda m, _: m["files"][0].update(bytes=-1), BadRequest, "shorter"),
    "a name twice": (lambda m, _: m["files"].append(m["files"][0]), BadRequest, "twice"),
    "a missing file": (lambda _, members: members.pop(), BadRequest, "is missing"),
    "a file too many": (lambda m, _: m["files"].pop(), BadRequest, "not in its manifest"),
    "another order": (lambda m, _: m["files"].reverse(), BadRequest, "where"),
    "no database": (without_database, BadRequest, "no database"),
    "a link": (with_member("ports2.json", type=tarfile.SYMTYPE, linkname="/etc/shadow"), BadRequest, "where"),
    "a device": (with_member("x", type=tarfile.CHRTYPE), BadRequest, "where"),
    "a directory": (with_member("x", type=tarfile.DIRTYPE), BadRequest, "where"),
    "an unknown field": (lambda m, _: m.update(more=1), BadRequest, "manifest"),
    "a newer format": (lambda m, _: m.update(format=2), WrongState, "another format"),
    "no database at all": (replaced(DATABASE, b"x" * 5000), BadRequest, "none"),
    "another database": (
        replaced(DATABASE, database_with("DROP TABLE agents")),
        BadRequest,
        "none of Hive's",
    ),
    "a database that acts": (
        replaced(DATABASE, database_with("CREATE TRIGGER t AFTER INSERT ON agents BEGIN SELECT 1; END")),
        BadRequest,
        "none of Hive's",
    ),
    "a newer database": (replaced(DATABASE, database_with("PRAGMA user_version = 999")), WrongState, "newer Hive"),
    "other ports": (replaced("ports.json", b"[]"), BadRequest, "ports.json"),
    "another key": (replaced("secrets/box-key", b"x" * 31), BadRequest, "box-key"),
    "no token": (replaced("secrets/internal-token", b"x"), BadRequest, "token"),
    "a token of controls": (replaced("secrets/internal-token", b"\x1b" * 20), BadRequest, "token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_before_anything_is_touched(case: str, kept: Path, up: HiveFiles) -> None:
    change, error, says = REFUSED[case]
    put_agent(up.database, "bob")
    before = {path.name: path.read_bytes() for path in up.paths.state.iterdir()}
    changed = rewritten(kept, change)
    for act in (look, restore):
        with pytest.raises(error, match=says):
            act(up, changed)
    after = {path.name: path.read_bytes() for path in up.paths.state.iterdir() if not path.name.endswith(".lock")}
    own = acts_of(up.database)
    assert [(act.act, act.outcome) for act in acts.read(own).acts] == [("backup", "ok"), ("restore", error.code)]
    assert after | {own.name: before[own.name]} == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("hive.conf", b"[proxy]\nprot = 1\n"),
        ("hive.conf", b"\xff"),
        ("sandbox.toml", b"programs = 1"),
        ("sandbox.toml", b"\xff"),
        ("governance.toml", b"[rules.modell-load]"),
        ("governance.toml", b"\xff"),
    ],
)
def test_a_configuration_that_no_service_would_take_is_refused(
    name: str, content: bytes, box: HiveFiles, tmp_path: Path
) -> None:
    backup(box, tmp_path / "b.tar", with_secrets=False)
    with pytest.raises(BadRequest, match=name):
        restore(box, rewritten(tmp_path / "b.tar", replaced(name, content)))
    assert box.parts["hive.conf"].path.read_text() == conf_file.text()
    assert leftovers(box) == []


def test_descriptions_of_models_come_back_and_those_that_came_later_go_aside(box: HiveFiles, tmp_path: Path) -> None:
    first, odd = model_file(box, "first.toml"), model_file(box, "ein schöner.toml", "[model.m]\nfile = '/m'\n")
    before = tree_of(box)
    manifest = backup(box, tmp_path / "b.tar", with_secrets=False)
    assert {"models.d/first.toml", "models.d/ein schöner.toml"} <= {packed.name for packed in manifest.files}
    first.write_text("[model.other]\nfile = '/m.gguf'\n")
    odd.unlink()
    later = model_file(box, "later.toml")
    assert look(box, tmp_path / "b.tar").replaced["models.d/first.toml"] == first
    done = restore(box, tmp_path / "b.tar")
    assert tree_of(box) == before
    assert leftovers(box) == []
    assert not later.exists()
    kept = {path.name.partition(".before")[0] for path in done.kept if path.parent == later.parent}
    assert kept == {"first.toml", "later.toml"}


def test_descriptions_of_templates_come_back_as_those_of_models_do(box: HiveFiles, tmp_path: Path) -> None:
    assert box.layout is not None
    first = box.layout.at(TEMPLATES_D) / "first.toml"
    first.parent.mkdir()
    first.write_text("[template.lg]\npython = '/venv'\nimports = 'json'\n")
    model_file(box, "first.toml")
    before = tree_of(box)
    manifest = backup(box, tmp_path / "b.tar", with_secrets=False)
    assert {"models.d/first.toml", "templates.d/first.toml"} <= {packed.name for packed in manifest.files}
    first.unlink()
    first.parent.rmdir()
    restore(box, tmp_path / "b.tar")
    assert tree_of(box) == before
    assert leftovers(box) == []
    later = first.with_name("later.toml")
    later.write_text("[template.later]\npython = '/venv'\nimports = 'json'\n")
    restore(box, tmp_path / "b.tar")
    assert not later.exists()
    first.write_text("[template.lg]\n")
    backup(box, tmp_path / "c.tar", with_secrets=False)
    with pytest.raises(BadRequest, match=r"templates.d/first.toml: .*python: missing"):
        restore(box, tmp_path / "c.tar")


def test_descriptions_of_models_come_back_where_there_were_none(box: HiveFiles, tmp_path: Path) -> None:
    path = model_file(box, "first.toml")
    before = tree_of(box)
    backup(box, tmp_path / "b.tar", with_secrets=False)
    path.unlink()
    path.parent.rmdir()
    before_mask = os.umask(0o077)
    try:
        restore(box, tmp_path / "b.tar")
    finally:
        os.umask(before_mask)
    assert tree_of(box) == before
    assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o755, 0o644)


def test_a_backup_from_before_there_were_models_takes_them_away(box: HiveFiles, tmp_path: Path) -> None:
    backup(box, tmp_path / "b.tar", with_secrets=False)
    path = model_file(box, "later.toml")
    restore(box, tmp_path / "b.tar")
    assert [kept.name.partition(".before")[0] for kept in path.parent.iterdir()] == ["later.toml"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model.first]\nfyle = '/m.gguf'\n", "models.d/first.toml: .*no such key"),
        ("[model.first]\npin = true\n", "file is missing"),
        ("[daemon]\n", "models.d/first.toml: "),
        ("[model", "models.d/first.toml: "),
    ],
)
def test_descriptions_that_no_daemon_would_take_are_refused(
    text: str, says: str, box: HiveFiles, tmp_path: Path
) -> None:
    path = model_file(box, "first.toml")
    before = tree_of(box)
    backup(box, tmp_path / "b.tar", with_secrets=False)
    with pytest.raises(BadRequest, match=says):
        restore(box, rewritten(tmp_path / "b.tar", replaced("models.d/first.toml", text.encode())))
    assert tree_of(box) == before
    assert leftovers(box) == []
    assert path.exists()


@pytest.mark.parametrize("name", ["back\\slash.toml", "line\nfeed.toml", "x" * 95 + ".toml"])
def test_a_description_whose_name_no_backup_takes_is_told(name: str, box: HiveFiles, tmp_path: Path) -> None:
    model_file(box, name, "[model.first]\nfile = '/m.gguf'\n")
    with pytest.raises(BadRequest, match="no backup takes a file of that name"):
        backup(box, tmp_path / "b.tar", with_secrets=False)
    assert not (tmp_path / "b.tar").exists()


@pytest.mark.parametrize("name", ["models.d/../hive.toml", "models.d/.x.toml", "models.d/a/b.toml", "models.d/x.conf"])
def test_no_name_in_a_backup_leads_out_of_models_d(name: str, box: HiveFiles, tmp_path: Path) -> None:
    model_file(box, "first.toml")
    backup(box, tmp_path / "b.tar", with_secrets=False)

    def renamed(manifest: dict[str, Any], members: list[Any]) -> None:
        for info, _ in members:
            info.name = name if info.name == "models.d/first.toml" else info.name
        next(file for file in manifest["files"] if file["name"] == "models.d/first.toml")["name"] = name

    assert box.part(name) is None
    assert box.layout is not None
    before = set(box.layout.root.rglob("*.toml"))
    assert restore(box, rewritten(tmp_path / "b.tar", renamed)).left_out == [name]
    assert set(box.layout.root.rglob("*.toml")) < before  # hive.conf came back, and it describes no model


@pytest.fixture(scope="module")
def whole_archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, HiveFiles]:
    state = tmp_path_factory.mktemp("whole") / "state"
    state.mkdir()
    place = of_up(Paths(state, state))
    put_agent(place.database, "ann")
    (state / "ports.json").write_text('{"asked":{"proxy":1,"ingress":2},"got":{"proxy":3,"ingress":4}}')
    backup(place, state / "b.tar", with_secrets=False)
    return (state / "b.tar").read_bytes(), place


@given(data=st.data())
@tried(max_examples=examples(60), deadline=None)
def test_no_cut_and_no_changed_byte_is_taken_for_a_backup(
    whole_archive: tuple[bytes, HiveFiles], data: st.DataObject
) -> None:
    """Or, where the byte is in what tar itself does not need, what is restored is what was kept."""
    whole, place = whole_archive
    cut = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        changed = whole[:cut]
    else:
        changed = whole[:cut] + bytes([whole[cut] ^ data.draw(st.integers(1, 255))]) + whole[cut + 1 :]
    source = place.paths.state.parent / "changed.tar"
    source.write_bytes(changed)
    try:
        done = look(place, source)
    except HiveError:
        return
    assert done.manifest is not None
    assert set(done.replaced) | set(done.left_out) == {DATABASE, "ports.json"}


def test_a_file_that_is_none_is_told(up: HiveFiles, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for source, error in ((tmp_path / "none", NotFound), (tmp_path / "text", BadRequest), (tmp_path, BadRequest)):
        with pytest.raises(error):
            restore(up, source)


def test_a_database_of_an_older_hive_is_taken_and_migrated_at_its_next_start(up: HiveFiles, tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "old.db", isolation_level=None)
    migrate(conn, STEPS[:2])
    conn.close()
    backup(up, tmp_path / "b.tar", with_secrets=False)
    restore(up, rewritten(tmp_path / "b.tar", replaced(DATABASE, (tmp_path / "old.db").read_bytes())))
    Database.open(up.database).close()
    conn = sqlite3.connect(up.database)
    assert schema_of(conn).taken == len(STEPS)
    conn.close()


def test_modes_and_owners_are_those_of_the_files_that_are_replaced(up: HiveFiles, kept: Path) -> None:
    owner = (70001, 70002) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(up.paths.state, *owner)
    os.chown(up.database, *owner)
    up.database.chmod(0o640)
    (up.paths.state / "ports.json").unlink()
    up.paths.internal_token.chmod(0o644)
    restore(up, kept)
    found = {path.name: path.stat() for path in up.paths.state.iterdir()}
    assert {(found[name].st_uid, found[name].st_gid) for name in ("hive.db", "ports.json", "hive.db.lock")} == {owner}
    assert stat.S_IMODE(found["hive.db"].st_mode) == 0o640
    assert stat.S_IMODE(found["internal.token"].st_mode) == 0o600, "a secret is never others' to read"
    assert stat.S_IMODE(found["ports.json"].st_mode) == 0o600


def test_a_link_in_the_place_of_a_file_is_not_followed(up: HiveFiles, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (up.paths.state / "ports.json").unlink()
    (up.paths.state / "ports.json").symlink_to(tmp_path / "other")
    with pytest.raises(BadRequest, match="no plain file"):
        restore(up, kept)
    assert (tmp_path / "other").read_text() == "mine"
    assert leftovers(up) == []


def test_what_the_old_database_had_beside_it_is_not_played_into_the_new_one(up: HiveFiles, kept: Path) -> None:
    """One that is damaged keeps its write-ahead log, which SQLite would find beside the new file."""
    put_agent(up.database, "bob")
    log = up.database.with_name("hive.db-wal")
    conn = sqlite3.connect(up.database)
    conn.execute("PRAGMA journal_mode = WAL")
    conn.execute("UPDATE agents SET name = 'carl' WHERE name = 'ann'")
    conn.commit()
    content = log.read_bytes()
    conn.close()
    up.database.write_bytes(b"damaged" * 1000)
    log.write_bytes(content)
    done = restore(up, kept)
    assert names_in(up.database) == ["ann"]
    assert any(path.name.startswith("hive.db.before-restore-") for path in done.kept)
    assert [path.read_bytes() for path in up.paths.state.glob("*.before-restore-*-wal")] == [content]


async def test_after_a_restore_the_second_copy_brings_nothing_of_what_came_later(up: HiveFiles, tmp_path: Path) -> None:
    """It is of the same database, and ahead of it: it would take for lost changes what was to be undone."""
    store = Database.open(up.database)
    store.close()
    backup(up, tmp_path / "b.tar", with_secrets=False)
    store = Database.open(up.database)
    await store.write(lambda conn: agents.remove(conn, agents.all(conn)[0].id, now=1.0))
    await store.write(lambda conn: agents.insert(conn, Agent(id="new", spec=AgentSpec(name="new", command=["x"]))))
    store.close()
    done = restore(up, tmp_path / "b.tar")
    assert any(path.name.startswith("hive.db.second.before-restore-") for path in done.kept)
    store = Database.open(up.database)
    assert [one.name for one in await store.read(agents.all)] == ["ann"]
    assert store.loss is None
    store.close()


async def test_after_a_restore_nothing_is_used_that_was_flushed_since(up: HiveFiles, tmp_path: Path) -> None:
    backup(up, tmp_path / "b.tar", with_secrets=False)
    restore(up, tmp_path / "b.tar")
    store = Database.open(up.database)
    assert await store.read(cache_epochs.is_due)
    await store.write(lambda conn: cache_epochs.raise_as_due(conn, 7.0))
    assert [(one.key, one.number) for one in await store.read(cache_epochs.epochs)] == [("all", 7000)]
    assert not await store.read(cache_epochs.is_due)
    store.close()


def test_what_ran_in_the_backup_is_started_again_as_after_a_boot(up: HiveFiles, tmp_path: Path) -> None:
    """On the same machine no boot was seen, so what ran ended as `error: ended, how is unknown`."""
    with contextlib.closing(sqlite3.connect(up.database, isolation_level=None)) as conn:
        runtime_settings.put(conn, runtime_settings.BOOT, boot_id(), actor="hive", now=1.0)
    backup(up, tmp_path / "b.tar", with_secrets=False)
    restore(up, tmp_path / "b.tar")
    with contextlib.closing(sqlite3.connect(up.database)) as conn:
        conn.row_factory = sqlite3.Row
        noted = runtime_settings.get(conn, runtime_settings.BOOT)
    assert noted is not None
    assert not is_same_boot(noted, boot_id())


def test_two_restores_within_a_second_keep_both(up: HiveFiles, kept: Path) -> None:
    restore(up, kept)
    put_agent(up.database, "bob")
    restore(up, kept)
    kept_names = [names_in(path) for path in sorted(up.paths.state.glob("hive.db.before-restore-*"))]
    assert sorted(kept_names) == [["ann"], ["ann", "bob"]]


def test_heads_that_cannot_be_moved_away_are_told_before_anything_is_touched(up: HiveFiles, kept: Path) -> None:
    heads = anchors_of(up.database)
    heads.write_text("")
    if subprocess.run(["chattr", "+a", str(heads)], capture_output=True).returncode:
        pytest.skip("no file here can be made append-only")
    put_agent(up.database, "bob")
    try:
        with pytest.raises(WrongState, match="only be appended to"):
            restore(up, kept)
        assert names_in(up.database) == ["ann", "bob"]
        assert leftovers(up) == []
    finally:
        subprocess.run(["chattr", "-a", str(heads)], check=True)
    restore(up, kept)
    assert not heads.exists()


# --- kill -9 -------------------------------------------------------------------------------------------------------

CRASHES = """
import os, signal, sys
from pathlib import Path
at, left = int(sys.argv[1]), [0]
for name in ("rename", "link", "unlink", "fsync", "fchmod"):
    def wrap(real):
        def call(*args, **more):
            left[0] += 1
            if left[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)
        return call
    setattr(os, name, wrap(getattr(os, name)))
from hive.cli.main import main
code = main(sys.argv[2:])
sys.exit(code)
"""


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_killed_at_any_point_it_is_the_old_state_or_the_new_one_once_finished(box: HiveFiles, tmp_path: Path) -> None:
    """Each call to the system that changes something is the last one once. The heads go with their database."""
    heads = anchors_of(box.database)
    heads.write_text(f"1 {'0a' * 32} 2026-11-20T18:00:00Z\n")
    root = str(box.layout.root) if box.layout else ""
    model_file(box, "first.toml")
    backup(box, tmp_path / "b.tar", with_secrets=True)
    new = tree_of(box)
    put_agent(box.database, "bob")
    box.parts["hive.conf"].path.write_text("[proxy]\nport = 1\n")
    box.parts["secrets/box-key"].path.write_bytes(b"k" * 32)
    model_file(box, "first.toml", "[model.first]\nfile = '/other.gguf'\n")
    model_file(box, "later.toml")
    old = tree_of(box)
    words = ["restore", str(tmp_path / "b.tar"), "--yes", "--prefix", root]
    ends = {"old": 0, "to finish": 0, "new": 0}
    snapshot = contents_below(Path(root))
    at = 0
    while ends["new"] < 3:
        at += 1
        ran = subprocess.run(
            [sys.executable, "-c", CRASHES, str(at), *words], capture_output=True, text=True, check=False
        )
        assert ran.returncode in (0, -9), ran.stderr
        if plan_of(box.database).exists():
            with pytest.raises(WrongState, match="cut short"):
                Database.open(box.database)
            assert restore(box, None).finished
            assert tree_of(box) == new, at
            assert not heads.exists(), at
            ends["to finish"] += 1
        else:
            found = tree_of(box)
            assert found in (old, new), at
            assert heads.exists() is (found == old), at
            Database.open(box.database).close()
            ends["old" if found == old else "new"] += 1
        assert plan_of(box.database).exists() is False
        restore_tree(Path(root), snapshot)
    print(ends)
    assert ends["old"] > 10
    assert ends["to finish"] > 10


def contents_below(root: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mode) for path in root.rglob("*") if path.is_file()}


def restore_tree(root: Path, snapshot: Mapping[Path, tuple[bytes, int]]) -> None:
    for path in root.rglob("*"):
        if path.is_file() and path not in snapshot:
            path.unlink()
    for path, (content, mode) in snapshot.items():
        path.write_bytes(content)
        path.chmod(stat.S_IMODE(mode))


def test_a_plan_from_the_daemons_user_leads_root_nowhere_else(box: HiveFiles) -> None:
    """The plan lies in a directory of the daemon's; no path of it is ever used."""
    for plan in (
        '{"names": ["../../etc/passwd"], "stamp": "20261120T100000"}',
        '{"names": ["hive.conf"], "stamp": "../../x"}',
        '{"names": [], "stamp": "20261120T100000", "path": "/etc/passwd"}',
        '{"names": [], "gone": ["../../etc/passwd"], "stamp": "20261120T100000"}',
        "[]",
    ):
        plan_of(box.database).write_text(plan)
        with pytest.raises(HiveError, match="cannot be read"):
            restore(box, None)


@pytest.mark.timeout(120)
def test_a_backup_killed_at_any_point_leaves_no_half_file(up: HiveFiles, tmp_path: Path) -> None:
    target = tmp_path / "b.tar"
    words = ["backup", str(target), "--state-dir", str(up.paths.state)]
    whole = cut = 0
    for at in range(1, 200, 3):
        ran = subprocess.run(
            [sys.executable, "-c", CRASHES, str(at), *words], capture_output=True, text=True, check=False
        )
        assert ran.returncode in (0, -9), ran.stderr
        if target.exists():
            look(up, target)
            target.unlink()
            whole += 1
            if ran.returncode == 0:
                break
        else:
            cut += 1
    assert whole
    assert cut
    assert names_in(up.database) == ["ann"]
    backup(up, target, with_secrets=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "state"], "the next one clears up"


# --- the commands --------------------------------------------------------------------------------------------------


def test_the_commands_say_what_they_did(up: HiveFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--state-dir", str(up.paths.state)]
    file = str(tmp_path / "b.tar")
    assert main(["backup", file, *where]) == 0
    assert "without secrets" in capsys.readouterr().out
    put_agent(up.database, "bob")
    assert main(["restore", file, *where, "--dry-run"]) == 0
    assert "would be as it was" in capsys.readouterr().out
    assert names_in(up.database) == ["ann", "bob"]
    assert main(["restore", file, *where, "--json"]) == 2, "nobody can be asked"
    capsys.readouterr()
    assert main(["restore", file, *where, "--yes"]) == 0
    said = capsys.readouterr().out
    assert "kept: " in said
    assert names_in(up.database) == ["ann"]
    assert main(["restore", *where]) == 2
    assert main(["restore", file, "--finish", *where]) == 2
    capsys.readouterr()
    assert main(["restore", "--finish", *where]) == 0
    assert capsys.readouterr().out == "nothing was cut short\n"


def test_nobody_is_asked_about_a_backup_that_is_not_there(
    up: HiveFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hive restore /nonexistent` asked whether to replace everything by it."""
    code = main(["restore", str(tmp_path / "none.tar"), "--state-dir", str(up.paths.state)])
    assert (code, f"there is no {tmp_path}/none.tar" in capsys.readouterr().err) == (3, True)


def test_a_directory_that_is_not_there_is_named(
    up: HiveFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that a hidden file beside the backup could not be changed, with exit code 1."""
    code = main(["backup", str(tmp_path / "none/b.tar"), "--state-dir", str(up.paths.state)])
    assert (code, f"there is no directory {tmp_path}/none" in capsys.readouterr().err) == (3, True)


def test_which_hive_is_meant(box: HiveFiles, tmp_path: Path) -> None:
    assert box.layout is not None
    found = place_of(state_dir=None, prefix=box.layout.root, uid=0, env={})
    assert (found.kind, found.database) == ("appliance", box.database)
    assert place_of(state_dir=tmp_path, prefix=box.layout.root, uid=0, env={}).kind == "up"
    with pytest.raises(NotFound, match="no Hive is installed"):
        place_of(state_dir=None, prefix=tmp_path, uid=0, env={})


def test_what_a_hive_up_kept_can_be_restored_into_an_installed_one(
    up: HiveFiles, box: HiveFiles, tmp_path: Path
) -> None:
    backup(up, tmp_path / "b.tar", with_secrets=True)
    done = restore(box, tmp_path / "b.tar")
    assert done.left_out == ["ports.json"]
    assert box.parts["secrets/box-key"].path.read_bytes() == bytes(range(32))
    assert box.layout is not None
    assert stat.S_IMODE((box.layout.at(SECRETS) / "box-key").stat().st_mode) == 0o600


def test_the_first_file_is_the_manifest(kept: Path) -> None:
    with tarfile.open(kept) as tar:
        assert tar.getnames()[:2] == [MANIFEST, DATABASE]
        assert {info.mode for info in tar} == {0o600}


BACKUP_BY = """
import sys
from hive.cli.main import main
print(main(["backup", "--state-dir", {state!r}, "/tmp/never.tar", "--json"]), file=sys.stdout)
"""


def test_a_user_who_may_not_read_the_state_is_told_so() -> None:
    """A member of the group hive read `a fault in Hive itself: PermissionError`."""
    with tempfile.TemporaryDirectory() as name:
        state = Path(name) / "state"
        state.mkdir()
        assert run_as_nobody(BACKUP_BY.format(state=str(state))).strip().endswith("4")
