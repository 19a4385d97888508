"""Message from the daemon about the models that the inference server in use may have in its memory under a rule."""

from __future__ import annotations

from hive.link.message import LinkMessage


class SignedLoads(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told, by the daemon, in place of what was told before: the models that requests to the server at `address` may
    name, where it loads by itself what they name. `models` None: all, as no rule asks for signed loads."""

    address: str = ""
    models: list[str] | None = None
