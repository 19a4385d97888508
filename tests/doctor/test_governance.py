"""The check of governance.toml: it reads the file as the daemon does, and says what it leaves open."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hive.doctor.checks.check import Status
from hive.doctor.checks.target import Subject
from hive.doctor.doctor import Result, choose, examine
from tests.governance.signing import KEYS

ANN = f'[signers]\nann = "{KEYS["ann"].public.text}"\n'
ALL = ANN + '[rules.default]\nthreshold = 1\nof = ["ann"]\n'


def look(subject: Subject, conf: Path) -> Result:
    [result] = examine(msgspec.structs.replace(subject, config_file=conf), choose(["governance.rules"]))
    return result


@pytest.mark.parametrize(
    ("text", "mode", "status", "word"),
    [
        (ALL, 0o644, Status.PASS, "a rule for every operation"),
        (ALL.replace("default", "model-load"), 0o644, Status.WARN, "leaves to roles alone: model-unload, cache-flush"),
        (ALL.replace("threshold", "treshold"), 0o644, Status.FAIL, "line 4: rules.default.treshold: no such key"),
        ("[", 0o644, Status.FAIL, "no TOML"),
        (ANN, 0o644, Status.FAIL, "there is no rule in it"),
        ("\ud800", 0o644, Status.FAIL, "not UTF-8"),
        (ALL, 0o666, Status.FAIL, "written by others"),
    ],
)
def test_the_rules_are_read_as_the_daemon_reads_them(
    up: Subject, text: str, mode: int, status: Status, word: str
) -> None:
    assert up.paths is not None
    conf = up.paths.state / "hive.conf"
    path = conf.with_name("governance.toml")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    path.chmod(mode)
    result = look(up, conf)
    assert (result.status, word in result.reason) == (status, True), result


def test_without_a_file_roles_alone_decide(up: Subject) -> None:
    assert up.paths is not None
    result = look(up, up.paths.state / "hive.conf")
    assert (result.status, "roles alone decide" in result.reason) == (Status.SKIP, True)


@pytest.mark.root
def test_the_rules_of_an_installed_hive_are_roots_and_for_its_daemon_to_read(appliance: Subject) -> None:
    conf = appliance.layout.at("/etc/hive/hive.conf")
    conf.parent.mkdir(parents=True)
    path = conf.with_name("governance.toml")
    path.write_text(ALL)
    path.chmod(0o600)
    result = look(appliance, conf)
    assert (result.status, "the daemon cannot read it" in result.reason) == (Status.FAIL, True)
    path.chmod(0o644)
    assert look(appliance, conf).status is Status.PASS
