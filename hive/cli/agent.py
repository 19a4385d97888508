"""Agents as they are: listed, shown, started, paused, removed."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Any

import typer

from hive.cli.call import AgentName, AgentNames, Answer, Call, chosen_agents
from hive.cli.text import ago, fields, harmless, milliseconds, number, size, span, table
from hive.control.client import error_of, path_of
from hive.errors import HiveError
from hive.terminal_text import MASK

ACT_S = 60.0
"""How long an answer to start, stop … may take: `stop_grace_s` is in it."""
REMOVED_AT_ONCE = 500
REMOVED_S = 600.0
"""For so many of whom each takes its grace time to end, a hundred at a time."""
ON_A_TERMINAL = 100
"""Agents in a table that somebody reads."""
PAUSE_S = 600.0
"""How long the daemon's own `pause_timeout_s` may be before this side gives up."""


def list_agents(
    call: Call,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Names only, one a line.")] = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="On a terminal too, each of them.")] = False,
) -> None:
    """Lists the agents: what they do, what they cost, why they are awake.

    A table on a terminal has the first 100 and says how many there are; what goes into a file or a pipe, --quiet and
    --json are always complete. Aliases: ls, and `hive ps`.

    Examples:
      hive agent list
      hive ps --all
      hive ps -q | xargs -n1 hive agent stop
      hive agent list --json | jq '.agents[] | select(.status == "paused") | .name'
    """
    client = call.client
    if quiet and not call.as_json:
        names = [agent["name"] for agent in client.agents_in_short()]
        call.show("agent.list", {}, lambda: "\n".join(names))
        return
    is_cut = not (every or call.as_json) and sys.stdout.isatty()
    found = [next(client.agents(limit=ON_A_TERMINAL))] if is_cut else [*client.agents()]
    agents = [agent for page in found for agent in page["agents"]]
    call.show("agent.list", {"agents": agents}, lambda: _listed(agents))
    if left := found[0]["total"] - len(agents) if is_cut else 0:
        call.say(f"… and {number(left)} more of {number(found[0]['total'])}: --all shows each of them, -q the names")


def show(
    call: Call,
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


def start(call: Call, name: AgentName) -> None:
    """Starts a stopped agent.

    Examples:
      hive agent start alice
    """
    _act(call, name, "start")


def stop(call: Call, name: AgentName) -> None:
    """Stops an agent: SIGTERM, then SIGKILL after the grace time. A sleeping one is woken for it.

    Examples:
      hive agent stop alice
    """
    _act(call, name, "stop")


def restart(call: Call, name: AgentName) -> None:
    """Stops an agent and starts it again, with its newest description.

    Examples:
      hive agent restart alice
    """
    _act(call, name, "restart")


def resume(call: Call, name: AgentName) -> None:
    """Wakes a sleeping agent.

    Examples:
      hive agent resume alice
    """
    _act(call, name, "resume")


def pause(
    call: Call,
    name: AgentName,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds to wait for a busy agent; then exit code 7.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait: exit code 1 if the agent is busy.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="And give its memory back: paged out to zram or swap.")] = False,
) -> None:
    """Puts an agent to sleep as soon as nothing of it is under way. Whatever goes wrong, it stays awake.

    Where its memory cannot be paged out, --deep leaves it asleep but not deep, and says why.

    Examples:
      hive agent pause alice
      hive agent pause alice --deep
      hive agent pause alice --timeout 5
      hive agent pause alice --now
    """
    with call.about(name):
        order = {"timeout_s": timeout, "now": now, "deep": deep}
        view = call.client.post(
            path_of(name, "pause"), order, timeout_s=(PAUSE_S if timeout is None else timeout) + ACT_S
        )
    call.show("agent.pause", view, lambda: f"{view['name']} is {_status(view)}")


def logs(
    call: Call,
    name: AgentName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the agent writes.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", metavar="N", min=0, help="Lines from the end.")] = 100,
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
    call: Call,
    name: AgentName,
    period: Annotated[str, typer.Option(metavar="1h|6h|24h|7d|30d", help="How far back.")] = "24h",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Requests to list one by one.")] = 10,
) -> None:
    """Shows what one agent used, by model and request by request.

    Examples:
      hive agent usage alice
      hive agent usage alice --period 7d --limit 0
    """
    with call.about(name):
        answer = call.client.get(path_of(name, "usage"), period=period, limit=limit)
    call.show("agent.usage", answer, lambda: _used(answer))


def remove(
    call: Call,
    names: AgentNames = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Every agent there is.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Removes agents: they are stopped, their files and their keys go; what they used stays in the books. Alias: rm.

    Of several each is tried; the exit code is that of the first that could not be removed.

    Examples:
      hive agent remove alice
      hive agent rm alice bob --yes
      hive agent remove --all
      hive ps -q | grep ^test- | xargs hive agent remove --yes
    """
    chosen = chosen_agents(call, names, every=every)
    if len(chosen) == 1 and not every:
        _remove_one(call, chosen[0], yes=yes)
    elif chosen:
        _remove_many(call, chosen, yes=yes)
    else:
        call.show("agent.remove", {"removed": [], "failed": []}, lambda: "there is no agent")


def _remove_one(call: Call, name: str, *, yes: bool) -> None:
    with call.about(name):
        call.client.get(path_of(name))
        call.confirm(f"Remove {name} and its files?", yes=yes)
        answer = call.client.delete(path_of(name), timeout_s=ACT_S)
    call.show("agent.remove", answer, lambda: f"{answer['name']} is removed")


def _remove_many(call: Call, names: list[str], *, yes: bool) -> None:
    """In orders of some hundred: each is answered before anybody gives up waiting. Raises what the first failed of.

    Where the daemon is gone meanwhile what it has removed is told all the same.
    """
    call.confirm(f"Remove {number(len(names))} agents and their files?", yes=yes)
    told: dict[str, list[Answer]] = {"removed": [], "failed": []}
    broken: list[HiveError] = []
    for first in range(0, len(names), REMOVED_AT_ONCE):
        order = {"agents": names[first : first + REMOVED_AT_ONCE]}
        try:
            answer = call.client.post("/api/removals", order, timeout_s=REMOVED_S)
        except HiveError as error:
            broken.append(error)
            break
        for outcome, found in told.items():
            found += answer[outcome]
    if told["removed"] or not broken:
        call.show("agent.remove", dict(told), lambda: "\n".join(f"{one['name']} is removed" for one in told["removed"]))
    errors = [*map(error_of, told["failed"]), *broken]
    for more in errors[1:]:
        call.say(f"hive: {more.message}")
    if errors:
        raise errors[0]


def _act(call: Call, name: str, verb: str) -> None:
    with call.about(name):
        view = call.client.post(path_of(name, verb), timeout_s=ACT_S)
    if verb in ("start", "restart"):
        refuse_failed(view)
    call.show(f"agent.{verb}", view, lambda: f"{view['name']} is {view['status']}")


def refuse_failed(view: Answer) -> None:
    """Raises HiveError where the agent has ended with a failure before its start was even told."""
    if view["status"] == "error":
        raise HiveError(
            f"{view['name']} was started and failed: {view['reason']}", hint=f"hive agent logs {view['name']}"
        )


def _listed(agents: list[Answer]) -> str:
    now = time.time()
    rows = [
        [
            agent["name"],
            _status(agent),
            span(now - agent["since"]),
            number(agent["requests"]),
            f"{number(agent['tokens_in'])} / {number(agent['tokens_out'])}",
            size(agent["rss_bytes"]),
            number(agent["wakes"]),
            milliseconds(agent["last_wake_ms"]),
            agent["brief"],
        ]
        for agent in agents
    ]
    headers = ["NAME", "STATUS", "SINCE", "REQUESTS", "TOKENS IN / OUT", "RAM", "WAKES", "LAST WAKE", "WHY"]
    return table(headers, rows)


def _status(view: Answer) -> str:
    depth = view["depth"]
    return f"{view['status']} ({depth})" if view["status"] == "paused" and depth != "awake" else str(view["status"])


def _shown(view: Answer) -> str:
    now = time.time()
    state = f"{_status(view)} for {span(now - view['since'])}"
    access: dict[str, Any] = view.get("access", {})
    wake = (
        f"{milliseconds(view['last_wake_ms'])} ({view['last_wake_cause']})" if view["last_wake_ms"] is not None else ""
    )
    pairs = [
        ("Status", state + (f": {view['reason']}" if view["reason"] else "")),
        ("Why", view["sentence"]),
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
        ("Can", ", ".join(word for word, why_not in _capabilities(view) if not why_not)),
        ("Cannot", "; ".join(f"{word} ({why_not})" for word, why_not in _capabilities(view) if why_not)),
        ("Port", f"{view['port']} (ingress)" if view["port"] else ""),
        ("CID", f"{view['cid']} (AF_VSOCK)" if view["cid"] else ""),
        ("Model", view["model"] or ""),
        ("Prompt", _prompt(view)),
        ("Tier", f"{view['tier']}, tenant {view['tenant']}, restart {view['restart']}"),
        ("Under way", f"{view['in_flight']} in flight, {view['parked']} parked, {view['ingress_open']} ingress"),
        ("Used", f"{number(view['requests'])} requests, {number(view['tokens_in'])} tokens in, "
         f"{number(view['tokens_out'])} out"),
        ("Active", ago(view["last_active_at"], now)),
        ("Sleep", f"{number(view['pauses'])} pauses, {number(view['wakes'])} wakes"),
        ("Last wake", wake),
        ("OpenAI", access.get("openai_base_url", "")),
        ("API key", access.get("model", "")),
        ("Ollama", access.get("ollama_host", "")),
        ("Ingress", access.get("ingress_url", "")),
        ("Socket", access.get("socket", "")),
    ]  # fmt: skip
    return f"{view['name']} ({view['id']})\n" + fields(pairs)


def _prompt(view: Answer) -> str:
    """Never its text: it may be long, and a viewer gets a mask of it."""
    text = view["system_prompt"]
    if text is None:
        return ""
    length = "set" if text == MASK else f"{number(len(text.encode()))} bytes"
    return length + (", read by the backend at each start and wake" if view["prewarm_on_start"] else "")


def _depth(view: Answer) -> str:
    """How deep it sleeps, how deep it should, and what stands between."""
    goal = f", {view['depth_goal']} is wanted" if view["depth_goal"] != view["depth"] else ""
    note = f": {view['deep_note']}" if view["deep_note"] else ""
    return "" if view["depth"] == "awake" and not goal and not note else f"{view['depth']}{goal}{note}"


def _restarts(view: Answer, now: float) -> str:
    """How often its policy started it again, after what, and when that is tried next."""
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
    """What it runs in; nothing of plain processes."""
    if view["docker"] is not None:
        return f"docker, image {view['docker']['image']}"
    return f"firecracker, {view['firecracker']['rootfs']}" if view["firecracker"] is not None else ""


def _memory(view: Answer) -> str:
    if view["rss_bytes"] is None:
        return ""
    return size(view["rss_bytes"]) + (f", and {size(view['swap_bytes'])} in swap" if view["swap_bytes"] else "")


def _limits(view: Answer) -> str:
    limits = view["limits"]
    told = [
        "" if limits["memory_mb"] is None else f"{limits['memory_mb']} MiB",
        "" if limits["cpu"] is None else f"{limits['cpu']:g} cores",
        "" if limits["pids"] is None else f"{limits['pids']} processes",
        "" if limits["files"] is None else f"{limits['files']} files",
        "" if view["egress"] is None else f"network: {', '.join([*view['egress'], 'Hive'])}",
    ]
    said = ", ".join(filter(None, told))
    return f"{said} ({view['limits_not_enforced']})" if view["limits_not_enforced"] else said


def _capabilities(view: Answer) -> list[tuple[str, str]]:
    """What its runtime is good for here, and why not; for the same reason in one.

    >>> _capabilities({"capabilities": {"start": "no engine", "pause": "no engine", "deep_sleep": "", "exec": ""}})
    [('start, pause', 'no engine'), ('deep sleep, exec', '')]
    """
    words: dict[str, list[str]] = {}
    for name, why_not in (view["capabilities"] or {}).items():
        words.setdefault(why_not, []).append(name.replace("_", " "))
    return [(", ".join(found), why_not) for why_not, found in words.items()]


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
