"""Server-sent events, sans I/O: bytes split anywhere into the data of whole events (WHATWG HTML §9.2.6)."""

from __future__ import annotations

MAX_EVENT = 1024 * 1024
"""Bytes of an unfinished event kept; a longer one is given up (it is relayed all the same)."""


class SseReader:
    """Gives the `data` of each event completed by `feed`. Comments and other fields are passed over.

    >>> reader = SseReader()
    >>> reader.feed(b'data: {"a":'), reader.feed(b'1}\\n\\n: ping\\n\\ndata: [DONE]\\n\\n')
    ([], [b'{"a":1}', b'[DONE]'])
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if not self._rest and data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            single = data[6:-2]
            if b"\n" not in single:
                return [single]
        data = self._rest + data
        if b"\r" in data:
            held = data.endswith(b"\r")  # its line feed may be the next byte
            data = data[: len(data) - held].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT:
            self._rest = b""
        return [payload for event in events if (payload := _data_of(event))]

    def end(self) -> list[bytes]:
        """The bytes have ended: a carriage return that was held back was a line end. An event cut short is dropped."""
        return self.feed(b"\n") if self._rest.endswith(b"\r") else []


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
