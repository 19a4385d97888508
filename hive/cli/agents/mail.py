"""Messages for agents: sent, listed, dropped."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from hive.cli.call import AgentName, Answer, CommandCall
from hive.cli.terminal import fitted
from hive.cli.text import AT_REST, ago, number, one_line, size, status
from hive.client.client import path_of
from hive.errors import BadRequest, HiveError, TimedOut, UsageError

ASKED_AGAIN_S = 60
"""`--wait` asks in pieces of this length, so that a daemon that was restarted is asked again."""
SHOWN_CHARS = 40


def send(
    call: CommandCall,
    name: AgentName,
    text: Annotated[str, typer.Argument(metavar="TEXT|-", help="What to say; `-` reads stdin.")],
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Return once the agent has accepted it.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds to wait with --wait; then exit code 7.")
    ] = None,
) -> None:
    """Sends a message to an agent, and wakes it for that. It is kept until the agent accepts it, whatever is restarted.

    It is posted as JSON ({"id", "text", "from", "sent_at"}) to the path `inbox` at the agent's port. An agent may get
    one twice, with the same id. A stopped agent gets it once it is started.

    Examples:
      hive agent send alice "the build is red"
      git log -1 | hive agent send alice -
      hive agent send alice stop --wait --timeout 60
    """
    if timeout is not None and not wait:
        raise UsageError("--timeout: without --wait nothing is waited for")
    said = _stdin() if text == "-" else text
    with call.about(name):
        answer = call.client.post(path_of(name, "messages"), {"text": said})
        if wait:
            answer = _accepted(call, name, answer, timeout)
    call.show("agent.send", answer, lambda: _sent(answer))


def messages(
    call: CommandCall,
    name: AgentName,
    drop: Annotated[str | None, typer.Option("--drop", metavar="ID", help="Forget this one instead.")] = None,
) -> None:
    """Lists the messages an agent has not accepted: those that wait, and those it refused.

    Examples:
      hive agent messages alice
      hive agent messages alice --json | jq -r '.messages[] | select(.state == "refused") | .text'
      hive agent messages alice --drop 3f29c01be4a85d77
    """
    with call.about(name):
        if drop is None:
            answer = call.client.get(path_of(name, "messages"))
            call.show("agent.messages", answer, lambda: _listed(answer))
            return
        answer = call.client.delete(path_of(name, "messages", drop))
    call.show("agent.messages", answer, lambda: f"message {answer['dropped']} is dropped")


def _stdin() -> str:
    """The text on stdin, as much as the daemon takes; more is not even read."""
    from hive.domain import MESSAGE_MAX_BYTES  # 20 ms of start-up

    try:
        data = sys.stdin.buffer.read(MESSAGE_MAX_BYTES + 1)
        if len(data) > MESSAGE_MAX_BYTES:
            raise BadRequest(f"stdin: more than {MESSAGE_MAX_BYTES} bytes", hint="send the path of a file instead")
        return data.decode()
    except UnicodeDecodeError:
        raise BadRequest("stdin: not UTF-8") from None


def _accepted(call: CommandCall, name: str, sent: Answer, timeout_s: float | None) -> Answer:
    """The message once the agent has accepted it. Raises TimedOut, HiveError where the agent refuses it."""
    if sent["status"] in AT_REST:
        call.say(f"{sent['name']} is {status(sent['status'])}: the message waits until it is started")
    until = None if timeout_s is None else time.monotonic() + timeout_s
    message = sent
    while message["state"] == "waiting":
        left_s = ASKED_AGAIN_S if until is None else until - time.monotonic()
        if left_s <= 0:
            why = f" ({one_line(message['last_error'])})" if message["last_error"] else ""
            raise TimedOut(
                f"{sent['name']} has not accepted it in time{why}",
                hint=f"it goes on waiting, for a program that takes POST at its inbox: hive agent messages {name}",
            )
        path = path_of(name, "messages", sent["id"])
        wait_s = min(ASKED_AGAIN_S, max(1, round(left_s)))
        message = call.client.get(path, wait_s=wait_s, timeout_s=wait_s + ASKED_AGAIN_S)
    if message["state"] == "refused":
        raise HiveError(
            f"{sent['name']} refuses it: {one_line(message['last_error'])}", hint=f"hive agent messages {sent['name']}"
        )
    return message


def _sent(answer: Answer) -> str:
    if answer["state"] == "delivered":
        return f"{answer['name']} has accepted message {answer['id']}"
    later = f"; {answer['name']} is {status(answer['status'])}" if answer["status"] in AT_REST else ""
    return f"message {answer['id']} waits for {answer['name']}{later}"


def _listed(answer: Answer) -> str:
    now = time.time()
    rows = [
        [
            message["id"],
            ago(message["sent_at"], now),
            message["from"],
            message["state"],
            number(message["attempts"]),
            size(len(message["text"].encode())),
            _short(message["text"], SHOWN_CHARS),
            _short(message["last_error"], 2 * SHOWN_CHARS),
        ]
        for message in answer["messages"]
    ]
    if not rows:
        return f"no message waits for {answer['name']}"
    headers = ["ID", "SENT", "FROM", "STATE", "TRIES", "SIZE", "TEXT", "LAST ERROR"]
    said = fitted(headers, rows, drop=("SIZE", "FROM", "TRIES", "TEXT", "SENT", "LAST ERROR"), prose="LAST ERROR")
    why = answer["why"]
    is_told = not why or any(message["last_error"] == why for message in answer["messages"])
    return said if is_told else f"{said}\n{one_line(why)}"


def _short(text: str, width: int) -> str:
    line = " ".join(text[: 4 * width].split())
    return line if len(line) <= width and len(text) <= 4 * width else line[: width - 1] + "…"
