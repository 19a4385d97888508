"""What the daemon is made of, as its desk needs it."""

from __future__ import annotations

from dataclasses import dataclass

from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.control.active import Active
from hive.control.courier import Courier
from hive.control.elsewhere import WithElsewhere
from hive.control.executing import Executor
from hive.control.gates import ProxyGates
from hive.control.jobs import Jobs
from hive.control.journal import Journal
from hive.control.kept_responses import KeptResponses
from hive.control.keyring import Keyring
from hive.control.listening import Place
from hive.control.models import Models
from hive.control.prewarming import Prewarmer
from hive.control.runtime_config import RuntimeConfig
from hive.control.runtimes import RuntimeWatch
from hive.control.scheduler import Scheduler
from hive.control.stats import Counters
from hive.control.switching import Switcher
from hive.control.usage import UsageConsumer
from hive.control.world import DaemonWorld
from hive.domain import Isolation
from hive.host.gpu_memory import Gpus
from hive.settings import Paths, Settings
from hive.store.database import Database
from hive.store.live import Live


@dataclass(frozen=True)
class Parts:
    """What the daemon is made of. `freezer`: how agents will be frozen here, until one has been seen."""

    epoch: str
    started_at: float
    paths: Paths
    settings: Settings
    isolation: Isolation
    freezer: str
    internal_token: str
    database: Database
    live: Live
    journal: Journal
    counters: Counters
    consumer: UsageConsumer
    gates: ProxyGates
    helper: WithElsewhere
    runtimes: RuntimeWatch
    world: DaemonWorld
    roster: Roster
    sleeper: Sleeper
    executor: Executor
    courier: Courier
    scheduler: Scheduler
    prewarmer: Prewarmer
    responses: KeptResponses
    active: Active
    switcher: Switcher
    jobs: Jobs
    models: Models
    gpus: Gpus
    config: RuntimeConfig
    keyring: Keyring
    api: Place
