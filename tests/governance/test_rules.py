"""The file governance.toml: what it may say, and where it says what is wrong."""

from __future__ import annotations

import pytest

from hive.errors import ConfigError, UsageError
from hive.governance.operation import OPERATIONS, PARAMS, params_of
from hive.governance.rules import HMAC_ALONE, SignRule, parse
from tests.governance.signing import KEYS

ANN, BEN, CY = (KEYS[name].public.text for name in ("ann", "ben", "cy"))
SIGNERS = f'[signers]\nann = "{ANN}"\nben = "{BEN}"\ncy = "{CY}"\n'


def test_the_rule_of_an_operation_is_its_own_else_the_default() -> None:
    rules = parse(
        SIGNERS
        + '[rules.model-load]\nthreshold = 2\nof = ["ann", "ben"]\nhmac = true\n'
        + "[rules.lease-end]\nthreshold = 0\n"
        + '[rules.default]\nthreshold = 1\nof = ["cy"]\n'
    )
    assert rules.of("model-load") == SignRule(2, ("ann", "ben"), hmac=True)
    assert rules.of("backend-switch") == SignRule(1, ("cy",))
    assert rules.of("lease-end") is None, "a role is enough"
    assert rules.open == ["lease-end"]
    assert rules.signers["ann"] == KEYS["ann"].public


def test_without_a_default_what_has_no_rule_is_open() -> None:
    rules = parse(SIGNERS + '[rules."model-load"]\nthreshold = 1\nof = ["ann"]\n')
    assert rules.open == [operation for operation in OPERATIONS if operation != "model-load"]
    assert HMAC_ALONE.open == [each for each in OPERATIONS if each not in ("model-load", "model-unload", "cache-flush")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no rule in it"),
        (SIGNERS, "there is no rule in it"),
        ("[signers\n", "no TOML: "),
        ("signers = 1\n", "line 1: signers: expected a table"),
        ("[rules]\nmodel-load = 1\n", "line 2: rules.model-load: expected a table"),
        (SIGNERS + "[rulez.model-load]\n", "line 5: rulez: no such key"),
        (SIGNERS + "[rules.modell-load]\nthreshold = 1\n", "line 5: rules.modell-load: no such key"),
        (
            SIGNERS + '[rules.model-load]\ntreshold = 1\nof = ["ann"]\n',
            "line 6: rules.model-load.treshold: no such key",
        ),
        (
            SIGNERS + '[rules.model-load]\nthreshold = 1\nof = ["anne"]\n',
            "line 7: rules.model-load.of: there is no sig",
        ),
        (SIGNERS + '[rules.model-load]\nthreshold = 1\nof = "ann"\n', "line 7: rules.model-load.of: expected a list"),
        (SIGNERS + '[rules.model-load]\nthreshold = 2\nof = ["ann", "ann"]\n', "line 7: .*of: a signer is there twice"),
        (SIGNERS + '[rules.model-load]\nthreshold = 2\nof = ["ann"]\n', "line 6: .*threshold: expected 1 to 1"),
        (SIGNERS + '[rules.model-load]\nthreshold = 0\nof = ["ann"]\n', "line 6: .*threshold: expected 1 to 1"),
        (SIGNERS + '[rules.model-load]\nthreshold = -1\nof = ["ann"]\n', "line 6: .*threshold: expected 1 to 1"),
        (SIGNERS + '[rules.model-load]\nthreshold = true\nof = ["ann"]\n', "line 6: .*threshold: expected 1 to 1"),
        (SIGNERS + '[rules.model-load]\nthreshold = "1"\nof = ["ann"]\n', "line 6: .*threshold: expected 1 to 1"),
        (SIGNERS + "[rules.model-load]\nthreshold = 1\n", "line 6: .*threshold: expected 0, or signers in `of`"),
        (SIGNERS + '[rules.model-load]\nof = ["ann"]\n', "line 5: rules.model-load: threshold: expected 1 to 1"),
        (SIGNERS + '[rules.model-load]\nthreshold = 1\nof = ["ann"]\nhmac = 1\n', "line 8: .*hmac: expected true or"),
        (SIGNERS + '[rules.model-pin]\nthreshold = 1\nof = ["ann"]\nhmac = true\n', "line 8: .*an HMAC can speak for"),
        (SIGNERS + f'dee = "{ANN}"\n', "line 5: signers.dee: ann has that key already"),
        (SIGNERS + '"d e" = "x"\n', "signers.d e: a signer's name has letters"),
        (SIGNERS + 'dee = "ed25519:AAAA"\n', "line 5: signers.dee: expected ed25519: and the base64 of 32 bytes"),
        (SIGNERS + f'dee = "{ANN[:-2]}"\n', "line 5: signers.dee: expected ed25519"),
        (SIGNERS + f'dee = "{ANN} "\n', "line 5: signers.dee: expected ed25519"),
        (SIGNERS + "dee = 5\n", "line 5: signers.dee: expected ed25519"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^governance.toml.*{said}"):
        parse(text)


def test_a_mistyped_word_has_its_nearest_one_as_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(SIGNERS + "[rules.modell-load]\nthreshold = 1\n")
    assert caught.value.hint == "did you mean `model-load`?"


def test_a_point_that_is_no_number_below_the_prime_is_no_key() -> None:
    """The same key in a second spelling would count twice."""
    import base64

    text = "ed25519:" + base64.b64encode((2**255 - 18).to_bytes(32, "little")).decode()
    with pytest.raises(ConfigError, match=r"signers\.dee"):
        parse(SIGNERS + f'dee = "{text}"\n')


@pytest.mark.parametrize("operation", OPERATIONS)
def test_params_are_those_of_the_operation(operation: str) -> None:
    needed = {name: "1" for name, param in PARAMS[operation].items() if param.is_needed}
    assert needed.keys() <= params_of(operation, needed).keys()
    with pytest.raises(UsageError, match="has no 'colour'"):
        params_of(operation, {**needed, "colour": "red"})
    for name in needed:
        with pytest.raises(UsageError, match=f"needs {name}="):
            params_of(operation, {each: needed[each] for each in needed if each != name})


@pytest.mark.parametrize(
    ("operation", "given", "said"),
    [
        ("model-lod", {}, "no operation 'model-lod'"),
        ("model-unload", {"modelId": "m", "force": "yes"}, "force: expected true or false, found 'yes'"),
        ("model-load", {"modelId": ""}, "modelId: expected text"),
        ("lease-run", {"vramMB": "8G"}, "vramMB: expected a whole number"),
        ("lease-run", {"vramMB": "8", "maxS": "-1"}, "maxS: expected a number or null"),
    ],
)
def test_a_word_that_fits_no_param_is_told(operation: str, given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        params_of(operation, given)
