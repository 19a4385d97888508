"""`hive run`: a chat with a model through Hive's proxy, as its operator."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from hive.cli.call import Answer, CommandCall, flush, model_names, out
from hive.cli.conversation import HELP, InputKind, Lines, Typed
from hive.cli.text import fields, harmless, milliseconds
from hive.errors import (
    BackendDown,
    BackendTimeout,
    BadRequest,
    DependencyDown,
    HiveError,
    ModelNotFound,
    NotFound,
    NotPermitted,
    Saturated,
    TooManyRequests,
    UsageError,
    did_you_mean,
    with_code,
)
from hive.terminal_text import counted

if TYPE_CHECKING:
    from http.client import HTTPResponse

Message = dict[str, str]

CONNECT_S = 5.0
SILENCE_S = 600.0
"""A large model may load for minutes before its first word; the proxy has the sharper limits."""
PROMPT_MAX_BYTES = 8 * 1024 * 1024
_ERRORS: dict[int, type[HiveError]] = {
    400: BadRequest,
    401: NotPermitted,
    403: NotPermitted,
    404: NotFound,
    429: TooManyRequests,
    502: BackendDown,
    503: Saturated,
    504: BackendTimeout,
}


def run(
    call: CommandCall,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As `hive model list` names it.", autocompletion=model_names)
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]", help="With what stdin has before it; without both, a conversation."),
    ] = None,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="What the model is told first.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell the tokens, and how fast they came.")] = False,
) -> None:
    """Asks a model, through Hive like any agent would, and prints the answer as it comes.

    In a conversation /? says what there is besides: /set system, /clear, /bye; three quotes begin and end what has
    several lines. Ctrl-C stops an answer, Ctrl-D ends the conversation.

    Examples:
      hive run llama3.2 why is the sky blue
      git diff | hive run llama3.2 what does this change
      hive run llama3.2 --system "answer in one word"
    """
    chat = Chat(call, call.client.get("/api/system/access"), model, system=system, verbose=verbose)
    given = piped(PROMPT_MAX_BYTES) if not sys.stdin.isatty() else ""
    text = " ".join(part for part in (given, *(prompt or [])) if part)
    if text.strip():
        chat.ask_once(text)
    elif sys.stdin.isatty():
        chat.converse()
    else:
        raise UsageError("there is no prompt", hint="hive run MODEL PROMPT, or the prompt on stdin")


def piped(most_bytes: int) -> str:
    """Reads a pipe or a file on stdin to its end, as Ollama does; nothing where stdin is anything else, which may never
    end. Raises UsageError."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or none of the system's
        kind = 0
    if not stat.S_ISFIFO(kind) and not stat.S_ISREG(kind):
        return ""
    data = sys.stdin.buffer.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UsageError(f"the prompt is larger than {most_bytes} bytes")
    return data.decode(errors="replace")


class Chat:
    """One conversation with one model."""

    def __init__(self, call: CommandCall, access: Answer, model: str, *, system: str, verbose: bool) -> None:
        self._call = call
        self._access = access
        self._model = model
        self._system = system
        self._verbose = verbose
        self._said: list[Message] = []

    def ask_once(self, prompt: str) -> None:
        """Raises what the proxy refuses with, an unknown model with the nearest name."""
        self._said = [{"role": "user", "content": prompt}]
        timing = Timing()
        with self._about_model():
            text = "".join(self._pieces(timing, print_=not self._call.as_json))
        if self._call.as_json:
            used = {"tokens_in": timing.tokens_in, "tokens_out": timing.tokens_out}
            self._call.show("run", {"model": self._model, "text": text, **used}, lambda: text)
        elif not text.endswith("\n"):
            out("")
        self._tell(timing)

    def converse(self) -> None:
        """Until Ctrl-D or /bye. Raises NotFound at once where no server has the model; other errors end an answer and
        not the conversation."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history in `input`

        self._check_there()
        self._call.say("/? for help, Ctrl-D ends the conversation")
        lines = Lines()
        while True:
            try:
                typed = lines.take(input("... " if lines.is_open else "> "))
            except EOFError:
                self._call.say("")
                return
            except KeyboardInterrupt:
                lines.forget()
                self._call.say("\nCtrl-D or /bye ends the conversation")
                continue
            if typed.kind is InputKind.BYE:
                return
            self._do(typed)

    def _do(self, typed: Typed) -> None:
        match typed.kind:
            case InputKind.SAY:
                self._turn(typed.text)
            case InputKind.CLEAR:
                self._said.clear()
                self._call.say("forgotten")
            case InputKind.SYSTEM:
                self._system = typed.text
                self._call.say("set" if typed.text else "the model is told nothing first")
            case InputKind.VERBOSE | InputKind.QUIET:
                self._verbose = typed.kind is InputKind.VERBOSE
            case InputKind.HELP:
                self._call.say(HELP)
            case InputKind.UNKNOWN:
                self._call.say(f"there is no command {typed.text.split()[0]}; /? shows all")

    def _turn(self, prompt: str) -> None:
        """Asks for one answer. A prompt is kept where the answer was stopped, and dropped where it failed."""
        self._said.append({"role": "user", "content": prompt})
        timing, pieces = Timing(), list[str]()
        try:
            with self._about_model():
                for piece in self._pieces(timing, print_=True):
                    pieces.append(piece)
        except KeyboardInterrupt:
            timing.stopped = True
        except (NotFound, NotPermitted, DependencyDown):  # the next answer would be the same
            raise
        except HiveError as error:
            self._said.pop()
            out("")
            self._call.say(f"hive: {with_code(error.message, error.code)}")
            return
        out("")
        self._said.append({"role": "assistant", "content": "".join(pieces)})
        self._tell(timing)

    def _pieces(self, timing: Timing, *, print_: bool) -> Iterator[str]:
        told: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        for piece in _answer(self._access, self._model, told + self._said, timing):
            if print_:
                _print(piece)
            yield piece

    def _tell(self, timing: Timing) -> None:
        if self._verbose:
            self._call.say(fields(timing.told()))

    @contextlib.contextmanager
    def _about_model(self) -> Iterator[None]:
        """An unknown model comes back with the nearest known one as its hint."""
        try:
            yield
        except NotFound as error:
            error.hint = error.hint or self._nearest()
            raise

    def _check_there(self) -> None:
        """Before anybody types a long question. A list that may be old is renewed first."""
        client = self._call.client
        if client.get("/api/models/route", model=self._model)["model"]:
            return
        with contextlib.suppress(HiveError):  # it is down, or an older daemon: the proxy will say so
            client.post("/api/models/refresh", timeout_s=CONNECT_S)
        found = client.get("/api/models/route", model=self._model)
        if not found["model"] and client.get("/api/models")["models"]:
            raise ModelNotFound(found["why"], hint=self._nearest() or found["hint"])

    def _nearest(self) -> str:
        with contextlib.suppress(HiveError):
            found = self._call.client.get("/api/models")
            names = [*(model["name"] for model in found["models"]), *found["aliases"]]
            return did_you_mean(self._model, names) or "`hive model list` shows what there is"
        return ""


class Timing:
    """Times of the pieces of an answer, and the server's counts. `stopped`: not to its end."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.first: float | None = None
        self.last = self.begun
        self.tokens_in: int | None = None
        self.tokens_out: int | None = None
        self.stopped = False

    def came(self) -> None:
        self.last = time.monotonic()
        self.first = self.first or self.last

    def told(self) -> list[tuple[str, str]]:
        """The lines of `--verbose`. The rate is that after the first token, which waits for the prompt to be read."""
        seconds = self.last - (self.first or self.last)
        rate = (self.tokens_out - 1) / seconds if self.tokens_out and self.tokens_out > 1 and seconds > 0 else None
        return [
            ("Total", milliseconds((self.last - self.begun) * 1000)),
            ("First token after", "" if self.first is None else milliseconds((self.first - self.begun) * 1000)),
            ("Prompt", "" if self.tokens_in is None else counted(self.tokens_in, "token")),
            ("Answer", "" if self.tokens_out is None else counted(self.tokens_out, "token")),
            ("Rate", "" if rate is None else f"{rate:.2f} tokens/s"),
            ("Ended", "stopped" if self.stopped else ""),
        ]


def _print(piece: str) -> None:
    out(harmless(piece) if sys.stdout.isatty() else piece, end="")
    flush()


def _answer(access: Answer, model: str, messages: list[Message], timing: Timing) -> Iterator[str]:
    """The pieces of one answer as they come. Raises what the proxy refuses with; BackendDown where it breaks off."""
    import http.client

    base = urlsplit(access["openai_base_url"])
    connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=CONNECT_S)
    with contextlib.closing(connection), _translated(base.netloc):
        connection.connect()
        connection.sock.settimeout(SILENCE_S)
        told = {"include_usage": True}  # else its cost is not counted
        question = {"model": model, "messages": messages, "stream": True, "stream_options": told}
        body = json.dumps(question).encode()
        headers = {"Authorization": f"Bearer {access['token']}", "Content-Type": "application/json"}
        connection.request("POST", f"{base.path}/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response)
        yield from _pieces(response, timing)


def _pieces(response: HTTPResponse, timing: Timing) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise _coded(BackendDown(_said(event["error"])), event["error"])
        if used := event.get("usage"):
            timing.tokens_in, timing.tokens_out = used.get("prompt_tokens"), used.get("completion_tokens")
        for choice in event.get("choices", []):
            if piece := choice.get("delta", {}).get("content"):
                timing.came()
                yield str(piece)
    raise BackendDown("the answer broke off")


def _refusal(response: HTTPResponse) -> HiveError:
    data = response.read(65536)
    try:
        told = json.loads(data)["error"]
    except (ValueError, KeyError, TypeError):
        told = f"the proxy answered {response.status}"
    return _coded(_ERRORS.get(response.status, HiveError)(_said(told)), told)


def _coded(error: HiveError, told: object) -> HiveError:
    """The error with the code that Hive itself told, if it was Hive: a server's own codes are not Hive's."""
    if isinstance(told, dict) and told.get("src") == "hive" and told.get("code"):
        error.code = str(told["code"])
    return error


def _said(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


@contextlib.contextmanager
def _translated(address: str) -> Iterator[None]:
    from http.client import HTTPException

    try:
        yield
    except TimeoutError:
        raise BackendTimeout(f"nothing came from the proxy at {address} for too long") from None
    except ConnectionRefusedError:
        raise DependencyDown(f"the proxy does not answer at {address}", hint="`hive status` says how it is") from None
    except (OSError, HTTPException, ValueError) as error:
        raise BackendDown(f"the answer from {address} broke off: {error or type(error).__name__}") from None
