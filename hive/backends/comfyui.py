"""An operator's ComfyUI behind Hive's own runner (hive.runner.comfyui): its workflows are models. Data, pure functions.

One runner stands before it, and has all of its workflows: ComfyUI is one program with one queue and one memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from hive.backends.command_line import Launch, Needed, Order
from hive.backends.conversation import AskedServer, Conversation, get, object_in, text
from hive.backends.counters import ReportedLimits, gauge
from hive.backends.hive_runner import ASKING, runner_spec
from hive.domain import BackendKind

GENERATIONS = "/v1/images/generations"
STATE = "/comfyui/state"


class ComfyState(msgspec.Struct, frozen=True):
    """A ComfyUI as its runner sees it. `held_bytes`: on its device, None where it does not tell: on a CPU, or while it
    does not answer. `queue`: prompts that wait or are at work there, whoever sent them."""

    up: bool = False
    version: str = ""
    device: str = ""
    held_bytes: int | None = None
    queue: int | None = None


def state(server: AskedServer) -> Conversation[ComfyState | None]:  # noqa: ARG001
    """The state that a runner tells; None where it tells none. Raises BackendDown, BackendTimeout."""
    answer = yield from get(STATE)
    if answer.status != 200:
        return None
    try:
        return msgspec.convert(object_in(answer.body), ComfyState)
    except msgspec.ValidationError:
        return None


def busy() -> Conversation[ReportedLimits]:
    """One prompt is at work at a time; those in ComfyUI's queue wait there, an operator's own too."""
    told = yield from text("/metrics")
    if told is None:
        return ReportedLimits()
    in_queue, at_work = gauge(told, "hive_runner_comfyui_queue"), gauge(told, "hive_runner_busy") or 0
    own = gauge(told, "hive_runner_waiting") or 0
    return ReportedLimits(places=1, waiting=None if in_queue is None else own + max(0, in_queue - at_work))


def launch(order: Order) -> Launch:
    """The runner needs the standard library alone, so that it runs in Hive's own environment."""
    program = Path(sys.executable).with_name("hive-runner")
    command = (
        *(str(program), BackendKind.COMFYUI, "--socket", str(order.socket), "--name", order.name),
        *("--url", order.url, "--workflows", order.model),
    )
    needed = (
        Needed("hive-runner", program, "install Hive again: this one is not complete", is_program=True),
        Needed("workflows_dir", Path(order.model), "put workflow files there"),
    )
    return Launch(command, order.environment | {"PYTHONUNBUFFERED": "1"}, needed, order.socket)


SPEC = runner_spec(
    kind=BackendKind.COMFYUI,
    label="ComfyUI",
    category="image",
    adds=frozenset({GENERATIONS}),
    asking=msgspec.structs.replace(  # its health is 503 until ComfyUI has answered
        ASKING, busy=busy, why_not_load="ComfyUI loads what a workflow needs when it is asked for"
    ),
    why_not_ahead="a workflow reads no prompt ahead",
    why_not_flush="what ComfyUI keeps of a workflow's nodes it gives back with `hive model unload comfyui`",
    launch=launch,
)
