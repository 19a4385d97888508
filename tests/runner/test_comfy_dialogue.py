"""The dialogue with ComfyUI as playbooks: what it says, and what is asked next. No server, no clock."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from hive.runner.comfy_dialogue import (
    Ask,
    ComfyOutOfMemory,
    Event,
    MadeImage,
    Said,
    Unsaid,
    Wait,
    Waited,
    dialogue,
    left_behind,
)
from hive.runner.faults import CallerGone, EngineFault

ID, OTHER = "req-1", "req-2"
GRAPH = {"1": {"class_type": "EmptyImage", "inputs": {}}}
SENT = Ask("/prompt", {"prompt": GRAPH, "prompt_id": ID, "client_id": "hive-runner"})
HISTORY, QUEUE = Ask(f"/history/{ID}"), Ask("/queue")
DELETED, INTERRUPTED, FORGOTTEN = (
    Ask("/queue", {"delete": [ID]}),
    Ask("/interrupt", {"prompt_id": ID}),
    Ask("/history", {"delete": [ID]}),
)
OK = Said(200, b"")
TAKEN = Said(200, json.dumps({"prompt_id": ID, "number": 3, "node_errors": {}}).encode())
REFUSED = Unsaid("Connection refused", refused=True)


def said(shape: Any) -> Said:
    return Said(200, json.dumps(shape).encode())


def row(prompt_id: str = ID) -> list[Any]:
    return [3, prompt_id, GRAPH, {"client_id": "hive-runner"}, ["9"]]


IMAGE = {"filename": "a_00001_.png", "subfolder": "", "type": "temp"}
DONE = said({ID: {"prompt": row(), "outputs": {"9": {"images": [IMAGE]}}, "status": {"completed": True}}})
NOT_YET = said({})


def failed(name: str, **told: Any) -> Said:
    status = {"status_str": "error", "completed": False, "messages": [["execution_start", {}], [name, told]]}
    return said({ID: {"prompt": row(), "outputs": {}, "status": status}})


def play(talk: Generator[Ask | Wait, Event, Any], answers: Sequence[tuple[Ask | type[Wait], Event]]) -> Any:
    """Carries a dialogue on by a playbook: what has to be asked, with its answer. Returns what the dialogue returns."""
    event: Event | None = None
    try:
        for wanted, answer in answers:
            asked = talk.send(event) if event is not None else next(talk)
            assert isinstance(asked, wanted) if isinstance(wanted, type) else asked == wanted
            event = answer
        assert event is not None
        asked = talk.send(event)
    except StopIteration as ended:
        return ended.value
    raise AssertionError(f"it goes on with {asked}")


Step = tuple[Ask | type[Wait], Event]
WAITED: Step = (Wait, Waited(False))
LEFT: Step = (Wait, Waited(True))
SLOW = [step for _ in range(6) for step in (WAITED, (HISTORY, NOT_YET))]
"""Looks until the queue is looked at."""


def until_queue(talk: Generator[Ask | Wait, Event, Any]) -> None:
    """Carries a dialogue on, with a prompt that has not ended, until it asks for the queue."""
    asked = talk.send(TAKEN) if next(talk) == SENT else None
    while asked != QUEUE:
        asked = talk.send(Waited(False) if isinstance(asked, Wait) else NOT_YET)


def all_of(talk: Generator[Ask | Wait, Event, Any], answer: Event, waited: Waited) -> list[Ask | Wait]:
    """All that a dialogue asks until it fails, where each question has the same answer."""
    asked = [next(talk)]
    try:
        while True:
            asked.append(talk.send(waited if isinstance(asked[-1], Wait) else answer))
    except (EngineFault, CallerGone):
        return asked


def test_a_prompt_is_sent_under_the_id_of_its_request_and_forgotten_when_it_has_ended() -> None:
    book = [(SENT, TAKEN), WAITED, (HISTORY, NOT_YET), WAITED, (HISTORY, DONE), (FORGOTTEN, OK)]
    assert play(dialogue(ID, GRAPH), book) == [MadeImage("a_00001_.png", "", "temp")]


def test_a_history_that_could_not_be_deleted_is_deleted_once_more() -> None:
    book = [(SENT, TAKEN), WAITED, (HISTORY, DONE), (FORGOTTEN, Unsaid("timed out")), (FORGOTTEN, OK)]
    assert len(play(dialogue(ID, GRAPH), book)) == 1


def test_images_that_are_kept_are_the_answer_where_there_are_some() -> None:
    outputs = {"8": {"images": [IMAGE]}, "9": {"images": [IMAGE | {"type": "output"}]}, "7": {"text": ["x"]}}
    done = said({ID: {"outputs": outputs, "status": {"completed": True}}})
    book = [(SENT, TAKEN), WAITED, (HISTORY, done), (FORGOTTEN, OK)]
    assert [image.kind for image in play(dialogue(ID, GRAPH), book)] == ["output"]
    assert [image.kind for image in play(dialogue(ID, GRAPH, "8"), book)] == ["temp"]


def test_a_caller_that_leaves_has_its_prompt_ended_by_its_id_before_the_place_is_free() -> None:
    book = [
        *((SENT, TAKEN), WAITED, (HISTORY, NOT_YET), LEFT),
        *((DELETED, OK), (INTERRUPTED, OK), (QUEUE, said({"queue_running": [row()], "queue_pending": []}))),
        *((Wait, Waited(True)), (DELETED, OK), (INTERRUPTED, OK)),
        *((QUEUE, said({"queue_running": [row(OTHER)], "queue_pending": []})), (FORGOTTEN, OK)),
    ]
    with pytest.raises(CallerGone):
        play(dialogue(ID, GRAPH), book)


def test_nobody_is_ever_interrupted_without_an_id() -> None:
    talk = dialogue(ID, GRAPH)
    asked = all_of(talk, Unsaid("timed out"), Waited(True))
    interrupts = [one.body for one in asked if isinstance(one, Ask) and one.target == "/interrupt"]
    assert interrupts
    assert all(body == {"prompt_id": ID} for body in interrupts)


def test_a_graph_that_comfyui_refuses_is_told_in_its_words() -> None:
    error = {"type": "invalid_prompt", "message": "Cannot execute because node X does not exist.", "details": "#3"}
    told = Said(400, json.dumps({"error": error, "node_errors": []}).encode())
    with pytest.raises(EngineFault, match="refuses the workflow: Cannot execute because node X") as refused:
        play(dialogue(ID, GRAPH), [(SENT, told)])
    assert (refused.value.status, refused.value.code) == (502, "workflow_refused")


def test_an_error_of_a_node_is_told_with_the_node() -> None:
    errors = [{"type": "value_not_in_list", "message": "Value not in list", "details": "ckpt_name: 'a' not in []"}]
    error: dict[str, Any] = {
        "type": "prompt_outputs_failed_validation",
        "message": "Prompt outputs failed validation",
        "details": "",
    }
    nodes = {"4": {"errors": errors, "dependent_outputs": ["9"], "class_type": "CheckpointLoaderSimple"}}
    told = Said(400, json.dumps({"error": error, "node_errors": nodes}).encode())
    with pytest.raises(EngineFault, match="node 4: Value not in list: ckpt_name"):
        play(dialogue(ID, GRAPH), [(SENT, told)])
    with pytest.raises(EngineFault, match="it answers 500"):
        play(dialogue(ID, GRAPH), [(SENT, Said(500, b"500 Internal Server Error"))])


def test_a_comfyui_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(EngineFault, match="cannot be reached: Connection refused") as lost:
        play(dialogue(ID, GRAPH), [(SENT, REFUSED)])
    assert (lost.value.status, lost.value.code) == (502, "comfyui_unreachable")


def test_a_prompt_that_perhaps_came_there_is_taken_back() -> None:
    gone: Step = (QUEUE, said({"queue_running": [], "queue_pending": []}))
    book: list[Step] = [(SENT, Unsaid("timed out")), (DELETED, OK), (INTERRUPTED, OK), gone, (FORGOTTEN, OK)]
    with pytest.raises(EngineFault, match="timed out"):
        play(dialogue(ID, GRAPH), book)


def test_a_comfyui_that_ends_in_the_middle_has_lost_the_prompt() -> None:
    ended = [(DELETED, REFUSED), (INTERRUPTED, REFUSED), (QUEUE, REFUSED), (FORGOTTEN, REFUSED)]
    with pytest.raises(EngineFault) as lost:
        play(dialogue(ID, GRAPH), [(SENT, TAKEN), WAITED, (HISTORY, REFUSED), *ended])
    assert (lost.value.status, lost.value.code) == (502, "comfyui_restarted")


def test_a_comfyui_that_was_restarted_knows_nothing_of_the_prompt() -> None:
    talk = dialogue(ID, GRAPH)
    until_queue(talk)
    assert talk.send(said({"queue_running": [], "queue_pending": []})) == HISTORY
    assert talk.send(NOT_YET) == DELETED
    for answer in (OK, OK, said({"queue_running": [], "queue_pending": []})):
        talk.send(answer)
    with pytest.raises(EngineFault, match="knows nothing of the prompt: it was restarted") as lost:
        talk.send(OK)
    assert lost.value.status == 502


def test_a_prompt_that_ended_between_the_two_questions_is_not_lost() -> None:
    talk = dialogue(ID, GRAPH)
    until_queue(talk)
    assert talk.send(said({"queue_running": [], "queue_pending": []})) == HISTORY
    assert talk.send(DONE) == FORGOTTEN
    with pytest.raises(StopIteration):
        talk.send(OK)


@pytest.mark.parametrize("part", ["queue_running", "queue_pending"])
def test_a_prompt_that_waits_or_runs_is_waited_for(part: str) -> None:
    talk = dialogue(ID, GRAPH)
    until_queue(talk)
    assert isinstance(talk.send(said({"queue_running": [], "queue_pending": [], part: [row()]})), Wait)


def test_silence_is_borne_for_two_minutes_while_it_loads() -> None:
    talk = dialogue(ID, GRAPH)
    next(talk)
    asked, waited_s = talk.send(TAKEN), 0.0
    while asked != DELETED:
        waited_s += asked.seconds if isinstance(asked, Wait) else 0
        asked = talk.send(Waited(False) if isinstance(asked, Wait) else Unsaid("timed out"))
    assert 119 < waited_s < 122


def test_an_error_of_the_engine_is_told_with_its_node_and_forgotten() -> None:
    told = {"node_type": "KSampler", "node_id": "3", "exception_type": "RuntimeError"}
    book = [(SENT, TAKEN), WAITED, (HISTORY, failed("execution_error", exception_message="bad\n shape\x1b", **told))]
    with pytest.raises(EngineFault, match=r"failed at KSampler \(node 3\): RuntimeError: bad shape$") as fault:
        play(dialogue(ID, GRAPH), [*book, (FORGOTTEN, OK)])
    assert (fault.value.status, fault.value.code) == (502, "comfyui_failed")


@pytest.mark.parametrize("kind", ["torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"])
def test_a_lack_of_memory_is_one(kind: str) -> None:
    full = failed("execution_error", exception_type=kind, exception_message="Allocation", node_type="VAEDecode")
    with pytest.raises(ComfyOutOfMemory, match="out of memory at VAEDecode"):
        play(dialogue(ID, GRAPH), [(SENT, TAKEN), WAITED, (HISTORY, full), (FORGOTTEN, OK)])


def test_somebody_elses_interrupt_is_told() -> None:
    book = [(SENT, TAKEN), WAITED, (HISTORY, failed("execution_interrupted", node_id="3")), (FORGOTTEN, OK)]
    with pytest.raises(EngineFault, match="somebody has interrupted it"):
        play(dialogue(ID, GRAPH), book)


def test_a_workflow_without_images_is_told_what_it_lacks() -> None:
    empty = said({ID: {"outputs": {}, "status": {"completed": True}}})
    with pytest.raises(EngineFault, match="has to end in PreviewImage or SaveImage"):
        play(dialogue(ID, GRAPH), [(SENT, TAKEN), WAITED, (HISTORY, empty), (FORGOTTEN, OK)])


def test_what_a_killed_runner_left_is_removed_and_nothing_of_others() -> None:
    theirs = [1, "ann", GRAPH, {"client_id": "ann"}, ["9"]]
    queue = said({"queue_running": [row()], "queue_pending": [theirs]})
    history = said({OTHER: {"prompt": row(OTHER)}, "ann": {"prompt": theirs}})
    book = [(QUEUE, queue), (Ask("/history"), history)]
    for one in (ID, OTHER):
        book += [(Ask("/queue", {"delete": [one]}), OK), (Ask("/interrupt", {"prompt_id": one}), OK)]
        book += [(QUEUE, said({"queue_running": [], "queue_pending": [theirs]}))]
        book += [(Ask("/history", {"delete": [one]}), OK)]
    assert play(left_behind(), book) == [ID, OTHER]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'{"req-1": 5}', b"\xff", b"[" * 100_000, b'{"req-1":{"status":5}}']
)
def test_nonsense_is_no_answer_and_breaks_nothing(body: bytes) -> None:
    assert FORGOTTEN in all_of(dialogue(ID, GRAPH), Said(200, body), Waited(False))
