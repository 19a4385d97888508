"""The ports one state directory had, so that agents which live on find Hive where their environment says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec


class Ports(msgspec.Struct, frozen=True):
    """`proxy`: where agents reach the model by TCP; `ingress`: where callers reach agents; `api`: where the API is on
    TCP, 0 for nowhere."""

    proxy: int
    ingress: int
    api: int = 0

    def is_elsewhere(self, wanted: Ports) -> bool:
        """Whether a port that was wanted is not the one there is; 0 wants none in particular.

        >>> Ports(11436, 8480).is_elsewhere(Ports(11435, 0)), Ports(11436, 8480).is_elsewhere(Ports(0, 0))
        (True, False)
        """
        pairs = ((wanted.proxy, self.proxy), (wanted.ingress, self.ingress), (wanted.api, self.api))
        return any(asked not in (0, got) for asked, got in pairs)

    def __str__(self) -> str:
        return f"{self.proxy}, {self.ingress} and {self.api or 'none'}"


class Remembered(msgspec.Struct, frozen=True):
    """The ports asked for (by flag or file) and those they became."""

    asked: Ports
    got: Ports


def choose_ports(asked: Ports, remembered: Remembered | None) -> Ports:
    """The ports to try: those of last time, unless something else is asked for now. No agent knows the API's.

    >>> before = Remembered(asked=Ports(11435, 8480, 3000), got=Ports(11436, 8480, 3001))
    >>> choose_ports(Ports(11435, 8480, 3000), before), choose_ports(Ports(12000, 8480, 3000), before)
    (Ports(proxy=11436, ingress=8480, api=3001), Ports(proxy=12000, ingress=8480, api=3001))
    >>> choose_ports(Ports(11435, 8480, 4000), before)
    Ports(proxy=11436, ingress=8480, api=4000)
    """
    if remembered is None:
        return asked
    before, got = remembered.asked, remembered.got
    chosen = got if (before.proxy, before.ingress) == (asked.proxy, asked.ingress) else asked
    return Ports(chosen.proxy, chosen.ingress, got.api if before.api == asked.api else asked.api)


def recall(path: Path) -> Remembered | None:
    """The note of `remember`; None where there is none, or none that can be read."""
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
