"""One agent as it is: shown, what it wrote, what it used."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Any

import typer

from hive.agent_orders import orders_of
from hive.cli.call import AgentName, Answer, CommandCall, Tail
from hive.cli.text import ago, fields, harmless, look_of, milliseconds, number, ram, size, span, state_of, table
from hive.client.client import path_of
from hive.errors import AgentFailed, BadRequest, UsageError, with_code
from hive.terminal_text import MASK, counted

NEEDS = {"restart": "start"}
"""Order → the ability of a runtime that it takes, where that has another name."""


def show(
    call: CommandCall,
    name: AgentName,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also how to reach it: addresses with secrets.")] = False,
) -> None:
    """Shows one agent on one screen.

    Examples:
      hive agent show alice
      hive agent show alice --tokens
      hive agent show alice --json | jq .status
    """
    with call.about(name):
        view = call.client.get(path_of(name))
        if tokens:
            view["access"] = call.client.get(path_of(name, "tokens"))
    call.show("agent.show", view, lambda: _shown(view))


def logs(
    call: CommandCall,
    name: AgentName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the agent writes.")] = False,
    tail: Tail = 100,
) -> None:
    """Prints what an agent wrote to its output.

    Examples:
      hive agent logs alice
      hive agent logs alice -f -n 10
    """
    colours = not os.environ.get("NO_COLOR")
    with call.about(name):
        for raw in call.client.lines(path_of(name, "logs"), tail=tail, follow=int(follow)):
            line = raw.decode(errors="replace").rstrip("\r\n")
            text = harmless(line, colours=colours) if sys.stdout.isatty() else line
            call.line("agent.log", {"line": line}, lambda text=text: text)  # type: ignore[misc]


def usage(
    call: CommandCall,
    name: AgentName,
    since: Annotated[
        str, typer.Option("--since", "--period", metavar="N(s|m|h|d)", help="How far back; --period is the same.")
    ] = "24h",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Requests to list one by one.")] = 10,
) -> None:
    """Shows what one agent used, by model and request by request.

    Examples:
      hive agent usage alice
      hive agent usage alice --since 7d --limit 0
    """
    try:
        with call.about(name):
            answer = call.client.get(path_of(name, "usage"), period=since, limit=limit)
    except BadRequest as error:
        if not error.message.startswith("period: "):
            raise
        raise UsageError(f"--since: {error.message.removeprefix('period: ')}") from None
    call.show("agent.usage", answer, lambda: _used(answer))


def _shown(view: Answer) -> str:
    now = time.time()
    state = f"{state_of(view)} for {span(now - view['since'])}"
    access: dict[str, Any] = view.get("access", {})
    wake = (
        f"{milliseconds(view['last_wake_ms'])} ({view['last_wake_cause']})" if view["last_wake_ms"] is not None else ""
    )
    pairs = [
        ("Status", _failed(view, state + (f": {view['reason']}" if view["reason"] else ""))),
        ("Why", view["sentence"]),
        ("Look at", look_of(view)),
        ("Restarts", _restarts(view, now)),
        ("Depth", _depth(view)),
        ("Kept awake", _coming(view["kept_awake_until"], now)),
        ("Next wake", _coming(view["next_wake_at"], now)),
        ("Messages", f"{number(view['messages_waiting'])} waiting" if view["messages_waiting"] else ""),
        ("Runtime", _runtime(view)),
        ("Command", " ".join(view["command"])),
        ("Processes", f"{view['processes']}, first is pid {view['pid']}" if view["pid"] else ""),
        ("User", "" if view["uid"] is None else f"uid {view['uid']}"),
        ("RAM", _memory(view)),
        ("CPU", span(view["cpu_us"] / 1e6) if view["cpu_us"] is not None else ""),
        ("Limits", _limits(view)),
        ("Can", ", ".join(can(view))),
        ("Cannot", "; ".join(f"{words} ({why_not})" for words, why_not in cannot(view))),
        ("Port", f"{view['port']} (ingress)" if view["port"] else ""),
        ("CID", f"{view['cid']} (AF_VSOCK)" if view["cid"] else ""),
        ("Template", _template(view)),
        ("Model", view["model"] or ""),
        ("Prompt", _prompt(view)),
        ("Tier", f"{view['tier']}, tenant {view['tenant']}, restart {view['restart']}"),
        ("Under way", f"{view['in_flight']} in flight, {view['parked']} parked, {view['ingress_open']} ingress"),
        ("Used", f"{counted(view['requests'], 'request')}, {number(view['tokens_in'])} tokens in, "
         f"{number(view['tokens_out'])} out, since it was created"),
        ("Active", ago(view["last_active_at"], now)),
        ("Sleep", f"{counted(view['pauses'], 'pause')}, {counted(view['wakes'], 'wake')}, since Hive was started"),
        ("Last wake", wake),
        ("OpenAI", access.get("openai_base_url", "")),
        ("API key", access.get("model", "")),
        ("Ollama", access.get("ollama_host", "")),
        ("Ingress", access.get("ingress_url", "")),
        ("Socket", access.get("socket", "")),
    ]  # fmt: skip
    return f"{view['name']} ({view['id']})\n" + fields(pairs)


def _failed(view: Answer, said: str) -> str:
    return with_code(said, AgentFailed.code) if view["status"] == "error" else said


def _prompt(view: Answer) -> str:
    """Never its text: it may be long, and a viewer gets a mask of it."""
    text = view["system_prompt"]
    if text is None:
        return ""
    length = "set" if text == MASK else counted(len(text.encode()), "byte")
    if view["prewarm_note"]:
        return f"{length}, not read ahead: {view['prewarm_note']}"
    return length + (", read by the backend at each start and wake" if view["prewarm_on_start"] else "")


def _template(view: Answer) -> str:
    """
    >>> _template({"template": "lg", "template_note": "its imports started threads"})
    'lg, not used: its imports started threads'
    """
    if view["template"] is None:
        return ""
    return f"{view['template']}, not used: {view['template_note']}" if view["template_note"] else view["template"]


def _depth(view: Answer) -> str:
    """The depth of its sleep, the depth it should have, and the obstacle between."""
    goal = f", {view['depth_goal']} is wanted" if view["depth_goal"] != view["depth"] else ""
    note = f": {view['deep_note']}" if view["deep_note"] else ""
    return "" if view["depth"] == "awake" and not goal and not note else f"{view['depth']}{goal}{note}"


def _restarts(view: Answer, now: float) -> str:
    """The restarts by its policy: their number, the last reason, and the time of the next try."""
    if not view["restarts"] and view["next_start_at"] is None:
        return ""
    reason = f", last: {view['restart_reason']}" if view["restart_reason"] else ""
    due = f"; next try {_coming(view['next_start_at'], now)}" if view["next_start_at"] is not None else ""
    return f"{number(view['restarts'])}{reason}{due}"


def _coming(at: float | None, now: float) -> str:
    if at is None:
        return ""
    moment = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
    return f"{moment}, in {span(round(at - now))}" if at > now else f"{moment}, now"


def _runtime(view: Answer) -> str:
    """The sandbox it runs in; empty for plain processes."""
    if view["docker"] is not None:
        return f"docker, image {view['docker']['image']}"
    return f"firecracker, {view['firecracker']['rootfs']}" if view["firecracker"] is not None else ""


def _memory(view: Answer) -> str:
    if view["held_bytes"] is None:
        return ""
    told = [ram(view, time.time())]
    if view["swap_cached_bytes"]:
        told.append(f"of it {size(view['swap_cached_bytes'])} have a copy in swap and go when room is needed")
    if view["swap_bytes"]:
        told.append(f"and {size(view['swap_bytes'])} in swap")
    if view["pss_bytes"] is not None and view["held_from"] != "pss":
        told.append(f"PSS {size(view['pss_bytes'])}")
    return ", ".join(told)


def _limits(view: Answer) -> str:
    limits = view["limits"]
    told = [
        "" if limits["memory_mb"] is None else f"{limits['memory_mb']} MiB",
        "" if limits["cpu"] is None else f"{limits['cpu']:g} cores",
        "" if limits["pids"] is None else counted(limits["pids"], "process", "processes"),
        "" if limits["files"] is None else counted(limits["files"], "file"),
        "" if view["egress"] is None else f"network: {', '.join([*view['egress'], 'Hive'])}",
    ]
    said = ", ".join(filter(None, told))
    return f"{said or 'none'} ({view['limits_not_enforced']})" if view["limits_not_enforced"] else said


def can(view: Answer) -> list[str]:
    """The orders that would change something now: those its state permits, less what its runtime cannot do here.

    None where it is not known what that can.

    >>> can({"status": "running", "depth": "awake", "capabilities": {"pause": "", "deep_sleep": "no swap"}})
    ['pause', 'exec', 'restart', 'stop']
    """
    if view["capabilities"] is None:
        return []
    lacking = {words for words, _ in _lacking(view)}
    return [order for order in orders_of(view["status"], view["depth"]) if NEEDS.get(order, order) not in lacking]


def cannot(view: Answer) -> list[tuple[str, str]]:
    """The abilities that its runtime lacks here, in whatever state it is; those with the same reason in one.

    >>> cannot({"capabilities": {"start": "no engine", "pause": "no engine", "deep_sleep": "", "exec": ""}})
    [('start, pause', 'no engine')]
    """
    words: dict[str, list[str]] = {}
    for name, why_not in _lacking(view):
        words.setdefault(why_not, []).append(name)
    return [(", ".join(found), why_not) for why_not, found in words.items()]


def _lacking(view: Answer) -> list[tuple[str, str]]:
    abilities = (view["capabilities"] or {}).items()
    return [(name.replace("_", " "), why_not) for name, why_not in abilities if why_not]


def _used(answer: Answer) -> str:
    totals = answer["totals"]
    said = [f"{number(totals['tokensIn'])} tokens in, {number(totals['tokensOut'])} out in {answer['period']}"]
    if answer["byModel"]:
        rows = [
            [m["model"], number(m["count"]), number(m["totalIn"]), number(m["totalOut"])] for m in answer["byModel"]
        ]
        said.append(table(["MODEL", "REQUESTS", "IN", "OUT"], rows))
    if answer["recent"]:
        now = time.time()
        recent = [
            [
                ago(r["createdAt"], now),
                r["model"],
                number(r["tokensIn"]),
                number(r["tokensOut"]),
                milliseconds(r["durationMs"]),
            ]
            for r in answer["recent"]
        ]
        said.append(table(["WHEN", "MODEL", "IN", "OUT", "TOOK"], recent))
    return "\n\n".join(said)
