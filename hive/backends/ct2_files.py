"""Weights of CTranslate2 (`model.bin`, version 6), as faster-whisper reads them, checked by their own words.

The file is a list of named tensors, each with its bytes behind it, and a list of other names for them.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

from hive.errors import BadRequest

VERSIONS = range(2, 7)
"""Binary versions of CTranslate2 4."""
WHISPER = b"WhisperSpec\0"
MOST_TENSORS = 1 << 16


def check_whisper(file: BinaryIO, size: int) -> None:
    """Raises BadRequest where it holds no Whisper, or is not as long as its tensors say."""
    version = _number(file, "<I")
    if version not in VERSIONS:
        raise BadRequest(f"it is no model.bin of CTranslate2 (its version is {version})")
    spec = _text(file)
    if spec != WHISPER:
        said = spec.rstrip(b"\0").decode("ascii", "replace")[:40]
        raise BadRequest(f"it holds a {said}, and Hive serves Whisper of CTranslate2's models")
    _number(file, "<I")  # revision
    for _ in range(_count(file)):
        _text(file)
        file.seek(4 * _number(file, "<B") + 1, os.SEEK_CUR)  # shape and type
        file.seek(_number(file, "<I"), os.SEEK_CUR)
        if (end := file.tell()) > size:
            raise BadRequest(f"it is {size} bytes long, and a tensor ends at {end}")
    for _ in range(_count(file)):
        _text(file)
        _text(file)
    if file.tell() != size:
        raise BadRequest(f"it is {size} bytes long and should be {file.tell()}")


def _count(file: BinaryIO) -> int:
    found = _number(file, "<I")
    if found > MOST_TENSORS:
        raise BadRequest(f"{found} tensors: that is no header of a model")
    return found


def _number(file: BinaryIO, form: str) -> int:
    size = struct.calcsize(form)
    if len(raw := file.read(size)) < size:
        raise BadRequest("it ends within its header")
    return int(struct.unpack(form, raw)[0])


def _text(file: BinaryIO) -> bytes:
    size = _number(file, "<H")
    if len(raw := file.read(size)) < size:
        raise BadRequest("it ends within a name")
    return raw
