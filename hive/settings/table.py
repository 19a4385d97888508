"""Every setting of Hive, each written once: section, key, type, default, unit, sentence.

A section is a struct, a key its field; `hive.conf` (INI), the environment, the flags, `hive config show` and the
tests read this table. Precedence: flag > environment > runtime setting > file > default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from hive.budgets import BudgetKind, TokenLimits, UnitPrices
from hive.domain import Tier
from hive.settings.adapters import AdaptersSection
from hive.settings.comfyui import ComfyuiSection
from hive.settings.images import ImagesSection
from hive.settings.jobs import JobsSection
from hive.settings.lease import LeaseSection
from hive.settings.meta import setting_meta as _s
from hive.settings.pool import ModelRow, PoolSection
from hive.settings.registry import RegistrySection
from hive.settings.tasks import TaskRow
from hive.settings.templates import TemplateRow


class InferenceSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[inference]`: the snippet of the original specification loads verbatim."""

    enabled: Annotated[
        str, _s("`auto`: the proxy serves if a backend answers; `true`, `false`.", pattern="^(auto|true|false)$")
    ] = "auto"
    backend: Annotated[
        str, _s("Which inference server.", env="INFERENCE_BACKEND", pattern="^(auto|ollama|vllm|llama|demo|remote)$")
    ] = "auto"
    host: Annotated[str, _s("Where the backend listens.", env="INFERENCE_HOST")] = "127.0.0.1"
    port: Annotated[int, _s("Port of the backend.", unit="port", env="INFERENCE_PORT", ge=1, le=65535)] = 11434
    backend_url: Annotated[
        str,
        _s(
            "Where a backend that Hive does not start is, instead of host and port: `https://HOST/v1`.",
            pattern=r"^(https?://[^\s@?#]+)?$",
            expected="http://HOST:PORT/v1 or https://HOST/v1",
        ),
    ] = ""
    backend_api_key_file: Annotated[
        str,
        _s(
            "File (0600) with the key for a remote backend, unless there is the credential `backend-api-key`.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    backend_ca_file: Annotated[
        str,
        _s(
            "Certificates of the authorities a backend's own is checked with; empty: the system's.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    backend_limit_name: Annotated[
        str,
        _s(
            "The name by which a remote backend takes the limit of tokens of a chat: `max_tokens`, "
            "`max_completion_tokens`; `auto`: the second one before OpenAI's and Azure's own hosts.",
            pattern="^(auto|max_tokens|max_completion_tokens)$",
        ),
    ] = "auto"
    backend_priority: Annotated[
        bool,
        _s(
            "A backend that describes a field `priority` orders its own queue by it, as vLLMs with "
            "`--scheduling-policy priority` behind a router do: it is sent Hive's bands."
        ),
    ] = False
    first_byte_s: Annotated[
        float,
        _s("First body byte of an answer of this backend; 0: as [proxy] says.", unit="s", ge=0),
    ] = 0
    backend_cluster: Annotated[
        str,
        _s(
            "Who tells how much a cluster behind the backend's address can do: `router` (vLLM Router), `ray` (Ray "
            "Serve), `none`: nobody; `auto`: whichever of them answers, or vLLM's own data parallelism.",
            pattern="^(auto|router|ray|none)$",
        ),
    ] = "auto"
    backend_cluster_url: Annotated[
        str,
        _s(
            "Where that is asked: Ray's dashboard, `http://HEAD:8265`; empty: port 8265 of the backend's host, and for "
            "vLLM Router the backend's own address.",
            pattern=r"^(https?://[^\s@?#/]+/?)?$",
            expected="http://HOST:PORT",
        ),
    ] = ""
    backend_cluster_token_file: Annotated[
        str,
        _s(
            "File (0600) with the token for Ray's dashboard, unless there is the credential `backend-cluster-token`; "
            "Ray has no TLS there, so it travels in the clear.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    slots_per_replica: Annotated[
        int,
        _s(
            "Requests that one replica of a cluster works on at once; 0: what the cluster tells, else "
            "vllm_max_sequences.",
            ge=0,
            le=100_000,
        ),
    ] = 0
    cluster_poll_s: Annotated[float, _s("How often a cluster is asked what of it runs.", unit="s", ge=0.1, le=60)] = 1
    vsock_port: Annotated[int, _s("AF_VSOCK port guests dial.", unit="port", env="VSOCK_PORT", ge=1)] = 11434
    default_model: Annotated[str, _s("Used where agent and request name no model.", runtime=True)] = ""
    auto_sleep_enabled: Annotated[bool, _s("Put idle agents to sleep.", runtime=True, env="AUTO_SLEEP_ENABLED")] = True
    auto_sleep_idle_seconds: Annotated[
        float, _s("Quiet for this long is idle.", runtime=True, unit="s", env="AUTO_SLEEP_IDLE_SECONDS", gt=0)
    ] = 300
    token_tracking: Annotated[
        bool, _s("Meter requests; without it nothing is recorded but what has a budget or left the box.", runtime=True)
    ] = True
    quantization_routing: Annotated[
        bool, _s("A model is taken in the variant that the agent's tier is worth.", runtime=True)
    ] = False
    tier_low_models: Annotated[
        str,
        _s(
            "Quantizations of tier low, or models, the best first, separated by commas; empty: q4_0, q4_K_M, q4_K_S.",
            runtime=True,
        ),
    ] = ""
    tier_medium_models: Annotated[str, _s("The same for tier medium; empty: q8_0, q5_K_M, q5_K_S.", runtime=True)] = ""
    tier_high_models: Annotated[str, _s("The same for tier high; empty: f16, q8_0.", runtime=True)] = ""
    tier_allow_larger: Annotated[
        bool, _s("Where all variants are larger than a tier may have, take the smallest; else refuse.", runtime=True)
    ] = False
    tier_caps_explicit: Annotated[
        bool, _s("A tier bounds the variant also where the request names one (`llama3.2:q8_0`).", runtime=True)
    ] = False
    aliases: Annotated[
        str,
        _s(
            "Other names of models: `gpt-4 = llama3.2, fast = llama3.2:1b | Llama-3.2-1B`, the first that is there. "
            "That of a `claude-` name holds for the same name with a date or `-latest` behind it.",
            pattern=r"^( *[^,=|]*[^,=| ] *= *[^,=| ][^,=|]*(\|[^,=|]+)*(,|$))*$",
            expected="NAME = TARGET, separated by commas",
        ),
    ] = ""
    cloud: Annotated[
        str,
        _s(
            "How far requests may go: `never` leave the box; `asked`, where they name a model that is far; `fallback`, "
            "also where a far one stands in for what they name.",
            runtime=True,
            pattern="^(never|asked|fallback)$",
        ),
    ] = "asked"
    switch_drain_s: Annotated[
        float, _s("Requests in flight may go on for so long when the backend is switched.", unit="s", ge=0)
    ] = 60
    switch_free_s: Annotated[
        float, _s("Longest wait until a stopped backend's GPU memory is free.", unit="s", ge=0)
    ] = 10
    switch_health_tries: Annotated[int, _s("A new backend is looked at so often, then the old one is back.", ge=1)] = 30
    switch_health_every_s: Annotated[float, _s("Time between two looks at a new backend.", unit="s", gt=0)] = 2
    vllm_max_sequences: Annotated[int, _s("vLLM `--max-num-seqs`: requests it works on at once.", ge=1)] = 64
    vllm_scheduling_policy: Annotated[
        str, _s("vLLM `--scheduling-policy`; `priority` passes on Hive's bands.", pattern="^(fcfs|priority)$")
    ] = "fcfs"
    vllm_gpu_memory_util: Annotated[
        float, _s("vLLM `--gpu-memory-utilization`.", env="VLLM_GPU_MEMORY_UTILIZATION", gt=0, le=1)
    ] = 0.90
    vllm_prefix_caching: Annotated[bool, _s("vLLM `--enable-prefix-caching`.", env="VLLM_ENABLE_PREFIX_CACHING")] = True
    vllm_context: Annotated[
        int,
        _s("vLLM `--max-model-len`; 0: what its model was made for.", unit="tokens", env="VLLM_MAX_MODEL_LEN", ge=0),
    ] = 0
    vllm_adapters: Annotated[
        int, _s("vLLM `--max-loras`: LoRA adapters that it works with at once; 0: it takes none.", ge=0, le=256)
    ] = 0
    speculative: Annotated[
        str,
        _s(
            "Tokens are guessed and then checked by the model: `none`; `ngram`, from what the text has said before; "
            "`draft`, by a small model.",
            pattern="^(none|ngram|draft)$",
        ),
    ] = "none"
    speculative_draft_tokens: Annotated[int, _s("Tokens that are guessed ahead.", unit="tokens", ge=1, le=64)] = 4
    speculative_memory_share: Annotated[
        float, _s("A draft model takes at most this share of the memory it is loaded into.", gt=0, le=1)
    ] = 0.15
    vllm_speculative_model: Annotated[
        str,
        _s(
            "Directory of the draft model for vLLM, with `speculative = draft`.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    llama_speculative_model: Annotated[
        str,
        _s(
            "File of the draft model for llama-server, with `speculative = draft`.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    vllm_program: Annotated[str, _s("The vLLM that is started.", pattern="^/", expected="an absolute path")] = (
        "/opt/vllm/bin/vllm"
    )
    vllm_model: Annotated[str, _s("Directory of vLLM's model.", pattern="^/", expected="an absolute path")] = (
        "/var/lib/hive/models/default"
    )
    ollama_program: Annotated[str, _s("The Ollama that is started.", pattern="^/", expected="an absolute path")] = (
        "/usr/local/bin/ollama"
    )
    ollama_models: Annotated[str, _s("Where Ollama keeps its models.", pattern="^/", expected="an absolute path")] = (
        "/var/lib/hive/models/ollama"
    )
    models_dir: Annotated[
        str,
        _s(
            "Where `hive model pull` puts files for vLLM and llama-server; empty: /var/lib/hive/models/pulled, or "
            "`models` in the state directory of `hive up`.",
            env="MODEL_BASE_PATH",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    llama_program: Annotated[
        str, _s("The llama-server that is started.", pattern="^/", expected="an absolute path")
    ] = "/usr/local/bin/llama-server"
    llama_model: Annotated[
        str,
        _s(
            "File of llama-server's model; a directory (a / at its end): all in it, loaded when asked for.",
            pattern="^/",
            expected="an absolute path",
        ),
    ] = "/var/lib/hive/models/default.gguf"
    llama_parallel: Annotated[int, _s("llama-server `--parallel`: requests it works on at once.", ge=1)] = 4
    whisper_program: Annotated[
        str,
        _s(
            "The hive-runner for Whisper, in an environment of its own (in a clone: pip install '.[whisper]').",
            pattern="^/",
            expected="an absolute path",
        ),
    ] = "/opt/hive-whisper/bin/hive-runner"
    diffusers_program: Annotated[
        str,
        _s(
            "The hive-runner for diffusers, in an environment of its own (in a clone: pip install '.[diffusers]').",
            pattern="^/",
            expected="an absolute path",
        ),
    ] = "/opt/hive-diffusers/bin/hive-runner"
    llama_context: Annotated[int, _s("llama-server `-c`: context of all its slots together.", unit="tokens", ge=1)] = (
        16384
    )
    llama_cache_ram_mb: Annotated[
        int,
        _s(
            "llama-server `--cache-ram`: keeps prompts besides its slots, where no flush reaches. Above 0 a flush is "
            "refused; 0 where tenants are of more than one cache group.",
            unit="MiB",
            ge=0,
        ),
    ] = 0
    llama_slot_dir: Annotated[
        str,
        _s(
            "Directory for what llama-server has read for an agent while that sleeps (docs/cache.md); empty: it is "
            "not kept. Of an installed Hive `/var/lib/hive/slots`.",
            pattern="^(/|$)",
            expected="an absolute path, or nothing",
        ),
    ] = ""
    llama_slots_max_mb: Annotated[
        int, _s("All files there together; the least recently written go.", unit="MiB", ge=1)
    ] = 1024
    llama_slots_at: Annotated[
        str,
        _s(
            "From which depth of sleep on they are kept. Without swap no agent sleeps deep.",
            pattern="^(deep|light)$",
        ),
    ] = "deep"


class Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """`[proxy]`: the data path."""

    port: Annotated[int, _s("TCP port where agents reach the model.", unit="port", ge=0, le=65535)] = 11435
    ingress_port: Annotated[int, _s("TCP port where callers reach agents.", unit="port", ge=0, le=65535)] = 8480
    ingress_domain: Annotated[
        str,
        _s(
            "Each agent is an origin of its own at NAME.<this>, for callers that are browsers; empty: it has none.",
            pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*)?$",
            expected="a domain in lower case, like agents.example.org",
        ),
    ] = ""
    listen: Annotated[
        str,
        _s(
            "Address of its TCP ports; 0.0.0.0 where a container's network is the fence.",
            pattern=r"^(\d{1,3}(\.\d{1,3}){3}|[0-9a-fA-F:]*:[0-9a-fA-F:.]*)$",
            expected="an IP address",
        ),
    ] = "127.0.0.1"
    window_requests: Annotated[int, _s("Requests an agent may make per window.", runtime=True, ge=1)] = 600
    window_s: Annotated[float, _s("Length of the sliding window.", runtime=True, unit="s", gt=0)] = 60
    tier_low_concurrency: Annotated[
        int, _s("Requests of a low-tier agent at the backend at once.", runtime=True, ge=1)
    ] = 2
    tier_medium_concurrency: Annotated[int, _s("The same for tier medium.", runtime=True, ge=1)] = 5
    tier_high_concurrency: Annotated[int, _s("The same for tier high.", runtime=True, ge=1)] = 10
    queue_depth: Annotated[
        int, _s("Requests of one tenant that may wait for their turn.", runtime=True, env="MAX_QUEUE_DEPTH", ge=0)
    ] = 64
    tenant_rate_limit: Annotated[
        str,
        _s(
            "Requests per `s`, `min` or `hour` of each tenant that has no rate_limit of its own; empty: no limit.",
            env="DEFAULT_RATE_LIMIT",
            expected="a rate like 100/min",
            pattern="^([1-9][0-9]*(req)?/(s|min|hour))?$",
        ),
    ] = ""
    queue_wait_s: Annotated[float, _s("Longest wait for a turn, then 503.", runtime=True, unit="s", gt=0)] = 120
    backend_concurrency: Annotated[
        int, _s("Requests at the backend at once; 0: what the backend says of itself.", runtime=True, ge=0)
    ] = 0
    unknown_fields: Annotated[
        str,
        _s(
            "A body field that is in no table: `auto` passes it for tier high and drops it for the others.",
            runtime=True,
            pattern="^(auto|pass|drop|refuse)$",
        ),
    ] = "auto"
    tier_low_max_tokens: Annotated[
        int, _s("`max_tokens` of tier low is cut to this; 0: as asked.", runtime=True, ge=0)
    ] = 4096
    tier_medium_max_tokens: Annotated[int, _s("The same for tier medium.", runtime=True, ge=0)] = 16384
    tier_high_max_tokens: Annotated[int, _s("The same for tier high.", runtime=True, ge=0)] = 0
    parked_max: Annotated[int, _s("Requests of one sleeping agent that may wait for its wake.", runtime=True, ge=1)] = (
        64
    )
    gate_wait_s: Annotated[float, _s("Longest wait for a wake, then 503.", runtime=True, unit="s", gt=0)] = 5
    body_max_bytes: Annotated[int, _s("Largest request body, decoded.", runtime=True, unit="bytes", ge=1)] = (
        16 * 1024 * 1024
    )
    audio_max_s: Annotated[
        float, _s("Longest sound that a model of the pool hears in one request; longer is 413.", unit="s", gt=0)
    ] = 7200
    body_budget_bytes: Annotated[
        int,
        _s(
            "All request bodies together, an agent's and its callers' an eighth of it, a tenant's half; beyond it 503."
            " One body each agent may always hold.",
            runtime=True,
            unit="bytes",
            ge=1,
        ),
    ] = 256 * 1024 * 1024
    upload_max_mb: Annotated[
        int, _s("Largest request with a file, which is on the disk meanwhile.", runtime=True, unit="MiB", ge=1, le=4096)
    ] = 25
    upload_disk_mb: Annotated[
        int,
        _s(
            "All uploaded files together, an agent's an eighth of it, a tenant's half; beyond it 503. One file each "
            "agent may always have.",
            runtime=True,
            unit="MiB",
            ge=1,
        ),
    ] = 512
    head_s: Annotated[float, _s("A request head must be complete within this.", runtime=True, unit="s", gt=0)] = 10
    body_idle_s: Annotated[
        float,
        _s(
            "A request body may stand still for this long; after 10 s 16 KiB/s must have come.",
            runtime=True,
            unit="s",
            gt=0,
        ),
    ] = 30
    keepalive_s: Annotated[
        float,
        _s("Idle agents' connections are kept for this long, sleeping agents' for ever.", runtime=True, unit="s", gt=0),
    ] = 75
    connect_s: Annotated[float, _s("Connect to the backend.", runtime=True, unit="s", gt=0)] = 2
    first_byte_s: Annotated[float, _s("First body byte of the answer.", unit="s", gt=0)] = 300
    between_bytes_s: Annotated[float, _s("Silence inside an answer.", runtime=True, unit="s", gt=0)] = 60
    request_s: Annotated[
        float, _s("Longest time from a turn to the answer's end; 0: no limit.", runtime=True, unit="s", ge=0)
    ] = 0
    heartbeat_s: Annotated[
        float, _s("A waiting stream gets a sign of life this often; 0: none is sent.", runtime=True, unit="s", ge=0)
    ] = 0
    drain_s: Annotated[
        float, _s("Requests in flight may go on for so long at shutdown.", runtime=True, unit="s", ge=0)
    ] = 10
    connections_max: Annotated[
        int,
        _s(
            "Connections at once, 4 of them kept for each agent; 0: what the limit of open files allows.",
            runtime=True,
            ge=0,
        ),
    ] = 0
    agent_connections_max: Annotated[int, _s("Connections of one agent at once.", runtime=True, ge=1)] = 64
    cache_isolation: Annotated[bool, _s("Keep tenants' prompts apart in the backend's prefix cache.")] = True
    vsock: Annotated[bool, _s("Listen on AF_VSOCK for guests that are agents with a `cid`.")] = False
    upstream_idle_s: Annotated[
        float, _s("Idle backend connections are kept for this long (vLLM closes at 5 s).", runtime=True, unit="s", gt=0)
    ] = 3
    websocket_idle_s: Annotated[
        float,
        _s(
            "A WebSocket without a byte for this long no longer keeps its agent awake; 0: an open one always does.",
            runtime=True,
            unit="s",
            ge=0,
        ),
    ] = 0
    ingress_open_max: Annotated[int, _s("Requests open to one agent through ingress.", runtime=True, ge=1)] = 64
    responses_kept_mb: Annotated[
        int,
        _s(
            "Responses (`/v1/responses`) kept for each agent, so that it can name them later; beyond it the oldest go. "
            "0: none is kept, and what was is deleted.",
            runtime=True,
            unit="MiB",
            ge=0,
            le=65536,
        ),
    ] = 0
    responses_kept_days: Annotated[
        int, _s("A response is kept for this long.", runtime=True, unit="days", ge=1, le=3650)
    ] = 30


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """`[grammar_KIND]`: what schemas of one request may become in a server of that kind."""

    schema_bytes: Annotated[
        int, _s("Longest schema of an answer (`response_format`, `format`).", runtime=True, unit="bytes", ge=1)
    ] = 65536
    tools_bytes: Annotated[int, _s("All tools together.", runtime=True, unit="bytes", ge=1)] = 262144
    depth: Annotated[int, _s("Objects and lists within each other.", runtime=True, ge=1, le=100)] = 64
    choices: Annotated[
        int,
        _s("Alternatives at once: values of an `enum`, optional properties, branches.", runtime=True, ge=1),
    ] = 128
    tools: Annotated[int, _s("Tools of one request.", runtime=True, ge=1)] = 256
    rules: Annotated[
        int, _s("Rules of the grammar that all schemas together become, as Hive counts.", runtime=True, ge=1)
    ] = 100_000
    answer_rules: Annotated[int, _s("Rules of all schemas but those of tools.", runtime=True, ge=1)] = 100_000
    pattern_ways: Annotated[
        int, _s("Ways in which a `pattern` may read a text of 8 letters; 0: none is taken.", runtime=True, ge=0)
    ] = 256
    pattern_times: Annotated[
        int, _s("Largest number in a repetition of a `pattern`, such as `{1,400}`; 0: any.", runtime=True, ge=0)
    ] = 0


class GrammarLlama(Grammar, frozen=True, kw_only=True):
    """`[grammar_llama]`: llama-server; each choice is tried with every token, in the loop that serves all."""


class GrammarOllama(Grammar, frozen=True, kw_only=True):
    """`[grammar_ollama]`: Ollama, which runs llama.cpp; of `tools` it makes no grammar."""


class GrammarVllm(Grammar, frozen=True, kw_only=True):
    """`[grammar_vllm]`: vLLM with xgrammar, whose rules are made within the loop that answers all."""

    choices: Annotated[
        int,
        _s("Alternatives at once: values of an `enum`, optional properties, branches.", runtime=True, ge=1),
    ] = 80
    rules: Annotated[
        int, _s("Rules of the grammar that all schemas together become, as Hive counts.", runtime=True, ge=1)
    ] = 64_000
    answer_rules: Annotated[int, _s("Rules of all schemas but those of tools.", runtime=True, ge=1)] = 32_000
    pattern_times: Annotated[
        int,
        _s(
            "Largest number in a repetition of a `pattern`; xgrammar 0.2.8 fails beyond 128. 0: any.",
            runtime=True,
            ge=0,
        ),
    ] = 128


class GrammarRemote(Grammar, frozen=True, kw_only=True):
    """`[grammar_remote]`: any other server, which has limits of its own."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """`[sleep]`: when idle agents are put to sleep."""

    check_s: Annotated[float, _s("How often idleness is checked.", runtime=True, unit="s", ge=0.1, le=3600)] = 30
    minimum_awake_s: Annotated[float, _s("Nobody sleeps sooner after a wake.", runtime=True, unit="s", ge=0)] = 10
    cpu_quiet_percent: Annotated[
        float, _s("Less of one core than this over the last check is quiet.", runtime=True, unit="%", ge=0)
    ] = 2
    deep_after_s: Annotated[
        float,
        _s(
            "Asleep for this long, memory is paged out (deep sleep); 0: only under pressure.",
            runtime=True,
            unit="s",
            ge=0,
        ),
    ] = 30
    pressure_some_avg10: Annotated[
        float,
        _s(
            "From this memory pressure (PSI `some avg10`) on, sleepers go deep at once; 0: never.",
            runtime=True,
            unit="%",
            ge=0,
            le=100,
        ),
    ] = 10
    wake_reserve_mb: Annotated[
        int,
        _s("A wake from deep sleep waits while less memory than this would be left.", runtime=True, unit="MiB", ge=0),
    ] = 256
    pause_timeout_s: Annotated[float, _s("How long `hive agent pause` waits for a busy agent.", unit="s", gt=0)] = 30


class Agents(msgspec.Struct, frozen=True, kw_only=True):
    """`[agents]`: running them."""

    stop_grace_s: Annotated[float, _s("From SIGTERM to SIGKILL.", runtime=True, unit="s", ge=0)] = 10
    restart_limit: Annotated[
        int, _s("This many failures in `restart_window_s` end in state error.", runtime=True, ge=1)
    ] = 5
    restart_window_s: Annotated[float, _s("See restart_limit.", runtime=True, unit="s", gt=0)] = 60
    log_max_bytes: Annotated[int, _s("An agent's log is cut back beyond this.", unit="bytes", ge=4096)] = (
        8 * 1024 * 1024
    )
    first_uid: Annotated[int, _s("Agents' uids count up from here.", ge=1000)] = 70000


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """`[sandbox]`: the helper that runs agents."""

    enabled: Annotated[
        bool, _s("There is a helper; without it Hive runs no agents itself, and those it serves live elsewhere.")
    ] = True
    policy: Annotated[
        str,
        _s(
            "What it may run, a root-owned file; empty: what is asked for, and of the host's files a short list.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    docker_socket: Annotated[str, _s("Where the Docker engine listens.", pattern="^/", expected="an absolute path")] = (
        "/run/docker.sock"
    )
    firecracker: Annotated[
        str, _s("The virtual machine monitor.", env="HIVE_FIRECRACKER", pattern="^/", expected="an absolute path")
    ] = "/usr/local/bin/firecracker"
    jailer: Annotated[str, _s("Its jailer; empty: without one.", pattern="^(/.*)?$", expected="an absolute path")] = (
        "/usr/local/bin/jailer"
    )
    chroot_base: Annotated[
        str,
        _s("Where the jailer makes its jails.", env="JAILER_CHROOT_BASE", pattern="^/", expected="an absolute path"),
    ] = "/srv/jailer"


class DaemonSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[daemon]`: the control plane."""

    models_refresh_s: Annotated[float, _s("How often the backend's model list is read.", unit="s", gt=0)] = 300
    backend_check_s: Annotated[float, _s("How often the backend is asked whether it is up.", unit="s", gt=0)] = 5
    usage_retention_days: Annotated[
        int, _s("Usage is kept request by request for this long, then as sums; 0: for ever.", unit="days", ge=0)
    ] = 30
    usage_rollup_days: Annotated[
        int,
        _s(
            "Sums of usage by hour and by day are kept for this long, and while a budget counts them; 0: for ever.",
            unit="days",
            ge=0,
        ),
    ] = 400


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """`[api]`: the REST API on TCP, for clients with a token."""

    port: Annotated[int, _s("TCP port of the REST API; 0: on its unix socket only.", unit="port", ge=0, le=65535)] = (
        3000
    )
    listen: Annotated[
        str,
        _s(
            "Address of that port; it is HTTP without TLS, so beyond the loopback put something before it.",
            pattern=r"^(\d{1,3}(\.\d{1,3}){3}|[0-9a-fA-F:]*:[0-9a-fA-F:.]*)$",
            expected="an IP address",
        ),
    ] = "127.0.0.1"
    hosts: Annotated[
        str,
        _s(
            "Further names it is asked by, separated by commas: other Host fields are refused.",
            pattern=r"^(([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])( *, *([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]))*)?$",
            expected="names without ports, separated by commas",
        ),
    ] = ""


class RunnerSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[runner]`: the runner API, for trusted clients with a token, on `runner.sock` and on TCP."""

    port: Annotated[
        int,
        _s(
            "TCP port of the runner API and of inference for trusted clients; 0: on its socket only.",
            unit="port",
            ge=0,
            le=65535,
        ),
    ] = 0
    listen: Annotated[
        str,
        _s(
            "Address of that port; it is HTTP without TLS, so beyond the loopback put something before it.",
            pattern=r"^(\d{1,3}(\.\d{1,3}){3}|[0-9a-fA-F:]*:[0-9a-fA-F:.]*)$",
            expected="an IP address",
        ),
    ] = "127.0.0.1"
    id: Annotated[
        str,
        _s(
            "`runnerId` of its answers; empty: the host's name.",
            pattern=r"^[A-Za-z0-9._-]{0,80}$",
            expected="80 letters, digits and . _ - at most",
        ),
    ] = ""


class GovernanceSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[governance]`: operations that need more than one person's word; who signs is in governance.toml beside."""

    hmac_key_file: Annotated[
        str,
        _s(
            "File with a key of another service, not for everybody to read: its operation tokens are taken.",
            env="VERIFIED_OP_TOKEN_KEY_PATH",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""


class BudgetSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[budget]`: tokens that each agent of a tier may use, in and out; an agent's own limit may be smaller."""

    zone: Annotated[
        str,
        _s(
            "Days and months end at midnight there: a name as in /usr/share/zoneinfo.",
            pattern=r"^[A-Za-z][A-Za-z0-9_+/-]*$",
            expected="a zone like UTC or Europe/Berlin",
        ),
    ] = "UTC"
    tier_low_tokens_per_day: Annotated[
        int, _s("Tokens a day of an agent of tier low; 0: no limit.", runtime=True, unit="tokens", ge=0)
    ] = 0
    tier_low_tokens_per_month: Annotated[int, _s("The same for a month.", runtime=True, unit="tokens", ge=0)] = 0
    tier_low_cloud_tokens_per_day: Annotated[
        int, _s("Tokens a day of its requests that leave the box.", runtime=True, unit="tokens", ge=0)
    ] = 0
    tier_medium_tokens_per_day: Annotated[int, _s("The same for tier medium.", runtime=True, unit="tokens", ge=0)] = 0
    tier_medium_tokens_per_month: Annotated[int, _s("The same for tier medium.", runtime=True, unit="tokens", ge=0)] = 0
    tier_medium_cloud_tokens_per_day: Annotated[
        int, _s("The same for tier medium.", runtime=True, unit="tokens", ge=0)
    ] = 0
    tier_high_tokens_per_day: Annotated[int, _s("The same for tier high.", runtime=True, unit="tokens", ge=0)] = 0
    tier_high_tokens_per_month: Annotated[int, _s("The same for tier high.", runtime=True, unit="tokens", ge=0)] = 0
    tier_high_cloud_tokens_per_day: Annotated[int, _s("The same for tier high.", runtime=True, unit="tokens", ge=0)] = 0

    tokens_per_audio_s: Annotated[
        float,
        _s(
            "A second of audio counts as so many tokens in every budget.",
            runtime=True,
            unit="tokens",
            gt=0,
            le=1e6,
        ),
    ] = 10.0
    tokens_per_megapixel_step: Annotated[
        float,
        _s(
            "A million pixels in one step of an image count as so many tokens in every budget.",
            runtime=True,
            unit="tokens",
            gt=0,
            le=1e6,
        ),
    ] = 40.0

    @property
    def prices(self) -> UnitPrices:
        return UnitPrices(self.tokens_per_audio_s, self.tokens_per_megapixel_step)

    def of_tier(self, tier: Tier) -> TokenLimits:
        """The limits of each agent of this tier."""
        return TokenLimits(*(getattr(self, f"tier_{tier}_{kind}") for kind in BudgetKind))


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """`[tenant NAME]`: what one tenant may have."""

    rate_limit: Annotated[
        str,
        _s(
            "Requests per `s`, `min` or `hour`: `100/min`.",
            expected="a rate like 100/min",
            pattern="^([1-9][0-9]*(req)?/(s|min|hour))?$",
        ),
    ] = ""
    models: Annotated[str, _s("Models its agents may use, separated by commas; empty for all.")] = ""
    weight: Annotated[float, _s("Share of the backend beside other tenants.", gt=0, le=1000)] = 1
    cache_group: Annotated[str, _s("Tenants of one group share a prefix cache; empty: the tenant's own.")] = ""
    cloud: Annotated[
        str,
        _s(
            "Narrows [inference] cloud for its agents; empty: as there.",
            pattern="^(never|asked|fallback)?$",
            expected="one of never, asked, fallback",
        ),
    ] = ""
    tokens_per_day: Annotated[
        int, _s("Tokens a day of all its agents together, in and out; 0: no limit.", unit="tokens", ge=0)
    ] = 0
    tokens_per_month: Annotated[int, _s("The same for a month.", unit="tokens", ge=0)] = 0
    cloud_tokens_per_day: Annotated[
        int, _s("Tokens a day of its requests that leave the box; 0: no limit.", unit="tokens", ge=0)
    ] = 0

    @property
    def budget(self) -> TokenLimits:
        return TokenLimits(self.tokens_per_day, self.tokens_per_month, self.cloud_tokens_per_day)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All sections, with defaults."""

    inference: InferenceSection = InferenceSection()
    proxy: Proxy = Proxy()
    grammar_llama: GrammarLlama = GrammarLlama()
    grammar_ollama: GrammarOllama = GrammarOllama()
    grammar_vllm: GrammarVllm = GrammarVllm()
    grammar_remote: GrammarRemote = GrammarRemote()
    sleep: Sleep = Sleep()
    agents: Agents = Agents()
    sandbox: Sandbox = Sandbox()
    daemon: DaemonSection = DaemonSection()
    api: Api = Api()
    runner: RunnerSection = RunnerSection()
    pool: PoolSection = PoolSection()
    budget: BudgetSection = BudgetSection()
    lease: LeaseSection = LeaseSection()
    jobs: JobsSection = JobsSection()
    governance: GovernanceSection = GovernanceSection()
    registry: RegistrySection = RegistrySection()
    adapters: AdaptersSection = AdaptersSection()
    images: ImagesSection = ImagesSection()
    comfyui: ComfyuiSection = ComfyuiSection()
    tenants: dict[str, TenantRow] = {}
    models: dict[str, ModelRow] = {}
    """`[model NAME]` of hive.conf, and the files of models.d (hive/backends/entries.py makes entries of them)."""
    tasks: dict[str, TaskRow] = {}
    """`[task NAME]`."""
    templates: dict[str, TemplateRow] = {}
    """`[template NAME]` of hive.conf, and the files of templates.d."""
    fields: dict[str, dict[str, str]] = {}
    """`[fields TARGET]`: field → its line (field_rules.py)."""


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "inference": InferenceSection,
    "proxy": Proxy,
    "grammar_llama": GrammarLlama,
    "grammar_ollama": GrammarOllama,
    "grammar_vllm": GrammarVllm,
    "grammar_remote": GrammarRemote,
    "sleep": Sleep,
    "agents": Agents,
    "sandbox": Sandbox,
    "daemon": DaemonSection,
    "api": Api,
    "runner": RunnerSection,
    "pool": PoolSection,
    "budget": BudgetSection,
    "lease": LeaseSection,
    "jobs": JobsSection,
    "governance": GovernanceSection,
    "registry": RegistrySection,
    "adapters": AdaptersSection,
    "images": ImagesSection,
    "comfyui": ComfyuiSection,
}


class Variable(msgspec.Struct, frozen=True):
    """An environment name of the original specification that belongs to no key of hive.conf."""

    name: str
    pattern: str
    expected: str
    sentence: str
    in_effect: bool = False


VARIABLES = (
    Variable(
        "REDIS_URL",
        r"(redis|rediss|unix)://\S+",
        "redis://HOST:PORT",
        "Redis to use instead of Hive's own.",
        in_effect=True,
    ),
    Variable(
        "HIVE_API_URL",
        r"https?://\S+",
        "http://HOST:PORT",
        "Where the proxy asks for a wake, by HTTP, while its link to the daemon is down.",
        in_effect=True,
    ),
    Variable(
        "HIVE_INTERNAL_TOKEN",
        r"[!-~]+",
        "printable characters without spaces",
        "Token of the operator; made and kept in the state directory where unset.",
        in_effect=True,
    ),
    Variable(
        "MODEL_BOSS_ALLOW_CLOUD_FALLBACK",
        "(?i:true|false|yes|no|on|off|1|0)",
        "true or false",
        "At Hive's first start alone: what [inference] cloud is then, `fallback` or `asked`.",
        in_effect=True,
    ),
    Variable(
        "QUEUE_TIMEOUT_MS",
        "[1-9][0-9]{0,8}",
        "a whole number of milliseconds",
        "`proxy.queue_wait_s`, in milliseconds.",
        in_effect=True,
    ),
    Variable(
        "ENABLE_MULTI_TENANT",
        "(?i:true|yes|on|1)",
        "true: tenants are always told apart",
        "Of the original specification: it is always so.",
        in_effect=True,
    ),
    Variable(
        "ENABLE_METRICS",
        "(?i:true|yes|on|1)",
        "true: there are always metrics",
        "Of the original specification: it is always so.",
        in_effect=True,
    ),
    Variable(
        "LOG_LEVEL",
        "(?i:debug|info|warning|error)",
        "debug, info, warning or error",
        "The least that services write.",
        in_effect=True,
    ),
    Variable(
        "LOG_FORMAT",
        "(?i:text|json)",
        "text or json",
        "The form in which services write, where no journal reads it.",
        in_effect=True,
    ),
    Variable(
        "HF_HOME",
        ".*",
        "a directory",
        "Of the original specification: Hive downloads nothing; `MODEL_BASE_PATH` is where it has models.",
    ),
    Variable(
        "METRICS_PORT",
        "[0-9]{1,5}",
        "a port",
        "Of the original specification: metrics are at the ports of the runner and of the REST API.",
    ),
)
"""Each may hold a secret: `hive config show` masks them."""
NO_SETTINGS = frozenset({"HIVE_PROXY_SOCKET", "HIVE_API_URL"})
"""Environment names that look like a setting's and are none: the first is an agent's, the other one of VARIABLES."""


class Paths(msgspec.Struct, frozen=True):
    """The directories of one Hive: `state` survives, `runtime` holds sockets.

    `apart`: each service is a user of its own and has a directory of its own in both. A unix socket path has at most
    107 bytes (sun_path), hence the short names.
    """

    state: Path
    runtime: Path
    apart: bool = False

    def _state_of(self, service: str) -> Path:
        return self.state / service if self.apart else self.state

    def _runtime_of(self, service: str) -> Path:
        return self.runtime / service if self.apart else self.runtime

    @property
    def database(self) -> Path:
        return self._state_of("daemon") / "hive.db"

    @property
    def responses(self) -> Path:
        """Responses that agents had kept: prompts and answers, so in no backup that does not ask for it."""
        return self._state_of("daemon") / "responses.db"

    @property
    def spool(self) -> Path:
        """Usage events not yet committed, one file per proxy epoch."""
        return self.state / "spool"

    @property
    def jobs(self) -> Path:
        """Directory of the daemon's own: orders and output of model jobs, which are prompts and answers."""
        return self._state_of("daemon") / "jobs"

    @property
    def box_key(self) -> Path:
        return self._state_of("daemon") / "box.key"

    @property
    def internal_token(self) -> Path:
        return self._state_of("daemon") / "internal.token"

    @property
    def adapters(self) -> Path:
        """The daemon's own, readable for inference servers: adapters that are installed, by name and digest."""
        return self.state / "adapters"

    def adapter_keys(self, setting: str) -> Path:
        """Directory of the keys that adapters are signed with: `[adapters] keys_dir`, else beside the configuration of
        an installed Hive, else in the state of `hive up`."""
        beside = Path("/etc/hive") if self.apart else self.state
        return Path(setting) if setting else beside / "adapter-keys"

    @property
    def sandbox_table(self) -> Path:
        """The helper's own table, a file for each agent: what it started, by pid, start time and boot id."""
        return self._state_of("sandbox") / "sandbox.d"

    @property
    def sandbox_lock(self) -> Path:
        """Held by the helper of this state directory."""
        return self._state_of("sandbox") / "sandbox.lock"

    @property
    def log_pipes(self) -> Path:
        """Directory of the pipes from agents' output to their logs; it outlives the helper, and sockets'
        directories."""
        return self._state_of("sandbox") / "log-pipes"

    @property
    def redis_dir(self) -> Path:
        return self.state / "redis"

    def home(self, agent: str) -> Path:
        return self.state / "agents" / agent

    def log(self, agent: str) -> Path:
        return self.state / "logs" / f"{agent}.log"

    @property
    def api_socket(self) -> Path:
        return self._runtime_of("daemon") / "hive.sock"

    @property
    def link_socket(self) -> Path:
        """The socket at which the daemon listens for the proxy."""
        return self._runtime_of("daemon") / "link.sock"

    @property
    def sandbox_socket(self) -> Path:
        """The socket at which the helper listens for daemon, proxy and `hive up`."""
        return self._runtime_of("sandbox") / "sandbox.sock"

    @property
    def lease_socket(self) -> Path:
        """The helper's own, for people: who was granted a lease comes in there."""
        return self._runtime_of("sandbox") / "lease.sock"

    @property
    def lease_records(self) -> Path:
        """The helper's own: each lease that was granted, until its end was booked."""
        return self._state_of("sandbox") / "leases.d"

    @property
    def redis_socket(self) -> Path:
        return self._runtime_of("redis") / "redis.sock"

    @property
    def admin_socket(self) -> Path:
        """The proxy's own: readiness and metrics."""
        return self._runtime_of("proxy") / "proxy.sock"

    @property
    def runner_socket(self) -> Path:
        """The proxy's own: the runner API, and inference for trusted clients."""
        return self._runtime_of("proxy") / "runner.sock"

    @property
    def job_entry_socket(self) -> Path:
        """The proxy's own: where the process of model jobs asks."""
        return self._runtime_of("proxy") / "jobs.sock"

    @property
    def job_link_socket(self) -> Path:
        """The socket at which systemd listens for the daemon, and starts the process of model jobs; where installed."""
        return self.runtime.with_name(f"{self.runtime.name}-jobs") / "link.sock"

    @property
    def slot_sockets(self) -> Path:
        """Directory of the directories in which the servers of the pool listen; no server may write in it."""
        return self.runtime.with_name(f"{self.runtime.name}-model") if self.apart else self.runtime / "m"

    def slot_socket(self, slot: str) -> Path:
        """The socket of a slot's server, in a directory of its own. 107 bytes hold it: a slot's id has at most 32.
        llama-server takes for a socket what ends with `.sock`, and anything else for a host."""
        return self.slot_sockets / slot / "s.sock"

    def slot_socket_before(self, slot: str) -> Path:
        """The socket of a server that was started when all of them had one directory: it serves on until it stops."""
        shared = self.runtime.with_name(f"{self.runtime.name}-inference") if self.apart else self.runtime / "m"
        return shared / f"{slot}.sock"

    def slot_notify(self, slot: str) -> Path:
        """The socket at which the helper hears what a slot's supervisor says of it, where no systemd does."""
        return self.slot_sockets / f"{slot}.up"

    @property
    def slot_grants(self) -> Path:
        """Directory of the grants that the helper writes and the slots' supervisors read."""
        return self.runtime / "pool"

    def slot_grant(self, slot: str) -> Path:
        return self.slot_grants / f"{slot}.json"

    @property
    def slot_records(self) -> Path:
        """The helper's own: each slot's server that it started as a session, by pid, start time and boot id."""
        return self._state_of("sandbox") / "slots.d"

    @property
    def slots(self) -> Path:
        """Directory of what llama-servers of an installed Hive have read for agents that sleep."""
        return self.state / "slots"

    @property
    def slot_state(self) -> Path:
        """Directory in which the servers of the pool cache."""
        return self.state / "inference"

    def agent_socket(self, agent: str) -> Path:
        """The agent's own listener: a connection there is this agent's."""
        return self.runtime / "a" / f"{agent[:8]}.sock"
