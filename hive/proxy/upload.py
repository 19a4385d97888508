"""One file that comes in as a form: to an unlinked file on the disk, and from there to the server that is to have it.

Which model is meant, and so whether its server has to be loaded first, may be known only after the file
(`curl -F file=@… -F model=…`), and it may have to be sent twice. It is never in memory as a whole, and no name of it is
ever on the disk for long: what a killed proxy leaves is nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import tempfile
from pathlib import Path

from hive.bodies.form import as_object, sent_form
from hive.bodies.form_reader import FormReader, boundary_of
from hive.errors import BadRequest, HiveError
from hive.proxy.refusals import no_disk_for_uploads, no_room_for_uploads
from hive.queue.body_budget import BodyBudget, BodyShare, HeldBody, Upload
from hive.settings.table import Proxy as ProxySettings
from hive.wire.body_sizes import FORM_SETTING, too_large
from hive.wire.file_sending import FileBody
from hive.wire.http1 import Request
from hive.wire.upstream import UpstreamWay

log = logging.getLogger("hive.proxy")

MIB = 1024 * 1024
LEFT_FREE = 32 * MIB
"""Bytes of the disk that uploads leave to others: usage events are written to the same one."""
PREFIX = "upload-"
"""Of the name that a file has for a moment on file systems without O_TMPFILE."""


class UploadSpace:
    """The part of the disk that files of requests may take, all together and each agent.

    `directory`: where they are, of this process's own.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self.directory = Path(tempfile.gettempdir())
        self.budget = BodyBudget(1, one_body=1)
        self.use_settings(settings)

    def __repr__(self) -> str:
        return f"<UploadSpace {self.directory} {self.budget}>"

    def use_settings(self, settings: ProxySettings) -> None:
        self.budget.use(settings.upload_disk_mb * MIB, one_body=settings.upload_max_mb * MIB)

    def use_directory(self, directory: Path) -> None:
        """Takes files to there; what an earlier process left by name is deleted."""
        self.directory = directory
        for left in directory.glob(f"{PREFIX}*"):
            left.unlink(missing_ok=True)

    def check_room(self, size: int) -> None:
        """Raises Saturated where the disk has no room for so many bytes more."""
        try:
            disk = os.statvfs(self.directory)
        except OSError as error:
            raise _not_kept(error) from None
        if disk.f_bavail * disk.f_frsize < size + LEFT_FREE:
            raise no_disk_for_uploads()

    def open(self) -> int:
        """The descriptor of a new file without a name. Raises Saturated."""
        try:
            return os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise _not_kept(error) from None
        path = self.directory / f"{PREFIX}{secrets.token_hex(8)}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            path.unlink()
        except OSError as error:
            raise _not_kept(error) from None
        return descriptor


def _not_kept(error: OSError) -> HiveError:
    log.error("upload_not_kept error=%s", error.strerror)
    return no_disk_for_uploads()


class FormUpload:
    """The form of one request, from its head to its end. Whatever ends the request calls `close`."""

    __slots__ = ("_descriptor", "_held", "_reader", "_request", "_space", "_target", "size")

    def __init__(self, space: UploadSpace, share: BodyShare, target: str, request: Request) -> None:
        """Raises WrongMediaType, BadRequest, Saturated: before a byte of the body is read."""
        self._target = target
        self._space = space
        self._request = request
        self._descriptor = -1
        self._held = HeldBody(space.budget, share)
        self.size = 0
        """Bytes of the file so far."""
        if request.content_length == 0:
            raise BadRequest("the form is empty")
        if (request.content_length or 0) > (most := space.budget.one_body):
            raise too_large("form", most, FORM_SETTING, length=request.content_length)
        self._reader = FormReader(boundary_of(request.field(b"content-type") or b""), self._write)
        space.check_room(request.content_length or 0)

    def __repr__(self) -> str:
        return f"<FormUpload {self.size} B, {self._reader}>"

    @property
    def is_open(self) -> bool:
        """Whether its file is there to be sent."""
        return self._descriptor >= 0

    def take_in(self, upload: Upload) -> None:
        """Takes what has come of the body. Raises BadRequest, TooLarge, Saturated."""
        request, most = self._request, self._space.budget.one_body
        if request.body_bytes > most:
            raise too_large("form", most, FORM_SETTING)
        pieces, request.body = request.body, []
        size = sum(map(len, pieces))
        is_last = request.body_bytes == request.content_length
        if not self._held.take(size, upload=None if is_last else upload):
            raise no_room_for_uploads()
        for piece in pieces:
            self._reader.feed(piece)

    def _write(self, data: bytes) -> None:
        self._space.check_room(len(data))  # again: others write there too, and a head may name no length
        if self._descriptor < 0:
            self._descriptor = self._space.open()
        view = memoryview(data)
        self.size += len(view)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise _not_kept(error) from None

    def end(self, upload: Upload) -> bytes:
        """The body is whole: its text fields, as an object. Raises BadRequest."""
        self._held.is_in(upload)
        self._reader.end()
        if not self.size:
            raise BadRequest('"file" is empty')
        return as_object(self._target, self._reader.fields)

    def body(self, line: bytes, way: UpstreamWay, judged: bytes) -> FileBody:
        """The request for its server. `judged`: its text fields, as they are to go there."""
        boundary = b"hive-" + secrets.token_hex(16).encode()
        before, after = sent_form(self._target, judged, boundary)
        head = way.form_head(line, boundary, len(before) + self.size + len(after))
        return FileBody(head + before, self._descriptor, self.size, after)

    def close(self, upload: Upload) -> None:
        """Gives back the file and its room on the disk; may be called again."""
        held, self._held = self._held, HeldBody(self._space.budget)
        held.release(upload)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
