"""A lease's limit on a GPU where kernel and driver have one: `dmem.max` of its control group.

Linux 6.14 and NVIDIA's driver 615 list a GPU's memory in `dmem.capacity` at the root of cgroup v2, as
`nvidia/<pci>/vidmem` (docs.nvidia.com, "MPS v3 memory partitioning"). Where that is not so a lease is told, not
enforced. Memory of the host is never bounded here: an account `cpu` is told and measured, for a limit of the group
would count the files a job reads as its own, and end it where the pool's books would only have been wrong.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from hive.host.process import write_control

DRIVER = Path("/proc/driver/nvidia/gpus")
MIB = 1 << 20


def parse_capacity(text: str) -> dict[str, str]:
    """PCI address in lower case → name of the region that is the memory of that GPU, by the text of `dmem.capacity`.

    >>> parse_capacity("nvidia/0000:01:00.0/vidmem 85899345920\\ndrm/0000:03:00.0/stolen 1\\n")
    {'0000:01:00.0': 'nvidia/0000:01:00.0/vidmem'}
    """
    found = re.findall(r"^(nvidia/([0-9a-fA-F:.]+)/vidmem) [0-9]+$", text, re.MULTILINE)
    return {address.lower(): region for region, address in found}


def parse_information(text: str) -> str:
    """The UUID of a GPU by the driver's text about it; empty where that does not say.

    >>> parse_information("Model: \\t NVIDIA H100\\nGPU UUID: \\t GPU-5e2d\\nBus Type: \\t PCIe\\n")
    'GPU-5e2d'
    """
    found = re.search(r"^GPU UUID:\s*(GPU-\S+)", text, re.MULTILINE)
    return "" if found is None else found[1]


def _regions(root: Path, driver: Path) -> dict[str, str]:
    """UUID → region, of the GPUs whose memory the kernel can bound."""
    try:
        by_address = parse_capacity((root / "dmem.capacity").read_text())
    except OSError:
        return {}
    found = {}
    for address, region in by_address.items():
        with contextlib.suppress(OSError):
            if uuid := parse_information((driver / address / "information").read_text()):
                found[uuid] = region
    return found


def bound(group: Path, accounts: Mapping[str, int], *, root: Path, driver: Path = DRIVER) -> str:
    """Bounds this group on each of its GPUs; `dmem` where the kernel says that all of them are, else empty.

    `root`: the mount point of cgroup v2, `group` below it. `accounts`: MiB by UUID; memory of the host is none.
    """
    gpus = {account: mb for account, mb in accounts.items() if account != "cpu"}
    regions = _regions(root, driver) if gpus else {}
    if not gpus or not gpus.keys() <= regions.keys():
        return ""
    try:
        for above in reversed([one for one in group.parents if one.is_relative_to(root)]):
            if "dmem" not in (above / "cgroup.subtree_control").read_text().split():
                write_control(above / "cgroup.subtree_control", b"+dmem")
        for uuid, mb in gpus.items():
            write_control(group / "dmem.max", f"{regions[uuid]} {mb * MIB}".encode())
        told = (group / "dmem.max").read_text().splitlines()
    except OSError:
        return ""
    is_so = all(
        any(line.startswith(f"{regions[uuid]} ") and not line.endswith(" max") for line in told) for uuid in gpus
    )
    return "dmem" if is_so else ""
