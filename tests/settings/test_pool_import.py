"""The settings that the seed's manifest and tasks.yaml become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hive.errors import ConfigError
from hive.settings.pool_import import imported

BASE = Path("/srv/models")
LLAMA = {"backend": "llama-server", "path": "q.gguf"}


def one(**more: Any) -> dict[str, Any]:
    """The description of a model with these keys in its manifest."""
    return imported({"m.yaml": {"models": {"q": LLAMA | more}}}, BASE).models["q"]


def notes_of(**more: Any) -> list[str]:
    return imported({"m.yaml": {"models": {"q": LLAMA | more}}}, BASE).notes


@pytest.mark.parametrize(
    "document",
    [{"models": {"q": LLAMA}}, {"q": LLAMA}, {"models": [LLAMA | {"id": "q"}]}, [LLAMA | {"name": "q"}]],
    ids=["table", "top", "list", "list at the top"],
)
def test_each_form_of_a_manifest_is_read(document: Any) -> None:
    assert imported({"m.yaml": document}, BASE).models == {"q": {"backend": "llama", "file": "/srv/models/q.gguf"}}


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("vram_mb", 6000, {"vram_mb": 6000}),
        ("pin", True, {"pin": True}),
        ("ctx_size", 4096, {"context": 4096}),
        ("stay_warm_s", 300, {"keep_alive_s": 300}),
        ("thinking", False, {"thinking": "off"}),
        ("thinking", {"enabled": True}, {"thinking": "on"}),
        ("thinking", "auto", {"thinking": "auto"}),
        ("chat_template", "a.jinja", {"chat_template": "/srv/models/a.jinja"}),
        ("gpus", ["GPU-1a", "GPU-2b"], {"gpus": "GPU-1a, GPU-2b"}),
        ("gpus", "cpu", {"gpus": "cpu"}),
        ("category", "embeddings", {"category": "embedding"}),
        ("category", "llm", {}),
        ("vram_mb", None, {}),
    ],
)
def test_a_key_becomes_ours(key: str, value: Any, ours: dict[str, Any]) -> None:
    assert one(**{key: value}) == {"backend": "llama", "file": "/srv/models/q.gguf"} | ours
    assert notes_of(**{key: value}) == []


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("gpus", [0, 1], "gpus was left out: a list names no GPU by its UUID"),
        ("gpu", 0, "gpus was left out: 0 names no GPU"),
        ("chat_template", "alpaca", "chat_template was left out: alpaca is no file"),
        ("chat_template", "{{ a }}\n.jinja", "is no file"),
        ("thinking", 7, "thinking was left out: 7 is not understood"),
        ("vram_mb", "6G", "vram_mb was left out: 6G"),
        ("vram_mb", True, "vram_mb was left out: True"),
        ("keep_alive_s", float("inf"), "keep_alive_s was left out: inf"),
        ("pin", "yes please", "pin was left out"),
        ("quantum", 3, "quantum has no counterpart"),
        ("file", "b.gguf", "file was left out, file is told by another key already"),
    ],
)
def test_what_has_no_counterpart_is_told_and_left_out(key: str, value: Any, told: str) -> None:
    assert one(**{key: value}) == {"backend": "llama", "file": "/srv/models/q.gguf"}
    (note,) = notes_of(**{key: value})
    assert note.startswith("m.yaml: q: ")
    assert told in note


@pytest.mark.parametrize(
    ("name", "row", "told"),
    [
        ("sdxl", {"backend": "diffusers", "path": "x"}, "no server here loads it"),
        ("sdxl", {"category": "diffusion", "path": "x"}, "no server here loads it"),
        ("voice", {"category": "tts", "path": "x"}, "no server here loads it"),
        ("odd", {"category": "smell", "path": "x"}, "no server here loads it"),
        ("hub", {"repo": "org/name"}, "its file is not told"),
        ("claude:sonnet", {"path": "x"}, "no model of this box"),
    ],
)
def test_a_model_no_server_here_loads_is_left_out(name: str, row: dict[str, Any], told: str) -> None:
    found = imported({"m.yaml": {"models": {"q": LLAMA, name: row}}}, BASE)
    assert list(found.models) == ["q"]
    assert any(note.startswith(f"m.yaml: {name}: left out") and told in note for note in found.notes)


def test_tasks_are_taken_over_with_their_ladders() -> None:
    tasks = {
        "drift": {"models": ["q", "r"], "keep_alive_s": 60, "pin_primary": True, "budget_s": 90},
        "score": {"candidates": [{"id": "q"}, "claude:sonnet", "gone"], "prefer": "fast"},
        "chat": {"model": "r"},
        "far": {"models": ["claude:sonnet"], "keep_alive_s": 5},
        "a b": {"models": ["q"]},
    }
    for order in (("m.yaml", "t.yaml"), ("t.yaml", "m.yaml")):
        gone = {"path": "x.gguf", "backend": "diffusers"}
        documents = {"m.yaml": {"models": {"q": LLAMA, "r": LLAMA, "gone": gone}}, "t.yaml": {"tasks": tasks}}
        found = imported({name: documents[name] for name in order}, BASE)
        assert found.tasks == {
            "drift": {"models": "q | r", "keep_alive_s": 60, "pin_primary": True, "budget_s": 90},
            "score": {"models": "q"},
            "chat": {"models": "r"},
        }
        assert "keep_alive_s" not in found.models["q"], "it is the task's"
        told = [note for note in found.notes if ": task " in note]
        assert told == [
            "t.yaml: task score: claude:sonnet was left out of its ladder: it is no model of this box",
            "t.yaml: task score: gone was left out of its ladder: it is no model of this box",
            "t.yaml: task score: prefer has no counterpart and was left out",
            "t.yaml: task far: claude:sonnet was left out of its ladder: it is no model of this box",
            "t.yaml: task far: left out, no model of its ladder is there",
            "t.yaml: task a b: left out, its name is none here: a task's name is a letter or digit, then up to 63 of "
            "A-Z, a-z, 0-9 and . _ -",
        ]


def test_tasks_alone_are_taken_over_for_models_that_are_described_already() -> None:
    found = imported({"t.yaml": {"tasks": {"a": {"model": "q", "keep_alive_s": 900}}}}, BASE)
    assert (found.models, found.tasks) == ({}, {"a": {"models": "q", "keep_alive_s": 900}})


@pytest.mark.parametrize(
    ("documents", "told"),
    [
        ({"t.yaml": {"tasks": {"a": {"model": "claude:x"}}}}, "no model and no task in t.yaml can be taken over"),
        ({"m.yaml": {"models": {}}}, "no model and no task in m.yaml"),
        ({"m.yaml": None}, "expected models by name"),
        ({"m.yaml": "text"}, "expected models by name"),
        ({"m.yaml": {"models": 5}}, "expected models by name"),
        ({"m.yaml": {"models": {"q": 5}}}, "m.yaml: q: expected a table of settings, found 5"),
        ({"m.yaml": {"models": {7: LLAMA}}}, "m.yaml: 7: expected the name"),
        ({"m.yaml": {"models": [LLAMA]}}, "expected the name of a model"),
        ({"m.yaml": {"q": LLAMA}, "n.yaml": {"q": LLAMA}}, "n.yaml: q is described already in m.yaml"),
        ({"m.yaml": {"q": LLAMA}, "t.yaml": {"tasks": {"a": [1]}}}, "t.yaml: task a: expected a table"),
    ],
)
def test_what_is_no_manifest_is_refused(documents: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        imported(documents, BASE)
    assert told in refused.value.message


def test_a_note_never_writes_out_what_refers_to_itself_again_and_again() -> None:
    bomb: Any = ["x" * 50]
    for _ in range(40):
        bomb = [bomb] * 9
    (note,) = notes_of(vram_mb=bomb)
    assert "a list is not understood" in note
