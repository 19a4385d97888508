"""The clients of the pool's models, by what the proxy tells of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import Band, UsageEvent
from hive.link.pool import SlotDemand, SlotDemands, SlotFlow, SlotFlows, WaitingDemand
from hive.pool.audience import RATE_OVER_S, Interest, LastModel, audience_of
from hive.pool.state import Audience
from hive.pooling import pool_clients
from hive.pooling.pool_clients import FORGET, PoolClients
from hive.settings.pool import PoolSection
from hive.settings.table import Settings

SETTINGS = Settings(pool=PoolSection(audience_s=30))
MODELS = {"m-1": "m", "n-1": "n"}
INF = float("inf")


def event(
    agent: str, model: str = "m", *, took_s: float = 0.0, status: int = 200, created_at: float = 0.0
) -> UsageEvent:
    return UsageEvent(
        id="x",
        epoch="e",
        event_no=1,
        agent_id=agent,
        tenant="t",
        model=model,
        backend="llama",
        endpoint="/v1/chat/completions",
        duration_ms=took_s * 1e3,
        status=status,
        created_at=created_at,
    )


def flow(*agents: str, begun: int = 0, band: Band = Band.NORMAL) -> SlotFlow:
    return SlotFlow(in_flight=len(agents), agents=list(agents), begun=begun, band=band)


def demand(*agents: str) -> SlotDemand:
    rows = [WaitingDemand(band=Band.HIGH, tenant="t", agent=agent, age_s=1, left_s=2) for agent in agents]
    return SlotDemand(in_flight=0, waiting=rows)


class KnownClients(PoolClients):
    """Agents in `asleep` do not run; `jobs` wait for their tools."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.jobs: list[tuple[str, str]] = []
        super().__init__(lambda: SETTINGS, lambda agent: agent not in self.asleep, lambda: self.jobs)

    def users(self, model: str, now: float) -> int:
        return self.audience(model, now).users

    def flow(self, now: float, **slots: SlotFlow) -> None:
        self.flows(SlotFlows(slots={f"{name}-1": one for name, one in slots.items()}), MODELS, now)

    def wait(self, now: float, **slots: SlotDemand) -> None:
        self.waiting(SlotDemands(slots={f"{name}-1": one for name, one in slots.items()}), MODELS, now)


@pytest.fixture
def clients() -> KnownClients:
    return KnownClients()


def test_one_who_has_used_it_is_its_audience_for_a_while(clients: KnownClients) -> None:
    assert clients.audience("m", 100.0) == Audience()
    clients.used([event("ann"), event("bob")], 100.0)
    assert clients.audience("m", 115.0) == Audience(2, clients.audience("m", 115.0).rate_per_s, ends_at=130.0)
    assert clients.users("m", 130.0) == 0


def test_one_in_flight_or_waiting_is_here_and_nowhere_else(clients: KnownClients) -> None:
    clients.used([event("ann"), event("bob")], 100.0)
    clients.flow(101.0, n=flow("ann", ""))
    assert (clients.users("m", 102.0), clients.audience("n", 102.0).ends_at) == (1, INF)
    clients.wait(103.0, n=demand("bob", "operator"))
    assert (clients.users("m", 104.0), clients.users("n", 104.0)) == (0, 2)
    clients.flow(105.0)
    clients.wait(105.0, n=demand())
    assert (clients.users("m", 106.0), clients.users("n", 106.0)) == (0, 2), "they were at n last"
    assert clients.users("n", 134.0) == 1, "bob was seen there when he waited, at 103"
    assert clients.users("n", 135.0) == 0


def test_the_same_agent_may_be_at_two_models(clients: KnownClients) -> None:
    clients.flow(100.0, m=flow("ann"), n=flow("ann"))
    assert (clients.users("m", 101.0), clients.users("n", 101.0)) == (1, 1)


def test_one_asleep_is_no_audience_and_one_removed_is_forgotten(clients: KnownClients) -> None:
    clients.used([event("ann"), event("bob"), event("cy")], 100.0)
    clients.flow(100.0, m=flow("cy"))
    clients.wait(100.0, n=demand("dan"))
    clients.asleep.add("ann")
    assert clients.users("m", 101.0) == 2
    clients.asleep.clear()
    for agent in ("bob", "cy", "dan", "unknown"):
        clients.gone(agent)
    assert (clients.users("m", 101.0), clients.users("n", 101.0)) == (1, 0)
    assert repr(clients) == "<PoolClients 1 agents, 1 models>"


def test_a_job_whose_tools_are_at_work_is_audience_until_it_asks_again(clients: KnownClients) -> None:
    """Its agent may be asleep: the job asks all the same, and counts once."""
    clients.used([event("a")], 10.0)
    clients.asleep = {"a"}
    assert clients.users("m", 20.0) == 0
    clients.jobs = [("a", "m"), ("job 1", "m"), ("job 2", "n")]
    assert (clients.users("m", 20.0), clients.users("n", 20.0)) == (2, 1)
    assert clients.audience("m", 20.0).ends_at == INF
    clients.asleep = set()
    assert clients.users("m", 20.0) == 2
    clients.jobs = []
    assert (clients.users("m", 20.0), clients.users("n", 20.0)) == (1, 0)


def test_a_model_whose_users_never_return_has_no_audience_of_them(clients: KnownClients) -> None:
    """A planner that is asked once a task."""
    for number in range(3):
        clients.used([event(f"a{number}", "m")], 100.0 + number)
        clients.used([event(f"a{number}", "n")], 100.5 + number)
    clients.used([event("ann", "m")], 110.0)
    assert clients.users("m", 111.0) == 0
    clients.flow(112.0, m=flow("ann"))
    assert clients.users("m", 112.0) == 1, "who is there is there"


def test_one_who_does_not_come_back_at_all_has_not_returned(clients: KnownClients) -> None:
    clients.used([event("ann"), event("bob")], 100.0)
    clients.used([event("cy", "n")], 100.0 + FORGET * 30 + 1)
    clients.used([event("ann")], 500.0)
    assert clients.users("m", 501.0) == 0
    clients.gone("ann")
    for number in range(3):
        clients.used([event("dan")], 510.0 + number)
    assert clients.users("m", 513.0) == 1, "one who was removed says nothing"


def test_callers_without_a_name_are_one_client_and_known_by_their_rate(clients: KnownClients) -> None:
    clients.used([event(""), event("operator")], 100.0)
    audience = clients.audience("m", 100.0)
    assert audience.users == 1
    assert audience.rate_per_s * RATE_OVER_S == pytest.approx(2.0)
    assert clients.users("m", 131.0) == 0
    assert repr(clients) == "<PoolClients 0 agents, 1 models>"


def test_a_request_counts_from_its_begin_and_one_told_late_at_its_own_time(clients: KnownClients) -> None:
    clients.used([event("", took_s=20)], 100.0)
    assert clients.audience("m", 101.0).ends_at == 110.0
    clients.used([event("", took_s=5)], 103.0)
    clients.used([event("", took_s=90)], 104.0)
    assert clients.audience("m", 104.0).ends_at == 128.0, "that one began before the other"
    clients.used([event("ann", "n", created_at=5000.0)], 100.0, wall=5012.0)
    assert clients.audience("n", 101.0).ends_at == 118.0
    clients.flow(100.5, m=flow("ann"))
    clients.flow(101.0)
    clients.used([event("ann", "n", created_at=5001.0)], 101.0, wall=5013.0)
    assert clients.users("m", 102.0) == 2, "ann went to m after that answer of n"
    clients.used([event("ann", "n", created_at=9000.0)], 102.0, wall=5014.0)
    assert clients.used_at("n") == 102.0, "a clock that was set back makes no future"


def test_a_refused_request_is_no_use(clients: KnownClients) -> None:
    clients.used([event("ann", status=404), event("ann", ""), event("bob", status=503)], 100.0)
    assert clients.audience("m", 100.0) == Audience()
    assert repr(clients) == "<PoolClients 0 agents, 0 models>"


def test_the_band_and_the_time_are_those_of_the_newest_request(clients: KnownClients) -> None:
    assert (clients.band("m"), clients.used_at("m")) == (Band.NORMAL, 0.0)
    clients.flow(100.0, m=flow("ann", begun=2, band=Band.HIGH))
    clients.flow(101.0, m=flow("ann"))
    assert (clients.band("m"), clients.used_at("m")) == (Band.HIGH, 101.0)
    clients.flow(102.0, m=flow())
    clients.used([event("ann")], 102.5)
    clients.used([event("ann", created_at=10.0)], 103.0, wall=20.0)
    assert clients.used_at("m") == 102.5


def test_without_the_link_nobody_is_busy_and_slots_that_are_unknown_count_for_nothing(clients: KnownClients) -> None:
    clients.used([event("ann")], 100.0)
    clients.flow(100.0, n=flow("ann"), x=flow("bob", begun=1))
    clients.wait(100.0, n=demand("ann"), x=demand("bob"))
    assert clients.users("m", 101.0) == 0
    clients.link_lost()
    assert clients.audience("n", 101.0).ends_at == 130.0
    assert repr(clients) == "<PoolClients 1 agents, 1 models>"


def test_agents_are_forgotten_and_models_have_an_end(clients: KnownClients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_clients, "MOST_MODELS", 3)
    clients.used([event(f"a{number}", f"x{number}") for number in range(50)], 100.0)
    assert repr(clients) == "<PoolClients 50 agents, 3 models>"
    clients.flow(101.0, m=flow("a7"))
    clients.flow(101.0 + FORGET * 30, m=flow("a7"))
    assert repr(clients) == "<PoolClients 1 agents, 3 models>"
    assert clients.users("m", 102.0 + FORGET * 30) == 1
    assert set(clients._last_at) == {"m"}
    clients.wait(500.0, n=demand("bob"))
    clients.used([event("ann")], 501.0 + FORGET * 30)
    assert clients.users("n", 502.0 + FORGET * 30) == 1, "one who waits long is told of once"
    assert len(clients._used_at) <= 4, "those of the pool's slots besides"


# --- beside the simulator ----------------------------------------------------------------------------------------


class SimBooks:
    """As benchmarks/pool_hive.py keeps them, which is told of each arrival and each end at its moment."""

    def __init__(self) -> None:
        self.uses: dict[str, LastModel] = {}
        self.interest: dict[str, Interest] = {}

    def arrived(self, client: str, model: str, now: float, audience_s: float) -> None:
        if not client:
            self.interest[model] = self.interest.get(model, Interest()).after_caller(now, audience_s)
            return
        self.interest[model] = self.interest.get(model, Interest()).after_agent(now)
        last = self.uses.get(client)
        if last is not None:
            soon = last.model == model and now - last.used_at <= audience_s
            self.interest[last.model] = self.interest[last.model].left_by_agent(soon_again=soon)
        self.uses[client] = LastModel(client, model, now, is_here=True)

    def ended(self, client: str, model: str, now: float) -> None:
        if client:
            self.uses[client] = LastModel(client, model, now)

    def audience(self, model: str, now: float, audience_s: float) -> Audience:
        return audience_of(model, self.uses.values(), self.interest.get(model, Interest()), now, audience_s)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["", "ann", "bob", "cy"]),
        st.sampled_from(["m", "n"]),
        st.integers(0, 20),  # until it comes
        st.integers(0, 15),  # until it ends
    ),
    max_size=8,  # nobody is forgotten
)


@given(REQUESTS)
def test_one_request_after_another_makes_the_audience_of_the_simulator(
    requests: list[tuple[str, str, int, int]],
) -> None:
    clients, books, now = KnownClients(), SimBooks(), 1000.0
    for client, model, pause_s, took_s in requests:
        now += pause_s
        books.arrived(client, model, now, 30)
        clients.flow(now, **{model: flow(client, begun=1)})
        now += took_s
        books.ended(client, model, now)
        clients.flow(now, **{model: flow()})
        clients.used([event(client, model, took_s=took_s)], now)
        for at in (now, now + 29, now + 31):
            for one in ("m", "n"):
                ours, theirs = clients.audience(one, at), books.audience(one, at, 30)
                assert ours.users == theirs.users
                assert ours.ends_at == theirs.ends_at
                assert ours.rate_per_s == pytest.approx(theirs.rate_per_s)


def test_settings_are_read_anew(clients: KnownClients) -> None:
    told = [SETTINGS]
    found = PoolClients(lambda: told[0])
    found.used([event("ann")], 100.0)
    told[0] = msgspec.structs.replace(SETTINGS, pool=PoolSection(audience_s=5))
    assert found.audience("m", 106.0).users == 0
