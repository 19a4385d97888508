"""The rights of callers: the whole table of the one place that permits."""

from __future__ import annotations

import pytest

from hive.domain import Caller, CallerKind, Role
from hive.policy import Act, may

NOBODY, VIEWER, OPERATOR, ADMIN = None, Role.VIEWER, Role.OPERATOR, Role.ADMIN
PERMITTED = {
    Act.LOOK: {VIEWER, OPERATOR, ADMIN},
    Act.STEER: {OPERATOR, ADMIN},
    Act.ADMINISTER: {ADMIN},
}


@pytest.mark.parametrize("act", PERMITTED)
@pytest.mark.parametrize("role", [NOBODY, VIEWER, OPERATOR, ADMIN])
def test_a_person_may_what_the_role_permits(act: Act, role: Role | None) -> None:
    caller = Caller(CallerKind.PERSON, "token:ci", role=role)
    assert (may(caller, act, "POST /api/agents") is None) is (role in PERMITTED[act])


@pytest.mark.parametrize("act", PERMITTED)
@pytest.mark.parametrize("kind", [CallerKind.AGENT, CallerKind.OPERATOR])
@pytest.mark.parametrize("role", [NOBODY, ADMIN])
def test_whoever_asks_at_the_proxy_may_nothing_at_the_api_whatever_its_role(
    act: Act, kind: CallerKind, role: Role | None
) -> None:
    assert may(Caller(kind, "a1", role=role), act, "GET /api/agents") is not None


@pytest.mark.parametrize("act", [Act.USE, Act.SEE])
@pytest.mark.parametrize("role", [NOBODY, ADMIN])
def test_a_role_opens_no_model_that_is_another_tenants(act: Act, role: Role | None) -> None:
    caller = Caller(CallerKind.OPERATOR, "operator", tenant="acme", models=frozenset({"a"}), role=role)
    assert may(caller, act, "a") is None
    assert may(caller, act, "b") == f'tenant acme may not {act} the model "b"'
