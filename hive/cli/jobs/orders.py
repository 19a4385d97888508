"""Commands about jobs there are: listing and showing them, their output and result, ending and forgetting them."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall, completed, out
from hive.cli.jobs.output import OutputWriter, events_of, signal_line, tokens_line
from hive.cli.jobs.run import check_ended, goes_on, tell_signals
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, ago, fields, harmless, number, one_line, span
from hive.errors import UsageError, with_code

CANCEL_S = 60.0


def job_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completion of a job's id."""
    return completed(
        ctx,
        incomplete,
        lambda client: [{"name": job["id"]} for job in client.get("/api/jobs", timeout_s=0.2, limit=100)["jobs"]],
    )


JobId = Annotated[str, typer.Argument(metavar="JOB", help="Its id.", autocompletion=job_ids, show_default=False)]


def list_jobs(
    call: CommandCall,
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="Such as task, model.load.", show_default=False)
    ] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1000, help="So many of the last ones.")] = 20,
) -> None:
    """Lists the last jobs, the newest first: models at work, and what else takes long, such as loads.

    Examples:
      hive job list
      hive job list --kind task --json | jq -r '.jobs[] | select(.status == "failed") | .id'
    """
    answer = call.client.get("/api/jobs", limit=limit, kind=kind or None)
    call.show("job.list", answer, lambda: _listed(answer["jobs"], time.time()))


def show(call: CommandCall, job: JobId) -> None:
    """Shows one job; of a model at work that has ended, its turns, signals and tokens, too.

    Examples:
      hive job show 3f9a0c112233
      hive job show 3f9a0c112233 --json | jq .result.usage
    """
    found = call.client.get(_path_of(job))
    answer = dict(found)
    if found["task"] and found["state"] != "running" and not found["task"]["released"]:
        answer["result"] = call.client.get(f"{_path_of(job)}/result")
    call.show("job.show", answer, lambda: _shown(answer, time.time()))


def logs(
    call: CommandCall,
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    after: Annotated[
        int, typer.Option("--after", metavar="N", min=0, max=999_999_999, help="Events behind this one alone.")
    ] = 0,
) -> None:
    """Prints what a model at work says, calls and signals, from the beginning. Ctrl-C ends the looking, not the job.

    With --json each event is a line, and has a number to go on from.

    Examples:
      hive job logs 3f9a0c112233
      hive job logs -f 3f9a0c112233
      hive job logs 3f9a0c112233 --after 120 --json
    """
    writer = OutputWriter(out)
    try:
        for event in events_of(call, job, after=after, follow=follow):
            if call.as_json:
                call.line("job.output", event, lambda: "")
            else:
                writer.write(event)
    except KeyboardInterrupt:
        writer.close()
        call.say(goes_on(job))
        raise
    writer.close()


def result(call: CommandCall, job: JobId) -> None:
    """Prints the answer of a model at work, once it has ended. Its signals are told on stderr.

    Of a job that failed or was cancelled what there was of the answer is printed, and the error is the command's.

    Examples:
      hive job result 3f9a0c112233
      hive job result 3f9a0c112233 --json | jq '.signals[].name'
    """
    answer = call.client.get(f"{_path_of(job)}/result")
    tell_signals(call, answer)
    call.show("job.result", answer, lambda: harmless(answer["answer"]))
    check_ended(call, call.client.get(_path_of(job)))


def cancel(call: CommandCall, job: JobId) -> None:
    """Ends a job. What a model at work had said until then is kept.

    Ending a load or a pull takes the role admin.

    Examples:
      hive job cancel 3f9a0c112233
    """
    ended = call.client.delete(_path_of(job), timeout_s=CANCEL_S)
    call.show("job.cancel", ended, lambda: f"job {one_line(ended['id'])} is {ended['status'].replace('_', ' ')}")


def release(call: CommandCall, job: JobId) -> None:
    """Deletes the output and the result of a model at work that has ended. The job stays in the list.

    Examples:
      hive job release 3f9a0c112233
    """
    released = call.client.post(f"{_path_of(job)}/release")
    call.show("job.release", released, lambda: f"nothing is kept any more of what job {released['id']} said")


def _path_of(job: str) -> str:
    if not job:
        raise UsageError("an empty id names no job", hint="hive job list")
    return f"/api/jobs/{quote(job, safe='')}"


def _listed(jobs: list[Answer], now: float) -> str:
    if not jobs:
        return "there is no job: hive job run NAME --model MODEL PROMPT"
    heads = ["JOB", "KIND", "NAME", "STATUS", "MODEL", "TENANT", "BY", "BEGUN", "WHY"]
    rows = []
    for job in jobs:
        task = job["task"] or {}
        rows.append(
            [
                job["id"],
                job["kind"],
                task.get("name") or UNKNOWN,
                _status_of(job),
                job["about"] or UNKNOWN,
                task.get("tenant") or UNKNOWN,
                job["actor"],
                ago(job["created_at"], now),
                one_line(_why(job)),
            ]
        )
    return fitted(heads, rows, drop=["BY", "TENANT", "BEGUN", "KIND"], prose="WHY")


def _status_of(job: Answer) -> str:
    """
    >>> _status_of({"status": "in_progress"})
    'in progress'
    """
    return str(job["status"]).replace("_", " ")


def _why(job: Answer) -> str:
    """The reason of its end, as a sentence and its code; of one that runs, its progress.

    >>> _why({"error": None, "progress": "turn 1", "result": {"status": "completed", "detail": ""}, "task": {}})
    ''
    """
    if job["error"]:
        return with_code(str(job["error"]["message"]), str(job["error"]["code"]))
    is_ended_task = job["task"] is not None and job["result"] is not None
    return str(job["result"].get("detail", "") if is_ended_task else job["progress"])


def _called(turn: Answer) -> str:
    """The names of what was called. Calls that are held to JSON are in the answer's text; their results have the names.

    >>> _called({"calls": [], "results": [{"name": "look"}, {"name": ""}]})
    'look'
    """
    return ", ".join(call["name"] for call in turn["calls"] or turn["results"] if call["name"])


def _shown(job: Answer, now: float) -> str:
    task, ends = job["task"] or {}, job["updated_at"] if job["state"] != "running" else now
    told = [
        ("Job", job["id"]),
        ("Kind", job["kind"]),
        ("Name", task.get("name", "")),
        ("Status", _status_of(job)),
        ("Why", _why(job)),
        ("Model", job["about"]),
        ("As", task.get("agent_name", "")),
        ("Tenant", task.get("tenant", "")),
        ("Priority", task.get("priority", "")),
        ("Ordered by", job["actor"]),
        ("Begun", ago(job["created_at"], now)),
        ("Took" if job["state"] != "running" else "Runs for", span(ends - job["created_at"])),
    ]
    result = job["result"] or {}
    if "turns" not in result:
        return fields([(label, one_line(text)) for label, text in told])
    told += [("Tokens", tokens_line(result["usage"]))]
    told += [("Signal", signal_line(signal)) for signal in result["signals"]]
    heads = ["TURN", "IN", "CACHED", "OUT", "ENDED BY", "CALLS"]
    rows = [
        [
            str(turn["n"]),
            number(turn["tokens_in"]),
            number(turn["tokens_cached"]),
            number(turn["tokens_out"]),
            turn["finish_reason"] or UNKNOWN,
            _called(turn) or UNKNOWN,
        ]
        for turn in result["turns"]
    ]
    text = fields([(label, one_line(text)) for label, text in told])
    return f"{text}\n\n{fitted(heads, rows, prose='CALLS')}" if rows else text
