"""Agents started, stopped, paused, resumed, restarted, removed: one, several, or all of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Annotated

import typer

from hive.cli.call import AgentNames, Answer, CommandCall, chosen_agents
from hive.cli.text import AT_REST, one_line, state_of
from hive.client.client import error_of, path_of
from hive.errors import AgentFailed, HiveError, with_code
from hive.terminal_text import counted

ACT_S = 160.0
"""Longest wait for an answer to start, stop … `stop_grace_s` is in it."""
AT_ONCE = 16
"""Orders under way: a thousand agents that each take their grace time to end are not waited for one by one."""
REMOVED_AT_ONCE = 500
REMOVED_S = 600.0
"""Longest wait for a removal of this many agents: each may take its grace time to end, a hundred at a time."""
MOMENT_S = 0.5
"""From a start to the look whether it has ended: a script that cannot import ends within this."""
LINES = 5
"""Of the log of one that has: the last that is not empty is told."""
NAMED = 3
"""Number of agents that are named before a failure that they share."""
PAUSE_S = 600.0
"""The longest `pause_timeout_s` of the daemon before this side gives up."""

Every = Annotated[bool, typer.Option("--all", "-a", help="Every agent that runs or sleeps.")]
Order = Callable[[str], Answer]


def start(
    call: CommandCall,
    names: AgentNames = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Every agent that does not run.")] = False,
) -> None:
    """Starts stopped agents.

    Of several each is tried; the exit code is that of the first that failed.

    Examples:
      hive agent start alice
      hive agent start alice bob
      hive agent start --all
    """
    _each(call, "start", names, every=every, order=lambda name: _started(call, name, "start"))


def stop(call: CommandCall, names: AgentNames = None, every: Every = False) -> None:
    """Stops agents: SIGTERM, then SIGKILL after the grace time. A sleeping one is woken for it.

    Of several each is tried; the exit code is that of the first that failed.

    Examples:
      hive agent stop alice
      hive agent stop alice bob
      hive agent stop --all
    """
    _each(call, "stop", names, every=every, order=lambda name: _posted(call, name, "stop"))


def restart(call: CommandCall, names: AgentNames = None, every: Every = False) -> None:
    """Stops agents and starts them again, each with its newest description.

    Of several each is tried; the exit code is that of the first that failed.

    Examples:
      hive agent restart alice
      hive agent restart alice bob
      hive agent restart --all
    """
    _each(call, "restart", names, every=every, order=lambda name: _started(call, name, "restart"))


def resume(call: CommandCall, names: AgentNames = None, every: Every = False) -> None:
    """Wakes sleeping agents.

    Of several each is tried; the exit code is that of the first that failed.

    Examples:
      hive agent resume alice
      hive agent resume --all
    """
    _each(call, "resume", names, every=every, order=lambda name: _posted(call, name, "resume"))


def pause(
    call: CommandCall,
    names: AgentNames = None,
    every: Every = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds to wait for a busy agent; then exit code 7.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait: exit code 1 if the agent is busy.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="And give its memory back: paged out to zram or swap.")] = False,
) -> None:
    """Puts agents to sleep, each as soon as nothing of it is under way. Whatever goes wrong, it stays awake.

    Where its memory cannot be paged out, --deep leaves it asleep but not deep, and says why. Of several each is tried;
    the exit code is that of the first that failed.

    Examples:
      hive agent pause alice
      hive agent pause alice --deep
      hive agent pause alice bob --timeout 5
      hive agent pause --all --now
    """

    def put_to_sleep(name: str) -> Answer:
        body = {"timeout_s": timeout, "now": now, "deep": deep}
        within_s = (PAUSE_S if timeout is None else timeout) + ACT_S
        return call.client.post(path_of(name, "pause"), body, timeout_s=within_s)

    _each(call, "pause", names, every=every, order=put_to_sleep)


def _posted(call: CommandCall, name: str, verb: str) -> Answer:
    return call.client.post(path_of(name, verb), timeout_s=ACT_S)


def _started(call: CommandCall, name: str, verb: str) -> Answer:
    return seen_again(call, _posted(call, name, verb))


def _each(call: CommandCall, verb: str, names: list[str] | None, *, every: bool, order: Order) -> None:
    """Orders it of each agent chosen, and tells what became of them in their order. Raises what the first failed of.

    `--all` leaves out agents that the order does not concern: none that is stopped is paused, none that runs is
    started.
    """
    if every and not names:
        at_rest = verb == "start"
        shorts = call.client.agents_in_short()
        chosen = [agent["name"] for agent in shorts if (agent["status"] in AT_REST) == at_rest]
    else:
        chosen = chosen_agents(call, names, every=every)
    if len(chosen) == 1 and not every:
        with call.about(chosen[0]):
            view = order(chosen[0])
        call.show(f"agent.{verb}", view, lambda: _told(view))
    else:
        _many(call, verb, chosen, order)


def _many(call: CommandCall, verb: str, names: list[str], order: Order) -> None:
    views: list[Answer] = []
    failed: list[tuple[str, HiveError]] = []
    for name, outcome in zip(names, _outcomes(call, names, order), strict=True):
        if isinstance(outcome, HiveError):
            failed.append((name, outcome))
            continue
        views.append(outcome)
        if not call.as_json:
            call.line("", {}, lambda view=outcome: _told(view))  # type: ignore[misc]
    if call.as_json:
        call.show(f"agent.{verb}", {"agents": views, "failed": [_not_done(*one) for one in failed]}, str)
    elif not names:
        call.say(f"there is no agent to {verb}")
    _fail(call, failed)


def _outcomes(call: CommandCall, names: Sequence[str], order: Order) -> Iterator[Answer | HiveError]:
    """The answer to `order` for each name, or its error, in their order; `AT_ONCE` are under way.

    The threads end with this process: Ctrl-C waits for none of them. Raises what is no HiveError.
    """
    answers: list[SimpleQueue[Answer | BaseException]] = [SimpleQueue() for _ in names]
    numbers = count()

    def work() -> None:
        while (mine := next(numbers)) < len(names):
            try:
                with call.about(names[mine]):
                    answers[mine].put(order(names[mine]))
            except BaseException as error:  # it is raised again by the caller
                answers[mine].put(error)

    for _ in range(min(AT_ONCE, len(names))):
        Thread(target=work, daemon=True).start()
    for answer in answers:
        outcome = answer.get()
        if isinstance(outcome, BaseException) and not isinstance(outcome, HiveError):
            raise outcome
        yield outcome


def _told(view: Answer) -> str:
    return f"{view['name']} is {state_of(view)}"


def _not_done(name: str, error: HiveError) -> Answer:
    return {
        "agent": name,
        "status": error.status,
        "code": error.code,
        "detail": error.message,
        "hint": error.hint,
    }


def _fail(call: CommandCall, failed: Sequence[tuple[str, HiveError]]) -> None:
    """Says all but the first, each message once and of whom it is, and raises that."""
    if not failed:
        return
    whose: dict[tuple[str, str], list[str]] = {}
    for name, error in failed:
        whose.setdefault((error.message, error.code), []).append(name)
    first, *rest = ((message_of(names, message), code) for (message, code), names in whose.items())
    for message, code in rest:
        call.say(f"hive: {with_code(message, code)}")
    error = failed[0][1]
    if not call.as_json:
        error.message = first[0]
    raise error


def message_of(names: Sequence[str], message: str) -> str:
    """A failure of these agents, with those that its words do not name. What hit more than a few is no one's own.

    >>> message_of(["crawler"], "image x is not permitted"), message_of(["lab"], "there is no agent 'lab'")
    ('crawler: image x is not permitted', "there is no agent 'lab'")
    """
    unnamed = [name for name in names if name and not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message)]
    return f"{', '.join(unnamed)}: {message}" if 0 < len(unnamed) <= NAMED else message


def remove(
    call: CommandCall,
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


def _remove_one(call: CommandCall, name: str, *, yes: bool) -> None:
    with call.about(name):
        call.client.get(path_of(name))
        call.confirm(f"Remove {name} and its files?", yes=yes)
        answer = call.client.delete(path_of(name), timeout_s=ACT_S)
    call.show("agent.remove", answer, lambda: f"{answer['name']} is removed")


def _remove_many(call: CommandCall, names: list[str], *, yes: bool) -> None:
    """Removes in orders of some hundred: each is answered before the client gives up. Raises what the first failed of.

    Where the daemon is gone meanwhile what it has removed is told all the same.
    """
    call.confirm(f"Remove {counted(len(names), 'agent and its files', 'agents and their files')}?", yes=yes)
    told: dict[str, list[Answer]] = {"removed": [], "failed": []}
    broken: list[tuple[str, HiveError]] = []
    for first in range(0, len(names), REMOVED_AT_ONCE):
        order = {"agents": names[first : first + REMOVED_AT_ONCE]}
        try:
            answer = call.client.post("/api/removals", order, timeout_s=REMOVED_S)
        except HiveError as error:
            broken.append(("", error))
            break
        for outcome, found in told.items():
            found += answer[outcome]
    if told["removed"] or not broken:
        call.show("agent.remove", dict(told), lambda: "\n".join(f"{one['name']} is removed" for one in told["removed"]))
    _fail(call, [*((one["agent"], error_of(one)) for one in told["failed"]), *broken])


def seen_again(call: CommandCall, view: Answer) -> Answer:
    """The started agent once more, a moment later. Raises AgentFailed where it has ended with a failure by then."""
    name = view["name"]
    if view["status"] != "error":
        time.sleep(MOMENT_S)
        view = call.client.get(path_of(name))
    if view["status"] == "error":
        last = _last_line(call, name)
        said = f"; its last line: {last}" if last else ""
        raise AgentFailed(f"{name} ended at once: {view['reason']}{said}", hint=f"hive agent logs {name}")
    say_lacking(call, view)
    return view


def _last_line(call: CommandCall, name: str) -> str:
    """The last line that it wrote; empty where it wrote nothing, or its log cannot be read."""
    try:
        said = call.client.lines(path_of(name, "logs"), tail=LINES, own=1)
        lines = [raw.decode(errors="replace").strip() for raw in said]
    except HiveError:
        return ""
    return next((one_line(line) for line in reversed(lines) if line), "")


def say_lacking(call: CommandCall, view: Answer) -> None:
    """Says what of its description does not hold here: it runs without that."""
    if view["limits_not_enforced"]:
        call.say(f"{view['name']} runs without a limit: {view['limits_not_enforced']}")
    if view["prewarm_note"]:
        call.say(f"the prompt of {view['name']} is not read ahead: {view['prewarm_note']}")
    if view.get("template_note"):
        call.say(f"{view['name']} is no fork of template {view['template']}: {view['template_note']}")
