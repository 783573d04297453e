"""Parse JSON without holding the GIL for long: refuse texts with too many values unparsed, and parse long arrays of
integers in pieces, which `orjson` alone would parse in one call."""

import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.http.json_size import LIMITS, JsonSize, count_json

PIECE_BYTES = 16 * 1024
_SPACE = re.compile(rb"[ \t\r\n]*")
_LINE_ENDS = {"\u0085".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


class TooMuchJson(ValueError):
    """The text has too many values; the message names the limit."""


def escape_line_ends(text: bytes) -> bytes:
    """Escape the line ends that JSON allows within strings: U+0085, U+2028 and U+2029. `str.splitlines` and readers of
    lines such as httpx's cut there."""
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text


def load_json(raw: bytes | bytearray, limits: JsonSize = LIMITS) -> Any:
    """Parse like `orjson.loads`; a byte order mark before the text is ignored (RFC 8259 section 8.1).

    Raises orjson.JSONDecodeError, or TooMuchJson before parsing."""
    raw = raw.removeprefix(BOM_UTF8)
    size, arrays = count_json(raw, limits)
    if (excess := size.excess(limits)) is not None:
        raise TooMuchJson(f"more than {excess}")
    if not arrays:
        return orjson.loads(raw)
    mark, rest, start = secrets.token_hex(16), bytearray(), 0
    for number, (begin, end) in enumerate(arrays):
        rest += raw[start:begin] + f'"{mark}{number}"'.encode()
        start = end
    body = orjson.loads(rest + raw[start:])
    found = {f"{mark}{number}": _read_array(raw[begin:end]) for number, (begin, end) in enumerate(arrays)}
    return _put_in(body, found)


def _put_in(body: Any, found: Mapping[str, list[Any]]) -> Any:
    """Replace the marks in `body` by their arrays."""
    if isinstance(body, str):
        return found.get(body, body)
    waiting = [body]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if not item.keys().isdisjoint(found):
                raise _wrong("an array cannot be an object key")
            places: Any = list(item.items())
        else:
            places = enumerate(item)
        for place, value in places:
            if isinstance(value, str):
                if value in found:
                    item[place] = found[value]
            elif isinstance(value, dict | list):
                waiting.append(value)
    return body


def _read_array(text: bytes | bytearray) -> list[Any]:
    """Parse `[1,2]` or `[[1],[2]]`."""
    inner = text[1:-1]
    if b"[" not in inner:
        return _read_numbers(inner)
    values, start = list[Any](), 0
    while (first := inner.find(b"]", start) + 1) > 0:
        end = max(first, inner.rfind(b"]", start, start + PIECE_BYTES) + 1)
        piece = inner[start:end].strip()
        if end - start > PIECE_BYTES and piece[:1] == b"[":
            values.append(_read_numbers(piece[1:-1]))
        else:
            values += orjson.loads(b"[" + piece + b"]")
        space = _SPACE.match(inner, end)
        assert space is not None
        if space.end() == len(inner):
            return values
        if inner[space.end()] != ord(","):
            raise _wrong("a comma is missing")
        start = space.end() + 1
    return values + _read_numbers(_not_empty(inner[start:]))


def _read_numbers(inner: bytes | bytearray) -> list[Any]:
    values, start = list[Any](), 0
    while (comma := inner.find(b",", start + PIECE_BYTES)) >= 0:
        values += orjson.loads(b"[" + _not_empty(inner[start:comma]) + b"]")
        start = comma + 1
    values += orjson.loads(b"[" + (_not_empty(inner[start:]) if start else inner) + b"]")
    return values


def _not_empty(piece: bytes | bytearray) -> bytes | bytearray:
    if not piece.strip():
        raise _wrong("a value is missing")
    return piece


def _wrong(message: str) -> orjson.JSONDecodeError:
    return orjson.JSONDecodeError(message, "", 0)
