"""The `hive-runner` program: loads the engine of one kind, and serves it at a unix socket. Standard library only."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from hive.runner.faults import OUT_OF_MEMORY, EngineFault, is_out_of_memory
from hive.runner.http_server import CallRoute, EngineCall, RunnerServer, end, said

KINDS = {"whisper": "hive.runner.whisper", "diffusers": "hive.runner.diffusers", "comfyui": "hive.runner.comfyui"}
"""The kinds of runner, each with its module: `add_flags(parser)`, and `Program(arguments)`, an EngineProgram."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
"""Files are here or nowhere: no engine asks a hub for them."""


class EngineProgram(Protocol):
    """One kind's engine. It is made from the program's arguments, and is loaded before anything is asked of it.

    Its module can be imported everywhere; what only its environment has, `load` imports.
    """

    def load(self) -> None:
        """Loads the model, and raises where it cannot: the program ends then."""
        ...

    def version(self) -> str:
        """Version of the engine."""
        ...

    def routes(self) -> Mapping[tuple[str, str], CallRoute]:
        """Its paths, by method and path, beside those that every runner has."""
        ...

    def facts(self) -> dict[str, Any]:
        """More members of its model's row at /v1/models."""
        ...

    def counts(self) -> Mapping[str, float]:
        """Its figures at /metrics by name (`hive_runner_…`), beside those of every runner."""
        ...


@runtime_checkable
class GivesBack(Protocol):
    """An engine that holds something which does not end with its process."""

    def unload(self) -> None:
        """Ends what is at work and gives that back, within seconds."""
        ...


class Front:
    """The paths that every runner has: /health, /v1/models, /metrics. Until its model is loaded, each answers 503."""

    def __init__(self, kind: str, name: str, engine: EngineProgram, server: RunnerServer) -> None:
        self._kind, self._name, self._engine, self._server = kind, name, engine, server
        self.load_s: float | None = None
        self.created = int(time.time())

    def routes(self) -> dict[tuple[str, str], CallRoute]:
        return {
            ("GET", "/health"): CallRoute(self.health, takes_turn=False),
            ("GET", "/v1/models"): CallRoute(self.models, takes_turn=False),
            ("GET", "/metrics"): CallRoute(self.metrics, takes_turn=False),
        }

    def check_loaded(self) -> None:
        """Raises EngineFault while the model loads."""
        if self.load_s is None:
            raise EngineFault(503, f"{self._name} is loading", "not_ready")

    def health(self, call: EngineCall) -> None:
        self.check_loaded()
        call.answer_json({"status": "ok", "runner": self._kind, "version": self._engine.version()})

    def models(self, call: EngineCall) -> None:
        self.check_loaded()
        row = {"id": self._name, "object": "model", "created": self.created, "owned_by": "hive-runner"}
        call.answer_json({"object": "list", "data": [row | self._engine.facts()]})

    def metrics(self, call: EngineCall) -> None:
        self.check_loaded()
        line = self._server.line
        shown = {
            "hive_runner_load_seconds": self.load_s or 0.0,
            "hive_runner_places": line.places,
            "hive_runner_busy": line.busy,
            "hive_runner_waiting": line.waiting,
            **self._engine.counts(),
        }
        call.answer(
            "".join(f"{name} {value:g}\n" for name, value in shown.items()).encode(), "text/plain; version=0.0.4"
        )


def guarded(route: CallRoute, front: Front) -> CallRoute:
    """The route, which is refused while the model loads."""

    def handler(call: EngineCall) -> None:
        front.check_loaded()
        route.handler(call)

    return CallRoute(handler, route.takes_turn)


def parser_of(kind: str, module: Any) -> argparse.ArgumentParser:
    """The flags of one kind: those of every runner, and its own."""
    parser = argparse.ArgumentParser(prog=f"hive-runner {kind}", description=module.__doc__, allow_abbrev=False)
    parser.add_argument("--socket", type=Path, required=True, help="the unix socket to listen at")
    parser.add_argument("--name", required=True, help="the name by which the model is asked for")
    parser.add_argument("--spool", help="directory of uploads while they are read (without a name there)")
    module.add_flags(parser)
    return parser


def main(words: Sequence[str]) -> int:
    """Does `hive-runner`, until a signal ends it. 0 then, 1 where the model cannot be loaded, 2 for wrong words, 77
    without memory for it."""
    if not words or words[0] not in KINDS:
        said(f"hive-runner KIND --socket PATH --name NAME …: KIND is one of {', '.join(KINDS)}")
        return 2
    os.environ.update(OFFLINE)
    try:
        module = importlib.import_module(KINDS[words[0]])
    except ModuleNotFoundError as error:
        said(lacking(words[0], error))
        return 1
    arguments = parser_of(words[0], module).parse_args(words[1:])
    engine = cast(EngineProgram, module.Program(arguments))
    return serve(words[0], arguments.name, engine, arguments.socket, arguments.spool)


def lacking(kind: str, error: ModuleNotFoundError) -> str:
    """The words for an environment that does not have the engine. Hive is in no registry: a package of its name there
    is somebody else's."""
    return (
        f"hive-runner {kind} lacks {error.name}: pip install '.[{kind}]' in a clone of Hive, with its environment's pip"
    )


def serve(kind: str, name: str, engine: EngineProgram, path: Path, spool: str | None = None) -> int:
    """Loads the engine and answers for it; returns when a signal has ended it, or the load has failed."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    routes: dict[tuple[str, str], CallRoute] = {}
    server = RunnerServer(path, routes, spool=spool)
    front = Front(kind, name, engine, server)
    routes |= front.routes()
    routes |= {key: guarded(route, front) for key, route in engine.routes().items()}
    server.listen()
    failed: list[int] = []

    def load() -> None:
        began = time.monotonic()
        try:
            engine.load()
        except ModuleNotFoundError as error:
            said(lacking(kind, error))
            failed.append(1)
            stopped.set()
            return
        except Exception as error:
            said(f"{name} cannot be loaded: {type(error).__name__}: {str(error)[:500]}")
            failed.append(OUT_OF_MEMORY if is_out_of_memory(error) else 1)
            stopped.set()
            return
        front.load_s = time.monotonic() - began
        said(f"{name} is loaded after {front.load_s:.1f} s")

    threading.Thread(target=load, name="load", daemon=True).start()  # a signal ends the process while it loads
    stopped.wait()
    server.close()
    if isinstance(engine, GivesBack):
        engine.unload()
    return failed[0] if failed else 0


def run() -> None:
    """The program, with its arguments. It ends without waiting for its threads: a call at work is cut."""
    end(main(sys.argv[1:]))
