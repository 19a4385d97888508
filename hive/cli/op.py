"""Operations that need more than one person's word: asked for, signed by each away from the box, and sent."""

from __future__ import annotations

import json
import secrets
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from hive.cli.amounts import seconds_in
from hive.cli.call import Answer, CommandCall
from hive.cli.following import followed
from hive.cli.op_files import add_signature, as_file, create, read_key, read_operation
from hive.cli.op_options import headers_of, read
from hive.cli.terminal import fitted
from hive.cli.text import fields, one_line, span
from hive.errors import ConfigError, HiveError, UsageError
from hive.governance.envelope import Signature, TokenEnvelope
from hive.governance.keys import SecretKey, new_secret_pem
from hive.governance.operation import HOLDS_MAX_S, Operation, params_of
from hive.governance.rules import SIGNER_NAME, SIGNER_NAMES, SignRules, parse
from hive.governance.verdict import AskedOperation, judge, signers_of
from hive.terminal_text import counted

RULES_MAX_BYTES = 1024 * 1024
ORDER_S = 60.0
LOOK_S = 0.3

OpFile = Annotated[Path, typer.Argument(metavar="FILE", help="The operation, as `hive op request` wrote it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Audience = Annotated[
    str,
    typer.Option(
        "--audience", metavar="BOX", help="The box it is for, as `hive op show` there says.", show_default=False
    ),
]


def keygen(
    call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signer's name.", show_default=False)],
    to: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The secret key goes there.", show_default="NAME.key"),
    ] = None,
) -> None:
    """Makes a signer's key: the secret half goes into a file of its own, the public half is printed.

    The printed line belongs below [signers] in governance.toml of the box. The file (0600) is read by hive op sign
    alone, and never printed.

    Examples:
      hive op keygen ann
      hive op keygen ann --out /media/stick/ann.key
    """
    if not SIGNER_NAME.fullmatch(name):
        raise UsageError(SIGNER_NAMES)
    path = to or Path(f"{name}.key")
    pem = new_secret_pem()
    create(path, pem, 0o600)
    public = SecretKey(pem).public
    call.say(f"the secret key is in {path}; nobody else may read it")
    answer = {"name": name, "public_key": public.text, "key_id": public.id, "file": str(path)}
    call.show("op.keygen", answer, lambda: f'"{name}" = "{public.text}"')


def request(
    call: CommandCall,
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="As model-load.", show_default=False)],
    params: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE...", help="What exactly is asked for.", show_default=False),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="It goes there.", show_default="OPERATION.op"),
    ] = None,
    audience: Audience = "",
    holds: Annotated[str, typer.Option("--for", metavar="TIME", help="It holds so long, 5m at most.")] = "5m",
    begins: Annotated[
        str,
        typer.Option("--at", metavar="TIME", help="It holds from then: 2026-11-24T22:00.", show_default="now"),
    ] = "",
) -> None:
    """Writes down an operation for its signers to sign. Without --audience the Hive that answers is meant.

    Signed is every NAME=VALUE, this box, and the time: it holds for five minutes at most, and once. With --at it can be
    signed long before. Nothing is asked of Hive but which box it is, and with --audience not even that.

    Examples:
      hive op request model-load modelId=qwen3-32b
      hive op request model-unload modelId=qwen3-32b force=true --audience box-4f0c0d --out unload.op
      hive op request backend-switch backend=vllm --at 2026-11-24T22:00 --for 5m
    """
    given: dict[str, str] = {}
    for word in params or []:
        name, equals, value = word.partition("=")
        if not equals or name in given:
            raise UsageError(f"{word[:60]!r}: expected NAME=VALUE, each name once")
        given[name] = value
    found = params_of(operation, given)
    seconds = int(seconds_in(holds, "--for"))
    if not 0 < seconds <= HOLDS_MAX_S:
        raise UsageError(f"--for: at most {HOLDS_MAX_S} s")
    since = _time_of(begins) if begins else int(time.time())
    box = audience or str(call.client.get("/api/governance")["box"])
    asked = Operation(operation, box, found, since, since + seconds, secrets.token_hex(16))
    path = to or Path(f"{operation}.op")
    create(path, as_file(TokenEnvelope(asked.as_json())), 0o644)
    call.say(f"to be signed: {path}")
    call.show("op.request", {"file": str(path), **_answer(asked, [])}, lambda: _shown(asked, [], time.time()))


def sign(
    call: CommandCall,
    file: OpFile,
    key: Annotated[Path, typer.Option("--key", "-k", metavar="FILE", help="The signer's secret key.")],
    yes: Yes = False,
) -> None:
    """Signs an operation with a signer's key, after it has shown what that is. It needs no Hive and no network.

    The signature goes into the same file, beside those of others. A second one with the same key replaces the first.

    Examples:
      hive op sign model-load.op --key ann.key
      hive op sign model-load.op --key ann.key --yes
    """
    envelope, operation = read_operation(file)
    own = read_key(key)
    call.say(_shown(operation, [], time.time()))
    call.confirm("Sign this?", yes=yes)
    signed = add_signature(file, envelope.payload, Signature(own.public.id, own.sign(envelope.signed)))
    ids = [each.key_id for each in signed.signatures]
    call.show("op.sign", _answer(operation, ids), lambda: f"{file} has {counted(len(ids), 'signature')} now")


def show(
    call: CommandCall,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="An operation.", show_default=False)] = None,
) -> None:
    """Shows an operation: what is asked for, of which box, until when, and how many signed it. Nothing is verified.

    Without a file: the name of this box, its signers, and what its rules want.

    Examples:
      hive op show
      hive op show model-load.op
      hive op show --json | jq -r .box
    """
    if file is None:
        view = call.client.get("/api/governance")
        call.show("op.rules", view, lambda: _rules_shown(view))
        return
    envelope, operation = read_operation(file)
    ids = [each.key_id for each in envelope.signatures]
    call.show("op.show", _answer(operation, ids), lambda: _shown(operation, ids, time.time()))


def verify(
    call: CommandCall,
    file: OpFile,
    rules: Annotated[Path, typer.Option("--rules", metavar="FILE", help="The governance.toml of the box.")] = Path(
        "/etc/hive/governance.toml"
    ),
    audience: Audience = "",
) -> None:
    """Verifies an operation as its box would, but for whether it was used. It needs no Hive and no network.

    The exit code is 4 where it would be refused, and the reason is said. Without --audience any box will do.

    Examples:
      hive op verify model-load.op
      hive op verify model-load.op --rules ./governance.toml --audience box-4f0c0d
    """
    known = _rules_in(rules)
    envelope, operation = read_operation(file)
    rule = known.of(operation.operation)
    if rule is None:
        signers = signers_of(envelope, known)
        answer = {**_answer(operation, signers), "signers": signers}
        call.show("op.verify", answer, lambda: f"{operation.operation} needs nobody's signature there")
        return
    asked = AskedOperation(operation.operation, operation.params, audience or operation.audience)
    now = time.time()
    verdict = judge(envelope.as_token(), asked, known, rule, now=now, mark=now, hmac_key=None)
    answer = {**_answer(operation, []), "signers": verdict.by.split(", ")}
    left = span(operation.expires_at - now)
    call.show("op.verify", answer, lambda: f"approved by {verdict.by}; it holds for another {left}")


def submit(
    call: CommandCall,
    file: OpFile,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Only begin it.")] = False,
) -> None:
    """Sends an operation to the Hive it is for, with its signatures, and waits until it is done.

    Who sends it needs the role that the operation takes. Leases are asked for by the one who holds them: hive lease run
    and hive lease take with --op-token.

    Examples:
      hive op submit model-load.op
      hive op submit model-load.op --no-wait --json | jq -r .id
    """
    _, operation = read_operation(file)
    method, path, body, query = order_of(operation, file)
    if path.startswith("/v1/"):
        body = {**(body or {}), "verifiedOpToken": headers_of(file, "")["X-Hive-Op-Token"]}
        answer = _task_ended(call, call.client.post(path, body, timeout_s=ORDER_S), no_wait=no_wait)
        call.show("op.submit", answer, lambda: fields([(name, one_line(str(answer[name]))) for name in answer]))
        return
    headers = headers_of(file, "")
    if method == "DELETE":
        answer = call.client.delete(path, timeout_s=ORDER_S, headers=headers, **query)
    else:
        answer = call.client.post(path, body, timeout_s=ORDER_S, headers=headers)
    if not no_wait and "progress" in answer:
        answer = followed(call, answer, goes_on="it goes on all the same")
    call.show("op.submit", answer, lambda: _done(operation, answer))


def _task_ended(call: CommandCall, task: Answer, *, no_wait: bool) -> Answer:
    """The task of the runner API once it has ended, or what is no task. Raises HiveError with what it failed with."""
    while "taskId" in task and task["status"] == "loading" and not no_wait:
        time.sleep(LOOK_S)
        task = call.client.get(f"/v1/models/load/{quote(task['taskId'])}")
    if task.get("status") == "failed":
        raise HiveError(one_line(str(task.get("error", "it failed"))))
    return task


def order_of(operation: Operation, file: Path) -> tuple[str, str, dict[str, Any] | None, dict[str, Any]]:
    """Method, path, body and query of the order that an operation is. Raises UsageError for one that is no order alone.

    >>> order_of(Operation("model-unload", "b", {"modelId": "a/b", "force": True}, 0, 1, ""), Path("x.op"))
    ('POST', '/api/models/a%2Fb/unload', {'force': True}, {})
    """
    params = dict(operation.params)
    one = f"/api/models/{quote(str(params.get('modelId')), safe='')}"
    adapter = f"/api/adapters/{quote(str(params.get('name')), safe='')}"
    match operation.operation:
        case "model-load" if [*params] == ["modelId"]:
            return "POST", f"{one}/load", None, {}
        case "model-load":
            return "POST", "/v1/models/load", params, {}
        case "model-unload":
            return "POST", f"{one}/unload", {"force": bool(params.get("force", False))}, {}
        case "cache-flush":
            return "POST", "/v1/cache/flush", params, {}
        case "model-pin" | "model-unpin":
            return "POST", f"{one}/{operation.operation.removeprefix('model-')}", None, {}
        case "backend-switch":
            return "POST", "/api/system/inference", params, {}
        case "adapter-pull":
            return "POST", "/api/adapters", params, {}
        case "adapter-load":
            return "POST", f"{adapter}/load", _only(params, "digest"), {}
        case "adapter-unload":
            return "POST", f"{adapter}/unload", None, {}
        case "adapter-remove":
            return "DELETE", adapter, None, _only(params, "digest")
        case "adapter-trust":
            raise UsageError(
                "the key itself is sent with it: POST /api/adapters/keys",
                hint="docs/adapters.md; where the keys are root's, root trusts it: hive adapter trust FILE",
            )
        case "lease-end":
            return "DELETE", f"/api/leases/{quote(str(params.get('id')), safe='')}", None, {"end": 1}
        case "lease-run" | "lease-take":
            verb = operation.operation.removeprefix("lease-")
            raise UsageError(f"who holds a lease asks for it: hive lease {verb} … --op-token {file}")
    raise UsageError(f"this command knows no operation {operation.operation[:40]!r}")


def _only(params: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: params[name] for name in names if name in params}


def _time_of(text: str) -> int:
    """Unix seconds of a moment, as digits or as ISO 8601 has it; local time where no zone is given."""
    if text.isdigit() and len(text) <= 12:
        return int(text)
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        raise UsageError(f"--at: expected a time like 2026-11-24T22:00, found {text[:40]!r}") from None


def _rules_in(path: Path) -> SignRules:
    try:
        return parse(read(path, RULES_MAX_BYTES, "a file of rules").decode(), path=str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None


def _answer(operation: Operation, key_ids: list[str]) -> Answer:
    return {
        "operation": operation.operation,
        "audience": operation.audience,
        "params": operation.params,
        "issued_at": operation.issued_at,
        "expires_at": operation.expires_at,
        "nonce": operation.nonce,
        "signed_by": key_ids,
    }


def _shown(operation: Operation, key_ids: list[str], now: float) -> str:
    pairs = [
        ("Operation", one_line(operation.operation)),
        *((f"  {one_line(name)}", one_line(json.dumps(value))) for name, value in operation.params.items()),
        ("Box", one_line(operation.audience)),
        ("Holds", _holds(operation, now)),
        ("Signed", "by " + ", ".join(one_line(each)[:16] for each in key_ids) if key_ids else ""),
    ]
    return fields([(name, text) for name, text in pairs if text])


def _holds(operation: Operation, now: float) -> str:
    """
    >>> _holds(Operation("", "", {}, 1000, 1300, ""), 1010.0), _holds(Operation("", "", {}, 1000, 1300, ""), 990.0)
    ('for another 4m 50s', 'in 10s, for 5m')
    """
    if now > operation.expires_at:
        return f"no more: it ended {span(now - operation.expires_at)} ago"
    if now < operation.issued_at:
        return f"in {span(operation.issued_at - now)}, for {span(operation.expires_at - operation.issued_at)}"
    return f"for another {span(operation.expires_at - now)}"


def _done(operation: Operation, answer: Answer) -> str:
    if answer.get("state") == "running" and "progress" in answer:
        return f"job {answer['id']}: {one_line(answer['progress'])}"
    return f"{operation.operation} is done"


def _rules_shown(view: Answer) -> str:
    pairs = [
        ("Box", view["box"]),
        ("Rules", one_line(view["file"]) if view["governed"] else "none: roles alone decide"),
    ]
    if view["broken"]:
        pairs.append(("Broken", one_line(view["broken"])))
    told = fields(pairs)
    if not view["governed"] or view["broken"]:
        return told
    rows = [
        [rule["operation"], _wanted(rule), ", ".join(rule["of"]) + (" or an HMAC" if rule["hmac"] else "")]
        for rule in view["rules"]
    ]
    signers = [[signer["name"], signer["public_key"]] for signer in view["signers"]]
    tables = [fitted(["OPERATION", "NEEDS", "OF"], rows)] + ([fitted(["SIGNER", "KEY"], signers)] if signers else [])
    return "\n\n".join([told, *tables])


def _wanted(rule: Answer) -> str:
    if rule["threshold"]:
        return f"{rule['threshold']} of {len(rule['of'])}"
    return "an HMAC" if rule["hmac"] else "a role"
