"""Exit tools: calls by which a model tells the program above it something. Nothing is run for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from hive.jobs.tools import ToolDefinition, define


class ExitName(StrEnum):
    """Names of seeds/001."""

    LOW_CONFIDENCE = "LOW_CONFIDENCE"
    NEEDS_EXTERNAL_INFO = "NEEDS_EXTERNAL_INFO"
    NEEDS_HIGHER_REASONER = "NEEDS_HIGHER_REASONER"
    NEEDS_MANAGER_DECISION = "NEEDS_MANAGER_DECISION"
    POLICY_RISK = "POLICY_RISK"


class Signal(msgspec.Struct, frozen=True):
    """One exit tool that was called. `turn`: from 1. `has_ended`: True where it ended the request."""

    name: str
    arguments: Mapping[str, Any]
    turn: int
    has_ended: bool = False


def _text(description: str) -> Mapping[str, Any]:
    return {"type": "string", "description": description, "maxLength": 4000}


def _object(**properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


EXIT_TOOLS: tuple[ToolDefinition, ...] = (
    define(
        ExitName.LOW_CONFIDENCE,
        "Say that your answer may be wrong. Then go on.",
        _object(reason=_text("What you are unsure of")),
    ),
    define(
        ExitName.NEEDS_EXTERNAL_INFO,
        "Say that a fact is missing that you cannot get. Then go on as well as you can.",
        _object(missing=_text("The fact that is missing")),
    ),
    define(
        ExitName.NEEDS_HIGHER_REASONER,
        "Say that a stronger model should do this. Then go on as well as you can.",
        _object(reason=_text("What is too hard")),
    ),
    define(
        ExitName.NEEDS_MANAGER_DECISION,
        "Ask for a decision between options that is not yours to take. It ends your work.",
        _object(
            question=_text("What is to be decided"),
            options={"type": "array", "items": _text("One option"), "minItems": 2, "maxItems": 10},
        ),
    ),
    define(
        ExitName.POLICY_RISK,
        "Say that the work may break a rule or do harm. It ends your work.",
        _object(risk=_text("What may happen")),
    ),
)


def ending_names(*, stop_on_decision_request: bool = True) -> frozenset[str]:
    """Exit tools that end their request at once; the others are noted, and the model goes on.

    >>> sorted(ending_names()), sorted(ending_names(stop_on_decision_request=False))
    (['NEEDS_MANAGER_DECISION', 'POLICY_RISK'], ['POLICY_RISK'])
    """
    decision = {ExitName.NEEDS_MANAGER_DECISION.value} if stop_on_decision_request else set()
    return frozenset({ExitName.POLICY_RISK.value} | decision)
