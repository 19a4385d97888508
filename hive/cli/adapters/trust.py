"""The keys that adapters may be signed with: trusting one, and ending that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hive.adapters.keys import PEM_MAX_BYTES
from hive.cli.adapters.place import Keys, place_of
from hive.cli.call import Answer, CommandCall, StateDir, client_of
from hive.cli.op_options import read
from hive.cli.text import one_line
from hive.errors import BadRequest, DependencyDown

UNLOADED_S = 120.0
"""Requests that what it has signed works on end first."""


def trust(
    call: CommandCall,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A public key or a certificate, in PEM.", show_default=False)
    ],
    keys: Keys = None,
    state_dir: StateDir = None,
) -> None:
    """Trusts a public key: adapters that are signed with it may be installed from now on. On an installed Hive as root.

    Of a certificate only the key counts: its authority is not asked, and its time does not end it; hive adapter revoke
    does. Without --state-dir the Hive is meant that answers, else the installed one.

    Examples:
      sudo hive adapter trust adapter.pub
      hive adapter trust adapter.pub --state-dir ./state
    """
    pem = read(file, PEM_MAX_BYTES, "a key")
    place = place_of(state_dir, keys)
    with place.noted("trust_adapter_key", str(file)) as about:
        try:
            found = place.keys.trust(pem)
        except BadRequest as error:
            raise BadRequest(f"{file}: {error.message}", hint=error.hint) from None
        about["key_id"] = found.id
    answer: Answer = {"key_id": found.id, "curve": found.curve, "keys_dir": str(place.keys.keys_dir)}
    call.show("adapter.trust", answer, lambda: f"{found.id} ({found.curve}) is trusted")
    call.say(f"in {place.keys.keys_dir}")


def revoke(
    call: CommandCall,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The id of a key, or the first digits of it.", show_default=False)
    ],
    keys: Keys = None,
    state_dir: StateDir = None,
) -> None:
    """Revokes a key: nothing it has signed is installed or loaded from now on, and what is loaded of it is unloaded.

    A revoked key stays revoked, also where its file is copied there again. With a whole id a key is revoked before
    anybody trusts it. Where no Hive answers, nothing of it is loaded at the next start. On an installed Hive as root.

    Examples:
      sudo hive adapter revoke 191fda4f679f
      hive adapter revoke 191fda4f679f --state-dir ./state --json
    """
    place = place_of(state_dir, keys)
    with place.noted("revoke_adapter_key", key) as about:
        id = place.keys.revoke(key)
        about["key_id"] = id
    answer: Answer = {"key_id": id, "keys_dir": str(place.keys.keys_dir), "told": False, "unloaded": []}
    if keys is None:
        try:
            told = client_of(None, state_dir).post(f"/api/adapters/keys/{id}/revoke", timeout_s=UNLOADED_S)
            answer |= {"told": True, "unloaded": told["unloaded"]}
        except DependencyDown as error:
            call.say(f"{error.message}: what it has loaded stays until its next start")
    call.show("adapter.revoke", answer, lambda: _revoked(answer))


def _revoked(answer: Answer) -> str:
    unloaded = ", ".join(one_line(name) for name in answer["unloaded"])
    rest = f"; unloaded: {unloaded}" if unloaded else "; nothing of it was loaded" if answer["told"] else ""
    return f"{answer['key_id']} is revoked{rest}"
