"""Files of the configuration that root can read and a service cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.files.config_readers import unreadable


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    conf, models, templates = tmp_path / "hive.conf", tmp_path / "models.d", tmp_path / "templates.d"
    conf.write_text("")
    for directory in (models, templates):
        directory.mkdir(mode=0o755)
    (models / "a.toml").write_text("")
    (templates / "b.toml").write_text("")
    for path in (conf, models / "a.toml", templates / "b.toml"):
        path.chmod(0o644)
    return conf


def test_nothing_is_said_of_what_all_may_read_nor_of_what_is_no_file_of_models(conf: Path) -> None:
    (conf.parent / "models.d" / ".a.toml.swp").touch(mode=0o600)
    assert unreadable(conf) == []


@pytest.mark.parametrize(
    ("name", "mode", "bits"),
    [
        ("hive.conf", 0o640, "r"),
        ("models.d/a.toml", 0o600, "r"),
        ("models.d", 0o754, "rx"),
        ("templates.d/b.toml", 0o600, "r"),
    ],
)
def test_what_others_may_not_read_is_told_with_the_command_that_changes_it(
    conf: Path, name: str, mode: int, bits: str
) -> None:
    place = conf.parent / name
    place.chmod(mode)
    assert unreadable(conf) == [f"{place}: the services of Hive cannot read it; chmod o+{bits} {place}"]


def test_a_directory_without_models_is_nobodys_to_read(conf: Path) -> None:
    (conf.parent / "models.d" / "a.toml").unlink()
    (conf.parent / "models.d").chmod(0o700)
    assert unreadable(conf) == []
