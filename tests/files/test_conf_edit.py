"""`hive config set`: checked before it is in place, atomic, with mode and owner as they were."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hive.cli.main import main
from hive.errors import ConfigError, NotFound, UsageError
from hive.files import conf_edit
from hive.files.conf_edit import applied_by, set_value, unset_value
from hive.proxy.life import BOUND, READ
from hive.settings.edit import Name, known_names, name_of
from hive.settings.file import load

TEXT = "# mine\n[proxy]\nport = 1 \n# how long\n#head_s = 10\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hive.conf"
    path.write_text(TEXT)
    path.chmod(0o640)
    return path


def test_a_change_is_told_with_its_diff_and_what_puts_it_into_effect(file: Path) -> None:
    change = set_value(file, "proxy.head_s", "5", dry_run=False)
    assert (change.before, change.after) == (None, "5")
    assert change.apply == ["systemctl reload hive-proxy"]
    assert "-#head_s = 10\n+head_s = 5\n" in change.diff
    assert file.read_text() == TEXT.replace("#head_s = 10", "head_s = 5")
    assert load(file, env={}).settings.proxy.head_s == 5
    assert unset_value(file, "proxy.head_s", dry_run=False).before == "5"
    assert file.read_text() == TEXT


def test_a_dry_run_changes_nothing(file: Path) -> None:
    inode = file.stat().st_ino
    assert set_value(file, "proxy.port", "2", dry_run=True).diff
    assert (file.read_text(), file.stat().st_ino) == (TEXT, inode)
    assert os.listdir(file.parent) == ["hive.conf"]


def test_mode_and_owner_stay(file: Path) -> None:
    owner = (70001, 70002) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file, *owner)
    set_value(file, "proxy.port", "2", dry_run=False)
    found = file.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, *owner)


def test_a_link_stays_a_link(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    set_value(link, "proxy.port", "2", dry_run=False)
    assert link.is_symlink()
    assert "port = 2" in file.read_text()


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    path = tmp_path / "hive.conf"
    set_value(path, "proxy.port", "2", dry_run=False)
    assert path.read_text() == "[proxy]\nport = 2\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(NotFound, match="no directory") as fixed:
        set_value(tmp_path / "none" / "hive.conf", "proxy.port", "2", dry_run=False)
    assert fixed.value.hint == "name another file with --config"
    with pytest.raises(NotFound, match="no directory") as changeable:
        set_value(tmp_path / "none" / "hive.conf", "proxy.body_max_bytes", "2", dry_run=False)
    assert changeable.value.hint.endswith("hive config runtime proxy.body_max_bytes=VALUE")


@pytest.mark.parametrize(
    ("setting", "value", "error", "says"),
    [
        ("proxy.port", "x", ConfigError, "port: expected a whole number from 0 to 65535, found 'x'"),
        ("proxy.prot", "1", UsageError, "did you mean `proxy.port`"),
        ("port", "1", UsageError, "did you mean `"),
        ("nothing.at", "1", UsageError, "there is no setting nothing.at"),
        ("proxy.port", "1\n[sandbox]", UsageError, "one line"),
        ("proxy.port", "1\x1b", UsageError, "one line"),
        ("tenant Acme.weight", "1", ConfigError, "a tenant's name"),
        ("fields /v1/nothing.x", "drop", ConfigError, "no endpoint with fields"),
        ("fields /v1/messages.x", "maybe", ConfigError, "maybe"),
    ],
)
def test_what_would_be_wrong_is_refused_and_the_file_stays(
    file: Path, setting: str, value: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        set_value(file, setting, value, dry_run=False)
    assert says in f"{caught.value} {getattr(caught.value, 'hint', '')}"
    assert file.read_text() == TEXT
    assert os.listdir(file.parent) == ["hive.conf"]


@pytest.mark.parametrize("key", ["pin", "context"])
def test_a_model_of_models_d_is_changed_there(file: Path, key: str) -> None:
    """It said that its file was missing, and that it was described already."""
    described = file.parent / "models.d" / "one.toml"
    described.parent.mkdir()
    described.write_text("[model.gamma]\nfile = '/m.gguf'\n")
    with pytest.raises(ConfigError, match=f"gamma is described in {described}") as caught:
        set_value(file, f"model gamma.{key}", "1", dry_run=False)
    assert ("hive model pin gamma" in caught.value.hint) is (key == "pin")
    assert file.read_text() == TEXT


def test_a_model_of_hive_conf_is_pinned_beside_one_of_models_d(file: Path) -> None:
    (file.parent / "models.d").mkdir()
    (file.parent / "models.d" / "one.toml").write_text("[model.gamma]\nfile = '/m.gguf'\n")
    file.write_text(f"{TEXT}[model delta]\nfile = /d.gguf\n")
    change = set_value(file, "model delta.pin", "true", dry_run=False)
    assert change.apply == ["systemctl restart hive-daemon"]
    models = load(file, env={}).settings.models
    assert (models["delta"].pin, models["gamma"].pin) == (True, False)


def test_a_file_that_is_wrong_elsewhere_is_not_touched(file: Path) -> None:
    file.write_text(TEXT + "[inference]\nprot = 1\n")
    with pytest.raises(ConfigError, match=r"hive.conf:7: \[inference\] prot"):
        set_value(file, "proxy.port", "2", dry_run=False)


def test_what_is_no_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        set_value(file, "proxy.port", "2", dry_run=False)
    with pytest.raises(ConfigError):
        set_value(file.parent, "proxy.port", "2", dry_run=False)


MANY = """
import sys
from pathlib import Path
from hive.files.conf_edit import set_value
for n in range(20):
    set_value(Path(sys.argv[1]), sys.argv[2], str(n + 1), dry_run=False)
"""


def test_two_at_once_lose_nothing(file: Path) -> None:
    names = ("proxy.queue_depth", "sleep.check_s", "tenant acme.weight")
    running = [subprocess.Popen([sys.executable, "-c", MANY, str(file), name]) for name in names]
    assert [program.wait() for program in running] == [0, 0, 0]
    settings = load(file, env={}).settings
    assert (settings.proxy.queue_depth, settings.sleep.check_s, settings.tenants["acme"].weight) == (20, 20, 20)


FOR_EVER = """
import sys
from itertools import count
from pathlib import Path
from hive.files.conf_edit import set_value
print(flush=True)
for n in count(1):
    set_value(Path(sys.argv[1]), "proxy.port", str(n % 60000), dry_run=False)
"""


def test_a_change_cut_short_leaves_the_old_file_or_the_new_one(file: Path) -> None:
    """kill -9 at many moments; what is beside it is taken away by the next change."""
    program = [sys.executable, "-c", FOR_EVER, str(file)]
    for number in range(15):
        with subprocess.Popen(program, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            running.stdout.readline()
            try:
                running.wait(0.002 * number)
            except subprocess.TimeoutExpired:
                running.kill()
        assert load(file, env={}).settings.proxy.port >= 1
        assert file.read_text().startswith("# mine\n[proxy]\nport = ")
    set_value(file, "proxy.port", "65000", dry_run=False)
    assert os.listdir(file.parent) == ["hive.conf"]


# --- what reads it -------------------------------------------------------------------------------------------------


def test_the_proxy_is_reloaded_for_what_it_takes_over_and_restarted_for_the_rest() -> None:
    bound = {f"{section}.{key}" for section, keys in BOUND.items() for key in keys} | {"proxy.listen"}
    read = {f"{section}.{key}" for section, keys in READ.items() for key in keys} | bound
    assert bound == conf_edit.BOUND
    for full in known_names():
        commands = applied_by(name_of(full))
        assert ("systemctl restart hive-proxy" in commands) == (full in bound), full
        assert ("systemctl reload hive-proxy" in commands) == (full in read - bound), full
        assert commands, f"{full} is read by nobody"


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        (Name("tenant acme", "weight"), ["systemctl reload hive-proxy", "systemctl reload hive-daemon"]),
        (Name("budget", "zone"), ["systemctl reload hive-proxy", "systemctl reload hive-daemon"]),
        (Name("fields /v1/messages", "x"), ["systemctl reload hive-proxy"]),
        (Name("sandbox", "policy"), ["systemctl restart hive-sandbox"]),
        (Name("agents", "log_max_bytes"), ["systemctl restart hive-sandbox", "systemctl restart hive-daemon"]),
        (
            Name("inference", "vllm_model"),
            ["systemctl restart hive-daemon", "systemctl try-restart hive-inference-vllm"],
        ),
        (
            Name("inference", "ollama_models"),
            ["systemctl restart hive-daemon", "systemctl try-restart hive-inference"],
        ),
    ],
)
def test_the_others_are_restarted(name: Name, commands: list[str]) -> None:
    assert applied_by(name) == commands


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["config", "set", "proxy.port", "2", "--config", str(file)]) == 0
    assert f"proxy.port: '1' -> '2' in {file}" in capsys.readouterr().out
    assert main(["config", "set", "proxy.port", "2", "--config", str(file)]) == 0
    assert "is so already" in capsys.readouterr().out
    assert main(["config", "unset", "proxy.port", "--config", str(file), "-n"]) == 0
    assert "-port = 2" in capsys.readouterr().out
    monkeypatch.setenv("HIVE_PROXY_PORT", "9")
    assert main(["config", "set", "proxy.port", "3", "--config", str(file)]) == 0
    assert "HIVE_PROXY_PORT" in capsys.readouterr().out
    assert main(["config", "set", "proxy.port", "x", "--config", str(file)]) == 2
