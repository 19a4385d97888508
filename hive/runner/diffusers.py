"""diffusers as a server of one model: text to image, one image at a time, ended within a step where nobody waits.

The pipeline is what the directory's model_index.json says it is; its class has to be one of diffusers' own, and its
weights safetensors: nothing that a directory brings along is run.
"""

from __future__ import annotations

import argparse
import inspect
import io
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import transformers
from diffusers.pipelines import stable_diffusion

from hive.runner.device_map import devices_of, placed
from hive.runner.faults import EngineFault
from hive.runner.http_server import CallRoute, EngineCall, said
from hive.runner.image_calls import (
    MOST_STEPS,
    ImageOrder,
    check_multiple,
    cost_of,
    read_generate,
    read_order,
    seeds_of,
    told_image,
    told_images,
    told_step,
)
from hive.runner.pipeline_dir import INDEX, PipelinePart, parts_of, read_index


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this kind."""
    parser.add_argument("--model", type=Path, required=True, help=f"the directory of the pipeline, with {INDEX}")
    parser.add_argument("--steps", type=int, default=0, help="steps where a call does not say; 0: the pipeline's own")
    parser.add_argument(
        "--device",
        action="append",
        metavar="DEVICE[=MIB]",
        help="cpu, cuda:0, …, and its share of memory; several: the pipeline's parts are laid on them. Default: the GPU"
        " there is, or cpu",
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")


class DiffusersProgram:
    """The pipeline of one directory."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._path: Path = arguments.model
        self._asked_steps: int = arguments.steps
        self._dtype = arguments.dtype
        self._devices, self._room = devices_of(arguments.device or ["cuda:0" if torch.cuda.is_available() else "cpu"])
        self._pipeline: Any = None
        self._takes: frozenset[str] = frozenset()
        self.steps = 0
        self.size = (0, 0)
        self.multiple = 8
        self._bytes = 0
        self.device_map: dict[str, str] = {}
        self._images = self._steps_done = self._pixel_steps = 0
        self._work_s = 0.0

    # loading -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads the pipeline. Raises ValueError for what is none of diffusers' that makes images of texts."""
        diffusers.utils.logging.disable_progress_bar()
        for library in (diffusers, transformers):
            library.utils.logging.set_verbosity_error()  # a warning quotes what a prompt has beyond 77 tokens
        index = read_index(self._path)
        kind = getattr(diffusers, index["_class_name"], None)
        if kind is None or not issubclass(kind, diffusers.DiffusionPipeline):
            raise ValueError(f"diffusers {diffusers.__version__} has no pipeline {index['_class_name']}")
        self._takes = frozenset(inspect.signature(kind.__call__).parameters)
        if not {"prompt", "num_inference_steps", "callback_on_step_end"} <= self._takes or "image" in self._takes:
            raise ValueError(f"{index['_class_name']} makes no image of a text alone, step by step")
        parts = parts_of(self._path, index)
        where = placed({name: part.size for name, part in parts.items()}, self._room)
        self._bytes = sum(part.size for part in parts.values())
        self.device_map = {name: self._devices[device] for name, device in where.items()}
        dtype = self._chosen_dtype()
        loaded = {name: self._load_part(name, part, dtype) for name, part in parts.items()}
        pipeline = kind.from_pretrained(self._path, dtype=dtype, local_files_only=True, use_safetensors=True, **loaded)
        pipeline.set_progress_bar_config(disable=True)
        self._pipeline = pipeline
        self._learn(kind)
        said(f"{type(pipeline).__name__} on {', '.join(dict.fromkeys(self._devices))}, {dtype}")

    def _load_part(self, name: str, part: PipelinePart, dtype: Any) -> Any:
        """One part, straight on its device; where there are several, it fetches there what it is given."""
        device = self.device_map[name]
        words = {"dtype": dtype, "local_files_only": True, "use_safetensors": True, "device_map": {"": device}}
        if part.variant:
            words["variant"] = part.variant
        loaded = class_of(name, part).from_pretrained(self._path / name, **words)
        if len(self._devices) > 1:
            accelerate.dispatch_model(loaded, {"": device}, main_device=device, force_hooks=True)
        return loaded

    def _chosen_dtype(self) -> Any:
        if self._dtype != "auto":
            return getattr(torch, self._dtype)
        if all(device == "cpu" for device in self._devices):
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16

    def _learn(self, kind: Any) -> None:
        """Size, steps and multiple of this pipeline."""
        pipeline = self._pipeline
        own = inspect.signature(kind.__call__).parameters["num_inference_steps"].default
        self.steps = self._asked_steps or (own if isinstance(own, int) else 50)
        scale = int(getattr(pipeline, "vae_scale_factor", 8))
        processor = getattr(getattr(pipeline, "image_processor", None), "config", None)
        patch = getattr(pipeline, "patch_size", 1)
        self.multiple = math.lcm(8, int(getattr(processor, "vae_scale_factor", scale)) * (patch if patch else 1))
        model = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
        side: Any = getattr(pipeline, "default_sample_size", None)
        side = side or getattr(getattr(model, "config", None), "sample_size", 64)
        width, height = (side, side) if isinstance(side, int) else (side[1], side[0])
        self.size = (width * scale, height * scale)

    # what is told --------------------------------------------------------------------------------------------------

    def version(self) -> str:
        return str(diffusers.__version__)

    def facts(self) -> dict[str, Any]:
        return {
            "size_bytes": self._bytes,
            "capabilities": ["image_generation"],
            "meta": {
                "pipeline": type(self._pipeline).__name__,
                "size": f"{self.size[0]}x{self.size[1]}",
                "size_multiple": self.multiple,
                "steps": self.steps,
            },
            "devices": self.device_map,
        }

    def counts(self) -> Mapping[str, float]:
        return {
            "hive_runner_images_total": self._images,
            "hive_runner_steps_total": self._steps_done,
            "hive_runner_pixel_steps_total": self._pixel_steps,
            "hive_runner_work_seconds_total": self._work_s,
        }

    def routes(self) -> dict[tuple[str, str], CallRoute]:
        return {
            ("POST", "/v1/images/generations"): CallRoute(self.images),
            ("POST", "/generate"): CallRoute(self.generate),
        }

    # work ----------------------------------------------------------------------------------------------------------

    def images(self, call: EngineCall) -> None:
        """Answers as OpenAI does: all at once, or with an event for each step and each image."""
        order = read_order(call.json())
        size, steps = self._settled(order)
        call.cost = cost_of(order.number, size, steps)
        created = int(time.time())
        if not order.streams:
            call.answer_json(told_images(created, order, size, self._all(call, order, size, steps)))
            return
        for image, seed in enumerate(seeds_of(order)):
            data = self._one(call, order, size, steps, seed, image, tell=True)
            name = "image_generation.completed"
            call.event(told_image(created, order, size, image, data, seed), name)
        call.event("[DONE]")
        call.end_events()

    def generate(self, call: EngineCall) -> None:
        """Answers a plain question: the images and their seeds."""
        order = read_generate(call.json())
        size, steps = self._settled(order)
        call.cost = cost_of(order.number, size, steps)
        told = told_images(int(time.time()), order, size, self._all(call, order, size, steps))
        call.answer_json(
            {
                "images": [row["b64_json"] for row in told["data"]],
                "seeds": [row["seed"] for row in told["data"]],
                "width": size[0],
                "height": size[1],
                "steps": steps,
                "format": order.format,
            }
        )

    def _settled(self, order: ImageOrder) -> tuple[tuple[int, int], int]:
        size = order.size or self.size
        check_multiple(size, self.multiple)
        if order.negative and ("negative_prompt" not in self._takes or "true_cfg_scale" in self._takes):
            why = f"negative_prompt: {type(self._pipeline).__name__} takes none"
            raise EngineFault(400, why, "bad_request", param="negative_prompt")
        return size, min(order.steps or self.steps, MOST_STEPS)

    def _all(self, call: EngineCall, order: ImageOrder, size: tuple[int, int], steps: int) -> list[tuple[bytes, int]]:
        seeds = seeds_of(order)
        return [(self._one(call, order, size, steps, seed, image), seed) for image, seed in enumerate(seeds)]

    def _one(
        self,
        call: EngineCall,
        order: ImageOrder,
        size: tuple[int, int],
        steps: int,
        seed: int,
        image: int,
        *,
        tell: bool = False,
    ) -> bytes:
        """Makes one image. Raises CallerGone at the end of the step in which the client has left."""
        call.check_caller()
        began, before = time.monotonic(), self._steps_done

        def after_step(_: Any, step: int, __: Any, kept: dict[str, Any]) -> dict[str, Any]:
            self._steps_done += 1
            self._pixel_steps += size[0] * size[1]
            call.check_caller()
            if tell:
                call.event(told_step(image, step + 1, steps), "image_generation.progress")
            return kept

        words: dict[str, Any] = {
            "prompt": order.prompt,
            "width": size[0],
            "height": size[1],
            "num_inference_steps": steps,
            "generator": torch.Generator("cpu").manual_seed(seed),
            "callback_on_step_end": after_step,
            "output_type": "pil",
        }
        if order.negative:
            words["negative_prompt"] = order.negative
        if order.guidance is not None and "guidance_scale" in self._takes:
            words["guidance_scale"] = order.guidance
        try:
            made = self._pipeline(**words).images[0]
        except (ValueError, IndexError) as error:
            if self._steps_done > before:
                raise
            why = f"this pipeline takes no {size[0]}x{size[1]} in {steps} steps: {str(error)[:200]}"
            raise EngineFault(400, why, "bad_request") from None
        finally:
            self._work_s += time.monotonic() - began
        self._images += 1
        return encoded(made, order)


def encoded(image: Any, order: ImageOrder) -> bytes:
    """The image as a file of its format."""
    file = io.BytesIO()
    words: dict[str, Any] = {} if order.format == "png" else {"quality": order.quality}
    image.convert("RGB").save(file, format=order.format.upper(), **words)
    return file.getvalue()


def class_of(name: str, part: PipelinePart) -> Any:
    """The class of a part. Raises ValueError for one that comes from elsewhere: what a directory brings is not run."""
    if part.library == "stable_diffusion" and part.kind == "StableDiffusionSafetyChecker":
        return stable_diffusion.StableDiffusionSafetyChecker
    library = {"diffusers": diffusers, "transformers": transformers}.get(part.library)
    if (found := getattr(library, part.kind, None)) is None:
        raise ValueError(f"{name} is a {part.library}.{part.kind}: neither diffusers nor transformers has it here")
    return found


Program = DiffusersProgram
"""As `hive.runner.entry` looks for it."""
