"""The output of a job: its events as they come, and how each is written for people."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hive.cli.call import Answer, CommandCall, flush, out
from hive.cli.following import LOOK_S, looked_at
from hive.cli.text import harmless, number, one_line
from hive.errors import DependencyDown
from hive.terminal_text import wants_colour

SHOWN = 300
"""Characters of arguments and results; with --json, and in the result of the job, there is the whole of them."""
DELTA = "response.output_text.delta"
"""Event of the Responses API that has a piece of the answer."""


def events_of(call: CommandCall, job: str, *, after: int = 0, follow: bool) -> Iterator[Answer]:
    """Events behind `after`, each once; with `follow` until the job has ended.

    A daemon that ends meanwhile is waited for, and asked to go on behind the last event. Raises NotFound, and
    DependencyDown where no daemon has come back.
    """
    if not follow:
        yield from call.client.job_output(job, after=after)
        return
    while True:
        is_over = looked_at(call, job)["state"] != "running"
        try:
            for event in call.client.job_output(job, after=after, follow=not is_over):
                after = event["n"]
                yield event
                if event["event"] == "ended":
                    return
            if is_over:
                return
        except DependencyDown:
            call.say("the daemon is gone; looking for the next one")
        time.sleep(LOOK_S)


class OutputWriter:
    """Writes events: what the model says to stdout, all else to `talk`, a line each.

    `thinks`: what it thinks, too, in faint letters; None: where stdout is a terminal that has some.
    """

    def __init__(self, talk: Callable[[str], None], *, thinks: bool | None = None) -> None:
        self._talk = talk
        is_faint = wants_colour(is_terminal=sys.stdout.isatty(), env=os.environ)
        self._thinks = is_faint if thinks is None else thinks
        self._open = ""
        """The event whose text has not ended its line; empty for none."""

    def write(self, event: Answer) -> None:
        """One event, at once."""
        if event["event"] == "thinking":
            if self._thinks and (text := str(event["data"].get("text", ""))):
                self._piece("thinking", text, f"\x1b[2m{harmless(text)}\x1b[22m")
        elif piece := piece_of(event):
            self._piece("delta", piece, harmless(piece))
        elif line := line_of(event):
            self.close()
            self._talk(line)
        elif event["event"] == "turn":
            self.close()
        flush()

    def _piece(self, kind: str, text: str, shown: str) -> None:
        if self._open != kind:
            self.close()
        out(shown, end="")
        self._open = "" if text.endswith("\n") else kind

    def close(self) -> None:
        """Ends the line that is open: what follows begins one of its own."""
        if self._open:
            out("")
            self._open = ""


def piece_of(event: Answer) -> str:
    """The piece of the answer in an event; empty where there is none.

    >>> piece_of({"event": "delta", "data": {"text": "Hel"}}), piece_of({"event": "turn", "data": {"n": 1}})
    ('Hel', '')
    >>> piece_of({"event": "response", "data": {"type": "response.output_text.delta", "delta": "lo"}})
    'lo'
    """
    data = event["data"]
    if event["event"] == "delta":
        return str(data.get("text", ""))
    is_piece = event["event"] == "response" and data.get("type") == DELTA
    return str(data.get("delta", "")) if is_piece else ""


def line_of(event: Answer) -> str:
    """An event that is no text, as a line; empty for one that says nothing to people.

    >>> line_of({"event": "tool_call", "data": {"name": "now", "arguments": "{}"}})
    '-> now {}'
    >>> line_of({"event": "tool_result", "data": {"name": "now", "result": "10:00\\nUTC"}})
    '<- now: 10:00 UTC'
    >>> line_of({"event": "ended", "data": {"status": "failed", "reason": "server_died", "detail": "it died"}})
    'failed: server_died: it died'
    """
    data = event["data"]
    match event["event"]:
        case "tool_call":
            return f"-> {one_line(data['name'])} {_short(_as_text(data['arguments']))}"
        case "tool_result":
            return f"<- {one_line(data['name'] or 'no call')}: {_short(_as_text(data['result']))}"
        case "signal":
            return "!! " + signal_line(data)
        case "ended":
            return one_line(": ".join(part for key in ("status", "reason", "detail") if (part := data.get(key))))
    return ""


def signal_line(signal: Answer) -> str:
    """
    >>> signal_line({"name": "POLICY_RISK", "arguments": {"risk": "harm"}, "has_ended": True})
    'POLICY_RISK {"risk": "harm"}, which ended the job'
    """
    ends = ", which ended the job" if signal.get("has_ended") else ""
    return f"{one_line(signal['name'])} {_short(_as_text(signal['arguments']))}{ends}"


def tokens_line(usage: Answer) -> str:
    """
    >>> tokens_line({"tokens_in": 1200, "tokens_out": 80, "tokens_cached": 1100})
    '1,200 in, of which 1,100 were cached; 80 out'
    """
    cached = usage["tokens_cached"]
    reused = f", of which {number(cached)} were cached" if cached else ""
    return f"{number(usage['tokens_in'])} in{reused}; {number(usage['tokens_out'])} out"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    shown = one_line(text[: SHOWN + 1])
    return shown if len(text) <= SHOWN else f"{shown[:SHOWN]}… ({number(len(text))} characters)"
