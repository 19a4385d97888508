"""The checks of adapters look at real directories and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hive.adapters.keys import TrustedKeys
from hive.doctor.checks.check import Status
from hive.doctor.checks.target import Subject
from hive.doctor.doctor import Result, choose, examine
from hive.settings.adapters import AdaptersSection
from hive.settings.table import Settings
from tests.adapters.lora_files import new_key


def look(subject: Subject, name: str, **section: str) -> Result:
    assert subject.paths is not None
    given = AdaptersSection(dir=str(subject.paths.state / "from"))
    settings = Settings(adapters=msgspec.structs.replace(given, **section))
    [result] = examine(msgspec.structs.replace(subject, settings=settings), choose([f"adapters.{name}"]))
    return result


@pytest.fixture
def keys(up: Subject) -> TrustedKeys:
    assert up.paths is not None
    return TrustedKeys(up.paths.adapter_keys(""))


def test_without_a_directory_there_is_nothing_to_look_at(up: Subject) -> None:
    for name in ("dir", "keys"):
        assert look(up, name, dir="").status is Status.SKIP
    assert look(up, "installed", dir="").status is Status.SKIP


@pytest.mark.parametrize(
    ("make", "status", "word"),
    [
        (lambda path: None, Status.FAIL, "it is not there"),
        (lambda path: path.write_text(""), Status.FAIL, "it is no directory"),
        (lambda path: path.mkdir(mode=0o755), Status.PASS, "if they are signed"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), Status.WARN, "every user may write"),
    ],
)
def test_the_directory_they_come_from_is_there_and_not_everybodys(
    up: Subject, make: Callable[[Path], object], status: Status, word: str
) -> None:
    assert up.paths is not None
    make(up.paths.state / "from")
    result = look(up, "dir")
    assert (result.status, word in result.reason) == (status, True), result


def test_there_is_a_key_to_verify_with(up: Subject, keys: TrustedKeys) -> None:
    assert "no key is trusted" in look(up, "keys").reason
    key = new_key()
    keys.trust(key.public.pem)
    assert look(up, "keys").status is Status.PASS
    keys.revoke(key.public.id)
    assert look(up, "keys").status is Status.FAIL
    assert look(up, "keys", signatures="off").status is Status.PASS


def test_a_key_that_is_not_to_be_believed_is_told(up: Subject, keys: TrustedKeys) -> None:
    key = new_key()
    keys.trust(key.public.pem)
    (keys.keys_dir / f"{key.public.id}.pem").write_bytes(new_key().public.pem)
    result = look(up, "keys")
    assert (result.status, "holds the key" in result.reason) == (Status.FAIL, True), result
    (keys.keys_dir / f"{key.public.id}.pem").chmod(0o666)
    assert look(up, "keys").status is Status.FAIL


def test_a_directory_of_keys_that_others_may_write_to_is_told(up: Subject, keys: TrustedKeys) -> None:
    keys.trust(new_key().public.pem)
    keys.keys_dir.chmod(0o777)
    result = look(up, "keys")
    assert (result.status, "says whose adapters are loaded" in result.reason) == (Status.FAIL, True)


def test_what_is_installed_is_readable_for_servers(up: Subject) -> None:
    assert up.paths is not None
    up.paths.adapters.mkdir(mode=0o755)
    assert look(up, "installed").status is Status.PASS
    up.paths.adapters.chmod(0o777)
    assert look(up, "installed").status is Status.FAIL
