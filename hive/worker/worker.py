"""`LlamaWorker`: one supervised inference server, and chats with it that are submitted, looked at and fetched.

    worker = LlamaWorker(launch(BackendKind.LLAMA, inference, os.environ, runtime=…, state=…), slots=4)
    await worker.start()
    asked = await worker.submit("summary", "Be short.", "What is a hive?")

There is no queue: with all slots in use, `submit` says NO_SLOT_AVAILABLE at once. A server that dies, or stands still,
is started again, and what was in flight fails with the reason; nothing is sent twice. All methods belong to one event
loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from hive.backends.command_line import Launch
from hive.errors import BadRequest, NotFound, WrongState
from hive.host.cgroup import Leaf
from hive.tasks import spawn
from hive.worker.bios import BiosForm
from hive.worker.dialogue import DialogueFailed, DialogueMaker, single_turns
from hive.worker.judge import FailReason
from hive.worker.keeper import ServerKeeper
from hive.worker.profile import TimeoutProfile
from hive.worker.records import (
    BAD_PARAMS,
    NO_SLOT_AVAILABLE,
    WORKER_NOT_READY,
    NotReady,
    RequestResult,
    RequestState,
    RequestStatus,
    SubmitResult,
    WorkerDebugInfo,
    WorkerState,
    WorkerStatus,
)
from hive.worker.request import SubmittedRequest, encode
from hive.worker.stream import AnswerFailed, Progress, ServerUnreachable

log = logging.getLogger("hive.worker")
DEBUG_LINES = 200
LIMIT_NAMES = frozenset({"max_tokens", "max_completion_tokens", "n_predict"})
"""Names under which a caller may have said how long an answer gets."""
DEATH_S = 0.5
"""The cut of an answer is seen before the end of the server that caused it: so long is waited for that."""

_WHY = {
    FailReason.WORKER_RESTARTED: "the server was ended while this request ran",
    FailReason.STALL_TIMEOUT: "no data came for too long",
    FailReason.CONNECT_FAILED: "the server took no connection",
    FailReason.HEADERS_TIMEOUT: "no head of an answer came",
    FailReason.SERVER_DIED: "the server ended",
    FailReason.TTFT_TIMEOUT: "no first data came",
    FailReason.ABSOLUTE_TIMEOUT: "the whole request took too long",
}


class LlamaWorker:
    """One server with `slots` places. `max_tokens`: for requests that set no limit of their own.

    `dialogues` begins the turns of each request (a tool loop, for example); by default there is one turn, with the BIOS
    as `bios` says. `leaf`: a cgroup for the server, where the caller has one.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        slots: int,
        profile: TimeoutProfile | None = None,
        model: str = "",
        max_tokens: int | None = None,
        bios: BiosForm = BiosForm.ONE_MESSAGE,
        dialogues: DialogueMaker | None = None,
        leaf: Leaf | None = None,
    ) -> None:
        if slots < 1:
            raise BadRequest(f"slots is {slots}: a worker has at least one")
        self._slots = slots
        self._model = model
        self._max_tokens = max_tokens
        self._dialogues = dialogues or single_turns(bios)
        self._requests: dict[int, SubmittedRequest] = {}
        self._last_id = 0
        self._keeper = ServerKeeper(
            launch,
            profile or TimeoutProfile(),
            model=model,
            places=slots,
            leaf=leaf,
            requests=self._in_flight,
            fail=self._fail,
            clock=time.monotonic,
        )

    def __repr__(self) -> str:
        return f"<LlamaWorker {self._keeper.state}, {len(self._running())}/{self._slots} slots>"

    # --- the server -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns once the server has generated a token. Raises HiveError with its last words where it does not."""
        await self._keeper.start()

    async def stop(self) -> None:
        """Returns once nothing of the server is left; what was in flight has failed. Wins over a restart."""
        await self._keeper.stop()

    async def restart(self, reason: str) -> None:
        """Ends the server, starts it again, and returns when it is ready."""
        await self._keeper.restart(reason)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def submit(
        self, job_name: str, system_prompt: str, user_prompt: str, *, params: Mapping[str, Any] | None = None
    ) -> SubmitResult:
        """Begins a request, or says at once why not. Ids are 1, 2, 3, …, of this worker for as long as it lives.

        `params` go to the server as they are, whatever they are called; `messages`, `stream` and a dialogue's own
        fields are the worker's.
        """
        if self._keeper.state is not WorkerState.READY:
            return SubmitResult(ok=False, error=WORKER_NOT_READY)
        if len(self._running()) >= self._slots:
            return SubmitResult(ok=False, error=NO_SLOT_AVAILABLE)
        fields = {**({"model": self._model} if self._model else {}), **(params or {})}
        if self._max_tokens is not None and not fields.keys() & LIMIT_NAMES:
            fields["max_tokens"] = self._max_tokens
        try:
            encode(fields)
        except (TypeError, ValueError, RecursionError):
            return SubmitResult(ok=False, error=BAD_PARAMS)
        self._last_id += 1
        dialogue = self._dialogues(job_name, system_prompt, user_prompt)
        request = SubmittedRequest(self._last_id, job_name, dialogue, fields, time.monotonic)
        self._requests[request.request_id] = request
        request.task = spawn(self._run(request), name=f"request-{request.request_id}")
        if self._keeper.watch is not None:
            self._keeper.watch.wake()
        return SubmitResult(ok=True, request_id=request.request_id)

    async def get_status(self, request_id: int) -> RequestStatus:
        """Raises NotFound where there is none, or it was released."""
        request = self._of(request_id)
        self._note_life()
        return request.status()

    async def get_result(self, request_id: int) -> RequestResult | NotReady:
        """The outcome, as often as it is asked for until `release`. Raises NotFound."""
        request = self._of(request_id)
        return NotReady(request_id) if request.is_running else request.result()

    async def cancel(self, request_id: int) -> bool:
        """Ends a request and keeps what came of it. False where it had ended before. Raises NotFound."""
        request = self._of(request_id)
        if not request.is_running:
            return False
        request.cancel()
        return True

    async def release(self, request_id: int) -> None:
        """Forgets a request that has ended. Raises NotFound, WrongState while it runs."""
        if self._of(request_id).is_running:
            raise WrongState(f"request {request_id} is running", hint="cancel it first")
        del self._requests[request_id]

    # --- what there is to see ---------------------------------------------------------------------------------------

    async def get_worker_status(self) -> WorkerStatus:
        keeper, running = self._keeper, self._running()
        return WorkerStatus(
            state=keeper.state,
            active=keeper.state not in (WorkerState.COLD, WorkerState.FAILED),
            healthy=keeper.state is WorkerState.READY,
            restarting=keeper.state is WorkerState.RESTARTING
            or (keeper.state is WorkerState.LOADING and keeper.restart_count > 0),
            slots_total=self._slots,
            slots_used=len(running),
            active_requests={request.request_id: request.job_name for request in running},
            restart_count=keeper.restart_count,
            last_error=keeper.last_error,
            last_healthy_at=time.time() if keeper.state is WorkerState.READY else keeper.last_healthy_at,
            pid=None if keeper.process is None else keeper.process.pid,
        )

    async def get_debug_info(self) -> WorkerDebugInfo:
        keeper = self._keeper
        return WorkerDebugInfo(
            log=tuple(keeper.lines(DEBUG_LINES)),
            restarts=tuple(keeper.restarts),
            last_error=keeper.last_error,
            restart_count=keeper.restart_count,
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _run(self, request: SubmittedRequest) -> None:
        try:
            await request.run(self._keeper.socket, self._note_turn)
        except AnswerFailed as error:
            reason, detail = await self._reason_of(error)
            if isinstance(error, ServerUnreachable) and self._keeper.watch is not None:
                self._keeper.watch.refused()
            request.end(RequestState.FAILED, reason.value, detail)
        except DialogueFailed as error:
            request.end(RequestState.FAILED, error.reason, str(error))
        except Exception as error:
            # A dialogue comes from outside, and what it raises is the end of its request alone.
            log.exception("dialogue_failed job=%s", request.job_name)
            request.end(RequestState.FAILED, FailReason.DIALOGUE_FAILED.value, f"{type(error).__name__}: {error}")
        except BaseException as error:
            # Its slot is free again whatever ended it; where it was ended by `cancel` or `fail`, that holds.
            request.end(RequestState.FAILED, FailReason.DIALOGUE_FAILED.value, type(error).__name__)
            raise
        finally:
            if (watch := self._keeper.watch) is not None:
                watch.moved(request.progress)
                if watch.burnt_at is not None:
                    request.note_life(watch.burnt_at)

    async def _reason_of(self, error: AnswerFailed) -> tuple[FailReason, str]:
        """A broken connection is told as the end of the server where that was the cause."""
        process = self._keeper.process
        is_cut = error.reason in (FailReason.STREAM_INCOMPLETE, FailReason.CONNECT_FAILED)
        if is_cut and process is not None and await process.has_ended(within_s=DEATH_S):
            return FailReason.SERVER_DIED, f"the server ended with exit code {process.code}"
        return error.reason, str(error)

    def _note_turn(self, progress: Progress) -> None:
        if self._keeper.watch is not None:
            self._keeper.watch.moved(progress)

    def _running(self) -> list[SubmittedRequest]:
        return [request for request in self._requests.values() if request.is_running]

    def _in_flight(self) -> dict[int, Progress]:
        return {request.request_id: request.progress for request in self._running()}

    def _fail(self, reasons: Mapping[int, FailReason]) -> None:
        self._note_life()
        for request_id, reason in reasons.items():
            self._requests[request_id].fail(reason, _WHY.get(reason, reason.value))

    def _note_life(self) -> None:
        """Passes on to running requests the last time the process was seen to work."""
        if (watch := self._keeper.watch) is not None and watch.burnt_at is not None:
            for request in self._running():
                request.note_life(watch.burnt_at)

    def _of(self, request_id: int) -> SubmittedRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise NotFound(f"there is no request {request_id}")
        return request
