"""Parked slots as `hive doctor` sees them: one place of an installed Hive, and a directory of others is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.doctor.checks.check import Status
from hive.doctor.checks.parking import look_at_directory
from hive.doctor.checks.target import Subject, TargetKind
from hive.settings.table import InferenceSection, Settings


def looked_at(kind: TargetKind, directory: Path, **more: int) -> tuple[Status, str]:
    settings = Settings(inference=InferenceSection(llama_slot_dir=str(directory), **more))  # type: ignore[arg-type]
    verdict = look_at_directory(Subject(kind=kind, settings=settings))
    return verdict.status, verdict.reason


def test_an_installed_hive_is_told_of_its_one_place(tmp_path: Path) -> None:
    status, reason = looked_at(TargetKind.APPLIANCE, tmp_path / "kept")
    assert status is Status.WARN
    assert reason.endswith("an installed Hive keeps them in /var/lib/hive/slots and nowhere else")


@pytest.mark.parametrize("below", ["", "engine"])
def test_a_directory_that_others_may_enter_is_named(tmp_path: Path, below: str) -> None:
    directory = tmp_path / "kept"
    assert looked_at(TargetKind.UP, directory) == (Status.PASS, f"slots are kept in {directory}")
    directory.mkdir(mode=0o700)
    (directory / "engine").mkdir(mode=0o700)
    assert looked_at(TargetKind.UP, directory)[0] is Status.PASS
    (directory / below).chmod(0o755)
    status, reason = looked_at(TargetKind.UP, directory)
    assert (status, f"{directory / below} is open to other users" in reason) == (Status.WARN, True)


def test_a_cache_in_ram_goes_before(tmp_path: Path) -> None:
    assert looked_at(TargetKind.UP, tmp_path, llama_cache_ram_mb=1)[0] is Status.WARN
