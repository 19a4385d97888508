"""A `LlamaWorker` whose requests have tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hive.backends.command_line import Launch
from hive.errors import BadRequest
from hive.host.cgroup import Leaf
from hive.jobs.call_forms import ToolForm, form_of
from hive.jobs.callables import tool_of
from hive.jobs.exit_tools import EXIT_TOOLS, ending_names
from hive.jobs.running import Tool
from hive.jobs.tool_dialogue import tool_dialogues
from hive.jobs.toolloop import LoopLimits
from hive.jobs.tools import ToolDefinition, ToolTable, read_definition
from hive.worker.bios import BiosForm
from hive.worker.profile import TimeoutProfile
from hive.worker.worker import LlamaWorker


def llama_worker(
    launch: Launch,
    *,
    slots: int,
    tools: Iterable[Tool | Callable[..., Any]] = (),
    exit_tools: Iterable[ToolDefinition | Mapping[str, Any]] = EXIT_TOOLS,
    stop_on_decision_request: bool = True,
    limits: LoopLimits | None = None,
    form: ToolForm = ToolForm.NATIVE,
    answer_schema: Mapping[str, Any] | None = None,
    profile: TimeoutProfile | None = None,
    model: str = "",
    max_tokens: int | None = None,
    bios: BiosForm = BiosForm.ONE_MESSAGE,
    leaf: Leaf | None = None,
) -> LlamaWorker:
    """A worker whose model may call `tools`, Python functions among them, and `exit_tools`; without both it may not.

    `form`: how it calls them. `answer_schema`: JSON Schema of the last answer. The rest is LlamaWorker's own. Raises
    BadRequest for tools that are none.
    """
    if answer_schema is not None and not isinstance(answer_schema, Mapping | bool):
        raise BadRequest(f"answer_schema is {answer_schema!r}: it must be a JSON Schema")
    found = [one if isinstance(one, Tool) else tool_of(one) for one in tools]
    exits = [one if isinstance(one, ToolDefinition) else read_definition(one) for one in exit_tools]
    table = ToolTable([one.definition for one in found], exits)
    dialogues = tool_dialogues(
        found,
        table,
        form_of(form, table, answer_schema),
        limits or LoopLimits(),
        ending=ending_names(stop_on_decision_request=stop_on_decision_request),
        bios=bios,
    )
    return LlamaWorker(
        launch,
        slots=slots,
        profile=profile,
        model=model,
        max_tokens=max_tokens,
        bios=bios,
        dialogues=dialogues if table or answer_schema is not None else None,
        leaf=leaf,
    )
