"""diffusers (0.42 in Hive's own runner): images of a text. Data and pure functions."""

from __future__ import annotations

from hive.backends.command_line import Launch, Order
from hive.backends.hive_runner import runner_launch, runner_spec
from hive.domain import BackendKind

GENERATIONS = "/v1/images/generations"


def launch(order: Order) -> Launch:
    """Its GPUs are numbered by their order in CUDA_VISIBLE_DEVICES; the parts of the pipeline are laid on what is
    granted on each."""
    devices = [f"cuda:{number}={granted}" for number, granted in enumerate(order.gpu_mb)] or ["cpu"]
    flags = (
        *("--model", order.model),
        *(word for device in devices for word in ("--device", device)),
        *(("--steps", str(order.steps)) if order.steps else ()),
    )
    # Threads that wait for each other give their core away: a small image took 100 times as long on a busy box (seen).
    patient = {"OMP_WAIT_POLICY": "PASSIVE"}
    return runner_launch(
        BackendKind.DIFFUSERS, order, program_key="diffusers_program", flags=flags, environment=patient
    )


SPEC = runner_spec(
    kind=BackendKind.DIFFUSERS,
    label="diffusers",
    category="image",
    adds=frozenset({GENERATIONS}),
    not_relayed={"/generate": GENERATIONS},
    why_not_ahead="it makes images, and reads no prompt ahead",
    why_not_flush="diffusers keeps nothing of a request",
    model_format="diffusers",
    program=lambda inference: inference.diffusers_program,
    launch=launch,
)
