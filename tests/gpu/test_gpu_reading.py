"""Hive's reading of a real GPU beside nvidia-smi's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hive.host.gpu import read_gpus
from hive.pooling.pool_memory import in_first_pid_namespace
from tests.gpu.card import MIB, Card, holder, told
from tests.journeys.stack import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def smi(what: str, *, of: str = "gpu") -> list[list[str]]:
    """Rows of `nvidia-smi --query-…`, of the first GPU."""
    command = ["nvidia-smi", "--id=0", f"--query-{of}={what}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]


def test_the_card_is_named_and_measured_as_nvidia_smi_does(card: Card) -> None:
    seen, hardware = card.now(), read_gpus()
    ((name, uuid, driver, total, used, reserved),) = smi(
        "name,uuid,driver_version,memory.total,memory.used,memory.reserved"
    )
    told(test="reading", card=name, driver=driver, total_mb=int(total), used_mb=int(used), reserved_mb=int(reserved),
         hive_used_mb=card.used_mb, hive_total_mb=card.total_mb, fault=seen.fault, hardware=str(hardware),
         dmem=[str(path) for path in Path("/sys/fs/cgroup").glob("dmem.*")], kernel=os.uname().release)  # fmt: skip
    assert (seen.name, seen.uuid, seen.fault) == (name, uuid, "")
    assert (hardware.driver, hardware.models, hardware.refused, hardware.has_nvml) == (driver, (name,), (), True)
    assert card.total_mb == int(total)
    assert card.used_mb == pytest.approx(int(used) + int(reserved), abs=64), "what the driver reserves counts as used"


def test_a_process_is_told_with_its_own_pid_and_all_that_it_takes(card: Card) -> None:
    assert in_first_pid_namespace(), "else pids are not those of the driver"
    empty = card.used_mb
    with holder() as one:
        context = card.of(one.process.pid)
        assert context, "its CUDA context"
        one.order("take 3000")
        (row,) = [row for row in smi("pid,used_memory", of="compute-apps") if row[0] == str(one.process.pid)]
        mine, all_of_it = card.of(one.process.pid), card.used_mb
        told(test="process", context_mb=context, of_3000_mb=mine, smi_mb=int(row[1]), used_before_mb=empty,
             used_mb=all_of_it, beyond_mb=all_of_it - empty - mine)  # fmt: skip
        assert mine == int(row[1])
        assert 3000 <= mine <= 3000 + context
        assert all_of_it - empty == pytest.approx(mine, abs=256)
        one.process.kill()
        one.process.wait()
        until(lambda: card.used_mb <= empty + 16, within_s=10, what="its memory is back")
    assert card.now().total_bytes == card.total_mb * MIB
