"""Rows of result files. The id of each row contains a checksum, so that damage is detected at every read.

{"id":"batch_req_<32 random hex digits><CRC-32 of these and of the rest, 8 hex digits>","custom_id":...}
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from secrets import token_hex
from typing import Any

import orjson

from gateway.http.json_text import escape_line_ends
from gateway.store.disk import FILE_FAULTS

READ_BYTES = 1024 * 1024
PAGE_BYTES = 4096
RESULT_DAMAGED = "result_damaged"
_PREFIX = b'{"id":"batch_req_'
_SALT = len(_PREFIX) + 32
_SEAL = _SALT + 8


def response_row(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    """Return the row of an executed line."""
    response = {"status_code": status, "request_id": f"req-{token_hex(16)}", "body": body}
    return _row(custom_id, response, None)


def unfinished_row(custom_id: str | None, code: str, message: str) -> bytes:
    """Return the row of a line without a response."""
    return _row(custom_id, None, {"code": code, "message": message})


def _row(custom_id: str | None, response: Any, error: Any, salt: str | None = None) -> bytes:
    content = escape_line_ends(orjson.dumps({"custom_id": custom_id, "response": response, "error": error})[1:])
    drawn = (salt or token_hex(16)).encode()
    return b'%b%b%08x",%b\n' % (_PREFIX, drawn, zlib.crc32(content, zlib.crc32(drawn)), content)


def is_sealed(row: bytes) -> bool:
    """Return whether a row has an id of this server's form, with a checksum."""
    return re.match(rb'\{"id":"batch_req_[0-9a-f]{40}",', row) is not None


def is_intact(row: bytes) -> bool:
    """Return whether a row (without its line end) is undamaged."""
    if row.startswith(_PREFIX) and row[_SALT : _SALT + 2] == b'",':
        return _is_whole(row)
    if not (row.startswith(_PREFIX) and row[_SEAL : _SEAL + 2] == b'",'):
        return False
    crc = zlib.crc32(row[_SEAL + 2 :], zlib.crc32(row[len(_PREFIX) : _SALT]))
    return row[_SALT:_SEAL] == b"%08x" % crc


def _is_whole(row: bytes) -> bool:
    """Return whether a row without a checksum, as state folders of schema 2 have, is undamaged as far as it shows."""
    try:
        return set(orjson.loads(row)) == {"id", "custom_id", "response", "error"}
    except (ValueError, TypeError):
        return False


def intact_parts(descriptor: int, size: int, on_damage: Callable[[], None] = lambda: None) -> Iterator[bytes]:
    """Yield the content of a result file of `size` bytes, verified as it is read, in pieces of about READ_BYTES.

    An error row takes the place of each damaged row, and `on_damage` is called for it. Blocking. Raises OSError if the
    system fails.
    """
    there, piece = min(size, os.fstat(descriptor).st_size), bytearray()
    for start, line in _lines(descriptor, there):
        if line.endswith(b"\n") and is_intact(line[:-1]):
            piece += line
        else:
            on_damage()
            piece += b"".join(_salvaged(start, line))
        if len(piece) >= READ_BYTES:
            yield bytes(piece)
            piece.clear()
    if there < size:
        on_damage()
        piece += _damaged(there, f"The file is {size - there} bytes too short: rows are missing.")
    if piece:
        yield bytes(piece)


def _salvaged(start: int, line: bytes) -> Iterator[bytes]:
    """Yield the intact rows within a damaged line: a damaged line end joins two rows."""
    bounds = [0, *_starts(line), len(line)]
    for begin, end in pairwise(bounds):
        row = line[begin:end]
        if is_intact(row):
            yield row + b"\n"
        elif is_intact(row[:-1]):
            yield row[:-1] + b"\n"
        elif row:
            yield _damaged(start + begin, f"{end - begin} bytes from byte {start + begin} on are damaged.")


def _starts(line: bytes) -> Iterator[int]:
    place = line.find(_PREFIX, 1)
    while place > 0:
        yield place
        place = line.find(_PREFIX, place + 1)


def _damaged(place: int, message: str) -> bytes:
    """Return an error row for the damage at byte `place`; its id is the same at each read."""
    message = f"{message} Resend the lines that have no row in this file or in the batch's other file."
    return _row(None, None, {"code": RESULT_DAMAGED, "message": message}, salt=f"{place:032x}")


def _lines(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its line end, and its offset."""
    pending, start, read = bytearray(), 0, 0
    while read < size:
        pending += _read(descriptor, read, min(READ_BYTES, size - read))
        read = start + len(pending)
        *whole, rest = pending.split(b"\n")
        for line in whole:
            yield start, bytes(line) + b"\n"
            start += len(line) + 1
        pending = rest
    if pending:
        yield start, bytes(pending)


def _read(descriptor: int, start: int, length: int) -> bytes:
    """Read exactly `length` bytes; pages that the disk cannot read become zeros."""
    try:
        data = os.pread(descriptor, length, start)
    except OSError as error:
        if error.errno not in FILE_FAULTS:
            raise
        if length <= PAGE_BYTES:
            return bytes(length)
        pages = range(start, start + length, PAGE_BYTES)
        return b"".join(_read(descriptor, page, min(PAGE_BYTES, start + length - page)) for page in pages)
    return data + bytes(length - len(data))
