"""Specification of a kind of inference server: data and pure functions, one `BackendSpec` each.

Defaults are what holds for any server of OpenAI's dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hive.backends.command_line import Launch, Order
from hive.backends.conversation import Answers, AskedServer, Conversation, constant
from hive.backends.counters import Drafts, Heard, PrefixCache, ReportedLimits
from hive.domain import Band, Dialect, FoundCapabilities, ModelInfo
from hive.models.cache_epochs import FlushedBy
from hive.models.capabilities import Over
from hive.settings.table import InferenceSection

Fields = tuple[tuple[str, bytes], ...]
"""Members of a request's body: name and raw JSON."""


class KeptPrompt(msgspec.Struct, frozen=True):
    """One of a server's slots, with what it keeps of a prompt there. `task`: a number of the request that is there, or
    was last; -1 for none. `tokens`: kept; of a busy one `reused`: what its request found there, and `read`: what it has
    read of its prompt; each None where the server does not tell."""

    slot: int
    is_busy: bool
    task: int = -1
    tokens: int | None = 0
    reused: int | None = 0
    read: int | None = 0


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """The control questions. Nobody's prompt is in them, and none but `load`, `unload` and `erase` changes anything.

    `health_path` answers 200 exactly while a request would be served. `why_not_load`: a sentence, for a kind without
    `load` and `unload`. `kept`, `erase`: of a kind whose flush is to erase slots, for a model: what is in them, and the
    tokens that were in one, which is idle. `described_at`: where it describes what it takes, in OpenAPI; `assumed`:
    what is taken for granted where it does not. `look_for_files_at`: asked for so that it looks for models that came or
    went. `slots_made_for`, `save_slot`, `restore_slot`: of a kind whose slots are parked (hive.parking): what a saved
    one is good for, with the path of the model; tokens and bytes that were written, or read.
    """

    health_path: str
    version: Callable[[AskedServer], Conversation[str]]
    models: Callable[[AskedServer], Conversation[list[ModelInfo]]]
    mark: Callable[[AskedServer], Conversation[str]] = lambda _: constant("")
    busy: Callable[[], Conversation[ReportedLimits]] = lambda: constant(ReportedLimits())
    prefix_cache: Callable[[], Conversation[PrefixCache | None]] = lambda: constant(None)
    kv_usage: Callable[[], Conversation[float | None]] = lambda: constant(None)
    drafts: Callable[[], Conversation[Drafts | None]] = lambda: constant(None)
    heard: Callable[[], Conversation[Heard | None]] = lambda: constant(None)
    loaded: Callable[[AskedServer], Conversation[frozenset[str] | None]] = lambda _: constant(None)
    load: Callable[[AskedServer, str], Conversation[None]] | None = None
    unload: Callable[[AskedServer, str], Conversation[None]] | None = None
    why_not_load: str = ""
    kept: Callable[[AskedServer, str], Conversation[list[KeptPrompt]]] | None = None
    erase: Callable[[AskedServer, str, int], Conversation[int]] | None = None
    described_at: str = ""
    assumed: FoundCapabilities = FoundCapabilities()
    look_for_files_at: str = ""
    slots_made_for: Callable[[AskedServer], Conversation[tuple[str, list[str]]]] | None = None
    save_slot: Callable[[AskedServer, int, str], Conversation[tuple[int, int]]] | None = None
    restore_slot: Callable[[AskedServer, int, str], Conversation[tuple[int, int]]] | None = None


class Sleeping(msgspec.Struct, frozen=True, kw_only=True):
    """Sleep of such a server on a GPU: it lives on and gives most of that memory back. Asleep it answers control
    questions and holds requests for ever, so that none may reach it.

    `flags`, `environment`: it needs them at its start, or it cannot. `levels`: by name, whether the weights stay in the
    host's memory; else a wake reads them from the disk. `asleep`: the name of its level, empty while it is awake; None
    where it cannot sleep. `fall_asleep` and `wake` raise BackendDown, BackendTimeout; a wake is whole or raises.
    """

    flags: tuple[str, ...]
    environment: Mapping[str, str]
    levels: Mapping[str, bool]
    asleep: Callable[[AskedServer], Conversation[str | None]]
    fall_asleep: Callable[[AskedServer, str], Conversation[None]]
    wake: Callable[[AskedServer, str], Conversation[None]]


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a request to such a server, and the fields it is told in vain (`passed_over`, by endpoint).

    `pooled_fields`: fields that are put into a request to a model of the pool. `cannot_keep_apart`: beginnings of the
    endpoints where prompts of several tenants would meet in its cache, of a kind that can keep them apart elsewhere.
    `cache_fields` gets the parts of the salt that flushes have raised, too (`CacheEpochs.parts`).
    `limit_by_first_name`: whether a limit of tokens may be told by both of its names. `short_completions`: whether its
    own limit at `/v1/completions` is OpenAI's, 16 tokens. `tells_cost`: whether each of its streams does, unasked.
    `takes_slot`: endpoints at which a request may name its slot. `prompt_target`: where a prompt is read ahead;
    `why_not_ahead`: why it is not.
    """

    passed_over: Mapping[str, tuple[Over, ...]] = {}
    cache_fields: Callable[[str, str, str, bool, tuple[str, ...]], Fields] = (
        lambda endpoint, group, tag, apart, flushed: ()  # noqa: ARG005
    )
    priority_fields: Callable[[str, Band], Fields] = lambda endpoint, band: ()  # noqa: ARG005
    pooled_fields: Callable[[str], Fields] = lambda endpoint: ()  # noqa: ARG005
    cannot_keep_apart: tuple[str, ...] = ()
    limit_name: Callable[[str, str], str] = lambda address, setting: ""  # noqa: ARG005
    limit_by_first_name: bool = True
    short_completions: bool = False
    tells_cost: bool = False
    grammar: str = "grammar_remote"
    takes_slot: frozenset[str] = frozenset()
    prompt_target: bytes = b"/v1/chat/completions"
    why_not_ahead: str = ""


class BackendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of inference server.

    `dialects`: what it speaks by itself. `adds`: paths beyond its dialects that it answers; `lacks`: paths of theirs
    that it does not; `not_relayed`: paths it answers with a model and Hive does not pass on, with what comes nearest to
    each. `describes_all`: a path that it does not describe is one that it does not have.
    """

    kind: str
    label: str
    dialects: frozenset[Dialect]
    adds: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    not_relayed: Mapping[str, str] = {}
    describes_all: bool = False

    questions: tuple[str, ...]
    """Harmless GETs, from whose answers `recognise` tells."""
    recognise: Callable[[Answers], str | None]
    """The version of the server that gave these answers, None where it is none of this kind."""
    asking: Asking
    one_token: Callable[[str, str], tuple[str, dict[str, Any]]]
    """Path and body of the question for a single token, of a model and by a name for the limit."""
    tokens_in: Callable[[bytes], int]
    """Tokens that the answer to it says were generated; 0 if it does not say."""
    requests: Requests

    places: Callable[[int | None, InferenceSection], tuple[int | None, str]]
    """Requests to send at once, by what it told, and where that number comes from; None for no limit."""
    orders_by_priority: Callable[[InferenceSection], bool] = lambda _: False
    prefix_cache: str
    """Callers that may meet each other's prompts in its prefix cache, in words."""
    flushed_by: FlushedBy = FlushedBy.NONE
    why_not_flush: str = ""
    """A clause, for a kind that no flush reaches."""
    can_separate: bool = False
    """True if it can be told to keep prompts apart; without cache_isolation it is not."""
    is_as_described: bool = False
    """True if its description decides where it takes vLLM's `cache_salt` and `priority` (hive.backends.described)."""
    why_far: Callable[[ModelInfo], str] | None = None
    """Reason that requests for a model leave the box, a clause; empty if they stay. None: it answers all by itself."""

    category: str = ""
    """Of the models that it has, as `[model]` and `Endpoint` have it: `audio`, `image`; empty for those of text."""
    stops_late: bool = False
    """True if a request that is given up keeps its place until the server closes its connection: what it runs stops
    between two windows of sound, or two steps, only. It is told by a half-close."""
    is_remote: bool = False
    """An operator names its address. Whose it is nobody here knows: it may ask for a key, and for money."""
    is_canned: bool = False
    """It has no model and answers with canned text."""
    fetches: bool = False
    """It fetches and removes models by name."""
    model_format: str = ""
    """Format of the model files it reads (`model_files.Format`), if Hive starts it with one."""
    model_key: str = ""
    """The setting of `[inference]` that names them."""
    program: Callable[[InferenceSection], str] | None = None
    launch: Callable[[Order], Launch] | None = None
    """Makes the command that starts it; `launch.STARTED` lists the kinds that Hive starts."""
    sleeping: Sleeping | None = None
    """None where it cannot sleep."""

    def __repr__(self) -> str:
        return f"<BackendSpec {self.kind}>"

    def answers(self, dialect: Dialect, path: str, *, is_extra: bool) -> bool:
        """Whether it answers a path of this dialect by itself; `is_extra`: of those no kind has unless it says so."""
        return dialect in self.dialects and (path in self.adds if is_extra else path not in self.lacks)

    def can_keep_apart(self, endpoint: str) -> bool:
        """Whether prompts of this endpoint can be kept out of other groups' caches, where it can do so at all."""
        return not endpoint.startswith(self.requests.cannot_keep_apart)
