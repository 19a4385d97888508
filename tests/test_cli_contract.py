"""Promises of every command: help with an example, --json, exit codes, its place in the man page."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from hive.adapters.keys import EcSecretKey
from hive.cli.entry import SERVICES
from hive.cli.lazy import CommandTable, LazyCommand, is_argument, load
from hive.cli.main import HIVE, main
from hive.governance.envelope import TokenEnvelope
from hive.governance.keys import new_secret_pem
from hive.governance.operation import Operation
from hive.store.database import Database
from tests.adapters.lora_files import peft_adapter, secret_pem, sign

MAN = "".join(page.read_text() for page in (Path(__file__).parents[1] / "man").glob("*.1.scd")).replace("\\", "")
"""The page that has it is held by test_man.py."""

Command = tuple[tuple[str, ...], LazyCommand]


def commands(group: CommandTable = HIVE, path: tuple[str, ...] = ()) -> Iterator[Command]:
    for name, entry in group.entries.items():
        if isinstance(entry, CommandTable):
            yield from commands(entry, (*path, name))
        else:
            yield (*path, name), entry


def groups(group: CommandTable = HIVE, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, entry in group.entries.items():
        if isinstance(entry, CommandTable):
            yield from groups(entry, (*path, name))


ALL = list(commands())


def each(found: list[Command]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("command", found, ids=[" ".join(path) for path, _ in found])


every_command = each(ALL)
every_talking_command = each([command for command in ALL if command[1].options == "client"])
every_local_command = each(
    # A density run takes minutes and root: tests/bench has one of its own.
    [command for command in ALL if command[1].options == "json" and command[0] != ("bench", "density")]
)

every_group = pytest.mark.parametrize("path", list(groups()), ids=lambda path: " ".join(("hive", *path)))


def flags(entry: LazyCommand, name: str) -> list[str]:
    return [flag for param in load(name, entry).params for flag in param.opts if flag.startswith("-")]


def test_every_command_of_the_issue_is_there() -> None:
    expected = (
        "up demo status top doctor run usage events ps version proxy daemon sandbox demo-backend run-backend run-model "
        "jobs sandbox-thaw explain "
        "agent-create agent-apply agent-edit agent-export agent-list agent-show agent-start agent-stop agent-restart "
        "agent-pause agent-resume agent-send agent-messages agent-responses agent-wake-at agent-keep-awake "
        "agent-logs agent-usage agent-remove agent-ls agent-ps agent-rm "
        "queue-list queue-show queue-cancel backend-status backend-list "
        "backend-switch backend-logs bench-sleep bench-density agent-exec "
        "model-list model-show model-refresh model-pull model-remove model-route model-prompts "
        "model-load model-unload model-pin model-unpin model-deployed model-logs pool-show pool-explain pool-import "
        "cache-show cache-flush task-list task-show task-route "
        "template-list template-show template-restart template-check "
        "lease-run lease-take lease-renew lease-release lease-list lease-show lease-end "
        "config-show config-check config-path config-set config-unset config-runtime logs backup restore capabilities "
        "token-create token-list token-revoke audit-list audit-verify install uninstall secrets-list secrets-rotate "
        "secrets-generate db-tables db-schema db-query "
        "adapter-list adapter-show adapter-pull adapter-load adapter-unload adapter-remove adapter-keys "
        "adapter-sign adapter-verify adapter-trust adapter-revoke "
        "job-list job-run job-show job-logs job-result job-cancel job-release "
        "op-keygen op-request op-sign op-show op-verify op-submit"
    )
    assert {"-".join(path) for path, _ in ALL} == set(expected.split())


@every_command
def test_help_ends_with_examples_of_this_command(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = command
    assert main([*path, "--help"]) == 0
    help_text = capsys.readouterr().out
    examples = help_text.partition("\n  Examples:\n")[2].splitlines()
    assert examples, help_text
    assert all(line.startswith("    ") for line in examples)
    assert any(line.strip().startswith(("hive", "git diff | hive")) for line in examples)


@every_command
def test_arguments_are_written_as_in_man_pages(command: Command) -> None:
    """Typer made `[[CHECK]...]...` of them in the usage line, and `[CHECK]... <list[str]>` below it."""
    path, entry = command
    loaded = load(path[-1], entry)
    context = loaded.context_class(loaded, info_name=path[-1])
    words = loaded.collect_usage_pieces(context)[1:]
    written = re.compile(r"(?!.*\.\.\.])([^][{}<>]+|\[[^][{}<>]+](\.\.\.)?)")
    assert [word for word in words if not written.fullmatch(word)] == []
    assert [name for param, name, _ in loaded.told(context) if is_argument(param)] == words


@every_group
def test_a_group_shows_its_commands_each_with_its_sentence(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*path, "--help"]) == 0
    text = capsys.readouterr().out
    group: CommandTable | LazyCommand = HIVE
    for name in path:
        assert isinstance(group, CommandTable)
        group = group.entries[name]
    assert isinstance(group, CommandTable)
    for name, entry in group.entries.items():
        assert (re.search(rf"^  {name} ", text, re.MULTILINE) is not None) != entry.hidden
    assert "Examples:" in text


WITH_DEFAULT = ("queue", "pool", "task", "template", "lease", "cache", "adapter", "job")
"""Groups that list something where no command is named."""


@pytest.mark.parametrize(
    "path",
    [path for path in groups() if not path or path[0] not in WITH_DEFAULT],
    ids=" ".join,
)
def test_a_group_alone_is_a_usage_error_that_shows_help(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(path) == 2
    out, err = capsys.readouterr()
    assert (out, "Usage: hive" in err) == ("", True)


@every_command
def test_the_sentence_in_the_table_is_the_commands_own(command: Command) -> None:
    _, entry = command
    module, _, function = entry.target.partition(":")
    documentation = getattr(import_module(f"hive.cli.{module}"), function).__doc__
    assert documentation.startswith(entry.sentence.removesuffix("."))


@every_command
def test_what_reads_or_writes_takes_json(command: Command) -> None:
    path, entry = command
    assert ("--json" in flags(entry, path[-1])) == (path[0] not in SERVICES or path[0] == "up")


@every_talking_command
def test_what_talks_to_a_hive_lets_it_be_chosen(command: Command) -> None:
    path, entry = command
    assert {"--socket", "--state-dir"} <= set(flags(entry, path[-1]))


@every_command
def test_every_option_says_what_it_does(command: Command) -> None:
    path, entry = command
    for param in load(path[-1], entry).params:
        assert param.opts
        if param.param_type_name == "option":
            assert param.help.endswith("."), param.opts  # type: ignore[attr-defined]


@every_command
def test_the_man_page_has_the_command_and_all_its_options(command: Command) -> None:
    path, entry = command
    assert f"*hive {' '.join(path)}*" in MAN
    missing = [flag for flag in flags(entry, path[-1]) if f"*{flag}*" not in MAN]
    assert missing == []


def test_the_man_page_has_the_options_of_the_program_itself() -> None:
    from hive.cli.main import root

    for param in root().params:
        assert f"*{param.opts[0]}*" in MAN


@every_command
def test_an_unknown_option_is_exit_2(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = command
    assert main([*path, "--no-such-option"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--no-such-option" in err
    assert f"hint: hive {' '.join(path)} --help" in err


CALLS: dict[str, list[str]] = {
    "run": ["m", "hi"],
    "demo": ["--list"],
    "pool import": ["{root}/manifest.json"],
    "adapter pull": ["legal", "--base", "m"],
    "adapter remove": ["legal", "--yes"],
    "adapter sign": ["{adapter}", "--key", "{adapter}.key"],
    "adapter verify": ["{adapter}", "--key", "{adapter}.pub"],
    "adapter trust": ["{adapter}.pub", "--keys", "{root}/keys"],
    "adapter revoke": ["ab" * 32, "--keys", "{root}/keys"],
    "agent apply": ["{toml}"],
    "agent create": ["a", "--", "sleep", "1"],
    "agent exec": ["alice", "--", "true"],
    "agent keep-awake": ["alice", "--for", "10m"],
    "agent send": ["alice", "hello"],
    "agent wake-at": ["alice", "+10m"],
    "backend switch": ["vllm"],
    "cache flush": ["--all"],
    "job run": ["tidy", "--model", "m", "hi"],
    "lease run": ["--vram", "1G", "--", "true"],
    "lease take": ["--vram", "1G"],
    "lease renew": ["l-1", "--token", "1"],
    "lease release": ["l-1", "--token", "1"],
    "model remove": ["m", "--yes"],
    "op keygen": ["ann", "--out", "{root}/ann.key"],
    "op request": ["model-load", "modelId=m", "--out", "{toml}.op"],
    "op sign": ["{op}", "--key", "{op}.key", "--yes"],
    "op submit": ["{op}"],
    "op verify": ["{op}", "--rules", "{op}.toml"],
    "token create": ["ci", "--role", "viewer"],
    "config check": ["{conf}"],
    "config path": ["--config", "{conf}"],
    "config set": ["proxy.port", "1", "--config", "{conf}"],
    "config show": ["--config", "{conf}"],
    "config unset": ["proxy.port", "--config", "{conf}"],
    "backup": ["{root}/new.tar", "--state-dir", "{root}/state"],
    "restore": ["{root}/kept.tar", "--yes", "--state-dir", "{root}/state"],
    "install": ["--prefix", "{root}", "--dry-run"],
    "uninstall": ["--prefix", "{root}", "--dry-run"],
    "audit verify": ["--state-dir", "{root}/state"],
    "secrets generate": ["--prefix", "{root}"],
    "secrets list": ["--prefix", "{root}"],
    "secrets rotate": ["--prefix", "{root}", "api-token"],
}
OWN_CODES = {"agent exec": 125}
"""Its exit code is that of a program, which may be 5: a failure of Hive's own is told by another one."""
NEEDS_NONE = {"doctor", "status"}
"""Takes the options that say which Hive is meant, and has an answer also where there is none."""
WITHOUT_NAME = {
    "adapter list",
    "adapter keys",
    "capabilities",
    "job list",
    "lease list",
    "op show",
    "model deployed",
    "db tables",
    "status",
    "top",
    "usage",
    "events",
    "ps",
    "version",
    "audit list",
    "token list",
    "queue list",
    "config runtime",
    "agent list",
    "agent ls",
    "agent ps",
    "backend status",
    "backend list",
    "model list",
    "model refresh",
    "pool show",
    "task list",
    "template list",
    "cache show",
    "backend logs",
    "model prompts",
    "logs",
}
"""Words that make each command complete; those not named here take an agent's name."""


def signed_operation(directory: Path) -> Path:
    """An operation that needs nobody's signature, its key and its rules beside it."""
    path, now = directory / "x.op", int(time.time())
    asked = Operation("model-load", "box-1", {"modelId": "m"}, now, now + 300, "0" * 32)
    path.write_bytes(TokenEnvelope(asked.as_json()).as_json())
    Path(f"{path}.key").write_bytes(new_secret_pem())
    Path(f"{path}.key").chmod(0o600)
    Path(f"{path}.toml").write_text("[rules.default]\nthreshold = 0\n")
    return path


def signed_adapter(directory: Path) -> Path:
    """An adapter with its signature, and both halves of the key beside it."""
    key = secret_pem()
    path = sign(peft_adapter(directory / "legal"), EcSecretKey(key))
    Path(f"{path}.key").write_bytes(key)
    Path(f"{path}.key").chmod(0o600)
    Path(f"{path}.pub").write_bytes(EcSecretKey(key).public.pem)
    return path


@each([command for command in ALL if command[1].options == "client" and " ".join(command[0]) not in NEEDS_NONE])
def test_without_a_daemon_every_command_that_needs_one_is_exit_5(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, _ = command
    toml = tmp_path / "a.toml"
    toml.write_text('name = "a"\ncommand = ["sleep"]\n')
    name = " ".join(path)
    words = [] if name in WITHOUT_NAME else CALLS.get(name, ["alice"])
    words = [word.format(toml=toml, conf="", op=signed_operation(tmp_path)) for word in words]
    assert main([*path, "--json", "--socket", str(tmp_path / "none.sock"), *words]) == OWN_CODES.get(name, 5)
    out, err = capsys.readouterr()
    error = json.loads(err)
    assert out == ""
    assert (error["schema"], error["version"], error["code"]) == ("error", 1, "dependency_down")
    assert str(tmp_path / "none.sock") in error["message"]


@every_local_command
def test_json_is_one_object_with_schema_and_version(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, _ = command
    conf = tmp_path / "hive.conf"
    conf.write_text("[inference]\n")
    if path[0] == "secrets":
        assert main(["secrets", "generate", "--prefix", str(tmp_path)]) == 0
        capsys.readouterr()
    if path[0] == "uninstall":
        (tmp_path / "opt/hive").mkdir(parents=True)
    if path[0] in ("backup", "restore", "audit"):
        (tmp_path / "state").mkdir()
        Database.open(tmp_path / "state/hive.db").close()
        assert main(["backup", str(tmp_path / "kept.tar"), "--state-dir", str(tmp_path / "state")]) == 0
        capsys.readouterr()
    (tmp_path / "manifest.json").write_text('{"models": {"q": {"path": "/m/q.gguf"}}}')
    given = {"conf": conf, "toml": "", "root": tmp_path, "op": signed_operation(tmp_path)}
    given["adapter"] = signed_adapter(tmp_path)
    words = [word.format(**given) for word in CALLS.get(" ".join(path), [])]
    assert main([*path, *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["version"]) == (".".join(path), 1)


def test_a_wrong_command_suggests_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agnt"]) == 2
    assert "did you mean `agent`?" in capsys.readouterr().err
    assert main(["agent", "lst", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["message"] == "no such command: lst; did you mean `list`?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["pause", "a1"], "did you mean `hive agent pause`?"),
        (["start"], "did you mean `hive agent start`?"),
        (["switch", "vllm"], "did you mean `hive backend switch`?"),
        (["revoke"], "did you mean `hive adapter revoke` or `hive token revoke`?"),
        (["set"], "did you mean `hive config set`?"),
    ],
)
def test_a_verb_without_its_noun_is_found(typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`hive pause a1` is what fingers type; it was `no such command: pause`, and no more."""
    assert main(typed) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize("words", [["help"], ["help", "agent"], ["help", "agent", "pause"], ["agent", "help", "pause"]])
def test_help_is_a_command_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    told = capsys.readouterr().out
    assert main([*(word for word in words if word != "help"), "--help"]) == 0
    assert told == capsys.readouterr().out
    assert told.startswith("Usage: hive")
