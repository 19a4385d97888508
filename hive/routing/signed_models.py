"""The models that may be asked of an active backend that loads by itself, where a rule wants signed loads."""

from __future__ import annotations

from hive.backends.kinds import spec_of
from hive.domain import BackendInfo
from hive.errors import NotApproved
from hive.link.signed_loads import SignedLoads
from hive.models.names import spelled


class SignedModels:
    """The daemon's word on them. `has_rule` False: all may be asked."""

    def __init__(self) -> None:
        self.has_rule = False
        self._address = ""
        self._names = frozenset[str]()

    def __repr__(self) -> str:
        return f"<SignedModels {len(self._names) if self.has_rule else 'no rule'}>"

    def learn(self, told: SignedLoads) -> None:
        self.has_rule, self._address = told.models is not None, told.address
        self._names = frozenset(map(spelled, told.models or ()))

    def check(self, model: str, backend: BackendInfo | None) -> None:
        """Raises NotApproved for a model that this server would load for the request. Of a server that nothing was told
        of yet that is any.

        >>> signed, server = SignedModels(), BackendInfo(kind="ollama", address="h:1")
        >>> signed.learn(SignedLoads(address="h:1", models=["tiny:latest"]))
        >>> signed.check("Tiny", server)
        >>> signed.check("big", server)
        Traceback (most recent call last):
        hive.errors.NotApproved: the model big is not loaded, and no signed load of it is on record
        """
        if not model or backend is None or spec_of(backend.kind).asking.load is None:
            return
        if backend.address != self._address or spelled(model) not in self._names:
            raise NotApproved(f"the model {model[:80]} is not loaded, and no signed load of it is on record")
