"""hive.conf, the environment and the flags."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import ConfigError
from hive.settings.file import load, load_text, parse, read
from hive.settings.rows import SettingRow, rows_of
from hive.settings.table import SECTIONS, VARIABLES, Settings

SEED_SNIPPET = """\
[inference]
enabled = auto
backend = ollama
port = 11434
vsock_port = 11434
default_model = llama3.2
auto_sleep_enabled = true
auto_sleep_idle_seconds = 300
token_tracking = true
quantization_routing = false
tier_low_models =
tier_medium_models =
tier_high_models =
vllm_max_sequences = 64
vllm_gpu_memory_util = 0.90
vllm_prefix_caching = true
vllm_speculative_model =
"""
"""§12 of the original specification, to the letter."""

ROWS = [row for section, struct in SECTIONS.items() for row in rows_of(section, struct).values()]


def refused(text: str, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(text, path=Path("/etc/hive/hive.conf"), env=env)
    assert caught.value.exit_code == 2
    return caught.value.message


def test_the_snippet_of_the_original_specification_loads_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "hive.conf"
    file.write_text(SEED_SNIPPET)
    loaded = load(file, env={})
    inference = loaded.settings.inference
    assert (inference.backend, inference.default_model, inference.auto_sleep_idle_seconds) == (
        "ollama",
        "llama3.2",
        300,
    )
    assert inference.vllm_gpu_memory_util == 0.9
    assert inference.tier_low_models == ""
    assert loaded.settings.proxy == Settings().proxy
    assert str(loaded.origins["inference.backend"]) == f"file {file}:3"
    assert "proxy.port" not in loaded.origins


def test_the_snippet_names_every_key_the_inference_section_had_there() -> None:
    keys = {line.key for line in read(SEED_SNIPPET, "x", [])[0]}
    added = re.compile(
        r"host|vllm_scheduling_policy|(vllm|ollama|llama|whisper|diffusers)_(program|models?|parallel|context|cache_ram_mb)"
        r"|switch_\w+|aliases|backend_\w+|models_dir|vllm_adapters|speculative\w*|llama_speculative_model|llama_slot\w+|cloud"
        r"|tier_(allow|caps)_\w+|slots_per_replica|cluster_poll_s|first_byte_s"
    )
    assert keys == {key for key in rows_of("inference", SECTIONS["inference"]) if not added.fullmatch(key)}


def test_flag_goes_before_environment_before_file_before_default() -> None:
    text = "[inference]\nport = 1\n"
    env = {"INFERENCE_PORT": "2"}
    flags = {"inference.port": 3, "proxy.port": None}
    assert load_text("", env={}).settings.inference.port == 11434
    assert load_text(text, env={}).settings.inference.port == 1
    assert load_text(text, env=env).settings.inference.port == 2
    loaded = load_text(text, env=env, flags=flags)
    assert (loaded.settings.inference.port, str(loaded.origins["inference.port"])) == (3, "flag")
    assert loaded.settings.proxy.port == 11435


def test_an_empty_variable_is_an_unset_one() -> None:
    loaded = load_text("[inference]\nport = 1\n", env={"INFERENCE_PORT": "", "REDIS_URL": ""})
    assert loaded.settings.inference.port == 1


@pytest.mark.parametrize(
    ("name", "value", "section", "key", "expected"),
    [
        ("INFERENCE_BACKEND", "vllm", "inference", "backend", "vllm"),
        ("INFERENCE_HOST", "10.0.0.1", "inference", "host", "10.0.0.1"),
        ("INFERENCE_PORT", "8000", "inference", "port", 8000),
        ("VSOCK_PORT", "5", "inference", "vsock_port", 5),
        ("AUTO_SLEEP_ENABLED", "FALSE", "inference", "auto_sleep_enabled", False),
        ("AUTO_SLEEP_IDLE_SECONDS", "1.5", "inference", "auto_sleep_idle_seconds", 1.5),
    ],
)
def test_the_environment_names_of_the_original_specification_are_known(
    name: str, value: str, section: str, key: str, expected: object
) -> None:
    loaded = load_text("", env={name: value})
    assert getattr(getattr(loaded.settings, section), key) == expected
    assert str(loaded.origins[f"{section}.{key}"]) == f"environment {name}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[inference]\nprot = 1\n", "/etc/hive/hive.conf:2: [inference] prot: no such key; did you mean `port`?"),
        ("[proxy]\nzzz = 1\n", "known are port, ingress_port,"),
        ("[inferense]\nport = 1\n", "/etc/hive/hive.conf:1: [inferense]: no such section; did you mean `inference`?"),
        ("\n[inference]\nport = 80a\n", ":3: [inference] port: expected a whole number from 1 to 65535, found '80a'"),
        ("[inference]\nport = 0\n", "found '0'"),
        ("[inference]\nport =\n", "found ''"),
        ("[inference]\nport = 99999999999999999999999\n", "expected a whole number"),
        ("[inference]\ntoken_tracking = maybe\n", "expected true or false, found 'maybe'"),
        ("[inference]\nbackend = olama\n", "expected one of auto, ollama, vllm, llama, demo, remote, found 'olama'"),
        ("[inference]\nvllm_gpu_memory_util = 1.1\n", "expected a number above 0 and at most 1, found '1.1'"),
        ("[inference]\nauto_sleep_idle_seconds = nan\n", "found 'nan'"),
        ("[inference]\nauto_sleep_idle_seconds = inf\n", "found 'inf'"),
        ("[inference]\nport = 1\nport = 2\n", ":3: [inference] port: already set in line 2"),
        ("[inference]\nport\n", ":2: expected `key = value`"),
        ("port = 1\n", ":1: expected a [section] before the first key"),
        ("[inference\nport = 1\n", ":1: expected [section]"),
        ("[]\n", ":1: expected [section]"),
        ("[inference]\nhost = a\x1bb\n", ":2: a control character"),
        ("[tenant]\n", "[tenant]: a tenant's name is a letter"),
        ("[tenant A/B]\nweight = 2\n", "[tenant A/B]: a tenant's name is a letter"),
        ("[tenant a]\nrate_limit = 100/fortnight\n", "expected a rate like 100/min, found '100/fortnight'"),
        ("[tenant a]\nwieght = 2\n", "did you mean `weight`?"),
    ],
)
def test_what_is_wrong_is_said_with_line_and_key_and_what_was_expected(text: str, said: str) -> None:
    assert said in refused(text)


def test_every_mistake_is_named_at_once() -> None:
    said = refused("[inference]\nport = x\n[proxi]\nport = 1\n", INFERENCE_HOST="h", AUTO_SLEEP_ENABLED="x").split("\n")
    assert len(said) == 3
    assert said[0].startswith("/etc/hive/hive.conf:2: [inference] port")
    assert said[1].startswith("/etc/hive/hive.conf:3: [proxi]")
    assert said[2] == "AUTO_SLEEP_ENABLED: expected true or false, found 'x'"


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_variables_without_a_key_are_checked_and_their_value_is_not_repeated(variable: msgspec.Struct) -> None:
    name = variable.name  # type: ignore[attr-defined]
    if variable.pattern == ".*":  # type: ignore[attr-defined]
        pytest.skip("any text will do")
    assert refused("", **{name: "s3 cret"}) == f"{name}: expected {variable.expected}"  # type: ignore[attr-defined]


def test_tenants_are_read_by_name() -> None:
    loaded = load_text("[tenant acme]\nrate_limit = 100/min\nmodels = a,b\nweight = 2.5\n[tenant b]\n", env={})
    assert loaded.settings.tenants["acme"].weight == 2.5
    assert loaded.settings.tenants["b"].rate_limit == ""


def test_comments_blank_lines_and_spelling_of_ini_are_taken() -> None:
    text = "\ufeff# a comment\r\n; another\r\n\r\n  [inference]  \r\nport: 1\r\n   host=a = b\r\n"
    loaded = load_text(text, env={})
    assert (loaded.settings.inference.port, loaded.settings.inference.host) == (1, "a = b")


def test_a_flag_out_of_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"proxy\.port: expected a whole number from 0 to 65535, found 70000"):
        load_text("", env={}, flags={"proxy.port": 70000})


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[inference]\nhost = \xff\n", "hive.conf:2: not UTF-8"), (b"#" * 1048577, "larger than")],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "hive.conf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load(file, env={})


def test_a_file_that_is_not_there_or_is_a_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.conf", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load(path, env={})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}.{row.key}")
def test_every_setting_has_a_sentence_and_a_default_that_is_legal(row: object) -> None:
    assert isinstance(row, SettingRow)
    assert row.sentence.endswith(".")
    text = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
    assert parse(row, text) == row.default
    assert row.expected


def test_no_environment_name_belongs_to_two_settings() -> None:
    names = [name for row in ROWS for name in row.variables] + [variable.name for variable in VARIABLES]
    assert len(names) == len(set(names))


def text_of(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def another(row: SettingRow) -> str:
    """A legal value that is not the default."""
    if row.kind is bool:
        return text_of(not row.default)
    if row.kind is str:
        candidates = [
            "/other",
            "10.0.0.7",
            "Europe/Berlin",
            "other",
            "https://h/v1",
            "http://127.0.0.1:8188",
            "cpu",
            "9/min",
            *row.expected.removeprefix("one of ").split(", "),
        ]
    else:
        candidates = ["0.5", "0.3", "5000", "7", "1"]
    for candidate in candidates:
        try:
            if parse(row, candidate) != row.default:
                return candidate
        except ValueError:
            continue
    raise AssertionError(f"{row.section}.{row.key} has one legal value only")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}.{row.key}")
def test_every_setting_can_be_given_by_the_environment(row: SettingRow) -> None:
    name = f"HIVE_{row.section}_{row.key}".upper()
    loaded = load_text("", env={name: another(row)})
    assert getattr(getattr(loaded.settings, row.section), row.key) == parse(row, another(row)) != row.default
    assert str(loaded.origins[f"{row.section}.{row.key}"]) == f"environment {name}"


def test_of_two_names_of_one_setting_hives_own_counts() -> None:
    env = {"HIVE_INFERENCE_PORT": "2", "INFERENCE_PORT": "1"}
    loaded = load_text("[inference]\nport = 3\n", env=env)
    assert loaded.settings.inference.port == 2
    assert str(loaded.origins["inference.port"]) == "environment HIVE_INFERENCE_PORT"


def test_a_name_spelled_like_a_settings_is_refused_if_there_is_none() -> None:
    assert refused("", HIVE_PROXY_PROT="1") == "HIVE_PROXY_PROT: no such setting; did you mean `HIVE_PROXY_PORT`?"
    said = refused("", HIVE_SLEEP_XYZZYXYZZYXYZZY="1")
    assert said == "HIVE_SLEEP_XYZZYXYZZYXYZZY: no such setting; hive config show lists them"
    assert refused("", HIVE_PROXY_PORT="tcp://10.0.0.1:1").startswith("HIVE_PROXY_PORT: expected a whole number")


def test_what_an_agent_finds_in_its_environment_is_no_setting() -> None:
    assert load_text("", env={"HIVE_PROXY_SOCKET": "/run/hive/agent.sock", "HIVE_SOCKET": "/s"}).origins == {}


@given(st.text(max_size=300))
def test_any_text_is_settings_or_a_refusal_with_a_line(text: str) -> None:
    try:
        loaded = load_text(text, env={})
    except ConfigError as error:
        said = error.message
    else:
        said = "" if isinstance(loaded.settings, Settings) else "no settings"
    assert all(line.startswith("hive.conf:") for line in said.split("\n") if line)


@given(st.sampled_from(ROWS), st.text(max_size=20).filter(lambda text: text.isprintable()))
def test_any_value_is_its_type_or_a_refusal(row: object, text: str) -> None:
    assert isinstance(row, SettingRow)
    try:
        loaded = load_text(f"[{row.section}]\n{row.key} = {text}\n", env={})
    except ConfigError as error:
        assert row.expected in error.message  # noqa: PT017 - either outcome is right
        return
    assert type(getattr(getattr(loaded.settings, row.section), row.key)) is row.kind


def test_rows_of_fields_are_read_by_endpoint_and_folded_name() -> None:
    text = "[fields /api/chat]\nOptions.Num_CTX = allow\nn : clamp 1..2\n[fields  *]\nuser = drop low; allow high\n"
    loaded = load_text(text, env={})
    assert loaded.settings.fields == {
        "/api/chat": {"options.num_ctx": "allow", "n": "clamp 1..2"},
        "*": {"user": "drop low; allow high"},
    }
    assert str(loaded.origins["fields /api/chat.options.num_ctx"]) == "file hive.conf:2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[fields /v1/chat/completion]\nn = drop\n",
            ":1: [fields /v1/chat/completion]: no endpoint with fields; did you mean `/v1/chat/completions`?",
        ),
        ("[fields]\nn = drop\n", "[fields]: no such section"),
        ("[feilds *]\nn = drop\n", "[feilds *]: no such section"),
        ("[fields *]\nn = dorp\n", "/etc/hive/hive.conf:2: [fields *] n: no such rule: dorp; did you mean `drop`?"),
        ("[fields *]\nn = drop\nN = allow\n", ":3: [fields *] N: already set as n"),
        ("[fields *]\na. = drop\n", "[fields *] a.: expected a field, or `field.inner` for one inside an object"),
    ],
)
def test_what_is_wrong_with_a_field_is_said_with_line_and_key(text: str, said: str) -> None:
    assert said in refused(text)


def test_a_tenants_rate_limit_comes_from_the_environment_too() -> None:
    file = "[tenant acme]\nrate_limit = 5/s\nweight = 2\n"
    env = {"TENANT_RATE_LIMIT_acme": "100req/min", "TENANT_RATE_LIMIT_community-x": "1/hour", "TENANT_RATE_LIMIT_y": ""}
    loaded = load_text(file, env=env)
    tenants = loaded.settings.tenants
    assert {name: row.rate_limit for name, row in tenants.items()} == {"acme": "100req/min", "community-x": "1/hour"}
    assert tenants["acme"].weight == 2
    assert str(loaded.origins["tenant acme.rate_limit"]) == "environment TENANT_RATE_LIMIT_acme"


def test_whatever_a_tenant_may_have_comes_from_the_environment_too() -> None:
    env = {"TENANT_MODELS_acme": "a,b", "TENANT_WEIGHT_acme": "3", "TENANT_CACHE_GROUP_b-2": "shared"}
    loaded = load_text("[tenant acme]\nweight = 2\n", env=env)
    assert (loaded.settings.tenants["acme"].models, loaded.settings.tenants["acme"].weight) == ("a,b", 3)
    assert loaded.settings.tenants["b-2"].cache_group == "shared"
    assert str(loaded.origins["tenant acme.weight"]) == "environment TENANT_WEIGHT_acme"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TENANT_RATE_LIMIT_Acme", "5/s", "a tenant's name is a letter"),
        ("TENANT_RATE_LIMIT_acme", "lots", "expected a rate like 100/min"),
    ],
)
def test_a_tenants_rate_limit_that_means_nothing_is_said(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_text("", env={name: value})


def test_the_apis_address_for_the_proxy_is_not_taken_for_a_setting_of_the_api() -> None:
    """It begins as the names of [api] do."""
    env = {"HIVE_API_URL": "http://127.0.0.1:3000", "HIVE_API_PORT": "3001", "HIVE_API_HOSTS": "a.lan, [fd00::1]"}
    assert load_text("", env=env).settings.api.port == 3001
    assert refused("", HIVE_API_PROT="1") == "HIVE_API_PROT: no such setting; did you mean `HIVE_API_PORT`?"


@pytest.mark.parametrize("text", ["hive.lan:443", "http://hive.lan", "a b", ",", "[::1", "*"])
def test_hosts_of_the_api_are_names_without_ports(text: str) -> None:
    assert "names without ports, separated by commas" in refused(f"[api]\nhosts = {text}\n")
