"""Footprints that are learnt, and the estimate before the first load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.pool.estimate import EstimateSource, GgufShape, ModelFacts, bytes_by_name, estimate, kv_cache_bytes
from hive.pool.footprints import SAMPLES, Footprint, FootprintKey, quantile
from hive.pool.state import MIB

KEY = FootprintKey("sha256:1", "llama", 8192)
SHAPE = GgufShape(layers=32, kv_heads=8, head_dim=128)
ALL = ModelFacts(
    "llama3.1:8b-q4_0",
    learnt_bytes=1,
    vram_mb=2,
    file_bytes=4700 * MIB,
    shape=SHAPE,
    context=8192,
)


@pytest.mark.parametrize(
    ("unknown", "source", "mib"),
    [
        ((), EstimateSource.LEARNT, 0),
        (("learnt_bytes",), EstimateSource.ENTRY, 2),
        (("learnt_bytes", "vram_mb"), EstimateSource.METADATA, 6296),  # (4700 + 1024) * 1.1
        (("learnt_bytes", "vram_mb", "shape"), EstimateSource.FILE, 5170),
        (("learnt_bytes", "vram_mb", "shape", "file_bytes"), EstimateSource.NAME, 5149),
    ],
)
def test_the_first_link_of_the_chain_that_is_known_decides(
    unknown: tuple[str, ...], source: EstimateSource, mib: int
) -> None:
    fields = {name: getattr(ALL, name) for name in ALL.__struct_fields__ if name not in unknown}
    found = estimate(ModelFacts(**fields))
    assert found is not None
    assert (found.source, found.bytes // MIB) == (source, mib)


def test_files_of_other_kinds_take_more() -> None:
    found = estimate(ModelFacts("m", file_bytes=1000, is_gguf=False))
    assert found is not None
    assert found.bytes == 1300


def test_nothing_known_is_no_estimate_and_not_zero() -> None:
    assert estimate(ModelFacts("my-model")) is None


@pytest.mark.parametrize(
    ("name", "gb"),
    [
        ("qwen3:32b", 76.8),
        ("qwen3-32b-int4", 19.2),
        ("mixtral-8x7b-Q4_K_M", 37.8),
        ("llama-3.2-1B-Instruct-bf16", 2.4),
        ("phi-3.5", None),
        ("embed-8bit", None),
    ],
)
def test_a_name_tells_parameters_and_bits(name: str, gb: float | None) -> None:
    found = bytes_by_name(name)
    assert (None if found is None else round(found / 1e9, 1)) == gb


@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 256), st.integers(1, 1 << 20))
def test_a_cache_grows_with_the_context(layers: int, heads: int, dim: int, context: int) -> None:
    shape = GgufShape(layers, heads, dim)
    assert kv_cache_bytes(shape, 2 * context) == 2 * kv_cache_bytes(shape, context)
    assert kv_cache_bytes(shape, context, "q4_0") < kv_cache_bytes(shape, context, "q8_0")
    assert kv_cache_bytes(shape, context, "no-such-type") >= kv_cache_bytes(shape, context)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0.1, 500)), min_size=1, max_size=40))
def test_a_peak_never_falls_and_times_are_the_newest(loads: list[tuple[int, int, float]]) -> None:
    learnt = Footprint(KEY)
    for steady, peak, load_s in loads:
        before = learnt.peak_bytes
        learnt = learnt.after_load(steady, peak, load_s)
        assert learnt.peak_bytes >= max(before, steady, peak)
    assert list(learnt.load_s) == [load_s for _, _, load_s in loads][-SAMPLES:]
    assert learnt.load_p50_s is not None
    assert learnt.load_p95_s is not None
    assert min(learnt.load_s) <= learnt.load_p50_s <= learnt.load_p95_s <= max(learnt.load_s)


def test_a_load_that_died_for_memory_is_charged_a_quarter_more() -> None:
    assert Footprint(KEY, peak_bytes=900).after_oom(1000).peak_bytes == 1250
    assert Footprint(KEY, peak_bytes=2000).after_oom(1000).peak_bytes == 2500


def test_one_in_twenty_may_exceed_the_p95() -> None:
    values = tuple(float(number) for number in range(1, 21))
    assert (quantile(values, 0.5), quantile(values, 0.95)) == (10.0, 19.0)
    assert Footprint(KEY).load_p95_s is None


def test_a_wake_belongs_to_its_level_and_a_ban_to_a_version_of_the_server() -> None:
    learnt = Footprint(KEY).after_wake("1", 2.0).after_wake("2", 30.0).after_wake("1", 3.0)
    assert [learnt.sleep(level).wake_s for level in ("1", "2", "3")] == [(2.0, 3.0), (30.0,), ()]
    banned = learnt.after_ban("2", "it freed nothing", "0.14.0")
    assert (banned.sleep("2").why_banned, banned.sleep("2").banned_version) == ("it freed nothing", "0.14.0")
    assert (banned.sleep("2").wake_s, banned.sleep("1")) == ((30.0,), learnt.sleep("1"))
