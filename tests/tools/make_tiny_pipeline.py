#!/usr/bin/env python3
"""Makes a tiny random-weight pipeline that diffusers can load: 1 to 7 MB, nothing is downloaded.

    make_tiny_pipeline.py FOLDER [--class sd|sdxl|sd3|flux] [--seed N]

Classes: StableDiffusionPipeline, StableDiffusionXLPipeline, StableDiffusion3Pipeline (SD3.5's), FluxPipeline. The
folder is laid out as diffusers' own: model_index.json and a directory a component. Weights are random (seeded), so that
images are noise: the same noise for the same seed. Runs in the environment of diffusers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,-'", "bee", "hive", "a", "the", "of", "honey"]
LENGTH = 77
"""Tokens of a prompt that CLIP reads."""


def clip_tokenizer() -> Any:
    letters = [*dict.fromkeys(word for word in WORDS if len(word) == 1)]
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocab = {name: index for index, name in enumerate(names)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LENGTH)


def t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", *(f"\u2581{word}" for word in WORDS), *WORDS, "\u2581"]
    vocab = [(piece, -float(index)) for index, piece in enumerate(dict.fromkeys(pieces))]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=LENGTH)


def clip(*, hidden: int = 32, projection: int = 32, projects: bool = False) -> Any:
    tokenizer = clip_tokenizer()
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=projection,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel)(config)


def t5(hidden: int = 32) -> Any:
    config = transformers.T5Config(
        vocab_size=len(t5_tokenizer()), d_model=hidden, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    return transformers.T5EncoderModel(config)


def vae(channels: int, **more: Any) -> Any:
    """Four blocks: eight pixels a side for each value, as the large ones have."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=64,
        **more,
    )


def stable_diffusion() -> Any:
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    return diffusers.StableDiffusionPipeline(
        unet=unet,
        vae=vae(4),
        scheduler=diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        norm_num_groups=4,
    )
    return diffusers.StableDiffusionXLPipeline(
        unet=unet,
        vae=vae(4),
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        text_encoder=clip(),
        text_encoder_2=clip(projects=True),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        force_zeros_for_empty_prompt=True,
    )


def stable_diffusion_3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        vae=vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=clip(projects=True),
        text_encoder_2=clip(projects=True),
        text_encoder_3=t5(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=t5_tokenizer(),
    )


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        transformer=transformer,
        vae=vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=clip(),
        text_encoder_2=t5(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=t5_tokenizer(),
    )


CLASSES: dict[str, Callable[[], Any]] = {
    "sd": stable_diffusion,
    "sdxl": stable_diffusion_xl,
    "sd3": stable_diffusion_3,
    "flux": flux,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--class", dest="kind", choices=CLASSES, default="sd")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    pipeline = CLASSES[asked.kind]()
    pipeline.save_pretrained(asked.folder, safe_serialization=True)
    size = sum(file.stat().st_size for file in asked.folder.rglob("*") if file.is_file())
    print(f"{asked.folder}: {type(pipeline).__name__}, {size} bytes")


if __name__ == "__main__":
    main()
