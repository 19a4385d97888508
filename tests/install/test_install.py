"""Steps of an installation into a root of their own; what needs systemd is in tests/host."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hive import __version__
from hive.errors import ConfigError, DependencyDown, HiveError, NotFound, NotPermitted, UsageError, WrongState
from hive.files import layout, share
from hive.files.layout import Layout
from hive.files.share import Managed
from hive.host import systemd
from hive.host.cgroup import state_label
from hive.install import conf_file, running
from hive.install.install import (
    NO_PAGES_YET,
    check_host,
    current_version,
    install,
    next_version,
    open_box,
    plan,
    plan_removal,
    refuse_nothing,
    steps_of,
    uninstall,
)
from hive.install.manifest import InstallManifest
from hive.install.running import SystemdUnit
from hive.install.steps import Box, enabled
from hive.install.steps_system import EarlierSecrets, previous
from hive.settings.file import load_text
from tests import docker_engine
from tests.install.installation import UNITS, box_of, make_root, make_version, tree
from tests.install.killed import killed_everywhere

REPOSITORY = Path(__file__).parents[2]
FIRST, SECOND = "0.1.0-1", "0.2.0-1"
ENVIRONMENT = "opt/hive"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root")


def set_up(root: Path, version: str = FIRST, said: list[str] | None = None) -> Box:
    """Installs all but the self-check: the fake version has no Python."""
    box = box_of(root, version, said)
    install(box, steps=[step for step in steps_of(box) if step.name != "self-check"])
    return box


def outstanding(root: Path, version: str = FIRST) -> list[str]:
    return [line for done in plan(box_of(root, version)) if done.step != "self-check" for line in done.changes]


def without_code(found: dict[str, tuple[str, int, bytes | str]]) -> set[str]:
    return {name for name in found if not name.startswith(ENVIRONMENT)}


# --- installing --------------------------------------------------------------------------------------------------


def test_a_plan_names_every_file_and_changes_nothing(root: Path) -> None:
    make_version(root, FIRST)
    before = tree(root)
    planned = outstanding(root)
    assert tree(root) == before
    assert "write /etc/systemd/system/hive.target" in planned
    assert "write /etc/hive/hive.conf" in planned
    assert f"link /opt/hive/current -> versions/{FIRST}" in planned
    assert not any("systemctl" in line or "create" in line or "secrets" in line for line in planned)


def test_what_was_planned_is_what_is_there_afterwards(root: Path) -> None:
    make_version(root, FIRST)
    planned = {line.split()[1].lstrip("/") for line in outstanding(root)}
    before = without_code(tree(root))
    set_up(root)
    made = {
        name for name in without_code(tree(root)) - before if not (root / name).is_dir() or (root / name).is_symlink()
    }
    assert made | {"opt/hive/current"} == planned | {"var/lib/hive/install.json"}
    for name in made:
        assert (root / name).is_symlink() or (root / name).stat().st_mode & 0o777 == 0o644


def test_what_is_done_is_not_done_again(root: Path) -> None:
    make_version(root, FIRST)
    set_up(root)
    found = tree(root)
    assert outstanding(root) == []
    set_up(root)
    assert tree(root) == found


def test_every_unit_file_goes_where_systemd_looks_for_its_kind(root: Path) -> None:
    make_version(root, FIRST)
    set_up(root)
    for name, text in UNITS.items():
        outside = name.startswith(("sysusers.d", "tmpfiles.d"))
        assert (root / ("etc" if outside else "etc/systemd/system") / name).read_text() == text


def test_the_target_is_enabled_with_what_it_names_and_nothing_else(root: Path) -> None:
    make_version(root, FIRST)
    set_up(root)
    units = root / "etc/systemd/system"
    links = {path.relative_to(units).as_posix(): os.readlink(path) for path in units.rglob("*") if path.is_symlink()}
    assert links == {
        "multi-user.target.wants/hive.target": "../hive.target",
        "hive.target.requires/hive-thaw.service": "../hive-thaw.service",
    }


def test_units_that_name_each_other_are_enabled_once() -> None:
    def unit(name: str, also: str) -> Managed:
        return Managed(f"/etc/systemd/system/{name}", f"[Install]\nAlso={also}\nWantedBy=x.target\n".encode())

    found = enabled([unit("a.service", "b.service"), unit("b.service", "a.service nowhere.service")], "a.service")
    assert {os.path.basename(link) for link in found} == {"a.service", "b.service"}


def test_something_of_somebody_elses_is_never_replaced(root: Path) -> None:
    make_version(root, FIRST)
    (root / "usr/local/bin/hive").write_text("the other hive")
    (root / "etc/sysusers.d").mkdir()
    (root / "etc/sysusers.d/hive.conf").write_text("u hive\n")
    before = tree(root)
    with pytest.raises(WrongState, match=r"/etc/sysusers.d/hive.conf, /usr/local/bin/hive"):
        set_up(root)
    assert tree(root) == before


def test_a_configuration_that_is_there_stays_also_after_a_purge(root: Path) -> None:
    make_version(root, FIRST)
    (root / "etc/hive").mkdir()
    (root / "etc/hive/hive.conf").write_text("[proxy]\nport = 1\n")
    set_up(root)
    assert (root / "etc/hive/hive.conf").read_text() == "[proxy]\nport = 1\n"
    uninstall(box_of(root, FIRST), purge=True)
    assert (root / "etc/hive/hive.conf").read_text() == "[proxy]\nport = 1\n"
    assert not (root / "etc/hive/sandbox.toml").exists()


def test_of_a_configuration_that_was_there_only_what_an_appliance_needs_is_told(root: Path) -> None:
    make_version(root, FIRST)
    (root / "etc/hive").mkdir()
    (root / "etc/hive/hive.conf").write_text("[proxy]\nport = 1\n")
    (notices,) = (done.notices for done in plan(box_of(root, FIRST)) if done.step == "configuration")
    assert notices == [
        "/etc/hive/hive.conf was there and stays; an installed Hive has [sandbox] policy = /etc/hive/sandbox.toml"
    ]


def test_without_scdoc_a_plan_does_not_say_that_there_are_no_pages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """install.sh --dry-run told in one breath that it would install scdoc, and that there are no man pages."""
    make_version(root, FIRST)
    monkeypatch.setattr(share, "manual", lambda top: [])
    (notices,) = (done.notices for done in plan(box_of(root, FIRST)) if done.step == "manual")
    assert notices == [NO_PAGES_YET]


def test_the_manual_is_the_same_every_day(tmp_path: Path) -> None:
    if shutil.which("scdoc") is None:
        pytest.skip("needs scdoc")
    (tmp_path / "man").mkdir()
    (tmp_path / "man/a.7.scd").write_text("a(7)\n\n# NAME\n\na - b\n")
    os.utime(tmp_path / "man/a.7.scd", (0, 0))
    (page,) = share.manual(tmp_path)
    assert page.path == "/usr/local/share/man/man7/a.7"
    assert b'"1970-01-01"' in page.content
    (tmp_path / "man/b.7.scd").write_text("no page\n")
    with pytest.raises(HiveError, match=r"b\.7\.scd"):
        share.manual(tmp_path)


def test_a_directory_that_was_there_is_left_there(root: Path) -> None:
    make_version(root, FIRST)
    (root / "etc/tmpfiles.d").mkdir()
    set_up(root)
    uninstall(box_of(root, FIRST), purge=True)
    assert (root / "etc/tmpfiles.d").is_dir()
    assert not (root / "etc/sysusers.d").exists()


def test_two_installers_do_not_work_in_one_root(root: Path) -> None:
    make_version(root, FIRST)
    with subprocess.Popen(
        ["flock", root, "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE, start_new_session=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            with pytest.raises(WrongState, match="another installer"):
                set_up(root)
        finally:
            os.killpg(other.pid, signal.SIGKILL)
    subprocess.run(["flock", root, "true"], check=True)  # one of them may be dying still
    set_up(root)


def test_a_manifest_that_cannot_be_read_stops_everything(root: Path) -> None:
    (root / "var/lib/hive").mkdir()
    (root / "var/lib/hive/install.json").write_text('{"files": 7}')
    with pytest.raises(ConfigError, match=r"install\.json"):
        InstallManifest.load(Layout(root))
    (root / "var/lib/hive/install.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="newer"):
        InstallManifest.load(Layout(root))


def test_from_an_environment_that_is_not_installed_nothing_is_installed(root: Path) -> None:
    with pytest.raises(UsageError, match="no installed version"):
        open_box(Layout(root), say=print)
    assert open_box(Layout(root), say=print, otherwise=next_version).version.endswith("-1")


def test_a_dry_run_of_an_upgrade_tells_what_the_upgrade_does(root: Path) -> None:
    """install.sh asked an environment that passes, which took the version that runs for the new one: no link, no
    restart, no old environment was told."""
    make_version(root, f"{__version__}-1")
    set_up(root, f"{__version__}-1")
    unit = root / "etc/systemd/system/hive.target"
    unit.write_text("mine")
    passing = open_box(Layout(root), say=print, otherwise=next_version)
    assert passing.version == f"{__version__}-2"
    make_version(root, passing.version, units={**UNITS, "hive.target": "[Unit]\nDescription=New\n"})
    (root / "opt/hive/versions" / passing.version).rename(root / "elsewhere")
    passing.share = root / "elsewhere/share/hive"
    told = {done.step: done.changes for done in plan(passing) if done.step != "self-check"}
    (root / "elsewhere").rename(root / "opt/hive/versions" / passing.version)
    said: list[str] = []
    set_up(root, passing.version, said)
    assert [line for line in said if ": note: " not in line] == [
        f"{step}: {line}" for step, lines in told.items() for line in lines
    ]
    assert f"link /opt/hive/current -> versions/{__version__}-2" in told["version"]
    assert told["old versions"] == [f"remove /opt/hive/versions/{__version__}-1"]
    assert told["units"][0].startswith("keep /etc/systemd/system/hive.target, which was changed by hand")


def test_where_nothing_is_installed_nothing_is_asked_and_nothing_done(root: Path) -> None:
    """`hive uninstall` asked whether to remove what was not there."""
    before = tree(root)
    box = open_box(Layout(root), say=print, otherwise=current_version)
    for purge in (False, True):
        with pytest.raises(NotFound, match="not installed"):
            refuse_nothing(box, purge=purge)
    make_version(root, FIRST)
    set_up(root)
    refuse_nothing(box_of(root, FIRST), purge=False)
    uninstall(box_of(root, FIRST), purge=False)
    with pytest.raises(NotFound, match="not installed") as caught:
        refuse_nothing(box_of(root, FIRST), purge=False)
    assert "hive uninstall --purge" in caught.value.hint
    refuse_nothing(box_of(root, FIRST), purge=True)
    make_version(root, FIRST)
    uninstall(box_of(root, FIRST), purge=True)
    assert tree(root) == before


def test_a_root_that_is_not_there_is_refused(root: Path) -> None:
    with pytest.raises(WrongState, match="no directory"):
        check_host(Layout(root / "nowhere"))


def test_a_box_without_systemd_or_root_is_refused() -> None:
    if os.geteuid() != 0:
        with pytest.raises(NotPermitted):
            check_host(Layout())
    elif systemd.is_booted():
        pytest.skip("systemd is PID 1 here")
    else:
        with pytest.raises(DependencyDown, match="systemd is not PID 1"):
            check_host(Layout())


# --- another version ---------------------------------------------------------------------------------------------


def test_a_new_version_replaces_its_files_and_takes_the_rest_away(root: Path) -> None:
    make_version(root, FIRST)
    set_up(root)
    make_version(root, SECOND, units={"hive.target": "[Unit]\nDescription=New\n", "hive-new.service": ""})
    set_up(root, SECOND)
    units = {path.name for path in (root / "etc/systemd/system").iterdir() if path.is_file()}
    assert units == {"hive.target", "hive-new.service"}
    assert not list((root / "etc/systemd/system").rglob("*.wants/*"))
    assert os.readlink(root / "opt/hive/current") == f"versions/{SECOND}"
    assert [path.name for path in (root / "opt/hive/versions").iterdir()] == [SECOND]


def test_a_secret_that_no_version_reads_any_more_is_taken_away_after_the_new_version_is_started(root: Path) -> None:
    make_version(root, FIRST)
    set_up(root)
    secret = root / "etc/hive/secrets/redis-proxy"
    secret.parent.mkdir()
    secret.write_text("x" * 43)
    make_version(root, SECOND)
    assert "remove /etc/hive/secrets/redis-proxy" in outstanding(root, SECOND)
    box = box_of(root, SECOND)
    install(box, steps=[step for step in steps_of(box) if step.name in ("units", "secrets", "version", "start")])
    assert secret.exists()
    set_up(root, SECOND)
    assert not secret.exists()
    assert outstanding(root, SECOND) == []


def test_an_earlier_version_that_is_put_back_keeps_the_secrets_that_its_units_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proxy could not be started any more: LoadCredential= of a secret that is not there fails a unit."""
    unit = make_version(root, FIRST) / "systemd" / "hive-proxy.service"
    unit.write_text("[Service]\nLoadCredential=redis-proxy:/etc/hive/secrets/redis-proxy\n")
    secret = root / "etc/hive/secrets/redis-proxy"
    secret.parent.mkdir(parents=True)
    secret.write_text("x" * 43)
    box = box_of(root, FIRST)
    steps = [step for step in steps_of(box) if step.name in ("units", "leftovers")]
    install(box, steps=steps)
    assert secret.exists()

    hive = box.venv / "bin" / "hive"
    hive.write_text(f"#!/bin/sh\necho $* >{root}/asked\n[ ! -e {root}/refuses ] || {{ echo no room; exit 1; }}\n")
    hive.chmod(0o755)
    earlier = EarlierSecrets(box)
    assert earlier.plan() == []
    monkeypatch.setattr(Layout, "live", property(lambda _: True))
    assert earlier.plan() == [f"{hive} secrets generate"]
    earlier.do()
    assert (root / "asked").read_text() == "secrets generate\n"
    (root / "refuses").touch()
    with pytest.raises(HiveError, match="no room"):
        earlier.do()


def test_a_file_that_was_changed_by_hand_is_kept_beside_the_new_one(root: Path) -> None:
    said: list[str] = []
    make_version(root, FIRST)
    before = without_code(tree(root))
    set_up(root)
    unit = root / "etc/systemd/system/hive.target"
    unit.write_text("mine")
    make_version(root, SECOND, units={**UNITS, "hive.target": "[Unit]\nDescription=New\n"})
    set_up(root, SECOND, said)
    assert unit.read_text() == "[Unit]\nDescription=New\n"
    assert unit.with_name("hive.target.hive-saved").read_text() == "mine"
    assert any("changed by hand" in line for line in said)
    assert outstanding(root, SECOND) == []
    uninstall(box_of(root, SECOND), purge=True)
    assert without_code(tree(root)) == before


def test_settings_the_file_does_not_know_are_told(root: Path) -> None:
    make_version(root, FIRST)
    set_up(root)
    file = root / "etc/hive/hive.conf"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if "head_s" not in line))
    kept = file.read_text()
    (notices,) = (done.notices for done in plan(box_of(root, FIRST)) if done.step == "configuration")
    assert len(notices) == 1
    assert "proxy.head_s (default 10)" in notices[0]
    set_up(root)
    assert file.read_text() == kept


def test_what_a_failed_version_left_goes_before_the_next_and_what_is_in_use_stays(root: Path) -> None:
    for name in (FIRST, "0.1.5-1", SECOND):
        make_version(root, name)
    box = box_of(root, SECOND)
    box.manifest.running = FIRST
    (failed,) = (step for step in steps_of(box) if step.name == "failed versions")
    assert failed.plan() == ["remove /opt/hive/versions/0.1.5-1"]


def test_the_way_back_is_the_version_that_was_seen_to_work(root: Path) -> None:
    make_version(root, FIRST)
    make_version(root, SECOND)
    box = box_of(root, SECOND)
    assert previous(box) == ""
    box.manifest.running = FIRST
    assert previous(box) == FIRST
    box.manifest.running = SECOND
    assert previous(box) == ""
    box.manifest.running = "0.0.1-1"
    assert previous(box) == ""


# --- removing ----------------------------------------------------------------------------------------------------


def test_a_purge_leaves_what_was_there_before(root: Path) -> None:
    before = tree(root)
    make_version(root, FIRST)
    set_up(root)
    uninstall(box_of(root, FIRST), purge=True)
    assert tree(root) == before


def test_without_purge_exactly_configuration_secrets_and_state_stay(root: Path) -> None:
    before = set(tree(root))
    make_version(root, FIRST)
    set_up(root)
    secret, state = root / "etc/hive/secrets/box-key", root / "var/lib/hive/daemon/hive.db"
    for path in (secret, state):
        path.parent.mkdir(parents=True)
        path.write_text("kept")
    uninstall(box_of(root, FIRST), purge=False)
    left = {name for name in set(tree(root)) - before if (root / name).is_file()}
    assert left == {
        "etc/hive/hive.conf",
        "etc/hive/sandbox.toml",
        "etc/hive/secrets/box-key",
        "var/lib/hive/daemon/hive.db",
        "var/lib/hive/install.json",
    }


def describe_models(root: Path) -> None:
    (root / "etc/hive/models.d").mkdir(parents=True)
    (root / "etc/hive/models.d/one.toml").write_text('[model."one"]\nfile = "/m.gguf"\n')
    (root / "etc/hive/templates.d").mkdir()
    (root / "etc/hive/templates.d/one.toml").write_text('[template.one]\npython = "/v"\nimports = "json"\n')


@pytest.mark.parametrize("is_link", [False, True])
def test_descriptions_of_models_go_with_the_hive_conf_that_they_belong_to(
    root: Path, tmp_path: Path, is_link: bool
) -> None:
    before = tree(root)
    make_version(root, FIRST)
    set_up(root)
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere/one.toml").touch()
        (root / "etc/hive/models.d").symlink_to(tmp_path / "elsewhere")
    else:
        describe_models(root)
    told = {
        purge: [line for done in plan_removal(box_of(root, FIRST), purge=purge) for line in done.changes]
        for purge in (False, True)
    }
    assert "keep /etc/hive/models.d" in told[False]
    assert "remove /etc/hive/models.d" in told[True]
    uninstall(box_of(root, FIRST), purge=False)
    assert (root / "etc/hive/models.d/one.toml").exists()
    make_version(root, FIRST)
    set_up(root)
    uninstall(box_of(root, FIRST), purge=True)
    assert tree(root) == before
    assert not is_link or (tmp_path / "elsewhere/one.toml").exists()


def test_descriptions_of_models_stay_with_a_hive_conf_that_was_there_before(root: Path) -> None:
    make_version(root, FIRST)
    (root / "etc/hive").mkdir()
    (root / "etc/hive/hive.conf").write_text("[proxy]\nport = 1\n")
    describe_models(root)
    set_up(root)
    uninstall(box_of(root, FIRST), purge=True)
    assert (root / "etc/hive/models.d/one.toml").exists()
    assert (root / "etc/hive/templates.d/one.toml").exists()


def test_after_a_removal_the_same_configuration_is_used_again(root: Path) -> None:
    before = tree(root)
    make_version(root, FIRST)
    set_up(root)
    (root / "etc/hive/hive.conf").write_text("[proxy]\n")
    uninstall(box_of(root, FIRST), purge=False)
    make_version(root, FIRST)
    set_up(root)
    assert (root / "etc/hive/hive.conf").read_text() == "[proxy]\n"
    uninstall(box_of(root, FIRST), purge=True)
    assert tree(root) == before


def test_a_plan_of_a_removal_says_what_stays(root: Path) -> None:
    make_version(root, FIRST)
    set_up(root)
    before = tree(root)
    kept = [line for done in plan_removal(box_of(root, FIRST), purge=False) for line in done.changes]
    gone = [line for done in plan_removal(box_of(root, FIRST), purge=True) for line in done.changes]
    assert "keep /etc/hive/hive.conf" in kept
    assert "remove /etc/hive/hive.conf" in gone
    assert "remove /opt/hive" in kept
    assert tree(root) == before


@pytest.mark.docker
def test_containers_of_a_hive_that_cannot_be_asked_any_more_are_taken_away(tmp_path: Path) -> None:
    """With the daemon down a purge left them: paused containers and their networks, of agents nobody knew any more."""
    engine = docker_engine.shared()
    mine, others = tmp_path / "mine", tmp_path / "others"
    conf = tmp_path / "hive.conf"
    conf.write_text(f"[sandbox]\ndocker_socket = {engine.socket}\n")
    made = {}
    try:
        for state in (mine, others):
            labels = {"hive.agent": "ghost", "hive.state": state_label(state)}
            host = {"NetworkMode": "none"}
            body = {"Image": engine.image, "Cmd": ["sleep", "60"], "Labels": labels, "HostConfig": host}
            status, told = engine.call("POST", "/containers/create", body)
            assert status == 201, told
            made[state] = told["Id"]
            assert engine.do(told["Id"], "start") == 204
            assert engine.do(told["Id"], "pause") == 204
        said = running.sweep(mine, conf)
        assert [line for line in said if "had left at the Docker engine" in line], said
        assert (engine.state(made[mine]), running.sweep(mine, conf)) == (None, [])
        assert engine.state(made[others]) is not None
    finally:
        for state in (mine, others):
            engine.clear(state)


def test_without_an_engine_nothing_is_left_at_one(tmp_path: Path) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text(f"[sandbox]\ndocker_socket = {tmp_path}/docker.sock\n")
    assert running.sweep(tmp_path, conf) == []
    with socket.socket(socket.AF_UNIX) as nobody_listens:
        nobody_listens.bind(f"{tmp_path}/docker.sock")
        assert "containers of agents may be left" in running.sweep(tmp_path, conf)[0]


# --- a real environment ------------------------------------------------------------------------------------------


def make_real_version(root: Path, name: str) -> None:
    """An environment whose Python is this one's, with all its packages and the files of this checkout."""
    share = make_version(root, name)
    venv = share.parents[1]
    (venv / "bin/python").symlink_to(sys.executable)
    (venv / "pyvenv.cfg").write_text(Path(sys.prefix, "pyvenv.cfg").read_text())
    (venv / "lib").symlink_to(Path(sys.prefix, "lib"))


def type_hive(root: Path, version: str, *words: str) -> subprocess.CompletedProcess[str]:
    python = root / "opt/hive/versions" / version / "bin/python"
    return subprocess.run(
        [python, "-P", "-m", "hive", *words, "--prefix", root], capture_output=True, text=True, check=False
    )


def test_the_commands_install_and_remove_a_version_that_checks_itself(root: Path) -> None:
    before = tree(root)
    make_real_version(root, FIRST)
    refused = type_hive(root, FIRST, "install")
    assert (refused.returncode, "say --yes" in refused.stderr) == (2, True)
    planned = json.loads(type_hive(root, FIRST, "install", "--dry-run", "--json").stdout)
    done = type_hive(root, FIRST, "install", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert {step["step"]: step["changes"] for step in json.loads(done.stdout)["steps"]} == {
        step["step"]: step["changes"] for step in planned["steps"]
    }
    again = type_hive(root, FIRST, "install", "--yes")
    assert (again.returncode, again.stdout) == (0, "")
    assert "write" not in again.stderr
    removed = type_hive(root, FIRST, "uninstall", "--purge", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert tree(root) == before


def test_a_version_that_does_not_take_the_configuration_changes_nothing(root: Path) -> None:
    make_real_version(root, FIRST)
    (root / "etc/hive").mkdir()
    (root / "etc/hive/hive.conf").write_text("[proxy]\nprot = 1\n")
    before = tree(root)
    refused = type_hive(root, FIRST, "install", "--yes")
    assert refused.returncode == 1
    assert "self-check" in refused.stderr
    assert "did you mean `port`?" in refused.stderr
    assert tree(root) == before


def test_a_version_that_lacks_a_module_does_not_pass(root: Path) -> None:
    make_real_version(root, FIRST)
    (root / "opt/hive/versions" / FIRST / "bin/python").unlink()
    (root / "opt/hive/versions" / FIRST / "bin/python").write_text("#!/bin/sh\necho no module named hive; exit 1\n")
    (root / "opt/hive/versions" / FIRST / "bin/python").chmod(0o755)
    with pytest.raises(HiveError, match=r"self-check, nothing was changed: hive version: no module named hive"):
        install(box_of(root, FIRST))


# --- cut off anywhere --------------------------------------------------------------------------------------------


@pytest.fixture
def quick_directory(tmp_path: Path) -> Iterator[Path]:
    """In RAM where there is one that can be used: thousands of fsyncs are waited for."""
    ram = Path("/dev/shm")
    if not os.access(ram, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=ram, prefix="hive-killed-") as name:
        yield Path(name)


@pytest.mark.chaos
@pytest.mark.parametrize(("what", "least"), [("install", 90), ("upgrade", 30), ("uninstall", 60), ("purge", 60)])
def test_killed_before_any_change_and_inside_any_write_the_same_command_ends_it(
    what: str, least: int, quick_directory: Path
) -> None:
    found = killed_everywhere(what, quick_directory)
    assert found["wrong"] == []
    assert found["places"] >= least


# --- hive.conf ---------------------------------------------------------------------------------------------------


def test_the_file_that_is_written_is_valid_and_only_sets_what_an_appliance_needs() -> None:
    loaded = load_text(conf_file.text(), env={})
    assert set(loaded.origins) == set(conf_file.SET)
    assert loaded.settings.sandbox.policy == layout.POLICY_FILE


def test_every_default_in_the_file_is_valid_as_it_stands_there() -> None:
    lines = [line.removeprefix("#") if line.startswith("#") and " = " in line else line for line in no_prose()]
    assert load_text("\n".join(lines), env={}).settings.proxy == load_text("", env={}).settings.proxy


def no_prose() -> list[str]:
    return [line for line in conf_file.text().splitlines() if not line.startswith("# ")]


def test_a_file_just_written_knows_every_setting() -> None:
    assert conf_file.new_settings(conf_file.text()) == []
    assert len(conf_file.new_settings("")) > 50


# --- what the package brings -------------------------------------------------------------------------------------


def test_every_file_that_is_no_code_is_in_the_package() -> None:
    """A unit that is not in the table would be missing on every box."""
    listed = subprocess.run(
        ["git", "-C", REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "systemd", "man"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    table: dict[str, list[str]] = project["tool"]["setuptools"]["data-files"]
    patterns = [pattern for patterns in table.values() for pattern in patterns]
    files = [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]
    assert files
    # A star of setuptools does not go beyond a slash.
    covered = {
        name for name in files for one in patterns if fnmatch.fnmatch(name, one) and name.count("/") == one.count("/")
    }
    assert set(files) - covered == set()
    for target, patterns in table.items():
        for pattern in patterns:
            assert target == f"share/hive/{os.path.dirname(pattern)}"
            assert list(REPOSITORY.glob(pattern)), f"{pattern} matches nothing"


@pytest.mark.parametrize(
    ("unit", "failed"),
    [
        (SystemdUnit("a", "active", "success", "notify", "yes"), False),
        (SystemdUnit("a", "failed", "exit-code", "notify", "yes"), True),
        (SystemdUnit("a", "activating", "success", "notify", "yes"), True),
        (SystemdUnit("a", "inactive", "success", "oneshot", "yes"), False),
        (SystemdUnit("a", "inactive", "success", "", "no"), False),
        (SystemdUnit("a", "failed", "exit-code", "oneshot", "yes"), True),
    ],
)
def test_a_unit_is_up_when_it_is_active_or_need_not_be(unit: SystemdUnit, failed: bool) -> None:
    assert unit.failed is failed
