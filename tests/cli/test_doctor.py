"""`hive doctor` as a command: what it prints, what it exits with."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hive.cli.doctor import WIDTH, as_text
from hive.doctor.checks.check import Status
from hive.doctor.doctor import CHECKS, Result

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def some(status: Status, **changes: Any) -> Result:
    return Result(**{"name": "sandbox.firecracker", "reason": "it is so", **changes}, status=status)


def test_every_check_is_listed_with_its_sentence(no_daemon: Hive) -> None:
    said = no_daemon("doctor", "--list").out
    for check in CHECKS:
        assert f"{check.name} " in said
        assert check.sentence in said
    listed = no_daemon("doctor", "--list", "--json").json
    assert [one["name"] for one in listed["checks"]] == [check.name for check in CHECKS]
    assert {one["name"] for one in listed["checks"] if one["fixable"]} >= {"memory.swap", "files.secrets"}


def test_one_check_or_one_group_is_run_by_name(no_daemon: Hive) -> None:
    assert [one["name"] for one in no_daemon("doctor", "memory.ksm", "--json").json["checks"]] == ["memory.ksm"]
    names = [one["name"] for one in no_daemon("doctor", "memory", "--json").json["checks"]]
    assert names == ["memory.swap", "memory.ksm"]


def test_an_unknown_check_is_a_usage_error_with_the_nearest_name(no_daemon: Hive) -> None:
    said = no_daemon("doctor", "redis.alc", "--json")
    assert (said.code, said.out) == (2, "")
    assert said.error["hint"] == "did you mean `redis.acl`?"


def test_a_hive_that_was_named_and_does_not_answer_is_a_failure(no_daemon: Hive) -> None:
    said = no_daemon("doctor", "hive.answers", "--json")
    assert said.code == 1
    assert said.json["ok"] is False
    assert (said.json["schema"], said.json["version"]) == ("doctor", 1)
    assert said.json["checks"][0]["status"] == "fail"


def test_what_the_daemon_complains_about_is_a_warning(hive: Hive) -> None:
    said = hive("doctor", "hive.answers", "--json")
    assert (said.code, said.json["checks"][0]["status"]) == (0, "warn")
    assert f"Redis at {hive.box.paths.redis_socket} is down" in said.json["checks"][0]["reason"]
    assert said.json["checks"][0]["code"] == "degraded"
    assert said.json["checks"][0]["facts"]["codes"] == ["redis_down"]
    assert hive("doctor", "hive.answers", "--strict").code == 1


def test_a_bad_configuration_fails_and_says_the_line(no_daemon: Hive, tmp_path: Path) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text("[proxy]\nport = many\n")
    said = no_daemon("doctor", "hive.config", "--config", str(conf))
    assert said.code == 1
    assert f"{conf}:2:" in said.out.replace("\n" + " " * 27, " ")
    assert "fix: hive config check" in said.out


def test_lines_end_at_80_columns_and_commands_are_never_broken() -> None:
    command = "a command that is quite long " * 5
    found = [some(Status.FAIL, reason="word " * 60, fix=command.strip()), some(Status.SKIP)]
    shown = as_text(found, 0.25, every=True)
    lines = shown.splitlines()
    assert all(len(line) <= WIDTH for line in lines if "fix: " not in line)
    assert [line for line in lines if "fix: " in line] == [f"      fix: {command.strip()}"]
    assert lines[-1] == "1 failed, 1 skipped in 0.2 s"


def test_reasons_are_aligned_whatever_the_name_and_the_status() -> None:
    shown = as_text(
        [some(Status.PASS, name="a.b"), some(Status.FAIL), some(Status.WARN, name="memory.ksm")], 0.0, every=True
    )
    columns = {line.index("it is so") for line in shown.splitlines() if "it is so" in line}
    assert len(columns) == 1
    assert max(len(check.name) for check in CHECKS) < max(columns) - 6


def test_what_passed_needs_no_fix_and_what_was_fixed_says_so() -> None:
    assert "fix:" not in as_text([some(Status.PASS, fix="do nothing")], 0.0, every=True)
    assert "it is so (fixed: made it)" in as_text([some(Status.PASS, fixed="made it")], 0.0, every=True)


def test_what_a_host_says_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in as_text([some(Status.WARN, reason="a\x1b]0;x\x07b", fix="c\x1b[2J")], 0.0, every=True)


def test_what_is_wrong_stands_last_and_skips_are_a_count() -> None:
    """A stranger's four warnings stood among 32 skipped checks, and had scrolled away."""
    found = [
        some(Status.FAIL, name="a.fails", fix="mend it"),
        some(Status.SKIP, name="b.closed", is_unseen=True),
        some(Status.WARN, name="c.warns", fix="turn it off"),
        some(Status.PASS, name="d.passes"),
        some(Status.SKIP, name="e.absent"),
        some(Status.SKIP, name="f.absent"),
    ]
    blocks = as_text(found, 0.25, every=False).split("\n\n")
    assert [block.split()[:2] for block in blocks if block[0].islower()] == [
        ["pass", "d.passes"],
        ["warn", "c.warns"],
        ["fail", "a.fails"],
    ]
    assert blocks[1] == "1 check needs root, 2 do not apply here; --all lists them"
    assert blocks[-2].endswith("fix: mend it")
    assert blocks[-1] == "1 passed, 1 warned, 1 failed, 3 skipped in 0.2 s"
    every = as_text(found, 0.25, every=True).split("\n\n")
    assert [line.split()[1] for line in every[1].splitlines()] == ["b.closed", "e.absent", "f.absent"]
    assert [*every[:1], *every[2:]] == [*blocks[:1], *blocks[2:]]


def test_skipped_checks_are_told_with_all_and_where_they_are_named(no_daemon: Hive) -> None:
    told = no_daemon("doctor", "--json").json
    assert [one["name"] for one in told["checks"]] == [check.name for check in CHECKS if check.by_default]
    skipped = {one["name"] for one in told["checks"] if one["status"] == "skip"}
    assert len(skipped) > 5
    shown = {words: no_daemon("doctor", *words.split()).out for words in ("", "--all", "comfyui")}
    assert [text.count("\nskip  ") + text.startswith("skip  ") for text in shown.values()] == [0, len(skipped), 1]
    assert "do not apply here; --all lists them\n" in shown[""]
    assert "--all lists" not in shown["--all"] + shown["comfyui"]


@pytest.mark.parametrize(("env", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals_that_want_them(env: dict[str, str], is_coloured: bool, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    base = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-P", "-m", "hive", "doctor", "memory.ksm", "--state-dir", str(tmp_path)]
    try:
        ran = subprocess.run(command, stdin=theirs, stdout=theirs, env={**base, "TERM": "xterm", **env}, timeout=60)
        said = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ran.returncode in (0, 1)
    assert "memory.ksm" in said
    assert ("\x1b[32m" in said or "\x1b[33m" in said or "\x1b[1;31m" in said) is is_coloured
