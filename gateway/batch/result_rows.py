"""Rows of result files. Each row carries a checksum in its id, so that a damaged row is found whenever it is read.

{"id":"batch_req_<32 random hex digits><CRC-32 of these and of the rest, 8 hex digits>","custom_id":...}
"""

import os
import zlib
from collections.abc import Iterator
from itertools import pairwise
from secrets import token_hex
from typing import Any

import orjson

from gateway.store.disk import FILE_FAULTS

READ_BYTES = 1024 * 1024
PAGE_BYTES = 4096
RESULT_DAMAGED = "result_damaged"
_PREFIX = b'{"id":"batch_req_'
_SALT = len(_PREFIX) + 32
_SEAL = _SALT + 8


def response_row(custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    """Return the row of a line that was executed, whatever its status."""
    response = {"status_code": status, "request_id": f"req-{token_hex(16)}", "body": body}
    return _row(custom_id, response, None)


def unfinished_row(custom_id: str | None, code: str, message: str) -> bytes:
    """Return the row of a line without a response."""
    return _row(custom_id, None, {"code": code, "message": message})


def _row(custom_id: str | None, response: Any, error: Any, salt: str | None = None) -> bytes:
    content = orjson.dumps({"custom_id": custom_id, "response": response, "error": error})[1:]
    drawn = (salt or token_hex(16)).encode()
    return b'%b%b%08x",%b\n' % (_PREFIX, drawn, zlib.crc32(content, zlib.crc32(drawn)), content)


def is_intact(row: bytes) -> bool:
    """Whether a row (without its line end) has the bytes that were written. A row of an earlier version has no
    checksum: it must be JSON."""
    if not row.startswith(_PREFIX):
        return False
    if row[_SEAL : _SEAL + 2] == b'",':
        crc = zlib.crc32(row[_SEAL + 2 :], zlib.crc32(row[len(_PREFIX) : _SALT]))
        return row[_SALT:_SEAL] == b"%08x" % crc
    return row[_SALT : _SALT + 2] == b'",' and is_json(row)


def is_json(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


Part = tuple[int, int] | bytes
"""A range of a file (start, end), or bytes to be sent in the place of a damaged range."""


def intact_parts(descriptor: int, size: int) -> list[Part]:
    """Return the content of a result file of `size` bytes with an error row in the place of each damaged row.

    `[(0, size)]` if nothing is damaged. Blocks; reads the whole file. Raises OSError for a fault of the system.
    """
    parts: list[Part] = []
    there = min(size, os.fstat(descriptor).st_size)
    for start, line in _lines(descriptor, there):
        if line.endswith(b"\n") and is_intact(line[:-1]):
            _keep(parts, start, start + len(line))
        else:
            _salvage(parts, start, line)
    if there < size:
        parts.append(_damaged(there, f"The file ends {size - there} bytes early: rows are missing."))
    return parts


def _salvage(parts: list[Part], start: int, line: bytes) -> None:
    """Keep the intact rows of a line that is not one: a damaged line end joins two rows."""
    bounds = [0, *_starts(line), len(line)]
    for begin, end in pairwise(bounds):
        piece = line[begin:end]
        if is_intact(piece):
            parts.append(piece + b"\n")
        elif is_intact(piece[:-1]):
            parts.append(piece[:-1] + b"\n")
        elif piece:
            parts.append(_damaged(start + begin, f"{end - begin} bytes from byte {start + begin} on are damaged."))


def _starts(line: bytes) -> Iterator[int]:
    place = line.find(_PREFIX, 1)
    while place > 0:
        yield place
        place = line.find(_PREFIX, place + 1)


def _damaged(place: int, message: str) -> bytes:
    """The same row at each reading."""
    message = f"{message} Send the lines again that have no row in this file or in the batch's other file."
    return _row(None, None, {"code": RESULT_DAMAGED, "message": message}, salt=f"{place:032x}")


def _keep(parts: list[Part], start: int, end: int) -> None:
    if parts and isinstance(last := parts[-1], tuple) and last[1] == start:
        parts[-1] = (last[0], end)
    else:
        parts.append((start, end))


def _lines(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
    """The lines with their line ends, and where they start."""
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
    """Read exactly so many bytes; zeros in the place of pages that the disk cannot read."""
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
