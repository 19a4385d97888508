"""The cost of a request, made up: every test says only what it is about."""

from __future__ import annotations

from typing import Any

from hive.domain import UsageEvent


def usage_event(no: int, epoch: str = "p1", **fields: Any) -> UsageEvent:
    row = {
        "id": f"{epoch}-{no}",
        "epoch": epoch,
        "event_no": no,
        "agent_id": "a1",
        "tenant": "default",
        "model": "small",
        "backend": "ollama",
        "endpoint": "/api/chat",
        "tokens_in": 10,
        "tokens_out": 1,
        "created_at": 1000.0 + no,
    }
    return UsageEvent(**{**row, **fields})
