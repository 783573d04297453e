"""Parse JSON without holding the GIL for long: refuse texts with too many values unparsed, and parse long arrays of
integers in pieces, which `orjson` alone would parse in one call.

A list takes about a hundred times the two bytes of its text, so requests are limited by the number of values as well
as by bytes. Only arrays of token ids may be longer: `count_json` returns their positions, and `load_json` parses them
in pieces.
"""

import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import orjson

WINDOW_BYTES = 16 * 1024  # scanned without releasing the GIL
_STRIDE = 1 << 20  # the same for `bytes.count`
_BLANKS = b", \t\r\n"
_NUMBERS = b"0123456789" + _BLANKS
_ARRAYS = _NUMBERS + b"[]"


class JsonSize(NamedTuple):
    """Numbers of elements in a JSON text."""

    containers: int
    """Objects and arrays."""
    strings: int
    """Strings, including object keys."""
    commas: int
    """Commas, approximately the number of values, outside long arrays of integers."""
    numbers: int = 0
    """Commas in long arrays of integers."""

    def excess(self, limits: "JsonSize") -> str | None:
        """Describe the first limit that is exceeded, e.g. `131072 strings`; None if none is."""
        names = ("objects and arrays", "strings", "values", "values")
        over = (f"{most} {name}" for mine, most, name in zip(self, limits, names, strict=True) if mine > most)
        return next(over, None)


LIMITS = JsonSize(containers=32_768, strings=131_072, commas=131_072, numbers=1_048_576)
"""Parsing takes about 10 ms at each limit except `numbers`, which are parsed in pieces. A conversation of 4,096
messages with five parts each reaches three quarters of the limits."""


class JsonCount(NamedTuple):
    """Size of a text, and the (start, end) positions of long arrays of integers, nested up to two levels."""

    size: JsonSize
    arrays: tuple[tuple[int, int], ...] = ()


def count_json(raw: bytes | bytearray, limits: JsonSize = LIMITS) -> JsonCount:
    """Count a text, which may be invalid JSON. Counting may stop as soon as a limit is exceeded."""
    strides = [(start, start + _STRIDE) for start in range(0, len(raw), _STRIDE)]
    brackets, braces, quotes, commas = (sum(raw.count(c, *s) for s in strides) for c in (b"[", b"{", b'"', b","))
    most = JsonSize(brackets + braces, quotes // 2, commas)
    return JsonCount(most) if most.excess(limits) is None else _Counter(raw, limits).count()


class _Counter:
    """Count elements outside strings. `_run`: start of the current text of only integers and arrays, and the value of
    `_numbers` there."""

    def __init__(self, raw: bytes | bytearray, limits: JsonSize) -> None:
        self._raw = raw
        self._limits = limits
        self._containers = self._quotes = self._commas = self._numbers = 0
        self._run: tuple[int, int] | None = None
        self._arrays: list[tuple[int, int]] = []

    @property
    def _size(self) -> JsonSize:
        return JsonSize(self._containers, self._quotes // 2, self._commas, self._numbers)

    def count(self) -> JsonCount:
        raw, start = self._raw, 0
        while start < len(raw) and self._size.excess(self._limits) is None:
            window = raw[start : start + WINDOW_BYTES]
            if (len(window) - len(window.rstrip(b"\\"))) % 2:  # do not split an escape sequence
                window += raw[start + len(window) : start + len(window) + 1]
            if self._quotes % 2 or window.translate(None, _ARRAYS):
                self._end_run(start + len(window) - len(window.lstrip(_ARRAYS)))
                self._look(window)
            else:
                self._go_on_with_run(start, window)
            start += len(window)
        self._end_run(len(raw))
        return JsonCount(self._size, tuple(self._arrays))

    def _look(self, window: bytes | bytearray) -> None:
        pieces = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._quotes % 2 :: 2])
        self._containers += outside.count(b"[") + outside.count(b"{")
        self._commas += outside.count(b",")
        self._quotes += len(pieces) - 1

    def _go_on_with_run(self, start: int, window: bytes | bytearray) -> None:
        if self._run is None:
            last = self._raw[max(0, start - WINDOW_BYTES) : start]
            self._run = start - len(last) + len(last.rstrip(_ARRAYS)), self._numbers
        self._containers += window.count(b"[")
        self._numbers += window.count(b",")

    def _end_run(self, end: int) -> None:
        if self._run is None:
            return
        (begin, before), self._run = self._run, None
        text = self._raw[begin:end]
        begin, end = begin + len(text) - len(text.lstrip(_BLANKS)), end - len(text) + len(text.rstrip(_BLANKS))
        brackets = text.translate(None, _NUMBERS)
        is_array = brackets[:1] == b"[" and brackets[-1:] == b"]" and not brackets[1:-1].replace(b"[]", b"")
        if is_array and self._raw[begin] == ord("[") and self._raw[end - 1] == ord("]"):
            self._arrays.append((begin, end))
        else:
            self._commas += self._numbers - before
            self._numbers = before


PIECE_BYTES = 16 * 1024
_LONG = 16
"""Digits, a decimal point included, of the shortest number without an exponent that may have no double."""
_LONGEST = 20
"""Characters of the longest integer of 64 bits."""
_SHOWN_CHARS = 64
_SHAPE = bytes.maketrans(b".123456789E", b"0" * 10 + b"e")
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?[0-9][0-9.]*+(?:[eE][-+]?[0-9]+)?', re.DOTALL)
_SCHEMA_FIELDS = {
    "tools", "response_format", "structured_outputs", "guided_json", "text", "output_config",
}  # fmt: skip
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


class RoundedNumber(ValueError):
    """A number that a schema lists is no double; the message has both. `place`: the names and positions leading to
    it."""

    def __init__(self, text: str, place: Sequence[int | str]) -> None:
        number = f"the number {text[:_SHOWN_CHARS]} would become {float(text)!r}"
        super().__init__(f"{number}; use at most 15 digits, or a text")
        self.place = place


class _Place(NamedTuple):
    """A value in a JSON text, with the name or position in the value around it."""

    value: Any
    name: int | str
    around: "_Place | None"
    in_schema: bool
    is_listed: bool
    """Below `enum` or `const`."""

    def within(self, name: int | str, value: Any) -> "_Place":
        is_listed = self.is_listed or (self.in_schema and name in ("enum", "const"))
        return _Place(value, name, self, self.in_schema or name in _SCHEMA_FIELDS, is_listed)

    def path(self) -> list[int | str]:
        names, place = list[int | str](), self
        while place.around is not None:
            names.append(place.name)
            place = place.around
        return names[::-1]


def check_numbers(raw: bytes | bytearray, value: Any, in_schema: bool = False) -> None:
    """Raise RoundedNumber if parsing `raw` to `value` rounded a number under `enum` or `const` of a schema.

    `in_schema`: the value is itself a schema; otherwise the fields that hold schemas are searched."""
    if not _may_round(raw):
        return
    listed = {place.value: place for place in _listed_fractions(_Place(value, "", None, in_schema, False))}
    for match in _TOKENS.finditer(raw) if listed else ():
        if match[0][0] != ord('"') and (number := float(match[0])) in listed and _is_rounded(match[0].decode(), number):
            raise RoundedNumber(match[0].decode(), listed[number].path())


def _may_round(raw: bytes | bytearray) -> bool:
    """Return whether the text has more than 15 digits in sequence, or three digits of a negative exponent."""
    for start in range(0, len(raw), _STRIDE):
        shape = raw[start : start + _STRIDE + _LONG].translate(_SHAPE)
        if b"0" * _LONG in shape or b"0e-000" in shape:
            return True
    return False


def _is_rounded(text: str, number: float) -> bool:
    """Return whether a number of a JSON text is neither an integer of 64 bits nor a double."""
    if len(text) <= _LONGEST and text.lstrip("-").isdecimal() and -(2**63) <= int(text) < 2**64:
        return False
    if number == 0:
        return bool(text.lower().partition("e")[0].strip("-0."))
    return Decimal(text) != Decimal(repr(number))


def _listed_fractions(root: _Place) -> Iterator[_Place]:
    waiting = [root]
    while waiting:
        place = waiting.pop()
        if isinstance(place.value, dict | list):
            parts: Any = place.value.items() if isinstance(place.value, dict) else enumerate(place.value)
            waiting += [place.within(*part) for part in parts if isinstance(part[1], dict | list | float)]
        elif place.is_listed:
            yield place


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
    """Parse `[1,2]` or `[[1],[2]]` in pieces that end at a comma."""
    inner, values, start, is_open = text[1:-1], list[Any](), 0, False
    while start <= len(inner):
        comma = inner.find(b",", start + PIECE_BYTES)
        end = comma if comma >= 0 else len(inner)
        piece = inner[start:end].strip()
        if (start and piece[:1] in (b"", b"]")) or (comma >= 0 and piece[-1:] in (b"", b"[")):
            raise _wrong("a value is missing")
        opening, closing = piece.rfind(b"["), piece.rfind(b"]")
        goes_on = opening > closing if opening != closing else is_open
        found = orjson.loads(b"[" + b"[" * is_open + piece + b"]" * goes_on + b"]")
        if is_open:
            values[-1] += found.pop(0)
        values += found
        start, is_open = end + 1, goes_on
    return values


def _wrong(message: str) -> orjson.JSONDecodeError:
    return orjson.JSONDecodeError(message, "", 0)
