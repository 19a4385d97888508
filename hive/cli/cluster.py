"""The cluster behind the backend's address, in words and as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hive.cli.terminal import fitted
from hive.cli.text import ago

SILENT_S = 10.0
"""An answer as old as this is no longer what runs."""


def replicas(cluster: Mapping[str, Any]) -> str:
    """
    >>> told = {"label": "Ray Serve", "running": 1, "wanted": 2, "slots_each": 8}
    >>> replicas(told), replicas({**told, "slots_each": 0})
    ('Ray Serve, 1 of 2 replicas run, 8 at once each', 'Ray Serve, 1 of 2 replicas run')
    """
    each = f", {cluster['slots_each']} at once each" if cluster["slots_each"] else ""
    return f"{cluster['label']}, {cluster['running']} of {cluster['wanted']} replicas run{each}"


def told(asked_at: float, now: float) -> str:
    """The age of what it told.

    >>> told(100.0, 101.0), told(100.0, 143.0), told(0.0, 143.0)
    ('1s ago', '43s ago: it does not answer', 'never: it has not answered yet')
    """
    if not asked_at:
        return "never: it has not answered yet"
    return ago(asked_at, now) if now - asked_at < SILENT_S else f"{ago(asked_at, now)}: it does not answer"


def inside(cluster: Mapping[str, Any]) -> str:
    """Its own queue, which is none of Hive's; empty where it does not tell, or nobody waits in it.

    >>> inside({"waiting": 3, "waited_s": 1.24}), inside({"waiting": None, "waited_s": 0.02}), inside({"waiting": 0,
    ...     "waited_s": None})
    ('3 requests wait in its own queue, of late for 1.2 s', 'requests waited 0.02 s in its own queue of late', '')
    """
    waiting, waited_s = cluster["waiting"], cluster["waited_s"]
    if waiting:
        lasted = "" if waited_s is None else f", of late for {waited_s:.2g} s"
        return f"{waiting} {'request waits' if waiting == 1 else 'requests wait'} in its own queue{lasted}"
    return f"requests waited {waited_s:.2g} s in its own queue of late" if waited_s else ""


def doctor_says(cluster: Mapping[str, Any]) -> str:
    """
    >>> doctor_says({"notes": ["no_token", "one_ingress"]}), doctor_says({"notes": []})
    ('`hive doctor cluster`: no_token, one_ingress', '')
    """
    return f"`hive doctor cluster`: {', '.join(cluster['notes'])}" if cluster["notes"] else ""


def pairs(cluster: Mapping[str, Any] | None, now: float) -> list[tuple[str, str]]:
    """The fields of `hive backend status` that are about it; none without one."""
    if cluster is None:
        return []
    return [
        ("Cluster", replicas(cluster)),
        ("Told", told(cluster["asked_at"], now)),
        ("No replica", cluster["why_none"]),
        ("Stuck", stuck(cluster["stuck"])),
        ("Inside it", inside(cluster)),
        ("Set up", doctor_says(cluster)),
    ]


def stuck(ranks: Sequence[str]) -> str:
    """
    >>> stuck(["1"]), stuck([])
    ('rank 1: requests run there and no token comes; restart vLLM', '')
    """
    if not ranks:
        return ""
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
    return f"{named}: requests run there and no token comes; restart vLLM"


def nodes(cluster: Mapping[str, Any] | None) -> str:
    """A line for each of its machines; empty where it tells none.

    >>> print(nodes({"nodes": [{"name": "10.245.0.1", "up": True, "replicas": 1},
    ...     {"name": "10.245.0.2", "up": False, "replicas": 0}]}))
    NODE        STATE  REPLICAS
    10.245.0.1  up     1
    10.245.0.2  DOWN   0
    """
    if cluster is None or not cluster["nodes"]:
        return ""
    rows = [[node["name"], "up" if node["up"] else "DOWN", str(node["replicas"])] for node in cluster["nodes"]]
    return fitted(["NODE", "STATE", "REPLICAS"], rows, drop=())
