"""Adapters as the API shows them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from hive.adapters.keys import REVOKED, KeyOnFile
from hive.adapters.record import AdapterRecord
from hive.domain import JobState
from hive.errors import AdapterNotFound, did_you_mean
from hive.lifecycle.adapters import LoadedAdapter
from hive.shapes.adapters import (
    ADAPTER_STATES,
    AdapterKeys,
    AdapterLoadStatus,
    AdapterRemoved,
    AdapterState,
    AdapterView,
    InstalledAdapter,
    ListedAdapter,
    RunnerAdapterLoad,
    ServedAdapter,
)
from hive.shapes.system import JobError
from hive.store.deployments import StoredDeployment
from hive.store.jobs import StoredJob


class AdapterFacts(NamedTuple):
    """All that is known: what is installed (the newest first), served and on record. `why_not`: of what would not be
    loaded now, by digest."""

    records: Sequence[AdapterRecord]
    served: Sequence[LoadedAdapter]
    rows: Sequence[StoredDeployment]
    why_not: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        found = {record.name for record in self.records} | {loaded.name for loaded in self.served}
        return sorted(found | {row.name for row in self.rows})


def list_of(facts: AdapterFacts) -> list[ListedAdapter]:
    """Each adapter that is installed, served or on record, by its name."""
    return [listed(facts, name) for name in facts.names]


def listed(facts: AdapterFacts, name: str) -> ListedAdapter:
    records = [record for record in facts.records if record.name == name]
    loaded = next((one for one in facts.served if one.name == name), None)
    row = next((row for row in facts.rows if row.name == name), None)
    bases = [one.base for one in (loaded, row, *records) if one is not None]
    return {
        "name": name,
        "base": bases[0] if bases else "",
        "state": _state(row, loaded),
        "served": None if loaded is None else served_view(loaded),
        "installed": [installed_view(facts, record) for record in records],
        "last_error": loaded.why if loaded is not None and loaded.why else "" if row is None else row.last_error,
    }


def _state(row: StoredDeployment | None, loaded: LoadedAdapter | None) -> AdapterState:
    if loaded is not None and (row is None or ADAPTER_STATES[row.state] not in ("loading", "unloading")):
        return "loaded"
    return "installed" if row is None else ADAPTER_STATES[row.state]


def installed_view(facts: AdapterFacts, record: AdapterRecord) -> InstalledAdapter:
    return {
        "digest": record.digest,
        "base": record.base,
        "format": record.format,
        "rank": record.rank,
        "size_bytes": record.bytes,
        "signature": record.signature,
        "key_id": record.key_id,
        "installed_at": record.installed_at,
        "why_not": facts.why_not.get(record.digest, ""),
    }


def served_view(loaded: LoadedAdapter) -> ServedAdapter:
    return {
        "digest": loaded.digest,
        "previous": loaded.previous,
        "where": loaded.where,
        "state": loaded.state,
        "charged_bytes": loaded.charged_bytes,
        "since": loaded.since,
    }


def view_of(facts: AdapterFacts, name: str, path_of: Callable[[AdapterRecord], str]) -> AdapterView:
    """Everything known of one. Raises AdapterNotFound with the nearest name."""
    if name not in facts.names:
        hint = did_you_mean(name, facts.names) or "hive adapter list"
        raise AdapterNotFound(f"there is no adapter {name[:80]!r}", hint=hint)
    told, row = listed(facts, name), next((row for row in facts.rows if row.name == name), None)
    digest = "" if told["served"] is None else told["served"]["digest"]
    records = [record for record in facts.records if record.name == name]
    shown = next((record for record in records if record.digest == digest), records[0] if records else None)
    files = () if shown is None else shown.files
    return {
        **told,
        "path": "" if shown is None else path_of(shown),
        "files": [{"path": file.path, "size_bytes": file.size, "sha256": file.sha256} for file in files],
        "deployed_by": "" if row is None else row.deployed_by,
        "approved_by": "" if row is None else row.signature,
    }


def status_of(name: str, job: StoredJob | None, loaded: LoadedAdapter | None) -> AdapterLoadStatus:
    """The state of an order to load it; `job` None: there was none. What was done, and is served no more, is unloaded.

    >>> job = StoredJob(id="j", kind="adapter.load", state=JobState.DONE, plan={"digest": "d"}, actor="a",
    ...                 result={"took_s": 0.5}, created_at=1.0, updated_at=2.0)
    >>> told = status_of("a", job, None)
    >>> told["state"], told["serving"], told["took_s"]
    ('unloaded', '', 0.5)
    """
    serving = "" if loaded is None else loaded.digest
    told = AdapterLoadStatus(
        name=name, state="none", job="", digest="", serving=serving, progress="", took_s=None, error=None
    )
    if job is None:
        if loaded is not None:
            told["state"] = "loaded"
        return told
    told["job"], told["digest"], told["progress"] = job.id, str(job.plan.get("digest", "")), job.progress
    if job.state is JobState.RUNNING:
        told["state"] = "loading"
    elif job.state is JobState.DONE:
        told["state"] = "loaded" if serving == told["digest"] else "unloaded"
        told["took_s"] = (job.result or {}).get("took_s")
    else:
        told["state"], told["error"] = "failed", cast(JobError | None, job.error)
    return told


def runner_load(status: AdapterLoadStatus) -> RunnerAdapterLoad:
    """The same in the words of the runner API."""
    state = {"loading": "loading", "loaded": "completed", "unloaded": "completed"}.get(status["state"], "failed")
    told = RunnerAdapterLoad(jobId=status["job"], adapterId=status["name"], status=state)  # type: ignore[typeddict-item]
    if status["digest"]:
        told["digest"] = status["digest"]
    if status["serving"]:
        told["serving"] = status["serving"]
    if status["took_s"] is not None:
        told["loadTimeMs"] = round(status["took_s"] * 1000)
    if status["error"] is not None:
        told["error"] = str(status["error"]["message"])
    return told


def removed_view(name: str, records: Sequence[AdapterRecord]) -> AdapterRemoved:
    return {
        "name": name,
        "digests": [record.digest for record in records],
        "freed_bytes": sum(record.bytes for record in records),
    }


def keys_view(directory: str, keys: Sequence[KeyOnFile], records: Sequence[AdapterRecord]) -> AdapterKeys:
    """The keys with what each has verified."""
    return {
        "dir": directory,
        "keys": [
            {
                "id": key.id,
                "revoked": key.state == REVOKED,
                "adapters": [record.engine_name for record in records if record.key_id == key.id],
            }
            for key in keys
        ],
    }
