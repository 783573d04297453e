"""How much a JSON text holds, counted without building any of it.

Parsing holds the interpreter's lock from its first byte to its last, and a list costs a hundred times its two bytes:
what a text may make of itself is bounded by count, as its length is by bytes. Knows nothing of what the values mean.
"""

from typing import NamedTuple

WINDOW_BYTES = 64 * 1024  # looked at in one go, so that other threads get their turns


class JsonSize(NamedTuple):
    """`containers`: objects and arrays; `strings`: texts, names included; `commas`: about as many as values."""

    containers: int
    strings: int
    commas: int

    def exceeds(self, limits: "JsonSize") -> bool:
        return any(mine > most for mine, most in zip(self, limits, strict=True))


LIMITS = JsonSize(containers=32_768, strings=131_072, commas=1_048_576)
"""Each takes about 20 ms to build; a conversation of 4,096 messages needs a quarter of the first two at most, and a
mebi of token ids as many commas."""


def too_much_json(raw: bytes | bytearray, limits: JsonSize = LIMITS) -> str | None:
    """What of the text is over the limits, in words; None when it may be parsed. Such a text need not be valid."""
    most = JsonSize(raw.count(b"[") + raw.count(b"{"), raw.count(b'"') // 2, raw.count(b","))
    if not most.exceeds(limits):
        return None  # even if none of it stood in a string
    size = count_json(raw, limits)
    if size.containers > limits.containers:
        return f"{limits.containers} objects and arrays"
    if size.strings > limits.strings:
        return f"{limits.strings} strings"
    return f"{limits.commas} values" if size.commas > limits.commas else None


def count_json(raw: bytes | bytearray, limits: JsonSize) -> JsonSize:
    """What stands outside strings, up to the window in which a limit is passed."""
    containers = quotes = commas = start = 0
    while start < len(raw):
        window = raw[start : start + WINDOW_BYTES]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:  # what is escaped comes with its backslash
            window += raw[start + len(window) : start + len(window) + 1]
        start += len(window)
        pieces = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[quotes % 2 :: 2])
        containers += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        quotes += len(pieces) - 1
        if JsonSize(containers, quotes // 2, commas).exceeds(limits):
            break
    return JsonSize(containers, quotes // 2, commas)
