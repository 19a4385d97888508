"""The dialogue with a ComfyUI about one prompt: what to ask next follows from what it said. Pure.

ComfyUI keeps its queue and its history in memory alone, and takes the id of a prompt from whoever sends it. So each
question can be asked again, and a prompt that is in neither is lost: it was restarted. Its history shows every prompt
to whoever asks; ours is deleted there, however it ended. Recorded with 0.3.64 (facts: ComfyUI shapes).

A dialogue is a generator: it yields what to ask or how long to wait, and is sent what came of it.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from hive.runner.faults import CallerGone, EngineFault

FIRST_WAIT_S, MOST_WAIT_S = 0.05, 0.5
"""Between two looks at the history: a model-free graph takes some 0.1 s, a picture seconds."""
QUEUE_EVERY_S = 2.0
"""Between two looks at the queue, which holds every prompt in full."""
SILENT_S = 120.0
"""So long it may answer nothing at all: while it loads a checkpoint its other threads starve."""
STOPS_S = 60.0
"""Longest wait for a prompt to end that was interrupted: it stops between two steps."""
MOST_IMAGES = 64
NO_WORK = "images=0; pixel_steps=0"
"""The cost of a prompt that never came to work: without a word, Hive would charge a whole image (seen)."""
CLIENT_ID = "hive-runner"
"""Of all our prompts. No web socket has it, so that ComfyUI shows nobody how they go; and what a runner left that was
killed is found by it."""


class Ask(NamedTuple):
    """A question: `POST` with a body as JSON, else `GET`."""

    target: str
    body: Mapping[str, Any] | None = None


class Wait(NamedTuple):
    """Nothing is asked for so long, or until the caller leaves."""

    seconds: float


class Said(NamedTuple):
    """An answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class Unsaid(NamedTuple):
    """No answer. `refused`: nobody listens there, so that what it had in memory is gone."""

    why: str
    refused: bool = False


class Waited(NamedTuple):
    """The wait is over. `is_gone`: the caller has left."""

    is_gone: bool


class MadeImage(NamedTuple):
    """One image, as ComfyUI names its file."""

    filename: str
    subfolder: str
    kind: str

    def target(self, output_format: str, quality: int) -> str:
        """Path at which it is fetched: as it is for PNG, else made anew by ComfyUI."""
        asked = {"filename": self.filename, "subfolder": self.subfolder, "type": self.kind}
        if output_format != "png":
            asked["preview"] = f"{output_format};{quality}"
        return "/view?" + urlencode(asked)


class WorkflowRefused(EngineFault):
    """ComfyUI takes the graph for none: the operator's file, or what is installed there, is wrong."""


class ComfyOutOfMemory(RuntimeError):
    """ComfyUI had no memory for it. Its text says `out of memory`, by which a runner ends (faults.py)."""


Event = Said | Unsaid | Waited
Dialogue = Generator[Ask | Wait, Event, list[MadeImage]]
Questions = Generator[Ask | Wait, Event, None]


def dialogue(prompt_id: str, graph: Mapping[str, Any], output: str = "") -> Dialogue:
    """The images that a graph gives under this id. `output`: the node whose images they are, empty for all.

    Raises EngineFault (502 where ComfyUI refuses it, fails, or has lost it), ComfyOutOfMemory; CallerGone once the
    prompt of a caller that left is not at work any more. In each case nothing of it is left at ComfyUI but its files.
    """
    sent = yield Ask("/prompt", {"prompt": graph, "prompt_id": prompt_id, "client_id": CLIENT_ID})
    if isinstance(sent, Said) and sent.status != 200:
        raise refused(sent)
    if not isinstance(sent, Said):
        if not (isinstance(sent, Unsaid) and sent.refused):
            yield from _ended(prompt_id)  # it may have come there all the same
        why = sent.why if isinstance(sent, Unsaid) else "it said nothing"
        raise EngineFault(502, f"ComfyUI cannot be reached: {why}", "comfyui_unreachable", cost=NO_WORK)
    try:
        found = yield from _result(prompt_id)
    except (EngineFault, CallerGone):
        yield from _ended(prompt_id)
        raise
    yield from _forgotten(prompt_id)
    return images_in(found, output)


def refused(said: Said) -> WorkflowRefused:
    """The words of ComfyUI about a graph that it does not take.

    >>> said = Said(400, b'{"error":{"message":"Prompt has no outputs","details":""},"node_errors":{}}')
    >>> refused(said).message
    'ComfyUI refuses the workflow: Prompt has no outputs'
    """
    found = said.json()
    words: list[str] = []
    if isinstance(found, dict):
        told = [found.get("error")]
        nodes = found.get("node_errors")
        for node, errors in nodes.items() if isinstance(nodes, dict) else ():
            of_node = errors.get("errors") if isinstance(errors, dict) else None
            for one in of_node if isinstance(of_node, list) else ():
                if isinstance(one, dict):
                    told.append({"message": f"node {node}: {one.get('message')}", "details": one.get("details")})
        for one in told[:4]:
            if isinstance(one, dict):
                parts = (_clean(one.get("message")), _clean(one.get("details")))
                words.append(": ".join(part for part in parts if part))
    text = "; ".join(word for word in words if word) or f"it answers {said.status}"
    return WorkflowRefused(502, f"ComfyUI refuses the workflow: {text}", "workflow_refused", cost=NO_WORK)


def _result(prompt_id: str) -> Generator[Ask | Wait, Event, Mapping[str, Any]]:
    """Its row of the history, once it has ended. Raises EngineFault, CallerGone."""
    wait_s, since_queue_s, silent_s = FIRST_WAIT_S, 0.0, 0.0
    while True:
        waited = yield Wait(wait_s)
        if isinstance(waited, Waited) and waited.is_gone:
            raise CallerGone
        since_queue_s += wait_s
        row, answered = yield from _row(prompt_id)
        if row is not None:
            return row
        if answered:
            silent_s = 0.0
        else:
            silent_s += wait_s
            if silent_s >= SILENT_S:
                raise EngineFault(502, f"ComfyUI has answered nothing for {SILENT_S:.0f} s", "comfyui_unreachable")
        if answered and since_queue_s >= QUEUE_EVERY_S:
            since_queue_s = 0.0
            if (yield from _place(prompt_id)) is PromptPlace.NOWHERE:
                row, _ = yield from _row(prompt_id)  # it may have ended between the two questions
                if row is None:
                    raise EngineFault(502, "ComfyUI knows nothing of the prompt: it was restarted", "comfyui_restarted")
                return row
        wait_s = min(MOST_WAIT_S, wait_s * 1.5)


def _row(prompt_id: str) -> Generator[Ask | Wait, Event, tuple[Mapping[str, Any] | None, bool]]:
    """Its row of the history, None where it has none; and whether ComfyUI answered."""
    said = yield Ask(f"/history/{quote(prompt_id, safe='')}")
    if isinstance(said, Unsaid) and said.refused:
        raise EngineFault(502, "ComfyUI has ended while it worked on this", "comfyui_restarted")
    if not isinstance(said, Said) or said.status != 200:
        return None, False
    found = said.json()
    row = found.get(prompt_id) if isinstance(found, dict) else None
    return (row if isinstance(row, dict) else None), isinstance(found, dict)


class PromptPlace(Enum):
    """The place of a prompt in ComfyUI's queue. `NOWHERE`: it knows nothing of it, or has ended."""

    NOWHERE = 0
    IN_LINE = 1
    AT_WORK = 2


def _place(prompt_id: str) -> Generator[Ask | Wait, Event, PromptPlace | None]:
    """Its place in the queue; None where ComfyUI did not say."""
    said = yield Ask("/queue")
    if isinstance(said, Unsaid) and said.refused:
        return PromptPlace.NOWHERE
    if not isinstance(said, Said) or said.status != 200:
        return None
    found = said.json()
    if not isinstance(found, dict):
        return None
    if prompt_id in ids_in(found.get("queue_running")):
        return PromptPlace.AT_WORK
    return PromptPlace.IN_LINE if prompt_id in ids_in(found.get("queue_pending")) else PromptPlace.NOWHERE


def ids_in(queue: Any) -> list[str]:
    """Ids of the prompts in a part of the queue.

    >>> ids_in([[0, "a", {}, {}, ["9"]], "?"])
    ['a']
    """
    rows = queue if isinstance(queue, list) else []
    return [row[1] for row in rows if isinstance(row, list) and len(row) > 1 and isinstance(row[1], str)]


def left_behind() -> Generator[Ask | Wait, Event, list[str]]:
    """Removes what a runner that was killed has left there, prompts in the queue and rows of the history, and returns
    their ids. Nothing of it is anybody's any more."""
    found = set[str]()
    for target in ("/queue", "/history"):
        said = yield Ask(target)
        told = said.json() if isinstance(said, Said) and said.status == 200 else None
        if isinstance(told, dict):
            found |= _ours(told)
    for prompt_id in sorted(found):
        yield from _ended(prompt_id)
    return sorted(found)


def _ours(told: Mapping[str, Any]) -> set[str]:
    """Ids of our prompts in an answer about the queue or the history."""
    rows = [row for part in ("queue_running", "queue_pending") for row in told.get(part) or []]
    rows += [row.get("prompt") for row in told.values() if isinstance(row, dict)]
    found = set[str]()
    for row in rows:
        if isinstance(row, list) and len(row) > 3 and isinstance(row[1], str) and isinstance(row[3], dict):
            found |= {row[1]} if row[3].get("client_id") == CLIENT_ID else set()
    return found


def _ended(prompt_id: str) -> Questions:
    """Takes a prompt out of the queue or, where it is at work, interrupts it, and waits until it is neither. In this
    order: one that begins between the two is there for the second. Never without its id: that would be for whoever is
    at work."""
    waited_s, wait_s = 0.0, FIRST_WAIT_S
    while waited_s < STOPS_S:
        yield Ask("/queue", {"delete": [prompt_id]})
        yield Ask("/interrupt", {"prompt_id": prompt_id})
        if (yield from _place(prompt_id)) is PromptPlace.NOWHERE:
            break
        yield Wait(wait_s)
        waited_s += wait_s
        wait_s = min(MOST_WAIT_S, wait_s * 1.5)
    yield from _forgotten(prompt_id)


def _forgotten(prompt_id: str) -> Questions:
    """Deletes its row of the history; once more where that was not answered."""
    for _ in range(2):
        said = yield Ask("/history", {"delete": [prompt_id]})
        if isinstance(said, Said) or (isinstance(said, Unsaid) and said.refused):
            return


# --- what the history says ---------------------------------------------------------------------------------------


def images_in(row: Mapping[str, Any], output: str = "") -> list[MadeImage]:
    """The images of a row of the history: those that a graph keeps, where it keeps some, else the temporary ones.

    Raises EngineFault, ComfyOutOfMemory where it failed.

    >>> row = {"status": {"completed": True}, "outputs": {"9": {"images": [{"filename": "a.png", "subfolder": "",
    ...        "type": "temp"}]}}}
    >>> images_in(row)
    [MadeImage(filename='a.png', subfolder='', kind='temp')]
    """
    status = row.get("status")
    if not isinstance(status, dict) or status.get("completed") is not True:
        raise failure_in(status if isinstance(status, dict) else {})
    outputs = row.get("outputs")
    found = []
    for node, told in outputs.items() if isinstance(outputs, dict) else ():
        images = told.get("images") if isinstance(told, dict) and output in ("", node) else None
        for image in images if isinstance(images, list) else ():
            if isinstance(image, dict) and isinstance(image.get("filename"), str):
                folder, kind = image.get("subfolder"), image.get("type")
                found.append(MadeImage(image["filename"], str(folder or ""), str(kind or "output")))
    kept = [image for image in found if image.kind == "output"]
    images = (kept or found)[:MOST_IMAGES]
    if not images:
        raise EngineFault(502, "the workflow made no image: it has to end in PreviewImage or SaveImage", "no_image")
    return images


def failure_in(status: Mapping[str, Any]) -> Exception:
    """The end of a prompt that did not succeed, as an error.

    >>> failure_in({"messages": [["execution_interrupted", {"node_id": "3"}]]}).message
    'somebody has interrupted it in ComfyUI'
    """
    messages = status.get("messages")
    for message in messages if isinstance(messages, list) else ():
        name, told = message if isinstance(message, list) and len(message) == 2 else ("", {})
        if name == "execution_interrupted":
            return EngineFault(502, "somebody has interrupted it in ComfyUI", "comfyui_interrupted")
        if name == "execution_error" and isinstance(told, dict):
            kind, why = _clean(told.get("exception_type")), _clean(told.get("exception_message"))
            if "outofmemory" in kind.lower().replace("_", ""):
                return ComfyOutOfMemory(f"ComfyUI is out of memory at {_clean(told.get('node_type'))}")
            where = f"{_clean(told.get('node_type'))} (node {_clean(told.get('node_id'))})"
            return EngineFault(502, f"ComfyUI failed at {where}: {kind}: {why}", "comfyui_failed")
    return EngineFault(502, "ComfyUI failed, and does not say why", "comfyui_failed")


def _clean(value: Any) -> str:
    """A short text on one line: it is ComfyUI's, and is shown."""
    text = " ".join(str(value).split()) if isinstance(value, str | int) else ""
    return "".join(char for char in text if char.isprintable())[:200]


# --- its memory --------------------------------------------------------------------------------------------------


class ComfyMemory(NamedTuple):
    """Memory that ComfyUI holds. `device`: `cuda`, `cpu`, …; `held_bytes`: its tensors there and what it keeps for more
    of them, None where it does not tell (a CPU's memory is everybody's)."""

    device: str
    name: str
    held_bytes: int | None
    total_bytes: int | None
    free_bytes: int | None


def memory_in(stats: Any) -> ComfyMemory | None:
    """The memory that /system_stats tells; None where that is none.

    >>> gpu = {"name": "cuda:0", "type": "cuda", "vram_total": 100, "vram_free": 60, "torch_vram_total": 30,
    ...        "torch_vram_free": 5}
    >>> memory_in({"devices": [gpu]}).held_bytes, memory_in({"devices": [gpu | {"type": "cpu"}]}).held_bytes
    (30, None)
    """
    devices = stats.get("devices") if isinstance(stats, dict) else None
    first = devices[0] if isinstance(devices, list) and devices else None
    if not isinstance(first, dict) or not isinstance(first.get("type"), str):
        return None
    numbers = [_bytes(first.get(key)) for key in ("torch_vram_total", "vram_total", "vram_free")]
    held = None if first["type"] == "cpu" else numbers[0]
    return ComfyMemory(first["type"], _clean(first.get("name")), held, numbers[1], numbers[2])


def _bytes(value: Any) -> int | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 60
    return int(value) if good else None
