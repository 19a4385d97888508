"""Errors of a runner, in OpenAI's shape with Hive's codes, and how it ends. Standard library only."""

from __future__ import annotations

OUT_OF_MEMORY = 77
"""Exit code of a runner whose engine had no memory left: the pool takes it as an OOM (hive/pooling)."""
SAID = ("out of memory", "bad_alloc", "cudaerrormemoryallocation", "failed to allocate", "cannot allocate memory")
"""Words of engines without memory: CTranslate2, CUDA, PyTorch."""


class EngineFault(Exception):
    """A call that is answered with an error. `param`: the field it is about. `cost`: what it took all the same, as
    `EngineCall.cost`; empty: Hive has to guess it by the time."""

    def __init__(self, status: int, message: str, code: str, *, param: str | None = None, cost: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.cost = status, message, code, param, cost

    def shape(self) -> dict[str, object]:
        """The answer's body, as OpenAI shapes it.

        >>> EngineFault(400, "no speech", "invalid_audio").shape()["error"]["type"]
        'invalid_request_error'
        """
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class CallerGone(Exception):
    """The client closed its connection, or its half of it: the work is ended, and nobody is answered."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an engine's error says that it has no memory left.

    >>> is_out_of_memory(RuntimeError("CUDA failed with error out of memory")), is_out_of_memory(ValueError("no"))
    (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    if "OutOfMemory" in type(error).__name__:
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(said in words for said in SAID)
