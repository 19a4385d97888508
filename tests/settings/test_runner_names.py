"""The environment names of a runner's container, as the original specification has them."""

from __future__ import annotations

import pytest

from hive.errors import ConfigError
from hive.settings.file import load_text

SEED = {
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/models/cache",
    "MODEL_BASE_PATH": "/models",
    "VLLM_ENABLE_PREFIX_CACHING": "true",
    "VLLM_MAX_MODEL_LEN": "32768",
    "VLLM_GPU_MEMORY_UTILIZATION": "0.9",
    "ENABLE_MULTI_TENANT": "true",
    "DEFAULT_RATE_LIMIT": "100req/min",
    "VERIFIED_OP_TOKEN_KEY_PATH": "/etc/safebox/model-api.key",
    "LOG_LEVEL": "info",
    "LOG_FORMAT": "json",
    "ENABLE_METRICS": "true",
    "METRICS_PORT": "9090",
    "MAX_QUEUE_DEPTH": "16",
    "QUEUE_TIMEOUT_MS": "30000",
    "TENANT_RATE_LIMIT_acme": "500req/min",
}
"""Word for word, but for one tenant's name: a hyphen is for `[tenant community-x]` of hive.conf."""


def test_those_of_the_specification_load_and_are_settings() -> None:
    settings = load_text("", env=SEED).settings
    inference, proxy = settings.inference, settings.proxy
    assert (inference.models_dir, inference.vllm_prefix_caching, inference.vllm_context) == ("/models", True, 32768)
    assert inference.vllm_gpu_memory_util == 0.9
    assert (proxy.queue_depth, proxy.queue_wait_s, proxy.tenant_rate_limit) == (16, 30.0, "100req/min")
    assert settings.governance.hmac_key_file == "/etc/safebox/model-api.key"
    assert settings.tenants["acme"].rate_limit == "500req/min"


def test_a_tenants_limit_of_all_is_the_default_one() -> None:
    assert load_text("", env={"TENANT_RATE_LIMIT_default": "50req/min"}).settings.proxy.tenant_rate_limit == "50req/min"


def test_hives_own_name_goes_before_one_in_another_unit() -> None:
    env = {"QUEUE_TIMEOUT_MS": "30000", "HIVE_PROXY_QUEUE_WAIT_S": "5"}
    assert load_text("", env=env).settings.proxy.queue_wait_s == 5.0


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"DEFAULT_RATE_LIMIT": "100req/min", "TENANT_RATE_LIMIT_default": "50req/min"}, "contradicts"),
        ({"ENABLE_MULTI_TENANT": "false"}, "tenants are always told apart"),
        ({"ENABLE_METRICS": "no"}, "there are always metrics"),
        ({"QUEUE_TIMEOUT_MS": "30s"}, "QUEUE_TIMEOUT_MS: expected a whole number of milliseconds"),
        ({"MAX_QUEUE_DEPTH": "-1"}, "MAX_QUEUE_DEPTH: expected a whole number"),
        ({"DEFAULT_RATE_LIMIT": "much"}, "DEFAULT_RATE_LIMIT: expected a rate like 100/min"),
        ({"LOG_LEVEL": "loud"}, "LOG_LEVEL: expected debug, info, warning or error"),
        ({"VLLM_MAX_MODEL_LEN": "long"}, "VLLM_MAX_MODEL_LEN: expected a whole number"),
    ],
)
def test_what_contradicts_itself_or_means_nothing_is_said_at_the_start(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_text("", env=env)
