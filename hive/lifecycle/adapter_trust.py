"""Whether an installed adapter may be loaded, by the keys that are trusted now. Pure but for reading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hive.adapters.keys import TrustedKeys
from hive.adapters.record import VERIFIED, AdapterRecord
from hive.errors import SignatureUnverifiable
from hive.settings.adapters import REQUIRED
from hive.shapes.adapters import AdapterKeys


class KeysSeen(NamedTuple):
    """The keys as they are in their directory at one moment, by their ids."""

    trusted: frozenset[str] = frozenset()
    revoked: frozenset[str] = frozenset()
    directory: str = ""

    @classmethod
    def of(cls, keys: TrustedKeys) -> KeysSeen:
        """Reads the directory. Raises as that does."""
        return cls(frozenset(keys.trusted()), frozenset(keys.revoked()), str(keys.directory))

    def view(self, records: Sequence[AdapterRecord]) -> AdapterKeys:
        """The same for the API, with what each key has verified."""
        return {
            "dir": self.directory,
            "keys": [
                {
                    "id": key_id,
                    "revoked": key_id in self.revoked,
                    "adapters": [record.engine_name for record in records if record.key_id == key_id],
                }
                for key_id in sorted(self.trusted | self.revoked)
            ],
        }


def not_trusted(record: AdapterRecord, keys: KeysSeen, policy: str) -> SignatureUnverifiable | None:
    """The error of a load of it; None where it may be loaded. What a revoked key signed never is, whatever the policy.

    >>> record = AdapterRecord(name="a", digest="0" * 64, base="m", format="gguf", rank=8, bytes=1, files=(),
    ...                        signature="verified", key_id="k1", installed_at=0.0)
    >>> [not_trusted(record, KeysSeen(frozenset({"k1"})), policy) for policy in ("required", "off")]
    [None, None]
    >>> print(not_trusted(record, KeysSeen(revoked=frozenset({"k1"})), "off"))
    a@000000000000 was signed with key k1, which is revoked
    >>> print(not_trusted(record, KeysSeen(), "required"))
    a@000000000000 was signed with key k1, which is trusted no more
    """
    if record.key_id and record.key_id in keys.revoked:
        return SignatureUnverifiable(f"{record.engine_name} was signed with key {record.key_id}, which is revoked")
    if policy != REQUIRED:
        return None
    if record.signature != VERIFIED:
        return SignatureUnverifiable(
            f"{record.engine_name} was installed without a signature, and [adapters] signatures = required",
            hint="hive adapter sign, then hive adapter pull again",
        )
    if record.key_id not in keys.trusted:
        return SignatureUnverifiable(
            f"{record.engine_name} was signed with key {record.key_id}, which is trusted no more",
            hint="hive adapter trust FILE",
        )
    return None
