"""The models that are offered, and the one that a name means to a caller."""

from __future__ import annotations

import msgspec

from hive.domain import Caller, ModelInfo, Tier
from hive.endpoints.endpoints import Endpoint
from hive.endpoints.lists import FILTERED, RUNNING, TAGS
from hive.errors import ModelNotFound, Refusal
from hive.models.names import spelled
from hive.models.routing import (
    Explained,
    Offer,
    Permitted,
    Preferences,
    explain_for,
    offers_of,
    permits,
    preferences_of,
    undated,
)
from hive.models.whereabouts import NOWHERE, Whereabouts, named
from hive.policy import Act, may
from hive.settings.table import InferenceSection

NOTHING_HIDDEN: frozenset[str] = frozenset()
ROUTES_KEPT = 4096
"""Names asked for, by tier and permitted models; clients may ask for any."""


class ModelRouting:
    """The models of all servers, with the operator's aliases and preferences. What was found for a name is kept until
    the models or the settings change.

    `where`: the models that are near, and those that are far.
    """

    def __init__(self, inference: InferenceSection) -> None:
        self.models: list[ModelInfo] = []
        self.where: Whereabouts = NOWHERE
        self.ladders: dict[str, tuple[str, ...]] = {}
        """The models of each task, by the names that lists show of it."""
        self._offers: tuple[Offer, ...] = ()
        self._preferences: Preferences = preferences_of(inference)
        self._routes: dict[tuple[str, Tier, frozenset[str] | None], Explained] = {}
        self._permits: dict[frozenset[str] | None, Permitted] = {}

    def __repr__(self) -> str:
        return f"<ModelRouting {len(self.models)} models, {len(self._routes)} names known>"

    def use_settings(self, inference: InferenceSection) -> None:
        self._preferences = preferences_of(inference)
        self._forget()

    def use(self, models: list[ModelInfo], where: Whereabouts) -> None:
        """Takes the models that are offered from now on."""
        self.models, self.where = models, where
        self._offers = offers_of(models)
        self._forget()

    def _forget(self) -> None:
        self._routes.clear()
        self._permits.clear()

    # the model that is meant ------------------------------------------------------------------------------------------

    def served(self, asked: str, caller: Caller) -> str:
        """The name of the server's model that is meant; `asked` itself if no list is known. Raises ModelNotFound, and
        Refusal for a far model that no setting names for this caller.

        llama-server answers to any name, and clients would believe it.
        """
        if not self.models and not self.where.can_be_far:
            return asked
        found = self._explained(asked, caller)
        if not found.model:
            raise (Refusal if found.is_far else ModelNotFound)(found.why, hint=found.hint)
        return found.model

    def targets_of(self, asked: str) -> tuple[str, ...]:
        """The models that an alias names; none where this is no alias."""
        return self._preferences.aliases.get(spelled(asked), ())

    def is_later_target(self, asked: str, caller: Caller) -> bool:
        """Whether the model that this name means to the caller stands in for an earlier target of an alias."""
        return bool(self.models) and self._explained(asked, caller).rung > 0

    def meant(self, asked: str) -> str:
        """The name by which it is judged whether a model may be used: of a dated alias the alias."""
        return undated(asked, self._preferences.aliases, self._offers)

    def _explained(self, asked: str, caller: Caller) -> Explained:
        return self._routes.get((asked, caller.tier, caller.models)) or self._explain(asked, caller)

    def _explain(self, asked: str, caller: Caller) -> Explained:
        if len(self._routes) >= ROUTES_KEPT:
            self._routes.clear()
        permitted = self._permits.get(caller.models)
        if permitted is None:
            permitted = self._permits[caller.models] = permits(caller.models, self._preferences.aliases, self.where)
        asks = (caller.models, asked, caller.tier)
        found = explain_for(*asks, self._offers, self._preferences, self.where, permitted)
        self._routes[asked, caller.tier, caller.models] = found
        return found

    # what a caller sees -----------------------------------------------------------------------------------------------

    def seen(self, endpoint: Endpoint, caller: Caller) -> list[ModelInfo]:
        """The models of the list that is asked for, and beside them every alias that leads this caller to one of them,
        and every task with a model that it may use: what it may name, as far as `policy.may` lets it (`looker`). None
        of these runs, so of those that do there is none."""
        aliases = () if endpoint.target == RUNNING else [*self._aliases_of(caller), *self._tasks_of(caller)]
        hidden = self._hidden_from(caller)
        there = [model for model in self.models if model.name not in hidden] if hidden else self.models
        return there + [model for model, _ in aliases]

    def differences(self, endpoint: Endpoint, caller: Caller) -> tuple[list[tuple[str, str]], frozenset[str], Caller]:
        """The aliases and tasks this caller sees besides a server's own list, each with the model it stands for; the
        models of the list that the caller does not see; and the caller as lists judge it (`Answer`)."""
        if endpoint.needs_place:  # it asks a model, not about models
            return [], NOTHING_HIDDEN, caller
        target = endpoint.target
        if target != TAGS:
            return [], self._hidden_from(caller) if target in FILTERED else NOTHING_HIDDEN, caller
        added = [(named.name, model) for named, model in (*self._aliases_of(caller), *self._tasks_of(caller))]
        return added, self._hidden_from(caller), self.looker(caller)

    def looker(self, caller: Caller) -> Caller:
        """The caller as lists judge it: it sees the tasks that it may ask, which no list of a tenant names."""
        if caller.models is None or not self.ladders:
            return caller
        names = frozenset(task.name for task, _ in self._tasks_of(caller))
        return msgspec.structs.replace(caller, models=caller.models | names) if names else caller

    def _tasks_of(self, caller: Caller) -> list[tuple[ModelInfo, str]]:
        """Every task as a model of that name, and the first of its models that this caller may use and that is there;
        for an alias of a task the same."""
        by_name = {model.name: model for model in self.models} if self.ladders else {}
        found = []
        for name, rungs in self.ladders.items():
            usable = (self._explained(rung, caller).model for rung in rungs if self._may_ask(rung, caller))
            target = next((model for model in usable if model in by_name), "")
            if target:
                found.append((msgspec.structs.replace(by_name[target], name=name, parent=""), target))
        return found

    def _may_ask(self, name: str, caller: Caller) -> bool:
        return may(caller, Act.USE, self.meant(name)) is None

    def _hidden_from(self, caller: Caller) -> frozenset[str]:
        """Names of the far models that this caller may not use, so no list shows them to it."""
        far = self.where.far
        return frozenset(name for name in far if not self._is_named(name, caller)) if far else far

    def _is_named(self, model: str, caller: Caller) -> bool:
        return caller.models is not None and spelled(model) in named(caller.models, self._preferences.aliases)

    def _aliases_of(self, caller: Caller) -> list[tuple[ModelInfo, str]]:
        """Every alias as a model of that name, and the model it stands for, where that is there for this caller. A name
        that a model has is no alias."""
        found, by_name = [], {model.name: model for model in self.models}
        names = {offer.key for offer in self._offers}
        for alias in self._preferences.aliases:
            target = "" if alias in names else self._explained(alias, caller).model
            if target:
                found.append((msgspec.structs.replace(by_name[target], name=alias, parent=""), target))
        return found
