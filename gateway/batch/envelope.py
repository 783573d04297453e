"""Lines of an input file, and their envelopes: `custom_id`, `method` and `url` around a `body`.

A bad body never hides its envelope: the line gets an error row, and the other lines run. The envelope of a line with a
body that must not be parsed is read from the ends of the line.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import orjson

from engine.errors import InvalidRequestError
from gateway.generate.validation import param_name
from gateway.http.errors import ApiError
from gateway.http.json_text import RoundedNumber, TooMuchJson, check_numbers, load_json

BodyError = InvalidRequestError | ApiError
READ_BYTES = 1024 * 1024
EDGE_BYTES = 8 * 1024
"""Bytes at each end of a long line in which its envelope must be; a custom_id takes at most 3 KiB."""
FIELDS = ("custom_id", "method", "url")
_MEMBER = rb'"(?:custom_id|method|url)"\s*:\s*"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rb"\s*\{\s*((?:" + _MEMBER + rb'\s*,\s*){0,3})"body"\s*:', re.DOTALL)
_TAIL = re.compile(rb"((?:,\s*" + _MEMBER + rb"\s*){0,3})\}\s*\Z", re.DOTALL)
_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u[dD][89a-fA-F]..|.)", re.DOTALL)
_LONE = 6  # length of the escape of half a character


class HiddenEnvelope(ValueError):
    """The envelope is not at the ends of a line whose body must not be parsed."""


class RawLine(NamedTuple):
    """A line without its line end; `content` is None if the line is too long, and `edges` are its ends."""

    number: int
    start: int
    length: int
    content: bytes | None
    edges: tuple[bytes, bytes] = (b"", b"")


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """Yield the lines of a file, numbered from 1, with one line in memory. Blank lines are counted but not yielded."""
    number, start, position = 1, 0, 0
    pending, tail = bytearray(), b""
    while data := file.read(READ_BYTES):
        for piece in _split(data):
            position += len(piece)
            if start + max_bytes >= position - 2:
                pending += piece
            else:
                tail = ((tail or bytes(pending[-EDGE_BYTES:])) + piece[-EDGE_BYTES:])[-EDGE_BYTES:]
                pending += piece[: max(0, EDGE_BYTES - len(pending))]
            if piece.endswith(b"\n"):
                yield from _line(number, start, position, pending, tail, max_bytes)
                number, start, pending, tail = number + 1, position, bytearray(), b""
    yield from _line(number, start, position, pending, tail, max_bytes)


def _split(data: bytes) -> Iterator[bytes]:
    """Yield the lines of `data` with their LF; unlike `splitlines`, do not split at a lone CR."""
    *whole, rest = data.split(b"\n")
    for piece in whole:
        yield piece + b"\n"
    if rest:
        yield rest


def _line(number: int, start: int, end: int, pending: bytearray, tail: bytes, max_bytes: int) -> Iterator[RawLine]:
    if len(pending) < end - start:
        yield RawLine(number, start, end - start, None, (bytes(pending[:EDGE_BYTES]), tail))
        return
    content = bytes(pending).rstrip(b"\r\n")
    if len(content) > max_bytes:
        yield RawLine(number, start, len(content), None, (content[:EDGE_BYTES], content[-EDGE_BYTES:]))
    elif content.strip():
        yield RawLine(number, start, len(content), content)


def too_long(most: int) -> BodyError:
    return ApiError(413, f"The request body is larger than {most} bytes.")


def read_envelope(line: bytes) -> Any:
    """Return a line's fields, with an error as `body` if the body is not valid; other JSON is returned as it is.

    Raises orjson.JSONDecodeError or HiddenEnvelope if the envelope cannot be read."""
    try:
        envelope = load_json(line)
        check_numbers(line, envelope)
    except TooMuchJson as error:
        return _around(line, InvalidRequestError(f"The request body has {error}.", code="too_many_values"))
    except RoundedNumber as error:
        param = param_name(error.place[1:])
        message = f"'{param}' cannot be enforced: {error}."
        return {**envelope, "body": InvalidRequestError(message, param=param, code="invalid_value")}
    except orjson.JSONDecodeError as error:
        return _with_bad_text(line, error)
    return _with_checked_body(envelope) if isinstance(envelope, dict) else envelope


def envelope_of_edges(head: bytes, tail: bytes, error: BodyError) -> dict[str, Any] | None:
    """Return the fields at the ends of a line, with `error` as `body`; None if they cannot be read."""
    first, last = _HEAD.match(head.removeprefix(BOM_UTF8)), _TAIL.search(tail)
    if first is None or last is None:
        return None
    members = b",".join(part for part in (first[1].strip(b" \t\r\n,"), last[1].strip(b" \t\r\n,")) if part)
    try:
        return {**orjson.loads(b"{" + members + b"}"), "body": error}
    except orjson.JSONDecodeError:
        return None


def _around(line: bytes, error: BodyError) -> dict[str, Any]:
    envelope = envelope_of_edges(line[:EDGE_BYTES], line[-EDGE_BYTES:], error)
    if envelope is None:
        raise HiddenEnvelope(f"{error.message} Write custom_id, method and url before body.") from error
    return envelope


def _with_bad_text(line: bytes, error: orjson.JSONDecodeError) -> dict[str, Any]:
    """Read the envelope around half characters, such as JSON libraries write for a cut emoji, or around a body that is
    nested too deeply."""
    invalid = InvalidRequestError(f"The request body is not valid JSON: {error.msg}.", code="invalid_json")
    if "depth" in error.msg:
        return _around(line, invalid)
    if "surrogate" not in error.msg:
        raise error
    whole = load_json(_ESCAPES.sub(lambda match: rb"\ufffd" if len(match[0]) == _LONE else match[0], line))
    if not isinstance(whole, dict) or any("\ufffd" in str(whole.get(name)) for name in FIELDS):
        raise error
    return {**whole, "body": invalid}


def _with_checked_body(envelope: dict[str, Any]) -> dict[str, Any]:
    error, body = None, envelope.get("body")
    if body is not None and not isinstance(body, dict):
        error = InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    elif isinstance(body, Mapping) and body.get("stream"):
        error = InvalidRequestError("'stream' must be left out or false in a line of a batch.", param="stream")
    elif (extra := next((name for name in envelope if name not in (*FIELDS, "body")), None)) is not None:
        message = f"Unknown parameter beside 'body': '{extra[:64]}'."
        error = InvalidRequestError(message, param=extra[:64], code="unknown_parameter")
    return envelope if error is None else {**envelope, "body": error}
