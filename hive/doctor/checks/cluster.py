"""The cluster behind the backend's address: does it tell what runs, who could give it orders, what of it fails late.

Only questions that change nothing are asked (GET), and none where no cluster is known: a plain box sends nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.backends import ask, ray_serve, vllm_ranks, vllm_router
from hive.backends.capacity import LABELS
from hive.backends.conversation import ControlAnswer
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.domain import CloudUse, RuntimeKind, origin_of
from hive.errors import BackendDown, BackendTimeout, HiveError, NotPermitted
from hive.files.layout import UNITS
from hive.host.access import NO_ACCESS, RemoteAccess, access_of, cluster_access_of
from hive.host.listener import listening_addresses
from hive.host.process import ProcessTable, words_of

RAY, ROUTER = ray_serve.ENGINE, vllm_router.ENGINE
NONE_KNOWN = "one server answers, and no cluster is to be asked"
ROUTER_UNITS = "vllm-router*.service"
INTERVAL = "--health-check-interval-secs"
INTERVAL_S = 60
"""Of vLLM Router 0.1.17 where its command line names none."""
INTERVAL_MOST_S = 10
"""Requests of so many seconds may go to a worker that is gone, and none is anybody's fault."""
WIDE = ("0.0.0.0", "::")


# --- which cluster -----------------------------------------------------------------------------------------------


class ClusterTarget(NamedTuple):
    """The cluster that is looked at. `engine`: as the daemon found it, without one as hive.conf names it. `teller`: the
    address where it is asked. `dashboard`: the same where that is Ray's; empty where it is another engine.
    `is_elsewhere`: the teller is not the backend itself, and is shown another token."""

    engine: str
    teller: str
    dashboard: str = ""
    is_elsewhere: bool = False


def target_of(subject: Subject) -> ClusterTarget | None:
    """None where none is known, or where it is far and nothing may leave the box."""
    inference, backend = subject.settings.inference, (subject.health or {}).get("backend") or {}
    if inference.enabled == "false" or inference.backend_cluster == "none":
        return None
    found: Mapping[str, Any] = backend.get("cluster") or {}
    by_settings = inference.backend_cluster if inference.backend_cluster != "auto" else ""
    named = by_settings or (RAY if inference.backend_cluster_url else "")
    engine = str(found.get("engine") or named or _silent_engine(str(backend.get("warning", ""))))
    address = str(backend.get("address") or (ask.parse_address(inference.backend_url) if inference.backend_url else ""))
    if not engine or not address:
        return None
    is_elsewhere = engine == RAY or (engine == ROUTER and bool(inference.backend_cluster_url))
    teller = ray_serve.dashboard_of(address, inference.backend_cluster_url) if is_elsewhere else address
    if inference.cloud == CloudUse.NEVER and not origin_of(teller).is_here:
        return None
    return ClusterTarget(engine, teller, teller if engine == RAY else "", is_elsewhere)


def _silent_engine(warning: str) -> str:
    """The engine that the daemon found and that has told nothing yet: it is warned of by its name.

    >>> _silent_engine("Ray Serve does not tell how many replicas run: h:8265 asks for a token"), _silent_engine("")
    ('ray', '')
    """
    return next((engine for engine, label in LABELS.items() if warning.startswith(label)), "")


async def _answer(subject: Subject, address: str, path: str, access: RemoteAccess = NO_ACCESS) -> ControlAnswer | str:
    """The answer, or why there is none. It comes before the time of the check is over: then that says so by itself."""
    try:
        return await ask.get(address, path, access=access, within_s=min(ask.ANSWER_S, subject.limit_s * 0.8))
    except (BackendDown, BackendTimeout) as error:
        return error.message


def _access(subject: Subject, target: ClusterTarget) -> RemoteAccess:
    """Without a token where this user may not read it: who is asked then says that it wants one."""
    inference = subject.settings.inference
    try:
        if target.is_elsewhere:
            return cluster_access_of(inference, os.environ)
        return access_of(inference, os.environ).shown_to(target.teller)
    except HiveError:
        return NO_ACCESS


# --- does it tell ------------------------------------------------------------------------------------------------


async def look_at_answers(subject: Subject) -> CheckVerdict:
    target = target_of(subject)
    if target is None:
        return skipped(NONE_KNOWN)
    path = {RAY: ray_serve.APPLICATIONS, ROUTER: vllm_router.WORKERS}.get(target.engine, vllm_ranks.METRICS)
    access = _access(subject, target)
    return judge_answers(target.engine, target.teller, await _answer(subject, target.teller, path, access))


def judge_answers(engine: str, at: str, told: ControlAnswer | str) -> CheckVerdict:
    """
    >>> judge_answers("ray", "h:8265", ControlAnswer(200, {}, b"{}")).reason
    'Ray Serve at h:8265 tells what of it runs'
    >>> judge_answers("ray", "h:8265", "connection refused").status.value
    'fail'
    """
    if isinstance(told, str):
        return wrong("cluster_silent", engine=LABELS[engine], at=at, why=told)
    if told.status in (401, 403):
        return wrong("cluster_token_refused", engine=LABELS[engine], at=at, status=told.status)
    if told.status != 200:
        return wrong("cluster_silent", engine=LABELS[engine], at=at, why=f"it answers with status {told.status}")
    return passed(f"{LABELS[engine]} at {at} tells what of it runs")


# --- who could give it orders ------------------------------------------------------------------------------------


async def look_at_token(subject: Subject) -> CheckVerdict:
    target = target_of(subject)
    if target is None or not target.dashboard:
        return skipped(NONE_KNOWN if target is None else f"{LABELS[target.engine]} takes no orders")
    return judge_token(target.dashboard, await _answer(subject, target.dashboard, ray_serve.APPLICATIONS))


def judge_token(at: str, told: ControlAnswer | str) -> CheckVerdict:
    """`told`: the answer to who shows no token.

    >>> judge_token("h:8265", ControlAnswer(401, {}, b"")).reason
    'Ray at h:8265 asks for a token'
    >>> judge_token("h:8265", ControlAnswer(200, {}, b"{}")).status.value
    'fail'
    """
    if isinstance(told, str):
        return skipped(f"it does not answer: {told}")
    return passed(f"Ray at {at} asks for a token") if told.status in (401, 403) else wrong("ray_without_token", at=at)


class AgentNetwork(NamedTuple):
    """The network that an agent has. `egress`: as in its description."""

    name: str
    runtime: str
    egress: tuple[str, ...] | None = None
    tap: str = ""


class DashboardPlace(NamedTuple):
    """The place of Ray's dashboard. `ip`: its address as it is dialled; `bound`: the addresses it listens at, None
    where it is not on this host."""

    at: str
    ip: str
    bound: tuple[str, ...] | None = None

    @property
    def is_wide(self) -> bool:
        return any(address in WIDE for address in self.bound or ())

    @property
    def is_inner(self) -> bool:
        """Whether only programs in this host's own network reach it."""
        return bool(self.bound) and all(ipaddress.ip_address(one).is_loopback for one in self.bound or ())


async def look_at_ways(subject: Subject) -> CheckVerdict:
    target = target_of(subject)
    if target is None or not target.dashboard:
        return skipped(NONE_KNOWN if target is None else f"{LABELS[target.engine]} takes no orders")
    told = await _answer(subject, target.dashboard, ray_serve.APPLICATIONS)
    if isinstance(told, str) or told.status != 200:
        return judge_ways(DashboardPlace(target.dashboard, ""), told, None)
    place, networks = await asyncio.gather(
        asyncio.to_thread(_place, target.dashboard), asyncio.to_thread(_networks, subject)
    )
    return judge_ways(place, told, networks)


def _place(dashboard: str) -> DashboardPlace:
    host, _, port = origin_of(dashboard).dialled.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ask.ANSWER_S) as asking:
            peer, own = asking.getpeername()[0], asking.getsockname()[0]
    except OSError:
        return DashboardPlace(dashboard, "")
    return DashboardPlace(dashboard, peer, listening_addresses(int(port)) if peer == own else None)


def _networks(subject: Subject) -> list[AgentNetwork] | None:
    """Those of all agents; None where no daemon tells."""
    if (client := subject.client) is None:
        return None
    try:
        agents = [agent for page in client.agents(timeout_s=subject.limit_s) for agent in page["agents"]]
    except NotPermitted:
        return None
    return [
        AgentNetwork(
            agent["name"],
            agent["runtime"],
            None if agent["egress"] is None else tuple(agent["egress"]),
            (agent.get("firecracker") or {}).get("tap") or "",
        )
        for agent in agents
    ]


def judge_ways(place: DashboardPlace, told: ControlAnswer | str, agents: Sequence[AgentNetwork] | None) -> CheckVerdict:
    """`told`: the answer to who shows no token; `agents`: None where nobody tells.

    >>> place, open_ = DashboardPlace("10.0.0.1:8265", "10.0.0.1"), ControlAnswer(200, {}, b"{}")
    >>> judge_ways(place, open_, [AgentNetwork("alice", "process", ())]).reason
    'no agent reaches 10.0.0.1:8265'
    >>> judge_ways(place, open_, [AgentNetwork("bob", "docker")]).status.value
    'fail'
    """
    if isinstance(told, str):
        return skipped(f"it does not answer: {told}")
    if told.status in (401, 403):
        return passed(f"{place.at} asks whoever reaches it for a token")
    if not place.ip:
        return skipped(f"{place.at} takes no connection, or is no dashboard (status {told.status})")
    reaching = [agent.name for agent in agents or () if can_reach(agent, place)]
    if reaching:
        return wrong("ray_reached_by_agents", at=place.at, agent=reaching[0], more=len(reaching) - 1)
    if place.is_wide:
        return wrong("ray_bound_wide", at=place.at, bound=next(one for one in place.bound or () if one in WIDE))
    return passed(f"no agent reaches {place.at}") if agents is not None else skipped("no daemon tells of agents")


def can_reach(agent: AgentNetwork, place: DashboardPlace) -> bool:
    """Whether the network of this agent has a way there; what a firewall drops is not seen.

    >>> inner, far = DashboardPlace("127.0.0.1:8265", "127.0.0.1", ("127.0.0.1",)), DashboardPlace("h:8265", "10.1.0.1")
    >>> [can_reach(AgentNetwork("a", "docker"), place) for place in (inner, far)]
    [False, True]
    >>> lists = (None, (), ("10.1.0.0/16",), ("10.2.0.0/16",))
    >>> [can_reach(AgentNetwork("a", "process", egress), far) for egress in lists]
    [True, False, True, False]
    """
    if agent.runtime == RuntimeKind.EXTERNAL or agent.egress == ():
        return False
    if agent.egress:
        return any(ipaddress.ip_address(place.ip) in ipaddress.ip_network(one, strict=False) for one in agent.egress)
    if agent.runtime == RuntimeKind.PROCESS:
        return True  # it has the host's own network
    return not place.is_inner and (agent.runtime != RuntimeKind.FIRECRACKER or bool(agent.tap))


# --- what fails late ---------------------------------------------------------------------------------------------


class ServeConfig(msgspec.Struct):
    """The configuration of a deployment."""

    max_ongoing_requests: float | None = None


class ServeDeployment(msgspec.Struct):
    """One deployment of an application of Ray Serve."""

    target_num_replicas: int | None = None
    deployment_config: ServeConfig = msgspec.field(default_factory=ServeConfig)


class ServeTopology(msgspec.Struct):
    """The way of requests through an application."""

    ingress_deployment: str | None = None


class ServeApplication(msgspec.Struct):
    """One application of Ray Serve, as its dashboard tells."""

    deployments: dict[str, ServeDeployment] = {}
    deployment_topology: ServeTopology | None = None

    @property
    def ingress(self) -> str:
        """The deployment that takes requests and hands them on; empty where the model's own takes them."""
        name = "" if self.deployment_topology is None else self.deployment_topology.ingress_deployment or ""
        return name if name in self.deployments and len(self.deployments) > 1 else ""


class ServeApplications(msgspec.Struct):
    """The answer of Ray's dashboard to `GET /api/serve/applications/`, as far as it is looked at."""

    applications: dict[str, ServeApplication]


async def _applications(subject: Subject) -> dict[str, ServeApplication] | CheckVerdict:
    """The applications that run; a verdict where there is nothing to look at."""
    target = target_of(subject)
    if target is None or not target.dashboard:
        return skipped(NONE_KNOWN if target is None else f"{LABELS[target.engine]} has nothing of this kind")
    told = await _answer(subject, target.dashboard, ray_serve.APPLICATIONS, _access(subject, target))
    if isinstance(told, str):
        return skipped(f"it does not answer: {told}")
    if told.status != 200:
        return skipped(f"{target.dashboard} tells nothing (status {told.status})", "{hive:doctor cluster.answers}")
    try:
        return msgspec.json.decode(told.body, type=ServeApplications).applications
    except (msgspec.DecodeError, UnicodeDecodeError):
        return skipped(f"{target.dashboard} does not answer as Ray Serve does")


async def look_at_ingress(subject: Subject) -> CheckVerdict:
    found = await _applications(subject)
    return found if isinstance(found, CheckVerdict) else judge_ingress(found)


def judge_ingress(apps: Mapping[str, ServeApplication]) -> CheckVerdict:
    """
    >>> judge_ingress({}).reason
    'no application is deployed'
    """
    if not apps:
        return skipped("no application is deployed")
    for name, app in apps.items():
        if app.ingress and app.deployments[app.ingress].target_num_replicas == 1:
            return wrong("ray_one_ingress", app=name, ingress=app.ingress)
    return passed("no application hangs by one ingress replica")


async def look_at_limits(subject: Subject) -> CheckVerdict:
    found = await _applications(subject)
    if isinstance(found, CheckVerdict):
        return found
    return judge_limits(found, slots_per_replica=subject.settings.inference.slots_per_replica)


def judge_limits(apps: Mapping[str, ServeApplication], *, slots_per_replica: int) -> CheckVerdict:
    """
    >>> open_ = ServeApplication({"LLMServer:m": ServeDeployment(2, ServeConfig(1e9))})
    >>> judge_limits({"llm": open_}, slots_per_replica=0).status.value
    'warn'
    >>> judge_limits({"llm": open_}, slots_per_replica=8).reason
    'slots_per_replica = 8 says how many requests a replica is given'
    """
    if not apps:
        return skipped("no application is deployed")
    if slots_per_replica:
        return passed(f"slots_per_replica = {slots_per_replica} says how many requests a replica is given")
    for name, app in apps.items():
        for deployment, told in app.deployments.items():
            most = told.deployment_config.max_ongoing_requests
            if deployment != app.ingress and (most is None or most > ray_serve.MOST_ONGOING):
                return wrong("ray_no_limit", app=name, deployment=deployment, most=0 if most is None else int(most))
    return passed("each deployment says how many requests a replica works on at once")


class RouterCommand(NamedTuple):
    """A command that starts vLLM Router. `where`: the unit or process it is of."""

    where: str
    words: tuple[str, ...]


def look_at_checks(subject: Subject) -> CheckVerdict:
    target = target_of(subject)
    if target is None or target.engine != ROUTER:
        return skipped(NONE_KNOWN if target is None else f"{LABELS[target.engine]} looks after its replicas by itself")
    return judge_checks([*_of_units(subject.layout.at(UNITS)), *_of_processes()])


def _of_units(directory: Path) -> list[RouterCommand]:
    """Of the units of vLLM Router on this host; of a unit with drop-ins the last command."""
    found = []
    for unit in sorted(directory.glob(ROUTER_UNITS)):
        texts = [one.read_text(errors="replace") for one in (unit, *sorted(Path(f"{unit}.d").glob("*.conf")))]
        if command := exec_start("\n".join(texts)):
            found.append(RouterCommand(unit.name, command))
    return found


def exec_start(text: str) -> tuple[str, ...]:
    r"""The words of the last command of a unit, as written there; empty where it has none.

    >>> exec_start("[Service]\nExecStart=/opt/r/bin/vllm-router --port 3001 \\\n  --health-check-interval-secs 2\n")
    ('/opt/r/bin/vllm-router', '--port', '3001', '--health-check-interval-secs', '2')
    """
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line.partition("=")[2].strip() for line in lines if line.strip().startswith("ExecStart=")]
    return tuple(next((command for command in reversed(commands) if command), "").split())


def _of_processes() -> list[RouterCommand]:
    """Of the routers that run here: 0.1.17 calls itself `vllm::router` and shows no command line any more."""
    found = [(one.pid, words_of(one.pid)) for one in ProcessTable().processes.values() if one.alive]
    return [RouterCommand(f"process {pid}", words) for pid, words in found if is_router(words)]


def is_router(words: Sequence[str]) -> bool:
    """
    >>> is_router(("python3", "-m", "vllm_router.launch_router")), is_router(("/r/bin/vllm-router", "--port", "1"))
    (True, True)
    >>> is_router(("vim", "vllm-router.service")), is_router(("vllm::router",))
    (False, False)
    """
    return any(word.rpartition("/")[2] in ("vllm-router", "vllm_router.launch_router") for word in words[:6])


def judge_checks(found: Sequence[RouterCommand]) -> CheckVerdict:
    """
    >>> judge_checks([RouterCommand("a.service", ("vllm-router", "--health-check-interval-secs=2"))]).reason
    'a.service looks after its workers every 2 s'
    >>> judge_checks([RouterCommand("a.service", ("vllm-router",))]).status.value
    'warn'
    """
    if not found:
        return skipped(
            "the router tells nobody how often it looks after its workers, and no command of it is on this host: "
            f"its default is {INTERVAL_S} s, {INTERVAL} 2 is right"
        )
    for where, words in found:
        seconds = interval_in(words)
        if seconds is None:
            return skipped(f"{where} names {INTERVAL} by a variable: 2 is right, the default is {INTERVAL_S}")
        if seconds > INTERVAL_MOST_S:
            remedy = f"systemctl edit {where}" if where.endswith(".service") else "start the router anew"
            return wrong("router_checks_slow", what=where, interval_s=seconds, remedy=remedy)
    return passed(f"{found[0].where} looks after its workers every {interval_in(found[0].words)} s")


def interval_in(words: Sequence[str]) -> int | None:
    """The seconds between two looks, by the router's command line; None where a variable stands there.

    >>> interval_in(("r", "--health-check-interval-secs", "5")), interval_in(("r",)), interval_in(("r", "$OPTIONS"))
    (5, 60, None)
    """
    line = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if INTERVAL in line[:-1]:
        value = line[len(line) - 1 - line[::-1].index(INTERVAL) + 1]
        return int(value) if value.isdigit() else None
    return None if any("$" in word for word in words) else INTERVAL_S


CHECKS = (
    Check("cluster.answers", "The cluster tells what of it runs.", look_at_answers),
    Check("cluster.token", "Ray asks for a token.", look_at_token),
    Check("cluster.apart", "Agents do not reach Ray's dashboard without a token.", look_at_ways),
    Check("cluster.ingress", "No application hangs by one ingress replica.", look_at_ingress),
    Check("cluster.limit", "Each replica has a number of requests that it works on at once.", look_at_limits),
    Check("cluster.checks", "The router looks after its workers often enough.", look_at_checks),
)
