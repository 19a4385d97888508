"""Secrets: made once, whole, private; changed by one command; never shown."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path

import pytest

from hive.cli.main import main
from hive.errors import ConfigError, NotFound, NotPermitted
from hive.files.layout import REDIS_ACL, Layout
from hive.files.secrets import (
    ROTATING,
    SECRETS,
    acl_is_right,
    directory,
    generate,
    listed,
    missing,
    remove_retired,
    retired,
    rotate,
    what_it_takes,
)
from hive.host.files import beside
from tests.install.killed import killed_everywhere

UNITS = Path(__file__).parents[2] / "systemd"


@pytest.fixture
def root(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def values(place: Layout) -> dict[str, bytes]:
    return {name: (directory(place) / name).read_bytes() for name in SECRETS}


def test_secrets_are_made_once_and_nobody_else_can_read_them(root: Layout) -> None:
    assert generate(root) == list(SECRETS)
    made = values(root)
    assert len(made["box-key"]) == 32
    assert len(set(made.values())) == len(SECRETS)
    assert all(len(value) >= 32 for value in made.values())
    for name in SECRETS:
        assert stat.S_IMODE((directory(root) / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory(root).stat().st_mode) == 0o700
    assert generate(root) == []
    assert values(root) == made


def test_whatever_the_umask_is_the_rights_are_the_same(root: Layout) -> None:
    before = os.umask(0)
    try:
        generate(root)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory(root).iterdir()} == {0o600}
    assert stat.S_IMODE(root.at(REDIS_ACL).stat().st_mode) == 0o640


def test_only_what_is_missing_is_made(root: Layout) -> None:
    generate(root)
    made = values(root)
    (directory(root) / "api-token").unlink()
    assert missing(root) == ["api-token"]
    assert generate(root) == ["api-token"]
    again = values(root)
    assert again.pop("api-token") != made.pop("api-token")
    assert again == made


def test_a_secret_of_an_earlier_version_stays_until_nothing_reads_it_any_more(root: Layout) -> None:
    """The services that read it run on until the new version is started."""
    generate(root)
    made, old = values(root), directory(root) / "redis-proxy"
    old.write_text("x" * 43)
    assert generate(root) == []
    assert retired(root) == ["redis-proxy"]
    assert "user proxy" not in root.at(REDIS_ACL).read_text()
    remove_retired(root, retired(root))
    assert (retired(root), old.exists(), values(root)) == ([], False, made)


def test_a_link_in_the_place_of_a_secret_is_not_followed(root: Layout, tmp_path: Path) -> None:
    generate(root)
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (directory(root) / "api-token").unlink()
    (directory(root) / "api-token").symlink_to(victim)
    assert generate(root) == []
    assert victim.read_text() == "kept"
    assert [found.problem for found in listed(root) if found.secret.name == "api-token"] == ["not a file"]


def test_a_directory_of_somebody_elses_is_not_taken(root: Layout, tmp_path: Path) -> None:
    directory(root).parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    directory(root).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a directory"):
        generate(root)


def test_the_acl_has_digests_and_no_password(root: Layout) -> None:
    generate(root)
    acl = root.at(REDIS_ACL).read_text()
    password = (directory(root) / "redis-daemon").read_bytes()
    assert password.decode() not in acl
    assert f"user daemon on #{hashlib.sha256(password).hexdigest()}" in acl


def test_an_acl_that_does_not_fit_is_written_anew(root: Layout) -> None:
    generate(root)
    right = root.at(REDIS_ACL).read_text()
    root.at(REDIS_ACL).write_text("user default on nopass +@all\n")
    assert not acl_is_right(root)
    generate(root)
    assert root.at(REDIS_ACL).read_text() == right


def test_a_rotation_changes_one_secret_and_the_acl_with_it(root: Layout) -> None:
    generate(root)
    before, acl = values(root), root.at(REDIS_ACL).read_text()
    rotate(root, "redis-daemon")
    after = values(root)
    assert {name for name in SECRETS if before[name] != after[name]} == {"redis-daemon"}
    assert acl_is_right(root)
    assert root.at(REDIS_ACL).read_text() != acl
    rotate(root, "box-key")
    assert len(values(root)["box-key"]) == 32


def test_what_does_not_exist_is_not_rotated(root: Layout) -> None:
    with pytest.raises(NotFound, match="there are no secrets"):
        rotate(root, "box-key")
    generate(root)
    with pytest.raises(NotFound, match="no secret nothing"):
        rotate(root, "nothing")


def test_a_rotation_that_was_cut_short_is_finished_by_the_next_call(root: Layout) -> None:
    generate(root)
    (directory(root) / ROTATING).write_text("redis-daemon")
    (directory(root) / "redis-daemon").write_text("x" * 43)
    beside(directory(root) / "redis-daemon").write_text("half")
    assert not acl_is_right(root)
    generate(root)
    assert acl_is_right(root)
    assert {path.name for path in directory(root).iterdir()} == set(SECRETS)


@pytest.mark.parametrize(("what", "least"), [("generate", 30), ("rotate", 15)])
def test_killed_anywhere_a_secret_is_whole_and_the_next_call_ends_it(what: str, least: int, tmp_path: Path) -> None:
    found = killed_everywhere(what, tmp_path)
    assert found["wrong"] == []
    assert found["places"] >= least


def test_what_reads_a_secret_is_what_its_units_say() -> None:
    """A rotation restarts exactly these; Redis reads the ACL that is made from one of them."""
    loaded: dict[str, set[str]] = {name: set() for name in SECRETS}
    for unit in UNITS.glob("*.service"):
        for name, path in re.findall(r"^LoadCredential=([\w-]+):(\S+)$", unit.read_text(), re.MULTILINE):
            assert path == f"/etc/hive/secrets/{name}"
            loaded[name].add(unit.name)
    for secret in SECRETS.values():
        assert loaded[secret.name] | ({"hive-redis.service"} if secret.redis_user else set()) == set(secret.readers)


# --- the commands ------------------------------------------------------------------------------------------------


def typed(capsys: pytest.CaptureFixture[str], place: Layout, *words: str) -> tuple[int, str, str]:
    code = main(["secrets", *words, "--prefix", str(place.root)])
    return (code, *capsys.readouterr())


def test_no_command_ever_prints_a_value(root: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for words in (
        ["generate"],
        ["list"],
        ["list", "--json"],
        ["rotate", "api-token"],
        ["rotate", "redis-daemon", "--json"],
    ):
        before = values(root) if directory(root).is_dir() else {}
        code, out, err = typed(capsys, root, *words)
        assert code == 0, err
        said.append(out + err)
        for value in (*before.values(), *values(root).values()):
            for form in (value.decode("latin-1"), value.hex()):
                assert all(form not in text for text in said)


def test_the_list_says_how_old_each_is_and_what_reads_it(root: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    generate(root)
    os.utime(directory(root) / "box-key", (1, 1))
    (directory(root) / "api-token").unlink()
    (directory(root) / "internal-token").chmod(0o644)
    _, out, _ = typed(capsys, root, "list", "--json")
    found = {one["name"]: one for one in json.loads(out)["secrets"]}
    assert found["box-key"]["changed_at"] == 1
    assert found["box-key"]["readers"] == ["hive-daemon.service"]
    assert (found["api-token"]["changed_at"], found["api-token"]["problem"]) == (None, "not there")
    assert found["internal-token"]["problem"] == "others can get at it"
    _, out, _ = typed(capsys, root, "list")
    assert re.search(r"box-key +\d+d .*ago +hive-daemon\.service", out)


def test_another_box_key_is_asked_about(root: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    generate(root)
    before = values(root)
    code, _, err = typed(capsys, root, "rotate", "box-key")
    assert code == 2
    assert "Every agent gets other tokens" in err
    assert values(root) == before
    assert typed(capsys, root, "rotate", "box-key", "--yes")[0] == 0
    assert values(root)["box-key"] != before["box-key"]


def test_whoever_rotates_a_secret_on_a_living_box_is_asked_first(
    root: Layout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hive secrets rotate redis-daemon` restarted Redis and the daemon at once, amid everybody's orders."""
    generate(root)
    before = values(root)
    # As a living box has it; nothing is restarted, because nothing is rotated.
    monkeypatch.setattr("hive.files.secrets._restarts", lambda layout: True)
    code, _, err = typed(capsys, root, "rotate", "redis-daemon")
    assert code == 2
    assert "This restarts hive-redis, hive-daemon. Change redis-daemon?" in err
    assert "say --yes" in err
    assert values(root) == before
    for name in SECRETS:
        assert what_it_takes(root, name), name


@pytest.mark.root
def test_who_is_not_root_sees_nothing(root: Layout) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    generate(root)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setuid(65534)
            listed(root)
        except NotPermitted:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
