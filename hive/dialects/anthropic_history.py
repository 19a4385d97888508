"""Blocks of earlier turns that no server here can read, as a line in their place. Pure.

Such a block (a PDF, the result of a web search) stays in a conversation's history for good, so refusing it would end
the conversation. Nothing is decoded or parsed: the size of a document is computed from the length of its base64. Texts
of a result stay, marked as quoted: they are words of neither the user nor the assistant.
"""

from __future__ import annotations

import re

import msgspec

from hive.dialects.taking import Fields, Raw, shown

UNTOLD = frozenset({"server_tool_use", "mcp_tool_use", "fallback"})
"""Left out: a call that the quoted result tells of, and where another model went on."""
_MEDIA_TYPE = re.compile(r"[a-z]{1,20}/[a-z0-9.+-]{1,80}")
_LABELS = ("title", "url", "text", "stdout", "stderr", "error_code")
_NESTED = 8
_QUOTE, _BRACE, _BRACKET = b'"{['
_fields = msgspec.json.Decoder(Fields).decode
_items = msgspec.json.Decoder(list[Raw]).decode
_text = msgspec.json.Decoder(str).decode
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def placeholder(kind: str, source: Fields | None = None) -> str:
    """The line in place of a block; `source`: of a document or an image.

    >>> pdf = {"media_type": Raw(b'"application/pdf"'), "data": Raw(b'"%b"' % (b"x" * 9000))}
    >>> placeholder("document", pdf)
    '[document, application/pdf, 7 KB: not readable here]'
    >>> placeholder("image", {"type": Raw(b'"url"')}), placeholder("container_upload")
    ('[image, url: not readable here]', '[container_upload: not readable here]')
    """
    told = [shown(kind)]
    if source is not None:
        media_type = _word(source.get("media_type"))
        told.append(media_type if _MEDIA_TYPE.fullmatch(media_type) else shown(_word(source.get("type"))[:20]))
        data = len(memoryview(source.get("data", b"")))
        if data > 2:
            told.append(f"{-(-data * 3 // 4096)} KB")
    return f"[{', '.join(told)}: not readable here]"


def quoted(kind: str, found: Fields) -> str:
    """The texts of a result, marked; a placeholder where it has none.

    >>> quoted("web_search_tool_result", {"content": Raw(b'[{"title":"Bees","url":"http://b/","encrypted_content":"x"}]')})
    '[result of web_search, quoted]\\nBees\\nhttp://b/\\n[end of the result]'
    >>> quoted("mcp_tool_result", {"content": Raw(b"[]")})
    '[mcp_tool_result: not readable here]'
    """
    texts: list[str] = []
    try:
        if "content" in found:
            _gather(found["content"], texts, 0)
    except _NOT_JSON:
        texts.clear()
    if not texts:
        return placeholder(kind)
    of = kind.removesuffix("_result").removesuffix("_tool")
    return "\n".join([f"[result of {of}, quoted]", *texts, "[end of the result]"])


def _gather(raw: Raw, texts: list[str], depth: int) -> None:
    """The strings of a result that are there to be read, in order."""
    first = memoryview(raw)[0]
    if first == _QUOTE:
        texts.extend(filter(None, [_word(raw)]))
    elif depth >= _NESTED:
        return
    elif first == _BRACKET:
        for item in _items(raw):
            if memoryview(item)[0] in (_BRACE, _BRACKET):
                _gather(item, texts, depth + 1)
    elif first == _BRACE:
        found = _fields(raw)
        texts.extend(filter(None, (_word(found.get(name)) for name in _LABELS)))
        if "source" in found:
            _gather_source(_word(found.get("type")), found["source"], texts, depth + 1)
        elif "content" in found:
            _gather(found["content"], texts, depth + 1)


def _gather_source(kind: str, raw: Raw, texts: list[str], depth: int) -> None:
    """Gathers the texts of a document within a result, or of a search result, which has a label as its source."""
    if memoryview(raw)[0] != _BRACE:
        texts.extend(filter(None, [_word(raw)]))
        return
    source = _fields(raw)
    match _word(source.get("type")):
        case "text" if "data" in source:
            _gather(source["data"], texts, depth)
        case "content" if "content" in source:
            _gather(source["content"], texts, depth)
        case _:
            texts.append(placeholder(kind, source))


def _word(raw: Raw | None) -> str:
    """A string; empty for anything else."""
    try:
        return "" if raw is None or memoryview(raw)[0] != _QUOTE else _text(raw)
    except _NOT_JSON:
        return ""
