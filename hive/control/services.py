"""The parts of the daemon, as its desk needs them."""

from __future__ import annotations

from dataclasses import dataclass

from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.control.active_backend import Active
from hive.control.api_tokens import LiveTokens
from hive.control.audit_log import AuditLog
from hive.control.counters import Counters
from hive.control.effects import DaemonEffects
from hive.control.executing import Executor
from hive.control.external_agents import WithElsewhere
from hive.control.jobs import Jobs
from hive.control.kept_responses import KeptResponses
from hive.control.listening import ListenPlace
from hive.control.message_delivery import MessageDelivery
from hive.control.models import Models
from hive.control.prewarming import Prewarmer
from hive.control.proxy_link import ProxyGates
from hive.control.runtime_config import RuntimeConfig
from hive.control.runtimes import RuntimeWatch
from hive.control.scheduler import Scheduler
from hive.control.state_queries import StateQueries
from hive.control.switching import Switcher
from hive.control.usage import UsageConsumer
from hive.domain import Isolation
from hive.host.gpu_memory import GpuMemoryReader
from hive.settings.table import Paths, Settings
from hive.store.database import Database
from hive.store.live import Live


@dataclass(frozen=True)
class Services:
    """The parts of the daemon. `freezer`: how agents will be frozen here, until one has been seen."""

    epoch: str
    started_at: float
    paths: Paths
    settings: Settings
    isolation: Isolation
    freezer: str
    internal_token: str
    database: Database
    live: Live
    journal: AuditLog
    counters: Counters
    consumer: UsageConsumer
    gates: ProxyGates
    helper: WithElsewhere
    runtimes: RuntimeWatch
    world: DaemonEffects
    roster: Roster
    sleeper: Sleeper
    executor: Executor
    courier: MessageDelivery
    scheduler: Scheduler
    prewarmer: Prewarmer
    responses: KeptResponses
    state_queries: StateQueries
    active: Active
    switcher: Switcher
    jobs: Jobs
    models: Models
    gpus: GpuMemoryReader
    config: RuntimeConfig
    keyring: LiveTokens
    api: ListenPlace
