"""The limit of a lease on a GPU, on files that look like the kernel's: no kernel with `dmem` for a GPU was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.holders.gpu_limit import MIB, bound

GPU, OTHER = "GPU-5e2d", "GPU-77aa"
REGION = "nvidia/0000:01:00.0/vidmem"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    group = root / "hive.slice" / "lease"
    group.mkdir(parents=True)
    (root / "dmem.capacity").write_text(f"{REGION} 85899345920\ndrm/0000:09:00.0/vram0 1\n")
    for directory in (root, root / "hive.slice"):
        (directory / "cgroup.subtree_control").write_text("cpu memory\n")
    (group / "dmem.max").write_text(f"{REGION} max\n")
    information = tmp_path / "driver" / "0000:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {GPU}\n")
    return root


def limited(root: Path, accounts: dict[str, int]) -> str:
    return bound(root / "hive.slice" / "lease", accounts, root=root, driver=root.parent / "driver")


def test_a_gpu_that_the_kernel_lists_is_bounded(root: Path) -> None:
    assert limited(root, {GPU: 8192, "cpu": 5}) == "dmem"
    assert (root / "hive.slice/lease/dmem.max").read_text().startswith(f"{REGION} {8192 * MIB}")
    assert [(at / "cgroup.subtree_control").read_text()[:5] for at in (root, root / "hive.slice")] == ["+dmem"] * 2


def test_of_two_gpus_both_are_or_it_is_told_only(root: Path) -> None:
    assert limited(root, {GPU: 8192, OTHER: 8192}) == ""
    assert (root / "hive.slice/lease/dmem.max").read_text() == f"{REGION} max\n"


@pytest.mark.parametrize(
    "missing", ["dmem.capacity", "hive.slice/lease/dmem.max", "../driver/0000:01:00.0/information"]
)
def test_where_something_is_missing_it_is_told_only(root: Path, missing: str) -> None:
    (root / missing).unlink()
    assert limited(root, {GPU: 8192}) == ""


def test_memory_of_the_host_is_never_bounded(root: Path) -> None:
    assert limited(root, {"cpu": 8192}) == ""
    assert (root / "hive.slice/lease/dmem.max").read_text() == f"{REGION} max\n"
