"""The pool's knowledge of a model's memory: from its files, then learnt; over real files and a real database."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import gguf
import httpx
import msgspec
import pytest

from hive.backends.entries import ModelEntry
from hive.errors import StoreFull
from hive.pool.estimate import EstimateSource, GgufShape, kv_cache_bytes
from hive.pool.footprints import Footprint, FootprintKey
from hive.pool.state import CPU, MIB
from hive.pooling.entry_facts import (
    FILE_TYPES,
    NOT_READ,
    EntryFacts,
    FileFacts,
    entry_facts,
    model_info,
    read_facts,
    signature,
    why_no_need,
)
from hive.pooling.footprints import Footprints
from hive.settings.pool import ModelRow, slot_id
from hive.settings.table import Settings
from hive.store import pool
from hive.store.database import Database
from tests.backends.test_model_files import gguf as small_gguf
from tests.backends.test_model_files import hf
from tests.llama import MAKE_MODEL, serve
from tests.nobody import run_as_nobody

SETTINGS = Settings()
GPU = "NVIDIA H200"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    subprocess.run([sys.executable, MAKE_MODEL, path], check=True)
    return path


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    found = Database.open(tmp_path / "hive.db")
    yield found
    found.close()


def entry(path: Path, name: str = "m", *, kind: str = "llama", **row: object) -> ModelEntry:
    described = ModelRow(backend=kind, file=str(path), **row)  # type: ignore[arg-type]
    return ModelEntry(id=slot_id(name), name=name, kind=kind, path=path, row=described)


def size_of(path: Path) -> int:
    return path.stat().st_size


async def footprints_of(database: Database) -> Footprints:
    return Footprints(database, lambda: SETTINGS, await database.read(pool.footprints))


# --- what the files say ------------------------------------------------------------------------------------------


def test_a_real_gguf_file_tells_its_shape_its_context_and_its_weights(tiny: Path) -> None:
    facts = read_facts(tiny)
    assert facts.why_not == ""
    assert facts.shape == GgufShape(layers=2, kv_heads=2, head_dim=32)
    assert (facts.size_bytes, facts.context_trained, facts.quantization) == (tiny.stat().st_size, 4096, "F32")
    reader = gguf.GGUFReader(tiny)
    assert facts.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert len(facts.digest) == 64


def test_the_names_of_quantizations_are_those_of_llama_cpp() -> None:
    ours = dict(pair.split(":") for pair in FILE_TYPES.split())
    theirs = {str(one.value): one.name.removeprefix("MOSTLY_").removeprefix("ALL_") for one in gguf.LlamaFileType}
    assert ours.items() <= theirs.items()


def test_a_copy_is_the_same_model_and_other_weights_are_another_one(tiny: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    data = tiny.read_bytes()
    copy.write_bytes(data)
    other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert read_facts(copy).digest == read_facts(tiny).digest != read_facts(other).digest


def test_of_a_large_file_the_begin_and_the_end_make_the_digest(tmp_path: Path) -> None:
    path, digests = tmp_path / "x.gguf", []
    data = bytearray(small_gguf() + bytes(3 << 20))
    for change in (0, 1000, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        if change:
            changed[change] ^= 255
        path.write_bytes(changed)
        digests.append(read_facts(path).digest)
    assert len(set(digests[:2])) == len({digests[0], digests[3]}) == 2
    assert digests[2] == digests[0], "all of it takes a minute"


def described(path: Path, **keys: object) -> Path:
    """A GGUF file of one small tensor, with these keys of the architecture `a`, made by llama.cpp's own writer."""
    import numpy as np

    writer = gguf.GGUFWriter(path, "a")
    for name, value in keys.items():
        key = "a." + name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint64(key, value)  # type: ignore[arg-type]
    writer.add_tensor("t", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({"block_count": 4, "attention__head_count": 8, "embedding_length": 512}, GgufShape(4, 8, 64)),
        (
            {
                "block_count": 4,
                "attention__head_count": [8, 8, 8, 8],
                "attention__head_count_kv": [0, 4, 0, 2],
                "attention__key_length": 64,
            },
            GgufShape(2, 3, 64),
        ),
        # What no model has.
        ({"block_count": 0, "attention__head_count": 8, "embedding_length": 512}, None),
        ({"block_count": 2**63, "attention__head_count": 8, "embedding_length": 512}, None),
        ({"block_count": 4, "attention__head_count": 0, "embedding_length": 512}, None),
        ({"block_count": 4, "attention__head_count": [0, 0, 0, 0], "embedding_length": 512}, None),
        ({"block_count": 4, "attention__head_count": "eight", "embedding_length": 512}, None),
        ({"block_count": 4.0, "attention__head_count": 8, "embedding_length": 512}, None),
        ({"block_count": 4, "attention__head_count": 8, "attention__key_length": 2**40}, None),
        ({"attention__head_count": [8] * 5000, "block_count": 5000, "embedding_length": 512}, None),
        ({"attention__head_count": [-8] * 4, "block_count": 4, "embedding_length": 512}, None),
        ({}, None),
    ],
)
def test_a_shape_is_what_can_be_and_none_else(tmp_path: Path, keys: dict[str, object], shape: GgufShape | None) -> None:
    facts = read_facts(described(tmp_path / "x.gguf", **keys))
    assert (facts.why_not, facts.shape) == ("", shape)


def text(word: bytes) -> bytes:
    return struct.pack("<Q", len(word)) + word


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (text(b"k") + struct.pack("<IQ", 8, 2**62), "inside its header"),
        (text(b"k") + struct.pack("<IIQ", 9, 8, 2**40), "inside its header"),
        (text(b"k") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + struct.pack("<Q", 2**61), "inside its header"),
        (text(b"k") + struct.pack("<IIQ", 9, 4, 2**60), "inside its header"),
        (text(b"k") + struct.pack("<IIQ", 9, 9, 1), "an array of type 9"),
        (text(b"k") + struct.pack("<I", 77), "a value of type 77"),
        (struct.pack("<Q", 70000), "a name of 70000 bytes"),
    ],
)
def test_a_file_that_lies_is_no_model_and_cannot_be_loaded(tmp_path: Path, keys: bytes, says: str) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + keys + b"\0" * 64)
    facts = read_facts(tmp_path / "x.gguf")
    assert says in facts.why_not
    assert str(tmp_path / "x.gguf") in facts.why_not
    assert (facts.can_load, facts.digest, facts.size_bytes) == (False, "", None)


def test_a_huge_file_of_nothing_is_refused_without_being_read(tmp_path: Path) -> None:
    """Sparse: 4 TiB of zeros would be 500 billion empty names."""
    with (tmp_path / "x.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**38))
        file.truncate(1 << 42)
    assert "a header of more than" in read_facts(tmp_path / "x.gguf").why_not
    with (tmp_path / "x.gguf").open("r+b") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(b"t") + struct.pack("<IQQIQ", 2, 2**60, 2**60, 99, 0))
    assert "weights" in read_facts(tmp_path / "x.gguf").why_not


def test_a_directory_tells_its_context_and_the_type_of_its_weights(tmp_path: Path) -> None:
    at = hf(tmp_path / "m")
    config = {"model_type": "llama", "text_config": {"max_position_embeddings": 8192}, "torch_dtype": "bfloat16"}
    (at / "config.json").write_text(json.dumps(config))
    facts = read_facts(at)
    assert (facts.is_gguf, facts.context_trained, facts.quantization, facts.shape) == (False, 8192, "BF16", None)
    before = facts.digest
    (at / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    facts = read_facts(at)
    assert (facts.quantization, facts.digest != before) == ("AWQ", True)
    (at / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": "many"}))
    assert (read_facts(at).why_not, read_facts(at).context_trained) == ("", None)


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    gone = read_facts(tmp_path / "none.gguf")
    assert (gone.why_not, gone.can_load) == (f"there is no {tmp_path}/none.gguf", False)


def test_what_the_daemon_may_not_read_its_server_may_still_load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.gguf")
        path.touch(mode=0)
        Path(folder).chmod(0o755)
        told = run_as_nobody(
            "from pathlib import Path; from hive.pooling.entry_facts import read_facts\n"
            f"facts = read_facts(Path({str(path)!r})); print(facts.can_load, facts.why_not)"
        )
    assert told == f"True the daemon may not read {path}\n"


def test_weights_that_the_daemon_may_not_read_are_named_with_what_to_do() -> None:
    """diffusers saves them for their owner alone; it was told that nothing tells how much memory they take."""
    facts = FileFacts(why_not="the daemon may not read /srv/a pipeline/unet/w.safetensors")
    described = msgspec.structs.replace(entry(Path("/srv/a pipeline"), kind="diffusers"), origin="[model m]")
    assert why_no_need(facts, described) == (
        "the daemon may not read /srv/a pipeline/unet/w.safetensors, so that nothing tells how much memory it takes: "
        "let all read it (chmod -R a+rX '/srv/a pipeline'), or set vram_mb in [model m]; "
        "an installed daemon sees nothing below /home and /tmp"
    )
    for known in (FileFacts(), NOT_READ):
        assert why_no_need(known, described) == "nothing tells how much memory it takes: set vram_mb in [model m]"


@pytest.mark.parametrize("is_directory", [False, True])
def test_another_signature_for_each_change_of_the_files(tmp_path: Path, is_directory: bool) -> None:
    shard, other = tmp_path / "big-00001-of-00002.gguf", tmp_path / "big-00002-of-00002.gguf"
    path = tmp_path if is_directory else shard
    seen = [signature(path)]
    shard.write_bytes(b"1")
    seen.append(signature(path))
    other.write_bytes(b"2")
    seen.append(signature(path))
    os.utime(other, ns=(1, 1))
    seen.append(signature(path))
    other.write_bytes(b"22")
    os.utime(other, ns=(1, 1))
    seen.append(signature(path))
    assert len(set(seen)) == len(seen)
    (tmp_path / "else.gguf").write_bytes(b"3")
    assert (signature(path) == seen[-1]) is not is_directory


async def test_files_are_read_again_only_after_a_change(database: Database, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    learning, asked = await footprints_of(database), entry(path)
    assert learning.known(asked).why_not == "its files have not been read yet"
    assert not (await learning.facts_of(asked)).can_load
    shutil.copy(tiny, path)
    first = await learning.facts_of(asked)
    assert first.can_load
    assert first.digest
    seen = path.stat()
    path.write_bytes(b"X" * seen.st_size)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert await learning.facts_of(asked) == first, "it was read again though nothing looks changed"
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))
    assert not (await learning.facts_of(asked)).can_load
    learning.keep([])
    assert learning.known(asked).why_not == "its files have not been read yet"


# --- estimates ---------------------------------------------------------------------------------------------------


async def test_the_estimate_comes_from_the_first_that_is_known(database: Database, tiny: Path, tmp_path: Path) -> None:
    learning = await footprints_of(database)
    known, told = entry(tiny, context=8192), entry(tiny, vram_mb=7)
    for asked in (known, told):
        await learning.facts_of(asked)
    shape = GgufShape(layers=2, kv_heads=2, head_dim=32)
    by_metadata = learning.need(known, GPU)
    assert by_metadata is not None
    assert by_metadata.source is EstimateSource.METADATA
    without = int((size_of(tiny) + kv_cache_bytes(shape, 8192)) * 110 / 100)
    assert by_metadata.bytes == without + 850 * MIB, "and what the driver takes for a process on a GPU"
    learning.gpu_bytes = 8192 * MIB
    on_small, on_host = learning.need(known, GPU), learning.need(known, CPU)
    assert on_small is not None
    assert on_host is not None
    assert (on_small.bytes, on_host.bytes) == (without + 256 * MIB, without)
    by_entry = learning.need(told, GPU)
    assert by_entry is not None
    assert (by_entry.bytes, by_entry.source) == (7 << 20, EstimateSource.ENTRY)
    await learning.after_load(told, GPU, steady=900, peak=1000, load_s=2.0)
    learnt = learning.need(told, GPU)
    assert learnt is not None
    assert (learnt.bytes, learnt.source) == (1000, EstimateSource.LEARNT)
    named = learning.need(entry(tmp_path / "none.gguf", "llama-8b-q4_0"), GPU)
    assert named is not None
    assert named.source is EstimateSource.NAME
    assert learning.need(entry(tmp_path / "none.gguf"), GPU) is None


async def test_what_was_learnt_is_of_one_context_and_one_kind_of_gpu(database: Database, tiny: Path) -> None:
    learning = await footprints_of(database)
    asked = entry(tiny, context=4096)
    for other in (
        asked,
        entry(tiny, context=8192),
        entry(tiny, parallel=9, context=4096),
        entry(tiny, "n", context=4096),
    ):
        await learning.facts_of(other)
    await learning.after_load(asked, GPU, steady=900, peak=1000, load_s=2.0)

    def source(of: ModelEntry, gpu: str) -> EstimateSource:
        need = learning.need(of, gpu)
        assert need is not None
        return need.source

    assert source(asked, GPU) is EstimateSource.LEARNT
    assert source(entry(tiny, "n", context=4096), GPU) is EstimateSource.LEARNT, "another name is no other model"
    assert source(asked, "NVIDIA L4") is EstimateSource.METADATA
    assert source(entry(tiny, context=8192), GPU) is EstimateSource.METADATA
    assert source(entry(tiny, parallel=9, context=4096), GPU) is EstimateSource.METADATA


async def test_times_are_those_measured_and_guessed_by_the_size_before(database: Database, tiny: Path) -> None:
    learning, asked = await footprints_of(database), entry(tiny)
    assert learning.load_s(asked, GPU) == 30.0
    await learning.facts_of(asked)
    assert learning.load_s(asked, GPU) == learning.load_p50_s(asked, GPU) == 4.0 + size_of(tiny) / 1.5e9
    for load_s in (9.0, 1.0, 2.0):
        await learning.after_load(asked, GPU, 1, 2, load_s)
    assert (learning.load_p50_s(asked, GPU), learning.load_s(asked, GPU)) == (2.0, 9.0)
    assert learning.unload_s(asked, GPU) == 1.5
    for unload_s in (0.2, 0.7, 0.3):
        await learning.after_unload(asked, GPU, unload_s)
    assert learning.unload_s(asked, GPU) == 0.7


# --- what is kept ------------------------------------------------------------------------------------------------


async def test_what_was_learnt_is_there_for_the_next_daemon(database: Database, tiny: Path) -> None:
    learning, asked = await footprints_of(database), entry(tiny)
    await learning.facts_of(asked)
    await learning.after_load(asked, GPU, steady=900, peak=1000, load_s=2.0)
    await learning.after_oom(asked, GPU, charged=2000)
    await learning.after_unload(asked, GPU, 0.4)
    after = await footprints_of(database)
    await after.facts_of(asked)
    need = after.need(asked, GPU)
    assert need is not None
    assert (need.bytes, need.source, after.load_s(asked, GPU)) == (2500, EstimateSource.LEARNT, 2.0)
    assert after.unload_s(asked, GPU) == 0.4


async def test_a_row_of_a_version_that_learnt_no_unloads_is_read(database: Database, tiny: Path) -> None:
    learning, asked = await footprints_of(database), entry(tiny)
    await learning.facts_of(asked)
    await learning.after_load(asked, GPU, steady=900, peak=1000, load_s=2.0)
    ((name, data),) = (await database.read(pool.footprints)).items()
    fields = json.loads(data)
    del fields["unload_s"]
    old = Footprints(database, lambda: SETTINGS, {name: json.dumps(fields)})
    await old.facts_of(asked)
    assert (old.load_s(asked, GPU), old.unload_s(asked, GPU)) == (2.0, 1.5)


async def test_a_peak_is_written_down_once_it_has_grown_by_one_per_cent(database: Database, tiny: Path) -> None:
    learning, asked = await footprints_of(database), entry(tiny)
    await learning.facts_of(asked)
    await learning.after_load(asked, GPU, steady=90_000, peak=100_000, load_s=2.0)

    async def kept() -> int:
        (data,) = (await database.read(pool.footprints)).values()
        return msgspec.json.decode(data, type=Footprint).peak_bytes

    for peak, written in ((50_000, 100_000), (100_600, 100_000), (101_001, 101_001), (101_500, 101_001)):
        await learning.after_peak(asked, GPU, peak)
        assert await kept() == written
    need = learning.need(asked, GPU)
    assert need is not None
    assert need.bytes == 101_500
    after = await footprints_of(database)
    await after.facts_of(asked)
    await after.after_peak(asked, GPU, 101_600)
    assert await kept() == 101_001


async def test_of_a_model_without_known_files_nothing_is_learnt(database: Database, tmp_path: Path) -> None:
    learning, asked = await footprints_of(database), entry(tmp_path / "none.gguf")
    await learning.facts_of(asked)
    await learning.after_load(asked, GPU, 1, 2, 3.0)
    await learning.after_oom(asked, GPU, 4)
    await learning.after_peak(asked, GPU, 5)
    await learning.after_unload(asked, GPU, 6.0)
    assert await database.read(pool.footprints) == {}


async def test_a_full_disk_costs_the_row_and_not_the_load(
    database: Database, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learning, asked = await footprints_of(database), entry(tiny)
    await learning.facts_of(asked)

    async def full(work: object) -> None:
        raise StoreFull("no space left")

    monkeypatch.setattr(database, "write", full)
    await learning.after_load(asked, GPU, steady=900, peak=1000, load_s=2.0)
    need = learning.need(asked, GPU)
    assert need is not None
    assert need.bytes == 1000
    assert "footprint_not_kept" in caplog.text


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x", "no json"),
        ("x", "{}"),
        ("x", '{"key": 1}'),
        ("x", msgspec.json.encode(Footprint(FootprintKey("d", "llama", 1))).decode()),
        (
            msgspec.json.encode(FootprintKey("d", "llama", 1)).decode(),
            msgspec.json.encode(Footprint(FootprintKey("d", "llama", 1), load_s=(-1.0,))).decode(),
        ),
    ],
)
async def test_a_row_that_cannot_be_read_is_passed_over(
    database: Database, caplog: pytest.LogCaptureFixture, name: str, data: str
) -> None:
    with caplog.at_level(logging.WARNING):
        learning = Footprints(database, lambda: SETTINGS, {name: data})
    assert "footprint_unreadable" in caplog.text
    assert repr(learning) == "<Footprints 0 learnt, 0 models read>"


# --- what is shown -----------------------------------------------------------------------------------------------


def test_a_cold_model_is_shown_as_its_real_server_shows_it(tmp_path: Path) -> None:
    with serve(tmp_path, more=("-c", "8192")) as server:
        path = tmp_path / "models" / "tiny.gguf"
        asked = entry(path, "tiny", context=8192, parallel=4)
        ours = model_info(asked, entry_facts(asked, read_facts(path), SETTINGS.inference))
        (theirs,) = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    assert (ours.name, ours.owned_by) == (theirs["id"], theirs["owned_by"])
    assert (ours.context_length, ours.parameters) == (theirs["meta"]["n_ctx"], theirs["meta"]["n_params"])
    assert ours.quantization in theirs["meta"]["ftype"]


def test_a_model_that_is_not_loaded_is_shown_with_what_its_files_say(tiny: Path) -> None:
    facts = EntryFacts(**msgspec.structs.asdict(read_facts(tiny)), context=8192, parallel=4)
    shown = model_info(entry(tiny, "big"), facts)
    assert (shown.name, shown.owned_by, shown.quantization, shown.context_length) == ("big", "llamacpp", "F32", 2048)
    assert (shown.size_bytes, shown.parameters, shown.digest) == (facts.size_bytes, facts.parameters, facts.digest)
    assert shown.created == int(tiny.stat().st_mtime)
    assert shown.capabilities == ("completion",)
    assert model_info(entry(tiny), msgspec.structs.replace(facts, context=1 << 20)).context_length == 4096
    assert model_info(entry(tiny, category="embedding"), facts).capabilities == ("embedding",)
    nothing = model_info(entry(tiny, kind="vllm"), EntryFacts(why_not="it cannot be read"))
    assert (nothing.owned_by, nothing.size_bytes, nothing.digest, nothing.context_length) == ("vllm", None, "", None)
