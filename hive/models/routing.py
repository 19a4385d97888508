"""The choice of the model for a request: `route`. Pure; it runs once a name, tier and list of models.

In this order, and every step is told in words (`hive model route`):
1. An alias stands for the first of its targets that is there.
2. With routing off a model is taken if it is there under that very name. `x` and `x:latest` are one, case is not looked
   at, and what is not there is refused here, also if the server would answer (llama-server answers to every name).
3. With routing on a name stands for one model in all variants that are there. Another size, purpose, publisher or
   adapter is another model and never taken instead. Only where nothing has the name asked for may a publisher, size or
   `instruct` be left out, and only if all that is there with more in its name is one model. A tier's list may name
   another publisher's variant of the same model.
4. A variant that the name itself spells is taken if it is there: `llama3.2:q8_0` means just that one. `[tenant] models`
   may forbid it, and `cap_explicit` holds it to the tier all the same.
5. Else the tier's list in its order; then the largest that is no larger than the largest of that list (so AWQ is low's
   and FP8 medium's, where those are what there is); then one of unknown size, as the server offers nothing better;
   then, if `allow_larger`, the smallest of the rest. A spelled variant that is not there bounds this like the list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from hive.domain import ModelInfo, Tier
from hive.errors import ConfigError, ModelNotFound
from hive.models.names import ModelRef, Quantization, leaves_out_only_size_and_purpose, parse, quantization_of, spelled
from hive.models.whereabouts import HINT, NOWHERE, Whereabouts, is_of_the_cloud, named, would_leave
from hive.settings.table import InferenceSection

TIER_QUANTIZATIONS: dict[Tier, tuple[str, ...]] = {
    Tier.LOW: ("q4_0", "q4_K_M", "q4_K_S"),
    Tier.MEDIUM: ("q8_0", "q5_K_M", "q5_K_S"),
    Tier.HIGH: ("f16", "q8_0"),
}
"""seeds/000 §4, TIER_QUANT_MAP."""
MOST_NAMED = 5
"""Models named in an error or a step; a server may have hundreds."""
SHOWN = 80
"""Characters of a client's name that are said again."""

Permitted = Callable[[str], bool]


class WantedVariant(msgspec.Struct, frozen=True):
    """One item of a tier's list: a quantization, or the model of that name where it is none."""

    text: str
    key: str
    quantization: Quantization | None


class Preferences(msgspec.Struct, frozen=True):
    """The settings for routing; made by `preferences`. `aliases`: spelled name → targets."""

    tiers: Mapping[Tier, tuple[WantedVariant, ...]]
    routing: bool = False
    allow_larger: bool = False
    cap_explicit: bool = False
    aliases: Mapping[str, tuple[str, ...]] = {}


class Offer(msgspec.Struct, frozen=True):
    """A model that is there, its name taken apart once.

    `bits`: of a weight: nominal where its quantization is known, else measured, None where neither is told.
    """

    name: str
    key: str
    ref: ModelRef
    bits: float | None
    model: tuple[str, str, str]
    """Equal for all variants of one model."""


class Routed(msgspec.Struct, frozen=True):
    """The model taken, by the server's name; why, and all steps that led there, each a line for a person. `rung`: which
    target of an alias it is, 0 for its first, and for a model that was named itself."""

    model: str
    why: str
    steps: tuple[str, ...]
    rung: int = 0


class Explained(msgspec.Struct, frozen=True):
    """`Routed`, or the reason why nothing was: `model` is empty then, `why` and `hint` are the refusal's. `is_far`:
    there is a far model of this name, and no setting permits its use."""

    model: str
    why: str
    steps: tuple[str, ...]
    hint: str = ""
    is_far: bool = False
    rung: int = 0


# what the settings and the server say ---------------------------------------------------------------------------------


def preferences(
    *,
    routing: bool = False,
    tiers: Mapping[Tier, str] | None = None,
    allow_larger: bool = False,
    cap_explicit: bool = False,
    aliases: str = "",
) -> Preferences:
    """Preferences from the settings' texts; an empty list of a tier leaves the default. Raises ConfigError
    (`aliases_of`).

    >>> [wanted.text for wanted in preferences(tiers={Tier.LOW: "q3_K_M, q4_0"}).tiers[Tier.LOW]]
    ['q3_K_M', 'q4_0']
    """
    own = {tier: _wanted(_items(text)) for tier, text in (tiers or {}).items()}
    lists = {tier: own.get(tier) or default for tier, default in _DEFAULT.items()}
    return Preferences(lists, routing, allow_larger, cap_explicit, aliases_of(aliases))


def _wanted(items: Iterable[str]) -> tuple[WantedVariant, ...]:
    return tuple(WantedVariant(item, spelled(item), quantization_of(item)) for item in items)


_DEFAULT = {tier: _wanted(items) for tier, items in TIER_QUANTIZATIONS.items()}


def preferences_of(settings: InferenceSection) -> Preferences:
    """`preferences` of hive.conf. Raises ConfigError."""
    low, medium, high = settings.tier_low_models, settings.tier_medium_models, settings.tier_high_models
    return preferences(
        routing=settings.quantization_routing,
        tiers={Tier.LOW: low, Tier.MEDIUM: medium, Tier.HIGH: high},
        allow_larger=settings.tier_allow_larger,
        cap_explicit=settings.tier_caps_explicit,
        aliases=settings.aliases,
    )


def _items(text: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(item for part in text.split(separator) if (item := part.strip()))


def aliases_of(text: str) -> dict[str, tuple[str, ...]]:
    """`gpt-4 = llama3.2, fast = llama3.2:1b | Llama-3.2-1B` as spelled name → targets, the first that is there counts.

    A target is a model's name, never another alias: one would have to be read to know what the other means, and two
    could lead to each other. It may be the alias's own name. A second entry for an alias adds to its list. Raises
    ConfigError.

    >>> aliases_of("gpt-4 = llama3.2, fast = llama3.2:1b | meta-llama/Llama-3.2-1B")
    {'gpt-4': ('llama3.2',), 'fast': ('llama3.2:1b', 'meta-llama/Llama-3.2-1B')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for item in _items(text):
        name, _, targets = item.partition("=")
        key = spelled(name)
        if not key or not _items(targets, "|"):
            raise ConfigError(f"an alias is NAME = TARGET, not {item[:SHOWN]!r}")
        found[key] = found.get(key, ()) + _items(targets, "|")
    return found


_DATED = re.compile(r"(claude-[a-z0-9.-]+?)(?:[-@]20[0-9]{6}|-latest)")


def undated(asked: str, aliases: Mapping[str, tuple[str, ...]], offers: Sequence[Offer]) -> str:
    """The alias that is meant by one of Claude's dated names; the name itself where it is an alias or a model, or where
    there is none for it. Anthropic's clients name a model with and without the date.

    >>> undated("claude-sonnet-4-5-20250929", {"claude-sonnet-4-5": ("m",)}, [])
    'claude-sonnet-4-5'
    >>> undated("claude-opus-4-1-20250805", {"claude-sonnet-4-5": ("m",)}, []), undated("llama3.2", {}, [])
    ('claude-opus-4-1-20250805', 'llama3.2')
    """
    if not aliases or asked[:7].lower() != "claude-":
        return asked
    key = spelled(asked)
    found = _DATED.fullmatch(key)
    if found is None or key in aliases or found[1] not in aliases or any(one.key == key for one in offers):
        return asked
    return found[1]


def offers_of(models: Iterable[ModelInfo | str]) -> tuple[Offer, ...]:
    """The offers of a server, ready for `route`; made once for each list, 10 to 30 µs a model."""
    return tuple(
        offer(model)
        if isinstance(model, str)
        else offer(
            model.name,
            quantization=model.quantization,
            size_bytes=model.size_bytes,
            parameters=model.parameters,
            parent=model.parent,
        )
        for model in models
    )


def offer(
    name: str,
    *,
    quantization: str = "",
    size_bytes: int | None = None,
    parameters: int | None = None,
    parent: str = "",
) -> Offer:
    """One model, with the server's facts about it. These go before the parts of its name.

    `quantization`: in its words (Ollama's `quantization_level`). `size_bytes` and `parameters` (llama-server's `meta`):
    together the bits of a weight, looked at where no quantization is known. `parent`: the model this is an
    adapter on (vLLM).

    >>> offer("tiny", size_bytes=1_125_000_000, parameters=2_000_000_000).bits
    4.5
    >>> offer("support", parent="Llama-3.2-3B-AWQ").ref
    ModelRef(base='llama-3.2-3b', variant=Quantization(name='AWQ', bits=4.16, family=<Family.AWQ: 'awq'>), \
adapter='support', revision='', publisher='')
    """
    ref = parse(parent or name)
    told = quantization_of(quantization) or ref.variant
    measured = size_bytes * 8 / parameters if size_bytes and parameters else None
    ref = msgspec.structs.replace(ref, variant=told, adapter=name if parent else "")
    return Offer(name, spelled(name), ref, told.bits if told else measured, _model_of(ref))


def models_of(text: str) -> frozenset[str] | None:
    """The names a tenant is limited to, as `policy.may` compares them; None for all.

    >>> sorted(models_of("llama3.2:latest, qwen") or ())
    ['llama3.2', 'qwen']
    """
    names = frozenset(name.strip().removesuffix(":latest") for name in text.split(",")) - {""}
    return names or None


def permits(
    models: frozenset[str] | None, aliases: Mapping[str, tuple[str, ...]], where: Whereabouts = NOWHERE
) -> Permitted:
    """The models that may be taken for a caller limited to `models` (`policy.may` judges the name it asks for).

    A listed model stands for its variants, unless a variant of it is listed: then for that one alone. A listed alias
    stands for its targets. Nothing is left out of names here: a list with `llama3.1` does not permit `llama3.1:405b`. A
    far model (`where`) is taken only for a caller with that very one listed.

    >>> may_take = permits(frozenset({"llama3.2", "fast"}), {"fast": ("qwen3:4b-q4_0",)})
    >>> [may_take(name) for name in ("llama3.2:q8_0", "llama3.2:70b", "qwen3:4b-q4_0", "qwen3:4b-q8_0")]
    [True, False, True, False]
    """
    if models is None:
        return where.is_near
    listed = named(models, aliases)
    refs = [parse(name) for name in listed]
    narrowed = {_model_of(ref) for ref in refs if ref.variant is not None}
    whole = {_model_of(ref) for ref in refs} - narrowed

    @lru_cache(maxsize=1024)  # it is asked of every name there is, and a name takes 20 µs to read
    def may_take(name: str) -> bool:
        return spelled(name) in listed or (_model_of(parse(name)) in whole and where.is_near(name))

    return may_take


def _model_of(ref: ModelRef) -> tuple[str, str, str]:
    return ref.base, ref.publisher, ref.revision


# the decision ---------------------------------------------------------------------------------------------------------


def route(
    asked: str, tier: Tier, offers: Sequence[Offer], prefs: Preferences, permitted: Permitted = lambda _: True
) -> Routed:
    """The model that a request for `asked` of an agent of `tier` is given; the module says how. Raises ModelNotFound.

    `permitted`: what is not permitted is as if it were not there, but for the question which model a name means. The
    order of `offers` does not matter. With 50 of them 10 to 70 µs, a refusal up to 300 µs.

    >>> there = offers_of(["llama3.2:q4_0", "llama3.2:q8_0", "llama3.2:1b-q4_0"])
    >>> print("\\n".join(route("llama3.2", Tier.LOW, there, preferences(routing=True)).steps))
    asked for llama3.2, tier low
    tier low prefers q4_0, q4_K_M, q4_K_S
    there are llama3.2:q4_0 (Q4_0), llama3.2:q8_0 (Q8_0)
    takes llama3.2:q4_0: q4_0 is the first of tier low that is there
    >>> route("llama3.2:q8_0", Tier.LOW, there, preferences()).why
    'it is there under this name'
    >>> route("llama3", Tier.LOW, there, preferences())
    Traceback (most recent call last):
    hive.errors.ModelNotFound: model 'llama3' not found
    """
    return _Routing(tier, offers, prefs, permitted).route(asked)


def explain(
    asked: str, tier: Tier, offers: Sequence[Offer], prefs: Preferences, permitted: Permitted = lambda _: True
) -> Explained:
    """`route`, where a refusal is an answer too: its steps up to there.

    >>> found = explain("llama3", Tier.LOW, offers_of(["llama3.2:q4_0"]), preferences())
    >>> found.steps[0], found.why, found.hint
    ('asked for llama3, tier low', "model 'llama3' not found", 'there is llama3.2:q4_0')
    """
    routing = _Routing(tier, offers, prefs, permitted)
    try:
        routed = routing.route(asked)
    except ModelNotFound as error:
        return Explained("", error.message, (*routing.steps, f"takes none: {error.message}"), error.hint)
    return Explained(routed.model, routed.why, routed.steps, rung=routed.rung)


def explain_for(
    models: frozenset[str] | None,
    asked: str,
    tier: Tier,
    offers: Sequence[Offer],
    prefs: Preferences,
    where: Whereabouts,
    permitted: Permitted | None = None,
) -> Explained:
    """`explain` for a caller limited to `models` (None: no limit). A far model counts as if it were not there, and the
    caller is told so. `permitted`: `permits` of these, if that is made already.

    >>> models = [ModelInfo(name="x:q8_0"), ModelInfo(name="x:q4_0", remote_host="https://h")]
    >>> found = (offers_of(models), preferences(routing=True), Whereabouts(lambda model: model.remote_host, models))
    >>> explain_for(None, "x", Tier.HIGH, *found).model, explain_for(None, "x", Tier.LOW, *found).is_far
    ('x:q8_0', True)
    >>> explain_for(frozenset({"x:q4_0"}), "x:q4_0", Tier.LOW, *found).model
    'x:q4_0'
    """
    near = explain(asked, tier, offers, prefs, permitted or permits(models, prefs.aliases, where))
    if near.model:
        return near
    if is_of_the_cloud(asked) and spelled(asked) in named(models, prefs.aliases):  # Ollama has it without having it
        why = "an operator named it"
        return Explained(asked, why, (near.steps[0], f"takes {asked[:SHOWN]}: {why}"))
    far = explain(asked, tier, offers, prefs, permits(models, prefs.aliases))
    model = far.model or asked
    why = where.why_far(model) if far.model or is_of_the_cloud(asked) else ""
    if not why:
        return near
    why = would_leave(model, why)
    return Explained("", why, (*far.steps[:-1], f"takes none: {why}"), HINT, is_far=True)


class _Routing:
    """One decision while it is made; `steps` grows."""

    def __init__(self, tier: Tier, offers: Sequence[Offer], prefs: Preferences, permitted: Permitted) -> None:
        self._tier = tier
        self._offers = offers
        self._prefs = prefs
        self._permitted = permitted
        self.steps: list[str] = []

    def route(self, asked: str) -> Routed:
        self.steps.append(f"asked for {asked[:SHOWN] or 'no model'}, tier {self._tier}")
        if not asked:
            return self._the_only_one()
        targets = self._prefs.aliases.get(spelled(undated(asked, self._prefs.aliases, self._offers)))
        if targets is not None:
            self.steps.append(f"{asked[:SHOWN]} is an alias of {', or else '.join(targets)}")
        if not self._prefs.routing:
            self.steps.append("no variant is chosen by tier: quantization_routing is off")
        for rung, target in enumerate(targets or (asked,)):
            routed = self._by_tier(target) if self._prefs.routing else self._as_named(target)
            if routed is not None:
                return msgspec.structs.replace(routed, rung=rung) if rung else routed
            if targets is not None:
                self.steps.append(f"{target} is not there")
        raise ModelNotFound(f"model '{asked[:SHOWN]}' not found", hint=self._what_there_is(asked))

    def _the_only_one(self) -> Routed:
        there = [one for one in self._offers if self._permitted(one.name)]
        if len(there) != 1:
            raise ModelNotFound("the request names no model", hint=self._what_there_is(""))
        return self._take(there[0], "there is no other one")

    def _as_named(self, target: str) -> Routed | None:
        found = self._named(target)
        return None if found is None else self._take(found, "it is there under this name")

    def _named(self, target: str) -> Offer | None:
        """The one of this name, letter by letter if there is such a one."""
        key = spelled(target)
        found = [one for one in self._offers if one.key == key and self._permitted(one.name)]
        return min(found, key=lambda one: (one.name != target, one.name), default=None)

    def _by_tier(self, target: str) -> Routed | None:
        named = self._named(target)
        if named is not None and named.ref.adapter:
            return self._take(named, "an adapter has no other variants")
        asked = parse(target)
        list_ = self._prefs.tiers[self._tier]
        same = [one for one in self._meant(target, asked, list_) if self._permitted(one.name)]
        if not same:
            return None
        self.steps.append(f"tier {self._tier} prefers {', '.join(wanted.text for wanted in list_)}")
        self.steps.append(f"there {'is' if len(same) == 1 else 'are'} {_listed(same)}")
        most = self._most(list_, same)
        if asked.variant is not None:
            spelled_out = named or _first(one for one in same if one.ref.variant == asked.variant)
            if spelled_out is not None and not (self._prefs.cap_explicit and _is_larger(spelled_out, most)):
                return self._take(spelled_out, f"{asked.variant.name} was asked for by name")
            if spelled_out is not None:
                self.steps.append(f"{asked.variant.name} is larger than tier {self._tier} may have, also by name")
            else:
                self.steps.append(f"{asked.variant.name} is not there: nothing larger is taken for it")
                most = min(most, asked.variant.bits)
        found = self._preferred(list_, same, most) or self._fallback(same, most, named)
        if found is None:
            raise self._too_large(target, same)
        return self._take(*found)

    def _meant(self, target: str, asked: ModelRef, list_: Sequence[WantedVariant]) -> list[Offer]:
        """All variants of the one model that a name means; empty where it is not there. Raises ModelNotFound for two.

        Another publisher's is among them where the tier's list names it.
        """
        model, base = _model_of(asked), asked.base
        found = [one for one in self._offers if one.model == model]
        if not found:
            found = [one for one in self._offers if one.ref.base == base and _says_no_other(one.ref, asked)]
        if not found and not asked.publisher:
            found = [one for one in self._offers if leaves_out_only_size_and_purpose(base, one.ref.base)]
        found = [one for one in found if not one.ref.adapter]
        if len({one.model for one in found}) > 1:
            seen = [one for one in found if self._permitted(one.name)]
            if not seen:
                return []
            raise ModelNotFound(
                f'"{target[:SHOWN]}" may be more than one model here', hint=f"name one: {_listed(seen)}"
            )
        if found:
            keys = {wanted.key for wanted in list_ if wanted.quantization is None}
            found += [one for one in self._offers if one.key in keys and _is_anothers(one, found[0])]
        return found

    def _most(self, list_: Sequence[WantedVariant], same: Sequence[Offer]) -> float:
        """Bits of the largest that the tier may have by its list; where that names models of unknown size only, by the
        default list."""
        keys = {wanted.key for wanted in list_ if wanted.quantization is None}
        known = [one.bits for one in same if one.bits is not None and one.key in keys]
        known += [wanted.quantization.bits for wanted in list_ if wanted.quantization is not None]
        return max(known, default=0) or self._most(_DEFAULT[self._tier], same)

    def _preferred(
        self, list_: Sequence[WantedVariant], same: Sequence[Offer], most: float
    ) -> tuple[Offer, str] | None:
        """The first item of the tier's list that is there, and why it."""
        for wanted in list_:
            if wanted.quantization is not None:
                found = [one for one in same if one.ref.variant == wanted.quantization]
            else:
                found = [one for one in same if one.key == wanted.key]
            one = _first(one for one in found if not _is_larger(one, most))
            if one is not None:
                return one, f"{wanted.text} is the first of tier {self._tier} that is there"
        return None

    def _fallback(self, same: Sequence[Offer], most: float, named: Offer | None) -> tuple[Offer, str] | None:
        """The variant taken if none of the list is there, and the reason; of equal ones the one that was named."""
        known = [(one.bits, one is not named, one.name, one) for one in same if one.bits is not None]
        small = [row for row in known if not _is_larger(row[3], most)]
        if small:
            found = min(small, key=lambda row: (-row[0], *row[1:3]))[3]
            return found, f"the largest there that tier {self._tier} may have"
        unknown = [one for one in same if one.bits is None]
        if unknown:
            one = min(unknown, key=lambda one: (one is not named, one.name))
            return one, "nothing says how large it is, and nothing smaller is there"
        if self._prefs.allow_larger and known:
            found = min(known, key=lambda row: row[:3])[3]
            return found, f"larger than tier {self._tier} prefers, which is allowed (tier_allow_larger)"
        return None

    def _take(self, found: Offer, why: str) -> Routed:
        self.steps.append(f"takes {found.name}: {why}")
        return Routed(found.name, why, tuple(self.steps))

    def _too_large(self, target: str, same: Sequence[Offer]) -> ModelNotFound:
        return ModelNotFound(
            f'every variant of "{target[:SHOWN]}" that is there is larger than tier {self._tier} may have',
            hint=f"there is {_listed(same)}; [inference] tier_allow_larger = true lets a larger one be taken",
        )

    def _what_there_is(self, asked: str) -> str:
        """The nearest names first: those that begin alike. No edit distance, which takes milliseconds on the loop."""
        key = spelled(asked)
        there = [one for one in self._offers if self._permitted(one.name)]
        there.sort(key=lambda one: (-_alike(key, one.key), one.name))
        if not there:
            return "the inference server offers no model; see `hive backend status`"
        more = f" and {len(there) - MOST_NAMED} more" if len(there) > MOST_NAMED else ""
        return f"there is {', '.join(one.name for one in there[:MOST_NAMED])}{more}"


def _alike(one: str, other: str) -> int:
    """The number of characters at the beginning that both share."""
    at, most = 0, min(len(one), len(other))
    while at < most and one[at] == other[at]:
        at += 1
    return at


def _says_no_other(there: ModelRef, asked: ModelRef) -> bool:
    """Whether publisher and revision are equal wherever both names say one."""
    return (not there.publisher or not asked.publisher or there.publisher == asked.publisher) and (
        not asked.revision or there.revision == asked.revision
    )


def _is_anothers(one: Offer, other: Offer) -> bool:
    """Whether it is the same model of another publisher or revision."""
    return one.ref.base == other.ref.base and one.model != other.model and not one.ref.adapter


def _is_larger(one: Offer, most: float) -> bool:
    """Nominal bits are compared as they are. Measured ones by whole bits: a file holds more than its weights, so a
    Q8_0 measures 8.508 bits a weight where 8.5 are nominal."""
    if one.bits is None:
        return False
    return one.bits > most if one.ref.variant is not None else int(one.bits) > int(most)


def _first(offers: Iterable[Offer]) -> Offer | None:
    return min(offers, key=lambda one: one.name, default=None)


def _listed(offers: Sequence[Offer]) -> str:
    shown = sorted(offers, key=lambda one: one.name)[:MOST_NAMED]
    more = f" and {len(offers) - MOST_NAMED} more" if len(offers) > MOST_NAMED else ""
    return ", ".join(f"{one.name} ({_variant(one)})" for one in shown) + more


def _variant(one: Offer) -> str:
    if one.ref.variant is not None:
        return one.ref.variant.name
    return "size unknown" if one.bits is None else f"{one.bits:.3g} bits a weight"
