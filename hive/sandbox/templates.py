"""The templates of one helper: each started when the first agent names it, and started anew after its end."""

from __future__ import annotations

from collections.abc import Mapping

from hive.link.helper import Templates, TemplateStat
from hive.link.specs import TemplateSpec
from hive.sandbox.template import Template, TemplatePlaces


class TemplateTable:
    """All templates of one helper. It adopts none: those of a helper that was killed end when their socket closes."""

    def __init__(self, places: TemplatePlaces) -> None:
        self._places = places

    async def get(self, spec: TemplateSpec) -> Template | str:
        """The template, ready; else a sentence that says why there is none. Waits for a start under way.

        One that failed is not tried again until `restart`, or until its spec is another; one that ended is.
        """
        raise NotImplementedError

    def distrust(self, template: Template, why: str) -> None:
        """It lied: it is ended, and counts as failed."""
        raise NotImplementedError

    def stats(self, agents: Mapping[str, object]) -> Templates:
        raise NotImplementedError

    async def restart(self, name: str) -> TemplateStat:
        """A new process for new agents; the old one's agents stay. Raises NotFound."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Ends them all; their children go on."""
        raise NotImplementedError
