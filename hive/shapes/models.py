"""The API's answers about models, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from hive.domain import AgentStatus, BackendKind, DeploymentState, Tier
from hive.shapes.system import Bytes, UnixSeconds


class ListedModel(TypedDict):
    """A model the inference server offers, by the name it uses."""

    name: str
    size_bytes: Bytes | None
    quantization: Annotated[str, Meta(description="In the server's words, else as its name says; empty: unknown.")]
    parameters: Annotated[int | None, Meta(description="How many weights; null where the server does not tell.")]
    parent: Annotated[str, Meta(description="The model it is an adapter on; empty for a model of its own.")]
    owned_by: str
    created: Annotated[int, Meta(description="Unix seconds; 0 where the server does not tell.")]
    leaves: Annotated[
        str, Meta(description="Why what is said to it leaves this box, and where to; empty where it stays.")
    ]
    loaded: Annotated[bool | None, Meta(description="Whether it is in memory; null where the server does not tell.")]
    aliases: list[str]
    tiers: Annotated[list[Tier], Meta(description="Given this one for its name without a variant.")]


class ModelList(TypedDict):
    """The models of the inference server, by its last answer. `stale` says in a sentence why that may not be so any
    more; empty while it is watched and answers. `aliases`: name → what it stands for, the first that is there."""

    backend: BackendKind | None
    label: str
    up: bool
    seen_at: Annotated[UnixSeconds | None, Meta(description="When it said so, Unix seconds; null where it never has.")]
    stale: str
    routing: Annotated[bool, Meta(description="Whether tiers are given variants of their own.")]
    aliases: dict[str, list[str]]
    directory: Annotated[str, Meta(description="Where pulled files for vLLM and llama-server are put.")]
    files: Annotated[dict[str, int], Meta(description="What lies there: name → bytes.")]
    models: list[ListedModel]


class ModelUser(TypedDict):
    """An agent that is given this model. `asks`: the name it has it by."""

    id: str
    name: str
    status: AgentStatus
    tier: Tier
    tenant: str
    asks: str


class ModelView(ListedModel):
    """Everything known of one model. `file`: what it is in Hive's directory, empty where it does not lie there.

    `base`: the model as routing knows it; `variants`: the same in other quantizations; `adapters`: what is there as an
    adapter on it; `agents`: those with it as their own model, or as the default one.
    """

    backend: BackendKind | None
    up: bool
    seen_at: UnixSeconds | None
    stale: str
    base: str
    variants: list[str]
    adapters: list[str]
    agents: list[ModelUser]
    file: str


class DeployedModel(TypedDict):
    """A model that was ordered to be loaded, and what became of it (docs/registry.md)."""

    id: str
    kind: str
    name: str
    digest: Annotated[str, Meta(description="Of its files as they were then; empty where they could not be read.")]
    path: Annotated[str, Meta(description="Its file or directory, or its name at a server that has it by a name.")]
    backend: str
    base: Annotated[str, Meta(description="The model it belongs to, of what is no model of its own.")]
    signature: Annotated[str, Meta(description="By whom the order was approved; empty where no rule asked for that.")]
    deployed_by: Annotated[str, Meta(description="Who gave the order: uid:N, or the name of a token.")]
    at: Annotated[UnixSeconds, Meta(description="When, Unix seconds.")]
    state: DeploymentState
    last_error: Annotated[str, Meta(description="Why it is not loaded, or is not what was deployed; else empty.")]


class DeployedModels(TypedDict):
    """The models that were ordered to be loaded. `restore`: what is missing at the daemon's start is loaded again."""

    restore: bool
    deployed: list[DeployedModel]
