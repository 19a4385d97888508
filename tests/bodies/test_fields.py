"""The table of fields: complete for every SDK, closed where it has to be, and the operator's to change."""

from __future__ import annotations

import importlib
import json
import typing
from typing import Any

import msgspec
import ollama._types as ollama_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params, embedding_create_params, image_generate_params
from openai.types.audio import transcription_create_params, translation_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from hive.bodies.body import Asked, Want
from hive.bodies.fields import TABLE, TOKENS, FieldTable
from hive.bodies.form import FORMS
from hive.domain import Tier
from hive.endpoints.endpoints import ENDPOINTS
from hive.errors import BadRequest, HiveError, TooLarge
from hive.settings.field_rules import TARGETS, FieldRules, Fields, Verb, field_name, parse_line
from hive.settings.file import load_text
from hive.settings.table import Proxy, Settings
from tests.bodies.reading import read_body

IMAGES = "/v1/images/generations"
PROMPTS: dict[str, dict[str, Any]] = {
    "/api/generate": {"prompt": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    IMAGES: {"prompt": "a bee"},
}
"""Fields that a body must have to be taken."""


def settings(text: str = "", **proxy: Any) -> Settings:
    loaded = load_text(text, env={}).settings
    return msgspec.structs.replace(loaded, proxy=msgspec.structs.replace(loaded.proxy, **proxy))


def ask(target: str, fields: dict[str, Any] | bytes, tier: Tier = Tier.HIGH, conf: str = "", **proxy: Any) -> Asked:
    rules = FieldTable(settings(conf, **proxy)).rules(target, tier)
    raw = fields if isinstance(fields, bytes) else json.dumps({**PROMPTS.get(target, {}), **fields}).encode()
    return read_body(raw, rules, Want())


def sent(target: str, fields: dict[str, Any], tier: Tier = Tier.HIGH, conf: str = "", **proxy: Any) -> dict[str, Any]:
    """The part of these fields that goes upstream, without the fields that every such body has to have."""
    found: dict[str, Any] = json.loads(b"".join(ask(target, fields, tier, conf, **proxy).upstream))
    return {name: value for name, value in found.items() if PROMPTS.get(target, {}).get(name) != value}


def named(fields: Fields) -> set[str]:
    return set(fields.plain | fields.media | fields.policed.keys())


def rows(target: str) -> set[str]:
    return named(FieldTable(Settings()).rules(target, Tier.LOW).fields)


# complete -------------------------------------------------------------------------------------------------------------


def parameters(module: Any, *names: str) -> set[str]:
    return {field for name in names for field in typing.get_type_hints(getattr(module, name))}


@pytest.mark.parametrize(
    ("target", "module", "names"),
    [
        (
            "/v1/chat/completions",
            chat_create_params,
            ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"),
        ),
        (
            "/v1/completions",
            completion_create_params,
            ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"),
        ),
        ("/v1/embeddings", embedding_create_params, ("EmbeddingCreateParams",)),
        (
            "/v1/responses",
            response_create_params,
            ("ResponseCreateParamsNonStreaming", "ResponseCreateParamsStreaming"),
        ),
        (IMAGES, image_generate_params, ("ImageGenerateParamsNonStreaming", "ImageGenerateParamsStreaming")),
    ],
)
def test_every_field_openai_python_can_send_has_a_row(target: str, module: Any, names: tuple[str, ...]) -> None:
    assert parameters(module, *names) - rows(target) == set()


@pytest.mark.parametrize(
    ("target", "module", "names"),
    [
        (
            "/v1/audio/transcriptions",
            transcription_create_params,
            ("TranscriptionCreateParamsNonStreaming", "TranscriptionCreateParamsStreaming"),
        ),
        ("/v1/audio/translations", translation_create_params, ("TranslationCreateParams",)),
    ],
)
def test_every_field_of_a_form_has_a_row_or_is_the_file(target: str, module: Any, names: tuple[str, ...]) -> None:
    assert parameters(module, *names) - rows(target) == {"file"}
    assert FORMS[target].keys() <= rows(target)


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("/api/generate", "GenerateRequest"),
        ("/api/chat", "ChatRequest"),
        ("/api/embed", "EmbedRequest"),
        ("/api/embeddings", "EmbeddingsRequest"),
        ("/api/show", "ShowRequest"),
    ],
)
def test_every_field_ollama_python_can_send_has_a_row(target: str, model: str) -> None:
    assert set(getattr(ollama_types, model).model_fields) - rows(target) == set()


@pytest.mark.parametrize("target", ["/api/generate", "/api/chat", "/api/embed", "/api/embeddings"])
def test_every_option_ollama_python_can_send_has_a_row(target: str) -> None:
    options = FieldTable(Settings()).rules(target, Tier.LOW).fields.policed["options"].inside
    assert options is not None
    assert set(ollama_types.Options.model_fields) - named(options) == set()


@pytest.mark.parametrize(
    ("target", "module", "names"),
    [
        ("/v1/messages", "message_create_params", ("MessageCreateParamsNonStreaming", "MessageCreateParamsStreaming")),
        ("/v1/messages/count_tokens", "message_count_tokens_params", ("MessageCountTokensParams",)),
    ],
)
@pytest.mark.parametrize("package", ["anthropic.types", "anthropic.types.beta"])
def test_every_field_anthropic_can_send_has_a_row(
    package: str, target: str, module: str, names: tuple[str, ...]
) -> None:
    pytest.importorskip("anthropic")
    assert parameters(importlib.import_module(f"{package}.{module}"), *names) - rows(target) == set()


def test_every_endpoint_with_a_body_is_in_the_table() -> None:
    with_body = {row.target.decode() for row in ENDPOINTS if row.body}
    assert {target.partition("?")[0] for target in with_body} <= set(TARGETS)
    table = FieldTable(Settings())
    for target in TARGETS:
        for tier in Tier:
            assert "model" in table.rules(target, tier).fields.plain
            assert table.rules(f"{target}?beta=true", tier) == table.rules(target, tier)
    with pytest.raises(KeyError):
        table.rules("/api/push", Tier.LOW)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tier", Tier)
def test_rules_travel_to_another_process_as_they_are(target: str, tier: Tier) -> None:
    rules = FieldTable(Settings()).rules(target, tier)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rules), type=FieldRules) == rules


# closed ---------------------------------------------------------------------------------------------------------------

EVERYWHERE_DROPPED = ["keep_alive", "priority", "cache_salt", "request_id", "session_id"]
EVERYWHERE_REFUSED = [
    *("lora", "chat_template", "template", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "_debug_render_only"),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tier", Tier)
def test_what_is_closed_is_closed_for_every_endpoint_and_tier(target: str, tier: Tier) -> None:
    for name in EVERYWHERE_DROPPED:
        asked = ask(target, {name.upper(): 5}, tier)
        assert asked.dropped == (name,)
        assert name.encode() not in asked.upstream[0]
    for name in EVERYWHERE_REFUSED:
        with pytest.raises(BadRequest, match=name):
            ask(target, {name.title(): 5}, tier)


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("tier", Tier)
def test_of_a_templates_arguments_known_switches_alone_pass(target: str, tier: Tier) -> None:
    """All were dropped, so that thinking could not be switched off; any other key could replace the template."""
    asked = {"max_tokens": 1, "messages": []}
    kwargs: dict[str, object]
    nothing: dict[str, object] | None
    taken: tuple[dict[str, object], ...] = (
        {"enable_thinking": False, "thinking": True, "clear_thinking": None},
        {"reasoning_effort": "high", "Enable_Thinking": True},
        {"thinking": "auto"},
    )
    for kwargs in taken:
        folded = {name.casefold(): value for name, value in kwargs.items()}
        assert sent(target, {**asked, "chat_template_kwargs": kwargs}, tier)["chat_template_kwargs"] == folded
    for key in ("chat_template", "messages", "tools", "add_generation_prompt", "enable_thinkin", "x"):
        kwargs = {"enable_thinking": True, key: True}
        with pytest.raises(BadRequest, match=rf"{key}.* is not taken on .*CVE-2025-62426.*enable_thinking"):
            ask(target, {**asked, "chat_template_kwargs": kwargs}, tier)
    for value in ("{{ x }}", "High", 1, {"a": 1}, ["low"]):
        with pytest.raises(BadRequest, match="must be true, false or one of"):
            ask(target, {**asked, "chat_template_kwargs": {"enable_thinking": value}}, tier)
    for nothing in ({}, None):
        assert (
            "chat_template_kwargs" not in sent(target, {**asked, "chat_template_kwargs": nothing}, tier) or not nothing
        )
    with pytest.raises(BadRequest, match="CVE-2025-62426"):
        ask(target, {**asked, "chat_template_kwargs": "x"}, tier)


@pytest.mark.parametrize(
    "option",
    [
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "numa", "low_vram"),
        *("f16_kv", "logits_all", "vocab_only", "embedding_only", "draft_num_predict"),
    ],
)
@pytest.mark.parametrize("target", ["/api/generate", "/api/chat", "/api/embed", "/api/embeddings"])
def test_options_that_reload_a_model_are_dropped(target: str, option: str) -> None:
    asked = ask(target, {"Options": {option.title(): 9, "seed": 1}})
    assert asked.dropped == (f"options.{option}",)
    assert sent(target, {"Options": {option.title(): 9, "seed": 1}}) == {"options": {"seed": 1}}


@pytest.mark.parametrize(
    "option", ["num_ctx", "num_\u212aeep", "NUM_PREDICT", "\u017feed"], ids=["plain", "kelvin", "upper", "long s"]
)
def test_names_of_options_are_folded_and_unique(option: str) -> None:
    folded = option.casefold()
    raw = json.dumps({"prompt": "a", "options": {option: 1, folded + ("" if option != folded else "x"): 2}})
    if option == folded:
        raw = raw.replace("num_ctxx", "num_ctx")
    with pytest.raises(BadRequest):
        ask("/api/generate", raw.encode())


@pytest.mark.parametrize("name", ["raw", "template"])
def test_what_ollama_python_always_sends_is_no_reason_to_refuse(name: str) -> None:
    plain = ollama_types.GenerateRequest(model="m", prompt="p", raw=False, template="", context=[]).model_dump(
        exclude_none=True
    )
    assert "raw" in plain
    assert sent("/api/generate", {**plain, name: None}) == {"model": "m", "prompt": "p", "context": []}
    with pytest.raises(BadRequest, match=name):
        ask("/api/generate", {name: True if name == "raw" else "{{ .Prompt }}"})


@pytest.mark.parametrize(
    ("target", "raw", "loading"),
    [
        ("/api/generate", b'{"model":"m"}', "load"),
        ("/api/generate", b'{"model":"m","prompt":"","stream":false,"system":"x"}', "load"),
        ("/api/generate", b'{"model":"m","prompt":null,"keep_alive":0}', "unload"),
        ("/api/generate", b'{"model":"m","PROMPT":"","KEEP_ALIVE":"0s"}', "unload"),
        ("/api/chat", b'{"model":"m"}', "load"),
        ("/api/chat", b'{"model":"m","messages":[],"keep_alive":-1}', "load"),
        ("/api/chat", b'{"model":"m","Messages":[ ],"keep_alive":0}', "unload"),
        ("/api/chat", b'{"model":"m","messages":null}', "load"),
    ],
)
def test_of_a_body_without_a_prompt_nothing_goes_upstream(target: str, raw: bytes, loading: str) -> None:
    asked = ask(target, raw)
    assert (asked.loading, asked.model, asked.upstream, asked.stream) == (loading, "m", [], False)
    assert asked.dropped == (("keep_alive",) if b"keep_alive" in raw.lower() else ())
    with pytest.raises(BadRequest, match="template"):
        ask(target, raw[:-1] + b',"template":"{{ .Prompt }}"}')


@pytest.mark.parametrize(
    ("target", "raw"),
    [
        ("/api/generate", b'{"model":"m","prompt":" \\t","keep_alive":0}'),
        ("/api/chat", b'{"model":"m","messages":[{"role":"user","content":""}],"keep_alive":0}'),
    ],
)
def test_a_prompt_of_white_space_is_one(target: str, raw: bytes) -> None:
    asked = ask(target, raw)
    assert (asked.loading, asked.dropped) == ("", ("keep_alive",))
    assert b"keep_alive" not in asked.upstream[0]


def test_an_operator_can_have_empty_prompts_refused() -> None:
    conf = "[fields /api/chat]\nmessages = filled\n"
    with pytest.raises(BadRequest, match="empty"):
        ask("/api/chat", b'{"model":"m","messages":[]}', conf=conf)


@pytest.mark.parametrize("name", ["id_slot", "cache_prompt", "n_cache_reuse"])
@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/completions"])
def test_slots_and_what_they_keep_are_not_the_client_s(target: str, name: str) -> None:
    assert ask(target, {name: True}).dropped == (name,)


@pytest.mark.parametrize(
    "name",
    [
        *("structured_outputs", "guided_json", "guided_regex", "grammar", "json_schema", "structural_tag"),
        *("chat_parser", "generation_prompt", "use_beam_search", "prompt_logprobs", "grammar_triggers"),
    ],
)
def test_what_the_server_would_compile_or_believe_is_refused(name: str) -> None:
    for target in ("/v1/chat/completions", "/v1/completions"):
        with pytest.raises(BadRequest, match=name):
            ask(target, {name: {"a": 1}})


def test_what_is_refused_says_why_and_what_does_the_same_within_bounds() -> None:
    """It was `the field "guided_json" is not taken on /v1/chat/completions`, and no more."""
    bounded = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar")
    for name in bounded:
        with pytest.raises(BadRequest, match="could end it; `response_format` with a JSON schema"):
            ask("/v1/chat/completions", {name: {"a": 1}})
    for name, why in (("echo", "past the prefix cache"), ("prompt_logprobs", "`logprobs` tells those of the answer")):
        with pytest.raises(BadRequest, match=why):
            ask("/v1/completions", {name: 1})
    conf = "[proxy]\nunknown_fields = refuse\n"
    with pytest.raises(BadRequest, match=r'"grammar" is not known on /api/chat$'):
        ask("/api/chat", {"grammar": "x"}, conf=conf)


@pytest.mark.parametrize("target", [target for target in TARGETS if not target.startswith("/v1/responses")])
def test_every_field_that_is_refused_says_why(target: str) -> None:
    for name, rule in FieldTable(Settings()).rules(target, Tier.LOW).fields.policed.items():
        if rule.verb is Verb.REFUSE:
            with pytest.raises(BadRequest, match=rf'"{name}(\.a)?" is not taken on {target}: '):
                ask(target, {name: {"a": 1}})


@pytest.mark.parametrize(
    ("target", "fields", "goes_on"),
    [
        ("/v1/chat/completions", {"n": 64, "top_logprobs": -1}, {"n": 2, "top_logprobs": 0}),
        ("/v1/completions", {"n": 0, "best_of": 64, "logprobs": 99}, {"n": 1, "best_of": 2, "logprobs": 20}),
        ("/v1/chat/completions", {"repeat_last_n": 2**31 - 1, "n_probs": 99}, {"repeat_last_n": 65536, "n_probs": 20}),
        ("/api/generate", {"top_logprobs": 99}, {"top_logprobs": 20}),
        ("/api/chat", {"options": {"repeat_last_n": 2**31}}, {"options": {"repeat_last_n": 65536}}),
    ],
)
def test_what_multiplies_the_work_is_bounded(target: str, fields: dict[str, Any], goes_on: dict[str, Any]) -> None:
    assert sent(target, fields, Tier.LOW, tier_low_max_tokens=0) == goes_on


@pytest.mark.parametrize("name", ["logit_bias", "stop"])
def test_what_is_looked_at_for_every_token_is_bounded(name: str) -> None:
    assert sent("/v1/chat/completions", {name: {"1": 1}}) == {name: {"1": 1}}
    with pytest.raises(TooLarge, match=name):
        ask("/v1/chat/completions", {name: {"x" * 70_000: 1}})


@pytest.mark.parametrize("target", TOKENS)
@pytest.mark.parametrize(("tier", "limit"), [(Tier.LOW, 4096), (Tier.MEDIUM, 16384), (Tier.HIGH, None)])
def test_generated_tokens_are_limited_by_tier(target: str, tier: Tier, limit: int | None) -> None:
    place, names = TOKENS[target]
    for name in names:
        for count in (10**6, -1) if limit else (10**6,):
            fields = {place: {name: count}} if place else {name: count}
            asked = ask(target, fields, tier)
            found = json.loads(asked.upstream[0])
            assert (found[place] if place else found)[name] == asked.max_tokens == (limit or 10**6)
    assert ask(target, {}, tier).max_tokens == limit


def test_bounds_follow_the_settings() -> None:
    assert ask("/v1/completions", {}, Tier.LOW, tier_low_max_tokens=7).max_tokens == 7
    assert ask("/v1/completions", {"n": 99}, Tier.MEDIUM, tier_medium_concurrency=3).clamped == ("n=3",)


def test_the_old_name_of_the_model_is_read_for_show() -> None:
    asked = ask("/api/show", {"name": "m", "verbose": True})
    assert (asked.model, asked.upstream, asked.dropped) == ("m", [b'{"model":"m"}'], ("verbose",))


# unknown fields -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "tier", "goes_on"),
    [
        ("auto", Tier.HIGH, True),
        ("auto", Tier.MEDIUM, False),
        ("auto", Tier.LOW, False),
        ("pass", Tier.LOW, True),
        ("drop", Tier.HIGH, False),
    ],
)
def test_a_field_in_no_row_goes_by_tier_and_setting(policy: str, tier: Tier, goes_on: bool) -> None:
    fields = {"brand_new": 1, "options": {"newer": 2}}
    asked = ask("/api/chat", fields, tier, unknown_fields=policy)
    found = json.loads(asked.upstream[0])
    assert ("brand_new" in found, "newer" in found["options"]) == (goes_on, goes_on)
    assert asked.dropped == (() if goes_on else ("brand_new", "options.newer"))


def test_a_field_in_no_row_may_be_refused() -> None:
    with pytest.raises(BadRequest, match="brand_new"):
        ask("/api/chat", {"brand_new": 1}, unknown_fields="refuse")


@pytest.mark.parametrize("policy", ["auto", "pass", "drop", "refuse"])
@pytest.mark.parametrize("tier", Tier)
def test_what_clients_tell_other_gateways_is_dropped_and_never_an_error(policy: str, tier: Tier) -> None:
    fields = {"x_client_id": "crawler", "x_priority": 9, "x_": 0}
    asked = ask("/v1/chat/completions", fields, tier, unknown_fields=policy)
    assert not {*fields} & json.loads(asked.upstream[0]).keys()
    assert asked.dropped == ("x_client_id", "x_priority", "x_")


def test_an_operator_lets_such_a_field_through_by_a_row_of_its_own() -> None:
    asked = ask("/v1/chat/completions", {"x_mine": 1}, conf="[fields *]\nx_mine = allow\n")
    assert json.loads(asked.upstream[0])["x_mine"] == 1


# media ----------------------------------------------------------------------------------------------------------------

PNG = "data:image/png;base64,iVBORw0KGgo="
REMOTE = ["http://10.0.0.1/x", "HTTPS://x/", "file:///etc/passwd", " http://x/", "//x/y", "ftp://x", "http:/x", "x"]


def parts(url: Any) -> list[dict[str, Any]]:
    """Every place where a server takes the address of media."""
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"image_url": url},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "input_audio", "input_audio": {"url": url}},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "document", "source": {"type": "content", "content": [{"source": {"url": url}}]}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
        {"type": "text", "text": "", "Image_URL": {"URL": url}},
    ]


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/embeddings"])
@pytest.mark.parametrize("url", REMOTE)
def test_no_address_goes_where_a_server_would_fetch_it(target: str, url: str) -> None:
    for part in parts(url):
        for content in ([part], [{"type": "text", "text": "hi"}, part], part):
            with pytest.raises(BadRequest, match="data: URL"):
                ask(target, {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": content}]})


@pytest.mark.parametrize("data", ["http://x/", "https://x", "file:///etc/passwd", "ftp://x/"])
def test_audio_data_is_no_address_either(data: str) -> None:
    """llama-server downloads what `input_audio.data` names, where it begins with `http`."""
    for part in ({"input_audio": {"data": data}}, {"type": "input_video", "input_video": {"data": data}}):
        with pytest.raises(BadRequest):
            ask("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_media_that_are_sent_along_go_on(target: str) -> None:
    for part in (*parts(PNG), {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}):
        messages = [{"role": "user", "content": [part]}]
        assert json.loads(ask(target, {"messages": messages}).upstream[0])["messages"] == messages


@pytest.mark.parametrize("name", ["image_url", "Image_Url", "source"])
def test_escapes_and_white_space_hide_nothing(name: str) -> None:
    for position in range(len(name)):
        hidden = f"{name[:position]}\\u{ord(name[position]):04x}{name[position + 1 :]}"
        for raw in (
            f'{{"messages":[{{"role":"user","content":[{{"{hidden}":{{"url":"http://x/"}}}}]}}]}}',
            f'{{"messages":[{{"role":"user","content" : \n[ {{"{name}" : {{"url":\t"\\u0068ttp://x/"}}}} ] }} ] }}',
            f'{{"messages":[{{"c\\u006fntent":[{{"{name}":{{"url":"http:\\/\\/x/"}}}}]}}]}}',
            f'{{"messages":[{{"content":[{{"{name}":{{"url":"http://x"}}}}],"content":"hi"}}]}}',
            f'{{"messages":[{{"content":"hi","CONTENT":[{{"{name}":{{"url":"http://x"}}}}]}}]}}',
            f'{{"messages":[{{"content":[{{"{name}":{{"url":"http://x","url":"{PNG}"}}}}]}}]}}',
        ):
            with pytest.raises(BadRequest):
                ask("/v1/chat/completions", raw.encode())


def test_addresses_in_texts_and_in_calls_of_tools_are_nobody_s_business() -> None:
    call = {"type": "tool_use", "id": "1", "name": "get", "input": {"url": "http://x/", "image_url": "http://y/"}}
    found = {"type": "web_search_tool_result", "content": [{"type": "web_search_result", "url": "http://x/"}]}
    for content in ("http://x/ [1] {2}", [{"type": "text", "text": "image_url: http://x/"}], [call], [found]):
        messages = [
            {"role": "assistant", "content": content, "tool_calls": [{"function": {"arguments": {"url": "x:"}}}]}
        ]
        for target in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            assert json.loads(ask(target, {"messages": messages}).upstream[0])["messages"] == messages


def test_the_source_of_a_search_result_is_a_label() -> None:
    """It was refused as media that would have to be fetched; an object in its place still is."""
    found = {"type": "search_result", "source": "https://kb.example/7", "title": "t", "content": []}
    for content in ([found], [{"type": "tool_result", "tool_use_id": "c", "content": [found]}]):
        messages = [{"role": "user", "content": content}]
        assert json.loads(ask("/v1/messages", {"messages": messages}).upstream[0])["messages"] == messages
    for other in ({"source": {"url": "http://x/"}}, {"type": "image"}, {"image_url": "http://x/"}):
        with pytest.raises(BadRequest, match="nothing is fetched"):
            ask("/v1/messages", {"messages": [{"role": "user", "content": [{**found, **other}]}]})


@pytest.mark.parametrize("name", ["uuid", "image_embeds", "audio_embeds"])
def test_media_of_other_callers_and_tensors_are_refused(name: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": PNG}, name: "x"}]
    with pytest.raises(BadRequest, match=name):
        ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("levels", [20, 300, 900])
def test_content_within_content_has_an_end(levels: int) -> None:
    for begin, end in (('{"content":[', "]}"), ('{"image_url":{"a":', "}}"), ("[", "]")):
        raw = '{"messages":[{"content":[' + begin * levels + "{}" + end * levels + "]}]}"
        with pytest.raises(BadRequest):
            ask("/v1/chat/completions", raw.encode())


MEDIA_NAMES = ["content", "image_url", "url", "data", "source", "type", "text", "Content", "IMAGE_URL"]
CONTENTS = st.recursive(
    st.sampled_from([1, "http://x", PNG, None]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(MEDIA_NAMES), inner),
    max_leaves=12,
)


@given(CONTENTS)
def test_whatever_passes_has_no_address_where_one_is_fetched(content: Any) -> None:
    try:
        asked = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    except HiveError:
        return
    assert not fetched(json.loads(asked.upstream[0])["messages"])


def fetched(value: Any) -> bool:
    """A second reading: does an `image_url` in a part of some `content` name an address?"""
    if isinstance(value, list):
        return any(fetched(item) for item in value)
    if not isinstance(value, dict):
        return False
    folded = {name.casefold(): inner for name, inner in value.items()}
    url = folded.get("image_url")
    if isinstance(url, dict):
        url = {name.casefold(): inner for name, inner in url.items()}.get("url")
    return url == "http://x" or ("content" in folded and fetched(folded["content"]))


def test_tools_that_the_server_would_run_are_refused() -> None:
    """Ollama answers `web_search_…` for /v1/messages by asking ollama.com."""
    own = {"name": "web_search", "type": "custom", "input_schema": {"type": "object"}}
    assert sent("/v1/messages", {"tools": [own], "max_tokens": 1})["tools"] == [own]
    for raw in (b'{"type":"web_search_20250305"}', b'{"Type":"web_search"}', b'{"type":"w\\u0065b_search"}'):
        with pytest.raises(BadRequest):
            ask("/v1/messages", b'{"messages":[],"tools":[%b]}' % raw)


# images ---------------------------------------------------------------------------------------------------------------


def test_what_an_image_may_be_asked_with_goes_on() -> None:
    fields = {"n": 2, "size": "64x128", "output_format": "webp", "seed": 7, "steps": 4, "guidance_scale": 7.5}
    assert sent(IMAGES, {**fields, "response_format": "b64_json"}) == {**fields, "response_format": "b64_json"}
    assert sent(IMAGES, {"size": "auto"}) == {"size": "auto"}
    assert b'"size":null' in ask(IMAGES, {"size": None}).upstream[0]


def test_an_image_is_as_large_as_it_may_be_and_no_more() -> None:
    assert sent(IMAGES, {"size": "1536x1536"}) == {"size": "1536x1536"}
    with pytest.raises(BadRequest, match="1536x1537: more than 2359296 pixels") as refused:
        ask(IMAGES, {"size": "1536x1537"})
    assert "[images] max_pixels" in (refused.value.hint or "")
    with pytest.raises(BadRequest, match="more than 4096 pixels"):
        ask(IMAGES, {"size": "1x65000"}, conf="[images]\nmax_pixels = 4096\n")
    assert sent(IMAGES, {"size": "64x64"}, conf="[images]\nmax_pixels = 4096\n") == {"size": "64x64"}


@pytest.mark.parametrize(
    "size", ["", "64", "64x", "0x64", "64X64", "-1x2", "64x64x64", "1e3x2", "064x64", 64, [64, 64]]
)
def test_a_size_that_is_none_is_refused_in_words(size: object) -> None:
    with pytest.raises(BadRequest, match='"size" must be WIDTHxHEIGHT in pixels, like 1024x1024, or auto'):
        ask(IMAGES, {"size": size})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("response_format", "url", "must be b64_json: Hive keeps no image"),
        ("output_format", "svg", "must be png or webp or jpeg: one still image is made"),
        ("output_format", "tiff", "must be png or webp or jpeg$"),
        ("output_format", 5, '"output_format" must be a string'),
        ("background", "transparent", "no model here makes one"),
        ("prompt", " ", '"prompt" is empty'),
    ],
)
def test_a_picture_of_another_kind_is_refused_in_words(field: str, value: object, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        ask(IMAGES, {field: value})


def test_an_image_without_a_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match='"prompt" is missing'):
        ask(IMAGES, b'{"model":"sd"}')


def test_the_work_on_images_is_cut_and_a_prompt_bounded() -> None:
    asked = ask(IMAGES, {"n": 11, "steps": 500, "quality": "hd", "partial_images": 2})
    assert asked.clamped == ("n=10", "steps=100")
    assert asked.dropped == ("quality", "partial_images")
    assert sent(IMAGES, {"steps": 500}, conf="[images]\nmax_steps = 8\n") == {"steps": 8}
    for name in ("prompt", "negative_prompt"):
        with pytest.raises(TooLarge, match=f'"{name}" is longer than 9 bytes'):
            ask(IMAGES, {name: "x" * 8}, conf="[images]\nmax_prompt_bytes = 9\n")


@pytest.mark.parametrize("line", ["words", "words a||b", "words a b", "pixels", "pixels 0", "pixels x"])
def test_a_line_about_images_that_says_nothing_is_wrong(line: str) -> None:
    with pytest.raises(ValueError, match=r"expected|no such rule"):
        parse_line(line)


# hive.conf ------------------------------------------------------------------------------------------------------------


def test_the_operator_opens_closes_and_bounds() -> None:
    conf = """
[fields /v1/chat/completions]
temperature = clamp 0..1 low medium
chat_template_kwargs.enable_thinking = allow
brand_new = allow
user = drop
seed = inject 7
chat_template = allow high
options.a = refuse
[fields *]
lora = allow
"""
    target = "/v1/chat/completions"
    assert sent(target, {"temperature": 1.5}, conf=conf) == {"temperature": 1.5, "seed": 7}
    assert sent(target, {"temperature": 1.5, "max_tokens": 1}, Tier.LOW, conf) == {
        "temperature": 1,
        "max_tokens": 1,
        "seed": 7,
    }
    kwargs = {"chat_template_kwargs": {"enable_thinking": {"any": 1}}}
    assert sent(target, kwargs, conf=conf) == {**kwargs, "seed": 7}
    low = ask(target, {"brand_new": 1, "user": "u", "seed": 1, "other": 1, "lora": [1]}, Tier.LOW, conf)
    assert low.dropped == ("user", "other")
    assert sent(target, {"chat_template": "x"}, conf=conf)["chat_template"] == "x"
    with pytest.raises(BadRequest):
        ask(target, {"chat_template": "x"}, Tier.LOW, conf)
    with pytest.raises(BadRequest, match=r"options\.a"):
        ask(target, {"options": {"b": 1, "a": 1}}, conf=conf)


def test_a_condition_alone_adds_to_what_there_is() -> None:
    conf = "[fields *]\nmessages = max_bytes 300\nlogit_bias = max_bytes 5\nlora = max_bytes 20\n"
    remote = [{"role": "user", "content": [{"image_url": "http://x"}]}]
    with pytest.raises(BadRequest, match="data: URL"):
        ask("/v1/chat/completions", {"messages": remote}, conf=conf)
    with pytest.raises(TooLarge):
        ask("/v1/chat/completions", {"messages": [{"content": "x" * 300}]}, conf=conf)
    with pytest.raises(BadRequest, match="not taken"):
        ask("/v1/chat/completions", {"lora": [1]}, conf=conf)
    kept = "[fields *]\nmessages = allow max_bytes 1000\n"
    with pytest.raises(BadRequest, match="data: URL"):
        ask("/v1/chat/completions", {"messages": remote}, conf=kept)
    opened = "[fields *]\nmessages = allow\n"
    assert sent("/v1/chat/completions", {"messages": remote}, conf=opened) == {"messages": remote}


@pytest.mark.parametrize("verb", ["drop", "refuse"])
def test_a_whole_object_is_closed_with_all_that_is_in_it(verb: str) -> None:
    conf = f"[fields /api/chat]\noptions = {verb}\n"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "options": {"temperature": 1}}
    if verb == "refuse":
        with pytest.raises(BadRequest, match="options"):
            ask("/api/chat", body, conf=conf)
    else:
        assert "temperature" not in str(sent("/api/chat", body, conf=conf))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "prompt_embeds", "data": "aa"},
        {"type": "video_embeds", "video_embeds": "aa"},
        {"type": "image_pil", "image_pil": "aa"},
    ],
)
def test_no_tensor_gets_to_a_server(part: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="not taken"):
        ask("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})


def test_media_given_as_a_text_are_looked_at_too() -> None:
    for target, asked in (
        ("/v1/embeddings", {"input": [{"type": "image_url", "image_url": "http://x/"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "image_url": "http://x"}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [], "system": [{"type": "image", "source": "http://x"}]}),
    ):
        with pytest.raises(BadRequest, match="data: URL"):
            ask(target, asked)


def test_a_list_of_prompts_is_as_many_requests_as_the_tier_may_have_at_once() -> None:
    assert sent("/v1/completions", {"prompt": ["a", "b"]})["prompt"] == ["a", "b"]
    assert sent("/v1/completions", {"prompt": list(range(500))})["prompt"] == list(range(500)), "one, as tokens"
    with pytest.raises(BadRequest, match="each of which would be a request"):
        ask("/v1/completions", {"prompt": ["a"] * 20})
    with pytest.raises(BadRequest, match="echo"):
        ask("/v1/completions", {"prompt": "a", "echo": True})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("n = clmap 0..1", "no such rule: clmap; did you mean `clamp`?"),
        ("n = clamp", "expected a range like 0..2, ..4096 or ..max_tokens behind `clamp`, found ''"),
        ("n = clamp 2..1", "2..1 begins above its end"),
        ("n = clamp ..", "expected a range"),
        ("n = clamp 0..many", "found '0..many'"),
        ("n = max_bytes x", "expected a number of bytes behind `max_bytes`, found 'x'"),
        ("n = inject {", "expected JSON behind `inject`, found '{'"),
        ("n = inject", "expected JSON behind `inject`, found ''"),
        ("n = drop refuse", "`refuse` where there is a verb already"),
        ("n = drop filled", "nothing may stand beside `drop`"),
        ("n = take", "no such rule: take"),
        ("n = filled filled", "`filled` twice"),
        ("n =", "expected rules with `;` between them"),
        ("n = allow;", "expected rules with `;` between them"),
        ("n = ; allow", "expected rules with `;` between them"),
        ("n = allow; ; drop low", "expected a rule between the `;`"),
        ("n = low", "expected a rule before the tiers"),
        ("n = allow low; drop low high", "two rules for one tier"),
        ("n = allow; drop low", "two rules for one tier"),
        ("a..b = drop", "expected a field, or `field.inner`"),
    ],
)
def test_a_line_that_makes_no_sense_is_told_with_its_place(line: str, said: str) -> None:
    with pytest.raises(HiveError) as caught:
        load_text(f"\n[fields /api/chat]\n{line}\n", env={})
    assert caught.value.message.startswith(f"hive.conf:3: [fields /api/chat] {line.partition(' ')[0]}: ")
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("text", "verbs"),
    [
        ('inject "a;b" low; drop', [Verb.INJECT, Verb.DROP]),
        ('inject {"a b":[1, 2]}', [Verb.INJECT]),
        ("allow max_bytes 10 filled low medium; clamp -0.5..2 high", [Verb.ALLOW, Verb.CLAMP]),
    ],
)
def test_lines_are_read_word_by_word(text: str, verbs: list[Verb]) -> None:
    with pytest.raises(ValueError, match="two rules"):
        parse_line(text + "; allow")
    if "low; drop" in text:
        text = text.replace("drop", "drop high")
    assert [choice.verb for choice in parse_line(text)] == verbs


@given(st.text(max_size=60))
def test_any_line_is_rules_or_says_what_was_expected(text: str) -> None:
    try:
        parse_line(text)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    try:
        assert field_name(text) == text.casefold()
    except ValueError as error:
        assert str(error)  # noqa: PT017


def test_the_table_says_what_it_was_made_from_and_why_it_closes() -> None:
    import hive.bodies.fields as module

    for made_from in ("openai 3.51", "ollama-python 0.6.3", "anthropic 2.10", "2026-08-21", "vLLM 0.32", "0c1e570"):
        assert made_from in (module.__doc__ or "").replace("\n", " ")
    assert Proxy().unknown_fields == "auto"
    assert TABLE.count("\n# ") > 20
