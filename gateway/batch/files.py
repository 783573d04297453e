"""/v1/files: upload, list, delete and content. An upload gets its 200 once body and database row are durable.

`feed` blocks on the disk: call it in a worker thread.
"""

import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from email.message import Message
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import anyio
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter
from pydantic import Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.batch.resources import BatchState, describe_page, json_response, list_response, read_page, refuse, state_of
from gateway.batch.results import intact_parts
from gateway.batch.tenants import listed_tenant, reached_tenant, shown
from gateway.context import server_of, tenant_of
from gateway.generate.answering import check_encoding
from gateway.generate.validation import StrictBody
from gateway.http.errors import ApiError
from gateway.http.keys import limit_reached
from gateway.http.sse import run_while_connected
from gateway.store.disk import DiskFile, StorageError, UnreadableError, read_errors
from gateway.store.objects import FILE_ID, FileObject, NoSuchFile, StorageQuota, new_file_id

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


MAX_FIELD_BYTES = 1024
MAX_PREAMBLE_BYTES = 4096
"""Maximum size of a text before the first part (RFC 2046 5.1.1), which is ignored."""
MAX_PART_HEADERS = 32
MAX_PARTS = 16
MAX_OVERHEAD = 64 * 1024  # bytes of the body in addition to the file's content
MAX_FILENAME_CHARS = 255
_EXTENDED = re.compile(r";\s*(filename\*=[^;]*)", re.IGNORECASE)
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


def _refuse(message: str, param: str | None = None, code: str = "invalid_value") -> NoReturn:
    raise ApiError(400, message, param=param, code=code)


def _extended_filename(header: str) -> bytes | None:
    """Return the `filename*` parameter (RFC 5987) in UTF-8, or None. urllib3 1 sends non-ASCII names in this form."""
    found = _EXTENDED.search(header)
    if found is None:
        return None
    message = Message()
    message["content-disposition"] = f"form-data; {found[1]}"
    name = message.get_filename()
    return None if name is None else name.encode("utf-8", "replace")


class UploadParser:
    """Parse a body: call `feed` for each piece, then `finish`. Raises ApiError 400, 413 or 415, or StorageError.

    The content is written to `file`; `fields` are the text fields."""

    def __init__(self, content_type: str, file: DiskFile, max_file_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data":
            raise ApiError(415, "The upload must be sent as multipart/form-data.")
        if not boundary:
            _refuse("The upload has no multipart boundary.", code="invalid_multipart")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._file = file
        self._max_file_bytes = max_file_bytes
        self._num_bytes = 0
        self._num_parts = 0
        self._ended = False
        self._headers: dict[bytes, bytearray] = {}
        self._header_name = bytearray()
        self._field: str | None = None
        self._value = bytearray()
        self._sink: Callable[[bytes], None] = self._refuse_data
        self._boundary = b"--" + boundary
        self._preamble: bytearray | None = bytearray()
        try:
            self._parser = MultipartParser(
                boundary, self._callbacks(), max_header_count=MAX_PART_HEADERS, max_header_size=4096
            )
        except FormParserError as error:
            _refuse(f"The multipart boundary is not valid: {error}.", code="invalid_multipart")

    def feed(self, data: bytes) -> None:
        """Parse the next piece of the body."""
        self._num_bytes += len(data)
        if self._num_bytes > self._max_file_bytes + MAX_OVERHEAD:
            raise self._too_large()
        if self._preamble is not None:
            data = self._after_preamble(self._preamble, data)
        try:
            with self._file.disk.storing():
                self._parser.write(data)
        except FormParserError as error:
            _refuse(f"The multipart body is not valid: {error}.", code="invalid_multipart")

    def _after_preamble(self, preamble: bytearray, data: bytes) -> bytes:
        """Return the data from the first boundary on; empty if the boundary has not come."""
        preamble += data
        at = 0 if preamble.startswith(self._boundary) else preamble.find(b"\n" + self._boundary) + 1
        if at == 0 and not preamble.startswith(self._boundary):
            if len(preamble) > MAX_PREAMBLE_BYTES:
                message = "The multipart body has no line with the boundary that the Content-Type header names."
                _refuse(message, code="invalid_multipart")
            return b""
        self._preamble = None
        return bytes(preamble[at:])

    def finish(self) -> None:
        """Raise ApiError 400 if the body is incomplete or has no file."""
        if not self._ended:
            part = "the first boundary" if self._preamble is not None else "the last boundary"
            _refuse(f"The multipart body ended before {part}.", code="invalid_multipart")
        if not self.filename:
            _refuse("Missing required parameter: 'file'.", "file", "missing_required_parameter")

    def _callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_data,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            _refuse("The multipart body has too many parts.", code="invalid_multipart")
        self._headers = {}
        self._header_name = bytearray()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._headers.setdefault(bytes(self._header_name).lower(), bytearray()).extend(data[start:end])

    def _end_header(self) -> None:
        self._header_name = bytearray()

    def _begin_data(self) -> None:
        header = self._headers.get(b"content-disposition", bytearray()).decode("latin-1")
        kind, options = parse_options_header(header)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            _refuse("A part of the multipart body has no name.", code="invalid_multipart")
        if name == "file":
            self._begin_file(_extended_filename(header) or options.get(b"filename"))
            return
        if name not in FIELDS:
            _refuse(f"Unknown parameter: '{name[:64]}'.", name[:64], "unknown_parameter")
        if name in self.fields:
            _refuse(f"'{name}' was sent twice.", name)
        self._field, self._value, self._sink = name, bytearray(), self._add_value

    def _begin_file(self, raw_name: bytes | None) -> None:
        if raw_name is None:
            _refuse("'file' must be a file with a file name.", "file")
        if self.filename:
            _refuse("Exactly one file can be uploaded at a time.", "file")
        name = raw_name.decode("utf-8", "replace")
        if len(name) > MAX_FILENAME_CHARS:
            _refuse(f"The file name is longer than {MAX_FILENAME_CHARS} characters.", "file")
        self.filename = name or "upload"
        self._sink = self._add_content

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._sink(data[start:end])

    def _refuse_data(self, data: bytes) -> None:  # noqa: ARG002
        _refuse("The multipart body has data outside its parts.", code="invalid_multipart")

    def _add_value(self, data: bytes) -> None:
        self._value += data
        if len(self._value) > MAX_FIELD_BYTES:
            _refuse(f"'{self._field}' is too long.", self._field)

    def _add_content(self, data: bytes) -> None:
        if self._file.size + len(data) > self._max_file_bytes:
            raise self._too_large()
        self._file.write(data)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The file is larger than {self._max_file_bytes} bytes.", param="file")

    def _end_part(self) -> None:
        if self._field is not None:
            try:
                self.fields[self._field] = self._value.decode()
            except UnicodeDecodeError:
                _refuse(f"'{self._field}' is not valid UTF-8.", self._field)
        self._field, self._sink = None, self._refuse_data

    def _end(self) -> None:
        self._ended = True


log = logging.getLogger("tidemill.gateway")

router = APIRouter()

PIECE_BYTES = 1024 * 1024
READ_BYTES = 256 * 1024
MAX_LISTED = 10_000
MIN_EXPIRY, MAX_EXPIRY = 3600, 2_592_000
DEFAULT_EXPIRY = 30 * 86_400

_UPLOAD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY, "maximum": MAX_EXPIRY},
    },
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD_SCHEMA}}}}


class FileExpiry(StrictBody):
    """`expires_after` of a file."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY, le=MAX_EXPIRY)


@router.post("/v1/files", openapi_extra=_UPLOAD)
async def create_file(request: Request) -> Response:
    server_of(request).lifecycle.check_accepting()
    state = state_of(request)
    quota = server_of(request).keys.quota(tenant_of(request)).bytes
    async with state.uploads.place(tenant_of(request)):
        max_bytes = await room(request, quota)
        async with _temporary(state) as temp:
            try:
                upload = await _receive(request, temp, max_bytes)
            except ApiError as error:
                if error.status == 413 and quota is not None and max_bytes < state.limits.file_bytes:
                    raise _quota_reached(quota, quota - max_bytes) from None
                raise
            file = _file_object(upload, temp.size, tenant_of(request), state.now())
            await _store_file(state, temp, file, quota)
    return json_response(file.as_json())


async def store_content(request: Request, content: bytes, filename: str) -> FileObject:
    """Store the input file of a batch that was sent in another form. Raises ApiError 413 beyond the tenant's quota."""
    state = state_of(request)
    async with state.uploads.place(tenant_of(request)), _temporary(state) as temp:
        await to_thread.run_sync(_write, state, temp, content)
        return await store_written(request, temp, filename)


async def store_written(request: Request, temp: DiskFile, filename: str) -> FileObject:
    """Store a finished file of the request's tenant. Raises StorageError, and ApiError 413 beyond the quota."""
    state, tenant = state_of(request), tenant_of(request)
    now = state.now()
    file = FileObject(new_file_id(), tenant, temp.size, now, filename, "batch", now + DEFAULT_EXPIRY)
    await _store_file(state, temp, file, server_of(request).keys.quota(tenant).bytes)
    return file


@asynccontextmanager
async def _temporary(state: BatchState) -> AsyncIterator[DiskFile]:
    """Yield a new file, which is removed at the end unless it was published."""
    temp = await to_thread.run_sync(state.folder.create_temp)
    try:
        yield temp
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(temp.discard)


def _write(state: BatchState, temp: DiskFile, content: bytes) -> None:
    with state.folder.disk.storing():
        temp.write(content)


async def room(request: Request, quota: int | None) -> int:
    """Return the maximum size of a new file in bytes. Raise ApiError 413 if it exceeds the tenant's remaining quota.

    Not 507, which clients retry as a server error.
    """
    state = state_of(request)
    if quota is None:
        return state.limits.file_bytes
    used = await state.folder.store.stored_bytes(tenant_of(request), state.expiry_now())
    announced = request.headers.get("content-length", "0")
    least = int(announced[:20]) - MAX_OVERHEAD if announced.isdigit() else 0
    if max(1, least) > quota - used:
        raise _quota_reached(quota, used)
    return min(state.limits.file_bytes, quota - used)


def _quota_reached(quota: int, used: int) -> ApiError:
    return limit_reached("bytes", quota, f"{used} bytes are stored; delete files that are not needed", status=413)


async def _receive(request: Request, temp: DiskFile, max_bytes: int) -> UploadParser:
    """Parse the body into the file, in pieces large enough for a thread hop. Raises ApiError, StorageError."""
    check_encoding(request)
    parser = UploadParser(request.headers.get("content-type", ""), temp, max_bytes)
    pieces = bytearray()
    async for chunk in request.stream():
        pieces += chunk
        if len(pieces) >= PIECE_BYTES:
            await to_thread.run_sync(parser.feed, bytes(pieces))
            pieces.clear()
    await to_thread.run_sync(parser.feed, bytes(pieces))
    parser.finish()
    return parser


def _file_object(upload: UploadParser, size: int, tenant: str, now: int) -> FileObject:
    purpose = upload.fields.get("purpose")
    if purpose is None:
        _refuse("Missing required parameter: 'purpose'.", "purpose", "missing_required_parameter")
    if purpose != "batch":
        _refuse("'purpose' must be 'batch'.", "purpose")
    expires_at = now + _expiry(upload.fields)
    return FileObject(new_file_id(), tenant, size, now, upload.filename, purpose, expires_at)


def _expiry(fields: dict[str, str]) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_EXPIRY
    if anchor != "created_at":
        refuse("expires_after[anchor]", "'created_at'")
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) <= 10):
        seconds = "0"
    if not MIN_EXPIRY <= int(seconds) <= MAX_EXPIRY:
        refuse("expires_after[seconds]", f"between {MIN_EXPIRY} and {MAX_EXPIRY}")
    return int(seconds)


async def _store_file(state: BatchState, temp: DiskFile, file: FileObject, quota: int | None) -> None:
    """Announce the id, then store body and row: the next start removes the leftovers of a crash in between.

    Raises StorageError, and ApiError 413 beyond the quota.
    """
    await state.folder.store.announce_files([file.id])
    try:
        await to_thread.run_sync(state.folder.publish_files, (temp, file.id))
        await state.folder.store.add_file(file, quota)
    except (StorageError, StorageQuota) as error:
        await state.folder.withdraw(error, file.id)
        if isinstance(error, StorageQuota) and quota is not None:
            raise _quota_reached(quota, error.used) from None
        raise


@router.get("/v1/files", openapi_extra=describe_page(MAX_LISTED, "order", "purpose"))
async def list_files(request: Request) -> Response:
    state = state_of(request)
    page = read_page(request, default=MAX_LISTED, most=MAX_LISTED, orders=True)
    purpose = request.query_params.get("purpose") or None
    files, more = await state.folder.store.list_files(listed_tenant(request), page, purpose, state.expiry_now())
    return list_response([shown(request, file, file.as_json()) for file in files], more)


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> Response:
    file = await find_file(request, file_id)
    return json_response(shown(request, file, file.as_json()))


async def find_file(request: Request, file_id: str) -> FileObject:
    """Return a file. Raises ApiError 404 for a missing file and, without the operator role, for another tenant's."""
    state = state_of(request)
    if FILE_ID.fullmatch(file_id):
        file = await state.folder.store.get_file(reached_tenant(request), file_id, state.expiry_now())
        if file is not None:
            return file
    raise NoSuchFile


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    file = await find_file(request, file_id)
    if not await remove_file(request, file.id):
        raise NoSuchFile
    return json_response({"id": file.id, "object": "file", "deleted": True})


async def remove_file(request: Request, file_id: str) -> bool:
    """Delete a file; return False if it does not exist. Raises FileInUse for the input of an unfinished batch."""
    state = state_of(request)
    deleted = await state.folder.store.delete_file(reached_tenant(request), file_id, state.expiry_now())
    if deleted:
        await to_thread.run_sync(state.folder.remove_body, file_id)
    return deleted


@router.get("/v1/files/{file_id}/content")
async def read_content(request: Request, file_id: str) -> Response:
    return await open_content(request, await find_file(request, file_id))


async def open_content(request: Request, file: FileObject) -> "FileContent":
    """Open a file for a response. Raises ApiError 404 and 500, and StorageError."""
    folder = state_of(request).folder

    def open_file() -> int:
        path = folder.copy_body(file.id)
        try:
            with read_errors(path):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except UnreadableError as error:
            if error.gone:
                raise NoSuchFile from None
            raise StorageError from error.__cause__

    # An open descriptor stays readable if the file is deleted meanwhile.
    descriptor = await to_thread.run_sync(open_file)
    try:
        content = FileContent(file, descriptor, state_of(request).readers)
        await content.begin()
    except BaseException:
        os.close(descriptor)
        raise
    return content


class FileContent(StreamingResponse):
    """Send an open file, and close it in every case. Result files are verified as they are sent. Reading and verifying
    stop when the client disconnects. Raises ApiError 500 for a truncated upload.

    `readers` limits the threads that read files, so that downloads leave the other threads to other requests.
    """

    media_type = "application/octet-stream"

    def __init__(self, file: FileObject, descriptor: int, readers: CapacityLimiter) -> None:
        self._descriptor = descriptor
        self._readers = readers
        self._first = b""
        self._is_damaged = False
        headers = {"x-content-type-options": "nosniff"}
        self._pieces: Generator[bytes, None, None]
        if file.purpose == "batch_output":  # of unknown length: error rows replace damaged rows
            self._pieces = intact_parts(descriptor, file.bytes, lambda: self._on_damage(file.id))
        else:
            headers["content-length"] = str(_check_size(file, descriptor))
            self._pieces = _read_pieces(descriptor, file.bytes)
        super().__init__(self.pieces(), headers=headers)

    async def begin(self) -> None:
        """Read the first piece, so that a file that cannot be read is an error response. Raises StorageError."""
        self._first = await self._next()

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, lambda: self.stream_response(send), lambda: None)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, and drop the pieces that were read ahead, which refer back to this object."""
        self._pieces.close()
        del self.body_iterator
        self._first = b""
        os.close(self._descriptor)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the content, read piece by piece. A StorageError breaks the response off."""
        piece = self._first
        while piece:
            yield piece
            piece = await self._next()

    async def _next(self) -> bytes:
        try:
            return await to_thread.run_sync(next, self._pieces, b"", limiter=self._readers)
        except OSError as error:
            raise StorageError from error

    def _on_damage(self, file_id: str) -> None:
        if not self._is_damaged:
            log.error("file %s is damaged: error rows replace the damaged rows", file_id)
        self._is_damaged = True


def _check_size(file: FileObject, descriptor: int) -> int:
    try:
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise StorageError from error
    if size != file.bytes:
        message = f"The stored file is damaged: it has {size} of {file.bytes} bytes. Upload it again."
        raise ApiError(500, message, code="file_damaged", headers={"x-should-retry": "false"})
    return size


def _read_pieces(descriptor: int, size: int) -> Generator[bytes, None, None]:
    for start in range(0, size, READ_BYTES):
        yield os.pread(descriptor, min(READ_BYTES, size - start), start)
