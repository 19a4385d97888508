"""Approvals of a Hive without rules: the caller's role is enough."""

from __future__ import annotations

from hive.audit.approval import Approval

LOAD, UNLOAD = Approval("model-load", may_evict=True), Approval("model-unload")
PIN, UNPIN = Approval("model-pin"), Approval("model-unpin")
SWITCH = Approval("backend-switch")
FLUSH = Approval("cache-flush")
RUN, TAKE, END = Approval("lease-run"), Approval("lease-take"), Approval("lease-end")
