"""vLLM Router (0.1.17): what it tells of its workers. Data and pure functions.

It sends a request at once to one of them; what waits, waits in that worker.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from hive.backends.capacity import LOOK_S, ClusterLook, shown, slots_of
from hive.backends.conversation import AskedServer, ControlAnswer, Conversation, decoded, get, object_in
from hive.domain import ClusterNode
from hive.settings.table import InferenceSection

ENGINE = "router"
READINESS, WORKERS = "/readiness", "/workers"
PREFILL, DECODE = "prefill", "decode"


class _Worker(msgspec.Struct):
    url: str = ""
    is_healthy: bool = False
    load: int = 0
    worker_type: str = "regular"


class _Workers(msgspec.Struct):
    workers: list[_Worker]


def is_router(readiness: ControlAnswer | None, workers: ControlAnswer | None) -> bool:
    """Whether these answers to `READINESS` and `WORKERS` are the router's.

    >>> ready = ControlAnswer(503, {}, b'{"status":"not_ready","total_workers":2}')
    >>> is_router(ready, ControlAnswer(200, {}, b'{"workers":[],"total":0}')), is_router(ready, None)
    (True, False)
    """
    if readiness is None or workers is None or workers.status != 200:
        return False
    ready = object_in(readiness.body)
    return isinstance(object_in(workers.body).get("workers"), list) and bool(
        ready.keys() & {"healthy_workers", "status"}
    )


def look(server: AskedServer, inference: InferenceSection) -> Conversation[ClusterLook]:
    """Its workers. Raises `BackendDown`, `BackendTimeout`."""
    answer = yield from get(WORKERS, within_s=LOOK_S)
    return seen(decoded(server, WORKERS, answer, _Workers).workers, inference)


def seen(workers: list[_Worker], inference: InferenceSection) -> ClusterLook:
    """The look at these workers. Where prompts are read by others than write the answers, those that write count, and
    none of them can without one that reads.

    >>> from hive.settings.table import InferenceSection
    >>> two = [_Worker("http://10.0.0.1:8000", True, 9), _Worker("http://10.0.0.2:8000", False)]
    >>> found = seen(two, InferenceSection(slots_per_replica=8))
    >>> found.running, found.wanted, found.places, found.waiting, found.nodes[1]
    (1, 2, 8, 1, ClusterNode(name='10.0.0.2', up=False, replicas=0))
    >>> apart = [_Worker("http://h", True, 0, "decode"), _Worker("http://i", False, 0, "prefill")]
    >>> seen(apart, InferenceSection()).why_none
    'no worker that reads prompts is well'
    """
    each = slots_of(0, inference)
    readers = [worker for worker in workers if worker.worker_type == PREFILL]
    writers = [worker for worker in workers if worker.worker_type != PREFILL]
    is_read = not readers or any(worker.is_healthy for worker in readers)
    well = [worker for worker in writers if worker.is_healthy] if is_read else []
    healthy: dict[str, int] = {}
    for worker in workers:
        name = shown(_host_of(worker.url))
        healthy[name] = healthy.get(name, 0) + worker.is_healthy
    return ClusterLook(
        engine=ENGINE,
        wanted=len(writers),
        running=len(well),
        slots_each=each,
        places=len(well) * each,
        nodes=tuple(ClusterNode(name, up=count > 0, replicas=count) for name, count in healthy.items()),
        waiting=sum(max(0, worker.load - each) for worker in well),
        why_none="" if is_read else "no worker that reads prompts is well",
    )


def _host_of(url: str) -> str:
    """
    >>> _host_of("http://10.0.0.1:8000@1"), _host_of("grpc://h:1"), _host_of("http://[x")
    ('10.0.0.1', 'h', 'http://[x')
    """
    try:
        # A rank of data parallelism is an address with @ and its number behind it.
        return urlsplit(re.sub(r"@\d+$", "", url)).hostname or url
    except ValueError:
        return url
