"""`hive job run`: an order made of a command line and its files, and the job looked at until it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.cli.call import Answer, CommandCall, agent_names, loadable_names
from hive.cli.chat import piped
from hive.cli.following import error_of, waited
from hive.cli.jobs.output import OutputWriter, events_of, signal_line
from hive.cli.op_options import read
from hive.cli.text import harmless, one_line
from hive.errors import Cancelled, HiveError, NotFound, UsageError, did_you_mean

FILE_MAX_BYTES = 1024 * 1024
"""An order is no larger."""
BEGIN_S = 60.0
TOOL_FORMS, BANDS = ("native", "schema"), ("low", "normal", "high")
"""Equal to ToolForm and Band: their modules would cost every start of a job some milliseconds."""


def run(
    call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called in lists.")],
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="With what stdin has before it.", show_default=False)
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="As `hive model list` names it, or task:NAME; else that of --as.",
            autocompletion=loadable_names,
            show_default=False,
        ),
    ] = "",
    system_file: Annotated[
        Path | None,
        typer.Option("--system-file", metavar="FILE", help="What the model is told first.", show_default=False),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE", help="A JSON list of tools, of agents and MCP.", show_default=False),
    ] = None,
    exit_tools: Annotated[
        Path | None,
        typer.Option(
            "--exit-tools", metavar="FILE", help="A JSON list of signals instead of the five.", show_default=False
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="K=V", help="Of the request, like temperature=0.", show_default=False),
    ] = None,
    answer_schema: Annotated[
        Path | None,
        typer.Option("--answer-schema", metavar="FILE", help="JSON Schema of the last answer.", show_default=False),
    ] = None,
    tool_form: Annotated[
        str, typer.Option("--tool-form", metavar="native|schema", help="How the model calls tools.")
    ] = "native",
    iterations: Annotated[
        int | None, typer.Option("--iterations", metavar="N", min=1, help="At most so many turns with calls.")
    ] = None,
    as_agent: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="AGENT",
            help="It works as this one: its queue, models, budget.",
            autocompletion=agent_names,
            show_default=False,
        ),
    ] = "",
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="TENANT", help="For whom it works.", show_default=False)
    ] = "",
    priority: Annotated[
        str, typer.Option("--priority", metavar="low|normal|high", help="Its place in the queue.")
    ] = "normal",
    local_only: Annotated[
        bool, typer.Option("--local-only", help="None of its requests to the model leaves this box.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what the model says as it comes.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Print the answer once it is there.")] = False,
) -> None:
    """Has a model work through tools, as a job of the daemon: it goes on when this command has ended.

    Without --follow and --wait the job's id is printed. Ctrl-C ends the looking, not the job. On stdout is what the
    model says, on stderr what it calls and signals. The exit code of a job that fails is that of its error.

    Examples:
      hive job run tidy --model qwen3-8b --follow "Which of these notes is out of date?" < notes.txt
      hive job run trip --model qwen3-8b --tools flights.json --as alice --wait "When can I fly to Rome?"
      hive job run count --model task:plan --param temperature=0 --json "Count to ten." | jq -r .id
    """
    if follow and wait:
        raise UsageError("either --follow or --wait")
    _check_word("--tool-form", tool_form, TOOL_FORMS)
    _check_word("--priority", priority, BANDS)
    if not model and not as_agent:
        raise UsageError("--model: which one is to work?", hint="hive model list, or hive pool")
    order = _order_of(name, prompt)
    order |= {"model": model, "tool_form": tool_form, "priority": priority, "params": params_of(param or [])}
    order |= {"agent": as_agent, "tenant": tenant, "local_only": local_only}
    if system_file is not None:
        order["system"] = read(system_file, FILE_MAX_BYTES, "a system prompt").decode(errors="replace")
    if tools is not None:
        order["tools"] = list_in(tools, "--tools", "tools")
    if exit_tools is not None:
        order["exit_tools"] = list_in(exit_tools, "--exit-tools", "exit tools")
    if answer_schema is not None:
        order["answer_schema"] = _json_in(answer_schema, "--answer-schema", "a JSON Schema")
    if iterations is not None:
        order["max_tool_iterations"] = iterations
    job = _begun(call, order)
    if follow:
        _follow(call, job)
    elif wait:
        _wait(call, job)
    else:
        call.show("job.run", job, lambda: str(job["id"]))
        call.say(f"next: hive job logs -f {job['id']}")


def _check_word(option: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        near = did_you_mean(word, words)
        raise UsageError(f"{option} {word[:40]}: expected one of {', '.join(words)}", hint=near)


def _order_of(name: str, words: list[str] | None) -> Answer:
    text = " ".join(part for part in (piped(FILE_MAX_BYTES), *(words or [])) if part)
    if not text.strip():
        raise UsageError("there is no prompt", hint=f"hive job run {name} --model MODEL PROMPT, or the prompt on stdin")
    return {"name": name, "prompt": text}


def _begun(call: CommandCall, order: Answer) -> Answer:
    try:
        return call.client.post("/api/jobs", order, timeout_s=BEGIN_S)
    except KeyboardInterrupt:
        call.say("the job may have begun: hive job list")
        raise
    except NotFound as error:
        if order["agent"] and order["agent"] in error.message:
            with call.about(order["agent"]):
                raise
        raise


def _follow(call: CommandCall, job: Answer) -> None:
    """Prints what the model says as it comes. Raises what the job ended with."""
    writer = OutputWriter(call.say)
    call.say(f"job {job['id']}")
    try:
        for event in events_of(call, job["id"], follow=True):
            if call.as_json:
                call.line("job.output", event, lambda: "")
            elif event["event"] != "ended":
                writer.write(event)
    except KeyboardInterrupt:
        writer.close()
        call.say(goes_on(job["id"]))
        raise
    writer.close()
    check_ended(call, call.client.get(f"/api/jobs/{job['id']}"))


def _wait(call: CommandCall, job: Answer) -> None:
    """Prints the answer, once it is there. Raises what the job ended with."""
    job = waited(call, job, goes_on=goes_on(job["id"]))
    result = call.client.get(f"/api/jobs/{job['id']}/result")
    tell_signals(call, result)
    try:
        check_ended(call, job)
    except HiveError as error:
        there_is = f"hive job result {job['id']} prints what there is" if result["answer"] else ""
        error.hint = error.hint or there_is
        raise
    call.show("job.run", result, lambda: harmless(result["answer"]))


def goes_on(job: str) -> str:
    """The words for whoever stops looking before the job has ended."""
    return f"the job goes on: `hive job logs -f {job}` follows it, `hive job cancel {job}` ends it"


def check_ended(call: CommandCall, job: Answer) -> None:
    """Raises the error of a job that failed or was cancelled; says why an answer is incomplete."""
    if job["error"] is not None:
        error = error_of(job["error"])
        error.hint = error.hint or type(error).hint
        raise error
    if job["state"] == "cancelled":
        raise Cancelled(f"job {job['id']} was cancelled")
    if job["status"] == "incomplete":
        call.say(f"the answer is incomplete: {one_line(job['result']['detail'])}")


def tell_signals(call: CommandCall, result: Answer) -> None:
    for signal in result["signals"]:
        call.say("!! " + signal_line(signal))


def params_of(words: list[str]) -> dict[str, Any]:
    """Params of a request. A value is JSON, else text. Raises UsageError.

    >>> params_of(["temperature=0", "stop=END", 'seed="7"', "a=b=c"])
    {'temperature': 0, 'stop': 'END', 'seed': '7', 'a': 'b=c'}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UsageError(f"--param {word[:40]}: expected NAME=VALUE, like temperature=0")
        if name in found:
            raise UsageError(f"--param {name}: given more than once")
        try:
            found[name] = json.loads(text, parse_constant=_no_number)
        except ValueError:
            found[name] = text
    return found


def _no_number(text: str) -> Any:
    raise ValueError(text)


def list_in(path: Path, option: str, what: str) -> list[Any]:
    """A JSON list of objects in a file. Raises UsageError, NotFound, NotPermitted."""
    found = _json_in(path, option, f"a list of {what}")
    if not isinstance(found, list):
        raise UsageError(f"{option} {path}: expected a JSON list of {what}, found {_kind_of(found)}", hint=TOOLS_HINT)
    for number, one in enumerate(found, 1):
        if not isinstance(one, dict):
            raise UsageError(f"{option} {path}: entry {number} is {_kind_of(one)}, not an object", hint=TOOLS_HINT)
    return found


TOOLS_HINT = (
    'like [{"type": "function", "function": {"name": "flights"}, "agent": "alice"}]; docs/jobs.md has all forms'
)


def _json_in(path: Path, option: str, what: str) -> Any:
    try:
        return json.loads(read(path, FILE_MAX_BYTES, what))
    except UnicodeDecodeError:
        raise UsageError(f"{option} {path}: no JSON: it is not UTF-8") from None
    except RecursionError:
        raise UsageError(f"{option} {path}: no JSON that can be read: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{option} {path}: no JSON: {error.msg} in {where}") from None


def _kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
