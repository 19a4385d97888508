"""The models that are offered, and the one that a name means to a caller."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hive.domain import Caller, ModelInfo, Tier
from hive.errors import NotFound, Refusal
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
from hive.proxy.endpoints import Endpoint
from hive.proxy.lists import FILTERED, RUNNING, TAGS
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
        self._offers: tuple[Offer, ...] = ()
        self._preferences: Preferences = preferences_of(inference)
        self._routes: dict[tuple[str, Tier, frozenset[str] | None], Explained] = {}
        self._permits: dict[frozenset[str] | None, Permitted] = {}

    def __repr__(self) -> str:
        return f"<ModelRouting {len(self.models)} models, {len(self._routes)} names known>"

    @property
    def _aliases(self) -> Mapping[str, tuple[str, ...]]:
        return self._preferences.aliases

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
        """The name of the server's model that is meant; `asked` itself if no list is known. Raises NotFound, and
        Refusal for a far model that no setting names for this caller.

        llama-server answers to any name, and clients would believe it.
        """
        if not self.models and not self.where.can_be_far:
            return asked
        found = self._explained(asked, caller)
        if not found.model:
            raise (Refusal if found.is_far else NotFound)(found.why, hint=found.hint)
        return found.model

    def meant(self, asked: str) -> str:
        """The name by which it is judged whether a model may be used: of a dated alias the alias."""
        return undated(asked, self._aliases, self._offers)

    def _explained(self, asked: str, caller: Caller) -> Explained:
        key = (asked, caller.tier, caller.models)
        found = self._routes.get(key)
        if found is None:
            if len(self._routes) >= ROUTES_KEPT:
                self._routes.clear()
            permitted = self._permits.get(caller.models)
            if permitted is None:
                permitted = self._permits[caller.models] = permits(caller.models, self._aliases, self.where)
            asks = (caller.models, asked, caller.tier)
            found = self._routes[key] = explain_for(*asks, self._offers, self._preferences, self.where, permitted)
        return found

    # what a caller sees -----------------------------------------------------------------------------------------------

    def seen(self, endpoint: Endpoint, caller: Caller) -> list[ModelInfo]:
        """The models of the list that is asked for, and beside them every alias that leads this caller to one of them:
        what it may name, as far as `policy.may` lets it. An alias does not run, so of those that do there is none."""
        aliases = () if endpoint.target == RUNNING else self._aliases_of(caller)
        hidden = self._hidden_from(caller)
        there = [model for model in self.models if model.name not in hidden] if hidden else self.models
        return there + [model for model, _ in aliases]

    def differences(self, endpoint: Endpoint, caller: Caller) -> tuple[list[tuple[str, str]], frozenset[str]]:
        """The aliases this caller sees besides a server's own list, each with the model it stands for; and the models
        of the list that the caller does not see (`Answer`)."""
        if endpoint.needs_place:  # it asks a model, not about models
            return [], NOTHING_HIDDEN
        target = endpoint.target
        added = [(alias.name, model) for alias, model in self._aliases_of(caller)] if target == TAGS else []
        return added, self._hidden_from(caller) if target in FILTERED else NOTHING_HIDDEN

    def _hidden_from(self, caller: Caller) -> frozenset[str]:
        """Names of the far models that this caller may not use, so no list shows them to it."""
        far = self.where.far
        return frozenset(name for name in far if not self._is_named(name, caller)) if far else far

    def _is_named(self, model: str, caller: Caller) -> bool:
        return caller.models is not None and spelled(model) in named(caller.models, self._aliases)

    def _aliases_of(self, caller: Caller) -> list[tuple[ModelInfo, str]]:
        """Every alias as a model of that name, and the model it stands for, where that is there for this caller. A name
        that a model has is no alias."""
        found, by_name = [], {model.name: model for model in self.models}
        names = {offer.key for offer in self._offers}
        for alias in self._aliases:
            target = "" if alias in names else self._explained(alias, caller).model
            if target:
                found.append((msgspec.structs.replace(by_name[target], name=alias, parent=""), target))
        return found
