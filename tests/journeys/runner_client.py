"""A client of the runner API as its specification has it: the poller and the bodies word for word, in Python.

It does not know which kind of server is behind the API.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

LOAD: dict[str, Any] = json.loads("""
{
  "modelId": "meta-llama/Llama-3.1-70B-Instruct",
  "quantization": "awq-4bit",
  "maxContextLength": 32768,
  "gpuMemoryBudgetMB": 40000,
  "evictModel": "meta-llama/Llama-3.1-8B-Instruct",
  "verifiedOpToken": "eyJ..."
}
""")
UNLOAD: dict[str, Any] = json.loads("""
{
  "modelId": "meta-llama/Llama-3.1-8B-Instruct",
  "verifiedOpToken": "eyJ..."
}
""")
FLUSH: dict[str, Any] = json.loads("""
{
  "scope": "tenant",
  "tenantId": "community-x",
  "modelId": null,
  "verifiedOpToken": "eyJ..."
}
""")
HEADERS = {
    "X-Cache-Mode": "prefix",
    "X-Cache-Tag": "session-abc123",
    "X-Tenant-ID": "community-x",
    "X-Priority": "high",
}
"""Of an inference request."""


class RunnerClient:
    """One runner, at a unix socket or at an address. `every_s`: the poller's 5 s; a test may shorten it."""

    def __init__(self, token: str, *, socket: Path | None = None, url: str = "http://runner", every_s: float = 5.0):
        transport = None if socket is None else httpx.HTTPTransport(uds=str(socket))
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=url, transport=transport, headers=headers, timeout=120, trust_env=False)
        self._every_s = every_s

    def __enter__(self) -> RunnerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def execute_model_load(self, stm: dict[str, Any]) -> dict[str, Any]:
        """`executeModelLoad` of the specification."""
        response = self.post("/v1/models/load", stm)
        result: dict[str, Any] = response.json()
        if response.status_code == 202:
            polled: dict[str, Any] = self.poll_model_load_task(result["taskId"])  # poll for completion
            return polled
        return result

    def poll_model_load_task(self, task_id: str, seen: Callable[[dict[str, Any]], None] = lambda _: None) -> Any:
        """`pollModelLoadTask` of the specification."""
        max_attempts = 60  # 5 minutes
        for _ in range(max_attempts):
            time.sleep(self._every_s)
            status = self.http.get(f"/v1/models/load/{task_id}").json()
            seen(status)
            if status["status"] == "completed":
                return {
                    "modelId": status["modelId"],
                    "verified": True,
                    "gpuMemoryUsedMB": status.get("gpuMemoryUsedMB"),
                }
            if status["status"] == "failed":
                raise RuntimeError(f"Model load failed: {status['error']}")
        raise RuntimeError("Model load timeout")
