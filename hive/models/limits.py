"""Which models a tenant is limited to, as hive.conf says it. Pure."""

from __future__ import annotations


def models_of(text: str) -> frozenset[str] | None:
    """The names a tenant is limited to, as `policy.may` compares them; None for all.

    >>> sorted(models_of("llama3.2:latest, qwen") or ())
    ['llama3.2', 'qwen']
    """
    names = frozenset(name.strip().removesuffix(":latest") for name in text.split(",")) - {""}
    return names or None
