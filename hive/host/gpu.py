"""NVIDIA's driver as the kernel shows it; no program and no library of NVIDIA's is run."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc/driver/nvidia")
DEV = Path("/dev")
PCI = Path("/sys/bus/pci/devices")
NVIDIA = "0x10de"
"""PCI vendor id."""
DISPLAY = "0x03"
"""PCI base class of display controllers, data centre GPUs (0x0302) among them."""
NVML = "libnvidia-ml.so.1"


class GpuHardware(NamedTuple):
    """`on_bus`: NVIDIA GPUs on the PCI bus. `driver`: version of the loaded one, empty for none. `models`: as it names
    them. `nodes`: their device files; `refused`: those this user may not open. `has_nvml`: its library is there."""

    on_bus: int
    driver: str
    models: tuple[str, ...]
    nodes: tuple[str, ...]
    refused: tuple[str, ...]
    has_nvml: bool


def read_gpus(*, proc: Path = PROC, dev: Path = DEV, pci: Path = PCI) -> GpuHardware:
    """The GPUs of this host, now."""
    nodes = sorted(path for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia(\d+|ctl|-uvm)", path.name))
    driver = parse_driver(_text(proc / "version"))
    return GpuHardware(
        on_bus=sum(_is_gpu(device) for device in _entries(pci)),
        driver=driver,
        models=tuple(parse_model(_text(path / "information")) for path in _entries(proc / "gpus")),
        nodes=tuple(path.name for path in nodes),
        refused=tuple(path.name for path in nodes if not os.access(path, os.R_OK | os.W_OK)),
        has_nvml=bool(driver) and _loads(NVML),
    )


def parse_driver(text: str) -> str:
    """The version in /proc/driver/nvidia/version.

    >>> parse_driver("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\\n")
    '570.86.15'
    >>> parse_driver("")
    ''
    """
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return found[1] if found else ""


def parse_model(text: str) -> str:
    """The name in a /proc/driver/nvidia/gpus/*/information.

    >>> parse_model("Model: \\t\\t NVIDIA H200\\nIRQ:   \\t\\t 18\\n"), parse_model("")
    ('NVIDIA H200', '?')
    """
    found = re.search(r"^Model:\s*(\S.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else "?"


def _is_gpu(device: Path) -> bool:
    return _text(device / "vendor").strip() == NVIDIA and _text(device / "class").startswith(DISPLAY)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
