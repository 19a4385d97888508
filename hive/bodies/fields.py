"""Every field a body may have, and its rule: one table, a row per field and endpoint. Pure.

Made from openai 3.51.0, ollama-python 0.6.3 and anthropic 2.10.0 (every field they can send has a row, which a test
compares with the installed packages), Ollama of 2026-08-21 (api/types.go, openai.go, anthropic.go), vLLM 0.32 and
0.33 (the protocol files) and llama-server 0c1e570 (server-schema.cpp, server-common.cpp). The lines are those of
hive.conf (field_rules.py), where an operator adds lines or permits refused fields.

Refused are fields by which the client would choose what runs, is fetched or is allocated, and fields without which the
answer would be another than was asked for. Dropped are fields that clients set by habit and that answers do not need.
"""

from __future__ import annotations

from functools import cache

import msgspec

from hive.dialects.ollama_loading import PROMPTS
from hive.domain import Tier
from hive.settings.field_rules import (
    EVERYWHERE,
    TARGETS,
    FieldRules,
    Fields,
    Rule,
    RuleLine,
    Verb,
    chosen,
    parse_line,
    settled,
)
from hive.settings.file import read
from hive.settings.table import Settings

TABLE = """
[fields *]
model = take
stream = take
# Hive decides how long a model stays loaded: 0 unloads it for all agents, -1 pins it for ever.
keep_alive = drop
# Made, ordered and kept apart by Hive.
request_id = drop
priority = drop
cache_salt = drop
session_id = drop
# Another tenant's adapter, or none.
lora = refuse
# A Jinja or Go template from a client runs in the server (CVE-2025-62426); its arguments can replace it.
chat_template = refuse
chat_template_kwargs = drop
template = refuse
# Memory as the client likes, tensors decoded with torch.load, paths and hosts inside the engine.
mm_processor_kwargs = refuse
media_io_kwargs = refuse
prompt_embeds = refuse
kv_transfer_params = refuse
ec_transfer_params = refuse
vllm_xargs = refuse
# Shows the rendered prompt instead of an answer.
_debug_render_only = refuse

[fields /api/generate /api/chat /api/embed /api/embeddings]
options = take
# Another value than the loaded model's reloads it for all agents (ollama #8903): Hive's models have theirs set.
options.num_ctx = drop
options.num_batch = drop
options.num_gpu = drop
options.main_gpu = drop
options.num_thread = drop
options.use_mmap = drop
options.use_mlock = drop
options.numa = drop
options.low_vram = drop
options.f16_kv = drop
options.logits_all = drop
options.vocab_only = drop
options.embedding_only = drop
options.draft_num_predict = drop
options.num_predict = clamp ..max_tokens
options.num_keep = allow
options.seed = allow
options.top_k = allow
options.top_p = allow
options.min_p = allow
options.tfs_z = allow
options.typical_p = allow
options.temperature = allow
options.repeat_penalty = allow
options.presence_penalty = allow
options.frequency_penalty = allow
options.mirostat = allow
options.mirostat_tau = allow
options.mirostat_eta = allow
options.penalize_newline = allow
# So many tokens are kept in a buffer made at once.
options.repeat_last_n = clamp -1..65536
# Each is compared with every token.
options.stop = max_bytes 4096

[fields /api/generate /api/chat]
# Compiled by the server; grammar.py counts what this and all other schemas of a request become.
format = allow
think = allow
truncate = allow
shift = allow
logprobs = allow
top_logprobs = clamp 0..20

[fields /api/generate]
# Without a prompt Ollama loads the model, or unloads it: Hive answers that itself (loading.py).
prompt = allow
suffix = allow
system = allow
context = allow
images = allow
# The prompt would go to the model as it is, outside its template.
raw = refuse
# Pictures: as large, and in as many steps, as asked.
width = drop
height = drop
steps = drop

[fields /api/chat]
messages = local_media
tools = allow

[fields /api/embed]
# Each text is a request of its own; OpenAI's own limit, and clients send 1000 at once (langchain).
input = max_items 2048
truncate = allow
dimensions = allow

[fields /api/embeddings]
prompt = allow

[fields /api/show]
name = take
# Megabytes of vocabulary.
verbose = drop
system = drop
options = drop

[fields /v1/chat/completions /v1/messages /v1/responses /tokenize]
# Switches that models' own templates have; any other key could be one of the template's own variables.
chat_template_kwargs = refuse
chat_template_kwargs.enable_thinking = allow switch
chat_template_kwargs.thinking = allow switch
chat_template_kwargs.clear_thinking = allow switch
chat_template_kwargs.reasoning_effort = allow switch

[fields /api/pull]
name = take
insecure = drop
username = drop
password = drop

[fields /v1/chat/completions /v1/completions]
stream_options = take
stream_options.include_usage = take
stream_options.continuous_usage_stats = allow
stream_options.include_obfuscation = allow
max_tokens = clamp ..max_tokens
# llama-server takes it before max_tokens.
n_predict = clamp ..max_tokens
min_tokens = clamp 0..max_tokens
# Each of n answers occupies the model like a request.
n = clamp 1..concurrency
n_cmpl = clamp 1..concurrency
temperature = allow
top_p = allow
top_k = allow
min_p = allow
seed = allow
frequency_penalty = allow
presence_penalty = allow
repetition_penalty = allow
length_penalty = allow
user = max_bytes 1024
# Each is looked at for every token.
stop = max_bytes 4096
stop_token_ids = max_bytes 4096
bad_words = max_bytes 4096
allowed_token_ids = max_bytes 65536
logit_bias = max_bytes 16384
# Probabilities of as many tokens are computed and sent for each one; -1 would be the whole vocabulary.
n_probs = clamp 0..20
logprob_token_ids = max_bytes 4096
# The same for the whole prompt, which also passes by the prefix cache.
prompt_logprobs = refuse
# As many beams as n, each step in the server's own loop.
use_beam_search = refuse
# Counted by grammar.py, with `tools` and `functions`.
response_format = allow
# Compiled inside the server, where a bad one could end it (vllm #19270, #17248); response_format does what they do.
structured_outputs = refuse
guided_json = refuse
guided_regex = refuse
guided_choice = refuse
guided_grammar = refuse
guided_decoding_backend = refuse
guided_whitespace_pattern = refuse
structural_tag = refuse
grammar = refuse
grammar_lazy = refuse
grammar_triggers = refuse
grammar_type = refuse
json_schema = refuse
preserved_tokens = refuse
# llama-server sets these from the template and believes them.
chat_format = refuse
chat_parser = refuse
generation_prompt = refuse
message_delimiters = refuse
parse_tool_calls = refuse
# Hive decides about the server's slots and what they keep.
id_slot = drop
cache_prompt = drop
n_cache_reuse = drop
backend_sampling = drop
# A buffer of that length is made at once.
repeat_last_n = clamp -1..65536
dry_penalty_last_n = clamp -1..65536
repeat_penalty = allow
dry_multiplier = allow
dry_base = allow
dry_allowed_length = allow
dry_sequence_breakers = max_bytes 4096
dynatemp_range = allow
dynatemp_exponent = allow
typical_p = allow
top_n_sigma = allow
xtc_probability = allow
xtc_threshold = allow
mirostat = allow
mirostat_tau = allow
mirostat_eta = allow
adaptive_target = allow
adaptive_decay = allow
min_keep = allow
samplers = max_bytes 4096
ignore_eos = allow
n_keep = allow
n_discard = allow
n_indent = allow
t_max_predict_ms = allow
post_sampling_probs = allow
timings_per_token = allow
return_tokens = allow
return_progress = allow
response_fields = max_bytes 4096
verbose = allow
sse_ping_interval = clamp -1..3600
reasoning_format = allow
reasoning_control = allow
reasoning_budget_tokens = allow
thinking_budget_tokens = allow
reasoning_budget_message = max_bytes 4096
include_stop_str_in_output = allow
skip_special_tokens = allow
spaces_between_special_tokens = allow
add_special_tokens = allow
truncate_prompt_tokens = allow
truncation_side = allow
thinking_token_budget = allow
repetition_detection = max_bytes 4096
watermarking = allow
stream_interval = allow
return_tokens_as_token_ids = allow
return_token_ids = allow
return_token_offsets = allow
return_prompt_text = allow
return_mm_kwargs = allow
routed_experts_prompt_start = allow
# vLLM gives the prompt's own probabilities with it.
echo = refuse

[fields /v1/chat/completions]
messages = local_media
max_completion_tokens = clamp ..max_tokens
logprobs = allow
top_logprobs = clamp 0..20
tools = allow
tool_choice = allow
parallel_tool_calls = allow
functions = allow
function_call = allow
reasoning = allow
reasoning_effort = allow
include_reasoning = allow
add_generation_prompt = allow
continue_final_message = allow
documents = allow
verbosity = allow
audio = allow
modalities = allow
prediction = allow
metadata = max_bytes 16384
moderation = allow
prompt_cache_key = max_bytes 1024
prompt_cache_options = max_bytes 1024
prompt_cache_retention = max_bytes 1024
safety_identifier = max_bytes 1024
service_tier = allow
store = allow
web_search_options = allow

[fields /v1/completions]
# Each text of a list is a request of its own.
prompt = local_media max_items concurrency
suffix = allow
best_of = clamp 1..concurrency
logprobs = clamp 0..20

[fields /v1/responses]
input = local_media
instructions = allow
max_output_tokens = clamp ..max_tokens
temperature = allow
top_p = allow
top_k = allow
top_logprobs = clamp 0..20
tools = allow
tool_choice = allow
parallel_tool_calls = allow
max_tool_calls = allow
# Counted by grammar.py, with `tools`.
text = allow
reasoning = allow
include = allow
truncation = allow
stream_options = allow
store = allow
# Read by the translation, which has no storage.
previous_response_id = max_bytes 1024
conversation = allow
prompt = allow
background = allow
context_management = allow
moderation = allow
image = allow
access_programs = allow
service_tier = allow
metadata = max_bytes 16384
user = max_bytes 1024
safety_identifier = max_bytes 1024
prompt_cache_key = max_bytes 1024
prompt_cache_options = max_bytes 1024
prompt_cache_retention = max_bytes 1024
# Codex' own counting.
client_metadata = max_bytes 16384
id_slot = drop
cache_prompt = drop

[fields /v1/embeddings]
input = local_media max_items 2048
messages = local_media
content = local_media
dimensions = allow
encoding_format = allow
user = max_bytes 1024
add_special_tokens = allow
add_generation_prompt = allow
continue_final_message = allow
truncate_prompt_tokens = allow
truncation_side = allow
padding = allow
embed_dtype = allow
endianness = allow
use_activation = allow
embd_normalize = allow

[fields /v1/rerank /rerank /v1/score /score]
user = max_bytes 1024
truncate_prompt_tokens = allow
truncation_side = allow
max_tokens_per_query = allow
max_tokens_per_doc = allow
padding = allow
use_activation = allow
# vLLM gives it to the model's own template, as that one argument.
instruction = max_bytes 4096

[fields /v1/rerank /rerank]
query = local_media
# Each document is a request of its own.
documents = local_media max_items 2048
# The answer in Hugging Face's form does not say what it cost.
texts = refuse
return_text = drop
top_n = clamp 0..
return_documents = allow

[fields /v1/score /score]
# Pairs of texts, by whichever two names: each pair is a request of its own.
queries = local_media max_items 2048
documents = local_media max_items 2048
items = local_media max_items 2048
text_1 = local_media max_items 2048
text_2 = local_media max_items 2048
data_1 = local_media max_items 2048
data_2 = local_media max_items 2048

[fields /tokenize]
# No place is taken, so a text is no longer than the longest prompt of any model here.
prompt = max_bytes 1048576
content = max_bytes 1048576
messages = local_media max_bytes 1048576
tools = max_bytes 1048576
add_special = allow
parse_special = allow
with_pieces = allow
add_special_tokens = allow
add_generation_prompt = allow
continue_final_message = allow
return_token_strs = allow

[fields /detokenize]
tokens = max_bytes 1048576

[fields /v1/audio/transcriptions /v1/audio/translations]
# A model reads about 224 tokens of it.
prompt = max_bytes 8192
response_format = max_bytes 64
temperature = clamp 0..1
# Nothing is fetched from here.
url = refuse
file_url = refuse

[fields /v1/audio/transcriptions]
language = max_bytes 64
timestamp_granularities = max_bytes 256
# Clients that know OpenAI's larger models set these by habit.
chunking_strategy = drop
keywords = drop
languages = drop
# No model here tells who speaks, nor how probable each token was.
include = refuse
known_speaker_names = refuse
known_speaker_references = refuse

[fields /v1/messages /v1/messages/count_tokens]
messages = local_media
system = local_media
tools = local_tools
tool_choice = allow
thinking = allow
# Counted by grammar.py, with `tools`.
output_config = allow
output_format = allow
cache_control = allow
context_management = allow
compaction = allow
speed = allow
user_profile_id = max_bytes 1024
workspace_id = max_bytes 1024
# A server that the model's server would call.
mcp_servers = refuse
billing_policy = drop
betas = allow

[fields /v1/messages]
max_tokens = clamp ..max_tokens
n_predict = clamp ..max_tokens
stop_sequences = max_bytes 4096
temperature = allow
top_p = allow
top_k = allow
metadata = max_bytes 16384
# It names the client's account, which is neither needed here nor to be told elsewhere.
metadata.user_id = drop
service_tier = allow
container = drop
diagnostics = allow
inference_geo = allow
fallbacks = drop
fallback_credit_token = drop
# Goes on with a conversation that a server keeps; Hive keeps none.
thread = refuse
id_slot = drop
cache_prompt = drop

[fields /v1/images/generations]
prompt = filled max_bytes max_prompt_bytes
n = clamp 1..10
size = pixels max_pixels
output_format = words png|webp|jpeg
output_compression = clamp 0..100
response_format = words b64_json
background = words auto|opaque
# Of Hive's servers, not OpenAI's: the same seed gives the same image.
seed = allow
steps = clamp 1..max_steps
negative_prompt = max_bytes max_prompt_bytes
guidance_scale = clamp 0..100
# Named inputs of a workflow (`comfy/NAME`), bounded by its own description.
inputs = max_bytes 65536
# Steps are told; no image is decoded before its last one.
partial_images = drop
# Of OpenAI's own models; here `steps` says how much is worked on an image.
quality = drop
style = drop
complexity = drop
moderation = drop
frame_count = drop
frame_duration_ms = drop
svg = refuse
user = drop
safety_identifier = drop
"""

TOKENS = {
    "/api/generate": ("options", ("num_predict",)),
    "/api/chat": ("options", ("num_predict",)),
    "/v1/chat/completions": ("", ("max_tokens", "max_completion_tokens", "n_predict")),
    "/v1/completions": ("", ("max_tokens", "n_predict")),
    "/v1/messages": ("", ("max_tokens", "n_predict")),
    "/v1/responses": ("", ("max_output_tokens",)),
}
"""Place and names of the limit of generated tokens in a body; every server reads the first name."""
ALIASES = {"/api/show": "name", "/api/pull": "name"}

Lines = dict[str, list[RuleLine]]
"""Rules by field, dots within."""


class FieldTable:
    """The rules of every endpoint and tier under these settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        own: dict[str, Lines] = {}
        for target, rows in settings.fields.items():
            own[target] = {name: parse_line(text) for name, text in rows.items()}
        built_in = _built_in()
        self._layers = {
            target: [lines for source in (built_in, own) for lines in _of(source, target)] for target in TARGETS
        }
        self._made: dict[tuple[str, Tier], FieldRules] = {}

    def __repr__(self) -> str:
        return f"<FieldTable {sum(map(len, self._settings.fields.values()))} rows of the operator's own>"

    def rules(self, endpoint_target: str, tier: Tier) -> FieldRules:
        """The rules of one endpoint's bodies; the query of its row is ignored. Raises KeyError if it has no body.

        >>> FieldTable(Settings()).rules("/api/chat", Tier.LOW).max_tokens
        4096
        """
        key = endpoint_target, tier
        if key not in self._made:
            self._made[key] = self._make(endpoint_target.partition("?")[0], tier)
        return self._made[key]

    def _make(self, target: str, tier: Tier) -> FieldRules:
        rules: dict[str, Rule] = {}
        for lines in self._layers[target]:
            for name, choices in lines.items():
                if (choice := chosen(choices, tier)) is not None:
                    if choice.verb in (Verb.DROP, Verb.REFUSE):  # the whole of it: rules for its parts do not hold
                        rules = {key: rule for key, rule in rules.items() if not key.startswith(f"{name}.")}
                    rules[name] = settled(choice, rules.get(name), _bounds(self._settings, tier))
        unknown = _unknown(self._settings.proxy.unknown_fields, tier)
        place, names = TOKENS.get(target, ("", ()))
        limit = rules.get(f"{place}.{names[0]}" if place else names[0], Rule()) if names else Rule()
        return FieldRules(
            target=target,
            fields=_laid_out(rules, unknown),
            tokens=names,
            tokens_in=place,
            max_tokens=int(limit.high) if limit.verb is Verb.CLAMP and limit.high is not None else None,
            alias=ALIASES.get(target, ""),
            prompt=PROMPTS.get(target, ""),
        )


def _of(source: dict[str, Lines], target: str) -> list[Lines]:
    return [source[name] for name in (EVERYWHERE, target) if name in source]


@cache
def _built_in() -> dict[str, Lines]:
    problems: list[str] = []
    rows, _ = read(TABLE, "the table", problems)
    assert not problems, problems
    tables: dict[str, Lines] = {}
    for row in rows:
        for target in row.section.split()[1:]:
            lines = tables.setdefault(target, {})
            assert row.key not in lines, f"{row.key} twice for {target}"
            lines[row.key] = parse_line(row.value, built_in=True)
    return tables


def _bounds(settings: Settings, tier: Tier) -> dict[str, int | None]:
    proxy = settings.proxy
    return {
        "max_tokens": getattr(proxy, f"tier_{tier}_max_tokens") or None,
        "concurrency": getattr(proxy, f"tier_{tier}_concurrency"),
        "max_steps": settings.images.max_steps,
        "max_pixels": settings.images.max_pixels,
        "max_prompt_bytes": settings.images.max_prompt_bytes,
    }


def _unknown(policy: str, tier: Tier) -> Verb:
    """The verb for a field that has no row.

    >>> _unknown("auto", Tier.HIGH).value, _unknown("auto", Tier.LOW).value, _unknown("refuse", Tier.HIGH).value
    ('allow', 'drop', 'refuse')
    """
    if policy == "auto":
        return Verb.ALLOW if tier is Tier.HIGH else Verb.DROP
    return Verb.ALLOW if policy == "pass" else Verb(policy)


def _laid_out(rules: dict[str, Rule], unknown: Verb) -> Fields:
    """Rules by dotted name as objects within objects."""
    inner: dict[str, dict[str, Rule]] = {}
    tops = {name: rule for name, rule in rules.items() if "." not in name}
    for name, rule in rules.items():
        top, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(top, {})[rest] = rule
            tops.setdefault(top, Rule())
    for top, below in inner.items():
        verb = tops[top].verb
        others = unknown if verb is Verb.TAKE else verb if verb in (Verb.DROP, Verb.REFUSE) else Verb.ALLOW
        tops[top] = msgspec.structs.replace(tops[top], inside=_laid_out(below, others))
    plain = frozenset(name for name, rule in tops.items() if rule in (Rule(), Rule(verb=Verb.TAKE)))
    media = frozenset(name for name, rule in tops.items() if rule == Rule(verb=rule.verb, local_media=True))
    policed = {name: rule for name, rule in tops.items() if name not in plain | media}
    return Fields(
        plain=plain,
        media=media,
        policed=policed,
        always=tuple(name for name, rule in policed.items() if _says_of_absent(rule)),
        unknown=unknown,
    )


def _says_of_absent(rule: Rule) -> bool:
    return rule.filled or rule.verb is Verb.INJECT or (rule.inside is not None and bool(rule.inside.always))
