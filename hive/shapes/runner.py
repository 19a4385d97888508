"""The runner API's answers, as types: names in camelCase as its clients know them. A number that is not known is left
out. See system.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from hive.errors import HiveError

Mebibytes = Annotated[int, Meta(ge=0, description="MiB.")]
Share = Annotated[float, Meta(ge=0, le=1, description="From 0 to 1.")]


class LoadedModel(TypedDict):
    """A model in memory."""

    id: str
    quantization: NotRequired[str]
    contextLength: NotRequired[Annotated[int, Meta(description="Tokens of one request, prompt and answer.")]]
    loadedAt: NotRequired[Annotated[int, Meta(description="Unix seconds.")]]
    gpuMemoryMB: NotRequired[Mebibytes]
    deployedBy: NotRequired[Annotated[str, Meta(description="Who ordered it, where that is recorded.")]]


class LoadingModel(TypedDict):
    """A model that is being loaded. `eta`: seconds until it serves."""

    id: str
    progress: NotRequired[Share]
    eta: NotRequired[Annotated[int, Meta(ge=0, description="Seconds.")]]


class RunnerModels(TypedDict):
    """The models by where they are."""

    loaded: list[LoadedModel]
    loading: list[LoadingModel]
    available: list[str]


class RunnerResources(TypedDict):
    """Memory of all GPUs together; of the host, without a GPU: `gpuIds` is empty then."""

    gpuIds: list[int]
    gpuMemoryTotalMB: NotRequired[Mebibytes]
    gpuMemoryUsedMB: NotRequired[Mebibytes]
    gpuMemoryFreeMB: NotRequired[Mebibytes]
    gpuUtilization: NotRequired[Share]
    weightsSizeMB: NotRequired[Annotated[int, Meta(ge=0, description="MiB of the files of all loaded models.")]]
    kvCacheSizeMB: NotRequired[Mebibytes]
    kvCacheUtilization: NotRequired[Share]


class RunnerQueue(TypedDict):
    """The requests that wait for their turn, of all tenants in all lines. `maxDepth`: the most that may."""

    depth: NotRequired[int]
    maxDepth: int
    avgWaitMs: NotRequired[Annotated[int, Meta(description="Of the last 1,000 requests.")]]
    p95WaitMs: NotRequired[int]


class RunnerCapabilities(TypedDict):
    """The abilities of the models that there are, together."""

    streaming: bool
    prefixCaching: bool
    multiTenant: bool
    visionInput: bool
    audioInput: bool
    functionCalling: bool


class Runner(TypedDict):
    """The runner as it is now, at most 5 s ago."""

    runnerType: str
    runnerId: str
    models: RunnerModels
    resources: RunnerResources
    queue: RunnerQueue
    capabilities: RunnerCapabilities
    health: Literal["healthy", "degraded", "unhealthy"]


class LoadTask(TypedDict):
    """A load. `gpuMemoryUsedMB` and `loadTimeMs` once it is completed, `error` once it has failed."""

    taskId: str
    status: Literal["loading", "completed", "failed"]
    modelId: str
    progress: NotRequired[Share]
    eta: NotRequired[Annotated[int, Meta(ge=0, description="Seconds.")]]
    gpuMemoryUsedMB: NotRequired[Mebibytes]
    loadTimeMs: NotRequired[Annotated[int, Meta(ge=0, description="Milliseconds.")]]
    error: NotRequired[str]


class Unloaded(TypedDict):
    """A model has left. `kvCacheFlushed`: its cache of prompts went with it."""

    modelId: str
    gpuMemoryFreedMB: NotRequired[Mebibytes]
    kvCacheFlushed: bool


class Flushed(TypedDict):
    """The cache of prompts is flushed."""

    flushed: bool
    entriesRemoved: NotRequired[int]
    memoryFreedMB: NotRequired[Mebibytes]


class RunnerHealth(TypedDict):
    """The word that it lives. `uptime`: seconds."""

    status: Literal["healthy", "degraded"]
    uptime: int
    modelsLoaded: int
    queueDepth: NotRequired[int]


class RunnerError(TypedDict):
    """The reason. `details` of some errors stand beside these, as numbers."""

    code: str
    message: str
    hint: NotRequired[str]
    neededMB: NotRequired[Mebibytes]
    freeMB: NotRequired[Mebibytes]


class RunnerFailure(TypedDict):
    """An error of the runner API."""

    error: RunnerError


def runner_error(error: HiveError) -> dict[str, Any]:
    """The body of an error, as the runner's clients know it.

    >>> from hive.errors import ModelBusy
    >>> runner_error(ModelBusy("m is being loaded already"))
    {'error': {'code': 'model_busy', 'message': 'm is being loaded already'}}
    """
    hint = {"hint": error.hint} if error.hint else {}
    return {"error": {"code": error.code, "message": error.message, **hint, **error.details}}
