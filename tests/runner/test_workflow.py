"""Workflow files: what is one, what is wrong with the others, and what a request makes of it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.runner.faults import EngineFault
from hive.runner.workflow import Workflow, WorkflowFault, planned, read_workflow

GRAPH: dict[str, Any] = {
    "3": {"class_type": "KSampler", "inputs": {"seed": "{{seed}}", "steps": "{{steps}}", "model": ["4", 0]}},
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a.safetensors"}, "_meta": {"title": "x"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": "{{width}}", "height": "{{height}}", "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "{{style}} of {{prompt}}, 4k", "clip": ["4", 1]}},
    "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "hive", "images": ["3", 0]}},
}
INPUTS: dict[str, Any] = {
    "prompt": {"type": "text", "max_bytes": 100},
    "style": {"type": "choice", "choices": ["a photo", "a drawing"], "default": "a photo"},
    "seed": {"type": "integer", "min": 0, "max": 1000},
    "steps": {"type": "integer", "min": 1, "max": 50, "default": 20},
    "width": {"type": "integer", "min": 64, "max": 1024, "multiple_of": 64, "default": 512},
    "height": {"type": "integer", "min": 64, "max": 1024, "multiple_of": 64, "default": 512},
}


def read(inputs: Any = INPUTS, graph: Any = GRAPH, **more: Any) -> Workflow:
    return read_workflow("t2i", json.dumps({"inputs": inputs, "workflow": graph, **more}).encode())


def drawn(most: int) -> int:
    return most - 1


def plan(body: dict[str, Any], workflow: Workflow | None = None) -> list[Any]:
    return planned(workflow or read(), body, drawn)


def test_values_are_put_where_the_graph_names_them_and_nowhere_else() -> None:
    (run,) = plan({"prompt": "a bee", "seed": 7, "size": "256x128", "steps": 4, "inputs": {"style": "a drawing"}})
    assert run.graph["3"]["inputs"] == {"seed": 7, "steps": 4, "model": ["4", 0]}
    assert run.graph["5"]["inputs"] == {"width": 256, "height": 128, "batch_size": 1}
    assert run.graph["6"]["inputs"]["text"] == "a drawing of a bee, 4k"
    assert run.graph["4"] == {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a.safetensors"}}
    assert run.steps == 4


def test_images_are_temporary_unless_the_file_says_that_they_are_kept() -> None:
    (run,) = plan({"prompt": "a bee"})
    assert run.graph["9"] == {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}}
    (run,) = plan({"prompt": "a bee"}, read(keep_files=True))
    assert run.graph["9"] == GRAPH["9"]


def test_what_a_prompt_says_stays_a_text() -> None:
    for said in ("{{seed}}", '"}}, "x": {{prompt}}', '["4", 0]', "{{prompt}}"):
        (run,) = plan({"prompt": said})
        assert run.graph["6"]["inputs"]["text"] == f"a photo of {said}, 4k"


@given(st.text(max_size=20))
def test_no_prompt_changes_anything_but_its_own_place(said: str) -> None:
    said = said.replace("\0", "")
    (run,) = plan({"prompt": said, "seed": 1})
    assert run.graph["6"]["inputs"].pop("text") == f"a photo of {said}, 4k"
    (other,) = plan({"prompt": "a bee", "seed": 1})
    other.graph["6"]["inputs"].pop("text")
    assert run.graph == other.graph


def test_a_seed_that_nobody_asks_for_is_drawn_within_its_bounds() -> None:
    (run,) = plan({"prompt": "a bee"})
    assert run.values["seed"] == 1000


def test_several_images_are_several_runs_with_seeds_that_follow() -> None:
    runs = plan({"prompt": "a bee", "seed": 999, "n": 3})
    assert [run.graph["3"]["inputs"]["seed"] for run in runs] == [999, 1000, 0]


def test_several_images_are_one_run_where_the_workflow_takes_their_number() -> None:
    inputs = INPUTS | {"n": {"type": "integer", "min": 1, "max": 4}}
    graph = GRAPH | {"5": {"class_type": "E", "inputs": {"w": "{{width}}", "h": "{{height}}", "batch_size": "{{n}}"}}}
    for body, number in (({"n": 3}, 3), ({}, 1)):
        (run,) = plan({"prompt": "a bee", **body}, read(inputs, graph))
        assert run.graph["5"]["inputs"]["batch_size"] == number
    with pytest.raises(EngineFault, match="expected an integer from 1 to 4, found 5"):
        plan({"prompt": "a bee", "n": 5}, read(inputs, graph))


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({}, "prompt", "missing: comfy/t2i needs `prompt`"),
        ({"prompt": "a" * 101}, "prompt", "a text of at most 100 bytes"),
        ({"prompt": "a\0b"}, "prompt", "a text of at most 100 bytes"),
        ({"prompt": "x", "steps": 51}, "steps", "expected an integer from 1 to 50, found 51"),
        ({"prompt": "x", "steps": True}, "steps", "expected an integer"),
        ({"prompt": "x", "steps": 4.5}, "steps", "expected an integer"),
        ({"prompt": "x", "size": "100x128"}, "size", "width: expected an integer from 64 to 1024 in steps of 64"),
        ({"prompt": "x", "size": "wide"}, "size", "WIDTHxHEIGHT"),
        ({"prompt": "x", "negative_prompt": "y"}, "negative_prompt", "has no such input; it has prompt, style"),
        ({"prompt": "x", "inputs": {"ckpt_name": "b"}}, "inputs.ckpt_name", "has no such input"),
        ({"prompt": "x", "inputs": {"style": "oil"}}, "style", "one of a photo, a drawing, found"),
        ({"prompt": "x", "inputs": {"style": ["4", 0]}}, "style", "one of a photo"),
        ({"prompt": "x", "inputs": {"prompt": "y"}}, "inputs.prompt", "asked for twice"),
        ({"prompt": "x", "inputs": []}, "inputs", "expected an object"),
        ({"prompt": "x", "n": 0}, "n", "from 1 to 10"),
    ],
)
def test_a_request_beyond_the_workflow_is_refused_with_what_it_takes(
    body: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(EngineFault) as refused:
        plan(body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert why in refused.value.message


def test_a_workflow_without_a_seed_makes_one_image() -> None:
    graph = {"6": {"class_type": "T", "inputs": {"text": "{{prompt}}"}}}
    with pytest.raises(EngineFault, match="makes one image, the same each time"):
        plan({"prompt": "x", "n": 2}, read({"prompt": {"type": "text"}}, graph))
    with pytest.raises(EngineFault, match="makes images of one size"):
        plan({"prompt": "x", "size": "64x64"}, read({"prompt": {"type": "text"}}, graph))


def changed(**inputs: Any) -> dict[str, Any]:
    return {"inputs": INPUTS | inputs, "workflow": GRAPH}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON: .* line 1, column 2"),
        (b"[]", "no JSON object"),
        (b'{"workflow":{},"workflow":{}}', "'workflow' is there twice"),
        (b'{"inputs":{},"workflow":{"1":{"class_type":"A","inputs":{"x":NaN}}}}', "NaN is no JSON number"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"x":' + b"9" * 5000 + b"}", "a number is too long"),
        ({"nodes": [], "links": []}, "editor's format: export it"),
        (GRAPH, "a graph alone: put it into"),
        ({"inputs": {}}, "workflow: missing"),
        ({"workflow": GRAPH, "inputs": INPUTS, "outputs": "9"}, "'outputs' is not known there"),
        ({"workflow": GRAPH, "inputs": INPUTS, "output": "8"}, 'output: there is no node "8"'),
        ({"workflow": GRAPH, "inputs": INPUTS, "keep_files": 1}, "keep_files: expected true or false"),
        ({"workflow": {"1": {"inputs": {}}}, "inputs": {}}, "workflow.1: expected a node with a `class_type`"),
        ({"workflow": {"1": {"class_type": "A", "inputs": {"x": ["2", 0]}}}}, 'links to "2", which is no node'),
        ({"workflow": {"1": {"class_type": "{{a}}"}}}, "is not described in `inputs`"),
        ({"workflow": GRAPH, "inputs": {}}, "{{seed}} is not described in `inputs`"),
        (changed(more={"type": "text"}), "inputs.more: the graph names it nowhere"),
        (changed(Prompt={"type": "text"}), "a name is small letters"),
        (changed(prompt={"type": "image"}), "inputs.prompt.type: expected one of text, integer"),
        (changed(prompt={"type": "text", "min": 1}), "'min' is not known there"),
        (changed(prompt={"type": "text", "max_bytes": 1 << 20}), "inputs.prompt.max_bytes"),
        (changed(steps={"type": "integer", "min": 1}), "`min` and `max` are needed"),
        (changed(steps={"type": "integer", "min": 9, "max": 1}), "`min` not above `max`"),
        (changed(steps={"type": "integer", "min": 1, "max": 9, "default": 10}), "inputs.steps.default: expected"),
        (changed(width={"type": "integer", "min": 1, "max": 64, "multiple_of": 8}), "1 is no multiple of 8"),
        (changed(style={"type": "choice", "choices": []}), "expected a list of texts"),
        (changed(style={"type": "integer", "min": 0, "max": 1}), "is of type integer, and has to stand alone"),
    ],
)
def test_a_file_that_is_no_workflow_is_told_where_it_is_wrong(told: Any, why: str) -> None:
    data = told if isinstance(told, bytes) else json.dumps(told).encode()
    with pytest.raises(WorkflowFault, match=why):
        read_workflow("t2i", data)


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a b", "a" * 65, "ä"])
def test_a_file_whose_name_is_none_for_a_model_is_no_workflow(name: str) -> None:
    with pytest.raises(WorkflowFault, match="no name for a model"):
        read_workflow(name, b"{}")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["inputs", "workflow", "1", "class_type", "type", "min", "x"]), inner)
        ),
    )
)
def test_no_file_breaks_the_reader(told: Any) -> None:
    for data in ({"inputs": told, "workflow": GRAPH}, {"inputs": {}, "workflow": told}, told):
        with contextlib.suppress(WorkflowFault):  # some are workflows
            assert read_workflow("t2i", json.dumps(data).encode()).unfilled
