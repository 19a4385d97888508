"""Everything that can go wrong, as one tree.

Each class carries its answer: `status` for the wire, `code` for programs, `exit_code` for the shell and `hint`
for the person. A class exists only if some `except`, status or exit code tells it apart. The first line of a
class docstring is its default message.

Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 not permitted, 5 dependency down, 6 rolled back, 7 timeout,
130 interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

AS_ROOT = "sudo"
"""A hint: the same command as root may. The command line says it in full."""


class HiveError(Exception):
    """Something in Hive failed."""

    status = 500
    code = "internal"
    exit_code = 1
    hint = ""

    def __init__(
        self,
        message: str = "",
        *,
        hint: str = "",
        retry_after_s: float | None = None,
        details: Mapping[str, int] | None = None,
    ) -> None:
        self.message = message or (type(self).__doc__ or "").split("\n")[0]
        self.details = details or {}
        """Numbers a program may want beside the sentence; they are put into the error's object."""
        if hint:
            self.hint = hint
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


class NotConfirmed(HiveError):
    """A person was asked, and did not say yes."""

    code = "not_confirmed"

    def __init__(self, message: str = "nothing was changed", *, interrupted: bool = False) -> None:
        """`interrupted`: the question was left with Ctrl-C."""
        super().__init__(message)
        if interrupted:
            self.exit_code = 130


class Refusal(HiveError):
    """Refused by policy."""

    status = 403
    code = "forbidden"
    exit_code = 4


class Cancelled(Refusal):
    """An operator ended this request."""

    code = "cancelled"


class CloudRefused(Refusal):
    """The request may not leave this box."""

    code = "cloud_not_permitted"
    hint = "an operator permits it: [inference] cloud, the tenant's and the agent's own; hive config runtime"


class NotApproved(Refusal):
    """The model is not approved to be loaded."""

    code = "model_not_approved"
    hint = "a signed order does it: hive op request model-load, then hive model load MODEL --op-token FILE"


class SignatureUnverifiable(Refusal):
    """No key that is trusted here has signed it."""

    code = "signature_unverifiable"
    hint = "hive adapter trust FILE trusts a public key; hive adapter sign DIR --key FILE signs"


class KeyRevoked(SignatureUnverifiable):
    """The key that signed it was revoked."""

    hint = "sign it with another key: hive adapter sign DIR --key FILE"


class SignatureInvalid(Refusal):
    """Its signature is not what that key signs."""

    code = "signature_invalid"
    hint = "bring the files and model.sig anew from where they were signed"


class SignatureMismatch(Refusal):
    """The files are not those that were signed."""

    code = "signature_mismatch"
    hint = "bring them anew from where they were signed, or sign them again: hive adapter sign DIR --key FILE"


class BadRequest(Refusal):
    """The request is malformed."""

    status = 400
    code = "bad_request"
    exit_code = 2


class LeaseTooLarge(BadRequest):
    """Such a lease can never be granted here."""

    code = "lease_too_large"


class GrammarTooComplex(BadRequest):
    """A schema would hold up the inference server."""

    code = "grammar_too_complex"
    hint = "simplify the schema there; how much is taken is said by [grammar_...] in hive.conf"


class AdapterUnsafe(BadRequest):
    """The files are not what an adapter may be made of."""

    code = "adapter_unsafe"
    hint = "an adapter is one *.gguf, or adapter_config.json with *.safetensors: files, no links, no pickles"


class AdapterMismatch(BadRequest):
    """The adapter does not go with that model here."""

    code = "adapter_mismatch"
    hint = "--base names the model that it was made for, as hive model list shows it"


class PreviousNotFound(BadRequest):
    """The response that the conversation is to go on from is not kept."""

    code = "previous_response_not_found"


class TargetTooLong(BadRequest):
    """The request target is too long."""

    status = 414
    code = "target_too_long"


class VersionNotSupported(BadRequest):
    """Only HTTP/1.1 and HTTP/1.0 are spoken here."""

    status = 505
    code = "version_not_supported"


class Unauthorized(Refusal):
    """No valid token."""

    status = 401
    code = "unauthorized"


class MethodNotAllowed(Refusal):
    """This target does not take this method."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str = "", *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow


class NotFound(Refusal):
    """There is no such thing."""

    status = 404
    code = "not_found"
    exit_code = 3


class ModelNotFound(NotFound):
    """There is no such model here."""

    code = "model_not_found"
    hint = "hive model pull brings one, hive model list shows what there is"


class AdapterNotFound(NotFound):
    """There is no such adapter here."""

    code = "adapter_not_found"
    hint = "hive adapter pull installs one, hive adapter list shows what there is"


class AdapterNotLoaded(NotFound):
    """This adapter is not loaded."""

    code = "adapter_not_loaded"
    hint = "an operator loads it: hive adapter load NAME"


class WrongState(Refusal):
    """The agent's state does not allow this."""

    status = 409
    code = "wrong_state"
    exit_code = 1


class ResultNotReady(WrongState):
    """The job has not ended."""

    code = "not_ready"
    hint = "ask again, or wait for it: hive job run --wait, hive job logs -f"


class StaleToken(WrongState):
    """This is no longer the holder's token."""

    code = "stale_token"


class AgentBusy(WrongState):
    """The agent is busy."""

    code = "busy"


class ModelBusy(WrongState):
    """The model is being loaded, or is in use."""

    code = "model_busy"


class InsufficientMemory(WrongState):
    """The model does not fit."""

    code = "insufficient_memory"


class OpTokenRefused(Refusal):
    """The operation is not approved."""

    code = "op_token_refused"


class OpTokenRequired(OpTokenRefused):
    """This operation needs the word of its signers."""

    code = "op_token_required"
    hint = "hive op request, then hive op sign by each signer, then hive op submit"


class OpTokenInvalid(OpTokenRefused):
    """The operation token is not what one looks like, or not what was signed."""

    code = "op_token_invalid"


class OpTokenThreshold(OpTokenRefused):
    """Too few of those who may have signed the operation."""

    code = "op_token_threshold"


class OpTokenExpired(OpTokenRefused):
    """The operation token does not hold now."""

    code = "op_token_expired"
    hint = "hive op request makes a new one: it holds for 300 s at most"


class OpTokenMismatch(OpTokenRefused):
    """The operation token is about something else."""

    status = 409
    code = "op_token_mismatch"


class OpTokenReplayed(OpTokenRefused):
    """The operation token has been used."""

    status = 409
    code = "op_token_replayed"
    hint = "hive op request makes a new one"


class RequestTimeout(Refusal):
    """The request did not arrive in time."""

    status = 408
    code = "request_timeout"
    exit_code = 7


class TooLarge(Refusal):
    """The request is too large."""

    status = 413
    code = "too_large"


class HeadTooLarge(Refusal):
    """The request head is too large."""

    status = 431
    code = "head_too_large"


class WrongMediaType(Refusal):
    """The body must be JSON without a content coding."""

    status = 415
    code = "unsupported_media_type"


class ExpectationFailed(Refusal):
    """Only `Expect: 100-continue` is understood."""

    status = 417
    code = "expectation_failed"


class TooManyRequests(Refusal):
    """Too many requests."""

    status = 429
    code = "rate_limit_exceeded"


class BudgetExceeded(TooManyRequests):
    """The budget of tokens is spent."""

    code = "budget_exceeded"
    hint = "hive usage --budgets shows what is left"


class NotSupported(Refusal):
    """The active backend cannot do this."""

    status = 501
    code = "not_supported"


class Saturated(Refusal):
    """Hive has no room for this now."""

    status = 503
    code = "saturated"
    exit_code = 5


class RunnerNotReady(Saturated):
    """Hive starts or stops."""

    code = "not_ready"


class Unhealthy(Saturated):
    """No request would be served now."""

    code = "unhealthy"


class QueueFull(Saturated):
    """Too many requests wait for the model."""

    code = "queue_full"


class BackendSwitching(Saturated):
    """The inference server is being switched."""

    code = "backend_switching"


class ModelCold(Saturated):
    """The model is not loaded, and the wait for it cannot hold."""

    code = "model_cold"


class AgentAsleep(Saturated):
    """The agent could not be woken in time."""

    code = "not_awake"


class BackendDown(HiveError):
    """The backend cannot be reached."""

    status = 502
    code = "backend_unavailable"
    exit_code = 5


class BackendFailed(BackendDown):
    """The backend failed."""

    code = "backend_failed"


class BackendRefused(Refusal):
    """The backend refused the request."""

    code = "backend_refused"

    def __init__(self, message: str = "", status: int = 400) -> None:
        """`status`: its own, below 500."""
        super().__init__(message)
        self.status = status


class AgentDown(BackendDown):
    """The agent cannot be reached."""

    code = "agent_unavailable"


class AgentFailed(HiveError):
    """The agent ended with a failure in the moment after its start."""

    code = "agent_failed"


class StreamIncomplete(BackendDown):
    """The backend broke off its answer."""

    code = "stream_incomplete"


class BackendGaveUp(StreamIncomplete):
    """The backend gave up on its answer."""

    def __init__(self, told: bytes = b"", status: int = StreamIncomplete.status) -> None:
        """`told`: its own error, one line in the client's dialect; empty where it said nothing."""
        super().__init__()
        self.told = told
        self.status = status


class BackendTimeout(HiveError):
    """The backend did not answer in time."""

    status = 504
    code = "backend_timeout"
    exit_code = 7


class AgentSilent(BackendTimeout):
    """The agent did not answer in time."""

    code = "agent_timeout"


class DependencyDown(HiveError):
    """Something Hive needs does not answer."""

    status = 503
    code = "dependency_down"
    exit_code = 5


class GovernanceBroken(DependencyDown):
    """The rules of governance cannot be read, and nothing governed is done without them."""

    code = "governance_broken"
    hint = "hive doctor names the line; root may go on with --break-glass REASON"


class ClockWentBack(DependencyDown):
    """The clock of this box went back, and used operation tokens would hold again."""

    code = "clock_went_back"
    hint = "set the clock right; root may go on with --break-glass REASON"


class LinkLost(DependencyDown):
    """The other Hive process is not connected."""

    code = "link_lost"


class NotPermitted(HiveError):
    """This user may not do that."""

    status = 403
    code = "not_permitted"
    exit_code = 4


class TimedOut(HiveError):
    """It did not happen in time."""

    status = 504
    code = "timeout"
    exit_code = 7


class LeaseWaited(TimedOut):
    """There was no room in time."""

    code = "lease_waited"


class RolledBack(HiveError):
    """It failed, and what was there before is in force again."""

    code = "rolled_back"
    exit_code = 6


class UsageError(HiveError):
    """The command line does not make sense."""

    status = 400
    code = "usage"
    exit_code = 2


class ConfigError(HiveError):
    """The configuration is wrong."""

    status = 400
    code = "config"
    exit_code = 2


class StoreFull(HiveError):
    """The disk is full."""

    status = 507
    code = "disk_full"
    exit_code = 5


def _tree(root: type[HiveError]) -> list[type[HiveError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]


def all_errors() -> list[type[HiveError]]:
    """The classes of this file, whatever else is loaded."""
    return [cls for cls in _tree(HiveError) if cls.__module__ == __name__]


def as_said(error: HiveError) -> str:
    """The error as a program of Hive says it on stderr: its code behind the first line, its hint below.

    >>> as_said(NotFound("there is no agent 'x'", hint="hive agent list shows all"))
    "hive: there is no agent 'x'  [not_found]\\nhint: hive agent list shows all"
    >>> as_said(ConfigError("/c:1: no\\n/c:2: no"))
    'hive: /c:1: no  [config]\\n/c:2: no'
    """
    said = f"hive: {with_code(error.message, error.code)}"
    hint = "root may do this" if error.hint == AS_ROOT else error.hint
    return f"{said}\nhint: {hint}" if hint else said


def with_code(message: str, code: str) -> str:
    """The message with the code, which `hive explain` takes, behind its first line."""
    first, feed, rest = message.partition("\n")
    return f"{first}  [{code}]{feed}{rest}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not known; empty where none of those that are is near.

    >>> did_you_mean("memroy", ["cpu", "memory"]), did_you_mean("disk", ["cpu", "memory"])
    ('did you mean `memory`?', '')
    """
    from difflib import get_close_matches  # only a mistyped word pays for it

    near = get_close_matches(word, known, n=1)
    return f"did you mean `{near[0]}`?" if near else ""


def by_code(code: str, status: int | None = None) -> type[HiveError]:
    """The class with this `code`, and with this `status` where several have it; `HiveError` where none has it.

    >>> by_code("wrong_state").__name__, by_code("nonsense").__name__
    ('WrongState', 'HiveError')
    >>> by_code("not_ready", 409).__name__, by_code("not_ready", 503).__name__
    ('ResultNotReady', 'RunnerNotReady')
    """
    found = [cls for cls in _tree(HiveError) if cls.code == code]
    return next((cls for cls in found if cls.status == status), found[0] if found else HiveError)
