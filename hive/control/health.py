"""The health of Hive: the conditions that the daemon finds, and the answer to `hive status`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

import msgspec

from hive.backends.capacity import LABELS
from hive.build import version
from hive.conditions import DISK_LEAST_BYTES, FoundCondition, condition, where_is
from hive.control import views
from hive.control.agent_views import AgentViews
from hive.control.effects import DaemonEffects
from hive.control.external_agents import WithElsewhere
from hive.control.listening import ListenPlace
from hive.control.speculation import SpeculationWatch
from hive.control.switching import Switcher
from hive.control.templates import TemplateDesk
from hive.control.usage import UsageConsumer
from hive.domain import BackendInfo, BackendKind, Isolation
from hive.host.files import free_bytes
from hive.link.proxy_link import ProxyGates
from hive.paths import default_state_dir
from hive.pool.state import SlotState
from hive.pooling.pooling import ModelPool
from hive.settings.table import Paths, Settings
from hive.shapes import system
from hive.store.anew import Loss
from hive.store.database import Database
from hive.store.live import Live


class HealthReport:
    """`settings`: those at the daemon's start. `api`: where the API listens on TCP."""

    def __init__(
        self,
        *,
        epoch: str,
        started_at: float,
        paths: Paths,
        config_file: str,
        settings: Settings,
        isolation: Isolation,
        database: Database,
        live: Live,
        consumer: UsageConsumer,
        proxy_link: ProxyGates,
        helper: WithElsewhere,
        effects: DaemonEffects,
        agent_views: AgentViews,
        switcher: Switcher,
        pool: ModelPool,
        api: ListenPlace,
        speculation: SpeculationWatch,
        templates: TemplateDesk,
    ) -> None:
        self._epoch = epoch
        self._started_at = started_at
        self._paths = paths
        self._settings = settings
        self._isolation = isolation
        self._database = database
        self._live = live
        self._consumer = consumer
        self._proxy_link = proxy_link
        self._helper = helper
        self._effects = effects
        self._agent_views = agent_views
        self._switcher = switcher
        self._pool = pool
        self._api = api
        self._speculation = speculation
        self._templates = templates
        self._config_file = config_file
        self._version = version()  # read here, and not where somebody waits for it
        is_default = paths.state == default_state_dir(os.geteuid(), os.environ)
        self._where = where_is(apart=paths.apart, state_dir=None if paths.apart or is_default else paths.state)

    def __repr__(self) -> str:
        return f"<HealthReport of {self._epoch}>"

    def view(self) -> system.Health:
        """The state of Hive, and its problems."""
        found, backend = self.conditions(), self._effects.backend
        return {
            "status": "degraded" if found else "ok",
            "problems": [one.text for one in found],
            "conditions": [views.condition_view(one) for one in found],
            "version": self._version,
            "pid": os.getpid(),
            "epoch": self._epoch,
            "started_at": self._started_at,
            "state_dir": str(self._paths.state),
            "runtime_dir": str(self._paths.runtime),
            "config_file": self._config_file,
            "isolation": self._isolation,
            "freezer": self._agent_views.freezer,
            "limits": self._agent_views.limits,
            "token_tracking": self._effects.settings.inference.token_tracking,
            "proxy": {
                "connected": self._proxy_link.session is not None,
                "port": self._proxy_link.port,
                "ingress_port": self._proxy_link.ingress_port,
            },
            "api": {"listen": self._api.address, "port": self._api.port},
            "helper": {"connected": self._helper.connected, "enabled": self._settings.sandbox.enabled},
            "redis": {"up": self._live.up, "at": str(self._live.at), "why": self._live.why_down},
            "usage": {"degraded": self._consumer.degraded, "lost": self._consumer.lost},
            "backend": views.backend_view(backend),
            "pool": self._pool_health() if self._pool.has_slots else None,
        }

    def _pool_health(self) -> system.PoolHealth:
        slots = self._pool.slots.values()
        return {
            "models": len(slots),
            "loaded": sum(slot.state is SlotState.READY for slot in slots),
            "failed": sorted(slot.model for slot in slots if slot.state is SlotState.FAILED),
        }

    def conditions(self) -> list[FoundCondition]:
        """Conditions now, with commands as they are typed beside this daemon."""
        loss = self._database.loss
        found = conditions_of(
            Facts(
                state=str(self._paths.state),
                free_bytes=free_bytes(self._paths.state),
                is_suspect=self._database.is_suspect,
                loss=loss if loss is not None and loss.is_told(time.time()) else None,
                proxy=self._proxy_link.session is not None,
                helper=self._helper.connected,
                redis=self._live.up,
                redis_at=str(self._live.at),
                redis_why=self._live.why_down,
                usage_waits=self._consumer.degraded,
                is_disk_full=self._consumer.is_disk_full,
                switching_to=self._switcher.towards,
                not_started=None if self._pool.has_slots else self._switcher.not_started,
                backend=self._effects.backend,
                costly={name: acceptance.rate or 0.0 for name, acceptance in self._speculation.costly.items()},
                templates_failed=self._templates.failed,
                agents_failed=self._agent_views.failed,
            )
        )
        return [one.at(self._where) for one in found]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the daemon sees of itself. `free_bytes`: of the state's disk, None if unknown. `loss`: one that
    is still to be told. `proxy`, `helper`: connected; `redis`: up. `usage_waits`: why usage cannot be written, else
    empty. `switching_to`: empty if no switch is under way. `not_started`: why no inference server was started.
    `costly`: the share of drafted tokens that was accepted, of models whose speculation costs more than it gives.
    `templates_failed`: why each of them does not start; `agents_failed`: why each of them is in `error`."""

    state: str
    free_bytes: int | None = None
    is_suspect: bool = False
    loss: Loss | None = None
    proxy: bool = True
    helper: bool = True
    redis: bool = True
    redis_at: str = ""
    redis_why: str = ""
    usage_waits: str = ""
    is_disk_full: bool = False
    switching_to: str = ""
    not_started: FoundCondition | None = None
    backend: BackendInfo | None = None
    costly: Mapping[str, float] = {}
    templates_failed: Mapping[str, str] = {}
    agents_failed: Mapping[str, str] = {}


def conditions_of(seen: Facts) -> list[FoundCondition]:
    """Conditions by these facts, the worst first.

    >>> [one.code for one in conditions_of(Facts(state="/s", proxy=False, switching_to="vllm"))]
    ['proxy_disconnected', 'backend_switching']
    """
    return list(_conditions_of(seen))


def _conditions_of(seen: Facts) -> Iterator[FoundCondition]:
    if seen.is_suspect:
        yield condition("database_suspect")
    if seen.loss is not None:
        code = "database_rolled_back" if seen.loss.is_rollback else "database_begun_anew"
        yield condition(code, why=seen.loss.why, kept=seen.loss.kept, aside=seen.loss.aside)
    if not seen.proxy:
        yield condition("proxy_disconnected")
    if not seen.helper:
        yield condition("helper_disconnected")
    if not seen.redis:
        # Of that of REDIS_URL Hive knows nothing but that it does not answer.
        code = "redis_down" if seen.redis_at.startswith("/") else "redis_of_url_down"
        yield condition(code, at=seen.redis_at, why=seen.redis_why)
    if seen.free_bytes is not None and seen.free_bytes < DISK_LEAST_BYTES:
        yield condition("disk_nearly_full", path=seen.state, free_bytes=seen.free_bytes)
    if seen.usage_waits:
        code = "usage_waits_for_disk" if seen.is_disk_full else "usage_waits"
        yield condition(code, path=seen.state, why=seen.usage_waits)
    if seen.switching_to:
        yield condition("backend_switching", to=seen.switching_to)
    is_down = seen.backend is None or not seen.backend.up
    if seen.not_started is not None and is_down:
        yield seen.not_started
    if seen.backend is not None and is_down and not seen.switching_to:
        code = "demo_backend_down" if seen.backend.kind is BackendKind.DEMO else "backend_down"
        yield condition(code, at=seen.backend.address)
    if seen.backend is not None and not is_down:
        yield from _conditions_of_cluster(seen.backend)
    if seen.costly:
        model, rate = next(iter(seen.costly.items()))
        yield condition("speculation_costs", model=model, percent=round(rate * 100), more=len(seen.costly) - 1)
    if seen.templates_failed:
        template, why = next(iter(seen.templates_failed.items()))
        yield condition("template_failed", template=template, why=why, more=len(seen.templates_failed) - 1)
    if seen.agents_failed:
        agent, why = next(iter(seen.agents_failed.items()))
        yield condition("agent_failed", agent=agent, why=why, more=len(seen.agents_failed) - 1)


def _conditions_of_cluster(backend: BackendInfo) -> Iterator[FoundCondition]:
    """Those of a backend that is up. An engine that tells nothing is warned of by its name, also where it never did."""
    if backend.warning.startswith(tuple(LABELS.values())):
        yield condition("cluster_untold", why=backend.warning)
        return  # what it told before is no news
    if (cluster := backend.cluster) is None:
        return
    engine, at = LABELS[cluster.engine], backend.address
    if cluster.stuck:
        yield condition("cluster_stuck", engine=engine, at=at, ranks=cluster.stuck)
    if cluster.why_none:
        yield condition("cluster_none", why=cluster.why_none)
    elif cluster.running < cluster.wanted and not cluster.stuck:
        down = ", ".join(node.name for node in cluster.nodes if not node.up)
        yield condition(
            "cluster_short", engine=engine, at=at, running=cluster.running, wanted=cluster.wanted, down=down
        )
