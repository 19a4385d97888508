"""The models behind Hive: what is there, and bringing and removing some, as jobs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.audit.approval import Approval
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Also, AlsoOfJob, Jobs, both, job_error
from hive.backends import model_files, pulling
from hive.backends.kinds import spec_of, specs, whereabouts
from hive.backends.models_dir import ModelsDir, name_for
from hive.control.active_backend import Active
from hive.control.effects import DaemonEffects
from hive.control.pull_order import PullOrder
from hive.control.swap_at_server import leaves_at, swap_at
from hive.domain import ALIVE, Caller, CallerKind, DeploymentState, JobState, ModelInfo, Tier
from hive.errors import (
    BadRequest,
    Cancelled,
    DependencyDown,
    HiveError,
    ModelBusy,
    ModelNotFound,
    NotFound,
    NotSupported,
    WrongState,
)
from hive.models.adapter_names import is_engine_name
from hive.models.catalog import Catalog
from hive.models.routing import Explained, models_of, preferences_of
from hive.policy import Act, may
from hive.pooling.deployments import AT_SERVER, NOTHING_RECORDED, Deployments, RegistryChange, id_at_server
from hive.settings.table import TenantRow
from hive.shapes.models import ListedModel, ModelList, ModelUser, ModelView
from hive.shapes.system import Route, kind_of
from hive.store.deployments import StoredDeployment
from hive.store.jobs import StoredJob
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

PULL, REMOVE, LOAD, UNLOAD = "model.pull", "model.remove", "model.load", "model.unload"
ACTS = {PULL: "model.pulled", REMOVE: "model.removed", LOAD: "model.loaded", UNLOAD: "model.unloaded"}
"""Kind of a job → the act it ends with."""
TOLD_EVERY_S = 0.5
"""Interval of writing down a job's progress."""
CANCELLED_WITHIN_S = 30.0
SEEN_AGAIN_S = 2.0
"""Least time between two questions for the server's models, for any number of requests naming unknown models."""

ANSWERS_WITHIN_S = 60.0
"""Longest wait for the inference server in use, for what an earlier daemon left."""
EVICTS = "evicts"
"""In the plan of a load: the model that leaves for it."""

Work = Callable[[], Coroutine[Any, Any, dict[str, Any]]]


class _Going:
    """A job that runs: its progress, and the way to end it. `says`, `completed` and `total` are set by its work,
    `asked` once it shall end."""

    def __init__(self, job: StoredJob) -> None:
        self.job = job
        self.says, self.completed, self.total = job.progress, 0, 0
        self.asked = threading.Event()
        self.task: asyncio.Task[None] | None = None
        self.registered: Callable[[str], RegistryChange] = lambda error: NOTHING_RECORDED  # noqa: ARG005
        """The change of the registry that goes with its end, by its error, empty where it was done."""
        self.stops: Callable[[], object] = lambda: None

    def came(self, completed: int) -> None:
        """Called by the thread that copies."""
        if self.asked.is_set():
            raise Cancelled("it was cancelled")
        self.completed = completed

    def step(self, step: pulling.PullProgress) -> None:
        self.says, self.completed, self.total = step.says, step.completed, step.total

    def cancel(self) -> None:
        self.asked.set()
        self.stops()

    @property
    def plan(self) -> dict[str, Any]:
        counted = {"completed_bytes": self.completed, "total_bytes": self.total} if self.total else {}
        return {**self.job.plan, **counted}


class Models:
    """One for the daemon. Every method raises a HiveError that says what is wrong."""

    def __init__(
        self,
        *,
        effects: DaemonEffects,
        active: Active,
        jobs: Jobs,
        audit_log: AuditLog,
        roster: Roster,
        directory: ModelsDir,
        pooled: Callable[[], dict[str, tuple[ModelInfo, bool]]],
        deployments: Deployments,
    ) -> None:
        """`directory`: for pulled files. `pooled`: the models of the pool by name, and whether each is loaded."""
        self._effects = effects
        self._active = active
        self._jobs = jobs
        self._audit_log = audit_log
        self._roster = roster
        self._directory = directory
        self._pooled = pooled
        self._deployments = deployments
        self._going: dict[str, _Going] = {}
        self._is_leaving = False

    def __repr__(self) -> str:
        return f"<Models {len(self._going)} jobs>"

    async def tidy(self) -> None:
        """At the daemon's start: takes away what a job left that ended with its daemon."""
        await asyncio.to_thread(self._directory.tidy)

    # what is there ------------------------------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        effects = self._effects
        where = whereabouts(None if effects.backend is None else effects.backend.kind, effects.models)
        offered = {model.name for model in effects.models}
        pooled = [model for name, (model, _) in self._pooled().items() if name not in offered]
        there = [model for model in effects.models if not (model.parent and is_engine_name(model.name))]
        return Catalog([*there, *pooled], preferences_of(effects.settings.inference), where)

    async def listed(self) -> ModelList:
        """The list by the server's last answer; it is asked now for the models in memory."""
        effects, catalog = self._effects, self.catalog
        in_memory, files = await asyncio.gather(self._active.loaded(), asyncio.to_thread(self._directory.listed))
        return {
            "backend": kind_of(effects.backend),
            "label": "" if effects.backend is None else effects.backend.label,
            "up": self._active.up,
            "seen_at": self._active.models_seen_at,
            "stale": self._stale(),
            "routing": effects.settings.inference.quantization_routing,
            "aliases": catalog.targets(),
            "directory": str(self._directory.root),
            "files": files,
            "models": [_listed(catalog, model, self._is_loaded(model, in_memory)) for model in catalog.models],
        }

    async def view(self, asked: str) -> ModelView:
        """Raises NotFound with the nearest name."""
        catalog, effects = self.catalog, self._effects
        model = catalog.find(asked)
        in_memory, file = await asyncio.gather(self._active.loaded(), self.file_of(model.name))
        return {
            **_listed(catalog, model, self._is_loaded(model, in_memory)),
            "backend": kind_of(effects.backend),
            "up": self._active.up,
            "seen_at": self._active.models_seen_at,
            "stale": self._stale(),
            "base": catalog.base(model.name),
            "variants": catalog.variants(model.name),
            "adapters": catalog.adapters(model.name),
            "agents": self._users(catalog, model.name),
            "file": "" if file is None else str(file),
        }

    def _is_loaded(self, model: ModelInfo, in_memory: frozenset[str] | None) -> bool | None:
        """The place of a model: True in memory, of the pool or of the server in use; None where that does not tell."""
        pooled = self._pooled().get(model.name)
        if pooled is not None and model not in self._effects.models:
            return pooled[1]
        return None if in_memory is None else model.name in in_memory

    async def refresh(self) -> ModelList:
        """Asks now. Raises DependencyDown where it does not answer, WrongState in the middle of a switch."""
        effects, active = self._effects, self._active
        if not await active.refresh():
            if active.up:
                raise WrongState("the inference server is being switched", hint="`hive backend status` shows how far")
            label = "no inference server is in use" if effects.backend is None else f"{effects.backend.label} is silent"
            raise DependencyDown(label, hint=self._stale() or "`hive backend status` says more")
        return await self.listed()

    async def look_again(self) -> None:
        """Looks again for a request naming a model that is not known. Never raises."""
        await self._active.refresh(at_most_every_s=SEEN_AGAIN_S)

    def _stale(self) -> str:
        effects, active = self._effects, self._active
        if effects.backend is None:
            return "" if self._pooled() else "no inference server is in use"
        if active.models_seen_at is None:
            return f"{effects.backend.label} has not answered yet"
        return "" if active.up else f"{effects.backend.label} does not answer: this is what it offered last"

    async def file_of(self, name: str) -> Path | None:
        """The file or directory of this name in Hive's directory, None for none."""
        return await asyncio.to_thread(self._directory.holds, name)

    def _users(self, catalog: Catalog, name: str, *, by_name: bool = False) -> list[ModelUser]:
        """Agents that use the model; `by_name`: of their own choice, not because it is the default one."""
        settings, found = self._effects.settings, list[ModelUser]()
        default = "" if by_name else settings.inference.default_model
        for life in sorted(self._roster, key=lambda life: life.agent.name):
            spec = life.agent.spec
            asks = spec.model or default
            limits = settings.tenants.get(spec.tenant, TenantRow()).models
            if asks and catalog.given(asks, spec.tier, limits).model == name:
                found.append(
                    {
                        "id": life.agent.id,
                        "name": spec.name,
                        "status": life.status,
                        "tier": spec.tier,
                        "tenant": spec.tenant,
                        "asks": asks,
                    }
                )
        return found

    def route(self, model: str, tier: Tier, tenant: str = "") -> Route:
        """The model that an agent of this tier is given; with a tenant, within its limits.

        A tenant that has no section has no limits, as at the proxy.
        """
        limits = self._effects.settings.tenants.get(tenant, TenantRow()).models
        found = self.catalog.given(model, tier, limits)
        caller = Caller(CallerKind.AGENT, "", tenant, tier, models_of(limits))
        if (reason := may(caller, Act.USE, model)) is not None:  # the proxy asks that first
            found = Explained("", reason, (*found.steps[:1], reason), f"it may use {limits}: [tenant {tenant}] models")
        return {
            "asked": model,
            "tier": tier,
            "model": found.model,
            "why": found.why,
            "hint": found.hint,
            "steps": list(found.steps),
        }

    # what comes ---------------------------------------------------------------------------------------------------

    async def pull(self, order: PullOrder, actor: str) -> StoredJob:
        """A job: files at a path are copied into Hive's directory, a name is Ollama's to fetch.

        Raises NotFound, NotPermitted and BadRequest for a path where no whole model is, NotSupported where nobody
        fetches by name, WrongState where something of that name is there or comes already.
        """
        if order.model.startswith("/"):
            return await self._place(order, actor)
        backend = self._effects.backend
        if order.name or order.link or order.force:
            raise BadRequest(
                "a name, a link and force are about files of this box", hint="hive model pull /path/to/model"
            )
        if backend is None or not spec_of(backend.kind).fetches:
            which = "without an inference server" if backend is None else f"while {backend.kind} is in use"
            raise NotSupported(
                f"nothing fetches {order.model[:80]!r} {which}: Hive downloads nothing itself",
                hint="bring its files to this box, then: hive model pull /path/to/MODEL.gguf, or a directory with "
                "config.json and *.safetensors",
            )
        if not order.model.strip() or not order.model.isprintable():
            raise BadRequest("that is no model's name")
        for under_way in self._going.values():
            if under_way.job.kind == PULL and under_way.job.plan["model"] == order.model and under_way.task is not None:
                return under_way.job  # the same order gets the same job
        going = await self._begin(PULL, order.model, f"Ollama pulls {order.model}", actor)

        async def work() -> dict[str, Any]:
            await pulling.pull(backend.address, order.model, going.step)
            return {"model": order.model, "file": "", "size_bytes": going.total or None, "next": ""}

        return self._carry(going, work, in_thread=False)

    async def _place(self, order: PullOrder, actor: str) -> StoredJob:
        path, directory = Path(order.model), self._directory
        found = await asyncio.to_thread(model_files.find, path)
        name = name_for(found, order.name, path)
        await asyncio.to_thread(directory.check_free, name, force=order.force)
        doing = "linking" if order.link else "copying"
        going = await self._begin(PULL, name, f"{doing} {path} to {directory.root / name}", actor)
        going.total = found.size_bytes

        def put() -> Path:
            return directory.place(found, name, link=order.link, force=order.force, progress=going.came)

        async def work() -> dict[str, Any]:
            at = await asyncio.to_thread(put)
            return {
                "model": name.removesuffix(model_files.GGUF),
                "file": str(at),
                "size_bytes": found.size_bytes,
                "left_out": list(found.left_out),
                "next": self._next(found.format, at),
            }

        return self._carry(going, work, in_thread=True)

    def _next(self, format: model_files.Format, at: Path) -> str:
        """The steps left before it answers, a sentence; empty where none is, as far as can be told."""
        backend = self._effects.backend
        spec = next(spec for spec in specs() if spec.model_format == format)
        if not (key := spec.model_key):  # a runner's, which is a model of the pool and no service
            return f"describe it in hive.conf: [model NAME], backend = {spec.kind}, file = {at}; or [pool] found = true"
        if backend is not None and backend.kind == spec.kind and spec.asking.look_for_files_at:
            return (
                f"a {spec.label} whose models are in {at.parent}/ has it now; else set inference.{key} = {at.parent}/"
            )
        return f"set inference.{key} = {at} in hive.conf, then: hive backend switch {spec.kind}"

    # what goes ----------------------------------------------------------------------------------------------------

    async def remove(self, name: str, *, force: bool, actor: str) -> StoredJob:
        """A job: the model's files in Hive's directory, or Ollama's own model.

        Raises WrongState where it is in use (unless `force`), NotFound where Hive cannot remove it.
        """
        backend, file = self._effects.backend, await self.file_of(name)
        is_ollamas = backend is not None and spec_of(backend.kind).fetches and self._known(name) is not None
        if file is None and not is_ollamas:
            raise self._not_removable(name)
        if not force:
            await self._check_unused(name, None if is_ollamas else file)
        going = await self._begin(REMOVE, name, f"removing {name}", actor)

        async def work() -> dict[str, Any]:
            if is_ollamas and backend is not None:
                await pulling.delete(backend.address, name)
                return {"model": name, "file": "", "freed_bytes": None}
            assert file is not None
            freed = await asyncio.to_thread(self._directory.remove, file)
            return {"model": name, "file": str(file), "freed_bytes": freed}

        return self._carry(going, work, in_thread=True)

    def _known(self, name: str) -> ModelInfo | None:
        try:
            return self.catalog.find(name)
        except NotFound:
            return None

    def _not_removable(self, name: str) -> HiveError:
        root = self._directory.root
        if (known := self._known(name)) is not None and known.name != name:
            return NotFound(f"{name[:80]!r} is another name of {known.name}", hint=f"hive model remove {known.name}")
        if known is not None:
            return NotFound(
                f"{name[:80]!r} does not lie in {root}, and only what does is Hive's to remove",
                hint="whoever put it where the inference server has it from removes it there",
            )
        return ModelNotFound(f"there is no model {name[:80]!r}", hint=f"hive model list; files are in {root}")

    async def _check_unused(self, name: str, file: Path | None) -> None:
        """Raises WrongState where it is in memory, or a living agent or hive.conf names it."""
        known = self._known(name)
        names = {name, name.removesuffix(model_files.GGUF), "" if known is None else known.name}
        hint = "--force removes it all the same: requests for it fail then"
        if names & (await self._active.loaded() or frozenset()):
            raise WrongState(f"{name} is in the inference server's memory", hint=hint)
        inference = self._effects.settings.inference
        for key in ("llama_model", "vllm_model", "vllm_speculative_model", "llama_speculative_model"):
            if file is not None and getattr(inference, key) == str(file):
                raise WrongState(f"hive.conf names {file}: inference.{key}", hint=hint)
        users = [] if known is None else self._users(self.catalog, known.name, by_name=True)
        alive = [user["name"] for user in users if user["status"] in ALIVE]
        if alive:
            raise WrongState(f"{name} is the model of {', '.join(alive[:5])}", hint=hint)

    # what is in memory --------------------------------------------------------------------------------------------

    async def load(
        self, name: str, actor: str, *, approval: Approval, evict: str = "", of_job: AlsoOfJob | None = None
    ) -> StoredJob:
        """A job: the inference server in use takes the model into memory, as it would for a request. `evict`: the model
        that leaves first, and comes back where the load fails. `of_job` is written with the job.

        Raises NotFound, NotSupported where it does not load on request, DependencyDown, WrongState, and as
        `Approval.burn`; then nothing has moved.
        """
        approval.check("model-load")
        if evict:
            approval.check_eviction()
        return await self._order(LOAD, name, actor, approval, evict, of_job)

    async def unload(self, name: str, actor: str, *, approval: Approval) -> StoredJob:
        """A job: it gives the model's memory back, once its requests have ended. Raises as `load`."""
        approval.check("model-unload")
        row = self._deployments.lost(name)
        if row is not None and self._known(name) is None:
            return await self._forgotten(row, actor, approval)
        return await self._order(UNLOAD, name, actor, approval)

    async def _forgotten(self, row: StoredDeployment, actor: str, approval: Approval) -> StoredJob:
        """The server that it was deployed at is in use no more: nothing but its row goes."""
        change, plan = self._deployments.ended(row.id, row.at, actor), {"model": row.name}
        doing = f"{row.backend} is in use no more"
        also = both(approval.burn, change.write)
        job = await self._jobs.begin(UNLOAD, plan=plan, progress=doing, actor=actor, also=also)
        self._deployments.took(change)
        return await self._jobs.end(job, JobState.DONE, result={**plan, "file": "", "changed": False})

    async def _order(
        self,
        kind: str,
        name: str,
        actor: str,
        approval: Approval,
        evict: str = "",
        of_job: AlsoOfJob | None = None,
    ) -> StoredJob:
        server = self._active.control
        if server is None or not self._active.up:
            raise DependencyDown(
                f"nothing loads {name[:80]!r}: no inference server answers", hint="hive backend status"
            )
        found = self.catalog.find(name)
        model, registry = found.name, self._deployments
        asking = spec_of(server.kind).asking
        if (asking.load if kind == LOAD else asking.unload) is None:
            raise NotSupported(
                f"{model} is not {ACTS[kind].partition('.')[2]} on request: {asking.why_not_load}",
                hint="a model of [model NAME] in hive.conf is",
            )
        loaded = await self._active.loaded()
        is_so = loaded is not None and (model in loaded) is (kind == LOAD)
        doing = f"{'loading' if kind == LOAD else 'unloading'} {model}"
        leaving = ""
        if evict and not is_so:
            leaving = leaves_at(server, self.catalog.find(evict).name, model, loaded)
        id = id_at_server(model, server.kind)
        if kind == LOAD:
            state = DeploymentState.LOADED if is_so else DeploymentState.LOADING
            change = registry.at_server(found, server.kind, actor=actor, signature=approval.by, state=state)
        else:
            change = registry.unloading(id, actor)
        for row in change.puts or change.moves:
            registered = partial(registry.came, id, row.at, actor, is_load=kind == LOAD)
        if leaving:
            change = change._replace(moves=registry.evicted(id_at_server(leaving, server.kind)).moves)
        going = await self._begin(
            kind, model, doing, actor, both(approval.burn, change.write), leaving=leaving, of_job=of_job
        )
        registry.took(change)
        if change.puts or change.moves:
            going.registered = registered

        async def work() -> dict[str, Any]:
            if leaving:
                await swap_at(server, leaving, model)
            elif not is_so:
                await (server.load(model) if kind == LOAD else server.unload(model))
            return {"model": model, "file": "", "changed": not is_so}

        return self._carry(going, work, in_thread=False)

    # what an earlier daemon began -----------------------------------------------------------------------------------

    async def forsaken(self, name: str, why: str) -> None:
        """Notes that an earlier daemon's load failed, so that it is not begun anew. Raises as `Database.write`."""
        for row in self._deployments.rows():
            if AT_SERVER in row.id and row.name == name and row.state is DeploymentState.LOADING:
                await self._deployments.write(self._deployments.reached(row.id, row.at, DeploymentState.FAILED, why))

    async def is_in_memory(self, name: str) -> bool:
        """Whether the server in use has it, once that answers; False where it does not within a minute."""
        await self._answers()
        return name in (await self._active.loaded() or frozenset())

    async def load_again(self, name: str) -> str:
        """Loads a model that left for another one; the rest of a sentence where that fails, else empty."""
        await self._answers()
        server = self._active.control
        if server is None:
            return f", and no inference server is there to load {name} again"
        back = await outcome_of(server.load(name))
        return f", and {name} is not loaded again: {back.message}" if isinstance(back, HiveError) else ""

    async def _answers(self) -> None:
        for _ in range(round(ANSWERS_WITHIN_S / TOLD_EVERY_S)):
            if self._active.control is None or self._active.up:
                return
            await asyncio.sleep(TOLD_EVERY_S)

    # the jobs -----------------------------------------------------------------------------------------------------

    async def _begin(
        self,
        kind: str,
        model: str,
        progress: str,
        actor: str,
        also: Also | None = None,
        *,
        leaving: str = "",
        of_job: AlsoOfJob | None = None,
    ) -> _Going:
        """`leaving`: the model that leaves for this one, if any."""
        about = {"model": model, EVICTS: leaving} if leaving else {"model": model}
        for going in self._going.values():
            if {*about.values()} & {going.job.plan["model"], going.job.plan.get(EVICTS)}:
                hint = f"hive model pull {model} --cancel ends it" if going.job.kind == PULL else ""
                error = ModelBusy if {kind, going.job.kind} <= {LOAD, UNLOAD} else WrongState
                raise error(
                    f"job {going.job.id} is about {going.job.plan['model']} already ({going.job.kind})", hint=hint
                )
        holder = _Going(StoredJob(id=model, kind=kind, plan=about, actor=actor, created_at=0, updated_at=0))
        self._going[model] = holder  # the same pull does not begin while it is written down
        try:
            plan = {**about, "step": kind.rpartition(".")[2]}
            job = await self._jobs.begin(kind, plan=plan, progress=progress, actor=actor, also=also, of_job=of_job)
        finally:
            del self._going[model]
        going = self._going[job.id] = _Going(job)
        return going

    def _carry(self, going: _Going, work: Work, *, in_thread: bool) -> StoredJob:
        """`in_thread`: a thread works, which ends by itself once it is told; else its task is cancelled."""
        going.task = spawn(self._run(going, work, in_thread=in_thread), name=going.job.kind)
        return going.job

    async def _run(self, going: _Going, work: Work, *, in_thread: bool) -> None:
        doing = spawn(outcome_of(work()), name=f"{going.job.kind} {going.job.plan['model']}")
        if not in_thread:
            going.stops = doing.cancel
        while not (await asyncio.wait([doing], timeout=TOLD_EVERY_S))[0]:
            await self._tell(going)
        if doing.cancelled():
            came: dict[str, Any] | HiveError = Cancelled("it was cancelled")
        elif (fault := doing.exception()) is not None:  # `spawn` has logged it
            came = HiveError(f"a fault in Hive itself: {type(fault).__name__}: {fault}")
        else:
            came = doing.result()
        if not self._is_leaving:  # else the next daemon says that it did not end
            await self._end(going, came)
        self._going.pop(going.job.id, None)

    async def _tell(self, going: _Going) -> None:
        if (going.says, going.plan) != (going.job.progress, going.job.plan):
            told = await outcome_of(self._jobs.tell(going.job, going.says, plan=going.plan))
            going.job = going.job if isinstance(told, HiveError) else told

    async def _end(self, going: _Going, came: dict[str, Any] | HiveError) -> None:
        job = msgspec.structs.replace(going.job, plan=going.plan)
        change = going.registered(came.message if isinstance(came, HiveError) else "")
        if isinstance(came, HiveError):
            state = JobState.CANCELLED if isinstance(came, Cancelled) else JobState.FAILED
            ended = await outcome_of(self._jobs.end(job, state, error=job_error(came), also=change.write))
        else:
            if came.get("changed", True):
                detail = {"name": came["model"], "file": came["file"]}
                self._audit_log.note(ACTS[job.kind], actor=job.actor, detail=detail)
            await self._active.refresh()  # before it is said to be done: a list asked for then has it
            took = {**came, "took_s": round(time.time() - job.created_at, 3)}
            ended = await outcome_of(self._jobs.end(job, JobState.DONE, result=took, also=change.write))
        if isinstance(ended, HiveError):
            log.error("model_job_not_written job=%s error=%s", job.id, ended.message)
        else:
            self._deployments.took(change)

    def has(self, job_id: str) -> bool:
        """Whether that is one of these jobs, and runs."""
        return job_id in self._going

    async def cancel(self, job_id: str) -> StoredJob:
        """The job, when it has ended. Raises NotFound, WrongState where it cannot be cancelled."""
        going = self._going.get(job_id)
        if going is None:
            found = await self._jobs.get(job_id)
            raise WrongState(f"job {found.id} is {found.state}")
        if going.job.kind == REMOVE:
            raise WrongState(f"job {job_id} cannot be cancelled: what is removed is gone")
        if going.job.kind in (LOAD, UNLOAD):
            raise WrongState(f"job {job_id} cannot be cancelled: {going.job.plan['model']} is on its way")
        going.cancel()
        return await self._jobs.get(job_id, wait_s=CANCELLED_WITHIN_S)

    def close(self) -> None:
        """The daemon leaves: what is under way ends, and leaves nothing half."""
        self._is_leaving = True
        for going in self._going.values():
            going.cancel()


def _listed(catalog: Catalog, model: ModelInfo, is_loaded: bool | None) -> ListedModel:
    return {
        "name": model.name,
        "size_bytes": model.size_bytes,
        "quantization": catalog.quantization(model),
        "parameters": model.parameters,
        "parent": model.parent,
        "owned_by": model.owned_by,
        "created": model.created,
        "leaves": catalog.where.why_far(model.name),
        "loaded": is_loaded,
        "aliases": catalog.aliases(model.name),
        "tiers": catalog.tiers(model.name),
    }
