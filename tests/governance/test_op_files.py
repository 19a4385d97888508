"""The files of `hive op`: signers at once, links, sizes, and names that the rules take."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hive.cli.op_files import add_signature, as_file, create, read_operation
from hive.cli.op_options import FILE_MAX_BYTES, token_in
from hive.errors import ConfigError, UsageError
from hive.governance.envelope import TOKEN_MAX_BYTES, Signature, TokenEnvelope
from hive.governance.rules import parse
from hive.host.trusted_file import read_trusted
from tests.governance.signing import KEYS, operation, signed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "load.op"
    create(path, as_file(TokenEnvelope(operation().as_json())), 0o644)
    return path


def signature_of(name: str, payload: bytes) -> Signature:
    return Signature(KEYS[name].public.id, KEYS[name].sign(TokenEnvelope(payload).signed))


def test_of_signers_at_once_each_signature_is_there(file: Path) -> None:
    """Each wrote what it had read before it asked whether to sign: the last one won."""
    payload = read_operation(file)[0].payload
    names = [*KEYS] * 5
    threads = [
        threading.Thread(target=add_signature, args=(file, payload, signature_of(name, payload))) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {each.key_id for each in read_operation(file)[0].signatures}
    assert ids == {key.public.id for key in KEYS.values()}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_link_stays_and_what_it_leads_to_is_signed(file: Path) -> None:
    link = file.with_name("link.op")
    link.symlink_to(file.name)
    payload = read_operation(link)[0].payload
    add_signature(link, payload, signature_of("ann", payload))
    assert link.is_symlink()
    assert len(read_operation(file)[0].signatures) == 1


def test_what_is_another_operation_by_now_is_not_signed(file: Path) -> None:
    payload = read_operation(file)[0].payload
    file.write_bytes(as_file(TokenEnvelope(operation().as_json())))
    with pytest.raises(UsageError, match="another operation"):
        add_signature(file, payload, signature_of("ann", payload))
    assert read_operation(file)[0].signatures == ()


def test_what_fits_into_a_file_fits_into_a_token(tmp_path: Path) -> None:
    """A file of 16 KiB was taken, and refused by the box as a token of 22,000 characters."""
    made = [signed(operation(params={"modelId": "m" * size}).as_json(), *KEYS) for size in range(8000, 9000, 3)]
    fits = [each for each in made if len(each.as_json()) < FILE_MAX_BYTES]
    assert 0 < len(fits) < len(made)
    create(tmp_path / "large.op", as_file(fits[-1]), 0o644)
    assert TOKEN_MAX_BYTES - 16 < len(token_in(tmp_path / "large.op")) <= TOKEN_MAX_BYTES
    with pytest.raises(UsageError, match="bytes at most"):
        as_file(made[len(fits)])


@pytest.mark.parametrize("name", ["ann", "ann.smith", "0-1_2"])
def test_the_line_of_a_key_is_one_of_the_rules(tmp_path: Path, name: str) -> None:
    """With a dot in the name the line was that of a table, and broke the rules it was put into."""
    line = subprocess.run(
        [sys.executable, "-m", "hive", "op", "keygen", name], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    rules = parse(f'[signers]\n{line}[rules.default]\nthreshold = 1\nof = ["{name}"]\n')
    assert [*rules.signers] == [name]


@pytest.mark.parametrize("name", ["-ann", "_x", ".x", "a b", "a" * 65, "\u00e4nn"])
def test_a_name_that_the_rules_do_not_take_gets_no_key(tmp_path: Path, name: str) -> None:
    came = subprocess.run(
        [sys.executable, "-m", "hive", "op", "keygen", "--", name], cwd=tmp_path, capture_output=True, text=True
    )
    assert (came.returncode, "a signer's name has letters" in came.stderr) == (2, True)
    assert [*tmp_path.iterdir()] == []


def test_a_link_on_the_way_in_a_directory_of_all_is_not_followed(tmp_path: Path) -> None:
    """A link there may be led to any other file by anybody."""
    kept, open_to_all, etc = (tmp_path / name for name in ("kept", "open", "etc"))
    for directory in (kept, open_to_all, etc):
        directory.mkdir(mode=0o755)
    (kept / "governance.toml").write_text("x")
    (kept / "governance.toml").chmod(0o644)
    (open_to_all / "link").symlink_to(kept / "governance.toml")
    (etc / "governance.toml").symlink_to("../open/link")
    owners = {kept.stat().st_uid}
    assert read_trusted(etc / "governance.toml", "the rules", owners) == b"x"
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="open can be written by others"):
        read_trusted(etc / "governance.toml", "the rules", owners)
