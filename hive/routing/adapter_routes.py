"""The adapters that requests may name, and what answers to each: the daemon's word, looked up by every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hive.domain import ModelInfo
from hive.errors import AdapterNotLoaded, Saturated
from hive.link.adapters import AdapterRoute
from hive.models.adapter_names import is_engine_name
from hive.models.names import spelled
from hive.routing.slot import Slot


class AdapterTable:
    """All adapters by name. `engines`: by the name as lists show it, the name by which its server knows the weights
    that answer to it now; a request that was read with another one is read again before it is sent. `has_any`: there is
    an adapter, loaded or not.

    >>> table = AdapterTable()
    >>> table.use([AdapterRoute(name="legal", base="tiny", at_server="legal@1"), AdapterRoute(name="old", base="tiny")])
    >>> table.engines, table.named("Legal").at_server, table.instead_of("legal"), table.instead_of("tiny")
    ({'legal': 'legal@1'}, 'legal@1', '', '')
    """

    def __init__(self) -> None:
        self.engines: Mapping[str, str] = {}
        self.has_any = False
        self._routes: dict[str, AdapterRoute] = {}

    def __repr__(self) -> str:
        return f"<AdapterTable {len(self.engines)} of {len(self._routes)} loaded>"

    def use(self, routes: Sequence[AdapterRoute]) -> None:
        """Takes the daemon's word."""
        self._routes = {spelled(route.name): route for route in routes}
        self.has_any = bool(routes)
        self.engines = {route.name: route.at_server for route in routes if route.at_server}

    def named(self, asked: str) -> AdapterRoute | None:
        """The adapter of this name."""
        return self._routes.get(spelled(asked)) if self._routes else None

    def instead_of(self, asked: str) -> str:
        """The model that answers for an adapter that is not loaded; empty where this is none. Raises AdapterNotLoaded
        where nothing does, Saturated where that is for a moment only."""
        route = self.named(asked)
        if route is None or route.at_server:
            return ""
        if route.is_coming:
            raise Saturated(f"the server of adapter {route.name} is starting", retry_after_s=1)
        if not route.instead:
            raise AdapterNotLoaded(f"adapter {route.name} is not loaded")
        return route.instead

    def told(self, asked: str, served: str) -> str:
        """The answerer, for the header that says so: the name with the digest, or the model that stands in; empty where
        no adapter was asked for."""
        if engine := self.engines.get(served):
            return engine
        return served if self.named(asked) is not None else ""

    def listed(
        self, models: Sequence[ModelInfo], pooled: Mapping[str, Slot], active: Slot
    ) -> list[tuple[ModelInfo, Slot]]:
        """Every loaded adapter as a model of its name, on its base, and the slot that answers."""
        by_name = {model.name: model for model in models}
        found = []
        for route in self._routes.values():
            slot = pooled.get(route.slot) if route.slot else active
            if not route.at_server or slot is None:
                continue
            like = by_name.get(route.base) or ModelInfo(name=route.base)
            found.append((as_adapter(like, route.name, route.base), slot))
        return found


def as_adapter(like: ModelInfo, name: str, base: str) -> ModelInfo:
    """The row of an adapter: as its base's, with its own name.

    >>> as_adapter(ModelInfo(name="tiny", context_length=64, digest="d"), "legal", "tiny").parent
    'tiny'
    """
    return ModelInfo(
        name=name,
        parent=base,
        owned_by=like.owned_by,
        created=like.created,
        parameters=like.parameters,
        quantization=like.quantization,
        context_length=like.context_length,
        capabilities=like.capabilities,
        template=like.template,
    )


def without_engine_names(models: Sequence[ModelInfo]) -> list[ModelInfo]:
    """A server's list without the names by which only Hive asks for adapters."""
    return [model for model in models if not (model.parent and is_engine_name(model.name))]
