"""Tokens of the REST API on TCP: making, listing and revoking them."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, ago, span

Name = Annotated[str, typer.Argument(metavar="NAME", help="The token's name.", show_default=False)]


class TokenRole(StrEnum):
    """Equal to `hive.domain.Role`: that import would cost every command 20 ms."""

    SCRAPER = "scraper"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


def create(
    call: CommandCall,
    name: Name,
    role: Annotated[
        TokenRole, typer.Option(help="What it may: read /metrics, look too, steer agents too, change Hive itself too.")
    ],
    expires: Annotated[
        str | None, typer.Option(metavar="N(s|m|h|d)", help="Good for so long; else until it is revoked.")
    ] = None,
) -> None:
    """Makes a token and prints it. It is shown this once; Hive keeps a digest of it.

    It takes an admin. Whoever sends it over TCP may do what its role may: Authorization: Bearer TOKEN.

    Examples:
      hive token create prometheus --role scraper > hive-token
      hive token create grafana --role viewer
      hive token create ci --role operator --expires 30d > ci.token
      hive token create ops --role admin --expires 8h --json | jq -r .token
    """
    made = call.client.post("/api/tokens", {"name": name, "role": role, "expires_in": expires})
    until = "until it is revoked" if made["expires_at"] is None else f"for {span(made['expires_at'] - time.time())}"
    call.say(f"the token {name} is good {until}, as {role}; it is not shown again")
    call.show("token.create", made, lambda: str(made["token"]))


def list_tokens(
    call: CommandCall,
    also_dead: Annotated[bool, typer.Option("--all", "-a", help="Also those that are good no longer.")] = False,
) -> None:
    """Lists the tokens: who made them, what they may, when they were used last. It takes an admin.

    Examples:
      hive token list
      hive token list --all --json | jq -r '.tokens[] | select(.last_used_at == null) | .name'
    """
    answer = call.client.get("/api/tokens", all=int(also_dead))
    call.show("token.list", answer, lambda: _listed(answer["tokens"], time.time()))


def revoke(call: CommandCall, name: Name) -> None:
    """Makes a token good for nothing, at once: what is open to it ends. It takes an admin.

    Examples:
      hive token revoke ci
    """
    revoked = call.client.delete(f"/api/tokens/{quote(name, safe='')}")
    call.show("token.revoke", revoked, lambda: f"{revoked['name']} is revoked")


def _listed(tokens: list[Answer], now: float) -> str:
    headers = ["NAME", "ROLE", "STATE", "CREATED", "BY", "EXPIRES", "LAST USED", "ID"]
    return fitted(headers, [_row(token, now) for token in tokens], drop=("ID", "BY", "CREATED", "LAST USED", "EXPIRES"))


def _row(token: Answer, now: float) -> list[str]:
    expires_at = token["expires_at"]
    expires = "never" if expires_at is None else f"in {span(expires_at - now)}" if expires_at > now else UNKNOWN
    used = "never" if token["last_used_at"] is None else ago(token["last_used_at"], now)
    created = ago(token["created_at"], now)
    return [token["name"], token["role"], token["state"], created, token["created_by"], expires, used, token["id"]]
