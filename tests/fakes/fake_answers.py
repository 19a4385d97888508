"""The bytes that Ollama, vLLM and llama-server answer with, for the fake backend; no I/O.

Shapes are those of vLLM 0.32, llama.cpp 0c1e570 and Ollama 0.32.15, each looked at over a socket.
"""

from __future__ import annotations

import argparse
import json
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple

import ollama_words

WORDS = ("the", "bee", "größer", "蜂", "river", "of", "honey", "and", "a", "boat,", "wax\n", "or", "\U0001f41d", "home")
TEMPLATE_TOKENS = 8


class Script(NamedTuple):
    """One answer. `chunks`: the HTTP chunks of a stream, or one body; `ending`: the chunk of the end marker."""

    content_type: str
    chunks: list[bytes]
    ending: bytes = b""
    streamed: bool = False
    status: int = 200
    tokens_in: int = 0
    tokens_out: int = 0


class Asked(NamedTuple):
    """The wishes of a POST: model, whether to stream, whether usage goes into the stream, words in and out."""

    model: str
    stream: bool
    usage: bool
    tokens_in: int
    tokens_out: int
    reason: str
    number: str


class Refused(Exception):
    """An error answer: status, message, the kind's word for it."""

    def __init__(self, status: int, message: str, word: str) -> None:
        super().__init__(message)
        self.status, self.word = status, word


def encode(found: Any) -> bytes:
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def word(place: int, seed: int) -> str:
    """Token number `place` of an answer."""
    return " " + WORDS[(seed * 31 + place) % len(WORDS)]


def text_of(tokens: int, seed: int) -> str:
    return "".join(word(place, seed) for place in range(tokens))


# --- what is asked -------------------------------------------------------------------------------------------------


def read(body: bytes, path: str, flags: argparse.Namespace, number: int) -> tuple[Asked, dict[str, Any]]:
    """The request as numbers, or `Refused` in the way of its kind."""
    try:
        found = json.loads(body)
        assert isinstance(found, dict)
    except (ValueError, AssertionError):
        status, kind = {"ollama": (400, "invalid_request_error"), "vllm": (400, "Bad Request")}.get(
            flags.kind, (500, "server_error")
        )
        raise Refused(status, "invalid character in request body", kind) from None
    if flags.busy:
        raise busy(flags.kind)
    model = str(found.get("model") or "")
    if flags.kind != "llama" and model not in flags.models and not (flags.kind == "vllm" and not model):
        said = ollama_words.unknown(path, model) if flags.kind == "ollama" else f"The model `{model}` does not exist."
        raise Refused(404, said, "NotFoundError" if flags.kind == "vllm" else "not_found_error")
    limits = [found.get("max_completion_tokens"), found.get("max_tokens")]
    if flags.kind == "ollama":
        check_ollama(path, model, found, flags)
        options = found.get("options") or {}
        limits = [options.get("num_predict") or None, found.get("max_tokens") or None]  # 0 is no limit
    natural = flags.tokens + ((number * 7 + flags.seed) % (flags.spread + 1))
    limit = next((wanted for wanted in limits if wanted is not None and wanted >= 0), natural)
    asked = Asked(
        model=model if flags.kind == "ollama" else flags.models[0],
        stream=bool(found.get("stream", path in ("/api/chat", "/api/generate"))),
        usage=bool((found.get("stream_options") or {}).get("include_usage")),
        tokens_in=words_in(found) + TEMPLATE_TOKENS,
        tokens_out=min(natural, limit),
        reason="length" if limit <= natural and limit in limits else "stop",
        number=f"fake{number}",
    )
    return asked, found


def check_ollama(path: str, model: str, found: dict[str, Any], flags: argparse.Namespace) -> None:
    """Raises `Refused` for what that model cannot do, or what Ollama cannot read."""
    if said := ollama_words.lacking(model, found, flags.capabilities):
        raise Refused(400, said, "invalid_request_error")
    if said := ollama_words.misread(path, found):
        raise Refused(500, said, "api_error")
    if flags.broken and path != "/api/show":
        raise Refused(500, ollama_words.BROKEN, "api_error")


def busy(kind: str) -> Refused:
    return {
        "ollama": Refused(503, "server busy, please try again.  maximum pending requests exceeded", "api_error"),
        "vllm": Refused(503, "The engine is currently busy and cannot accept new requests.", "Service Unavailable"),
        "llama": Refused(503, "Loading model", "unavailable_error"),
    }[kind]


def words_in(found: dict[str, Any]) -> int:
    """Words of everything that is prompt."""
    texts: list[Any] = [found.get("prompt"), found.get("system"), found.get("input")]
    for message in found.get("messages") or ():
        content = message.get("content")
        texts += [part.get("text") for part in content] if isinstance(content, list) else [content]
    flat = [text for entry in texts for text in (entry if isinstance(entry, list) else [entry])]
    return sum(len(text.split()) for text in flat if isinstance(text, str))


# --- Ollama's own dialect ------------------------------------------------------------------------------------------


def ollama_script(path: str, asked: Asked, found: dict[str, Any], seed: int) -> Script:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + ".123456789Z"
    base = {"model": asked.model, "created_at": at}

    def spoken(text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if path == "/api/chat" else {"response": text}

    if not (found.get("messages") or found.get("prompt")):
        reason = "unload" if found.get("keep_alive") == 0 else "load"
        return Script(JSON, [encode({**base, **spoken(""), "done": True, "done_reason": reason})])
    last = {"done": True, "done_reason": asked.reason, **ollama_metrics(asked)}
    if path == "/api/generate":
        last["context"] = [1, 2, 3]
    if not asked.stream:
        return Script(
            JSON,
            [encode({**base, **spoken(text_of(asked.tokens_out, seed)), **last})],
            tokens_in=asked.tokens_in,
            tokens_out=asked.tokens_out,
        )
    words = [word(place, seed) for place in range(asked.tokens_out)]
    held = "".join(words) if found.get("tools") else ""  # what might be a call comes with the last line
    lines = [encode({**base, **spoken(text), "done": False}) + b"\n" for text in words if not held]
    return Script(
        "application/x-ndjson",
        lines,
        encode({**base, **spoken(held), **last}) + b"\n",
        True,
        tokens_in=asked.tokens_in,
        tokens_out=asked.tokens_out,
    )


def ollama_metrics(asked: Asked) -> dict[str, int]:
    """Durations in ns; counts that are 0 are left out, as Go's `omitempty` does."""
    counts = {
        "total_duration": 5_000_000 + asked.tokens_out * 1_000_000,
        "load_duration": 1_000_000,
        "prompt_eval_count": asked.tokens_in,
        "prompt_eval_duration": 4_000_000,
        "eval_count": asked.tokens_out,
        "eval_duration": asked.tokens_out * 1_000_000,
    }
    return {name: count for name, count in counts.items() if count}


def ollama_embedding(path: str, asked: Asked, found: dict[str, Any]) -> Script:
    if path == "/api/embeddings":
        return Script(JSON, [encode({"embedding": [0.1, 0.2, 0.3]})])
    texts = found.get("input")
    vectors = [[0.1, 0.2, 0.3] for _ in (texts if isinstance(texts, list) else [texts])]
    counts = {"total_duration": 1000, "load_duration": 100, "prompt_eval_count": asked.tokens_in}
    return Script(JSON, [encode({"model": asked.model, "embeddings": vectors, **counts})], tokens_in=asked.tokens_in)


# --- OpenAI's dialect, three ways ----------------------------------------------------------------------------------

JSON = "application/json; charset=utf-8"
FINGERPRINT = {"ollama": ollama_words.FINGERPRINT, "vllm": "vllm-0.32.0-da79303a", "llama": "b1-0c1e570"}


def openai_script(kind: str, path: str, asked: Asked, found: dict[str, Any], seed: int) -> Script:
    if path == "/v1/embeddings":
        return openai_embedding(kind, asked, found)
    chat = path == "/v1/chat/completions"
    base = {
        "id": f"{'chatcmpl' if chat or kind == 'llama' else 'cmpl'}-{asked.number}",
        "object": ("chat.completion" + (".chunk" if asked.stream else "")) if chat else "text_completion",
        "created": int(time.time()),
        "model": asked.model,
    }
    more = {"timings": timings(asked)} if kind == "llama" else {}
    if not asked.stream:
        text = text_of(asked.tokens_out, seed)
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        no_logprobs = {} if kind == "ollama" else {"logprobs": None}
        choice = {"index": 0, **said, **no_logprobs, "finish_reason": asked.reason}
        whole = {**base, "system_fingerprint": FINGERPRINT[kind], "choices": [choice], "usage": usage(kind, asked)}
        return Script(JSON, [encode({**whole, **more})], tokens_in=asked.tokens_in, tokens_out=asked.tokens_out)
    if kind == "ollama":
        base["system_fingerprint"] = FINGERPRINT[kind]
    deltas = vllm_deltas(asked, seed, chat) if kind == "vllm" else other_deltas(kind, asked, seed, chat)
    events: list[dict[str, Any]] = [{**base, "choices": [delta]} for delta in deltas]
    if kind == "ollama" and asked.usage and not chat:  # as Ollama does it: zeros on every chunk
        zero = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        events = [{**event, "usage": zero} for event in events]
    if asked.usage:
        events.append({**base, "choices": [], "usage": usage(kind, asked), **more})
    elif more:
        events[-1] |= more if chat else {"usage": usage(kind, asked), **more}
    chunks = [b"data: " + encode(event) + b"\n\n" for event in events]
    if kind == "llama" and chat and len(chunks) > 1:  # its first HTTP chunk holds two events
        chunks[:2] = [chunks[0] + chunks[1]]
    mime = "text/event-stream" + ("; charset=utf-8" if kind == "vllm" else "")
    return Script(mime, chunks, b"data: [DONE]\n\n", True, tokens_in=asked.tokens_in, tokens_out=asked.tokens_out)


def vllm_deltas(asked: Asked, seed: int, chat: bool) -> list[dict[str, Any]]:
    """The role alone first; the last word's event also has the reason."""
    found: list[dict[str, Any]] = []
    if chat:
        found.append({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None})
    for place in range(asked.tokens_out):
        text = word(place, seed)
        said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        found.append({"index": 0, **said, "logprobs": None, "token_ids": None})
    found = [{**choice, "finish_reason": None} for choice in found]
    if found:
        found[-1] |= {"finish_reason": asked.reason, "stop_reason": None}
    return found


def other_deltas(kind: str, asked: Asked, seed: int, chat: bool) -> list[dict[str, Any]]:
    """llama-server tells the role first, Ollama with the first word; both tell the reason in an event of its own."""
    found: list[dict[str, Any]] = []
    if kind == "llama" and chat:
        found.append({"delta": {"role": "assistant", "content": None}})
    for place in range(asked.tokens_out):
        text = word(place, seed)
        role = {"role": "assistant"} if kind == "ollama" and not place else {}
        found.append({"delta": {**role, "content": text}} if chat else {"text": text})
    found.append({"delta": {}} if chat else {"text": ""})
    return [{"index": 0, **said, "finish_reason": asked.reason if said is found[-1] else None} for said in found]


def usage(kind: str, asked: Asked) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": asked.tokens_in,
        "completion_tokens": asked.tokens_out,
        "total_tokens": asked.tokens_in + asked.tokens_out,
    }
    if kind == "llama":
        found["prompt_tokens_details"] = {"cached_tokens": timings(asked)["cache_n"]}
    elif kind == "vllm" and not asked.stream:
        found["prompt_tokens_details"] = None
    return found


def timings(asked: Asked) -> dict[str, Any]:
    """`prompt_n` is what was not in the cache."""
    cached = asked.tokens_in // 2
    return {
        "cache_n": cached,
        "prompt_n": asked.tokens_in - cached,
        "prompt_ms": 0.5,
        "predicted_n": asked.tokens_out,
        "predicted_ms": asked.tokens_out * 0.1,
    }


def openai_embedding(kind: str, asked: Asked, found: dict[str, Any]) -> Script:
    if kind == "llama":
        said = "This server does not support embeddings. Start it with `--embeddings`"
        raise Refused(501, said, "not_supported_error")
    texts = found.get("input")
    vector: Any = [0.1, 0.2, 0.3]
    if found.get("encoding_format") == "base64":
        vector = "zczMPc3MTD6amZk+"  # the same three as little-endian floats
    count = len(texts) if isinstance(texts, list) else 1
    data = [{"object": "embedding", "index": index, "embedding": vector} for index in range(count)]
    told = {"prompt_tokens": asked.tokens_in, "total_tokens": asked.tokens_in}
    body = encode({"object": "list", "data": data, "model": asked.model, "usage": told})
    return Script(JSON, [body], tokens_in=asked.tokens_in)


# --- control answers and errors ------------------------------------------------------------------------------------


def quantized(name: str) -> str:
    """As Ollama tells it: what the tag says, in capitals; the tiny model's where it says nothing."""
    tag = name.partition(":")[2]
    return tag.upper() if tag[:1] in ("q", "f") else "F32"


def control(path: str, flags: argparse.Namespace) -> Script:
    """The answer to a GET, or `Refused`."""
    shown: dict[str, Any] = {}
    if flags.kind == "ollama":
        rows = [
            ollama_words.tag(name, 656640, "ab" * 32, flags.capabilities, quantization_level=quantized(name))
            for name in flags.models
        ]
        if path == "/":
            return Script("text/plain; charset=utf-8", [b"Ollama is running"])
        shown = {
            "/api/version": {"version": "0.32.15"},
            "/api/tags": {"models": rows},
            "/api/ps": {"models": [ollama_words.running(row) for row in rows]},
        }
    elif flags.kind == "vllm":
        shown = {"/version": {"version": "0.32.0"}, "/load": {"server_load": 0}}
        if path == "/health":
            return Script("text/plain", [b""])
    elif flags.busy:
        raise busy("llama")
    else:
        shown = {
            "/health": {"status": "ok"},
            "/props": {"total_slots": 4, "model_path": "tiny.gguf", "build_info": "b1-0c1e570", "is_sleeping": False},
        }
    owner = {"vllm": "vllm", "llama": "llamacpp"}.get(flags.kind, "")
    listed = [{"id": name, "object": "model", "created": 1795154964, "owned_by": owner} for name in flags.models]
    if flags.kind == "llama":
        listed = [{**entry, "meta": {"n_ctx": 4096, "size": 656640}} for entry in listed]
    shown["/v1/models"] = {"object": "list", "data": listed}
    if flags.kind == "ollama":
        shown["/v1/models"] = ollama_words.listed(flags.models)
    if path not in shown:
        raise Refused(404, {"vllm": "Not Found", "llama": "File Not Found"}.get(flags.kind, ""), "not_found_error")
    return Script(JSON, [encode(shown[path])])


def error_script(kind: str, path: str, error: Refused) -> Script:
    if kind == "ollama" and error.status == 404 and not str(error):
        return Script("text/plain", [b"404 page not found"], status=404)
    if kind == "vllm" and str(error) == "Not Found":
        return Script("application/json", [encode({"detail": "Not Found"})], status=404)
    found: Any = {"message": str(error), "type": error.word, "param": None, "code": error.status}
    if kind == "ollama":
        found = {**found, "code": None} if path.startswith("/v1") else str(error)
    elif kind == "llama":
        del found["param"]
    return Script(JSON, [encode({"error": found})], status=error.status)


def stream_error(kind: str, path: str) -> tuple[bytes, bytes]:
    """The last words of a backend whose engine dies in a stream it has begun, and the end marker after them.

    Ollama says it in its own dialect only: in OpenAI's there is an empty event without a model, and a clean end.
    """
    if path.startswith("/api"):
        return encode({"error": ollama_words.DIED}) + b"\n", b""
    if kind == "ollama":
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": int(time.time()), "model": ""}
        return b"data: " + encode(
            {**event, "system_fingerprint": FINGERPRINT[kind], "choices": [choice]}
        ) + b"\n\n", b""
    found = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + encode({"error": found}) + b"\n\n", b"data: [DONE]\n\n" if kind == "vllm" else b""


HEADS = {
    "ollama": ("Content-Type", "Date: {date}\r\n", "Content-Length", "Transfer-Encoding", ""),
    "vllm": ("content-type", "date: {date}\r\nserver: uvicorn\r\n", "content-length", "transfer-encoding", ""),
    "llama": (
        "Content-Type",
        "Server: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n",
        "Content-Length",
        "Transfer-Encoding",
        "X-Accel-Buffering: no\r\n",
    ),
}


def head(kind: str, script: Script, *, close: bool) -> bytes:
    """The response head in the order and case of its kind."""
    type_name, fixed, length, coding, of_streams = HEADS[kind]
    fields = f"HTTP/1.1 {script.status} {HTTPStatus(script.status).phrase}\r\n"
    fields += fixed.format(date=formatdate(usegmt=True)) if "{" in fixed else fixed
    fields += f"{type_name}: {script.content_type}\r\n"
    if script.streamed:
        fields += f"{of_streams}{coding}: chunked\r\n"
    else:
        fields += f"{length}: {sum(map(len, script.chunks))}\r\n"
    if close:
        fields += "Connection: close\r\n"
    elif kind == "llama":
        fields += "Keep-Alive: timeout=5, max=100\r\n"
    return (fields + "\r\n").encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
