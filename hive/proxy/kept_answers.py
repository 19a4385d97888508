"""`GET` and `DELETE /v1/responses/{id}`, its `input_items`, and `cancel`: answered from the responses that the daemon
keeps, or by the jobs that make some in the background."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from hive.dialects.openai_responses_background import job_of
from hive.endpoints.endpoints import KEPT_PREFIX, Keeps
from hive.endpoints.lists import OwnAnswer
from hive.endpoints.pages import MOST_PARAMETERS
from hive.errors import BadRequest, NotFound, Saturated
from hive.proxy.background_answers import asks_stream, deleted, said_of_background
from hive.proxy.background_responses import BackgroundStream
from hive.proxy.datapath import DataPath
from hive.proxy.registry import AgentEntry
from hive.store.response_items import ID_MAX, PAGE_MOST, PAGE_USUAL, ItemPage

LONG_BYTES = 256 * 1024
"""An answer beyond this is written only while few written bytes are unread."""
_ID = re.compile(rb"[A-Za-z0-9_-]{1,128}")
OFF = "Hive keeps no responses here: an operator sets proxy.responses_kept_mb"


async def said_of_kept(
    path: DataPath, entry: AgentEntry, keeps: Keeps, target: bytes, *, heartbeat_s: float = 0.0
) -> OwnAnswer | BackgroundStream:
    """The answer to a request of this agent. `heartbeat_s`: between signs of life in a stream, 0 for none. Raises
    NotFound, BadRequest, Saturated."""
    name, query = id_in(target), _query(target)
    if not path.settings.proxy.responses_kept_mb:
        raise NotFound(f"Response with id '{name}' not found.", hint=OFF)
    if path.stored is None:
        raise Saturated("what is kept of responses cannot be read now", retry_after_s=5)
    agent, stored = entry.row.id, path.stored
    if job_of(name) and keeps is not Keeps.ITEMS:
        said = await said_of_background(path, entry, keeps, name, query, heartbeat_s)
        if isinstance(said, OwnAnswer):
            _check_long(path, entry, said)
        return said
    match keeps:
        case Keeps.GET:
            if asks_stream(query):
                raise BadRequest(
                    "stream: a kept response is told whole; only those made in the background are streamed"
                )
            said = OwnAnswer(await stored.get(agent, name))
        case Keeps.ITEMS:
            most = path.settings.proxy.body_max_bytes
            said = OwnAnswer(await stored.input_items(agent, name, item_page_of(query), most_bytes=most))
        case Keeps.DELETE:
            await stored.delete(agent, name)
            said = deleted(name)
        case Keeps.CANCEL:
            await stored.get(agent, name)
            raise BadRequest("Cannot cancel a synchronous response.", hint="only one made in the background can be")
    _check_long(path, entry, said)
    return said


def id_in(target: bytes) -> str:
    """The id that the target names. Raises NotFound for what is none.

    >>> id_in(b"/v1/responses/resp_1/input_items?limit=2")
    'resp_1'
    """
    name = target[len(KEPT_PREFIX) :].partition(b"?")[0].partition(b"/")[0]
    if _ID.fullmatch(name) is None:
        raise NotFound(f"Response with id '{name[:80].decode('ascii', 'backslashreplace')}' not found.")
    return name.decode()


def item_page_of(query: dict[str, str]) -> ItemPage:
    """The part of a list of items that a query asks for; what is not known in it is ignored. Raises BadRequest.

    >>> item_page_of({"limit": "2", "order": "asc", "x": "1"}), item_page_of({})
    (ItemPage(limit=2, after='', ascending=True), ItemPage(limit=20, after='', ascending=False))
    """
    limit, order = query.get("limit", str(PAGE_USUAL)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= PAGE_MOST):
        raise BadRequest(f"limit is a whole number from 1 to {PAGE_MOST}")
    if order not in ("asc", "desc"):
        raise BadRequest("order is asc or desc")
    return ItemPage(int(limit), query.get("after", "")[:ID_MAX], order == "asc")


def _query(target: bytes) -> dict[str, str]:
    try:
        asked = parse_qsl(target.partition(b"?")[2].decode("ascii", "replace"), max_num_fields=MOST_PARAMETERS)
    except ValueError:
        raise BadRequest(f"more than {MOST_PARAMETERS} parameters in the query") from None
    return dict(asked)


def _check_long(path: DataPath, entry: AgentEntry, said: OwnAnswer) -> None:
    if len(said.content) > LONG_BYTES:
        _check_read(path, entry, len(said.content))


def _check_read(path: DataPath, entry: AgentEntry, size: int) -> None:
    """Raises Saturated where clients have not read what was written to them: it is held here."""
    budget = path.budget
    if sum(connection.unsent_bytes for connection in entry.connections) + size > budget.agent_limit:
        raise Saturated("this agent has not read the answers it was sent", retry_after_s=5)
    held = sum(one.unsent_bytes for other in path.registry.by_id.values() for one in other.connections)
    if held + size > budget.limit:
        raise Saturated("agents have not read the answers they were sent", retry_after_s=5)
