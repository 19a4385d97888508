"""Small adapters and the small models they are for, written by hand: no weights in them mean anything."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from hive.adapters import oms
from hive.adapters.base_model import BaseModel
from hive.adapters.directory import AdapterDirectory
from hive.adapters.install import install
from hive.adapters.keys import EcSecretKey, TrustedKeys
from hive.adapters.record import AdapterRecord
from hive.adapters.source import opened

INPUTS, OUTPUTS = 64, 32
TARGET = "model.layers.0.self_attn.q_proj"
BASE = "tiny-base"


def secret_pem(curve: ec.EllipticCurve | None = None) -> bytes:
    key = ec.generate_private_key(curve or ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_key(curve: ec.EllipticCurve | None = None) -> EcSecretKey:
    return EcSecretKey(secret_pem(curve))


Tensors = dict[str, tuple[str, list[int], bytes]]


def safetensors(tensors: Tensors, **changes: Any) -> bytes:
    """A file; `changes` are made to the entries of its header, by name."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    header |= changes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def pair(rank: int = 8, *, inputs: int = INPUTS, outputs: int = OUTPUTS, fill: int = 1) -> Tensors:
    """The two tensors of one change, as PEFT names them."""
    named = f"base_model.model.{TARGET}"
    down, up = (np.full(rank * other, fill, dtype=np.float32).tobytes() for other in (inputs, outputs))
    return {
        f"{named}.lora_A.weight": ("F32", [rank, inputs], down),
        f"{named}.lora_B.weight": ("F32", [outputs, rank], up),
    }


def peft_adapter(directory: Path, rank: int = 8, *, fill: int = 1, base: str = BASE, **config: Any) -> Path:
    """A directory as PEFT's save_pretrained writes it."""
    directory.mkdir(parents=True)
    told = {"peft_type": "LORA", "r": rank, "base_model_name_or_path": base, "lora_alpha": 16, **config}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    (directory / "adapter_model.safetensors").write_bytes(safetensors(pair(rank, fill=fill)))
    (directory / "README.md").write_text("# An adapter\n")
    return directory


def peft_base(directory: Path, *, inputs: int = INPUTS) -> BaseModel:
    directory.mkdir(parents=True)
    weight = np.zeros(inputs * OUTPUTS, dtype=np.float32).tobytes()
    (directory / "model.safetensors").write_bytes(safetensors({f"{TARGET}.weight": ("F32", [OUTPUTS, inputs], weight)}))
    return BaseModel(BASE, directory)


def gguf_adapter(path: Path, rank: int = 8, *, architecture: str = "llama", kind: str = "adapter") -> Path:
    """A file as llama.cpp's convert_lora_to_gguf.py writes it, of an attention matrix and of the embedding."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    writer.add_array("adapter.alora.invocation_tokens", [1, 2, 3])
    for name, (down, up) in {
        "blk.0.attn_q.weight": ((rank, INPUTS), (OUTPUTS, rank)),
        "token_embd.weight": ((100, rank), (INPUTS, rank)),  # the other way round, as llama.cpp wants it
    }.items():
        writer.add_tensor(f"{name}.lora_a", np.ones(down, dtype=np.float32))
        writer.add_tensor(f"{name}.lora_b", np.ones(up, dtype=np.float16))
    _write(writer)
    return path


def gguf_base(
    path: Path, *, architecture: str = "llama", inputs: int = INPUTS, block: int = 0, embedding: str = "token_embd"
) -> BaseModel:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_tensor(f"blk.{block}.attn_q.weight", np.zeros((OUTPUTS, inputs), dtype=np.float32))
    writer.add_tensor(f"{embedding}.weight", np.zeros((100, inputs), dtype=np.float16))
    _write(writer)
    return BaseModel(BASE, path)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_header(keys: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] | None = None) -> bytes:
    """A file of raw keys and tensors. `counts`: what it says of their numbers, tensors first."""
    return b"GGUF" + struct.pack("<IQQ", 3, *(counts or (0, 0))) + keys + tensors


def sign(directory: Path, key: EcSecretKey) -> Path:
    """As `hive adapter sign` does."""
    with opened(directory, beneath=directory.parent) as found:
        digests = {path: found.copy(path, None, lambda _: None).sha256 for path in found.files}
    (directory / "model.sig").write_bytes(oms.sign(digests, key, subject=directory.name, ignored=["model.sig"]))
    return directory


def model_signing(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The reference implementation, as a person runs it."""
    return subprocess.run([sys.executable, "-m", "model_signing", *map(str, words)], capture_output=True, text=True)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


class Box:
    """A directory that adapters come from, one where they go, and one of trusted keys."""

    def __init__(self, root: Path) -> None:
        self.beneath = root / "from"
        self.beneath.mkdir(parents=True)
        self.adapters = AdapterDirectory(root / "adapters")
        self.keys = TrustedKeys(root / "keys")
        self.key = new_key()
        self.keys.trust(self.key.public.pem)

    def signed(self, name: str = "legal", **options: Any) -> Path:
        return sign(peft_adapter(self.beneath / name, **options), self.key)

    def install(self, source: Path | str, **changes: Any) -> AdapterRecord:
        told: dict[str, Any] = {
            "name": "",
            "base": BaseModel(BASE),
            "beneath": self.beneath,
            "policy": "required",
            "keys": self.keys,
            "max_rank": 64,
            "max_mb": 16,
            **changes,
        }
        return install(self.adapters, Path(source), told.pop("name"), told.pop("base"), **told)

    def there(self) -> list[str]:
        """All that is in the directory of adapters, but the directories themselves."""
        return sorted(
            str(path.relative_to(self.adapters.root)) for path in self.adapters.root.rglob("*") if path.is_file()
        )
