"""The record of an installed adapter: its files, the model it is for, and who signed it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import msgspec

from hive.errors import BadRequest

GGUF, SAFETENSORS = "gguf", "safetensors"
"""Formats: one file for llama-server, a directory for vLLM."""
VERIFIED, UNSIGNED = "verified", "unsigned"
"""Values of `signature`. `unsigned`: nobody's word was asked for, or there was none."""
SHORT_DIGEST = 12
"""Hex digits of a digest in the name by which a server knows an adapter."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")


class AdapterFile(msgspec.Struct, frozen=True):
    """One file of an adapter: its path below the adapter's directory, its bytes, its SHA-256 as 64 hex digits."""

    path: str
    size: int
    sha256: str


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An installed adapter. `base`: the model it is an adapter on, by its name here. `bytes`: of all its files.

    `key_id`: of the key that verified it; empty where it is unsigned. `installed_at`: Unix seconds.
    """

    name: str
    digest: str
    base: str
    format: str
    rank: int
    bytes: int
    files: tuple[AdapterFile, ...]
    signature: str
    key_id: str = ""
    installed_at: float

    @property
    def engine_name(self) -> str:
        """The name by which an inference server knows exactly these weights, and no others ever."""
        return engine_name(self.name, self.digest)


def digest_of(files: Iterable[AdapterFile]) -> str:
    """The digest of an adapter: over the paths, sizes and hashes of its files, in whatever order they come.

    >>> a, b = AdapterFile("a", 1, "00"), AdapterFile("b", 2, "11")
    >>> digest_of([a, b]) == digest_of([b, a]), digest_of([a]) == digest_of([b]), len(digest_of([a]))
    (True, False, 64)
    """
    told = sorted((file.path, file.size, file.sha256) for file in files)
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


def engine_name(name: str, digest: str) -> str:
    """Name by which an engine knows these weights; never that of others.

    >>> engine_name("legal", "3f9c11a04be2" + "0" * 52)
    'legal@3f9c11a04be2'
    """
    return f"{name}@{digest[:SHORT_DIGEST]}"


def check_name(name: str) -> str:
    """The name, where an adapter may be called so. Raises BadRequest.

    >>> check_name("legal-v2"), check_name("legal@1")
    Traceback (most recent call last):
    hive.errors.BadRequest: 'legal@1' is no name for an adapter
    """
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:80]!r} is no name for an adapter",
            hint="letters, digits and . _ - (a letter or digit first), at most 64; --name gives it another one",
        )
    return name


def why_no_record(record: AdapterRecord, *, name: str, digest: str) -> str:
    """The reason why a record is none of the directory `name`/`digest`; empty where it is.

    >>> file = AdapterFile("a.gguf", 1, "00")
    >>> told = AdapterRecord(name="a", digest=digest_of([file]), base="m", format="gguf", rank=8, bytes=1,
    ...     files=(file,), signature="unsigned", installed_at=0.0)
    >>> why_no_record(told, name="a", digest=told.digest), why_no_record(told, name="b", digest=told.digest)
    ('', 'it is of another name or digest')
    """
    if (record.name, record.digest) != (name, digest):
        return "it is of another name or digest"
    if digest_of(record.files) != digest:
        return "its digest is not of its files"
    return "" if record.files else "it has no files"
