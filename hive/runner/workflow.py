"""Workflow file of an operator: a ComfyUI graph with named, typed, bounded inputs. Pure; standard library only.

The graph is what ComfyUI exports as "API"; where a value may be asked for it says `{{NAME}}`, and `inputs` describes
NAME. Nothing else of the graph can be reached by a request: no node, no link, no other value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hive.runner.faults import EngineFault

PREFIX = "comfy/"
"""Beginning of the names of the models that workflows are."""
MOST_FILE_BYTES = 1 << 20
MOST_NODES = 1000
MOST_WORKFLOWS = 256
"""Of one directory."""
MOST_INPUTS = 64
MOST_CHOICES = 256
MOST_TEXT_BYTES = 64 << 10
TEXT_BYTES = 8 << 10
"""Of a text without `max_bytes`."""
LARGEST = (1 << 64) - 1
"""ComfyUI's seeds are of 64 bits."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_INPUT = re.compile(r"[a-z][a-z0-9_]{0,39}")
_PLACE = re.compile(r"\{\{\s*([A-Za-z0-9_]{1,40})\s*\}\}")
_KEYS = frozenset({"description", "inputs", "output", "keep_files", "workflow"})
_OF_TYPE = {
    "text": frozenset({"max_bytes"}),
    "integer": frozenset({"min", "max", "multiple_of"}),
    "number": frozenset({"min", "max"}),
    "choice": frozenset({"choices"}),
    "switch": frozenset[str](),
}
_OF_ALL = frozenset({"type", "default", "description"})


class WorkflowFault(Exception):
    """A workflow file that is none. The text says where, what and what to do."""


class WorkflowInput(NamedTuple):
    """One named value of a workflow. `default` None: a request has to give it, but for a seed, which is drawn."""

    name: str
    type: str
    low: float = 0
    high: float = 0
    multiple_of: int = 1
    max_bytes: int = TEXT_BYTES
    choices: tuple[str, ...] = ()
    default: Any = None

    @property
    def is_drawn(self) -> bool:
        return self.name == "seed" and self.type == "integer" and self.default is None

    def checked(self, value: Any) -> Any:
        """The value, as the graph gets it. Raises ValueError with a clause that says what is expected.

        >>> WorkflowInput("steps", "integer", 1, 50).checked(20)
        20
        >>> WorkflowInput("steps", "integer", 1, 50).checked(51)
        Traceback (most recent call last):
        ValueError: expected an integer from 1 to 50, found 51
        """
        expected = self.expects()
        if self.type == "text":
            good = isinstance(value, str) and len(value.encode("utf-8", "surrogatepass")) <= self.max_bytes
            good = good and "\0" not in value
        elif self.type == "switch":
            good = isinstance(value, bool)
        elif self.type == "choice":
            good = isinstance(value, str) and value in self.choices
        else:
            value = _number(value, self.type)
            good = value is not None and self.low <= value <= self.high
            good = good and (self.type == "number" or not (value - int(self.low)) % self.multiple_of)
        if not good:
            raise ValueError(f"expected {expected}, found {_shown(value)}")
        return value

    def expects(self) -> str:
        """Says what it takes, in words."""
        if self.type == "text":
            return f"a text of at most {self.max_bytes} bytes"
        if self.type == "switch":
            return "true or false"
        if self.type == "choice":
            return f"one of {', '.join(self.choices[:10])}{', …' if len(self.choices) > 10 else ''}"
        if self.type == "number":
            return f"a number from {self.low:g} to {self.high:g}"
        steps = f" in steps of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"an integer from {int(self.low)} to {int(self.high)}{steps}"

    def shape(self) -> dict[str, Any]:
        """Its description for people and programs."""
        shape: dict[str, Any] = {"type": self.type, "expects": self.expects()}
        return shape if self.default is None else shape | {"default": self.default}


class Workflow(NamedTuple):
    """One workflow. `output`: the node whose images are the answer, empty for all of them; `keep_files`: ComfyUI keeps
    the images in its output directory; `unfilled`: the graph with `{{NAME}}` in it."""

    name: str
    description: str
    inputs: Mapping[str, WorkflowInput]
    unfilled: Mapping[str, Any]
    output: str = ""
    keep_files: bool = False

    def __repr__(self) -> str:
        return f"<Workflow {self.name} {len(self.unfilled)} nodes, inputs {', '.join(self.inputs)}>"

    @property
    def model(self) -> str:
        return PREFIX + self.name

    def filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The graph with these values, one for each input, which are checked already. A value is put in once and never
        looked at again: what stands in a prompt like `{{seed}}` stays a text."""
        return {node: self._filled_node(told, values) for node, told in self.unfilled.items()}

    def _filled_node(self, told: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {key: filled_value(value, values) for key, value in told["inputs"].items()}
        if told["class_type"] == "SaveImage" and not self.keep_files:
            return {"class_type": "PreviewImage", "inputs": {"images": inputs.get("images")}}
        return {"class_type": told["class_type"], "inputs": inputs}


def filled_value(value: Any, values: Mapping[str, Any]) -> Any:
    """A value of a node with the inputs that it names put in: alone as what they are, within a text as text.

    >>> filled_value("{{seed}}", {"seed": 5}), filled_value("a photo of {{prompt}}, 4k", {"prompt": "{{seed}}"})
    (5, 'a photo of {{seed}}, 4k')
    """
    if not isinstance(value, str):
        return value
    whole = _PLACE.fullmatch(value)
    return values[whole[1]] if whole else _PLACE.sub(lambda place: str(values[place[1]]), value)


# --- reading a file ----------------------------------------------------------------------------------------------


def read_workflow(name: str, data: bytes) -> Workflow:
    """The workflow that a file `NAME.json` holds. Raises WorkflowFault."""
    if not NAME.fullmatch(name):
        raise WorkflowFault(f"{name[:80]!r} is no name for a model: up to 64 letters, digits, `.`, `_`, `-`")
    if len(data) > MOST_FILE_BYTES:
        raise WorkflowFault(f"it has {len(data)} bytes, and may have {MOST_FILE_BYTES}")
    found = _object(data)
    if "nodes" in found and "links" in found:
        raise WorkflowFault("this is the editor's format: export it in ComfyUI with Workflow, Export (API)")
    if "workflow" not in found and any(isinstance(one, dict) and "class_type" in one for one in found.values()):
        raise WorkflowFault('this is a graph alone: put it into {"inputs": {…}, "workflow": GRAPH}')
    _refuse_unknown(found, _KEYS, "the file")
    graph = _graph(found.get("workflow"))
    described = found.get("inputs", {})
    if not isinstance(described, dict) or len(described) > MOST_INPUTS:
        raise WorkflowFault(f"inputs: expected an object with at most {MOST_INPUTS} members")
    inputs = {key: _input(key, value) for key, value in described.items()}
    _check_places(graph, inputs)
    output, keep_files = found.get("output", ""), found.get("keep_files", False)
    if not isinstance(output, str) or (output and output not in graph):
        raise WorkflowFault(f"output: there is no node {_shown(output)} in the graph")
    if not isinstance(keep_files, bool):
        raise WorkflowFault(f"keep_files: expected true or false, found {_shown(keep_files)}")
    description = found.get("description", "")
    if not isinstance(description, str) or len(description) > 1000:
        raise WorkflowFault("description: expected a text of at most 1000 characters")
    return Workflow(name, description, inputs, graph, output, keep_files)


def _object(data: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
            raise WorkflowFault(f"the member {twice[:80]!r} is there twice in one object")
        return made

    def no_number(word: str) -> float:
        raise WorkflowFault(f"{word} is no JSON number")

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=no_number)
    except UnicodeDecodeError:
        raise WorkflowFault("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise WorkflowFault(f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError):
        raise WorkflowFault("it is not JSON that can be read: a number is too long, or it is nested too deep") from None
    if not isinstance(found, dict):
        raise WorkflowFault("it is no JSON object")
    return found


def _graph(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict) or not found:
        raise WorkflowFault("workflow: missing: the graph as ComfyUI exports it with Workflow, Export (API)")
    if len(found) > MOST_NODES:
        raise WorkflowFault(f"workflow: it has {len(found)} nodes, and may have {MOST_NODES}")
    graph = {}
    for node, told in found.items():
        if not isinstance(told, dict) or not isinstance(told.get("class_type"), str) or not told["class_type"]:
            raise WorkflowFault(f"workflow.{node[:40]}: expected a node with a `class_type`, found {_shown(told)}")
        inputs = told.get("inputs", {})
        if not isinstance(inputs, dict):
            raise WorkflowFault(f"workflow.{node[:40]}.inputs: expected an object, found {_shown(inputs)}")
        graph[node] = {"class_type": told["class_type"], "inputs": inputs}
    for node, told in graph.items():
        for key, value in told["inputs"].items():
            if _is_link(value) and value[0] not in graph:
                raise WorkflowFault(f"workflow.{node}.inputs.{key}: it links to {_shown(value[0])}, which is no node")
    return graph


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def _input(name: str, found: Any) -> WorkflowInput:
    where = f"inputs.{name[:60]}"
    if not _INPUT.fullmatch(name):
        raise WorkflowFault(f"{where}: a name is small letters, digits and `_`, up to 40, a letter first")
    if not isinstance(found, dict):
        raise WorkflowFault(f"{where}: expected an object with a `type`, found {_shown(found)}")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in _OF_TYPE:
        raise WorkflowFault(f"{where}.type: expected one of {', '.join(_OF_TYPE)}, found {_shown(kind)}")
    _refuse_unknown(found, _OF_ALL | _OF_TYPE[kind], where)
    made = WorkflowInput(name, kind)
    if kind in ("integer", "number"):
        made = _bounded(made, where, found)
    elif kind == "choice":
        choices = found.get("choices")
        if not (isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices)):
            raise WorkflowFault(f"{where}.choices: expected a list of texts, found {_shown(choices)}")
        if len(choices) > MOST_CHOICES:
            raise WorkflowFault(f"{where}.choices: it has {len(choices)}, and may have {MOST_CHOICES}")
        made = made._replace(choices=tuple(choices))
    elif kind == "text":
        most = found.get("max_bytes", TEXT_BYTES)
        if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= MOST_TEXT_BYTES:
            raise WorkflowFault(f"{where}.max_bytes: expected an integer from 1 to {MOST_TEXT_BYTES}")
        made = made._replace(max_bytes=most)
    if (default := found.get("default")) is None:
        return made
    try:
        return made._replace(default=made.checked(default))
    except ValueError as error:
        raise WorkflowFault(f"{where}.default: {error}") from None


def _bounded(made: WorkflowInput, where: str, found: Mapping[str, Any]) -> WorkflowInput:
    low, high = (_number(found.get(key), made.type) for key in ("min", "max"))
    if low is None or high is None or not -LARGEST <= low <= high <= LARGEST:
        raise WorkflowFault(f"{where}: `min` and `max` are needed, numbers of its type, `min` not above `max`")
    step = found.get("multiple_of", 1)
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise WorkflowFault(f"{where}.multiple_of: expected an integer from 1, found {_shown(step)}")
    if made.type == "integer" and low % step:
        raise WorkflowFault(f"{where}.min: {low} is no multiple of {step}")
    return made._replace(low=low, high=high, multiple_of=step)


def _check_places(graph: Mapping[str, Any], inputs: Mapping[str, WorkflowInput]) -> None:
    """Raises WorkflowFault for a `{{NAME}}` that nothing describes or that cannot stand there, and for an input that
    the graph never names."""
    used = set()
    for where, text, is_value in _texts(graph):
        for place in _PLACE.finditer(text):
            name = place[1]
            if name not in inputs:
                raise WorkflowFault(f"{where}: {{{{{name}}}}} is not described in `inputs`")
            if not is_value:
                raise WorkflowFault(f"{where}: {{{{{name}}}}} can only be the value of a node's input")
            if place[0] != text and inputs[name].type not in ("text", "choice"):
                raise WorkflowFault(f"{where}: {{{{{name}}}}} is of type {inputs[name].type}, and has to stand alone")
            used.add(name)
    if unused := [name for name in inputs if name not in used]:
        raise WorkflowFault(f"inputs.{unused[0]}: the graph names it nowhere: write {{{{{unused[0]}}}}} where it goes")


def _texts(graph: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Every text of the graph with its place, and whether it is the value of a node's input."""
    for node, told in graph.items():
        yield f"workflow.{node}", node, False
        yield f"workflow.{node}.class_type", told["class_type"], False
        for key, value in told["inputs"].items():
            where = f"workflow.{node}.inputs.{key}"
            yield where, key, False
            if isinstance(value, str):
                yield where, value, True
            else:
                yield from ((where, text, False) for text in _inner(value))


def _inner(value: Any) -> Iterator[str]:
    """Texts within a list or an object, keys too."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]


def _refuse_unknown(found: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    if unknown := [key for key in found if key not in known]:
        raise WorkflowFault(f"{where}: {unknown[0][:60]!r} is not known there: {', '.join(sorted(known))} are")


def _number(value: Any, kind: str) -> int | float | None:
    """The number, None where it is none of this kind."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind == "integer":
        return int(value) if value == value and abs(value) != math.inf and int(value) == value else None
    return float(value) if math.isfinite(value) else None


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


# --- what a request makes of it ----------------------------------------------------------------------------------

_DIRECT = ("prompt", "negative_prompt", "seed", "steps", "guidance_scale")
"""Members of a request that are inputs by the same name."""
MOST_IMAGES = 10


class PlannedRun(NamedTuple):
    """One prompt for ComfyUI. `steps`: the most that a node of it is told to work; None where none is told."""

    graph: Mapping[str, Any]
    values: Mapping[str, Any]
    steps: int | None


def planned(workflow: Workflow, body: Mapping[str, Any], draw: Callable[[int], int]) -> list[PlannedRun]:
    """The prompts that answer a request to /v1/images/generations, one after the other. `draw(n)`: a number below n.

    Raises EngineFault: 400 for a field that the workflow has no input for, and for a value beyond its bounds.
    """
    given = _given(workflow, body)
    count = body.get("n")
    runs = 1
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_IMAGES:
            raise _bad("n", f"expected an integer from 1 to {MOST_IMAGES}, found {_shown(count)}")
        if "n" in workflow.inputs:
            given["n"] = count
        elif count > 1 and "seed" not in workflow.inputs:
            raise _bad("n", f"{workflow.model} makes one image, the same each time: it has no input `n`, and no `seed`")
        else:
            runs = count
    elif "n" in workflow.inputs and workflow.inputs["n"].default is None:
        given["n"] = 1
    values = _checked(workflow, given, draw)
    made = []
    for run in range(runs):
        own = values if not run else values | {"seed": _next_seed(workflow.inputs["seed"], values["seed"], run)}
        graph = workflow.filled(own)
        made.append(PlannedRun(graph, own, steps_in(graph)))
    return made


def steps_in(graph: Mapping[str, Any]) -> int | None:
    """The steps that a graph tells its samplers to work, the most of them.

    >>> steps_in({"3": {"inputs": {"steps": 20}}, "4": {"inputs": {"steps": ["7", 0]}}}), steps_in({})
    (20, None)
    """
    told = [node["inputs"].get("steps") for node in graph.values()]
    return max((steps for steps in told if isinstance(steps, int) and not isinstance(steps, bool)), default=None)


def _given(workflow: Workflow, body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: body[name] for name in _DIRECT if body.get(name) is not None}
    size = body.get("size")
    if size not in (None, "auto"):
        parts = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", size) if isinstance(size, str) else None
        if parts is None:
            raise _bad("size", "expected WIDTHxHEIGHT in pixels, like 1024x1024, or auto")
        if not {"width", "height"} <= workflow.inputs.keys():
            raise _bad("size", f"{workflow.model} makes images of one size: it has no inputs `width` and `height`")
        given |= {"width": int(parts[1]), "height": int(parts[2])}
    more = body.get("inputs")
    if more is not None and not isinstance(more, dict):
        raise _bad("inputs", f"expected an object, found {_shown(more)}")
    for name, value in (more or {}).items():
        if name in given and given[name] != value:
            raise _bad(f"inputs.{name[:60]}", "it is asked for twice, with two values")
        given[name] = value
    for name in given:
        if name not in workflow.inputs:
            where, known = name if name in _DIRECT else f"inputs.{name[:60]}", ", ".join(workflow.inputs) or "none"
            raise _bad(where, f"{workflow.model} has no such input; it has {known}")
    return given


def _checked(workflow: Workflow, given: Mapping[str, Any], draw: Callable[[int], int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, described in workflow.inputs.items():
        where = {"width": "size", "height": "size"}.get(name, name) if name not in _DIRECT else name
        if name not in given:
            if described.is_drawn:
                number = draw((int(described.high) - int(described.low)) // described.multiple_of + 1)
                values[name] = int(described.low) + number * described.multiple_of
            elif described.default is None:
                raise _bad(where, f"missing: {workflow.model} needs `{name}`: {described.expects()}")
            else:
                values[name] = described.default
            continue
        try:
            values[name] = described.checked(given[name])
        except ValueError as error:
            raise _bad(where, str(error) if where == name else f"{name}: {error}") from None
    return values


def _next_seed(seed: WorkflowInput, first: Any, run: int) -> int:
    span = (int(seed.high) - int(seed.low)) // seed.multiple_of + 1
    place = (int(first) - int(seed.low)) // seed.multiple_of
    return int(seed.low) + (place + run) % span * seed.multiple_of


def _bad(param: str, why: str) -> EngineFault:
    return EngineFault(400, f'"{param}": {why}', "invalid_input", param=param)
