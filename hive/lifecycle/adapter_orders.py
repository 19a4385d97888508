"""The orders of operators about adapters: bringing, loading, unloading, removing them, and taking trust from a key.

All but the last two are jobs. Of one adapter there is one at a time. What is served is not known here but to
`Adapters`; what is installed is what lies in the directory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.adapters.base_model import BaseModel
from hive.adapters.directory import AdapterDirectory
from hive.adapters.install import install
from hive.adapters.keys import REVOKED, KeyOnFile, TrustedKeys, public_key
from hive.adapters.record import AdapterRecord, check_name
from hive.agents.transition_lock import outcome_of
from hive.audit.approval import Approval
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Also, Jobs, both, job_error
from hive.control.models import Models
from hive.domain import DeploymentState, JobState
from hive.errors import (
    AdapterMismatch,
    AdapterNotFound,
    AdapterUnsafe,
    BadRequest,
    Cancelled,
    HiveError,
    ModelBusy,
    NotFound,
    SignatureInvalid,
    SignatureMismatch,
    SignatureUnverifiable,
    UsageError,
    WrongState,
)
from hive.lifecycle.adapter_counts import AdapterCounts
from hive.lifecycle.adapter_registry import AdapterRegistry
from hive.lifecycle.adapter_views import AdapterFacts, keys_view, list_of, removed_view, runner_load, status_of, view_of
from hive.lifecycle.adapters import READY, Adapters, LoadedAdapter
from hive.models.names import spelled
from hive.pooling.pooling import ModelPool
from hive.settings.adapters import AdaptersSection
from hive.shapes.adapters import (
    AdapterKeys,
    AdapterList,
    AdapterLoadStatus,
    AdapterRemoved,
    AdapterView,
    RevokedKey,
    RunnerAdapterLoad,
)
from hive.store import jobs as store
from hive.store.database import Database
from hive.store.deployments import StoredDeployment
from hive.store.jobs import StoredJob
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

PULL, LOAD, UNLOAD, REMOVE = "adapter.pull", "adapter.load", "adapter.unload", "adapter.remove"
DONE = {PULL: "installed", LOAD: "loaded", UNLOAD: "unloaded"}
"""Kind of a job → what an adapter is once that is done."""
REFUSED = (SignatureUnverifiable, SignatureInvalid, SignatureMismatch, AdapterUnsafe, AdapterMismatch)
"""Errors that say no to what an adapter is: they are events."""
TOLD_EVERY_S = 0.5
CANCELLED_WITHIN_S = 30.0
LOOK_S = 5.0
"""Between two looks whether a key was revoked on whose word something is served."""
RESERVED = ("keys",)
"""Names that paths of the API have for something else."""

Work = Callable[[], Coroutine[Any, Any, dict[str, Any]]]


class AdapterWish(NamedTuple):
    """An adapter that is to be brought: a path in the directory of adapters, its model, the name it shall have."""

    path: str
    base: str
    name: str = ""


class _AdapterWork:
    """A job that runs. `loads`: the digest that it loads, once it is on record; empty for none. `completed` is set by
    its thread, `asked` once it shall end."""

    def __init__(self, job: StoredJob) -> None:
        self.job = job
        self.loads = ""
        self.completed = 0
        self.asked = threading.Event()

    def came(self, completed: int) -> None:
        """Called by the thread that copies. Raises Cancelled."""
        if self.asked.is_set():
            raise Cancelled("it was cancelled")
        self.completed = completed

    @property
    def plan(self) -> dict[str, Any]:
        return {**self.job.plan, "completed_bytes": self.completed} if self.completed else self.job.plan


class AdapterOrders:
    """One for the daemon. Every method that writes raises as `Database.write` does."""

    def __init__(
        self,
        *,
        directory: AdapterDirectory,
        keys: Callable[[], TrustedKeys],
        settings: Callable[[], AdaptersSection],
        served: Adapters,
        registry: AdapterRegistry,
        models: Models,
        pool: ModelPool,
        jobs: Jobs,
        database: Database,
        audit_log: AuditLog,
    ) -> None:
        self._directory = directory
        self._keys = keys
        self._settings = settings
        self._served = served
        self.registry = registry
        self._models = models
        self._pool = pool
        self._jobs = jobs
        self._database = database
        self._audit_log = audit_log
        self._counts = AdapterCounts()
        self._going: dict[str, _AdapterWork] = {}
        """The jobs that are under way, by the adapter's name."""
        self._removing: set[str] = set()
        """The adapters whose files are being deleted."""
        self._is_leaving = False

    def __repr__(self) -> str:
        return f"<AdapterOrders {len(self._going)} jobs>"

    # the daemon's start and end ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Puts the registry right once what was served before is served again, then looks after revoked keys, until
        cancelled."""
        await self._served.restored()
        _, why_not = await asyncio.to_thread(self._look)
        served = {loaded.name: loaded.digest for loaded in self._served.loaded()}
        await outcome_of(self.registry.write(self.registry.compared(served, why_not)))
        while True:
            if self._served.loaded():
                await self._drop_revoked()
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """The daemon leaves: what is being copied is left, and nothing of it stays."""
        self._is_leaving = True
        for work in self._going.values():
            work.asked.set()

    # looking ----------------------------------------------------------------------------------------------------------

    async def listed(self) -> AdapterList:
        section = self._settings()
        return {
            "enabled": bool(section.dir),
            "dir": section.dir,
            "signatures": section.signatures,
            "fallback": section.fallback,
            "adapters": list_of(await self._facts()),
        }

    async def view(self, name: str) -> AdapterView:
        """Raises AdapterNotFound."""
        facts = await self._facts()
        return view_of(facts, name, lambda record: str(self._directory.path(record)))

    async def _facts(self) -> AdapterFacts:
        records, why_not = await asyncio.to_thread(self._look)
        return AdapterFacts(records, self._served.loaded(), self.registry.rows(), why_not)

    def _look(self) -> tuple[list[AdapterRecord], dict[str, str]]:
        """Reads what is installed, and of what would not be loaded now the reason, by digest."""
        records, keys, policy = self._directory.records(), self._keys(), self._settings().signatures
        why_not: dict[str, str] = {}
        for record in records:
            try:
                keys.check(record, policy)
            except HiveError as error:
                why_not[record.digest] = error.message
        return records, why_not

    async def _installed(self) -> list[AdapterRecord]:
        return await asyncio.to_thread(self._directory.records)

    async def _revoked(self) -> set[str]:
        """Ids of the keys that are revoked. Raises ConfigError."""
        found: list[KeyOnFile] = await asyncio.to_thread(self._keys().listed)
        return {key.id for key in found if key.state == REVOKED}

    async def load_status(self, name: str) -> AdapterLoadStatus:
        """The state of the last order to load it; also of one that an earlier daemon was given. Raises AdapterNotFound
        where there is no such adapter, nor ever was an order."""
        job: StoredJob | None = await self._database.read(lambda conn: store.last_about(conn, LOAD, name))
        if job is None:
            await self._record(name)
        return status_of(name, job, self._loaded(name))

    async def runner_status(self, name: str) -> RunnerAdapterLoad:
        """The same in the words of the runner API. Raises AdapterNotFound where it was never ordered."""
        status = await self.load_status(name)
        if not status["job"]:
            raise NotFound(f"{name[:80]} was never ordered to be loaded", hint=f"POST /llm/adapters/{name[:80]}/load")
        return runner_load(status)

    def metrics(self) -> dict[str, Any]:
        """For Prometheus (`hive.control.metrics.TABLE`)."""
        return self._counts.metrics([loaded.base for loaded in self._served.loaded()])

    def _loaded(self, name: str) -> LoadedAdapter | None:
        return next((loaded for loaded in self._served.loaded() if loaded.name == name), None)

    async def _record(self, name: str, digest: str = "") -> AdapterRecord:
        """Raises AdapterNotFound; also for NAME@DIGEST: one adapter has one name here, whatever is done with it."""
        if "@" in name:
            raise AdapterNotFound(f"there is no adapter {name[:80]!r}", hint="its digest is told apart: --digest")
        return await asyncio.to_thread(self._directory.find, name, digest)

    # bringing ---------------------------------------------------------------------------------------------------------

    async def pull(self, wish: AdapterWish, actor: str, *, approval: Approval) -> StoredJob:
        """A job: the adapter is copied while it is hashed, checked as a copy, and installed whole or not at all.

        Raises WrongState where adapters are off, NotFound for a model that is not known, BadRequest, ModelBusy.
        """
        approval.check("adapter-pull")
        section = self._settings()
        if not section.dir:
            raise WrongState(
                "adapters are off: [adapters] dir says from where they may be brought, and is empty",
                hint="hive config set adapters.dir /srv/adapters, then restart",
            )
        base = await self._base(wish.base)
        name = check_name(wish.name or _name_of(wish.path))
        self._check_name(name)
        plan = {"path": wish.path, "base": base.name}
        self._check_unlike(name, await self._installed())
        begun = await self._begin(PULL, name, f"copying {wish.path}", actor, plan=plan, also=approval.burn)

        def put() -> AdapterRecord:
            return install(
                self._directory,
                Path(wish.path),
                name,
                base,
                beneath=Path(section.dir),
                policy=section.signatures,
                keys=self._keys(),
                max_rank=section.max_rank,
                max_mb=section.max_mb,
                progress=begun.came,
            )

        async def work() -> dict[str, Any]:
            record = await asyncio.to_thread(put)
            await self._served.look_again()
            detail = {"name": name, "digest": record.digest, "base": base.name, "signature": record.signature}
            self._audit_log.note("adapter.installed", target=name, actor=actor, detail={**detail, "key": record.key_id})
            return {
                "model": name,
                "digest": record.digest,
                "base": base.name,
                "rank": record.rank,
                "size_bytes": record.bytes,
                "signature": record.signature,
                "key_id": record.key_id,
                "file": str(self._directory.path(record)),
            }

        return self._carry(begun, work)

    async def _base(self, name: str) -> BaseModel:
        """The model, with its files where they are here. Raises NotFound, BadRequest where it is an adapter itself."""
        catalog = self._models.catalog
        model = catalog.find(name)
        if model.parent:
            raise BadRequest(f"{model.name} is an adapter on {model.parent}, and no model of its own")
        slot = next((slot for slot in self._pool.slots.values() if slot.model == model.name), None)
        path = slot.entry.path if slot is not None and slot.entry.has_server_here else None
        path = path or await self._models.file_of(model.name)
        return BaseModel(model.name, path, catalog.aliases(model.name))

    def _check_name(self, name: str) -> None:
        """Raises BadRequest where requests for that name mean something else."""
        if name in RESERVED:
            raise BadRequest(f"no adapter can be called {name}", hint="--name gives it another one")
        try:
            known = self._models.catalog.find(name)
        except NotFound:
            return
        if not known.parent:
            raise BadRequest(f"{name} is what a model is called: an adapter needs a name of its own", hint="--name")

    def _check_unlike(self, name: str, installed: Sequence[AdapterRecord]) -> None:
        """Raises BadRequest where requests cannot tell its name from that of another adapter."""
        others = {record.name for record in installed} | self._going.keys() - {name}
        if like := sorted(other for other in others if other != name and spelled(other) == spelled(name)):
            raise BadRequest(
                f"requests cannot tell {name} from the adapter {like[0]}", hint="--name gives it another one"
            )

    # loading ----------------------------------------------------------------------------------------------------------

    async def load(self, name: str, actor: str, *, approval: Approval, digest: str = "") -> StoredJob:
        """A job, done already where exactly that is served; while it is being loaded, the job that does so.

        Raises AdapterNotFound, NotSupported where nothing here loads it, ModelBusy, and SignatureUnverifiable where its
        key is trusted no more.
        """
        approval.check("adapter-load")
        record = await self._record(name, digest)
        self._check_name(name)
        await self._check_trusted(record, actor)
        self._served.check_place(record)
        if (under_way := self._going.get(name)) is not None and under_way.loads == record.digest:
            return under_way.job
        now, before = self._loaded(name), self.registry.row(name)
        is_so = now is not None and now.digest == record.digest and now.state == READY
        path = str(self._directory.path(record))
        state = DeploymentState.LOADED if is_so else DeploymentState.LOADING
        change = self.registry.ordered(record, path, actor=actor, signature=approval.by, state=state)
        (row,) = change.puts
        says = f"{record.engine_name} is loaded already" if is_so else f"loading {record.engine_name} on {record.base}"
        plan = {"digest": record.digest, "base": record.base}
        also = both(approval.burn, change.write)
        begun = await self._begin(LOAD, name, says, actor, plan=plan, also=also)
        begun.loads = record.digest
        self.registry.took(change)
        if is_so:
            del self._going[name]
            result = {"model": name, "digest": record.digest, "base": record.base, "changed": False}
            return await self._jobs.end(begun.job, JobState.DONE, result=result)
        spawn(self._load(begun, record, row, before if now is not None else None), name=f"load adapter {name}")
        return begun.job

    async def _load(
        self, begun: _AdapterWork, record: AdapterRecord, row: StoredDeployment, before: StoredDeployment | None
    ) -> None:
        """`before`: what is on record of the build that is served, which is so again where this fails."""
        name, began = record.name, time.monotonic()

        async def work() -> dict[str, Any]:
            await self._served.load(name, record.digest, cause=begun.job.actor)
            await self._check_still_trusted(record)
            took_s = round(time.monotonic() - began, 3)
            return {"model": name, "digest": record.digest, "base": record.base, "changed": True, "took_s": took_s}

        came = await outcome_of(work())
        if self._is_leaving:
            return  # the next daemon says what became of it
        registry, detail = self.registry, {"name": name, "digest": record.digest, "base": record.base}
        if isinstance(came, HiveError):
            is_served = self._loaded(name) is not None  # else its key was revoked meanwhile
            change = registry.failed(row, before if is_served else None, came.message)
            self._refuse(came, begun.job.actor, detail)
            await self._end(begun, came, change.write, lambda: registry.took(change))
            return
        self._counts.loaded(came["took_s"])
        self._audit_log.note("adapter.loaded", target=name, actor=begun.job.actor, detail=detail)
        change = registry.reached(row, DeploymentState.LOADED)
        await self._end(begun, came, change.write, lambda: registry.took(change))

    async def _check_trusted(self, record: AdapterRecord, actor: str) -> None:
        """Raises SignatureUnverifiable, and tells of it; ConfigError where the keys cannot be read."""
        try:
            await asyncio.to_thread(self._keys().check, record, self._settings().signatures)
        except HiveError as error:
            self._refuse(error, actor, {"name": record.name, "digest": record.digest, "base": record.base})
            raise

    async def _check_still_trusted(self, record: AdapterRecord) -> None:
        """Its key may have been revoked while it was being loaded: then it goes again."""
        try:
            await asyncio.to_thread(self._keys().check, record, self._settings().signatures)
        except SignatureUnverifiable:
            await self._served.unload(record.name)
            raise

    def _refuse(self, error: HiveError, actor: str, detail: dict[str, Any]) -> None:
        """Counts a load that came to nothing, and tells of one that was refused."""
        self._counts.ended("refused" if isinstance(error, REFUSED) else "failed")
        self._note_refused(error, actor, detail)

    def _note_refused(self, error: HiveError, actor: str, detail: dict[str, Any]) -> None:
        """Tells of it where the error says no to what the adapter is."""
        if isinstance(error, REFUSED):
            told = {**detail, "code": error.code, "reason": error.message}
            self._audit_log.note("adapter.refused", target=str(detail["name"]), actor=actor, detail=told)

    # unloading and removing -------------------------------------------------------------------------------------------

    async def unload(self, name: str, actor: str, *, approval: Approval) -> StoredJob:
        """A job, done already where it is not served: its name is free at once, its last requests end first.

        Raises AdapterNotFound, ModelBusy.
        """
        approval.check("adapter-unload")
        now, row = self._loaded(name), self.registry.row(name)
        if now is None and row is None:
            await self._record(name)
        says = f"{name} is not loaded" if now is None else f"unloading {name}"
        gone = self.registry.ended(name, actor)
        also = both(approval.burn, gone.write) if now is None else approval.burn
        begun = await self._begin(UNLOAD, name, says, actor, also=also)
        if now is None:
            del self._going[name]
            self.registry.took(gone)
            return await self._jobs.end(begun.job, JobState.DONE, result={"model": name, "changed": False})

        async def work() -> None:
            came = await outcome_of(self._served.unload(name))
            if self._is_leaving:
                return
            if isinstance(came, HiveError):
                await self._end(begun, came)
                return
            detail = {"name": name, "digest": now.digest, "base": now.base}
            self._audit_log.note("adapter.unloaded", target=name, actor=actor, detail=detail)
            ended = self.registry.ended(name, actor)
            result = {"model": name, "digest": now.digest, "changed": True}
            await self._end(begun, result, ended.write, lambda: self.registry.took(ended))

        spawn(work(), name=f"unload adapter {name}")
        return begun.job

    async def remove(self, name: str, actor: str, *, approval: Approval, digest: str = "") -> AdapterRemoved:
        """Removes all builds of an adapter that are installed, or the one with this digest.

        Raises AdapterNotFound, WrongState while it is served, ModelBusy.
        """
        approval.check("adapter-remove")
        found = await self._record(name, digest)
        records = await asyncio.to_thread(self._directory.records)
        leaving = [record for record in records if record.name == name and (not digest or record == found)]
        self._check_idle(name)
        served = {loaded.digest for loaded in self._served.loaded() if loaded.name == name}
        if served & {record.digest for record in leaving}:
            raise WrongState(f"{name} is loaded", hint=f"hive adapter unload {name}")
        self._removing.add(name)  # nobody loads it, or brings another build of it, while its files go
        try:
            await self._database.write(approval.burn)
            for record in leaving:
                await asyncio.to_thread(self._directory.remove, record)
                detail = {"name": name, "digest": record.digest, "base": record.base}
                self._audit_log.note("adapter.removed", target=name, actor=actor, detail=detail)
        finally:
            self._removing.discard(name)
        await self._served.look_again()
        if len(leaving) == sum(record.name == name for record in records):
            await self.registry.write(self.registry.ended(name, actor))
        return removed_view(name, leaving)

    # keys -------------------------------------------------------------------------------------------------------------

    async def keys(self) -> AdapterKeys:
        """The keys there are, and what each has verified here. Raises ConfigError where they cannot be read."""
        keys = self._keys()
        listed, records = await asyncio.gather(asyncio.to_thread(keys.listed), self._installed())
        return keys_view(str(keys.keys_dir), listed, records)

    async def trust(self, key_id: str, pem: str, actor: str, *, approval: Approval) -> str:
        """Trusts a public key from now on, where it has this id; the id.

        Raises BadRequest, WrongState where it was revoked, NotPermitted where only root may.
        """
        approval.check("adapter-trust")
        key = public_key(pem.encode())
        if key.id != key_id:
            raise BadRequest(f"the key has the id {key.id}, and not {key_id[:80]}")
        await self._database.write(approval.burn)
        await asyncio.to_thread(self._keys().trust, key.pem)
        self._audit_log.note("adapter.trusted", target=key.id, actor=actor, detail={"name": key.id, "curve": key.curve})
        return key.id

    async def revoke(self, key_id: str, actor: str) -> RevokedKey:
        """Trusts a key no more, and has nothing served that stands on its word; what is so served is over when this
        returns. Raises NotFound, NotPermitted where only root may."""
        keys = self._keys()
        try:
            key_id = await asyncio.to_thread(keys.whole_id, key_id)
        except UsageError as error:
            raise NotFound(error.message, hint="hive adapter keys") from None
        if not await asyncio.to_thread(keys.is_revoked, key_id):
            await asyncio.to_thread(keys.revoke, key_id)
        return {"id": key_id, "unloaded": await self._drop(key_id, actor)}

    async def _drop_revoked(self) -> None:
        """Has what stands on the word of a revoked key served no more, whoever revoked it, and however."""
        revoked = await outcome_of(self._revoked())
        if isinstance(revoked, HiveError) or not revoked:
            return
        keys = {(record.name, record.digest): record.key_id for record in await self._installed()}
        found = {keys.get((loaded.name, loaded.digest), "") for loaded in self._served.loaded()}
        for key_id in sorted(found & revoked):
            await outcome_of(self._drop(key_id, "hive"))

    async def _drop(self, key_id: str, actor: str) -> list[str]:
        before = {loaded.name: loaded.digest for loaded in self._served.loaded()}
        names = await self._served.unload_key(key_id)
        self._audit_log.note("adapter.revoked", target=key_id, actor=actor, detail={"name": key_id, "unloaded": names})
        await self.registry.write(
            self.registry.gone({name: before.get(name, "") for name in names}, f"its key {key_id} was revoked")
        )
        return names

    # the jobs ---------------------------------------------------------------------------------------------------------

    def _check_idle(self, name: str) -> None:
        """Raises ModelBusy."""
        if (work := self._going.get(name)) is not None:
            which = f"job {work.job.id}" if work.job.created_at else "another order"  # that is not written down yet
            raise ModelBusy(f"{which} is about {name} already ({work.job.kind})", retry_after_s=1.0)
        if name in self._removing:
            raise ModelBusy(f"{name} is being removed", retry_after_s=1.0)

    async def _begin(
        self,
        kind: str,
        name: str,
        progress: str,
        actor: str,
        *,
        plan: dict[str, Any] | None = None,
        also: Also,
    ) -> _AdapterWork:
        self._check_idle(name)
        about = {"model": name, "step": kind.rpartition(".")[2], **(plan or {})}
        work = _AdapterWork(StoredJob(id=name, kind=kind, plan=about, actor=actor, created_at=0, updated_at=0))
        self._going[name] = work  # nobody else begins while it is written down
        try:
            work.job = await self._jobs.begin(kind, plan=about, progress=progress, actor=actor, also=also)
        except BaseException:
            del self._going[name]
            raise
        return work

    def _carry(self, begun: _AdapterWork, work: Work) -> StoredJob:
        spawn(self._run(begun, work), name=f"{begun.job.kind} {begun.job.plan['model']}")
        return begun.job

    async def _run(self, begun: _AdapterWork, work: Work) -> None:
        doing = spawn(outcome_of(work()), name=f"{begun.job.plan['model']} comes")
        while not (await asyncio.wait([doing], timeout=TOLD_EVERY_S))[0]:
            if begun.plan != begun.job.plan:
                told = await outcome_of(self._jobs.tell(begun.job, begun.job.progress, plan=begun.plan))
                begun.job = begun.job if isinstance(told, HiveError) else told
        fault = doing.exception()  # `spawn` has logged it
        came = (
            doing.result() if fault is None else HiveError(f"a fault in Hive itself: {type(fault).__name__}: {fault}")
        )
        if self._is_leaving:
            return  # the next daemon says that it did not end
        if isinstance(came, HiveError):
            plan = begun.job.plan
            told_of = {"name": plan["model"], "path": plan["path"], "base": plan["base"]}
            self._note_refused(came, begun.job.actor, told_of)
        await self._end(begun, came)

    async def _end(
        self,
        begun: _AdapterWork,
        came: dict[str, Any] | HiveError,
        also: Also | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Ends the job, `also` in its transaction and `then` after it."""
        says = (
            begun.job.progress
            if isinstance(came, HiveError)
            else f"{begun.job.plan['model']} is {DONE[begun.job.kind]}"
        )
        job = msgspec.structs.replace(begun.job, plan=begun.plan, progress=says)
        if isinstance(came, HiveError):
            state = JobState.CANCELLED if isinstance(came, Cancelled) else JobState.FAILED
            ended = await outcome_of(self._jobs.end(job, state, error=job_error(came), also=also))
        else:
            ended = await outcome_of(self._jobs.end(job, JobState.DONE, result=came, also=also))
        if isinstance(ended, HiveError):
            log.error("adapter_job_not_written job=%s error=%s", job.id, ended.message)
        else:
            then()
        self._going.pop(str(job.plan["model"]), None)

    def has(self, job_id: str) -> bool:
        """Whether that is one of these jobs, and runs."""
        return any(work.job.id == job_id for work in self._going.values())

    async def cancel(self, job_id: str) -> StoredJob:
        """The job, once it has ended. Raises WrongState where it cannot be cancelled."""
        work = next(work for work in self._going.values() if work.job.id == job_id)
        if work.job.kind != PULL:
            raise WrongState(f"job {job_id} cannot be cancelled: {work.job.plan['model']} is on its way")
        work.asked.set()
        return await self._jobs.get(job_id, wait_s=CANCELLED_WITHIN_S)


def _name_of(path: str) -> str:
    """The name of an adapter by its path.

    >>> _name_of("legal/v2.gguf"), _name_of("legal/v2/"), _name_of("tone-v1.2")
    ('v2', 'v2', 'tone-v1.2')
    """
    return Path(path).name.removesuffix(".gguf")
