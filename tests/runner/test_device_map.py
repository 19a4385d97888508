"""Parts of a pipeline on several GPUs: within what each account holds, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.runner.device_map import MIB, WORKING_SHARE, devices_of, placed
from hive.runner.pipeline_dir import parts_of, read_index
from tests.diffusers_runner import pipeline


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(1, 100 * MIB), min_size=1, max_size=8),
    st.lists(st.integers(0, 200 * MIB), min_size=2, max_size=4),
)
def test_no_account_is_given_more_than_it_holds(parts: dict[str, int], room: list[int]) -> None:
    try:
        where = placed(parts, room)
    except ValueError:  # something fits nowhere
        assert max(parts.values()) > min(held * (1 - WORKING_SHARE) - sum(parts.values()) for held in room)
        return
    assert where.keys() == parts.keys()
    for device, held in enumerate(room):
        assert sum(size for name, size in parts.items() if where[name] == device) <= held * (1 - WORKING_SHARE) + 1


def test_one_device_has_all_of_it_whatever_it_says() -> None:
    assert placed({"unet": 10 * MIB, "vae": MIB}, [0]) == {"unet": 0, "vae": 0}


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux"])
def test_every_class_is_split_over_two_accounts(kind: str) -> None:
    """Of the files of a real pipeline: the two fake GPUs' accounts hold it together, neither of them alone."""
    path = pipeline(kind)
    sizes = {name: part.size for name, part in parts_of(path, read_index(path)).items()}
    account = int(max(max(sizes.values()), sum(sizes.values()) * 0.75) / (1 - WORKING_SHARE))
    where = placed(sizes, [account, account])
    assert set(where.values()) == {0, 1}
    with pytest.raises(ValueError, match="fits on no device"):
        placed(sizes, [max(sizes.values()) // 2] * 2)


@pytest.mark.parametrize("told", ["cuda:0=x", "=5", ""])
def test_a_device_that_is_none_is_refused(told: str) -> None:
    with pytest.raises(ValueError, match="--device is DEVICE or DEVICE=MIB"):
        devices_of([told])


def index_of(folder: Path, **members: object) -> Path:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline", **members}))
    return folder


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"x")
    path = index_of(tmp_path, unet=["diffusers", "UNet2DConditionModel"])
    with pytest.raises(ValueError, match=r"unet has weights, but none that are \.safetensors"):
        parts_of(path, read_index(path))


@pytest.mark.parametrize("name", [["my_pipeline", "MyPipeline"], "os.system", "", None, 5])
def test_a_pipeline_that_brings_its_own_code_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="names no pipeline of diffusers' own"):
        read_index(index_of(tmp_path, _class_name=name))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model_index.json").write_bytes(text)
    with pytest.raises(ValueError, match="model_index"):
        read_index(tmp_path)


def test_a_name_that_leads_elsewhere_is_no_part(tmp_path: Path) -> None:
    (tmp_path / "at").mkdir()
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    path = index_of(tmp_path / "at", **{"..": ["diffusers", "UNet2DConditionModel"]})
    with pytest.raises(ValueError, match="has no part with"):
        parts_of(path, read_index(path))


def test_weights_in_half_precision_are_one_variant(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    for name, size in (("model.safetensors", 4), ("model.fp16.safetensors", 2)):
        (tmp_path / "unet" / name).write_bytes(b"x" * size)
    path = index_of(tmp_path, unet=["diffusers", "U"])
    assert parts_of(path, read_index(path))["unet"] == ("diffusers", "U", 4, "")
    (tmp_path / "unet" / "model.safetensors").unlink()
    assert parts_of(path, read_index(path))["unet"] == ("diffusers", "U", 2, "fp16")
