"""The requests about templates that a helper answers."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from hive.errors import BadRequest, NotSupported
from hive.link.helper import AskTemplates, RestartTemplate, Templates
from hive.link.message import LinkMessage
from hive.runtimes.templates import TemplateTable

VERBS: frozenset[type[LinkMessage]] = frozenset({AskTemplates, RestartTemplate})


def do(table: TemplateTable | None, message: LinkMessage, forked: Mapping[str, str]) -> Coroutine[Any, Any, Templates]:
    """`forked`: id of a running agent → `Run.template`. Raises NotSupported, NotFound."""
    if table is None:
        raise NotSupported("this helper runs no templates")
    match message:
        case AskTemplates():
            return table.stats(forked)
        case RestartTemplate():
            return _restart(table, message.name, forked)
    raise BadRequest(f"{type(message).__name__} is not about templates")


async def _restart(table: TemplateTable, name: str, forked: Mapping[str, str]) -> Templates:
    await table.restart(name)
    return await table.stats(forked, frozenset({name}))
