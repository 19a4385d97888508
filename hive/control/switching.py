"""Switches the inference server, as a job: does what `backends/switch.py` decides, step by step.

It outlives its daemon: each step is in SQLite before it is done, and the next daemon carries on from there. Until then
the proxy keeps the gate closed, so no request meets a server that is half up.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.audit.approval import Approval
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Also, Jobs
from hive.backends import one_token
from hive.backends.backend import BackendControl, open_backend
from hive.backends.kinds import SPECS, spec_of
from hive.backends.switch import (
    Failure,
    Switch,
    SwitchStep,
    Target,
    begun,
    cancelled,
    failed,
    longest_s,
    models_to_probe,
    outcome,
    resumed,
    sentence,
    succeeded,
    waits_for_memory,
)
from hive.conditions import FoundCondition, condition
from hive.control.active_backend import Active
from hive.control.backend_candidates import AccessOf, BackendCandidate, Choices, ServiceCandidates, last_lines
from hive.domain import JobState, ModelInfo
from hive.errors import BackendDown, BackendTimeout, HiveError, LinkLost, NotFound, NotSupported, WrongState
from hive.host.access import NO_ACCESS
from hive.host.gpu_memory import GpuMemory
from hive.link.messages import OpenBackend
from hive.link.proxy_link import ProxyGates
from hive.pooling.deployments import Deployments, RegistryChange
from hive.pooling.pooling import ModelPool
from hive.settings.table import InferenceSection
from hive.store import runtime_settings
from hive.store.jobs import StoredJob
from hive.tasks import spawn
from hive.terminal_text import counted

log = logging.getLogger("hive.daemon")

KIND = "backend.switch"
CHOSEN = "backend.chosen"
"""Runtime setting: the inference server that was switched to last."""
PROXY_WITHIN_S = 10.0
"""A proxy that is restarted is there again within a second; a switch waits for it."""
LOG_LINES = 20
"""Of a server that failed, into the error."""
FREE_LOOK_S = 0.25
TOKEN_MIN_S = 10.0
"""One token may take this long, however little of the time for all looks is left: a model may have to be loaded."""
HELPER_AGAIN_S = 1.0
STARTS_WITHIN_S = 600.0
"""A large model may take so long to be loaded; nothing else moves in its memory meanwhile."""
ROOM_SOON_S = 5.0
"""A service that has waited for memory of the pool for so long is said to wait."""


class ChosenBackend(msgspec.Struct, frozen=True):
    """The choice on record. `run`: its `hive up`, empty for a service: the next `hive up` looks for itself."""

    kind: str
    address: str
    unit: str = ""
    run: str = ""


def is_carried_on(job: StoredJob, run: str) -> bool:
    """Whether a running job is a switch that a daemon of this `run` carries on: the next `hive up` starts afresh."""
    return job.kind == KIND and job.plan.get("run", "") == run


def read_chosen(conn: sqlite3.Connection, run: str) -> Target | None:
    """The server switched to last; None where there was no switch, or none in this `run`."""
    text = runtime_settings.get(conn, CHOSEN)
    if text is None:
        return None
    with suppress(msgspec.MsgspecError):
        chosen = msgspec.json.decode(text, type=ChosenBackend)
        if chosen.run == run and chosen.kind in SPECS:
            return Target(chosen.kind, chosen.address, chosen.unit)
    return None


class Switcher:
    """One switch at a time. `towards`: what is switched to while the gate is closed, in words; else empty."""

    def __init__(
        self,
        *,
        settings: Callable[[], InferenceSection],
        jobs: Jobs,
        audit_log: AuditLog,
        active: Active,
        choices: Choices,
        proxy_link: ProxyGates,
        gpu: GpuMemory,
        pool: ModelPool,
        run: str,
        deployments: Deployments,
        access: AccessOf = lambda: NO_ACCESS,
    ) -> None:
        """`settings`: asked each time, some of them change while Hive runs. `run`: as of `ChosenBackend`."""
        self._settings = settings
        self._jobs = jobs
        self._audit_log = audit_log
        self._active = active
        self._choices = choices
        self._proxy_link = proxy_link
        self._gpu = gpu
        self._pool = pool
        self._room = pool.backends
        self._run = run
        self._deployments = deployments
        self._access = access
        self._job: StoredJob | None = None
        self._switch: Switch | None = None
        self._beginning = False
        self._cancel = asyncio.Event()
        self._cut = 0
        self._note = ""
        self._carrying: asyncio.Task[None] | None = None
        self._starting: Target | None = None
        """The service that this daemon starts, until it is the one in use."""
        self.towards = ""
        self.not_started: FoundCondition | None = None
        """The reason that no inference server was started; None where one was, or where that is not Hive's."""

    def __repr__(self) -> str:
        return f"<Switcher {self._switch.step if self._switch is not None else 'idle'}>"

    @property
    def wait_s(self) -> float:
        """Longest wait of a request for one way of a switch."""
        return longest_s(self._settings()) + (self._room_s if self._room.is_on else 0.0)

    @property
    def _room_s(self) -> float:
        """Longest wait until models of the pool have left: all drain at once, then they end one after the other."""
        rules = self._pool.rules
        each_s = self._pool.steps.grace_s + rules.free_s
        return rules.drain_s + rules.cut_s + each_s * max(1, len(self._pool.loaded))

    @property
    def job(self) -> StoredJob | None:
        """The one under way."""
        return self._job

    def adopt(self, job: StoredJob) -> None:
        """A switch that an earlier daemon left; the gate stays closed from the first word to the proxy on."""
        self._job = job
        self._switch = resumed(msgspec.convert(job.plan, Switch))
        # A server that runs is looked at before the gate is closed; after the last step only the job is to be ended.
        if not self._switch.ended and self._switch.step is not SwitchStep.HEALTH:
            self.towards = str(self._switch.new)
        if self._switch.pooled:
            self._room.hold()

    async def begin(self, asked: str, actor: str, *, approval: Approval) -> StoredJob:
        """The job, running; or done already, where that is the one in use and it answers.

        Raises WrongState where one is under way, NotSupported, UsageError, DependencyDown, and as `Approval.burn`.
        """
        approval.check("backend-switch")
        if not self._active.enabled:
            raise NotSupported("this Hive has no inference server: [inference] enabled = false")
        if self._beginning or self._switch is not None:
            towards = f" to {self._switch.new}" if self._switch is not None else ""
            raise WrongState(f"a switch{towards} is under way", hint="`hive backend status` shows how far it is")
        if self._active.closed_for:
            raise WrongState(
                "a flush has its requests wait", hint="`hive backend status` shows it; it can be cancelled"
            )
        self._beginning = True
        try:
            return await self._begin(asked, actor, approval)
        finally:
            self._beginning = False

    async def _begin(self, asked: str, actor: str, approval: Approval) -> StoredJob:
        active, jobs, also = self._active, self._jobs, approval.burn
        old, up = active.target or self._starting, active.up
        in_use = old is not None and up and asked in (old.kind, old.address)
        new = old if in_use and old is not None else await self._choices.find(asked)
        switch = begun(new, old, old_answered=up, pooled=self._room.is_on, loaded=self._pool.loaded)
        if new == old and up:
            job = await jobs.begin(
                KIND, plan=self._plan(switch), progress=f"{new} is in use already", actor=actor, also=also
            )
            return await jobs.end(job, JobState.DONE, result=self._result(job, new, old, changed=False))
        eta_s = await jobs.usual_s(KIND, lambda job: job.plan.get("new", {}).get("kind") == new.kind)
        job = await jobs.begin(
            KIND, plan=self._plan(switch), progress=sentence(switch), actor=actor, eta_s=eta_s, also=also
        )
        self._job, self._switch, self._cut, self._note = job, switch, 0, ""
        self._carrying = spawn(self._carry(), name="switch")
        return job

    async def cancel(self, job_id: str) -> StoredJob:
        """The job, once it is back. Raises NotFound, WrongState where it is too late."""
        job, switch = self._job, self._switch
        if job is None or switch is None or job.id != job_id:
            found = await self._jobs.get(job_id)
            raise WrongState(f"job {found.id} is {found.state}")
        if not switch.can_be_cancelled:
            raise WrongState(f"job {job_id} cannot be cancelled any more: {sentence(switch)}")
        self._cancel.set()
        return await self._jobs.get(job_id, wait_s=self.wait_s)

    async def listed(self) -> list[BackendCandidate]:
        return await self._choices.listed(self._active.target)

    async def log(self, asked: str, lines: int) -> str:
        """The log of the server of this kind; empty `asked`: the one in use. Raises NotFound, NotSupported, …"""
        if not asked:
            target = self._active.target
            if target is None:
                raise NotFound("no inference server is in use", hint="hive backend list")
            return await self._choices.log(target.kind, lines)
        if asked not in SPECS:
            raise NotFound(f"there is no inference server {asked[:40]!r}", hint=f"there are {', '.join(SPECS)}")
        return await self._choices.log(asked, lines)

    # at the daemon's start and end --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carries on what was left; else sees that the chosen service runs. Returns when that is so, or cannot be."""
        try:
            if self._switch is not None:
                await self._carry()
            elif isinstance(self._choices, ServiceCandidates) and self._active.enabled:
                await self._start_chosen(self._choices)
        finally:
            self._starting = None
            self._active.chosen.set()

    async def _start_chosen(self, services: ServiceCandidates) -> None:
        while True:
            target = self._active.target
            try:
                if target is None and self._settings().backend_url:
                    return  # it is looked at until something answers there
                target = target or await services.first(self._settings())
                if target is None:
                    self.not_started = condition("no_backend_installed")
                    return
                if target.unit:
                    self._starting = target
                    await self._given_room(target)
                    if self._switch is not None:  # ordered meanwhile: that has ended this one
                        return
                    await services.start(target)
            except LinkLost:
                if self._switch is not None:
                    return
                await asyncio.sleep(HELPER_AGAIN_S)
                continue
            except HiveError as error:
                if self._switch is not None:
                    return
                if target is not None:
                    self._room.gone(target.kind)
                self.not_started = condition("backend_not_started", why=error.message)
                log.error("backend_not_started error=%s", error.message)
                self._audit_log.note("backend.not_started", detail={"reason": error.message})
                return
            if self._active.target is None and self._switch is None:
                await self._active.follow(target)
            if self._room.is_on and target.unit:
                await self._until_it_serves(services, target)
            return

    async def _given_room(self, target: Target) -> None:
        """Returns when the service may start beside the models of the pool: it is booked first. Raises WrongState."""
        if not self._room.is_on or await self._room.took_over(target.kind):
            return
        await self._room.want(target.kind)
        try:
            await self._room.granted(target.kind, within_s=ROOM_SOON_S)
        except BackendTimeout:
            self.not_started = condition("backend_not_started", why="its memory is not free yet: hive pool")
            await self._room.granted(target.kind, within_s=None)
            self.not_started = None

    async def _until_it_serves(self, services: ServiceCandidates, target: Target) -> None:
        """Has the service charged what it takes once it answers, and nothing any more where it never will. One that
        does not answer for long holds up no model any more, and is charged what it is seen to take."""
        until = time.monotonic() + STARTS_WITHIN_S
        while not self._active.up and self._switch is None and time.monotonic() < until:
            if await services.why_dead(target):
                self._room.gone(target.kind)
                return
            await asyncio.sleep(self._settings().switch_health_every_s)
        if self._switch is None:
            self._room.serves(target.kind)

    def close(self) -> None:
        """The next daemon carries on."""
        if self._carrying is not None:
            self._carrying.cancel()

    # the switch ---------------------------------------------------------------------------------------------------

    async def _carry(self) -> None:
        async with self._active.gate:
            await self._carry_on()

    async def _carry_on(self) -> None:
        job, switch = self._job, self._switch
        assert job is not None
        assert switch is not None
        log.info("switch_begun job=%s to=%s from=%s resumed=%d", job.id, switch.new, switch.old, switch.resumed)
        if switch.pooled:
            with suppress(TimeoutError):
                async with asyncio.timeout(PROXY_WITHIN_S):
                    await self._book(switch)
        job = await self._write(job, switch)
        while not switch.ended:
            failure = await self._outcome(switch)
            after = succeeded(switch) if failure is None else failed(switch, failure)
            if self._cancel.is_set() and switch.can_be_cancelled:
                after = cancelled(switch, Failure("cancelled", "it was cancelled"))
            record = switch.step is SwitchStep.RECORD and failure is None
            try:
                job = await self._jobs.move(
                    job,
                    plan=self._plan(after),
                    progress=sentence(after),
                    also=self._choice(switch, job) if record else None,
                )
            except HiveError as error:
                log.error("switch_not_written job=%s step=%s error=%s", job.id, after.step, error.message)
                if not switch.back and switch.step is not SwitchStep.OPEN:
                    after = failed(switch, _failure(error))
            log.info("switch_step job=%s was=%s now=%s back=%s", job.id, switch.step, after.step, after.back)
            self._job, self._switch, switch = job, after, after
        self._job = self._switch = None
        self._cancel.clear()
        await self._end(job, switch)

    async def _book(self, switch: Switch) -> None:
        """Books the services that run, which an earlier daemon may have started."""
        await self._pool.known()
        for target in (switch.old, switch.new):
            if target is not None and target.unit:
                await self._room.took_over(target.kind)

    async def _end_room(self, switch: Switch) -> None:
        """Nothing keeps the pool from moving any more; on the way back its models are loaded as they were."""
        old = switch.old
        if switch.back and not switch.touched:
            self._room.gone(switch.new.kind)
        if switch.then is not None and old is not None and old.unit:
            dead = await outcome_of(self._choices.why_dead(old))
            if dead:  # it holds no memory; one that lives stays in the books
                self._room.gone(old.kind)
            self._room.serves(old.kind)
        self._room.end_order()
        if switch.back:
            self._pool.load_again(switch.loaded)

    async def _end(self, job: StoredJob, switch: Switch) -> None:
        if switch.pooled:
            await self._end_room(switch)
        error = outcome(switch)
        if error is None:
            self.not_started = None
            result = self._result(job, switch.new, switch.old, changed=True)
            self._audit_log.note("backend.switched", actor=job.actor, detail={**result, "name": str(switch.new)})
            change = await self._registered(switch.new, job)
            ended = await outcome_of(self._jobs.end(job, JobState.DONE, result=result, also=change.write))
            if not isinstance(ended, HiveError):
                self._deployments.took(change)
        else:
            log.error("switch_failed job=%s to=%s error=%s", job.id, switch.new, error.message)
            state = JobState.CANCELLED if switch.why is not None and switch.why.code == "cancelled" else JobState.FAILED
            ended = await outcome_of(self._jobs.end(job, state, error=msgspec.to_builtins(error)))
        if isinstance(ended, HiveError):
            log.error("switch_not_written job=%s error=%s", job.id, ended.message)  # the next daemon ends it

    def _result(self, job: StoredJob, new: Target, old: Target | None, *, changed: bool) -> dict[str, Any]:
        info, _ = self._active.seen
        return {
            "backend": new.kind,
            "address": new.address,
            "version": "" if info is None else info.version,
            "from": None if old is None else old.kind,
            "changed": changed,
            "cut": self._cut,
            "note": self._note,
            "took_s": round(time.time() - job.created_at, 3),
        }

    async def _registered(self, new: Target, job: StoredJob) -> RegistryChange:
        """The models that the new server has in its memory from its start on: of a kind that is started with some."""
        key = spec_of(new.kind).model_key
        if key and not self._active.seen[1]:
            await self._active.refresh()  # a daemon that ends the switch of an earlier one may not have looked yet
        _, models = self._active.seen
        loaded = await self._active.loaded() if key else frozenset()
        path = str(getattr(self._settings(), key)) if key and new.unit else ""
        own = [model for model in models if loaded is None or model.name in loaded]  # None: it did not say
        return self._deployments.switched(new.kind, own, actor=job.actor, path=path)

    async def _write(self, job: StoredJob, switch: Switch) -> StoredJob:
        """Writes the step down before it begins, for a resumption; a full disk does not keep a switch from ending."""
        written = await outcome_of(self._jobs.move(job, plan=self._plan(switch), progress=sentence(switch)))
        return job if isinstance(written, HiveError) else written

    def _plan(self, switch: Switch) -> dict[str, Any]:
        return {**msgspec.to_builtins(switch), "run": self._run}

    def _choice(self, switch: Switch, job: StoredJob) -> Also:
        new = switch.new
        text = msgspec.json.encode(ChosenBackend(new.kind, new.address, new.unit, self._run)).decode()
        return lambda conn: runtime_settings.put(conn, CHOSEN, text, actor=job.actor, now=time.time())

    async def _outcome(self, switch: Switch) -> Failure | None:
        """Does the step; None where it succeeded. A cancellation ends it."""
        doing = spawn(self._attempt(switch), name=f"switch {switch.step}")
        asked = spawn(self._cancel.wait(), name="switch cancelled")
        try:
            waited_for = [doing, asked] if switch.can_be_cancelled else [doing]
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            doing.cancel()
            asked.cancel()

    async def _attempt(self, switch: Switch) -> Failure | None:
        try:
            await self._do(switch)
        except HiveError as error:
            comes = switch.comes
            wrote = comes is not None and bool(comes.unit) and switch.step in (SwitchStep.START, SwitchStep.HEALTH)
            lines = await last_lines(self._choices, comes, LOG_LINES) if wrote and comes is not None else []
            return _failure(error, lines)
        except Exception as error:
            log.exception("switch_step_failed step=%s", switch.step)
            return _failure(HiveError(f"a fault in Hive itself: {type(error).__name__}: {error}"))
        return None

    # its steps ----------------------------------------------------------------------------------------------------

    async def _do(self, switch: Switch) -> None:
        goes, comes = switch.goes, switch.comes
        match switch.step:
            case SwitchStep.CLOSE:
                await self._close_gate(switch)
            case SwitchStep.STOP if goes is not None:
                if switch.back:  # requests that wait, wait for the way back as well
                    await outcome_of(self._ask_to_close(switch, drain_s=0))
                await self._choices.stop(goes)
            case SwitchStep.FREE if goes is not None and switch.pooled:
                if (stopped := self._room.stopped(goes.kind)) is not None:
                    await self._pool.steps.until_back(stopped)
                self._room.gone(goes.kind)
            case SwitchStep.FREE:
                await self._until_memory_is_free()
            case SwitchStep.ROOM if comes is not None:
                await self._room.clear_for(comes.kind, others_leave=not switch.back)
                await self._room.granted(comes.kind, within_s=self._room_s)
            case SwitchStep.START if comes is not None:
                await self._choices.start(comes)
            case SwitchStep.HEALTH if comes is not None:
                await self._until_healthy(comes)
                self._room.serves(comes.kind)
            case SwitchStep.OPEN:
                await self._open_gate(comes)

    async def _close_gate(self, switch: Switch) -> None:
        self.towards = str(switch.new)
        self._active.hold()
        if switch.pooled and switch.comes is not None and switch.comes.unit:
            await self._room.clear_for(switch.comes.kind, others_leave=not switch.back)
        until = asyncio.get_running_loop().time() + PROXY_WITHIN_S
        while True:
            try:
                self._cut += await self._ask_to_close(switch, drain_s=self._settings().switch_drain_s)
                return
            except LinkLost:
                left_s = until - asyncio.get_running_loop().time()
                if left_s <= 0:
                    raise
            await outcome_of(self._proxy_link.ports(left_s))

    async def _ask_to_close(self, switch: Switch, *, drain_s: float) -> int:
        return await self._proxy_link.close_backend(str(switch.new), drain_s=drain_s, wait_s=self.wait_s)

    async def _open_gate(self, target: Target | None) -> None:
        """The daemon's own table first: a proxy that comes just now learns from it."""
        await self._active.follow(target)
        self.towards = ""
        info, models = self._active.seen
        self._proxy_link.say(OpenBackend(backend=info, models=models))

    async def _until_memory_is_free(self) -> None:
        gpu, begun_at = self._gpu, time.monotonic()
        limit_s = self._settings().switch_free_s
        while True:
            waited_s = time.monotonic() - begun_at
            is_free = await gpu.is_free()
            if not waits_for_memory(has_gpu=gpu.has_gpu, is_free=is_free, waited_s=waited_s, limit_s=limit_s):
                return
            await asyncio.sleep(FREE_LOOK_S)

    async def _until_healthy(self, target: Target) -> None:
        """Raises BackendDown where it is no use to wait, BackendTimeout where it was looked at often enough."""
        settings, backend = self._settings(), self._open(target)
        tries, every_s = settings.switch_health_tries, settings.switch_health_every_s
        until = time.monotonic() + tries * every_s
        said = ""
        for number in range(1, tries + 1):
            said = await self._why_not_healthy(backend, until)
            if not said:
                return
            if why := await self._choices.why_dead(target):
                raise BackendDown(why)
            await self._say(f"{target}: {said}; look {number} of {tries}")
            await asyncio.sleep(every_s)
        raise BackendTimeout(f"{said}, looked at {counted(tries, 'time')}, every {every_s:g} s")

    def _open(self, target: Target) -> BackendControl:
        is_local = not spec_of(target.kind).is_remote and "://" not in target.address
        return open_backend(target.kind, target.address, NO_ACCESS if is_local else self._access())

    async def _say(self, progress: str) -> None:
        """Notes the progress of the step."""
        if self._job is not None and self._switch is not None:
            moved = await outcome_of(self._jobs.tell(self._job, progress))
            if not isinstance(moved, HiveError):
                self._job = moved

    async def _why_not_healthy(self, backend: BackendControl, until: float) -> str:
        """Empty where it is. Raises BackendDown where it has no model."""
        if not await backend.health():
            return "it does not answer"
        try:
            models: list[ModelInfo] = await backend.models()
        except (BackendDown, BackendTimeout) as error:
            return error.message
        if not models:
            raise BackendDown("it offers no model", hint="give it one first")
        said, probed = "", models_to_probe(models, self._settings().default_model, backend.kind)
        if not probed and spec_of(backend.kind).why_far is not None:
            self._note = "none of its models runs on this box, so none was asked for a token"
            log.warning("switch_asked_no_token address=%s models=%d", backend.address, len(models))
        for model in probed:
            try:
                within_s = max(TOKEN_MIN_S, until - time.monotonic())
                asks = (backend.kind, backend.address, model)
                limit = self._settings().backend_limit_name
                await one_token.generate(*asks, within_s=within_s, access=backend.access, limit=limit)
            except (BackendDown, BackendTimeout) as error:
                said = f"{error.message}; {error.hint}" if error.hint else error.message
            else:
                return ""
        return said


def _failure(error: HiveError, lines: list[str] | None = None) -> Failure:
    return Failure(error.code, error.message, error.hint, lines or [])
