"""docs/dialects.md says of every field what the tables of the translations say.

`python tests/dialects/test_document.py` writes its tables anew.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hive.backends.kinds import SPECS
from hive.dialects import anthropic_openai, ollama_openai, openai_responses
from hive.dialects.fitting import FIELDS
from hive.dialects.translation import FieldFate, FieldRow
from hive.endpoints.endpoints import TRANSLATED
from hive.models.capabilities import Over

DOCUMENT = Path(__file__).parents[2] / "docs" / "dialects.md"
WAYS = {**ollama_openai.WAYS, **anthropic_openai.WAYS, **openai_responses.WAYS}
BEGIN = "<!-- from here on written by tests/dialects/test_document.py -->\n"


def tables() -> str:
    return "".join(_table(endpoint, way.rows) for endpoint, way in WAYS.items()) + _fitting() + _passed_over()


def _passed_over() -> str:
    """The fields that a server would ignore in its own dialect."""
    text = "\n## What a server passes over in its own dialect\n"
    for spec in SPECS.values():
        if not spec.requests.passed_over:
            continue
        text += f"\n{spec.label}:\n\n| endpoint | field | becomes | |\n|---|---|---|---|\n"
        for endpoint, overs in spec.requests.passed_over.items():
            for over in overs:
                fate = "refused with 501" if over.refused else "sent, and told in `X-Hive-Ignored`"
                text += f"| `{endpoint}` | `{over.name}` | {fate} | {over.why}{_unless(over)} |\n"
    return text


def _unless(over: Over) -> str:
    values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in over.idle)
    return f"; not where it is {values}" if values else ""


def _fitting() -> str:
    """The fields that a translation makes and a backend may not take."""
    text = "\n## Before a server that has OpenAI's schema alone\n\n| made | becomes | |\n|---|---|---|\n"
    fates = {FieldFate.REFUSED: "refused", FieldFate.HARMLESS: "left out, and told"}
    rows = ((name, f"`{row.to}`" if row.to else fates[row.fate], row.why) for name, row in FIELDS.items())
    return text + "".join(f"| `{name}` | {fate} | {why} |\n" for name, fate, why in rows)


def _table(endpoint: str, rows: dict[str, FieldRow]) -> str:
    lines = [f"\n## `{endpoint}` → `{TRANSLATED[endpoint].decode()}`\n", "\n| field | becomes | |\n|---|---|---|\n"]
    for name, row in rows.items():
        if row.fate is FieldFate.MAPPED:
            lines.append(f"| `{name}` | {_code(row.to)} | {row.why} |\n")
    lines += _grouped("Refused", FieldFate.REFUSED, rows)
    lines += _grouped("Left out, and told in `X-Hive-Dropped`", FieldFate.HARMLESS, rows)
    return "".join(lines)


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""


def _grouped(title: str, fate: FieldFate, rows: dict[str, FieldRow]) -> list[str]:
    """Fields of one fate by the reason they share."""
    by_reason: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row.fate is fate:
            by_reason.setdefault(row.why, []).append(f"`{name}`")
    lines = [f"- {why}: {', '.join(names)}\n" for why, names in by_reason.items()]
    return [f"\n{title}:\n\n", *lines] if lines else []


def test_the_document_is_what_the_tables_say() -> None:
    assert DOCUMENT.read_text().partition(BEGIN)[2] == tables()


def test_every_field_that_is_refused_or_left_out_says_why() -> None:
    for way in WAYS.values():
        assert [name for name, row in way.rows.items() if row.fate is not FieldFate.MAPPED and not row.why] == []


def test_every_way_is_gone_by_an_endpoint_and_the_other_way_round() -> None:
    assert set(WAYS) == set(TRANSLATED)


if __name__ == "__main__":
    said = DOCUMENT.read_text().partition(BEGIN)[0] if DOCUMENT.exists() else ""
    DOCUMENT.write_text(said + BEGIN + tables())
