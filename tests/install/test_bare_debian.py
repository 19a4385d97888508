"""README's two commands on a bare Debian 12: no Python, no Redis, no package lists, a clean copy of the repository.

The machine is a root directory made by mmdebstrap (kept in HIVE_CI_CACHE), entered with a mount and a pid namespace of
its own, so that whatever is started in it ends with the test. It gets this machine's package sources: apt's list, and
pip's configuration with the local folders that names.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.install.step_list import STEPS
from tests.host import package_sources, systemd_machine

CACHE = systemd_machine.ALL_CACHES / "bare"
USER = "ann"

pytestmark = [pytest.mark.bare, pytest.mark.root, pytest.mark.timeout(900)]


class Machine:
    """A bare Debian. `run` is what somebody types there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._binds = [*package_sources.give(root), "/dev"]
        (root / "dev").mkdir(exist_ok=True)

    def clone(self, where: str) -> None:
        package_sources.clone(self.root / where.lstrip("/"))

    def run(self, command: str, *, user: str = "root", cwd: str = "/") -> subprocess.CompletedProcess[str]:
        """Types `command` into a shell of `user` in `cwd`."""
        binds = "; ".join(
            f"mount --rbind {shlex.quote(path)} {shlex.quote(f'{self.root}{path}')}" for path in self._binds
        )
        typed = f"cd {shlex.quote(cwd)} && {command}"
        shell = f"exec chroot {shlex.quote(str(self.root))} /bin/su {user} -s /bin/bash -c {shlex.quote(typed)}"
        script = f"set -e; {binds}; mount -t proc proc {shlex.quote(str(self.root))}/proc; {shell}"
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **package_sources.environment(),
        }
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )


@pytest.fixture(scope="module")
def image() -> Path:
    """The tar of a minimal Debian 12, made once."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    if shutil.which("mmdebstrap") is None or not systemd_machine.SOURCES.exists():
        pytest.skip(f"needs mmdebstrap and {systemd_machine.SOURCES}")
    tar = CACHE / "bookworm.tar"
    if not tar.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = tar.with_suffix(".new.tar")
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", made, systemd_machine.SOURCES], check=True
        )
        made.rename(tar)
    return tar


@pytest.fixture
def machine(image: Path) -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="hive-bare-"))
    root.chmod(0o755)
    subprocess.run(["tar", "-x", "-f", image, "-C", root, "--exclude=./dev/*"], check=True)
    machine = Machine(root)
    machine.clone("/srv/hive")
    machine.run(f"useradd --create-home {USER}")
    machine.clone(f"/home/{USER}/my hive")
    machine.run(f"chown -R {USER}: /home/{USER}")
    with systemd_machine.one_at_a_time(systemd_machine.ONLINE):
        yield machine
    shutil.rmtree(root)


def summary_of(ran: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The one JSON object on stdout; anything else there fails."""
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert isinstance(found, dict)
    return found


def test_on_a_bare_debian_both_commands_work_as_root_and_as_a_user(machine: Machine) -> None:
    home = f"/home/{USER}/my hive"

    refused = machine.run("./install.sh up", user=USER, cwd=home)
    assert refused.returncode == 5
    assert "python3-venv" in refused.stderr
    assert "redis-server" in refused.stderr
    assert "sudo apt-get" in refused.stderr
    assert not (machine.root / home.lstrip("/") / ".venv").exists()

    first = machine.run("./install.sh up --exit-after 60 --json", cwd="/srv/hive")
    found = summary_of(first)
    assert (found["backend"], found["isolation"], found["errors"]) == ("demo", "uid", 0), first.stderr
    assert found["agents"] == 3
    assert isinstance(found["pauses"], int)
    assert isinstance(found["wakes"], int)
    assert found["pauses"] > 0, first.stderr
    assert found["wakes"] > 0, first.stderr
    for word in ("reading the package lists", "making", "installing"):
        assert f"install.sh: {word}" in first.stderr

    again = machine.run("/srv/hive/install.sh up --exit-after 5 --json", cwd="/tmp")
    summary_of(again)
    assert "install.sh:" not in again.stderr, "nothing is left to install"

    as_user = machine.run("./install.sh up --exit-after 60 --json", user=USER, cwd=home)
    found = summary_of(as_user)
    assert (found["isolation"], found["errors"]) == ("none", 0), as_user.stderr

    for user, cwd in (("root", "/srv/hive"), (USER, home)):
        tested = machine.run("./install.sh test tests/agents tests/up/test_plan.py -q", user=user, cwd=cwd)
        assert tested.returncode == 0, tested.stdout + tested.stderr
        assert re.search(r"\d+ passed", tested.stdout)


def test_an_installation_that_was_cut_short_is_repaired(machine: Machine) -> None:
    machine.run("./install.sh up --help", cwd="/srv/hive")
    (machine.root / "srv/hive/.venv/unfinished").touch()
    shutil.rmtree(machine.root / "srv/hive/.venv/lib")
    repaired = machine.run("./install.sh up --help", cwd="/srv/hive")
    assert repaired.returncode == 0, repaired.stderr
    assert "repairing" in repaired.stderr


def test_on_a_bare_debian_a_dry_run_tells_every_step_and_changes_nothing(machine: Machine) -> None:
    """It told one line (packages), and that the rest could be told once Python is there."""
    before = files_of(machine.root)
    told = machine.run("./install.sh --dry-run", cwd="/srv/hive")
    assert told.returncode == 0, told.stderr
    steps = [line for line in told.stdout.splitlines() if not line.startswith(" ")]
    assert steps == ["packages", "environment", *(name for name, words in STEPS.items() if words)]
    version = re.search(r"make (/opt/hive/versions/\S+)", told.stdout)
    assert version is not None
    for line in (
        "apt-get update",
        "apt-get install python3-venv redis-server",
        "apt-get install scdoc, which makes the man pages",
        "systemctl disable --now redis-server.service",
        "note in /var/lib/hive/packages which of them came with Hive",
        "pip install /srv/hive into it",
    ):
        assert f"    {line}\n" in told.stdout, told.stdout
    assert "systemd is not PID 1 here" in told.stderr
    assert files_of(machine.root) == before
    as_user = machine.run("./install.sh --dry-run", user=USER, cwd=f"/home/{USER}/my hive")
    assert as_user.returncode == 0, as_user.stderr
    assert "this takes root" in as_user.stderr
    assert files_of(machine.root) == before


def files_of(root: Path) -> dict[str, int]:
    """Every file and when it was changed, but for what a process has of its own."""
    found = [path for path in root.rglob("*") if path.relative_to(root).parts[0] not in ("proc", "dev", "sys", "tmp")]
    return {str(path): path.lstat().st_mtime_ns for path in found}
