"""The parts of models' names, as every kind of server spells them; and what the names do not tell."""

from __future__ import annotations

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from hypothesis import example, given
from hypothesis import strategies as st

from hive.models.names import (
    Family,
    leaves_out_only_size_and_purpose,
    parse,
    quantization_of,
    spelled,
)

INSTRUCT = "llama-3.2-3b-instruct"


@pytest.mark.parametrize(
    ("name", "base", "variant", "publisher"),
    [
        # Ollama's tags
        ("llama3.2", "llama-3.2", "", ""),
        ("llama3.2:latest", "llama-3.2", "", ""),
        ("llama3.2:q4_0", "llama-3.2", "Q4_0", ""),
        ("llama3.2:1b", "llama-3.2-1b", "", ""),
        ("llama3.2:3b-instruct-q4_K_M", INSTRUCT, "Q4_K_M", ""),
        ("llama3.2:3b-instruct-fp16", INSTRUCT, "F16", ""),
        ("mixtral:8x7b-instruct-v0.1-q3_K_S", "mixtral-8x-7b-instruct-v-0.1", "Q3_K_S", ""),
        ("gemma3n:e4b-it-q8_0", "gemma-3n-e-4b-it", "Q8_0", ""),
        ("registry.ollama.ai/library/llama3.2:q4_0", "llama-3.2", "Q4_0", ""),
        ("mistral:7b+Q4_0", "mistral-7b", "Q4_0", ""),
        ("localhost:5000/team/llama3.2:3b-q8_0", "llama-3.2-3b", "Q8_0", "localhost:5000/team"),
        ("registry.local:5000/llama3.2", "llama-3.2", "", "registry.local:5000"),
        ("hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", INSTRUCT, "Q4_K_M", "bartowski"),
        ("hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF", INSTRUCT, "", "bartowski"),
        # files
        ("Llama-3.2-3B-Instruct-Q4_K_M.gguf", INSTRUCT, "Q4_K_M", ""),
        ("Llama-3.2-3B-Instruct-Q4_K_M-00001-of-00003.gguf", INSTRUCT, "Q4_K_M", ""),
        ("/var/lib/hive/models/Llama-3.2-3B-Instruct-IQ4_XS.gguf", INSTRUCT, "IQ4_XS", ""),
        ("Llama-3.2-3B-Instruct-UD-Q4_K_XL.gguf", INSTRUCT, "Q4_K_XL", ""),
        ("Llama-3.2-3B-Instruct.i1-Q4_K_M.gguf", INSTRUCT, "Q4_K_M", ""),
        ("llama-3.2-3b-instruct.Q5_K_S.gguf", INSTRUCT, "Q5_K_S", ""),
        ("Llama-3.2-3B-Instruct-BF16.gguf", INSTRUCT, "BF16", ""),
        ("gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b", "MXFP4", ""),
        ("/var/lib/hive/models/default.gguf", "default", "", ""),
        # vLLM's
        ("meta-llama/Llama-3.2-3B-Instruct", INSTRUCT, "", "meta-llama"),
        ("TheBloke/Llama-2-7B-AWQ", "llama-2-7b", "AWQ", "thebloke"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama-3.1-8b-instruct", "AWQ", "hugging-quants"),
        ("neuralmagic/Meta-Llama-3-8B-Instruct-FP8", "meta-llama-3-8b-instruct", "FP8", "neuralmagic"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "qwen-3-8b", "FP8", "redhatai"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen-2.5-7b-instruct", "GPTQ-INT4", "qwen"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen-2.5-7b-instruct", "GPTQ-INT8", "qwen"),
        ("TheBloke/Llama-2-7B-GPTQ-4bit-128g", "llama-2-7b", "GPTQ-INT4", "thebloke"),
        ("neuralmagic/Llama-3-8B-quantized.w4a16", "llama-3-8b", "W4A16", "neuralmagic"),
        ("neuralmagic/Llama-3-8B-quantized.w8a8", "llama-3-8b", "W8A8", "neuralmagic"),
        ("unsloth/Qwen3-4B-unsloth-bnb-4bit", "qwen-3-4b", "4BIT", "unsloth"),
        ("mlx-community/Qwen3-4B-8bit", "qwen-3-4b", "8BIT", "mlx-community"),
        ("nvidia/Qwen3-8B-NVFP4", "qwen-3-8b", "NVFP4", "nvidia"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen-3-30b-a-3b-instruct-2507", "FP8", "qwen"),
    ],
)
def test_a_name_says_model_variant_and_publisher(name: str, base: str, variant: str, publisher: str) -> None:
    ref = parse(name)
    assert (ref.base, ref.variant.name if ref.variant else "", ref.publisher) == (base, variant, publisher)


@pytest.mark.parametrize(
    "name",
    [
        *("q4", "q4_0", "q8_0:latest", "awq", "fp8", "int8", "f16:latest", "GPTQ"),  # nothing would be left
        *("phi-4", "phi4", "qwen2.5", "llama-3", "gemma-2-2b", "yi-34b-200k", "command-r", "k2"),  # versions
        *("int8-parser", "my-fp8-tuned-model", "q4_0-finetune", "awq/model"),  # not at the end
        *("sales-2025-q4", "sales-2025-q3", "agent:q8"),  # a quarter of a year; llama.cpp has no type q4
        *("gemma3:27b-it-qat", "gpt-oss:120b-cloud", "x-w4", "x-nf4a", "model-10bit", "model-f160"),
        *("TheBloke/Llama-2-7B@gptq-8bit-128g", "", ":", "/", "@", "---"),
    ],
)
def test_what_only_looks_like_a_quantization_is_none(name: str) -> None:
    assert parse(name).variant is None


def test_a_model_that_is_called_like_a_quantization_has_variants_like_others() -> None:
    ref = parse("q4:q4_0")
    assert (ref.base, ref.variant and ref.variant.name) == ("q-4", "Q4_0")
    assert parse("fp8-F16.gguf").base == "fp-8"


def test_what_it_was_trained_for_is_no_variant() -> None:
    trained = parse("google/gemma-3-27b-it-qat-q4_0-gguf:Q4_0")
    assert (trained.base, trained.variant and trained.variant.name) == ("gemma-3-27b-it-qat", "Q4_0")
    assert trained.base != parse("gemma3:27b-it-q4_0").base


def test_a_revision_is_told_apart_and_a_digest_is_one() -> None:
    assert parse("meta-llama/Llama-3-8B@main").revision == "main"
    assert parse("llama3.2:3b@sha256:00ff").revision == "sha256:00ff"
    assert parse("llama3.2:3b@sha256:00ff").base == "llama-3.2-3b"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Llama3.2", "llama3.2:latest"),
        ("llama3.2:3b-instruct", "Llama-3.2-3B-Instruct"),
        ("phi4", "Phi-4"),
        ("gemma3:27b-it-q4_0", "gemma-3-27b-it-Q8_0.gguf"),
    ],
)
def test_two_spellings_are_one_model(one: str, other: str) -> None:
    assert parse(one).base == parse(other).base


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("llama3.2:1b", "llama3.2:3b"),
        ("llama3.2:3b-instruct", "llama3.2:3b-text"),
        ("qwen3:2b", "qwen:32b"),
        ("qwen2.5:7b", "qwen25:7b"),
        ("llama3.2:11b", "llama3.2-vision:11b"),
        ("Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct-1M"),
        ("gpt-oss:120b", "gpt-oss:120b-cloud"),
        ("c", "c++"),
        ("sales-2025-q3", "sales-2025-q4"),
    ],
)
def test_two_names_are_two_models(one: str, other: str) -> None:
    assert parse(one).base != parse(other).base
    assert spelled(one) != spelled(other)


@pytest.mark.parametrize(
    ("short", "full", "is_it"),
    [
        ("llama3.2", "llama3.2:3b", True),
        ("llama3.2", "llama3.2:3b-instruct", True),
        ("llama3.2:3b", "Llama-3.2-3B-Instruct", True),
        ("qwen3:30b", "Qwen3-30B-A3B-Instruct", True),
        ("mixtral", "mixtral:8x7b", True),
        ("gemma3", "gemma-3-270m-it", True),
        ("gemma3n", "gemma3n:e4b-it", True),
        ("llama3.2:3b", "llama3.2:3b", False),
        ("llama", "llama-3.2-3b", False),
        ("llama3", "llama3.2:3b", False),
        ("llama3.2", "llama3.2-vision:11b", False),
        ("qwen2.5", "qwen2.5-coder:7b", False),
        ("Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct-1M", False),
        ("llama3.1", "llama3.1:8b-text", False),
        ("gpt-oss", "gpt-oss:120b-cloud", False),
    ],
)
def test_only_size_and_purpose_may_be_left_out(short: str, full: str, is_it: bool) -> None:
    assert leaves_out_only_size_and_purpose(parse(short).base, parse(full).base) is is_it


# quantizations --------------------------------------------------------------------------------------------------------


def test_every_file_type_of_llama_cpp_has_a_row() -> None:
    names = {kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType} - {"GUESSED"}
    missing = {name for name in names if quantization_of(name) is None}
    assert not missing


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if kind.name not in {"Q8_1", "Q8_K"}])
def test_no_quantization_is_said_to_be_smaller_than_its_blocks(kind: GGMLQuantizationType) -> None:
    """A file has larger blocks beside those it is named for, at most an eighth of it at 16 bits."""
    found = quantization_of(kind.name)
    if found is None:
        assert kind.name.startswith(("I", "F64"))  # no format of a model
        return
    items, size = GGML_QUANT_SIZES[kind]
    block_bits = size * 8 / items
    assert block_bits - 0.01 <= found.bits <= block_bits + 0.8


def test_larger_names_have_more_bits() -> None:
    order = ["IQ1_S", "Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_XS", "Q4_0", "Q4_K_S", "Q4_K_M", "Q4_K_L", "Q5_K_S", "Q5_K_M"]
    order += ["Q6_K", "Q8_0", "F16", "F32"]
    found = [quantization_of(name) for name in order]
    bits = [one.bits for one in found if one is not None]
    assert len(bits) == len(order)
    assert bits == sorted(set(bits))


def test_the_quantizations_of_the_specification_are_known_by_its_own_spelling() -> None:
    for name in ("q4_0", "q4_K_M", "q4_K_S", "q8_0", "q5_K_M", "q5_K_S", "f16"):
        assert quantization_of(name) is not None, name


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("q4_0", Family.GGUF),
        ("AWQ", Family.AWQ),
        ("gptq", Family.GPTQ),
        ("FP8", Family.FP8),
        ("NVFP4", Family.FP4),
        ("w8a8", Family.INT),
        ("bf16", Family.PLAIN),
    ],
)
def test_a_quantization_has_a_family(name: str, family: Family) -> None:
    found = quantization_of(name)
    assert found is not None
    assert found.family is family


@pytest.mark.parametrize("one", ["Q4_K", "q4-k-m", " Q4_K_M ", "q4_k_m"])
def test_one_quantization_has_one_name(one: str) -> None:
    assert quantization_of(one) == quantization_of("Q4_K_M")


@given(st.text(max_size=60))
@example("HUGGINGFACE.CO/")
@example(":latest")
def test_any_text_is_a_name(text: str) -> None:
    """`huggingface.co/` and `:latest`, which are all default, had an empty base each, so that they were one model."""
    ref = parse(text)
    assert parse(text) == ref
    assert ref.base or not text.strip()


@given(
    st.sampled_from(["llama3.2", "qwen2.5-coder", "phi-4", "q4", "gemma3"]),
    st.sampled_from(["", "1b", "3b-instruct", "8x7b"]),
    st.sampled_from(["q4_0", "Q4_K_M", "IQ4_XS", "q8_0", "F16", "AWQ", "fp8", "w4a16", "GPTQ-Int4"]),
)
def test_a_quantization_put_to_a_name_is_found_and_changes_nothing_else(model: str, size: str, variant: str) -> None:
    plain = parse(f"{model}:{size}" if size else model)
    tagged = parse(f"{model}:{size}-{variant}" if size else f"{model}:{variant}")
    file = parse(f"{model}-{size}-{variant}.gguf" if size else f"{model}-{variant}.gguf")
    assert (tagged.base, file.base) == (plain.base, plain.base)
    assert tagged.variant == file.variant == quantization_of(variant)
