"""Agent specs: what is refused and why, and that TOML comes back as it went."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.agents.spec import PROMPT_MAX_BYTES, check, check_toml, find_program, from_toml, to_toml
from hive.domain import AgentSpec, DockerSpec, RestartPolicy, RuntimeKind, Tier
from hive.errors import BadRequest


def anywhere(name: str) -> str | None:
    return name if name.startswith("/") else f"/usr/bin/{name}"


GOOD: dict[str, Any] = {"name": "alice", "command": ["/bin/true"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Alice"}, "name: 'Alice' is no name"),
        ({"name": ""}, "name: '' is no name"),
        ({"name": "../etc"}, "name: '../etc' is no name"),
        ({"name": "a" * 41}, "is no name"),
        ({"name": "alice\n"}, "is no name"),
        ({"tenant": "T"}, "tenant: 'T' is no name"),
        ({"command": []}, "command: empty"),
        ({"command": [""]}, "command: empty"),
        ({"command": ["./agent"]}, "command: './agent' is relative"),
        ({"command": ["/bin/true", "a\0b"]}, "command: contains a NUL"),
        ({"command": ["/bin/true", "x" * 131073]}, "command: longer than"),
        ({"command": ["/bin/true", "\udcff"]}, "command: not UTF-8"),
        ({"runtime": "docker"}, "docker: missing"),
        ({"docker": {"image": "x"}}, "docker: the runtime is process"),
        ({"runtime": "docker", "docker": {"image": "a b"}}, "docker: image: 'a b' is no image"),
        ({"runtime": "docker", "docker": {"image": "a", "mounts": ["/etc/../x:/y"]}}, "docker: mounts: "),
        ({"runtime": "docker", "docker": {"image": "a", "tmpfs": ["tmp"]}}, "docker: tmpfs: 'tmp' is not absolute"),
        ({"runtime": "firecracker"}, "firecracker: missing"),
        ({"runtime": "firecracker", "firecracker": {"kernel": "k", "rootfs": "/r"}}, "firecracker: kernel: 'k' is not"),
        (
            {"runtime": "firecracker", "firecracker": {"kernel": "/k", "rootfs": "/r"}},
            "command: a virtual machine runs what its image says",
        ),
        (
            {"runtime": "firecracker", "command": [], "firecracker": {"kernel": "/k", "rootfs": "/r", "vcpus": 0}},
            "firecracker: vcpus: 0 is not from 1 to 32",
        ),
        ({"deepest": "awake"}, "deepest: light or deep"),
        ({"inbox": "inbox"}, "inbox: 'inbox' is no path"),
        ({"limits": {"memory_mb": 1}}, "limits: memory_mb: 1 is not from 4"),
        ({"limits": {"cpu": 0.0}}, "limits: cpu: 0 is not from 0.01"),
        ({"egress": ["everywhere"]}, "egress: 'everywhere' does not appear to be an IPv4 or IPv6 network"),
        ({"port": 0}, "port: 0 is not from 1 to 65535"),
        ({"port": 65536}, "port: 65536"),
        ({"cid": 2}, "cid: 2 is not from 3 to 4294967294"),
        ({"cid": -1}, "cid: -1"),
        ({"cid": 2**32 - 1}, "cid: 4294967295"),
        ({"idle_s": -1.0}, "idle_s: -1"),
        ({"idle_s": float("nan")}, "idle_s: nan"),
        ({"idle_s": float("inf")}, "idle_s: inf"),
        ({"model": "two words"}, "model: expected"),
        ({"model": ""}, "model: expected"),
        ({"env": {"1A": "x"}}, "env: '1A' is no environment name"),
        ({"env": {"": "x"}}, "is no environment name"),
        ({"env": {"A=B": "x"}}, "is no environment name"),
        ({"env": {"HIVE_AGENT": "x"}}, "env: HIVE_AGENT is set by Hive"),
        ({"env": {"OPENAI_API_KEY": "x"}}, "env: OPENAI_API_KEY is set by Hive"),
        ({"env": {"OLLAMA_HOST": "x"}}, "env: OLLAMA_HOST is set by Hive"),
        ({"env": {"A": "x\0"}}, "env: A: contains a NUL"),
        ({"env": {"A": "x" * 70000}}, "env: larger than"),
        ({"system_prompt": ""}, "system_prompt: empty"),
        ({"system_prompt": "a\0"}, "system_prompt: contains a NUL"),
        ({"system_prompt": "é" * (PROMPT_MAX_BYTES // 2 + 1)}, "system_prompt: longer than 262144 bytes"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(msgspec.convert({**GOOD, **change}, AgentSpec), find=anywhere)
    assert said in caught.value.message


@pytest.mark.parametrize(("name", "near"), [("My Agent", "my-agent"), ("a" * 41, "a" * 40), ("42", "alice-2")])
def test_what_is_no_name_is_answered_with_one_that_is(name: str, near: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check(msgspec.convert({**GOOD, "name": name}, AgentSpec), find=anywhere)
    assert refused.value.hint == f"`{near}` would do"
    check(msgspec.convert({**GOOD, "name": near}, AgentSpec), find=anywhere)


@pytest.mark.parametrize(
    "change",
    [
        *({"idle_s": 0.0}, {"port": 1}, {"port": 65535}, {"env": {"A_1": ""}}, {"model": "a/b:c"}),
        *({"cid": 3}, {"cid": 2**32 - 2}),
        {"system_prompt": "é" * (PROMPT_MAX_BYTES // 2)},
    ],
)
def test_the_edges_of_what_is_allowed_are_allowed(change: dict[str, Any]) -> None:
    spec = AgentSpec(**{**GOOD, **change})
    assert check(spec, find=anywhere) == spec


def test_a_program_without_a_slash_is_looked_up() -> None:
    assert check(AgentSpec(name="a", command=["sh", "-c", "true"])).command[0] in ("/usr/bin/sh", "/bin/sh")


def test_a_program_that_does_not_exist_is_refused() -> None:
    for name in ("/nonexistent/program", "no-such-program-here", "/etc/passwd", "/etc"):
        assert find_program(name) is None
        with pytest.raises(BadRequest, match="command: "):
            check(AgentSpec(name="a", command=[name]))


def test_a_program_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    """A file without its x bit was `no such program`, looked for in a PATH that had nothing to do with it."""
    (tmp_path / "script").write_text("#!/bin/sh\n")
    with pytest.raises(BadRequest, match="is not executable") as caught:
        check(AgentSpec(name="a", command=[str(tmp_path / "script")]))
    assert "chmod" in caught.value.hint
    with pytest.raises(BadRequest, match="is a directory"):
        check(AgentSpec(name="a", command=[str(tmp_path)]))


SCRIPTS: list[list[str]] = [
    ["-m", "agent", "-v"],
    ["-c", "print(1)"],
    ["python3", "-m", "agent"],
    ["python", "-O", "/a"],
]


@pytest.mark.parametrize("command", SCRIPTS)
def test_the_command_of_a_templates_agent_is_for_its_interpreter(command: list[str]) -> None:
    """The daemon alone knows which interpreter that is: no name is looked up here."""
    spec = AgentSpec(name="a", command=command, template="lg")
    assert check(spec) == spec


def test_the_script_of_a_templates_agent_is_there_and_any_other_program_too(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("")
    for command in ([str(script), "-v"], ["python", str(script)]):
        assert check(AgentSpec(name="a", command=command, template="lg")).command == command
    assert check(AgentSpec(name="a", command=["sh"], template="lg")).command[0] in ("/usr/bin/sh", "/bin/sh")
    (tmp_path / "directory.py").mkdir()
    for command, said in (
        (["agent.py"], "'agent.py' is relative"),
        (["python", "agent.py"], "'agent.py' is relative"),
        ([f"{tmp_path}/gone.py"], "there is no"),
        ([f"{script}/x.py"], "there is no"),
        ([f"{tmp_path}/directory.py"], "is a directory"),
        ([], "command: empty"),
        (["/nowhere/node", "x.js"], "no such program"),
        (["-c", "a\0b"], "contains a NUL"),
        (["-c", "x" * 200_000], "longer than"),
    ):
        with pytest.raises(BadRequest, match=said):
            check(AgentSpec(name="a", command=command, template="lg"))
    docker = {"runtime": RuntimeKind.DOCKER, "docker": DockerSpec(image="debian:12")}
    with pytest.raises(BadRequest, match="template: the runtime is docker"):
        check(AgentSpec(**{"name": "a", "template": "lg", **docker}))  # type: ignore[arg-type]


def test_the_keys_of_the_original_specification_are_accepted() -> None:
    spec = from_toml(
        'name = "a"\ncommand = ["x"]\ninferenceTier = "high"\npreferredModel = "m"\nautoSleepIdleSeconds = 60\n'
    )
    assert (spec.tier, spec.model, spec.idle_s) == (Tier.HIGH, "m", 60.0)
    assert from_toml('name = "a"\ncommand = ["x"]\nvsockCID = 5\n').cid == 5
    assert from_toml('name = "a"\ncommand = ["x"]\nmodel = { name = "llama3.2:q8_0" }\n').model == "llama3.2:q8_0"


def test_the_original_specifications_json_is_accepted_with_its_prompt() -> None:
    spec = check_toml(
        '{"name": "a", "command": ["/bin/true"], "systemPrompt": "Be kind.\\n", "prewarmOnStart": true,\n'
        ' "model": {"name": "llama3.2:q8_0"}}'
    )
    assert (spec.system_prompt, spec.prewarm_on_start, spec.model) == ("Be kind.\n", True, "llama3.2:q8_0")
    assert from_toml(to_toml(spec)) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "a"\ncommand = [\n', "(at end of document)"),
        ('name = "a"\ncommand = ["x"]\nporte = 80\n', "line 3: porte: no such key; did you mean `port`?"),
        ('name = "a"\ncommand = ["x"]\n\nport = "80"\n', "line 4: port: expected a whole number, got a string"),
        ('name = "a"\ncommand = ["x"]\ncid = "5"\n', "line 3: cid: expected a whole number, got a string"),
        ('name = "a"\ncommand = ["x"]\ntier = "best"\n', "line 3: tier: unknown value 'best'"),
        ('name = "a"\ncommand = "x"\n', "line 2: command: expected an array, got a string"),
        ('name = "a"\ncommand = ["x"]\n[env]\nA = 1\n', "line 3: env: expected a string, got a whole number"),
        ('name = "a"\ncommand = ["x"]\nmodel = "m"\npreferredModel = "n"\n', "line 4: preferredModel: says the same"),
        ('name = "a"\ncommand = ["x"]\nsystemPrompt = 1\n', "system_prompt: expected a string, got a whole number"),
        ('{"name": "a",}', "no JSON: "),
        ('command = ["x"]\n', "required key `name` is missing"),
        ("a = " + "[" * 100000, "no TOML"),
        ("x" * 1048577, "larger than"),
    ],
)
def test_bad_toml_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        from_toml(text)
    assert said in caught.value.message


names = st.from_regex(r"[a-z][a-z0-9-]{0,39}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
specs = st.builds(
    AgentSpec,
    name=names,
    command=st.lists(texts.filter(bool), min_size=1, max_size=4),
    env=st.dictionaries(st.text(string.ascii_uppercase, min_size=1, max_size=8), texts, max_size=3),
    port=st.none() | st.integers(1, 65535),
    tier=st.sampled_from(Tier),
    tenant=names,
    model=st.none() | st.text(string.ascii_letters + "/:._-", min_size=1, max_size=20),
    restart=st.sampled_from(RestartPolicy),
    idle_s=st.none() | st.floats(0, 1e6),
    cid=st.none() | st.integers(3, 2**32 - 2),
    system_prompt=st.none() | texts,
    prewarm_on_start=st.booleans(),
)


@given(specs)
def test_what_is_exported_can_be_applied_again(spec: AgentSpec) -> None:
    assert from_toml(to_toml(spec)) == spec


@given(st.text(max_size=200))
def test_any_text_is_a_spec_or_a_refusal(text: str) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(from_toml(text), AgentSpec)


@given(specs)
def test_a_checked_spec_is_checked_for_good(spec: AgentSpec) -> None:
    try:
        checked = check(spec, find=anywhere)
    except BadRequest:
        return
    assert check(checked, find=anywhere) == checked
