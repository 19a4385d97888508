"""install.sh before there is a Python: what it refuses, and what it does where Hive itself no longer can."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hive.host import systemd

SCRIPT = Path(__file__).parents[2] / "install.sh"


def type_script(*words: str, as_nobody: bool = False) -> subprocess.CompletedProcess[str]:
    user = {"user": 65534, "group": 65534, "extra_groups": []} if as_nobody else {}
    return subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, check=False, cwd="/", **user)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "words",
    [["--purge"], ["--no-such"], ["down"], ["--uninstall", "box"], ["--prefix", "/no/such/directory"], ["--help"]],
)
def test_what_it_does_not_know_it_does_not_do(words: list[str]) -> None:
    said = type_script(*words)
    assert said.returncode == 2
    assert "usage" in said.stderr or "--prefix" in said.stderr


def test_without_root_it_says_what_to_type() -> None:
    if os.geteuid() == 0 and not os.access(SCRIPT.parent, os.X_OK):
        pytest.skip("nobody else can come here")
    for words in ([], ["--uninstall"]):
        said = type_script(*words, as_nobody=os.geteuid() == 0)
        if said.returncode == 126:
            pytest.skip("nobody else may read this checkout")
        assert said.returncode == 4, said.stderr
        assert "sudo ./install.sh" in said.stderr


@pytest.mark.root
def test_without_systemd_it_says_what_works_instead() -> None:
    if os.geteuid() != 0 or systemd.is_booted():
        pytest.skip("needs root, and a machine without systemd: this one would be installed on")
    said = type_script()
    assert said.returncode == 5
    assert "./install.sh up" in said.stderr
    assert not Path("/opt/hive").exists()


@pytest.mark.root
def test_what_nothing_can_remove_any_more_the_script_removes(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for name in ("opt/hive/versions/0.1.0-1/bin", "etc/hive", "var/lib/hive", "usr/local/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "usr/local/bin/hive").symlink_to("/opt/hive/current/bin/hive")
    refused = type_script("--uninstall", "--prefix", str(tmp_path))
    assert (refused.returncode, (tmp_path / "opt/hive").exists()) == (3, True)
    assert type_script("--uninstall", "--yes", "--prefix", str(tmp_path)).returncode == 0
    assert not (tmp_path / "opt/hive").exists()
    assert not (tmp_path / "usr/local/bin/hive").is_symlink()
    assert (tmp_path / "etc/hive").exists()
    assert (tmp_path / "var/lib/hive").exists()
    assert type_script("--uninstall", "--purge", "--yes", "--prefix", str(tmp_path)).returncode == 0
    assert not (tmp_path / "etc/hive").exists()
    assert not (tmp_path / "var/lib/hive").exists()
