"""The API's answers about adapters, as types. See system.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from hive.domain import DeploymentState
from hive.shapes.system import Bytes, JobError, UnixSeconds

AdapterState = Annotated[
    Literal["installed", "loading", "loaded", "unloading", "absent", "failed"],
    Meta(
        description="installed: nobody ordered it to be loaded. absent, failed: it was to be, and the reason is in"
        " last_error."
    ),
]


class InstalledAdapter(TypedDict):
    """One installed build of an adapter: its files, as they were checked and copied."""

    digest: Annotated[str, Meta(description="Over its files: SHA-256, hex.")]
    base: Annotated[str, Meta(description="The model it is an adapter on.")]
    format: Annotated[str, Meta(description="gguf or safetensors.")]
    rank: int
    size_bytes: Bytes
    signature: Annotated[str, Meta(description="verified or unsigned.")]
    key_id: Annotated[str, Meta(description="The key that its signature was verified with; empty for none.")]
    installed_at: UnixSeconds
    why_not: Annotated[str, Meta(description="Why it would not be loaded now; empty where it would.")]


class AdapterFileView(TypedDict):
    """One file of an installed adapter."""

    path: str
    size_bytes: Bytes
    sha256: str


class ServedAdapter(TypedDict):
    """The build of an adapter that its name leads to."""

    digest: str
    previous: Annotated[str, Meta(description="The digest that answered before it; empty for none.")]
    where: Annotated[str, Meta(description="The model of the pool whose server has it, or the kind of that in use.")]
    state: Annotated[
        str, Meta(description="ready, loading, cold (the next request has it loaded) or failed (see last_error).")
    ]
    charged_bytes: Annotated[Bytes | None, Meta(description="Booked for it alone; null: it is in its base's charge.")]
    since: UnixSeconds


class ListedAdapter(TypedDict):
    """An adapter by its name, which requests ask for. `served` is null where it is not loaded: what a request for it
    gets then says `[adapters] fallback`."""

    name: str
    base: str
    state: AdapterState
    served: ServedAdapter | None
    installed: Annotated[list[InstalledAdapter], Meta(description="The newest first.")]
    last_error: str


class AdapterList(TypedDict):
    """Every adapter. `enabled` is false where `[adapters] dir` is empty: then none can be brought."""

    enabled: bool
    dir: Annotated[str, Meta(description="Where adapters are brought from.")]
    signatures: Annotated[str, Meta(description="[adapters] signatures: required, warn or off.")]
    fallback: Annotated[str, Meta(description="[adapters] fallback: refuse, base or previous.")]
    adapters: list[ListedAdapter]


class AdapterView(ListedAdapter):
    """Everything known of one adapter. `files`: of the build that is served, else of the newest."""

    path: Annotated[str, Meta(description="Where these files lie.")]
    files: list[AdapterFileView]
    deployed_by: Annotated[str, Meta(description="Who ordered it to be loaded; empty for nobody.")]
    approved_by: Annotated[str, Meta(description="Who signed that order; empty where no rule asked for it.")]


class AdapterLoadStatus(TypedDict):
    """State of the last order to load an adapter. `serving`: the digest that answers for its name now, which may be
    that of an earlier order; empty for none."""

    name: str
    state: Annotated[
        Literal["none", "loading", "loaded", "failed", "unloaded"],
        Meta(description="none: it was never ordered. unloaded: it was loaded, and is not served any more."),
    ]
    job: Annotated[str, Meta(description="Of the order; empty for none.")]
    digest: Annotated[str, Meta(description="What was ordered; empty for nothing.")]
    serving: str
    progress: str
    took_s: Annotated[float | None, Meta(description="Null where it has not been loaded by that order.")]
    error: JobError | None


class AdapterRemoved(TypedDict):
    """The builds of an adapter that were removed."""

    name: str
    digests: list[str]
    freed_bytes: Bytes


class AdapterKey(TypedDict):
    """A key that adapters are signed with. A revoked one verifies nothing."""

    id: str
    revoked: bool
    adapters: Annotated[list[str], Meta(description="Installed ones that it verified, as NAME@DIGEST.")]


class AdapterKeys(TypedDict):
    """The keys in `[adapters] keys_dir`."""

    dir: str
    keys: list[AdapterKey]


class TrustedKey(TypedDict):
    """A key that is trusted from now on."""

    id: str


class RevokedKey(TypedDict):
    """A key that is trusted no more. `unloaded`: the adapters that were in use on its word."""

    id: str
    unloaded: list[str]


class RunnerAdapterLoad(TypedDict):
    """A load of an adapter, as clients of a runner ask after it."""

    jobId: str
    adapterId: str
    status: Literal["loading", "completed", "failed"]
    digest: NotRequired[str]
    loadTimeMs: NotRequired[int]
    error: NotRequired[str]
    serving: NotRequired[Annotated[str, Meta(description="The digest that answers now, where one does.")]]


ADAPTER_STATES: Mapping[DeploymentState, AdapterState] = {
    DeploymentState.LOADING: "loading",
    DeploymentState.LOADED: "loaded",
    DeploymentState.UNLOADING: "unloading",
    DeploymentState.EVICTED: "absent",
    DeploymentState.ABSENT: "absent",
    DeploymentState.FAILED: "failed",
}
"""State of the order on record → state of the adapter."""
