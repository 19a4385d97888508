"""Decodes what an answer says of its cost and its end, in every dialect."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from hive.dialects.openai_answers import NONE, Number


class CachedCount(msgspec.Struct):
    cached_tokens: Number | None = None


class TokenCounts(msgspec.Struct):
    """OpenAI's three, then Anthropic's four."""

    prompt_tokens: Number | None = None
    completion_tokens: Number | None = None
    prompt_tokens_details: CachedCount | None = None
    input_tokens: Number | None = None
    output_tokens: Number | None = None
    cache_read_input_tokens: Number | None = None
    cache_creation_input_tokens: Number | None = None


class ServersTimings(msgspec.Struct):
    """llama-server's; `prompt_n` leaves out the tokens from its cache."""

    prompt_n: Number
    predicted_n: Number
    cache_n: Number = 0


class OllamasCounts(msgspec.Struct):
    """Ollama's."""

    prompt_eval_count: Number | None = None
    eval_count: Number | None = None
    prompt_eval_cached_count: Number | None = None


class ToldMembers(msgspec.Struct):
    """The members of an object of any dialect about its cost and its end, as they were written: a bad value of one
    leaves the others readable."""

    usage: Raw = NONE
    timings: Raw = NONE
    prompt_eval_count: Raw = NONE
    error: Raw = NONE
    object: Raw = NONE
    type: Raw = NONE
    choices: Raw = NONE
    stop_reason: Raw = NONE
    done: Raw = NONE
    data: Raw = NONE
    embeddings: Raw = NONE
    embedding: Raw = NONE
    results: Raw = NONE


class EndedChoice(msgspec.Struct):
    finish_reason: Raw = NONE


class MessagesDelta(msgspec.Struct):
    stop_reason: Raw = NONE


class MessagesEvent(msgspec.Struct):
    type: Raw = NONE
    message: Raw = NONE
    delta: Raw = NONE
    usage: Raw = NONE


decode_told = msgspec.json.Decoder(ToldMembers).decode
decode_counts = msgspec.json.Decoder(TokenCounts).decode
decode_timings = msgspec.json.Decoder(ServersTimings).decode
decode_evaluated = msgspec.json.Decoder(OllamasCounts).decode
decode_choices = msgspec.json.Decoder(list[EndedChoice]).decode
decode_messages_event = msgspec.json.Decoder(MessagesEvent).decode
decode_delta = msgspec.json.Decoder(MessagesDelta | None).decode
