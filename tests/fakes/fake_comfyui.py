"""A stand-in for ComfyUI, a program: what it answers has the shapes recorded from ComfyUI 0.3.64 (server.py,
execution.py), and its images are of one colour.

It knows some of ComfyUI's nodes without models (EmptyImage, ImageBlur as nothing, SaveImage, PreviewImage) and some of
its own: StandInSteps {images, steps} works `--step-s` for each step, StandInError and StandInOutOfMemory fail as
ComfyUI tells failures. It writes its port to the file `--port-file`, and each request to `--log`.
"""

from __future__ import annotations

import argparse
import json
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

GIB = 1 << 30
NODES: dict[str, dict[str, type]] = {
    "EmptyImage": {"width": int, "height": int, "batch_size": int, "color": int},
    "ImageBlur": {"image": list, "blur_radius": int, "sigma": float},
    "SaveImage": {"images": list, "filename_prefix": str},
    "PreviewImage": {"images": list},
    "StandInText": {"text": str},
    "StandInSteps": {"images": list, "steps": int},
    "StandInError": {"images": list},
    "StandInOutOfMemory": {"images": list},
}
OUTPUTS = ("SaveImage", "PreviewImage")


class Interrupted(Exception):
    """InterruptProcessingException of ComfyUI."""


def png(width: int, height: int, color: int, text: str) -> bytes:
    """One colour, and the text that ComfyUI puts into its files."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = b"\0" + struct.pack(">I", color)[1:] * width
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    told = chunk(b"tEXt", b"prompt\0" + text.encode("latin-1", "replace"))
    pixels = chunk(b"IDAT", zlib.compress(row * height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + told + pixels + chunk(b"IEND", b"")


class StandIn:
    """The state: all of it is in memory, as ComfyUI's is."""

    def __init__(self, step_s: float, vram_bytes: int) -> None:
        self.step_s, self.vram_bytes = step_s, vram_bytes
        self.changed = threading.Condition()
        self.queue: list[list[Any]] = []
        self.running: list[list[Any]] = []
        self.history: dict[str, Any] = {}
        self.files: dict[tuple[str, str], bytes] = {}
        self.held_bytes = 0
        self.free_flag = self.interrupt = False
        self.number = 0
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while True:
            with self.changed:
                while not self.queue and not self.free_flag:
                    self.changed.wait()
                if not self.queue:
                    self.free_flag, self.held_bytes = False, 0
                    continue
                item = self.queue.pop(0)
                self.running = [item]
                self.interrupt = False
            outputs, status = self.execute(item)
            with self.changed:
                self.running = []
                self.history[item[1]] = {"prompt": item, "outputs": outputs, "status": status, "meta": {}}
                self.changed.notify_all()

    def execute(self, item: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        _, prompt_id, graph, _, outputs = item
        messages: list[Any] = [["execution_start", {"prompt_id": prompt_id, "timestamp": 0}]]
        made: dict[str, Any] = {}
        self.held_bytes = self.vram_bytes
        node = ""
        try:
            for node in graph:
                self.run_node(graph[node])
                if node in outputs:
                    made[node] = {"images": self.saved(graph, node, prompt_id)}
        except Interrupted:
            told = {"prompt_id": prompt_id, "node_id": node, "node_type": graph[node]["class_type"], "executed": []}
            messages.append(["execution_interrupted", told])
            return made, {"status_str": "error", "completed": False, "messages": messages}
        except (ValueError, MemoryError) as error:
            kind = "torch.OutOfMemoryError" if isinstance(error, MemoryError) else "ValueError"
            failed: dict[str, Any] = {
                "prompt_id": prompt_id,
                "node_id": node,
                "node_type": graph[node]["class_type"],
                "executed": [],
                "exception_message": f"{error}\n",
                "exception_type": kind,
                "traceback": ["  File x\n"],
                "current_inputs": {},
                "current_outputs": [],
            }
            messages.append(["execution_error", failed])
            return made, {"status_str": "error", "completed": False, "messages": messages}
        messages.append(["execution_success", {"prompt_id": prompt_id, "timestamp": 0}])
        return made, {"status_str": "success", "completed": True, "messages": messages}

    def run_node(self, node: dict[str, Any]) -> None:
        kind = node["class_type"]
        if kind == "StandInError":
            raise ValueError("mat1 and mat2 shapes cannot be multiplied")
        if kind == "StandInOutOfMemory":
            raise MemoryError("Allocation on device ")
        for _ in range(node["inputs"]["steps"] if kind == "StandInSteps" else 0):
            time.sleep(self.step_s)
            if self.interrupt:
                raise Interrupted

    def saved(self, graph: dict[str, Any], node: str, prompt_id: str) -> list[dict[str, str]]:
        source = graph[node]
        while source["class_type"] != "EmptyImage":
            source = graph[(source["inputs"].get("images") or source["inputs"]["image"])[0]]
        told = source["inputs"]
        kind = "output" if graph[node]["class_type"] == "SaveImage" else "temp"
        prefix = graph[node]["inputs"].get("filename_prefix", "ComfyUI_temp_abcde")
        found = []
        for number in range(told["batch_size"]):
            name = f"{prefix}_{len(self.files) + 1:05}_.png"
            self.files[kind, name] = png(told["width"], told["height"], told["color"] + number, json.dumps(graph))
            found.append({"filename": name, "subfolder": "", "type": kind})
        return found

    def post_prompt(self, body: dict[str, Any]) -> tuple[int, Any]:
        error: dict[str, Any]
        graph, prompt_id = body["prompt"], str(body["prompt_id"])
        for node, told in graph.items():
            if told["class_type"] not in NODES:
                message = f"Cannot execute because node {told['class_type']} does not exist."
                error = {"type": "invalid_prompt", "message": message, "details": f"Node ID '#{node}'"}
                return 400, {"error": error | {"extra_info": {}}, "node_errors": []}
        outputs = [node for node, told in graph.items() if told["class_type"] in OUTPUTS]
        if not outputs:
            error = {
                "type": "prompt_no_outputs",
                "message": "Prompt has no outputs",
                "details": "",
                "extra_info": {},
            }
            return 400, {"error": error, "node_errors": []}
        for node, told in graph.items():
            for key, kind in NODES[told["class_type"]].items():
                if not isinstance(told["inputs"].get(key), kind):
                    why = {"type": "required_input_missing", "message": "Required input is missing", "details": key}
                    errors = {node: {"errors": [why], "dependent_outputs": outputs, "class_type": told["class_type"]}}
                    error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation"}
                    return 400, {"error": error | {"details": "", "extra_info": {}}, "node_errors": errors}
        with self.changed:
            number, self.number = self.number, self.number + 1
            extra = dict(body.get("extra_data", {}))
            if "client_id" in body:
                extra["client_id"] = body["client_id"]
            self.queue.append([number, prompt_id, graph, extra, outputs])
            self.changed.notify_all()
        return 200, {"prompt_id": prompt_id, "number": number, "node_errors": {}}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/prompt":
            return self.post_prompt(body)
        with self.changed:
            if path == "/queue":
                self.queue = [item for item in self.queue if item[1] not in body.get("delete", [])]
            elif path == "/interrupt":
                wanted = body.get("prompt_id")
                if not wanted or any(item[1] == wanted for item in self.running):
                    self.interrupt = True
            elif path == "/history":
                for one in body.get("delete", []):
                    self.history.pop(one, None)
            elif path == "/free":
                self.free_flag = True
            else:
                return 404, None
            self.changed.notify_all()
        return 200, None

    def get(self, path: str) -> Any:
        with self.changed:
            if path == "/prompt":
                return {"exec_info": {"queue_remaining": len(self.queue) + len(self.running)}}
            if path == "/queue":
                return {"queue_running": self.running, "queue_pending": self.queue}
            if path == "/history":
                return self.history
            if path.startswith("/history/"):
                one = path.removeprefix("/history/")
                return {one: self.history[one]} if one in self.history else {}
            if path == "/system_stats":
                return {
                    "system": {"os": "posix", "comfyui_version": "0.3.64", "argv": ["main.py"]},
                    "devices": [self.gpu()],
                }
        return None

    def gpu(self) -> dict[str, Any]:
        told = {"vram_total": 24 * GIB, "vram_free": 24 * GIB - self.held_bytes}
        told |= {"torch_vram_total": self.held_bytes, "torch_vram_free": 0}
        return {"name": "cuda:0 NVIDIA Stand-in : native", "type": "cuda", "index": 0} | told


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    state: StandIn
    log_file: Path | None = None

    def do_GET(self) -> None:
        self.note("")
        parts = urlsplit(self.path)
        if parts.path == "/view":
            asked = {key: values[0] for key, values in parse_qs(parts.query).items()}
            data = self.state.files.get((asked.get("type", "output"), asked.get("filename", "")))
            if data is not None and "preview" in asked:
                self.answer(200, b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\x3f\0\0\x1f\0\0", "image/webp")
                return
            self.answer(404 if data is None else 200, data or b"", "image/png")
            return
        found = self.state.get(parts.path)
        if found is None:
            self.answer(404, b"404: Not Found", "text/plain")
        else:
            self.answer(200, json.dumps(found).encode(), "application/json")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.note(raw.decode("utf-8", "replace"))
        if self.headers.get("Origin"):
            self.answer(403, b"", "text/plain")
            return
        try:
            body = json.loads(raw)
        except ValueError:
            self.answer(500, b"500 Internal Server Error", "text/plain")
            return
        status, found = self.state.post(self.path, body)
        self.answer(status, b"" if found is None else json.dumps(found).encode(), "application/json")

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def note(self, body: str) -> None:
        if self.log_file is not None:
            with self.log_file.open("a") as file:
                file.write(f"{self.command} {self.path} {body}\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--vram-mb", type=int, default=3000)
    arguments = parser.parse_args()
    Handler.state = StandIn(arguments.step_s, arguments.vram_mb << 20)
    Handler.log_file = arguments.log
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    made = arguments.port_file.with_suffix(".new")
    made.write_text(str(server.server_address[1]))
    made.rename(arguments.port_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
