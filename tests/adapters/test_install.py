"""Installing: what comes in is what was signed, whole, and looked at; anything else leaves nothing."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.adapters.source import AdapterSource, Progress, opened
from hive.errors import (
    AdapterMismatch,
    AdapterUnsafe,
    BadRequest,
    Cancelled,
    HiveError,
    NotFound,
    NotPermitted,
    SignatureMismatch,
    SignatureUnverifiable,
    StoreFull,
    TooLarge,
    WrongState,
)
from tests.adapters.lora_files import (
    BASE,
    Box,
    as_nobody,
    gguf_adapter,
    gguf_base,
    new_key,
    peft_adapter,
    peft_base,
    sign,
)


def test_a_signed_adapter_is_installed_with_the_name_of_its_directory(box: Box) -> None:
    record = box.install(box.signed())
    assert (record.name, record.base, record.format, record.rank) == ("legal", BASE, "safetensors", 8)
    assert (record.signature, record.key_id) == ("verified", box.key.public.id)
    assert box.adapters.find("legal") == record
    assert record.engine_name == f"legal@{record.digest[:12]}"


def test_only_what_a_server_needs_is_there_and_nobody_may_write_it(box: Box) -> None:
    record = box.install(box.signed())
    place = box.adapters.path(record)
    assert sorted(path.name for path in place.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "hive-adapter.json",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o444}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (place, place.parent, box.adapters.root)} == {0o755}
    assert record.bytes == sum((place / file.path).stat().st_size for file in record.files)


def test_a_gguf_file_is_installed_with_a_signature_beside_it_or_without_where_nobody_asks(box: Box) -> None:
    gguf_adapter(box.beneath / "legal.gguf")
    record = box.install("legal.gguf", policy="off")
    assert (record.name, record.format, record.rank, record.signature) == ("legal", "gguf", 8, "unsigned")
    assert box.adapters.path(record).name == "legal.gguf"
    assert box.adapters.path(record).read_bytes() == (box.beneath / "legal.gguf").read_bytes()


def test_one_that_is_installed_again_is_the_newest_of_its_name_and_there_once(box: Box) -> None:
    first = box.install(box.signed(), now=lambda: 1.0)
    second = box.install(box.signed("legal-2", fill=2), name="legal", now=lambda: 2.0)
    assert box.adapters.find("legal") == second
    again = box.install("legal", now=lambda: 3.0)
    assert (again.digest, box.adapters.find("legal")) == (first.digest, again)
    assert len(box.adapters.records()) == 2


def test_the_same_files_are_not_installed_on_another_base_beside(box: Box) -> None:
    box.install(box.signed(base=""))
    with pytest.raises(WrongState, match="as an adapter on tiny-base"):
        box.install("legal", base=peft_base(box.beneath.parent / "other")._replace(name="other"))


@pytest.mark.parametrize("name", ["a@b", "../x", "a/b", ".new", "", "x" * 65, "a b", "ä"])
def test_a_name_that_is_none_is_refused_before_anything_is_read(box: Box, name: str) -> None:
    box.signed("good")
    with pytest.raises(BadRequest) if name else pytest.raises(NotFound):
        box.install("good" if name else "missing", name=name)
    assert not box.there()


# Where it comes from -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["../keys", "/etc", "legal/../../keys", ".", "/", "legal\0"])
def test_what_is_not_below_the_directory_is_not_opened(box: Box, source: str) -> None:
    box.signed()
    with pytest.raises(AdapterUnsafe, match="not below"):
        box.install(source)


def test_what_is_not_there_is_said(box: Box) -> None:
    with pytest.raises(NotFound, match="there is no"):
        box.install("legal")
    with pytest.raises(NotFound, match="there is no"):
        box.install("legal", beneath=box.beneath / "gone")


@pytest.mark.parametrize("depth", ["above", "itself", "file", "below", "signature", "dangling"])
def test_a_link_at_any_depth_is_refused(box: Box, depth: str, tmp_path: Path) -> None:
    source = box.signed("real/legal")
    asked = source
    if depth == "above":
        (box.beneath / "link").symlink_to(box.beneath / "real")
        asked = box.beneath / "link" / "legal"
    elif depth == "itself":
        asked = box.beneath / "link"
        asked.symlink_to(source)
    elif depth == "file":
        shutil.move(source / "adapter_config.json", tmp_path / "config")
        (source / "adapter_config.json").symlink_to(tmp_path / "config")
    elif depth == "below":
        (source / "sub").mkdir()
        (source / "sub" / "x").symlink_to("/etc/shadow")
    elif depth == "signature":
        shutil.move(source / "model.sig", tmp_path / "sig")
        (source / "model.sig").symlink_to(tmp_path / "sig")
    else:
        (source / "notes").symlink_to("/no/such")
    with pytest.raises(AdapterUnsafe, match="link"):
        box.install(asked)
    assert not box.there()


def test_a_link_of_proc_is_a_link_too(box: Box) -> None:
    """The kernel follows those of /proc/PID/fd without a name: RESOLVE_NO_MAGICLINKS is about them."""
    source = box.signed()
    with open(source / "README.md", "rb") as file, pytest.raises(AdapterUnsafe, match="link"):
        box.install(f"/proc/self/fd/{file.fileno()}", beneath=Path("/proc"), policy="off")


@pytest.mark.parametrize("what", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(box: Box, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = box.signed()
    monkeypatch.chdir(source)  # the path of a socket has 107 bytes at most
    path = source / "adapter_model.safetensors"
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root makes devices")
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    with pytest.raises(AdapterUnsafe, match=f"is a (named )?{what}"):
        box.install(source)
    with pytest.raises(AdapterUnsafe, match="is a"):
        box.install(path)
    assert not box.there()


def test_a_file_that_becomes_a_pipe_after_the_look_is_refused_and_not_waited_for(box: Box) -> None:
    source = box.signed()
    with opened(source, beneath=box.beneath) as found:
        (source / "adapter_config.json").unlink()
        os.mkfifo(source / "adapter_config.json")
        with pytest.raises(AdapterUnsafe, match="named pipe"):
            found.copy("adapter_config.json", None, lambda _: None)


def test_a_directory_that_becomes_a_link_after_the_look_is_not_followed(box: Box, tmp_path: Path) -> None:
    source = peft_adapter(box.beneath / "legal")
    (source / "sub").mkdir()
    (source / "sub" / "x").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("a secret")
    with opened(source, beneath=box.beneath) as found:
        shutil.rmtree(source / "sub")
        (source / "sub").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(AdapterUnsafe, match="link"):
            found.copy("sub/x", None, lambda _: None)


def test_a_tree_without_end_is_refused(box: Box) -> None:
    source = box.signed()
    deep = source
    for number in range(20):
        deep = deep / f"d{number}"
    deep.mkdir(parents=True)
    with pytest.raises(AdapterUnsafe, match="directories deep"):
        box.install(source)


def test_what_the_daemon_may_not_read_is_said(box: Box) -> None:
    source = box.signed()
    (source / "adapter_model.safetensors").chmod(0)
    with opened(source, beneath=box.beneath) as found, as_nobody(), pytest.raises(NotPermitted, match="may not read"):
        found.copy("adapter_model.safetensors", None, lambda _: None)


# What is in it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "weights.pkl", "x.ckpt"])
def test_weights_that_are_a_pickle_are_refused(box: Box, name: str) -> None:
    source = peft_adapter(box.beneath / "legal")
    (source / "adapter_model.safetensors").rename(source / name)
    with pytest.raises(AdapterUnsafe, match="a pickle"):
        box.install(source, policy="off")
    with pytest.raises(AdapterUnsafe):
        box.install(source / name, policy="off")


def test_a_pickle_beside_is_never_installed_signed_or_not(box: Box) -> None:
    """vLLM would load adapter_model.bin where there is no adapter_model.safetensors."""
    source = peft_adapter(box.beneath / "legal")
    (source / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    (source / "optimizer.pt").write_bytes(b"\x80\x04N.")
    record = box.install(sign(source, box.key))
    assert [file.path for file in record.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert not [name for name in box.there() if name.endswith((".bin", ".pt"))]


def test_what_git_keeps_is_never_installed_although_no_signature_covers_it(box: Box) -> None:
    """`model_signing verify` passes over these paths, whatever lies there: seen with 1.1.1."""
    source = box.signed()
    (source / ".git").mkdir()
    (source / ".git" / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    (source / ".gitignore").write_text("x")
    record = box.install(source)
    assert len(record.files) == 2
    assert not [name for name in box.there() if ".git" in name]


@pytest.mark.parametrize("lacking", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_directory_that_lacks_a_half_is_none(box: Box, lacking: str) -> None:
    source = peft_adapter(box.beneath / "legal")
    (source / lacking).unlink()
    with pytest.raises(AdapterUnsafe, match=f"has no {lacking}"):
        box.install(source, policy="off")


def test_a_directory_with_two_kinds_of_weights_is_asked_about(box: Box) -> None:
    source = peft_adapter(box.beneath / "legal")
    gguf_adapter(source / "a.gguf")
    with pytest.raises(AdapterUnsafe, match=r"a\.gguf and other weights"):
        box.install(source, policy="off")
    record = box.install(source / "a.gguf", policy="off")
    assert record.format == "gguf"


# Who signed it -----------------------------------------------------------------------------------------------------


def test_one_that_nobody_signed_is_refused_and_taken_where_that_is_only_told(box: Box) -> None:
    source = peft_adapter(box.beneath / "legal")
    with pytest.raises(SignatureUnverifiable, match="not signed"):
        box.install(source)
    assert not box.there()
    assert box.install(source, policy="warn").signature == "unsigned"


def test_one_of_an_unknown_key_is_refused_and_taken_where_that_is_only_told(box: Box) -> None:
    other = new_key()
    source = sign(peft_adapter(box.beneath / "legal"), other)
    with pytest.raises(SignatureUnverifiable, match=other.public.id):
        box.install(source)
    record = box.install(source, policy="warn")
    assert (record.signature, record.key_id) == ("unsigned", "")


@pytest.mark.parametrize("policy", ["required", "warn"])
def test_one_of_a_revoked_key_is_refused(box: Box, policy: str) -> None:
    source = box.signed()
    box.keys.revoke(box.key.public.id)
    with pytest.raises(SignatureUnverifiable, match="was revoked"):
        box.install(source, policy=policy)
    assert not box.there()


def test_an_installed_one_may_be_loaded_until_its_key_is_revoked(box: Box) -> None:
    record = box.install(box.signed())
    box.keys.check(record, "required")
    box.keys.revoke(record.key_id)
    for policy in ("required", "warn", "off"):
        with pytest.raises(SignatureUnverifiable, match="was revoked"):
            box.keys.check(record, policy)
    unsigned = box.install(peft_adapter(box.beneath / "other", fill=3), policy="off")
    box.keys.check(unsigned, "warn")
    with pytest.raises(SignatureUnverifiable, match="is not signed"):
        box.keys.check(unsigned, "required")


@pytest.mark.parametrize("policy", ["required", "warn"])
@pytest.mark.parametrize("change", ["tampered", "extra", "missing", "extra weights"])
def test_files_that_are_not_those_that_were_signed_are_refused(box: Box, change: str, policy: str) -> None:
    source = box.signed()
    if change == "tampered":
        weights = bytearray((source / "adapter_model.safetensors").read_bytes())
        weights[-1] ^= 1
        (source / "adapter_model.safetensors").write_bytes(weights)
    elif change == "missing":
        (source / "README.md").unlink()
    else:
        name = "new_embeddings.safetensors" if change == "extra weights" else "notes.txt"
        (source / name).write_text("x")
    with pytest.raises(SignatureMismatch):
        box.install(source, policy=policy)
    assert not box.there()


def test_a_signature_that_leaves_out_the_weights_signs_nothing(box: Box) -> None:
    """`model_signing sign --ignore-paths` writes such a one, and `verify` takes it with whatever lies there."""
    from hive.adapters import oms

    source = peft_adapter(box.beneath / "legal")
    with opened(source, beneath=box.beneath) as found:
        told = {"README.md": found.copy("README.md", None, lambda _: None).sha256}
    left_out = ["adapter_model.safetensors", "adapter_config.json"]
    (source / "model.sig").write_bytes(oms.sign(told, box.key, subject="legal", ignored=left_out))
    with pytest.raises(AdapterUnsafe, match="leaves out adapter_config"):
        box.install(source)
    assert not box.there()


# Changed meanwhile -------------------------------------------------------------------------------------------------


def swapping(source: Path, when: int) -> Progress:
    """Progress at which somebody puts other weights in place of those that are being read."""
    other = peft_adapter(source.parent / "other", fill=9)
    calls = []

    def progress(_: int) -> None:
        calls.append(1)
        if len(calls) == when:
            os.replace(other / "adapter_model.safetensors", source / "adapter_model.safetensors")

    return progress


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_file_swapped_between_signature_hash_and_load_is_never_what_is_loaded(box: Box, when: int) -> None:
    """The bytes that were hashed are those that are installed: before its turn it is refused, after it too late."""
    source = box.signed()
    signed = (source / "adapter_model.safetensors").read_bytes()
    try:
        record = box.install(source, progress=swapping(source, when))
    except SignatureMismatch:
        assert not box.there()
    else:
        assert (box.adapters.path(record) / "adapter_model.safetensors").read_bytes() == signed
    assert (source / "adapter_model.safetensors").read_bytes() != signed


def test_a_file_that_grows_while_it_is_read_is_refused(box: Box) -> None:
    source = peft_adapter(box.beneath / "legal")

    def progress(_: int) -> None:
        with (source / "adapter_config.json").open("a") as file:
            file.write(" ")

    with pytest.raises(BadRequest, match="changed while it was read"):
        box.install(source, policy="off", progress=progress)
    assert not box.there()


def test_an_installed_file_that_was_changed_is_seen_before_it_is_loaded(box: Box) -> None:
    record = box.install(box.signed())
    box.adapters.check(record)
    weights = box.adapters.path(record) / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(content)
    with pytest.raises(SignatureMismatch, match="was changed since"):
        box.adapters.check(record)


def test_who_cancels_leaves_nothing(box: Box) -> None:
    def progress(_: int) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        box.install(box.signed(), progress=progress)
    assert not box.there()


# For which model ---------------------------------------------------------------------------------------------------


def test_a_rank_that_is_too_large_is_refused(box: Box) -> None:
    with pytest.raises(AdapterMismatch, match="rank is 128; at most 64"):
        box.install(box.signed(rank=128))
    gguf_adapter(box.beneath / "g.gguf", rank=65)
    with pytest.raises(AdapterMismatch, match="rank is 65"):
        box.install("g.gguf", policy="off")
    assert not box.there()


def test_the_shapes_of_the_base_decide_where_its_files_are_here(box: Box, tmp_path: Path) -> None:
    source = box.signed(base="somebody/else")
    assert box.install(source, base=peft_base(tmp_path / "base")).base == BASE
    with pytest.raises(AdapterMismatch, match="64×32 there and 48×32 in the model"):
        box.install(source, name="b", base=peft_base(tmp_path / "other", inputs=48))


def test_a_gguf_adapter_has_to_be_of_its_bases_architecture_and_shapes(box: Box, tmp_path: Path) -> None:
    source = gguf_adapter(box.beneath / "legal.gguf")
    assert box.install(source, policy="off", base=gguf_base(tmp_path / "base.gguf")).rank == 8
    with pytest.raises(AdapterMismatch, match="architecture 'llama', and tiny-base is 'qwen2'"):
        box.install(source, policy="off", base=gguf_base(tmp_path / "q.gguf", architecture="qwen2"))
    with pytest.raises(AdapterMismatch, match=r"attn_q\.weight is 64×32 there and 32×32"):
        box.install(source, policy="off", base=gguf_base(tmp_path / "n.gguf", inputs=32))


def test_a_gguf_adapter_of_matrices_that_the_base_has_not_is_none_of_it(box: Box, tmp_path: Path) -> None:
    source, base = gguf_adapter(box.beneath / "legal.gguf"), gguf_base(tmp_path / "base.gguf", block=1)
    with pytest.raises(AdapterMismatch, match=r"the model has no blk\.0\.attn_q\.weight"):
        box.install(source, policy="off", base=base)
    with pytest.raises(AdapterMismatch, match="has none of its matrices"):
        box.install(source, policy="off", base=gguf_base(tmp_path / "other.gguf", block=1, embedding="x"))


def test_the_two_formats_do_not_go_with_each_others_models(box: Box, tmp_path: Path) -> None:
    with pytest.raises(AdapterMismatch, match="a safetensors adapter does not go with"):
        box.install(box.signed(), base=gguf_base(tmp_path / "base.gguf"))
    source = gguf_adapter(box.beneath / "legal.gguf")
    with pytest.raises(AdapterMismatch, match="a gguf adapter does not go with"):
        box.install(source, policy="off", base=peft_base(tmp_path / "base"))


def test_the_name_that_its_maker_gives_decides_where_nothing_else_does(box: Box) -> None:
    with pytest.raises(AdapterMismatch, match=r"for meta/llama-3\.1-8b, which is not tiny-base"):
        box.install(box.signed(base="meta/llama-3.1-8b"))


def test_a_base_that_cannot_be_looked_at_is_said(box: Box, tmp_path: Path) -> None:
    (tmp_path / "base.gguf").write_bytes(b"GGUF")
    base = gguf_base(tmp_path / "x.gguf")._replace(path=tmp_path / "base.gguf")
    with pytest.raises(BadRequest, match="the model tiny-base cannot be looked at"):
        box.install(gguf_adapter(box.beneath / "legal.gguf"), policy="off", base=base)


# Room --------------------------------------------------------------------------------------------------------------


def test_an_adapter_that_is_too_large_is_refused_before_it_is_read(box: Box) -> None:
    source = box.signed()
    os.truncate(source / "adapter_model.safetensors", 17 << 20)
    with pytest.raises(TooLarge, match="at most 16 MiB"):
        box.install(source, progress=pytest.fail)


def test_a_disk_that_is_full_is_seen_before_anything_is_copied(box: Box, small_disk: Path) -> None:
    box.adapters.root = small_disk / "adapters"
    with pytest.raises(StoreFull, match="do not fit"):
        box.install(box.signed(), progress=pytest.fail)


def test_a_disk_that_becomes_full_while_it_is_copied_leaves_nothing(
    box: Box, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.adapters.install.SPARE_BYTES", -(1 << 30))
    box.adapters.root = small_disk / "adapters"
    source = box.signed(rank=64)
    (source / "adapter_model.safetensors").write_bytes(os.urandom(3 << 20))
    with pytest.raises(StoreFull, match="No space left") as error:
        box.install(sign(source, box.key))
    assert error.value.status == 507
    assert not box.there()
    assert not list((small_disk / "adapters").rglob("*.safetensors"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_file_that_may_not_grow_further_leaves_nothing(box: Box) -> None:
    """RLIMIT_FSIZE: the write fails in the middle, on hosts where nothing can be mounted too."""
    source = peft_adapter(box.beneath / "legal")
    (source / "adapter_model.safetensors").write_bytes(os.urandom(3 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StoreFull, match="File too large"):
            box.install(source, policy="off")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not box.there()


def test_every_refusal_says_what_to_do_next(box: Box) -> None:
    source = peft_adapter(box.beneath / "legal")
    for asked in (source, box.beneath / "missing", Path("/etc")):
        with pytest.raises(HiveError) as error:
            box.install(asked)
        assert error.value.hint


def test_the_source_is_shown_by_its_place(box: Box) -> None:
    with opened(box.signed(), beneath=box.beneath) as found:
        assert isinstance(found, AdapterSource)
        assert repr(found).endswith("legal 3 files>")
