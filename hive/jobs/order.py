"""An order for a model job: what a model is to do, with which tools, and as whom it asks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from hive.domain import Band, is_name
from hive.errors import BadRequest
from hive.jobs.call_forms import ToolForm
from hive.jobs.exit_tools import EXIT_TOOLS
from hive.jobs.tool_specs import FunctionSpec, read_tool_specs
from hive.jobs.toolloop import LoopLimits
from hive.jobs.tools import ToolDefinition, ToolTable, read_definition
from hive.worker.bios import BiosForm

NAME_MAX = 80
TEXT_MAX_BYTES = 4 * 1024 * 1024
"""Of an order as JSON."""
CONTROLLED = frozenset({"messages", "model", "stream", "tools", "n"})
"""Params that are the job's own to set."""
ITERATIONS_MAX = 1000


class JobForm(StrEnum):
    """Way in which a job asks its model."""

    CHAT = "chat"
    """Turn by turn, with tools that the job runs."""
    RESPONSES = "responses"
    """One request to `/v1/responses`, as it was asked with `background`."""


class JobOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order as it is asked for. `body`: of RESPONSES, the request. `tools`: see `read_tool_specs`.

    `exit_tools`: None for the five of Hive's, empty for none. `params`: passed on untouched. `agent`: by name or id;
    the job asks as that agent. `tenant`: for which an operator asks; both at once mean nothing.
    `local_only`: none of its requests may leave this box.
    """

    name: str
    model: str
    prompt: str = ""
    system: str = ""
    form: JobForm = JobForm.CHAT
    body: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []
    exit_tools: list[dict[str, Any]] | None = None
    stop_on_decision_request: bool = True
    params: dict[str, Any] = {}
    bios: BiosForm = BiosForm.ONE_MESSAGE
    tool_form: ToolForm = ToolForm.NATIVE
    answer_schema: dict[str, Any] | None = None
    max_tool_iterations: int | None = None
    agent: str = ""
    tenant: str = ""
    priority: Band = Band.NORMAL
    local_only: bool = False


class JobEvent(msgspec.Struct, frozen=True):
    """One line of a job's output. `n` counts from 1 and is never used again; `at`: Unix seconds.

    `event` and its `data`:
    `delta`, `thinking` {turn, text} · `turn` {turn, answer, finish_reason, calls, tokens_in, tokens_out, tokens_cached}
    · `tool_call` {turn, id, name, arguments, agent} · `tool_result` {turn, id, name, result}
    · `signal` {name, arguments, turn, has_ended} · `response` (an event of /v1/responses)
    · `ended` {status, reason, detail, usage}, the last one.
    """

    n: int
    at: float
    event: str
    data: dict[str, Any]


class JobWork(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job that its process is given: the order, and the bounds of its loop."""

    order: JobOrder
    limits: LoopLimits


def read_order(raw: bytes | Mapping[str, Any]) -> JobOrder:
    """The order in a JSON object, checked. Raises BadRequest that says what is wrong with it.

    >>> read_order(b'{"name": "a", "model": "m", "prompt": "Hi"}').form.value
    'chat'
    >>> read_order({"name": "a", "model": "m", "promt": "Hi"})
    Traceback (most recent call last):
    hive.errors.BadRequest: the order: Object contains unknown field `promt`
    """
    try:
        order = (
            msgspec.json.decode(raw, type=JobOrder) if isinstance(raw, bytes) else msgspec.convert(raw, type=JobOrder)
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the order: {error}") from None
    check_order(order)
    return order


def check_order(order: JobOrder) -> None:
    """Raises BadRequest for an order that can come to nothing, whatever there is here."""
    _check_texts(order)
    if order.form is JobForm.RESPONSES:
        if order.body is None:
            raise BadRequest("an order of the form responses needs its body")
        return
    if order.body is not None:
        raise BadRequest("body: only an order of the form responses has one")
    if not order.prompt.strip():
        raise BadRequest("prompt: it is empty")
    if wrong := sorted(CONTROLLED & order.params.keys()):
        raise BadRequest(f"params: {', '.join(wrong)} cannot be set there: the job sets it")
    wanted = order.max_tool_iterations
    if wanted is not None and not 1 <= wanted <= ITERATIONS_MAX:
        raise BadRequest(f"max_tool_iterations: {wanted} is not from 1 to {ITERATIONS_MAX}")
    functions = [one.definition for one in read_tool_specs(order.tools) if isinstance(one, FunctionSpec)]
    ToolTable(functions, exit_definitions(order))


def _check_texts(order: JobOrder) -> None:
    if not 0 < len(order.name) <= NAME_MAX or not order.name.isprintable():
        raise BadRequest(f"name: it has 1 to {NAME_MAX} printable characters")
    if not order.model and not order.agent:
        raise BadRequest("model: name one; hive model list shows what there is")
    if order.agent and order.tenant:
        raise BadRequest("agent and tenant: an agent has a tenant already, so name one of the two")
    if order.tenant and not is_name(order.tenant):
        raise BadRequest("tenant: a tenant's name is a letter a-z, then up to 39 of a-z, 0-9 and -")
    if not _is_finite(msgspec.to_builtins(order)):
        raise BadRequest("the order: a number in it is not finite, so it is no JSON")
    try:
        size = len(msgspec.json.encode(order))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"the order is no JSON: {error}") from None
    if size > TEXT_MAX_BYTES:
        raise BadRequest(f"the order has {size} bytes; {TEXT_MAX_BYTES} are the most")


def _is_finite(found: object) -> bool:
    if isinstance(found, dict):
        return all(_is_finite(value) for value in found.values())
    if isinstance(found, list):
        return all(_is_finite(value) for value in found)
    return not isinstance(found, float) or math.isfinite(found)


def exit_definitions(order: JobOrder) -> Sequence[ToolDefinition]:
    """The exit tools that it has. Raises BadRequest."""
    return EXIT_TOOLS if order.exit_tools is None else [read_definition(one) for one in order.exit_tools]
