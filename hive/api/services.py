"""The services of the daemon, as the API's handlers call them."""

from __future__ import annotations

from dataclasses import dataclass

from hive.agents.roster import Roster
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.control.active_backend import Active
from hive.control.agent_views import AgentViews
from hive.control.api_tokens import LiveTokens
from hive.control.budgets import BudgetReport
from hive.control.counters import Counters
from hive.control.effects import DaemonEffects
from hive.control.executing import Executor
from hive.control.governance import Governor
from hive.control.health import HealthReport
from hive.control.kept_responses import KeptResponses
from hive.control.message_delivery import MessageDelivery
from hive.control.metrics import Scraper
from hive.control.models import Models
from hive.control.prewarming import Prewarmer
from hive.control.registration import AgentRegistry
from hive.control.runtime_config import RuntimeConfig
from hive.control.runtimes import RuntimeWatch
from hive.control.scheduler import Scheduler
from hive.control.speculation import SpeculationWatch
from hive.control.state_queries import StateQueries
from hive.control.switching import Switcher
from hive.control.task_report import TaskReport
from hive.control.templates import TemplateDesk
from hive.control.usage_report import UsageReport
from hive.host.gpu_memory import GpuMemoryReader
from hive.lifecycle.adapter_orders import AdapterOrders
from hive.lifecycle.cache_flush import CacheFlusher
from hive.lifecycle.model_jobs import ModelJobs
from hive.lifecycle.runner import RunnerDesk
from hive.link.proxy_link import ProxyGates
from hive.pooling.deployments import Deployments
from hive.pooling.lease_desk import LeaseDesk
from hive.pooling.pool_orders import PoolOrders
from hive.settings.table import Paths, Settings


@dataclass(frozen=True)
class Services:
    """One of each. `settings`: those at the daemon's start; `effects.settings` are in force.

    Every method raises a `HiveError` that says what is wrong: NotFound for an unknown agent, WrongState naming the
    state, … `actor` is the caller (`uid:0`), for the audit table; {ref} is an agent's id or name.
    """

    paths: Paths
    settings: Settings
    internal_token: str
    roster: Roster
    agents: AgentRegistry
    agent_views: AgentViews
    effects: DaemonEffects
    proxy_link: ProxyGates
    runtimes: RuntimeWatch
    executor: Executor
    message_delivery: MessageDelivery
    scheduler: Scheduler
    prewarmer: Prewarmer
    responses: KeptResponses
    active: Active
    switcher: Switcher
    jobs: Jobs
    model_jobs: ModelJobs
    models: Models
    pool: PoolOrders
    deployments: Deployments
    adapters: AdapterOrders
    cache: CacheFlusher
    runner: RunnerDesk
    tasks: TaskReport
    templates: TemplateDesk
    leases: LeaseDesk
    governance: Governor
    gpus: GpuMemoryReader
    config: RuntimeConfig
    api_tokens: LiveTokens
    audit_log: AuditLog
    counters: Counters
    usage: UsageReport
    budgets: BudgetReport
    state_queries: StateQueries
    health: HealthReport
    speculation: SpeculationWatch
    scraper: Scraper
