"""Which ports one state directory had, so that agents which live on find Hive where their environment says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec


class Ports(msgspec.Struct, frozen=True):
    """`proxy`: where agents reach the model by TCP; `ingress`: where callers reach agents."""

    proxy: int
    ingress: int

    def is_elsewhere(self, wanted: Ports) -> bool:
        """Whether a port that was wanted is not the one there is; 0 wants none in particular.

        >>> Ports(11436, 8480).is_elsewhere(Ports(11435, 0)), Ports(11436, 8480).is_elsewhere(Ports(0, 0))
        (True, False)
        """
        pairs = ((wanted.proxy, self.proxy), (wanted.ingress, self.ingress))
        return any(asked not in (0, got) for asked, got in pairs)

    def __str__(self) -> str:
        return f"{self.proxy} and {self.ingress}"


class Remembered(msgspec.Struct, frozen=True):
    """What was asked for (by flag or file) and what it became."""

    asked: Ports
    got: Ports


def choose_ports(asked: Ports, remembered: Remembered | None) -> Ports:
    """The ports to try: those of last time, unless something else is asked for now.

    >>> before = Remembered(asked=Ports(11435, 8480), got=Ports(11436, 8480))
    >>> choose_ports(Ports(11435, 8480), before), choose_ports(Ports(12000, 8480), before)
    (Ports(proxy=11436, ingress=8480), Ports(proxy=12000, ingress=8480))
    """
    return remembered.got if remembered is not None and remembered.asked == asked else asked


def recall(path: Path) -> Remembered | None:
    """What `remember` wrote; None where there is nothing, or nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Remembered)
    except (OSError, msgspec.DecodeError):
        return None


def remember(path: Path, ports: Remembered) -> None:
    """Writes it whole or not at all. A full disk only costs the memory of the ports."""
    temporary = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(ports))
        os.replace(temporary, path)
