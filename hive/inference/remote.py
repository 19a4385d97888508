"""Any other server of OpenAI's dialect, wherever it runs; whose it is nobody here knows."""

from __future__ import annotations

import msgspec

from hive.domain import BackendCapabilities, BackendKind, ModelInfo
from hive.errors import BackendDown
from hive.inference import ask
from hive.inference.server import Server

MODELS = "/v1/models"
VERSIONS = ("openai-version", "x-litellm-version", "x-vllm-version")
"""Header fields in which such a server may tell which it is; OpenAI's dialect has no question for that."""


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None
    created: float | None = None
    max_model_len: object = None
    """vLLM's and SGLang's servers tell it; a server that has something else there is still a server."""


class _Models(msgspec.Struct):
    data: list[_Model]


def is_list(body: bytes) -> bool:
    """Whether this is OpenAI's list of models.

    >>> is_list(b'{"object":"list","data":[{"id":"m"}]}'), is_list(b'{"data":{}}'), is_list(b"<html>")
    (True, False, False)
    """
    try:
        msgspec.json.decode(body, type=_Models)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def version_in(headers: dict[str, str]) -> str:
    """What its answers say of it, empty where they say nothing.

    >>> version_in({"server": "nginx", "openai-version": "2020-10-01"})
    '2020-10-01'
    """
    told = next((headers[name] for name in VERSIONS if headers.get(name)), "")
    return told if len(told) <= 200 and told.isprintable() else ""


class Remote(Server):
    """Keeps the contract of `Backend`. It is healthy where it lists its models: there is no other harmless question."""

    kind = BackendKind.REMOTE
    health_path = MODELS
    why_not_load = "whoever runs the remote server decides what it has loaded"

    async def models(self) -> list[ModelInfo]:
        listed = await self._shape(MODELS, _Models)
        return [
            ModelInfo(
                name=model.id,
                owned_by=model.owned_by or "",
                created=max(0, int(model.created or 0)),
                context_length=model.max_model_len if isinstance(model.max_model_len, int) else None,
            )
            for model in listed.data
        ]

    async def version(self) -> str:
        answer = await ask.get(self.address, MODELS, within_s=self._within_s, access=self.access)
        if answer.status != 200:
            raise BackendDown(refusal(self.address, answer.status, has_key=bool(self.access.key)))
        return version_in(answer.headers)

    async def capabilities(self) -> BackendCapabilities:
        """By its own description where it has one, as servers made with FastAPI do (vLLM, SGLang); else it is taken for
        one that has OpenAI's schema and refuses every other field, as OpenAI's own does."""
        assumed = BackendCapabilities(fields=(), found="OpenAI's schema alone, it describes none of its own")
        return await self._described() or assumed


def refusal(address: str, status: int, *, has_key: bool) -> str:
    """Why it is of no use, in words.

    >>> refusal("https://h", 401, has_key=False)
    'https://h asks for a key (401), and it is shown none'
    """
    if status in (401, 403):
        return f"{address} " + (
            f"refuses Hive's key ({status})" if has_key else f"asks for a key ({status}), and it is shown none"
        )
    return f"{address} answers GET {MODELS} with status {status}"
