"""Count the values in a JSON text without parsing it.

Parsing holds the GIL for the whole text, and a list takes about a hundred times the two bytes of its text. So requests
are limited by the number of values as well as by bytes. Only arrays of token ids may be longer: their positions are
returned, so that `json_text` can parse them in pieces.
"""

from typing import NamedTuple

WINDOW_BYTES = 16 * 1024  # scanned without releasing the GIL
_STRIDE = 1 << 20  # the same for `bytes.count`
_SPACE = b", \t\r\n"
_NUMBERS = b"0123456789" + _SPACE
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

    def exceeds(self, limits: "JsonSize") -> bool:
        return any(mine > most for mine, most in zip(self, limits, strict=True))

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
    return JsonCount(most) if not most.exceeds(limits) else _Counter(raw, limits).count()


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
        while start < len(raw) and not self._size.exceeds(self._limits):
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
        begin, end = begin + len(text) - len(text.lstrip(_SPACE)), end - len(text) + len(text.rstrip(_SPACE))
        brackets = text.translate(None, _NUMBERS)
        is_array = brackets[:1] == b"[" and brackets[-1:] == b"]" and not brackets[1:-1].replace(b"[]", b"")
        if is_array and self._raw[begin] == ord("[") and self._raw[end - 1] == ord("]"):
            self._arrays.append((begin, end))
        else:
            self._commas += self._numbers - before
            self._numbers = before
