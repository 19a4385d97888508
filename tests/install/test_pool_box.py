"""The pool on a whole box: two pinned models of three, killed, rebooted, and given back. Real llama-servers.

See test_box.py for the machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests import llama
from tests.host import systemd_machine
from tests.install.box import LIBRARIES, Box, Seen, box_of, installation
from tests.journeys.adapter_stack import make

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.llama, pytest.mark.timeout(900)]

BROUGHT = ("libgomp.so.1", "libstdc++.so.6", "libgcc_s.so.1")
WORD = 3
"""Number of the word that the adapter answers (make_adapters.py)."""
FILES = ("var/lib/hive/models/alpha.gguf", "var/lib/hive/models/beta.gguf", "srv/models/gamma.gguf")


def bring(box: Box) -> list[str]:
    """Makes the models, and returns what systemd-nspawn is told so that llama-server is there."""
    for seed, name in enumerate(FILES):
        path = box.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            made = [sys.executable, str(llama.MAKE_MODEL), str(path), "--seed", str(seed)]
            subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
            path.chmod(0o644)
    bring_adapter(box)
    libraries = [f"--bind-ro={LIBRARIES / name}" for name in BROUGHT]
    return [f"--bind-ro={llama.program()}:/usr/local/bin/llama-server", *libraries]


def bring_adapter(box: Box) -> None:
    """An adapter on alpha where adapters are brought from, signed, and the public half of its key."""
    source, keys = box.root / "srv/adapters", box.root / "srv/keys"
    if source.exists():
        return
    source.mkdir()
    keys.mkdir()
    made = make(box.root / FILES[0], source / "red.gguf", WORD)
    key = ec.generate_private_key(ec.SECP256R1())
    secret = box.root.parent / "team.key"
    secret.touch(mode=0o600)
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (keys / "team.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    sign = [sys.executable, "-m", "hive", "adapter", "sign", str(made.path), "--key", str(secret)]
    subprocess.run(sign, check=True, stdout=subprocess.DEVNULL)
    (source / "word").write_text(made.word)


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    if llama.program() is None or not all((LIBRARIES / name).exists() for name in BROUGHT):
        pytest.skip("needs llama-server (tests/tools/build_llama_server.sh) and what it is linked to")
    with box_of("pool_box_inside.py") as box:
        yield box


@pytest.fixture(scope="module")
def installed(box: Box) -> Seen:
    return installation().seen


@pytest.fixture(scope="module")
def servers(box: Box) -> list[str]:
    return bring(box)


@pytest.fixture(scope="module")
def first_boot(box: Box, servers: list[str]) -> Seen:
    return box.boot("pool", *servers)


@pytest.fixture(scope="module")
def second_boot(box: Box, first_boot: Seen, servers: list[str]) -> Seen:
    return box.boot("second_boot", *servers)


@pytest.fixture(scope="module")
def adapted(box: Box, second_boot: Seen, servers: list[str]) -> Seen:
    return box.boot("adapters", *servers)


@pytest.fixture(scope="module")
def left(box: Box, adapted: Seen, servers: list[str]) -> Seen:
    return box.boot("leave", *servers, online=True)


def test_the_installer_describes_no_model(installed: Seen) -> None:
    assert not installed["models.d"]


def test_a_pin_set_in_the_file_holds_after_what_the_command_told_to_restart(first_boot: Seen) -> None:
    described = first_boot["described"]
    assert described["checked"][0] == 0, described["checked"][1]
    assert (described["apply"], described["ran"]) == (["systemctl restart hive-daemon"], [0])
    assert first_boot["units"]["beta"]["ActiveState"] == "active"
    print(f"both were loaded {first_boot['loaded_s']:.1f} s after the daemon was up")


@pytest.mark.parametrize("model", ["alpha", "beta"])
def test_a_model_that_is_loaded_is_a_unit_of_its_own(first_boot: Seen, model: str) -> None:
    unit = first_boot["units"][model]
    assert (unit["ActiveState"], unit["User"], unit["Restart"]) == ("active", "hive-inference", "no")
    assert unit["Slice"] == "hive-model.slice"
    assert unit["ControlGroup"].startswith(f"/hive.slice/hive-model.slice/hive-model@{model}-")
    assert first_boot["uids"][model] == first_boot["user"]


def test_one_that_is_cold_has_no_unit_that_runs(first_boot: Seen) -> None:
    unit = first_boot["units"]["gamma"]
    assert (unit["ActiveState"], unit["MainPID"]) == ("inactive", "0")


def test_a_request_for_what_the_pins_keep_out_is_refused_at_once_and_says_why(first_boot: Seen) -> None:
    status, answer = first_boot["refused"]
    assert (status, answer["error"]["code"]) == (503, "model_cold")
    why = "gamma does not fit beside what is pinned: alpha, beta"
    assert why in answer["error"]["message"]
    assert any(why in line for line in first_boot["explained"])


def test_unpinned_it_leaves_for_what_is_asked_for_and_pinned_it_comes_back(first_boot: Seen) -> None:
    assert (first_boot["unpinned"], first_boot["pinned"]) == (False, True)
    assert first_boot["gamma"] == [200, "gamma"]
    assert first_boot["after gamma"] == {"alpha": "ready", "beta": "cold", "gamma": "ready"}


def test_doctor_has_nothing_to_say_of_the_pool(first_boot: Seen) -> None:
    assert {check["name"] for check in first_boot["doctor"]["checks"] if check["status"] == "pass"} >= {
        "pool.files",
        "pool.models",
        "pool.fit",
    }
    assert [check for check in first_boot["doctor"]["checks"] if check["status"] in ("warn", "fail")] == []


def test_a_member_of_the_group_runs_a_program_in_a_scope_beside_the_models(first_boot: Seen) -> None:
    found = first_boot["leases"]
    code, out, _ = found["ran"]
    assert code == 5, found["ran"]
    assert "0::/hive.slice/hive-lease.slice/hive-lease-l-" in out
    assert out.splitlines()[-1] == "ann"
    assert found["socket"] == ["660", "hive"]
    assert found["stranger"][0] == 4


def test_more_than_the_limits_of_a_user_is_4_not_permitted(first_boot: Seen) -> None:
    found = first_boot["leases"]["limits"]
    refused = [4, "not_permitted"]
    for asked in ("run large", "run long", "take large", "take long"):
        assert found[asked] == refused, (asked, found)
    assert (found["root"], found["within"]) == (0, 0), found


def test_a_lease_lives_through_kill_9_of_the_helper_and_its_end_is_told_on_its_terminal(first_boot: Seen) -> None:
    found = first_boot["leases"]
    assert (found["held"]["held_by"], found["held"]["state"]) == ("scope", "running")
    assert found["after kill -9"] == ["running"]
    assert found["code"] == 143
    assert "ends within 20 s: " in found["typed"]
    assert found["units"] == ""
    entered = [(row["by"], row["outcome"]) for row in found["audited"] if row["verb"] == "lease_enter"]
    assert set(entered) == {("holder", "ok")}, found["audited"]


def test_a_model_whose_unit_is_killed_is_loaded_again_by_the_pool_and_not_by_systemd(first_boot: Seen) -> None:
    crashed = first_boot["crashed"]
    assert (crashed["another"], crashed["NRestarts"], crashed["answers"]) == (True, "0", [200, "alpha"])
    assert [target.rpartition("-")[0] for target in crashed["audited"]] == ["alpha"]
    assert crashed["beta"], "the other one was touched"


@pytest.mark.parametrize("unit", ["hive-daemon", "hive-sandbox", "hive-proxy"])
def test_kill_9_of_what_holds_the_pool_touches_no_model(first_boot: Seen, unit: str) -> None:
    assert first_boot["unkillable"][unit]


def test_a_backup_has_what_describes_the_models(first_boot: Seen) -> None:
    assert first_boot["backup"]["ran"] == 0
    assert {"hive.conf", "models.d/gamma.toml"} <= set(first_boot["backup"]["names"])


def test_a_restart_of_hive_brings_the_pinned_back(first_boot: Seen) -> None:
    assert (first_boot["restarted"]["ran"], first_boot["restarted"]["new"]) == (0, True)


def test_after_a_reboot_both_pinned_models_are_back(second_boot: Seen) -> None:
    assert second_boot["answers"] == [[200, "alpha"], [200, "beta"]]
    assert second_boot["units"]["gamma"]["MainPID"] == "0"
    print(f"both were loaded {second_boot['took_s']:.1f} s after the first look")


def test_after_a_reboot_a_model_that_was_ordered_is_restored_and_on_record(first_boot: Seen, second_boot: Seen) -> None:
    """beta is no longer pinned: the registry alone brings it back."""
    assert first_boot["ordered"] == "done"
    assert first_boot["deployed"]["beta"] == second_boot["deployed"]["beta"] == ["loaded", "uid:0"]


def test_a_switch_makes_models_of_other_kinds_leave_and_the_pinned_come_back(second_boot: Seen) -> None:
    code, said, running, _ = second_boot["switched"]["demo"]
    assert (code, running) == (0, ["demo"]), said
    assert second_boot["switched"]["left for it"] == [True, True]


def test_models_of_the_kind_that_is_switched_to_stay_where_there_is_room_and_the_service_is_in_the_books(
    second_boot: Seen,
) -> None:
    code, said, running, booked = second_boot["switched"]["llama"]
    assert (code, running) == (0, ["llama"]), said
    assert booked["llama"] > 0
    assert second_boot["switched"]["kept"]
    assert second_boot["switched"]["alpha"] == [200, "alpha"]
    code, said, running, _ = second_boot["switched"]["back to demo"]  # after kill -9 of the daemon
    assert (code, running) == (0, ["demo"]), said


def test_models_that_go_down_with_the_machine_have_not_crashed(first_boot: Seen, second_boot: Seen) -> None:
    assert second_boot["crashed"] == first_boot["crashed"]["audited"]


def test_an_adapter_on_a_model_is_a_unit_of_its_own_and_answers_by_its_name(box: Box, adapted: Seen) -> None:
    assert adapted["ran"] == [0]
    assert (adapted["pulled"], adapted["loaded"]) == ("done", "done")
    status, answer = adapted["chat"]
    assert (status, answer["model"]) == (200, "red")
    word = (box.root / "srv/adapters/word").read_text()
    assert word in answer["choices"][0]["message"]["content"]
    assert adapted["alpha"] == [200, "alpha"]
    assert (adapted["unit"]["ActiveState"], adapted["unit"]["User"]) == ("active", "hive-inference")
    assert adapted["doctor"]["checks"]
    assert [check for check in adapted["doctor"]["checks"] if check["status"] == "fail"] == []


def test_an_adapter_of_no_trusted_key_does_not_come_and_of_a_revoked_one_it_goes(adapted: Seen) -> None:
    assert adapted["early"] == [4, "signature_unverifiable"]
    assert [name.partition("@")[0] for name in adapted["revoked"]] == ["red"]
    assert (adapted["after"][0], adapted["after"][1]["error"]["code"]) == (404, "adapter_not_loaded")


def test_kill_9_of_the_daemon_touches_no_adapter(adapted: Seen) -> None:
    assert adapted["kept"]


def test_an_upgrade_keeps_the_models_that_are_loaded_and_has_them_in_hand(left: Seen) -> None:
    upgraded = left["upgraded"]
    assert upgraded["ran"][0] == 0, upgraded["ran"][1]
    assert upgraded["version"].startswith("9.")
    assert upgraded["kept"]
    assert (upgraded["alpha"], upgraded["gamma"]) == ([200, "alpha"], [200, "gamma"])
    assert upgraded["after"] == {"alpha": "ready", "beta": "cold", "gamma": "ready"}


@pytest.mark.parametrize(
    "what", ["files", "users", "groups", "units", "groups of control", "runtime", "packages", "swaps"]
)
def test_after_a_purge_nothing_of_the_pool_is_left(installed: Seen, left: Seen, what: str) -> None:
    assert left["purge"][0] == 0, left["purge"][1]
    brought = ("/usr/local/bin/llama-server", "/srv/models", "/srv/adapters", "/srv/keys", "/usr/lib/x86_64")
    more = {path for path in set(left["after"][what]) - set(installed["before"][what]) if not path.startswith(brought)}
    assert more == set()


def test_a_purge_tells_that_the_descriptions_of_models_go_and_ends_every_server(left: Seen) -> None:
    assert "remove /etc/hive/models.d" in left["told"]
    assert "remove /etc/hive/models.d" in left["purge"][1]
    assert left["servers"] == []
