"""Runner before the operator's ComfyUI: its workflows are models of /v1/images/generations. Standard library only.

ComfyUI is the operator's: Hive neither starts nor ends it, and agents never reach it, as its history shows everyone's
prompts and its nodes run code. What is loaded there is given up when this runner is told to end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from hive.runner.comfy_dialogue import (
    Ask,
    ComfyMemory,
    ComfyOutOfMemory,
    Event,
    MadeImage,
    Said,
    Unsaid,
    Wait,
    Waited,
    dialogue,
    left_behind,
    memory_in,
)
from hive.runner.faults import EngineFault
from hive.runner.http_server import CallRoute, EngineCall, said
from hive.runner.image_calls import ImageOrder, read_order, told_image, told_images
from hive.runner.pictures import size_of, without_texts
from hive.runner.workflow import (
    MOST_FILE_BYTES,
    MOST_WORKFLOWS,
    PREFIX,
    PlannedRun,
    Workflow,
    WorkflowFault,
    planned,
    read_workflow,
)

ANSWER_S = 15.0
"""Longest silence of ComfyUI within one answer; an answer that does not come is asked for again."""
COMES_UP_S = 30.0
"""So long it is waited for when a runner begins: on two cores it took 15 s to start."""
LOOK_S = 0.2
FREED_S = 1.0
"""Longest wait for its memory after /free: it is given back when no prompt is at work. All of an end has to be done in
2 s (hive/worker/child.py)."""
END_ANSWER_S = 0.3
MOST_ANSWER_BYTES = 256 << 20
Result = TypeVar("Result")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="where ComfyUI is: http://127.0.0.1:8188, or a unix socket's path")
    parser.add_argument("--workflows", type=Path, required=True, help="directory of the workflow files (NAME.json)")


class ComfyClient:
    """Asks a ComfyUI: a connection for each question."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"<ComfyClient {self.url}>"

    def ask(self, ask: Ask, *, within_s: float = ANSWER_S) -> Said | Unsaid:
        """The answer, or why there is none. It never raises."""
        connection = _connection(self.url, within_s)
        try:
            if ask.body is None:
                connection.request("GET", ask.target)
            else:
                kind = {"Content-Type": "application/json"}
                connection.request("POST", ask.target, json.dumps(ask.body, ensure_ascii=True).encode(), kind)
            answer = connection.getresponse()
            body = answer.read(MOST_ANSWER_BYTES + 1)
            if len(body) > MOST_ANSWER_BYTES:
                return Unsaid(f"its answer has more than {MOST_ANSWER_BYTES} bytes")
            return Said(answer.status, body)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            return Unsaid(error.strerror or "refused", refused=True)
        except (OSError, http.client.HTTPException) as error:
            return Unsaid(getattr(error, "strerror", None) or str(error)[:200] or type(error).__name__)
        finally:
            connection.close()

    def carry_on(self, questions: Generator[Ask | Wait, Event, Result], call: EngineCall | None = None) -> Result:
        """Asks what a dialogue yields, and waits as it says: not longer than the caller of `call` is there. Returns
        what it returns, and raises what it raises."""
        wanted = next(questions, None)
        is_gone = False
        while wanted is not None:
            event: Event
            if isinstance(wanted, Ask):
                event = self.ask(wanted)
            else:
                was_gone, is_gone = is_gone, is_gone or _left(call, 0 if is_gone else wanted.seconds)
                if was_gone or call is None:
                    time.sleep(wanted.seconds)
                event = Waited(is_gone)
            try:
                wanted = questions.send(event)
            except StopIteration as ended:
                result: Result = ended.value
                return result
        raise RuntimeError("the dialogue asked nothing")

    def memory(self, within_s: float = 3.0) -> tuple[ComfyMemory | None, str]:
        """Its memory, and its version; None where it does not answer."""
        told = self.ask(Ask("/system_stats"), within_s=within_s)
        stats = told.json() if isinstance(told, Said) and told.status == 200 else None
        system = stats.get("system") if isinstance(stats, dict) else None
        version = system.get("comfyui_version") if isinstance(system, dict) else None
        return memory_in(stats), version[:40] if isinstance(version, str) else ""

    def queue_depth(self) -> int | None:
        """The prompts in its queue and at work, whoever sent them; None where it does not tell."""
        told = self.ask(Ask("/prompt"), within_s=3.0)
        found = told.json() if isinstance(told, Said) and told.status == 200 else None
        info = found.get("exec_info") if isinstance(found, dict) else None
        depth = info.get("queue_remaining") if isinstance(info, dict) else None
        return depth if isinstance(depth, int) else None


def _left(call: EngineCall | None, seconds: float) -> bool:
    """Whether the caller left before so much time was over."""
    if call is None:
        return False
    until = time.monotonic() + seconds
    while not call.is_gone():
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(LOOK_S, left))
    return True


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(url: str, within_s: float) -> http.client.HTTPConnection:
    if url.startswith("/"):
        return _UnixConnection(url, within_s)
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 8188, timeout=within_s)


class WorkflowDirectory:
    """The workflows of a directory, read again when a file of it has changed. `faults`: by file, why it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: dict[str, str] = {}
        self._looks: tuple[tuple[str, int, int, int], ...] | None = None
        self._found: dict[str, Workflow] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<WorkflowDirectory {self.path} {len(self._found)} workflows>"

    def workflows(self) -> dict[str, Workflow]:
        """By the name of the model. A file that is none is left out, and told in `faults`."""
        with self._lock:
            try:
                files = sorted(path for path in self.path.iterdir() if path.suffix == ".json")[:MOST_WORKFLOWS]
                looks = tuple((f.name, s.st_ino, s.st_mtime_ns, s.st_size) for f in files for s in (f.stat(),))
            except OSError as error:
                self._found, self._looks = {}, None
                self.faults = {str(self.path): f"{error.strerror}"}
                return {}
            if looks != self._looks:
                self._looks, self._found, self.faults = looks, {}, {}
                for file in files:
                    try:
                        with file.open("rb") as opened:
                            made = read_workflow(file.stem, opened.read(MOST_FILE_BYTES + 1))
                        self._found[made.model] = made
                    except (WorkflowFault, OSError) as fault:
                        self.faults[file.name] = str(fault)
            return dict(self._found)


class MadePicture(NamedTuple):
    """One picture of an answer. `seed`: that it was asked with, 0 where the workflow takes none."""

    data: bytes
    size: tuple[int, int]
    seed: int


class ComfyProgram:
    """One ComfyUI with its workflows, as an EngineProgram."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._client = ComfyClient(arguments.url)
        self._directory = WorkflowDirectory(arguments.workflows)
        self._version = ""
        self._at_work = set[str]()
        self._made = 0
        self._failed = 0

    def __repr__(self) -> str:
        return f"<ComfyProgram at {self._client.url}>"

    def load(self) -> None:
        """Waits for ComfyUI, and removes there what a runner has left that was killed. Raises RuntimeError."""
        found = self._directory.workflows()
        for file, why in self._directory.faults.items():
            said(f"workflow {file} is left out: {why}")
        if not found:
            raise RuntimeError(f"there is no workflow in {self._directory.path}")
        until = time.monotonic() + COMES_UP_S
        while (memory := self._client.memory())[0] is None:
            if time.monotonic() > until:
                raise RuntimeError(f"no ComfyUI answers at {self._client.url}")
            time.sleep(LOOK_S)
        self._version = memory[1]
        if left := self._client.carry_on(left_behind()):
            said(f"removed from ComfyUI: {len(left)} of an earlier runner's prompts")

    def unload(self) -> None:
        """Ends what is at work, and has ComfyUI give its memory back."""
        for prompt_id in list(self._at_work)[:1]:  # one is at work at a time
            self._client.ask(Ask("/queue", {"delete": [prompt_id]}), within_s=END_ANSWER_S)
            self._client.ask(Ask("/interrupt", {"prompt_id": prompt_id}), within_s=END_ANSWER_S)
        before, _ = self._client.memory(END_ANSWER_S)
        freed = self._client.ask(Ask("/free", {"unload_models": True, "free_memory": True}), within_s=END_ANSWER_S)
        if not isinstance(freed, Said) or before is None or not before.held_bytes:
            return
        until = time.monotonic() + FREED_S
        while time.monotonic() < until:
            now, _ = self._client.memory(END_ANSWER_S)
            if now is None or now.held_bytes is None or now.held_bytes < before.held_bytes:
                return
            time.sleep(LOOK_S)
        said(f"ComfyUI holds {before.held_bytes >> 20} MiB still, {FREED_S:.0f} s after it was told to give it back")

    def version(self) -> str:
        return self._version or "unknown"

    def facts(self) -> dict[str, Any]:
        return {}

    def counts(self) -> Mapping[str, float]:
        depth = self._client.queue_depth()
        counts = {"hive_runner_images": float(self._made), "hive_runner_failed": float(self._failed)}
        return counts if depth is None else counts | {"hive_runner_comfyui_queue": float(depth)}

    def routes(self) -> Mapping[tuple[str, str], CallRoute]:
        return {
            ("GET", "/v1/models"): CallRoute(self.models, takes_turn=False),
            ("GET", "/comfyui/state"): CallRoute(self.state, takes_turn=False),
            ("POST", "/v1/images/generations"): CallRoute(self.generate),
        }

    def models(self, call: EngineCall) -> None:
        """Every workflow as a model, with its inputs."""
        rows = [
            {
                "id": workflow.model,
                "object": "model",
                "created": 0,
                "owned_by": "comfyui",
                "description": workflow.description,
                "inputs": {name: described.shape() for name, described in workflow.inputs.items()},
            }
            for workflow in self._directory.workflows().values()
        ]
        call.answer_json({"object": "list", "data": rows})

    def state(self, call: EngineCall) -> None:
        """Answers what ComfyUI holds and has to do, as far as it tells."""
        memory, version = self._client.memory()
        shape: dict[str, Any] = {"up": memory is not None, "version": version}
        if memory is not None:
            shape |= {"queue": self._client.queue_depth(), **memory._asdict()}
        call.answer_json(shape)

    def generate(self, call: EngineCall) -> None:
        """Answers /v1/images/generations."""
        body = call.json()
        workflow = self._workflow(body.get("model"))
        order = read_order(body, inputs=True)
        made, pixel_steps, tells_steps = list[MadePicture](), 0, True
        try:
            for number, run in enumerate(planned(workflow, body, secrets.randbelow)):
                for picture in self._pictures(call, workflow, run, number, order):
                    made.append(picture)
                    pixel_steps += picture.size[0] * picture.size[1] * (run.steps or 0)
                tells_steps = tells_steps and run.steps is not None
        except (EngineFault, ComfyOutOfMemory) as error:
            self._failed += 1
            if made and isinstance(error, EngineFault):
                error.cost = ""  # of what was made before it
            raise
        self._made += len(made)
        call.cost = f"images={len(made)}" + (f"; pixel_steps={pixel_steps}" if tells_steps else "")
        created = int(time.time())
        if not order.streams:
            call.answer_json(told_images(created, order, made[0].size, [(one.data, one.seed) for one in made]))
            return
        for image, one in enumerate(made):
            call.event(told_image(created, order, one.size, image, one.data, one.seed), "image_generation.completed")
        call.event("[DONE]")
        call.end_events()

    def _workflow(self, name: object) -> Workflow:
        workflows = self._directory.workflows()
        found = workflows.get(name) if isinstance(name, str) else None
        if found is None:
            shown = str(name)[:80]
            why = self._directory.faults.get(f"{shown.removeprefix(PREFIX)}.json")
            text = f"the workflow {shown} cannot be used: {why}" if why else f"there is no workflow {shown}"
            raise EngineFault(404, text, "model_not_found", param="model")
        return found

    def _pictures(
        self, call: EngineCall, workflow: Workflow, run: PlannedRun, number: int, order: ImageOrder
    ) -> Iterator[MadePicture]:
        """The pictures of one run, fetched from ComfyUI."""
        base = call.id or str(uuid.uuid4())
        prompt_id = base if not number else f"{base}-{number}"
        with self._working(prompt_id):
            images = self._client.carry_on(dialogue(prompt_id, run.graph, workflow.output), call)
        seed = run.values.get("seed")
        for image in images:
            call.check_caller()
            data = self._fetched(image, order)
            yield MadePicture(without_texts(data), size_of(data) or (0, 0), seed if isinstance(seed, int) else 0)

    @contextlib.contextmanager
    def _working(self, prompt_id: str) -> Iterator[None]:
        self._at_work.add(prompt_id)
        try:
            yield
        finally:
            self._at_work.discard(prompt_id)

    def _fetched(self, image: MadeImage, order: ImageOrder) -> bytes:
        told = self._client.ask(Ask(image.target(order.format, max(1, order.quality))), within_s=60.0)
        if not isinstance(told, Said) or told.status != 200 or size_of(told.body) is None:
            why = told.why if isinstance(told, Unsaid) else f"it answers {told.status}"
            raise EngineFault(502, f"the image that ComfyUI made cannot be fetched: {why}", "comfyui_failed")
        return told.body


Program = ComfyProgram
"""As `hive.runner.entry` looks for it."""
