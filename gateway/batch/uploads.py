"""Streaming parser of multipart uploads: only the current piece of the body is in memory.

`feed` blocks on the disk: call it in a worker thread.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING, NoReturn

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.http.errors import ApiError
from gateway.store.disk import DiskFile

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


@dataclass(slots=True)
class Upload:
    """Text fields and file name of a parsed body. The parser writes the content to a file."""

    fields: dict[str, str]
    filename: str | None = None


class UploadParser:
    """Parse a body: call `feed` for each piece, then `finish`. Raises ApiError 400, 413 or 415, or StorageError."""

    def __init__(self, content_type: str, file: DiskFile, max_file_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data":
            raise ApiError(415, "The upload must be sent as multipart/form-data.")
        if not boundary:
            _refuse("The upload has no multipart boundary.", code="invalid_multipart")
        self.upload = Upload({})
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

    def finish(self) -> Upload:
        """Return the result at the end of the body. Raises ApiError 400 if the body is incomplete or has no file."""
        if not self._ended:
            part = "the first boundary" if self._preamble is not None else "the last boundary"
            _refuse(f"The multipart body ended before {part}.", code="invalid_multipart")
        if self.upload.filename is None:
            _refuse("Missing required parameter: 'file'.", "file", "missing_required_parameter")
        return self.upload

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
        if name in self.upload.fields:
            _refuse(f"'{name}' was sent twice.", name)
        self._field, self._value, self._sink = name, bytearray(), self._add_value

    def _begin_file(self, raw_name: bytes | None) -> None:
        if raw_name is None:
            _refuse("'file' must be a file with a file name.", "file")
        if self.upload.filename is not None:
            _refuse("Exactly one file can be uploaded at a time.", "file")
        name = raw_name.decode("utf-8", "replace")
        if len(name) > MAX_FILENAME_CHARS:
            _refuse(f"The file name is longer than {MAX_FILENAME_CHARS} characters.", "file")
        self.upload.filename = name or "upload"
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
                self.upload.fields[self._field] = self._value.decode()
            except UnicodeDecodeError:
                _refuse(f"'{self._field}' is not valid UTF-8.", self._field)
        self._field, self._sink = None, self._refuse_data

    def _end(self) -> None:
        self._ended = True
