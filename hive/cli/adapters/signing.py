"""Signing an adapter where it is made, and verifying one: neither needs a Hive."""

from __future__ import annotations

import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from hive.adapters import oms
from hive.adapters.install import chosen, look_at
from hive.adapters.keys import PEM_MAX_BYTES, EcPublicKey, EcSecretKey, KnownKeys, OneKey, public_key
from hive.adapters.record import VERIFIED, AdapterFile, AdapterRecord
from hive.adapters.source import SIGNATURE, AdapterSource, opened
from hive.cli.adapters.place import Keys, OfflineAdapters, place_of
from hive.cli.call import Answer, CommandCall, StateDir
from hive.cli.op_options import read
from hive.cli.text import fields, one_line, size
from hive.errors import BadRequest, NotPermitted, SignatureUnverifiable, UsageError
from hive.host.files import write_whole
from hive.terminal_text import counted

SIGNATURE_MODE = 0o644


def sign(
    call: CommandCall,
    adapter: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A directory as PEFT writes it, or a *.gguf file.", show_default=False),
    ],
    key: Annotated[Path, typer.Option("--key", "-k", metavar="FILE", help="The signer's secret key, in PEM.")],
) -> None:
    """Signs an adapter with a key: all files of the directory, but what Git keeps. It needs no Hive and no network.

    The signature goes to model.sig in the directory, or to FILE.sig beside a file, in place of an earlier one. It is
    OpenSSF Model Signing's: model_signing verify takes it, and Hive takes what model_signing sign key makes.

    Examples:
      hive adapter sign ./legal-lora --key adapter.key
      hive adapter sign ./legal-lora.gguf --key adapter.key
    """
    secret = _secret(key)
    with _opened(adapter) as found:
        chosen(tuple(found.files), is_file=found.is_file)
        digests = {found.signed_as(file.path): file.sha256 for file in _hashed(found)}
        ignored = () if found.is_file else (SIGNATURE,)
        to = found.place / (f"{found.name}.sig" if found.is_file else SIGNATURE)
        bundle = oms.sign(digests, secret, subject=found.name, ignored=ignored)
    write_whole(to, bundle, mode=SIGNATURE_MODE)
    answer: Answer = {"path": str(adapter), "signature": str(to), "key_id": secret.public.id, "files": sorted(digests)}
    count = counted(len(digests), "file")
    call.show("adapter.sign", answer, lambda: f"{one_line(str(to))}: {count}, signed by {secret.public.id}")


def verify(
    call: CommandCall,
    adapter: Annotated[
        str,
        typer.Argument(metavar="PATH|NAME", help="A directory or a file, or an installed adapter.", show_default=False),
    ],
    key: Annotated[
        Path | None,
        typer.Option("--key", "-k", metavar="FILE", help="Only this public key counts.", show_default=False),
    ] = None,
    keys: Keys = None,
    state_dir: StateDir = None,
) -> None:
    """Verifies that an adapter is what a trusted key has signed, as an installation would. Nothing is installed.

    A word with a / or that is a file here is a path, any other one the name of an installed adapter: its files are
    hashed once more, and its key has to be trusted still. Exit code 4 where it is refused.

    Examples:
      hive adapter verify ./legal-lora
      hive adapter verify ./legal-lora --key adapter.pub
      hive adapter verify legal
    """
    if "/" in adapter or Path(adapter).exists():
        answer = _of_path(Path(adapter), place_of(state_dir, keys).keys if key is None else OneKey(_public(key)))
    elif key is not None:
        raise UsageError(
            f"there is no {adapter[:80]} here", hint="--key is for files: of what is installed it is known"
        )
    else:
        answer = _of_installed(adapter, place_of(state_dir, keys))
    call.show("adapter.verify", answer, lambda: _shown(answer))


def _of_path(path: Path, keys: KnownKeys) -> Answer:
    with _opened(path) as found:
        if (bundle := found.signature(oms.BUNDLE_MAX_BYTES)) is None:
            raise SignatureUnverifiable(f"{path} is not signed")
        signed = oms.read_signed(bundle, keys)
        taken = chosen(tuple(found.files), is_file=found.is_file)
        hashed = _hashed(found)
        signed.compare({found.signed_as(file.path): file.sha256 for file in hashed})
        files = tuple(file for file in hashed if file.path in taken)
        weights = look_at(found.place, files)
    about = {"format": weights.format, "rank": weights.rank, "bytes": sum(file.size for file in files)}
    return {"path": str(path), "name": found.name, **about, "signature": VERIFIED, "key_id": signed.key_id}


def _of_installed(name: str, place: OfflineAdapters) -> Answer:
    record: AdapterRecord = place.adapters.find(name)
    place.adapters.check(record)
    place.keys.check(record, place.policy)
    about = {"format": record.format, "rank": record.rank, "bytes": record.bytes}
    told = {"signature": record.signature, "key_id": record.key_id}
    return {"path": str(place.adapters.path(record)), "name": record.engine_name, **about, **told}


def _opened(path: Path) -> AbstractContextManager[AdapterSource]:
    """The adapter at a path of this user's, who may have links on the way to it, but none in it."""
    real = path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
    return opened(real, beneath=real.parent)


def _hashed(found: AdapterSource) -> list[AdapterFile]:
    return [found.copy(path, None, lambda _: None) for path in found.files]


def _secret(path: Path) -> EcSecretKey:
    """Raises NotFound, NotPermitted where others can read it, BadRequest."""
    pem = read(path, PEM_MAX_BYTES, "a key")
    mode = path.stat().st_mode
    if mode & 0o077:
        raise NotPermitted(
            f"{path} is a secret, and others can get at it: mode {stat.S_IMODE(mode):o}",
            hint=f"chmod 600 {path}; if somebody may have read it, make another",
        )
    try:
        return EcSecretKey(pem)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error.message}", hint=error.hint) from None


def _public(path: Path) -> EcPublicKey:
    try:
        return public_key(read(path, PEM_MAX_BYTES, "a key"))
    except BadRequest as error:
        raise BadRequest(f"{path}: {error.message}", hint=error.hint) from None


def _shown(answer: Answer) -> str:
    pairs = [
        ("Adapter", one_line(answer["name"])),
        ("Signed", f"by {answer['key_id']}" if answer["key_id"] else "by nobody"),
        ("Format", answer["format"]),
        ("Rank", str(answer["rank"])),
        ("Size", size(answer["bytes"])),
        ("Path", one_line(answer["path"])),
    ]
    return fields(pairs)
