"""Requests, pauses, page-outs, crashes and lost links, in any order and at any pace."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hive.agents.effects import HostMemory
from hive.agents.transition_lock import outcome_of
from hive.domain import RestartPolicy, SleepDepth, WakeCause
from hive.errors import HiveError, NotSupported, Saturated
from hive.link.messages import Open, Refused
from tests.examples import examples
from tests.fakes.agent_world import VirtualLoop
from tests.fakes.lives import PAUSED, RUNNING, started


class AnyOrder(RuleBasedStateMachine):
    """One agent, and everything that may happen to it."""

    ANSWERED_WITHIN_S = 20.0
    """Longer than any wait of a life that has its helper: the slowest ask here takes 6 s."""

    @initialize(
        restart=st.sampled_from(RestartPolicy),
        delays=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3, 3.0]), min_size=1, max_size=7),
    )
    def begin(self, restart: RestartPolicy, delays: list[float]) -> None:
        self.loop = VirtualLoop()
        self.faults: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
        self.world = started(self.loop, restart=restart)
        self.pace(delays)
        self.helper_there_since = self.loop.time()
        self.asked: dict[int, float] = {}
        self.answers: dict[int, Open | Refused] = {}

    def background(self, work: object) -> None:
        self.loop.create_task(outcome_of(work))  # type: ignore[arg-type]

    def note_truth(self) -> None:
        if not self.world.helper.connected:
            self.helper_there_since = self.loop.time()

    @rule(delays=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3, 3.0]), min_size=1, max_size=7))
    def pace(self, delays: list[float]) -> None:
        for wire in (self.world.helper.wire, self.world.gates.wire, self.world.wire):
            wire.delays = delays

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0, 4.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.spend(seconds)
        self.note_truth()

    @rule()
    def request(self) -> None:
        self.loop.do(self.world.gates.request)

    @rule()
    def wake(self) -> None:
        number = len(self.asked)
        self.asked[number] = self.loop.time()

        def answer(got: Open | Refused) -> None:
            assert number not in self.answers, "answered twice"
            self.answers[number] = got
            if isinstance(got, Open):
                assert self.world.life.status is RUNNING

        self.loop.do(self.world.life.wake, WakeCause.REQUEST, answer)

    @rule()
    def pause_when_idle(self) -> None:
        self.loop.spend(11)
        self.background(self.world.life.fall_asleep("idle"))

    @rule(timeout_s=st.sampled_from([0.0, 0.5, 30.0]), now=st.booleans(), deep=st.booleans())
    def pause(self, timeout_s: float, now: bool, deep: bool) -> None:
        self.background(self.world.life.pause(timeout_s=timeout_s, now=now, actor="uid:0", deep=deep))

    @rule(takes_s=st.sampled_from([0.1, 50.0]), after_s=st.sampled_from([0.0, 0.01, 1.0, 30.0]))
    def go_deep(self, takes_s: float, after_s: float) -> None:
        """Asleep if it can be, and on its way deeper; 50 s: longer than anybody may wait for a wake."""
        self.world.helper.page_out_s = takes_s
        self.background(self.world.life.pause(timeout_s=0.0, now=True, actor="uid:0"))
        self.background(self.world.life.go_deep())
        self.loop.spend(after_s)
        self.note_truth()

    @rule(error=st.sampled_from([None, None, NotSupported("not permitted here"), Saturated("swap is full")]))
    def paging_out_fails(self, error: HiveError | None) -> None:
        self.world.helper.page_out_error = error

    @rule(available=st.sampled_from([None, 0, 8 << 30]))
    def memory(self, available: int | None) -> None:
        self.world.memory_is = HostMemory(available_bytes=available)

    @rule(for_s=st.sampled_from([None, 5.0, 1000.0]))
    def keep_awake(self, for_s: float | None) -> None:
        until = None if for_s is None else time.time() + for_s
        self.background(self.world.life.keep_awake(until, "uid:0"))

    @rule()
    def resume(self) -> None:
        self.background(self.world.life.resume("uid:0"))

    @rule(verb=st.sampled_from(["start", "start", "stop", "restart"]))
    def order(self, verb: str) -> None:
        self.background(getattr(self.world.life, verb)("uid:0"))

    @rule(busy=st.booleans())
    def work(self, busy: bool) -> None:
        if busy:
            self.world.gates.busy = "a request is in flight"
        else:
            self.loop.do(self.world.gates.become_quiet)

    @rule()
    def proxy_leaves(self) -> None:
        if self.world.gates.session is not None:
            self.loop.do(self.world.gates.lose)

    @rule()
    def proxy_comes(self) -> None:
        if self.world.gates.session is None:
            self.loop.do(self.world.gates.connect)

    @rule()
    def helper_leaves(self) -> None:
        self.world.helper.wire.lose()
        self.note_truth()

    @rule()
    def helper_comes(self) -> None:
        if not self.world.helper.connected:
            self.world.helper.wire.connected = True
            self.helper_there_since = self.loop.time()
            self.background(self.world.roster.reconcile())

    @rule()
    def helper_thaws_alone(self) -> None:
        self.loop.do(self.world.helper.thaw_alone, "it is leaving")

    @rule(exit_code=st.sampled_from([0, 1, 137]))
    def agent_ends(self, exit_code: int) -> None:
        self.loop.do(self.world.helper.end, exit_code)

    @rule(fails=st.booleans())
    def freezing_fails(self, fails: bool) -> None:
        self.world.helper.fail_freeze = fails

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        self.world.disk_full = full

    @rule()
    def daemon_dies(self) -> None:
        """Ends the daemon: what waited for it is gone with it; the proxy asks the next one again."""
        self.world.crash()
        self.asked.clear()
        self.answers.clear()

    @rule()
    def all_is_well_again(self) -> None:
        """Both links back and a minute of peace: everybody agrees, and nobody is left waiting."""
        self.world.disk_full = self.world.helper.fail_freeze = False
        self.loop.do(self.world.gates.become_quiet)
        self.world.helper.page_out_s, self.world.helper.page_out_error = 0.1, None
        self.pace([0.001])
        self.loop.spend(60)  # whatever was asked at the old pace has landed
        self.proxy_comes()
        self.helper_comes()
        self.loop.spend(60)
        life, world = self.world.life, self.world
        assert len(self.answers) == len(self.asked), life
        assert world.gates.parked == [], life
        expected = {RUNNING: ("running", "open"), PAUSED: ("frozen", "asleep")}.get(life.status, ("gone", "refused"))
        assert (world.helper.state, world.gates.gate) == expected, life
        assert not life.status.endswith("ing") or life.status is RUNNING, life
        assert world.helper.confirmed or life.status is not PAUSED
        assert world.record == life.agent
        self.depth_is_true()

    def depth_is_true(self) -> None:
        """Checks that an agent recorded deep is deep, and that one to become so does where nothing is in its way."""
        life, helper = self.world.life, self.world.helper
        if life.agent.depth_goal is SleepDepth.DEEP and life.status is PAUSED:
            self.world.run(life.go_deep())
            self.loop.spend(0.1)
            assert self.world.record.depth is SleepDepth.DEEP
        if self.world.record.depth is SleepDepth.DEEP:
            assert (helper.state, helper.swap_bytes) == ("frozen", helper.HOLDS), life
        elif life.status is not PAUSED:
            assert self.world.record.depth is SleepDepth.AWAKE, life

    @invariant()
    def nothing_went_wrong(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.world.wrong == []
        assert self.faults == []

    @invariant()
    def nobody_waits_for_long_while_the_helper_is_there(self) -> None:
        if not hasattr(self, "world"):
            return
        self.note_truth()
        for number, asked in self.asked.items():
            since = max(asked, self.helper_there_since)
            assert number in self.answers or self.loop.time() - since <= self.ANSWERED_WITHIN_S, self.world.life

    def there_is_a_way_back(self) -> None:
        """An agent asleep at any depth wakes when a call for it comes."""
        slept = self.world.life.status is PAUSED
        self.loop.do(self.world.gates.request)
        self.loop.spend(1)
        assert not slept or (self.world.life.status, self.world.helper.state) == (RUNNING, "running")

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.all_is_well_again()
            self.nothing_went_wrong()
            self.there_is_a_way_back()
        finally:
            self.loop.kill_tasks()
            self.loop.close()


AnyOrder.TestCase.settings = settings(
    max_examples=examples(200),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = AnyOrder.TestCase
