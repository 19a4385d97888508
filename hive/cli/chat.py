"""`hive run`: a chat with a model through Hive's proxy, as its operator."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from hive.cli.call import Answer, Call, flush, out
from hive.cli.text import harmless
from hive.errors import (
    BackendDown,
    BackendTimeout,
    BadRequest,
    DependencyDown,
    HiveError,
    NotFound,
    NotPermitted,
    Saturated,
    TooManyRequests,
    UsageError,
)

if TYPE_CHECKING:
    from http.client import HTTPResponse

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
    call: Call,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As `hive backend status` names it.")],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]", help="Else read from stdin; on a terminal, a conversation."),
    ] = None,
) -> None:
    """Asks a model, through Hive like any agent would, and prints the answer as it comes.

    Examples:
      hive run llama3.2 why is the sky blue
      git diff | hive run llama3.2
      hive run llama3.2
    """
    access = call.client.get("/api/system/access")
    if prompt:
        _one_turn(call, access, model, " ".join(prompt))
    elif sys.stdin.isatty():
        _conversation(call, access, model)
    else:
        data = sys.stdin.buffer.read(PROMPT_MAX_BYTES + 1)
        if not data.strip() or len(data) > PROMPT_MAX_BYTES:
            what = "there is no prompt" if not data.strip() else f"the prompt is larger than {PROMPT_MAX_BYTES} bytes"
            raise UsageError(what, hint="hive run MODEL PROMPT, or the prompt on stdin")
        _one_turn(call, access, model, data.decode(errors="replace"))


def _one_turn(call: Call, access: Answer, model: str, prompt: str) -> None:
    pieces = []
    for piece in _answer(access, model, [{"role": "user", "content": prompt}]):
        pieces.append(piece)
        if not call.as_json:
            _print(piece)
    text = "".join(pieces)
    if call.as_json:
        call.show("run", {"model": model, "text": text}, lambda: text)
    elif not text.endswith("\n"):
        out("")


def _conversation(call: Call, access: Answer, model: str) -> None:
    messages: list[dict[str, str]] = []
    call.say("Ctrl-D ends the conversation")
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            call.say("")
            return
        if not prompt.strip():
            continue
        messages.append({"role": "user", "content": prompt})
        pieces = []
        for piece in _answer(access, model, messages):
            pieces.append(piece)
            _print(piece)
        out("")
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _print(piece: str) -> None:
    out(harmless(piece) if sys.stdout.isatty() else piece, end="")
    flush()


def _answer(access: Answer, model: str, messages: list[dict[str, str]]) -> Iterator[str]:
    """The pieces of one answer as they come. Raises what the proxy refuses with; BackendDown where it breaks off."""
    import http.client

    base = urlsplit(access["openai_base_url"])
    connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=CONNECT_S)
    with contextlib.closing(connection), _translated(base.netloc):
        connection.connect()
        connection.sock.settimeout(SILENCE_S)
        told = {"include_usage": True}  # else nobody counts what it cost
        question = {"model": model, "messages": messages, "stream": True, "stream_options": told}
        body = json.dumps(question).encode()
        headers = {"Authorization": f"Bearer {access['token']}", "Content-Type": "application/json"}
        connection.request("POST", f"{base.path}/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response)
        yield from _pieces(response)


def _pieces(response: HTTPResponse) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise BackendDown(_said(event["error"]))
        for choice in event.get("choices", []):
            if piece := choice.get("delta", {}).get("content"):
                yield str(piece)
    raise BackendDown("the answer broke off")


def _refusal(response: HTTPResponse) -> HiveError:
    data = response.read(65536)
    try:
        said = _said(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        said = f"the proxy answered {response.status}"
    return _ERRORS.get(response.status, HiveError)(said)


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
