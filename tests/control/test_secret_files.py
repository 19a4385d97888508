"""The box key and the internal token: made once, kept, private."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from hive.control.secret_files import box_key, internal_token
from hive.errors import ConfigError, HiveError, NotPermitted, WrongState


def test_a_missing_key_is_made_private_and_kept(tmp_path: Path) -> None:
    key = box_key(tmp_path / "box.key", {})
    assert len(key) == 32
    assert box_key(tmp_path / "box.key", {}) == key
    assert stat.S_IMODE((tmp_path / "box.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["box.key"]


def test_a_damaged_key_is_said_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "box.key").write_bytes(b"short")
    (tmp_path / "box.key").chmod(0o600)
    with pytest.raises(ConfigError, match="damaged: 5 bytes"):
        box_key(tmp_path / "box.key", {})
    assert (tmp_path / "box.key").read_bytes() == b"short"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_can_get_at_is_not_used(tmp_path: Path, mode: int) -> None:
    """A box key restored from a backup with mode 644 was taken without a word: every agent's tokens follow from it."""
    box_key(tmp_path / "box.key", {})
    (tmp_path / "box.key").chmod(mode)
    with pytest.raises(NotPermitted, match=f"mode {mode:o}"):
        box_key(tmp_path / "box.key", {})


def test_a_link_in_the_place_of_a_key_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (tmp_path / "box.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HiveError):
        box_key(tmp_path / "box.key", {})


def test_a_state_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HiveError, match="nowhere"):
        box_key(tmp_path / "nowhere" / "box.key", {})


def test_the_internal_token_of_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    made = internal_token(tmp_path / "internal.token", {})
    assert internal_token(tmp_path / "internal.token", {}) == made
    given = internal_token(tmp_path / "internal.token", {"HIVE_INTERNAL_TOKEN": "0123456789abcdef"})
    assert given == "0123456789abcdef" != made


def test_what_systemd_hands_over_goes_before_environment_and_file(tmp_path: Path) -> None:
    handed = tmp_path / "credentials"
    handed.mkdir()
    (handed / "internal-token").write_text("0123456789abcdef-handed\n")
    (handed / "box-key").write_bytes(bytes(range(32)))
    env = {"CREDENTIALS_DIRECTORY": str(handed), "HIVE_INTERNAL_TOKEN": "0123456789abcdef"}
    assert internal_token(tmp_path / "internal.token", env) == "0123456789abcdef-handed"
    assert box_key(tmp_path / "box.key", env) == bytes(range(32))
    assert [path.name for path in tmp_path.iterdir()] == ["credentials"]


@pytest.mark.parametrize("token", ["short", "with space in the middle", "with-ümlaut-in-the-middle"])
def test_a_token_that_is_none_is_refused_by_the_name_of_its_source(tmp_path: Path, token: str) -> None:
    with pytest.raises(ConfigError, match="HIVE_INTERNAL_TOKEN is no token"):
        internal_token(tmp_path / "internal.token", {"HIVE_INTERNAL_TOKEN": token})


def test_not_permitted_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hive.control.secret_files.os.open", denied)
    with pytest.raises(NotPermitted, match=r"cannot use .*box\.key: Permission denied"):
        box_key(tmp_path / "box.key", {})


def test_a_directory_that_is_not_there_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(WrongState, match=r"cannot use .*box\.key: No such file or directory"):
        box_key(tmp_path / "nowhere/box.key", {})
