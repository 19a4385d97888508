"""The rank of an adapter, and the matrices of the model that it changes, as its files say them. Pure."""

from __future__ import annotations

from typing import NamedTuple

from hive.errors import AdapterMismatch, AdapterUnsafe

RANK_MOST = 1 << 16
DIMENSION_MOST = 1 << 31


class Matrix(NamedTuple):
    """A matrix of a model: what goes in, what comes out."""

    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.inputs}×{self.outputs}"


class LoraFile(NamedTuple):
    """The matrices that one file changes, by the name that the model's own file has for them, and the rank of each.

    `architecture`: as a GGUF file says it; empty of the other format.
    """

    targets: dict[str, Matrix]
    ranks: dict[str, int]
    architecture: str = ""

    @property
    def rank(self) -> int:
        return max(self.ranks.values())


class HalfPair(NamedTuple):
    """One of the two tensors of a change: its rank and its other dimension."""

    rank: int
    other: int


def paired(downs: dict[str, HalfPair], ups: dict[str, HalfPair], architecture: str = "") -> LoraFile:
    """`downs`: from the model's inputs to the rank; `ups`: from there to its outputs. Raises AdapterUnsafe where one
    lacks the other, or they do not go together.

    >>> paired({"q": HalfPair(8, 64)}, {"q": HalfPair(8, 32)}).targets
    {'q': Matrix(inputs=64, outputs=32)}
    >>> paired({"q": HalfPair(8, 64)}, {"q": HalfPair(4, 32)})
    Traceback (most recent call last):
    hive.errors.AdapterUnsafe: the two tensors of q have the ranks 8 and 4
    """
    if not downs and not ups:
        raise AdapterUnsafe("it has no tensors of a LoRA adapter")
    if lone := sorted(downs.keys() ^ ups.keys()):
        raise AdapterUnsafe(f"one of the two tensors of {lone[0]} is missing")
    targets, ranks = {}, {}
    for name, down in downs.items():
        up = ups[name]
        if down.rank != up.rank:
            raise AdapterUnsafe(f"the two tensors of {name} have the ranks {down.rank} and {up.rank}")
        if not 1 <= down.rank <= RANK_MOST:
            raise AdapterUnsafe(f"{name} has the rank {down.rank}")
        targets[name], ranks[name] = Matrix(down.other, up.other), down.rank
    return LoraFile(targets, ranks, architecture)


def merged(files: list[LoraFile]) -> LoraFile:
    """The files of one adapter as one. Raises AdapterUnsafe where two change the same matrix."""
    targets: dict[str, Matrix] = {}
    ranks: dict[str, int] = {}
    for file in files:
        if twice := sorted(targets.keys() & file.targets.keys()):
            raise AdapterUnsafe(f"two of its files change {twice[0]}")
        targets |= file.targets
        ranks |= file.ranks
    return LoraFile(targets, ranks, files[0].architecture)


def check_rank(rank: int, most: int) -> None:
    """Raises AdapterMismatch."""
    if rank > most:
        raise AdapterMismatch(
            f"its rank is {rank}; at most {most} is taken here",
            hint="[adapters] max_rank, or train it with a smaller one",
        )
