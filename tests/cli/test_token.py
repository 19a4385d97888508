"""`hive token`, over the real API in another process."""

from __future__ import annotations

from typing import Any

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_a_new_token_is_alone_on_stdout_and_the_talk_is_on_stderr(hive: Hive) -> None:
    said = hive("token", "create", "ci", "--role", "operator", "--expires", "30d")
    assert said.code == 0
    assert said.out.startswith("hive_")
    assert len(said.out.split()) == 1
    assert said.err == "the token ci is good for 29d 23h, as operator; it is not shown again\n"


def test_they_are_listed_without_what_they_are_and_the_dead_ones_on_request(hive: Hive) -> None:
    assert hive("token", "list").out.split() == [
        "NAME",
        "ROLE",
        "STATE",
        "CREATED",
        "BY",
        "EXPIRES",
        "LAST",
        "USED",
        "ID",
    ]
    secret = hive("token", "create", "grafana", "--role", "viewer").out.strip()
    listed = hive("token", "list").out
    assert "grafana  viewer  live" in listed
    assert "never    never" in listed
    assert hive("token", "revoke", "grafana").out == "grafana is revoked\n"
    assert "grafana" not in hive("token", "list").out
    dead = hive("token", "list", "--all")
    assert "revoked" in dead.out
    assert secret not in listed + dead.out


def test_with_json_each_answer_is_one_object(hive: Hive) -> None:
    made = hive("token", "create", "ops", "--role", "admin", "--json")
    assert (made.json["schema"], made.json["name"], made.json["role"]) == ("token.create", "ops", "admin")
    assert made.json["token"].startswith("hive_")
    assert made.err == ""
    [token] = hive("token", "list", "--json").json["tokens"]
    assert (token["state"], token["created_by"], "token" in token) == ("live", made.json["created_by"], False)
    assert hive("token", "revoke", token["id"], "--json").json["state"] == "revoked"


def test_what_is_wrong_is_said_with_its_exit_code(hive: Hive) -> None:
    assert hive("token", "create", "ci", "--role", "root").code == 2
    assert hive("token", "create", "Ci", "--role", "viewer").code == 2
    assert hive("token", "create", "ci", "--role", "viewer", "--expires", "soon").code == 2
    assert hive("token", "create", "ci", "--role", "viewer").code == 0
    taken = hive("token", "create", "ci", "--role", "viewer")
    assert (taken.code, "hive token revoke ci" in taken.err) == (1, True)
    unknown = hive("token", "revoke", "../x")
    assert (unknown.code, "hive token list" in unknown.err) == (3, True)
