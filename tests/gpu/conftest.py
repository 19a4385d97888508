"""Fixtures of all tests of a GPU: the card, and models in its size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.box import make_models
from tests.gpu.card import MODELS, Card, missing

collect_ignore = ["take_memory.py"]
"""A program."""


@pytest.fixture(scope="session")
def card() -> Card:
    if why := missing():
        pytest.skip(why)
    return Card()


@pytest.fixture(scope="session")
def models(card: Card, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Files of all models, by name."""
    kept = os.environ.get(MODELS)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("models")
    folder.mkdir(exist_ok=True)
    made = make_models(folder)
    yield made
    if not kept:
        for path in made.values():
            path.unlink()
