"""One call of the command line: which Hive it means, and how its result and its errors are said."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hive.cli.text import harmless
from hive.errors import HiveError, NotConfirmed, NotFound, UsageError, as_said, did_you_mean

if TYPE_CHECKING:
    from hive.client.client import Client

SCHEMA_VERSION = 1
STATE_DIR = "HIVE_STATE_DIR"
"""Environment name of --state-dir; --socket, HIVE_SOCKET and --prefix go before it."""
Answer = dict[str, Any]


class CommandCall(typer.Context):
    """The context of every command: `client` talks to the Hive that is meant, `show` prints the result.

    stdout is the result, stderr the talk. With `--json` the result is one object with `schema` and `version`.
    """

    as_json: bool = False
    socket: Path | None = None
    state_dir: Path | None = None

    @property
    def client(self) -> Client:
        """Raises DependencyDown where no Hive answers, naming the sockets that were tried."""
        return client_of(self.socket, self.state_dir)

    def show(self, schema: str, answer: Answer, text: Callable[[], str]) -> None:
        """Prints `answer` as JSON, or what `text` makes of it."""
        if self.as_json:
            out(json.dumps({"schema": schema, "version": SCHEMA_VERSION, **answer}))
        else:
            out(text())

    def line(self, schema: str, answer: Answer, text: Callable[[], str]) -> None:
        """`show` for one of many: each is out at once, JSON one object a line."""
        self.show(schema, answer, text)
        flush()

    def say(self, text: str) -> None:
        """Talk, on stderr: not part of the result, silent with `--json`."""
        if not self.as_json:
            err(harmless(text))

    def confirm(self, question: str, *, yes: bool) -> None:
        """Asks before something is lost; without a person to ask it wants `--yes`. Raises UsageError, NotConfirmed."""
        if yes:
            return
        if not sys.stdin.isatty() or self.as_json:
            raise UsageError(f"{question} Nobody can be asked here", hint="say --yes")
        if not is_agreed(question, default=False):
            raise NotConfirmed

    @contextmanager
    def about(self, ref: str) -> Iterator[None]:
        """Around a request about one agent: an unknown name comes back with the nearest known one as its hint.

        Where the agent is there, something else was not found, and that has a hint of its own.
        """
        try:
            yield
        except NotFound as error:
            error.hint = self._nearest(ref) or error.hint
            raise

    def _nearest(self, ref: str) -> str:
        agents = self.client.agents_in_short()
        if any(ref in (agent["name"], agent["id"]) for agent in agents):
            return ""
        return did_you_mean(ref, [agent["name"] for agent in agents])


def is_agreed(question: str, *, default: bool) -> bool:
    """Whether a person says yes; the end of the input is a no.

    Raises NotConfirmed for Ctrl-C, and SIGINT is ignored from then on: the command has to end.
    """
    before = signal.signal(signal.SIGINT, _interrupt_once)
    try:
        agreed = typer.confirm(question, default=default, err=True)
    except (typer.Abort, KeyboardInterrupt):  # Typer's own for what comes once it waits for the answer
        err("")  # the cursor stands behind the question
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise NotConfirmed(interrupted=True) from None
        agreed = False
    signal.signal(signal.SIGINT, before)
    return agreed


def _interrupt_once(*_: object) -> None:
    """Ctrl-C pressed again would cut the sentence that says how a question was left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def out(text: str, *, end: str = "\n") -> None:
    """The result, or a piece of it. Raises HiveError where it cannot be written, BrokenPipeError without a reader."""
    with _written():
        sys.stdout.write(text + end)


def flush() -> None:
    """Everything said so far is out, or it raises as `out` does."""
    with _written():
        sys.stdout.flush()


@contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's last flush would fail again
        raise HiveError(f"cannot write the result: {error.strerror}") from None


def err(text: str) -> None:
    """Talk."""
    sys.stderr.write(text + "\n")


def client_of(socket: Path | None, state_dir: Path | None) -> Client:
    from hive.client.client import find
    from hive.paths import api_sockets, refuse_missing

    sockets = api_sockets(socket=socket, state_dir=state_dir, uid=os.geteuid(), env=os.environ)
    if socket is None:
        refuse_missing(state_dir, sockets)
    return find(sockets)


COMPLETED_WITHIN_S = 0.2
_PLAIN = re.compile(r"[A-Za-z0-9._:/@+-]+")
"""Text that a shell takes as it stands: a model's name comes from its maker, and a completed word is run."""


def agent_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completion of an agent's name: what the daemon says within `COMPLETED_WITHIN_S`, else nothing."""
    return completed(ctx, incomplete, lambda client: client.agents_in_short(timeout_s=COMPLETED_WITHIN_S))


def model_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The same of a model's name."""
    return completed(ctx, incomplete, lambda client: client.get("/api/models", timeout_s=COMPLETED_WITHIN_S)["models"])


def pool_model_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The same of a model of the pool."""
    return completed(ctx, incomplete, _of_pool)


def loadable_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The same of both, each once."""
    found = [*pool_model_names(ctx, incomplete), *model_names(ctx, incomplete)]
    return list(dict.fromkeys(found))


def _of_pool(client: Client) -> list[Answer]:
    slots = client.get("/api/pool", timeout_s=COMPLETED_WITHIN_S)["slots"]
    return [{"name": slot["model"]} for slot in slots]


def completed(
    ctx: typer.Context,
    incomplete: str,
    ask: Callable[[Client], list[Answer]],
    *,
    within_s: float | None = None,
) -> list[str]:
    """The names of what `ask` lists, of the Hive that the options before them, or the environment, mean."""
    from threading import Thread

    found: list[str] = []
    socket, state_dir = getattr(ctx, "socket", None), getattr(ctx, "state_dir", None)

    def look() -> None:
        with suppress(HiveError, OSError):
            found.extend(one["name"] for one in ask(client_of(socket, state_dir)))

    asking = Thread(target=look, daemon=True)
    asking.start()
    asking.join(within_s or COMPLETED_WITHIN_S)
    return [name for name in found if name.startswith(incomplete) and _PLAIN.fullmatch(name)]


def report(error: HiveError, *, as_json: bool) -> int:
    """Says on stderr what went wrong and returns the exit code."""
    if as_json:
        body = {"code": error.code, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        err(json.dumps({"schema": "error", "version": SCHEMA_VERSION, **body}))
    else:
        err(harmless(as_said(error)))
    return error.exit_code


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among the options (what follows `--` is not Hive's)."""
    ended = list(arguments).index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:ended]


AgentName = Annotated[
    str, typer.Argument(metavar="NAME", help="The agent's name or id.", autocompletion=agent_names, show_default=False)
]
"""The one argument of most commands."""

AgentNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME...", help="The agents' names or ids.", autocompletion=agent_names, show_default=False),
]
"""Of a command that takes several; `chosen_agents` says which."""


StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        readable=False,
        envvar=STATE_DIR,
        show_envvar=False,
        help=f"The hive up that was started with it (or {STATE_DIR}).",
    ),
]
Prefix = Annotated[Path, typer.Option("--prefix", metavar="DIR", help="The root of an image instead of this system.")]
"""The options of commands that work on the files of a Hive."""


Tail = Annotated[
    int, typer.Option("--tail", "-n", "--lines", metavar="N", min=0, help="Lines from the end; --lines is the same.")
]
"""Of what prints lines: one name for all of them."""


def chosen_agents(call: CommandCall, names: list[str] | None, *, every: bool) -> list[str]:
    """The agents named, each once, or with `every` (`--all`) each there is. Raises UsageError for none, or for both."""
    if every and names:
        raise UsageError("--all means each agent: name none beside it")
    if every:
        return [agent["name"] for agent in call.client.agents_in_short()]
    if not names:
        raise UsageError("which agent?", hint="NAME..., or --all for each of them")
    return [*dict.fromkeys(names)]
