"""The models that are there: the one a request would be given, the names that lead to it, and its adapters. Pure; made
from one list of models and one state of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hive.domain import ModelInfo, Tier
from hive.errors import ModelNotFound, did_you_mean
from hive.models.names import spelled
from hive.models.routing import Explained, Offer, Preferences, explain, explain_for, models_of, offers_of
from hive.models.whereabouts import NOWHERE, Whereabouts


class Catalog:
    """One list of models. `where`: what of it leaves the box.

    >>> from hive.models.routing import preferences
    >>> there = [ModelInfo(name="llama3.2:q4_0"), ModelInfo(name="llama3.2:q8_0")]
    >>> catalog = Catalog(there, preferences(routing=True, aliases="fast = llama3.2:q4_0"))
    >>> [[str(tier) for tier in catalog.tiers(model.name)] for model in there]
    [['low'], ['medium', 'high']]
    >>> catalog.aliases("llama3.2:q4_0"), catalog.variants("llama3.2:q4_0"), catalog.find("fast").name
    (['fast'], ['llama3.2:q8_0'], 'llama3.2:q4_0')
    """

    def __init__(self, models: Sequence[ModelInfo], prefs: Preferences, where: Whereabouts = NOWHERE) -> None:
        self.models = list(models)
        self.where = where
        self._prefs = prefs
        self._offers = offers_of(models)

    def __repr__(self) -> str:
        return f"<Catalog of {len(self.models)} models>"

    def given(self, asked: str, tier: Tier, limits: str = "") -> Explained:
        """The model that a request for `asked` is given; `limits`: `[tenant] models` of the caller, empty for none."""
        return explain_for(models_of(limits), asked, tier, self._offers, self._prefs, self.where)

    def tiers(self, name: str) -> list[Tier]:
        """The tiers that are given this one for its name without a variant; all of them where no tier makes a
        difference, because routing is off or there is an adapter on a model; none of them where it is far."""
        offer = self._offer(name)
        if name in self.where.far:
            return []
        if not self._prefs.routing or offer.ref.adapter:
            return list(Tier)
        return [tier for tier in Tier if self._by_tier.get((offer.model, tier)) == name]

    @cached_property
    def _by_tier(self) -> dict[tuple[tuple[str, str, str], Tier], str]:
        whole = {offer.model for offer in self._offers if not offer.ref.adapter}
        found: dict[tuple[tuple[str, str, str], Tier], str] = {}
        for model in whole:
            base, publisher, revision = model
            asked = f"{publisher}/{base}" if publisher else base
            asked = f"{asked}@{revision}" if revision else asked
            found |= {
                (model, tier): explain(asked, tier, self._offers, self._prefs, self.where.is_near).model
                for tier in Tier
            }
        return found

    def aliases(self, name: str) -> list[str]:
        """Names of the settings' making that lead to it, for one tier at least."""
        return [alias for alias in sorted(self._prefs.aliases) if name in self._led_to(alias)]

    def _led_to(self, alias: str) -> set[str]:
        return {explain(alias, tier, self._offers, self._prefs).model for tier in Tier}

    def targets(self) -> dict[str, list[str]]:
        """Every alias, and its targets."""
        return {alias: list(targets) for alias, targets in sorted(self._prefs.aliases.items())}

    def variants(self, name: str) -> list[str]:
        """The same model in other quantizations."""
        offer = self._offer(name)
        same = [one.name for one in self._offers if one.model == offer.model and not one.ref.adapter]
        return [] if offer.ref.adapter else sorted(one for one in same if one != name)

    def adapters(self, name: str) -> list[str]:
        """The adapters on it that are there."""
        return sorted(model.name for model in self.models if model.parent == name)

    def quantization(self, model: ModelInfo) -> str:
        """The quantization in the server's words, else by the name, else empty."""
        variant = self._offer(model.name).ref.variant
        return model.quantization or ("" if variant is None else variant.name)

    def base(self, name: str) -> str:
        """The name of the model without its variant, as routing reads it."""
        return self._offer(name).ref.base

    def find(self, asked: str) -> ModelInfo:
        """The model that is there under this name, or for this alias. Raises ModelNotFound with the nearest name."""
        key = spelled(asked)
        same = [model for model in self.models if spelled(model.name) == key]
        same.sort(key=lambda model: model.name != asked)
        if not same and key in self._prefs.aliases:
            led_to = self._led_to(key) - {""}
            same = [model for model in self.models if model.name in led_to]
        if same:
            return same[0]
        names = [*(model.name for model in self.models), *self._prefs.aliases]
        hint = did_you_mean(asked[:80], names) or "hive model list shows what there is"
        raise ModelNotFound(f"there is no model {asked[:80]!r}", hint=hint)

    def _offer(self, name: str) -> Offer:
        return next(offer for offer in self._offers if offer.name == name)
