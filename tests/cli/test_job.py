"""`hive job` about jobs that a daemon has on record: what is printed of them, and how each call ends."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

import pytest

from hive.cli.jobs.orders import job_ids
from hive.cli.jobs.output import OutputWriter
from hive.domain import JobState
from hive.lifecycle.job_output import JobOutput
from hive.link.jobs import JobWord
from hive.store import job_turns, jobs
from hive.store.job_turns import KIND, JobSignalRow, JobTurnRow
from hive.store.jobs import StoredJob

Hive = Any
"""conftest.Hive: test modules import no siblings."""
EVIL = "\x1b]0;evil\x07"
WORDS = [
    ("thinking", {"turn": 1, "text": "hm"}),
    ("delta", {"turn": 1, "text": "I look. "}),
    ("turn", {"turn": 1, "finish_reason": "tool_calls", "calls": []}),
    ("tool_call", {"turn": 1, "id": "c1", "name": "look", "arguments": '{"where": "north"}'}),
    ("tool_result", {"turn": 1, "id": "c1", "name": "look", "result": f"bees\n{EVIL}" + "x" * 1000}),
    ("signal", {"turn": 1, "name": "LOW_CONFIDENCE", "arguments": {"reason": EVIL}, "has_ended": False}),
    ("delta", {"turn": 2, "text": f"Bees{EVIL},\n"}),
    ("delta", {"turn": 2, "text": "and honey."}),
    ("turn", {"turn": 2, "finish_reason": "length", "calls": []}),
]
SAID = r"""I look. 
-> look {"where": "north"}
<- look: bees \x1b]0;evil\x07"""  # noqa: W291 - as the model said it


def task(job: str, state: JobState, status: str, *, reason: str = "", detail: str = "") -> StoredJob:
    usage = {"turns": 2, "tokens_in": 1090, "tokens_out": 9, "tokens_cached": 1000}
    return StoredJob(
        id=job,
        kind=KIND,
        state=state,
        progress="turn 2",
        plan={"name": f"tidy{EVIL}", "model": "demo", "tenant": "acme", "agent": "a1", "agent_name": "alice"},
        result={"status": status, "reason": reason, "detail": detail, "usage": usage},
        error={"code": reason, "message": detail, "hint": "", "log": []} if state is JobState.FAILED else None,
        actor="uid:0",
        created_at=1000.0 - ord(job[0]),
        updated_at=1042.0 - ord(job[0]),
    )


class JobHive:
    """`hive job` beside a daemon with jobs of all ends on record."""

    def __init__(self, hive: Hive) -> None:
        self.hive = hive
        self.put(task("a" * 12, JobState.DONE, "incomplete", reason="length", detail="it was cut off"))
        self.put(
            task("b" * 12, JobState.FAILED, "failed", reason="worker_restarted", detail="Hive ended before it did")
        )
        self.put(task("c" * 12, JobState.CANCELLED, "cancelled", reason="cancelled", detail="it was cancelled"))
        load = StoredJob(id="d" * 12, kind="model.load", plan={"model": "m"}, actor="idle", created_at=1, updated_at=1)
        hive.daemon.do(hive.box.services.jobs._database.write(lambda conn: jobs.add(conn, load)))

    def put(self, job: StoredJob) -> None:
        def work(conn: sqlite3.Connection) -> None:
            jobs.add(conn, job)
            call = {"id": "c1", "name": "look", "arguments": "{}"}
            job_turns.add_turn(conn, job.id, JobTurnRow(n=1, calls=[call], finish_reason="tool_calls", at=1001.0))
            last = JobTurnRow(
                n=2, answer=f"Bees{EVIL}", finish_reason="length", tokens_in=1090, tokens_out=9, at=1002.0
            )
            job_turns.add_turn(conn, job.id, last)
            arguments = {"reason": "fog"}
            row = JobSignalRow(n=1, name="LOW_CONFIDENCE", arguments=arguments, turn=1, has_ended=False, at=1001.5)
            job_turns.add_signal(conn, job.id, row)

        self.hive.daemon.do(self.hive.box.services.jobs._database.write(work))
        output = JobOutput(self.hive.box.paths.jobs, job.id)
        ended = ("ended", {**(job.result or {}), "state": str(job.state), "answer": f"Bees{EVIL}"})
        output.append([JobWord(1001.0, event, dict(data)) for event, data in [*WORDS, ended]])
        output.close()

    def __call__(self, *words: str) -> Any:
        return self.hive("job", *words)


@pytest.fixture
def job(hive: Hive) -> JobHive:
    return JobHive(hive)


def test_without_any_the_list_says_how_one_comes(hive: Hive) -> None:
    said = hive("job")
    assert (said.code, said.out) == (0, "there is no job: hive job run NAME --model MODEL PROMPT\n")


def test_the_list_has_models_at_work_and_what_else_takes_long(job: JobHive) -> None:
    lines = job().out.splitlines()
    assert [re.split(r"  +", line)[0] for line in lines[1:]] == ["a" * 12, "b" * 12, "c" * 12, "d" * 12]
    assert re.match(r"a{12}  task +tidy\\x1b\]0;evil\\x07  incomplete +demo +acme ", lines[1])
    assert lines[1].endswith("it was cut off")
    assert re.match(r"d{12}  model.load  -  +in progress  m +-  ", lines[4])
    assert len(job("list", "--kind", "task").out.splitlines()) == 4
    assert [one["id"] for one in job("list", "--kind", "model.load", "--json").json["jobs"]] == ["d" * 12]
    assert len(job("list", "--limit", "1").out.splitlines()) == 2


def test_one_is_shown_with_its_turns_signals_and_tokens(job: JobHive) -> None:
    said = job("show", "a" * 12).out
    for line in (
        "Status: incomplete",
        "Why: it was cut off",
        "As: alice",
        "Took: 42s",
        "Tokens: 1,090 in, of which 1,000 were cached; 9 out",
        'Signal: LOW_CONFIDENCE {"reason": "fog"}',
    ):
        assert f" {line}\n" in f" {said}", line
    assert re.search(r"\n1 +- +- +- +tool_calls +look\n2 +1,090 +- +9 +length +-\n", said)
    assert job("show", "a" * 12, "--json").json["result"]["usage"]["tokens_cached"] == 1000
    load = job("show", "d" * 12)
    assert (load.code, "Kind: model.load" in load.out, "TURN" in load.out) == (0, True, False)


def test_what_it_said_is_printed_and_steers_no_terminal(job: JobHive) -> None:
    said = job("logs", "a" * 12).out
    assert said.startswith(SAID)
    assert EVIL not in said
    lines = said.splitlines()
    assert lines[2].endswith("x… (1,014 characters)")
    assert lines[3:] == [
        r'!! LOW_CONFIDENCE {"reason": "\u001b]0;evil\u0007"}',
        r"Bees\x1b]0;evil\x07,",
        "and honey.",
        "incomplete: length: it was cut off",
    ]
    assert said == job("logs", "-f", "a" * 12).out
    assert job("logs", "a" * 12, "--after", "9").out == "incomplete: length: it was cut off\n"
    assert len(job("logs", "a" * 12, "--after", "4", "--json").out.splitlines()) == 6


def test_thoughts_are_faint_on_a_terminal_and_nowhere_else(job: JobHive, capsys: pytest.CaptureFixture[str]) -> None:
    assert "hm" not in job("logs", "a" * 12).out
    talk = list[str]()
    writer = OutputWriter(talk.append, thinks=True)
    for name, data in WORDS[:4]:
        writer.write({"event": name, "data": data})
    writer.close()
    assert capsys.readouterr().out == "\x1b[2mhm\x1b[22m\nI look. \n"
    assert talk == ['-> look {"where": "north"}']


@pytest.mark.parametrize(
    ("which", "code", "error"),
    [
        ("a", 0, "the answer is incomplete: it was cut off\n"),
        ("b", 1, "hive: Hive ended before it did  [worker_restarted]\n"),
        ("c", 4, f"hive: job {'c' * 12} was cancelled  [cancelled]\n"),
    ],
)
def test_a_result_is_printed_and_the_exit_code_is_that_of_its_end(
    job: JobHive, which: str, code: int, error: str
) -> None:
    said = job("result", which * 12)
    assert (said.code, said.out) == (code, "Bees\\x1b]0;evil\\x07\n")
    assert said.err == f'!! LOW_CONFIDENCE {{"reason": "fog"}}\n{error}'


def test_what_no_model_works_in_has_no_output(job: JobHive) -> None:
    for words in (("logs",), ("logs", "-f"), ("result",), ("release",)):
        said = job(*words, "d" * 12)
        assert (said.code, "is a model.load" in said.err) == (3, True), (words, said)


def test_one_is_released_and_cancelled_once(job: JobHive) -> None:
    assert job("cancel", "a" * 12).out == f"job {'a' * 12} is incomplete\n"
    assert job("release", "a" * 12).out == f"nothing is kept any more of what job {'a' * 12} said\n"
    for words in (("logs",), ("logs", "-f"), ("result",), ("release",)):
        assert job(*words, "a" * 12).code == 3, words
    assert "TURN" not in job("show", "a" * 12).out


def test_ids_are_completed(job: JobHive) -> None:
    class There:
        socket, state_dir = job.hive.socket, None

    assert job_ids(There(), "a") == ["a" * 12]  # type: ignore[arg-type]
    assert len(job_ids(There(), "")) == 4  # type: ignore[arg-type]
