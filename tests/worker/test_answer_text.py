"""An answer while it comes: what is kept of it has bounds."""

from __future__ import annotations

from hive.dialects.openai_answers import read
from hive.worker.request import CALLS_LENGTH_MAX, AnswerText


def call(arguments: str, index: int = 0) -> bytes:
    return (
        b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":%d,"function":{"name":"f","arguments":"%b"}}]}}]}'
        % (index, arguments.encode())
    )


def test_calls_of_one_answer_have_a_bound_together() -> None:
    found, piece = AnswerText(), "abcdefghijklmnopqrstuvwxyz0123456789" * 1000
    for number in range(200):
        found.take(read(call(f"{number}{piece}", index=number % 3)))
    kept = sum(len(one.arguments) + len(one.name) for one in found.so_far().tool_calls)
    assert CALLS_LENGTH_MAX - 2 * len(piece) < kept <= CALLS_LENGTH_MAX


def test_counts_of_tokens_are_within_what_a_table_holds() -> None:
    found = AnswerText()
    found.take(read(b'{"choices":[],"usage":{"prompt_tokens":1e300,"completion_tokens":-5}}'))
    answer = found.so_far()
    assert (answer.prompt_tokens, answer.completion_tokens) == (1 << 53, 0)
