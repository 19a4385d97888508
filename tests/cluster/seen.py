"""Questions to a Hive about the cluster behind it."""

from __future__ import annotations

from typing import Any

from tests.cluster.namespaces import wait_for
from tests.journeys.stack import Stack


def inference(hive: Stack) -> dict[str, Any]:
    found: dict[str, Any] = hive.get("/api/system/inference")
    return found


def wait_for_slots(hive: Stack, slots: int, within_s: float = 120) -> float:
    """Seconds until Hive gives the cluster so many requests at once."""
    return wait_for(lambda: inference(hive)["slots"] == slots, within_s, f"{slots} slots; {inference(hive)}")
