"""Approvals of a Hive without rules: the caller's role is enough."""

from __future__ import annotations

from hive.audit.approval import Approval

LOAD, UNLOAD = Approval("model-load", may_evict=True), Approval("model-unload")
PIN, UNPIN = Approval("model-pin"), Approval("model-unpin")
SWITCH = Approval("backend-switch")
FLUSH = Approval("cache-flush")
RUN, TAKE, END = Approval("lease-run"), Approval("lease-take"), Approval("lease-end")
BRING, LOAD_ADAPTER, UNLOAD_ADAPTER = (Approval(f"adapter-{act}") for act in ("pull", "load", "unload"))
REMOVE_ADAPTER, TRUST = Approval("adapter-remove"), Approval("adapter-trust")
