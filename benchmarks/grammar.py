"""Time for which the worst schemas that Hive accepts hold a server's loop: `python benchmarks/grammar.py [--vllm]`.

Each family of schemas is made as large as the limits of `[grammar_KIND]` allow, then a search mixes and changes what
was worst. The judge is a real llama-server (or vLLM on the CPU) with a tiny model and a vocabulary of `--tokens`: a
neighbour streams while the schema is asked for. Shown is the longest time between two of the neighbour's events (wait)
and how much the thread that serves everybody computed in it (hold: what others on this machine do is not in it). Then
the worst is asked for once a second by each of `--agents` agents, and last tools as agents have them. Promised: a hold
of ≤ 100 ms.

With `--vllm` a second judge is vLLM's own xgrammar, asked alone for the CPU time of what vLLM does within its loops
(xgrammar_cost.py). It decides: vLLM on the CPU stops for 2 to 3 s now and then with nothing to do but the neighbour's
stream, and no schema is the cause of that.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent / part) for part in ("tests", "")]

import msgspec
from build_line import build_line
from journeys.sdk import TEMPLATE

from hive.bodies import grammar
from hive.domain import BackendKind
from hive.errors import GrammarTooComplex
from hive.routing.slot import grammar_limits
from hive.settings.table import Settings
from tests import llama, vllm

PROMISED_MS = 100
TIMES = 3
SHORT = TEMPLATE.replace("{{ tool | tojson }}", "{{ tool['function']['name'] }}")
"""Tools by their names only: the tiny model's context is short, and a grammar is made of them all the same."""
Schema = dict[str, Any]


class Server:
    """The server that is asked, and its thread that serves everybody."""

    def __init__(self, address: str, loops: list[Path], xgrammar: Xgrammar | None = None) -> None:
        self.xgrammar = xgrammar
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self._loops = loops

    def computed_ms(self) -> list[float]:
        """CPU time of each of its loops so far, on Linux to the nanosecond."""
        return [int(path.read_text().split()[0]) / 1e6 for path in self._loops]

    def ask(self, target: str, body: Schema) -> int:
        """The answer's status; 0 for none within a minute."""
        link = http.client.HTTPConnection(self.host, self.port, timeout=60)
        with contextlib.closing(link):
            try:
                link.request("POST", target, json.dumps(body), {"content-type": "application/json"})
                answer = link.getresponse()
                answer.read()
            except OSError:
                return 0
            return answer.status


class Xgrammar:
    """The xgrammar of a vLLM's environment, asked by itself; see xgrammar_cost.py."""

    def __init__(self, venv: Path, model: Path, tokens: int) -> None:
        command = [venv / "bin" / "python", Path(__file__).with_name("xgrammar_cost.py"), model, str(tokens)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def cost(self, body: Schema) -> dict[str, float]:
        """ms of `parse`, `fill`, `accept` (within vLLM's loops) and `compile` (beside them); nothing for tools."""
        schema = _schema_of(body)
        if not schema:
            return {}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(schema) + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Neighbour(threading.Thread):
    """Streams all the time: `waits` and `holds` are the ms from one event to the next."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.streams = threading.Event()
        self.waits: list[float] = []
        self.holds: list[float] = []

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "Hello", "stream": True, "max_tokens": 1500, "temperature": 0}
        while not self._over.is_set():
            link = http.client.HTTPConnection(self._server.host, self._server.port, timeout=120)
            with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
                text = json.dumps({**body, "ignore_eos": True})
                link.request("POST", "/v1/completions", text, {"content-type": "application/json"})
                self._follow(link.getresponse())

    def _follow(self, answer: http.client.HTTPResponse) -> None:
        before = None
        while not self._over.is_set() and (line := answer.readline()):
            if line.startswith(b"data:"):
                now = time.perf_counter() * 1e3, self._server.computed_ms()
                if before is not None:
                    self.waits.append(now[0] - before[0])
                    self.holds.append(max(late - early for late, early in zip(now[1], before[1], strict=True)))
                before = now
                self.streams.set()

    def stop(self) -> None:
        self._over.set()
        self.join(10)


def measure(server: Server, body: Schema) -> tuple[float, float, int]:
    """A request beside a neighbour: the longest hold and wait in ms, and its status.

    The one with the middle hold of three, whose schemas differ in a word: a server keeps what it has compiled, and
    vLLM stops for 2 to 3 s now and then with nothing to do but the neighbour's stream.
    """
    return sorted(measure_once(server, _anew(body, number)) for number in range(TIMES))[TIMES // 2]


def _anew(body: Schema, number: int) -> Schema:
    """The same with a title that no other has."""
    title = f"number {number} of {time.monotonic_ns()}"
    body = json.loads(json.dumps(body))
    wanted = body.get("response_format", {}).get("json_schema", {})
    for holder, name in [(wanted, "schema"), *((tool["function"], "parameters") for tool in body.get("tools", []))]:
        if isinstance(holder.get(name), dict):
            holder[name]["title"] = title
    return body


def measure_once(server: Server, body: Schema) -> tuple[float, float, int]:
    neighbour = Neighbour(server)
    neighbour.start()
    neighbour.streams.wait(30)
    time.sleep(0.05)
    begun = len(neighbour.waits)
    status = server.ask("/v1/chat/completions", body)
    time.sleep(0.1)
    neighbour.stop()
    return max(neighbour.holds[begun:], default=0), max(neighbour.waits[begun:], default=0), status


# families of schemas; each grows with n -------------------------------------------------------------------------------


def _object(properties: Schema, *, needed: bool = True, more: Any = False) -> Schema:
    required = list(properties) if needed else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def _nested(inner: Schema, wrap: Callable[[Schema], Schema], times: int) -> Schema:
    for _ in range(times):
        inner = wrap(inner)
    return inner


def _named(n: int, schema: Schema) -> Schema:
    return {f"p{number}": schema for number in range(n)}


STRING, NULL = {"type": "string"}, {"type": "null"}
RANGE = {"type": "integer", "minimum": -123456789012345, "maximum": 987654321098765}
TYPES = {"type": ["string", "integer", "null", "array", "boolean"], "items": NULL}
COMMON = "etaoinshrdlu"


def _pattern(text: str) -> Schema:
    return {"type": "string", "pattern": f"^{text}$"}


def _pieces(n: int) -> Schema:
    return {"$defs": _named(n, STRING), **_object({f"q{k}": {"$ref": f"#/$defs/p{k}"} for k in range(n)})}


FAMILIES: dict[str, Callable[[int], Schema]] = {
    "optional properties": lambda n: _object(_named(n, {"type": "integer"}), needed=False),
    "optional, names alike": lambda n: _object({"x" * 39 + str(k): NULL for k in range(n)}, needed=False),
    "optional, more allowed": lambda n: _object(_named(n, STRING), needed=False, more=True),
    "objects of 64 optional": lambda n: _object(_named(n, _object(_named(64, NULL), needed=False))),
    "long names, more allowed": lambda n: _object({"n" * 200 + str(k): NULL for k in range(n)}, more=True),
    "enum": lambda n: {"enum": [f"v{number}" for number in range(n)]},
    "enum, long and alike": lambda n: {"enum": ["e" * 200 + str(number) for number in range(n)]},
    "enum of words": lambda n: {"enum": [f"{COMMON[k % 12]}{COMMON[k // 12 % 12]}{k}" for k in range(n)]},
    "enums": lambda n: _object(_named(n, {"enum": [f"v{number}" for number in range(90)]})),
    "strings in parallel": lambda n: {"anyOf": [{"type": "string", "maxLength": 90 + k} for k in range(n)]},
    "very long strings in parallel": lambda n: {"anyOf": [{"type": "string", "maxLength": 9000 + k} for k in range(n)]},
    "arrays in parallel": lambda n: {"anyOf": [{"type": "array", "items": STRING} for _ in range(n)]},
    "objects in parallel": lambda n: {"anyOf": [_object({"a": STRING, "b": NULL}) for _ in range(n)]},
    "parallel, nested": lambda n: _nested(STRING, lambda s: {"anyOf": [{"type": "array", "items": s}] * 2}, n),
    "long strings": lambda n: _object(_named(n, {"type": "string", "maxLength": 2000})),
    "long arrays": lambda n: _object(_named(n, {"type": "array", "items": NULL, "maxItems": 1900})),
    "ranges": lambda n: _object(_named(n, RANGE)),
    "pattern: stars": lambda n: _pattern("[a-z]*" * n),
    "pattern: stars, letters": lambda n: _pattern("".join(f"{letter}*" for letter in COMMON[:n])),
    "pattern: in parallel": lambda n: _pattern("(" + "|".join(["[a-z]+"] * n) + ")"),
    "pattern: words": lambda n: _pattern(f"([a-z]{{1,{n}}} )*[a-z ]*"),
    "pattern: choices": lambda n: _pattern("(" + "|".join(f"a{k}" for k in range(n)) + ")"),
    "pattern: counted": lambda n: _pattern(f"[a-z]{{1,{n}}}"),
    "pattern: counted groups": lambda n: _pattern(f"(ab?){{1,{n}}}"),
    "patterns, counted": lambda n: _object(_named(n, _pattern("[a-z]{1,100}"))),
    "patterns, counted far": lambda n: _object(_named(n, _pattern("[a-z]{1,500}"))),
    "patterns": lambda n: _object(_named(n, _pattern("[a-z]*[a-z0-9]*[a-z_]*"))),
    "patterns in parallel": lambda n: {"anyOf": [_pattern("[a-z]*[a-z0-9]*") for _ in range(n)]},
    "nested objects": lambda n: _nested(NULL, lambda s: _object({"a": s}), n),
    "references": _pieces,
    "copies": lambda n: {"$defs": {"a": _object(_named(20, STRING))}, "allOf": [{"$ref": "#/$defs/a"}] * n},
    "types": lambda n: _object(_named(n, TYPES)),
    "values": lambda n: {"const": "c" * n},
}


def as_format(schema: Schema) -> Schema:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "temperature": 0,  # else vLLM compiles a sampler for each new shape of a batch, 2 to 3 s in its loop
        "response_format": wanted,
    }


def as_tools(schemas: list[Schema], choice: str = "required") -> Schema:
    tools = [{"type": "function", "function": {"name": f"t{k}", "parameters": s}} for k, s in enumerate(schemas)]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "temperature": 0,  # else vLLM compiles a sampler for each new shape of a batch, 2 to 3 s in its loop
        "tools": tools,
        "tool_choice": choice,
    }


class Judge:
    """Hive's own check, under the limits of one kind of server."""

    def __init__(self, kind: BackendKind) -> None:
        self._limits = grammar_limits(Settings(), kind)

    def takes(self, body: Schema) -> bool:
        try:
            grammar.check({name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}, self._limits)
        except (GrammarTooComplex, RecursionError):
            return False
        return True

    def largest(self, make: Callable[[int], Schema], most: int = 4096) -> tuple[int, Schema]:
        """The largest n that is accepted, and the request."""
        low, high = 1, 2
        while high < most and self.takes(make(high)):  # doubled, as some families double with each step
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.takes(make(middle)) else (low, middle)
        return low, make(low)


def mixed(some: list[Schema], dice: random.Random) -> Schema:
    """A request of these schemas: side by side, within each other, as tools."""
    match dice.randrange(6):
        case 0:
            return as_format({"anyOf": some})
        case 1:
            return as_format(_object({f"p{k}": s for k, s in enumerate(some)}, needed=dice.random() < 0.5))
        case 2:
            return as_format({"type": "array", "items": some[0]})
        case 3:
            return as_tools(some * dice.randint(1, 12))
        case 4:
            return as_tools(some * dice.randint(1, 12), "auto")
    return as_format(changed(some[0], dice))


def searched(judge: Judge, seeds: list[Schema], dice: random.Random) -> Schema:
    """A request made of the worst schemas so far that is accepted too."""
    while True:
        body = mixed([dice.choice(seeds) for _ in range(dice.randint(1, 4))], dice)
        if judge.takes(body):
            return body


def changed(schema: Any, dice: random.Random) -> Any:
    """A copy with numbers, lists and texts made larger or smaller here and there."""
    if isinstance(schema, dict):
        return {key: changed(value, dice) for key, value in schema.items()}
    if isinstance(schema, list):
        kept = [changed(item, dice) for item in schema if dice.random() < 0.95]
        return kept or schema
    if isinstance(schema, bool) or dice.random() < 0.7:
        return schema
    if isinstance(schema, int):
        return max(1, int(schema * dice.choice([0.5, 0.9, 1.1, 2])))
    return schema


def usual_tools(size: int) -> Schema:
    """Tools as agents have them, after the 117 of a real server for a code host: names, long descriptions, a few
    properties with half of them needed, short enums, now and then a list of objects."""
    words, dice = "the name of what is to be changed, as it is listed by the other tools. ", random.Random(1)
    files = {"type": "array", "items": _object({"path": STRING, "content": STRING})}
    state = {"type": "string", "enum": ["open", "closed", "all"], "description": words}
    tools: list[Schema] = []
    while len(json.dumps(tools)) < size:
        properties: Schema = {
            name: {"type": dice.choice(["string", "number", "boolean"]), "description": words[: dice.randint(20, 70)]}
            for name in dice.sample(["owner", "repo", "path", "page", "per_page", "sha", "title", "body"], 6)
        }
        properties |= {"state": state, "files": files}
        inner = {"type": "object", "properties": properties, "required": list(properties)[:4]}
        about = {"name": f"do_something_{len(tools)}", "description": words * dice.randint(1, 6), "parameters": inner}
        tools.append({"type": "function", "function": about})
    return {**as_tools([]), "tools": tools}


# the run --------------------------------------------------------------------------------------------------------------


def p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)] if samples else 0.0


def beside(server: Server, body: Schema | None, agents: int, seconds: float) -> tuple[list[float], list[float]]:
    """Waits and holds of two neighbours while each agent asks once a second."""
    neighbours = [Neighbour(server) for _ in range(2)]
    for neighbour in neighbours:
        neighbour.start()
        neighbour.streams.wait(30)
    until = time.monotonic() + seconds

    def agent() -> None:
        while body is not None and (begun := time.monotonic()) < until:
            server.ask("/v1/chat/completions", body)
            time.sleep(max(0.0, begun + 1 - time.monotonic()))

    threads = [threading.Thread(target=agent, daemon=True) for _ in range(agents)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    for neighbour in neighbours:
        neighbour.stop()
    return [wait for one in neighbours for wait in one.waits], [hold for one in neighbours for hold in one.holds]


@contextlib.contextmanager
def llama_server(tokens: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, llama.serve(Path(folder), template=SHORT, tokens=tokens) as server:
        pid = server.process.pid
        yield Server(server.address, [Path(f"/proc/{pid}/task/{pid}/schedstat")])


@contextlib.contextmanager
def vllm_server(tokens: int) -> Iterator[Server]:
    """Its loops are two processes: the one that answers, and the engine, the only one with that name."""
    venv = vllm.environment()
    assert venv is not None, "no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV"
    with tempfile.TemporaryDirectory(prefix="hive-vllm-") as folder:
        model = Path(folder) / "model"
        made = [venv / "bin" / "python", vllm.MAKE_MODEL, model, "--tokens", str(tokens)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        with vllm.serve(venv, Path(folder), model) as server:
            pids = [server.process.pid, *_children(server.process.pid)]
            loops = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in pids]
            with contextlib.closing(Xgrammar(venv, model, tokens)) as xgrammar:
                yield Server(server.address, loops, xgrammar)


def _children(pid: int) -> list[int]:
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [grand for child in found for grand in (child, *_children(child))]


Found = tuple[float, str, Schema]
"""The hold in ms, the family, the request."""


def run(server: Server, kind: BackendKind, arguments: argparse.Namespace) -> float:
    """The worst hold in ms."""
    judge = Judge(kind)
    plain = as_format(_object({"a": STRING}))
    server.ask("/v1/chat/completions", plain)  # the first one makes vLLM load what it needs for grammars
    show("a plain schema", plain, *measure(server, plain))
    found = families(server, judge, arguments.only)
    tried = search(server, judge, found, arguments)
    worst, name, body = found[0]
    print(f"worst of {len(FAMILIES)} families and {tried} found by search: hold {worst:.1f} ms")
    print(f"  {name}, {len(json.dumps(body))} bytes")
    if arguments.write:
        Path(arguments.write).write_text(json.dumps(body))
    for label, asked in (("alone", None), (f"{arguments.agents} agents ask it once a second", body)):
        waits, holds = beside(server, asked, arguments.agents, arguments.beside_s)
        told = f"p99 wait {p99(waits):.1f} ms, hold {p99(holds):.1f} ms; longest {max(waits, default=0):.0f} ms"
        print(f"  neighbours, {label}: {told}")
    for size in (60_000, 120_000, 200_000):
        for choice in ("auto", "required"):
            body = {**usual_tools(size), "tool_choice": choice}
            assert judge.takes(body), "tools as agents have them must pass"
            show(f"tools of {size // 1000} KB ({len(body['tools'])}), {choice}", body, *measure(server, body))
    return worst


def show(name: str, body: Schema, hold: float, wait: float, status: int) -> None:
    size = len(json.dumps(body))
    print(f"  hold {hold:7.1f} ms  wait {wait:7.1f} ms  {status or 'none'}  {size:6} bytes  {name}", flush=True)


def judged(server: Server, body: Schema, hold: float) -> float:
    """The hold that counts: as measured, or what xgrammar takes of it."""
    if server.xgrammar is None:
        return hold
    cost = server.xgrammar.cost(body)
    print("      xgrammar alone:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in cost.items()), flush=True)
    return max(cost.get(name, 0.0) for name in ("parse", "fill", "accept"))


def families(server: Server, judge: Judge, only: str) -> list[Found]:
    """Each as large as it is accepted, the worst first."""
    found: list[Found] = []
    for name, make in FAMILIES.items():
        if only in name:
            n, body = judge.largest(lambda n, make=make: as_format(make(n)))
            hold, wait, status = measure(server, body)
            show(f"{name} × {n}", body, hold, wait, status)
            found.append((judged(server, body, hold), name, body))
    found.sort(key=lambda one: -one[0])
    return found


def search(server: Server, judge: Judge, found: list[Found], arguments: argparse.Namespace) -> int:
    """Adds what is found within the time; how many were tried."""
    dice, until, tried = random.Random(arguments.seed), time.monotonic() + arguments.search_s, 0
    while time.monotonic() < until:
        seeds = [_schema_of(body) for _, _, body in found[:12]]
        body = searched(judge, [seed for seed in seeds if seed], dice)
        hold = 0.0 if server.xgrammar else measure(server, body)[0]
        tried += 1
        found.append((judged(server, body, hold), "found by search", body))
        found.sort(key=lambda one: -one[0])
        del found[40:]
    return tried


def _schema_of(body: Schema) -> Schema:
    found: Schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", action="store_true", help="vLLM on the CPU instead of llama-server")
    parser.add_argument("--tokens", type=int, default=32_000, help="vocabulary of the model")
    parser.add_argument("--search-s", type=float, default=60)
    parser.add_argument("--beside-s", type=float, default=20)
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only families with this in their name")
    parser.add_argument("--write", default="", help="file for the worst request")
    arguments = parser.parse_args()
    print(build_line())
    print(f"promised: a hold ≤ {PROMISED_MS} ms")
    with vllm_server(arguments.tokens) if arguments.vllm else llama_server(arguments.tokens) as server:
        worst = run(server, BackendKind.VLLM if arguments.vllm else BackendKind.LLAMA, arguments)
    sys.exit(worst > PROMISED_MS)


if __name__ == "__main__":
    main()
