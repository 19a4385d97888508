"""The gain of an agent whose prompt was read ahead: `python benchmarks/prewarm.py [--rounds 3] [--tokens 4000]`.

A random model of 107 million weights of 8 bits, made on the spot, on a real llama-server on the CPU (one thread, one
place), behind a whole Hive. Every round asks twice through Hive, in turn: with a system prompt that nobody has read
(cold), and with one that Hive had read when its agent started (warm), both of the same length and seen for the first
time. Measured: the time to the first token, and the CPU time of llama-server between question and end (utime + stime),
which does not drift with the machine's load. The original specification says "first real request ~10x faster".

Then: does a wake take longer because a prompt is sent? Two agents are put to sleep and woken in turn; one of them has a
new prompt each time, so that each of its wakes has it sent.

Needs llama-server (tests/tools/build_llama_server.sh), gguf and redis-server. 115 MB in /var/tmp; ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import httpx
from build_line import build_line
from gguf.quants import quantize

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "tools")]

import make_tiny_gguf as gguf_model
from journeys.stack import Stack, stack, until

from tests.llama import program
from tests.ports import free_port

MODEL = "random"
SHAPE = {"HIDDEN": 768, "INNER": 2048, "LAYERS": 15, "HEADS": 12, "KV_HEADS": 12, "HEAD_SIZE": 64, "CONTEXT": 8192}
SENTENCES = gguf_model.SENTENCES
CHARS_PER_TOKEN = 3.6
"""Of these sentences with this vocabulary, a little more than it is."""
TICKS = os.sysconf("SC_CLK_TCK")
SEED_SAYS = 10
LOADED_WITHIN_S, READ_WITHIN_S = 120.0, 600.0


class Asked(NamedTuple):
    """One question. `cpu_s`: of llama-server, until its answer had ended."""

    first_s: float
    cpu_s: float
    tokens_in: int
    cached: int


class Server:
    """llama-server. `cpu_s`: what it has used so far."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def is_loaded(self) -> bool:
        assert self.process.poll() is None, "llama-server ended"
        return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200


class Quantized(gguf.GGUFWriter):  # type: ignore[misc]
    """Matrices in 8 bits a weight, which a CPU is done with soonest."""

    weights = 0

    def add_tensor(self, name: str, tensor: Any) -> None:
        self.weights += tensor.size
        if tensor.ndim == 1:
            super().add_tensor(name, tensor)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        super().add_tensor(name, quantize(tensor, kind), raw_dtype=kind)


def make_model(path: Path) -> int:
    """Writes it; how many weights it has."""
    for name, value in SHAPE.items():
        setattr(gguf_model, name, value)
    writer = Quantized(path, "llama")
    tokens = gguf_model.add_tokenizer(writer)
    gguf_model.add_shape(writer, tokens)
    gguf_model.add_tensors(writer, tokens, seed=0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.weights


@contextmanager
def serving(model: Path) -> Iterator[Server]:
    binary = program()
    if binary is None:
        sys.exit("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    port = free_port()
    command = [str(binary), "-m", str(model), "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", "1", "-c", str(SHAPE["CONTEXT"]), "--threads", "1", "--threads-batch", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            server = Server(process, f"http://127.0.0.1:{port}")
            until(server.is_loaded, within_s=LOADED_WITHIN_S, what="llama-server has loaded the model")
            yield server
        finally:
            process.kill()


def prompt_of(number: int, tokens: int) -> str:
    """Some `tokens` tokens that no other number's begin with."""
    words = [word for sentence in SENTENCES for word in sentence.split()]
    start = f"{words[number % len(words)]} {words[number // len(words) % len(words)]} {number}. "
    text = " ".join(words)
    return start + " ".join([text] * (tokens // len(words) + 1))[: int(tokens * CHARS_PER_TOKEN)]


def ask(server: Server, access: dict[str, Any], prompt: str) -> Asked:
    """As the agent, streamed, four tokens."""
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "Hello, how are you today?"}]
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 4}
    body["stream_options"] = {"include_usage": True}
    head = {"authorization": f"Bearer {access['model']}"}
    cpu_s, begun_at, first_s, usage = server.cpu_s, time.perf_counter(), 0.0, {}
    url = f"{access['openai_base_url']}/chat/completions"
    with httpx.stream("POST", url, json=body, headers=head, timeout=READ_WITHIN_S, trust_env=False) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not first_s and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first_s = time.perf_counter() - begun_at
            usage = chunk.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(first_s, server.cpu_s - cpu_s, usage["prompt_tokens"], cached)


def spec_of(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": ["/bin/sleep", "100000"], "model": MODEL, **more}


def row_of(hive: Stack, agent: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = hive.get("/api/prompts")["prompts"]
    return next(row for row in rows if agent in row["agents"])


def cold(hive: Stack, server: Server, number: int, tokens: int) -> Asked:
    prompt = prompt_of(number, tokens)
    hive.post("/api/agents", spec_of(f"cold-{number}", system_prompt=prompt))
    return ask(server, hive.get(f"/api/agents/cold-{number}/tokens"), prompt)


def warm(hive: Stack, server: Server, number: int, tokens: int) -> Asked:
    prompt, name = prompt_of(number, tokens), f"warm-{number}"
    hive.post("/api/agents", spec_of(name, system_prompt=prompt, prewarm_on_start=True))
    until(lambda: row_of(hive, name)["warm_since"], within_s=READ_WITHIN_S, what="it is read")
    return ask(server, hive.get(f"/api/agents/{name}/tokens"), prompt)


def first_tokens(hive: Stack, server: Server, rounds: int, tokens: int) -> None:
    found: dict[str, list[Asked]] = {"cold": [], "warm": []}
    for number in range(rounds):
        ways = [("cold", cold), ("warm", warm)]
        for name, way in ways if number % 2 else reversed(ways):
            found[name].append(way(hive, server, 2 * number + (name == "warm"), tokens))
            asked = found[name][-1]
            told = f"{asked.first_s * 1000:9.0f} ms to the first token, {asked.cpu_s:6.2f} s of CPU"
            print(f"  {name}  {told}, {asked.cached} of {asked.tokens_in} tokens kept", flush=True)
    for unit, of in (("ms to the first token", lambda one: one.first_s * 1000), ("s of CPU", lambda one: one.cpu_s)):
        one, other = (statistics.median(map(of, found[name])) for name in ("cold", "warm"))
        by_pair = [of(a) / of(b) for a, b in zip(found["cold"], found["warm"], strict=True) if of(b)]
        ratio = f"{statistics.median(by_pair):.1f} ({min(by_pair):.1f} to {max(by_pair):.1f})" if by_pair else "-"
        print(f"{unit}: cold {one:.4g}, warm {other:.4g}; by pairs {ratio} times less; the seed says ~{SEED_SAYS}")


def wakes(hive: Stack, times: int) -> None:
    for name in ("plain", "sent"):
        hive.post("/api/agents", spec_of(name))
    before, took = row_count(hive), {"plain": [], "sent": []}
    for number in range(times):
        prompt = f"{number}. Be kind."
        hive.client().put("/api/agents/sent", spec_of("sent", system_prompt=prompt, prewarm_on_start=True))
        for name in ("plain", "sent") if number % 2 else ("sent", "plain"):
            hive.post(f"/api/agents/{name}/pause")
            hive.post(f"/api/agents/{name}/resume")
            took[name].append(hive.get(f"/api/agents/{name}")["last_wake_ms"])
        until(lambda: row_of(hive, "sent")["warm_since"], within_s=60, what="it is read")
    until(lambda: row_count(hive) == before + times, within_s=10, what="every wake had one sent")
    plain, sent = (statistics.median(took[name]) for name in ("plain", "sent"))
    differs = statistics.median(b - a for a, b in zip(took["plain"], took["sent"], strict=True))
    print(f"wake: {plain:.2f} ms without a prompt, {sent:.2f} ms with one that is sent; by pairs {differs:+.2f} ms")


def row_count(hive: Stack) -> int:
    agents = hive.get("/api/usage")["agents"]
    return sum(row["requests"] for row in agents if row["agent_id"] == "prewarm")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt, at least")
    parser.add_argument("--wakes", type=int, default=40)
    arguments = parser.parse_args()
    print(build_line())
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        model = Path(folder) / "random.gguf"
        print(f"a random model of {make_model(model) / 1e6:.0f} million weights")
        with serving(model) as server, stack(url=server.url, up_within_s=120) as hive:
            first_tokens(hive, server, arguments.rounds, arguments.tokens)
            wakes(hive, arguments.wakes)


if __name__ == "__main__":
    main()
