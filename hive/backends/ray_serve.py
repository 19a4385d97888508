"""Ray Serve (2.60): what its dashboard tells of the replicas behind an address. Data and pure functions.

`GET /api/serve/applications/` is its own schema (`ServeInstanceDetails`): 9 kB for two nodes, always of this moment,
where its Prometheus text is 800 kB and ten seconds old. Every field is read as one that may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hive.backends.capacity import LOOK_S, MOST_COUNT, ClusterLook, shown, slots_of
from hive.backends.conversation import MOST_TEXT, AskedServer, ControlAnswer, Conversation, decoded, get, object_in
from hive.domain import ClusterNode, origin_of
from hive.errors import BackendDown
from hive.settings.table import InferenceSection

ENGINE = "ray"
APPLICATIONS = "/api/serve/applications/"
AUTHENTICATION = "/api/authentication_mode"
"""Answered whoever asks: `token`, or `disabled`; before Ray 2.52 there is none, and no authentication."""
ROUTES = "/-/routes"
"""Of its HTTP proxy, which is the backend's address: the application at each prefix. It asks no replica."""
DASHBOARD_PORT = 8265
MOST_ONGOING = 100_000
"""Above it a limit is none: ray.serve.llm has 1e9 where nobody set one."""
RUNS, HEALTHY = "RUNNING", "HEALTHY"
LLM_SERVERS = ("LLMServer:", "DPServer:", "Decode:", "PDDecodeServer:")
"""Beginnings of the names of ray.serve.llm's deployments with an engine that writes answers."""
LLM_HANDS_ON = ("LLMRouter", "OpenAiIngress")
"""Of those that hand requests on."""


class _Replica(msgspec.Struct):
    state: str = ""
    node_ip: str | None = None
    node_id: str | None = None


class _Config(msgspec.Struct):
    max_ongoing_requests: float | None = None
    autoscaling_config: dict[str, Any] | None = None


class _Deployment(msgspec.Struct):
    replicas: list[_Replica] = []
    target_num_replicas: int | None = None
    deployment_config: _Config = msgspec.field(default_factory=_Config)

    @property
    def running(self) -> int:
        return sum(replica.state == RUNS for replica in self.replicas)

    @property
    def wanted(self) -> int:
        return len(self.replicas) if self.target_num_replicas is None else self.target_num_replicas

    @property
    def ongoing(self) -> int:
        """Requests that a replica takes at once, 0 where nobody set a limit."""
        most = self.deployment_config.max_ongoing_requests or 0
        return int(most) if 0 < most <= MOST_ONGOING else 0

    @property
    def starts_when_asked(self) -> bool:
        config = self.deployment_config.autoscaling_config or {}
        most = config.get("max_replicas")
        return config.get("min_replicas") == 0 and isinstance(most, int | float) and most > 0


class _Topology(msgspec.Struct):
    ingress_deployment: str | None = None


class _Application(msgspec.Struct):
    route_prefix: str | None = None
    deployments: dict[str, _Deployment] = {}
    deployment_topology: _Topology | None = None

    @property
    def workers(self) -> dict[str, _Deployment]:
        """The deployments in which requests are at work: of ray.serve.llm its servers, of another application all but
        the one that takes requests and hands them on."""
        names = list(self.deployments)
        servers = [name for name in names if name.startswith(LLM_SERVERS)]
        ingress = None if self.deployment_topology is None else self.deployment_topology.ingress_deployment
        others = [name for name in names if name != ingress and not name.startswith(LLM_HANDS_ON)]
        return {name: self.deployments[name] for name in servers or others or names}

    @property
    def needed(self) -> dict[str, _Deployment]:
        """The others: without one of them no request gets to a worker, or through it."""
        return {name: one for name, one in self.deployments.items() if name not in self.workers}


class _Proxy(msgspec.Struct):
    node_ip: str | None = None
    status: str = ""


class _Serve(msgspec.Struct):
    applications: dict[str, _Application] = {}
    proxies: dict[str, _Proxy] = {}


def routes_in(answer: ControlAnswer | None) -> list[str] | None:
    """The routes of Ray Serve's applications, by its proxy's answer to `ROUTES`; None where that is not one.

    >>> routes_in(ControlAnswer(200, {}, b'{"/llm":"app"}')), routes_in(ControlAnswer(200, {}, b"{}"))
    (['/llm'], [])
    >>> routes_in(ControlAnswer(404, {}, b"{}")), routes_in(ControlAnswer(200, {}, b"<html>")), routes_in(None)
    (None, None, None)
    """
    if answer is None or answer.status != 200 or not answer.body.lstrip().startswith(b"{"):
        return None
    try:
        routes = list(msgspec.json.decode(answer.body, type=dict[str, str]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    are_routes = all(route.startswith("/") and len(route) <= MOST_TEXT and route.isprintable() for route in routes)
    return routes if are_routes else None


def is_dashboard(answer: ControlAnswer | None) -> bool:
    """Whether this is a dashboard's answer to `APPLICATIONS`, or its word that it asks for a token."""
    if answer is None:
        return False
    told = object_in(answer.body)
    return answer.status == 200 and "applications" in told and ("proxies" in told or "controller_info" in told)


def asks_for_token(answer: ControlAnswer | None) -> bool | None:
    """True if the dashboard that gave this answer to `AUTHENTICATION` does; None where it gave none.

    >>> asks_for_token(ControlAnswer(200, {}, b'{"authentication_mode": "token"}')), asks_for_token(None)
    (True, None)
    """
    return None if answer is None else object_in(answer.body).get("authentication_mode") == "token"


def dashboard_of(address: str, url: str) -> str:
    """The address of the dashboard, by the backend's own and `backend_cluster_url`; empty where there is none.

    >>> dashboard_of("10.0.0.1:8000", ""), dashboard_of("http://head:8000/llm", ""), dashboard_of("/run/v.sock", "")
    ('10.0.0.1:8265', 'head:8265', '')
    >>> dashboard_of("10.0.0.1:8000", "http://head:8265/"), dashboard_of("10.0.0.1:8000", "https://ray.example.org")
    ('head:8265', 'https://ray.example.org')
    """
    if not url:
        dialled = origin_of(address).dialled
        return "" if dialled.startswith("/") else f"{dialled.rpartition(':')[0]}:{DASHBOARD_PORT}"
    return url_address(url)


def url_address(url: str) -> str:
    """`backend_cluster_url` as `BackendInfo` has an address."""
    scheme, _, host = url.rstrip("/").partition("://")
    if scheme == "https":
        return f"https://{host}"
    return host if host.rpartition("]")[2].rpartition(":")[1] else f"{host}:80"


def look(
    server: AskedServer, prefix: str, inference: InferenceSection, notes: tuple[str, ...] = ()
) -> Conversation[ClusterLook]:
    """The look at the application behind `prefix`, with `notes` on the cluster itself. Raises `BackendDown`,
    `BackendTimeout`."""
    answer = yield from get(APPLICATIONS, within_s=LOOK_S)
    if answer.status in (401, 403):
        shown = f"refuses Hive's token ({answer.status})" if server.has_key else f"asks for a token ({answer.status})"
        raise BackendDown(f"{server} {shown}: backend_cluster_token_file names its file")
    found = seen(decoded(server, APPLICATIONS, answer, _Serve), prefix, inference)
    return msgspec.structs.replace(found, notes=notes + found.notes)


def seen(serve: _Serve, prefix: str, inference: InferenceSection) -> ClusterLook:
    """The look at the applications that serve requests below `prefix`."""
    found = _behind(serve.applications, prefix)
    workers = [one for app in found for one in app.workers.values()]
    each = [slots_of(one.ongoing, inference) for one in workers]
    needed = {name: one for app in found for name, one in app.needed.items()}
    missing = [f"{shown(name)} runs 0 of {one.wanted} replicas" for name, one in needed.items() if not one.running]
    hands_on = [one.running * one.ongoing for one in needed.values() if one.ongoing]
    return ClusterLook(
        engine=ENGINE,
        wanted=sum(one.wanted for one in workers),
        running=sum(one.running for one in workers),
        slots_each=each[0] if len(set(each)) == 1 else 0,
        places=0
        if missing
        else min(sum(one.running * slots for one, slots in zip(workers, each, strict=True)), *hands_on, MOST_COUNT),
        nodes=_nodes(serve.proxies, workers),
        notes=_notes(needed.values(), workers),
        starts_when_asked=not missing and any(one.starts_when_asked for one in workers),
        why_none=missing[0] if missing else "" if found else "no application is deployed",
    )


def _behind(apps: Mapping[str, _Application], prefix: str) -> list[_Application]:
    """The application with the longest route that `prefix` is below; all of them where none fits."""
    path = f"{prefix.rstrip('/')}/v1/"
    fits = [
        (len(app.route_prefix), app)
        for app in apps.values()
        if app.route_prefix and path.startswith(f"{app.route_prefix.rstrip('/')}/")
    ]
    best = max((length for length, _ in fits), default=0)
    return [app for length, app in fits if length == best] or list(apps.values())


def _nodes(proxies: Mapping[str, _Proxy], workers: list[_Deployment]) -> tuple[ClusterNode, ...]:
    replicas: dict[str, int] = {}
    for worker in workers:
        for replica in worker.replicas:
            if name := shown(replica.node_ip or replica.node_id or ""):
                replicas[name] = replicas.get(name, 0) + (replica.state == RUNS)
    healthy = {shown(proxy.node_ip or "") for proxy in proxies.values() if proxy.status == HEALTHY}
    names = sorted({*replicas, *(shown(proxy.node_ip) for proxy in proxies.values() if proxy.node_ip)})
    return tuple(
        ClusterNode(name, up=name in healthy or replicas.get(name, 0) > 0, replicas=replicas.get(name, 0))
        for name in names
    )


def _notes(needed: Iterable[_Deployment], workers: list[_Deployment]) -> tuple[str, ...]:
    notes = {
        "one_ingress": any(one.wanted == 1 for one in needed),
        "max_ongoing_unset": any(not worker.ongoing for worker in workers),
    }
    return tuple(name for name, is_so in notes.items() if is_so)
