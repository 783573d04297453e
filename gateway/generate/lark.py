"""Builder of grammars in Lark syntax within the size that the engine accepts, and values within bounds: expressions for
large integers, and the choice among listed values."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import orjson

from engine.forms import MAX_GRAMMAR_BYTES


def quoted(text: str) -> str:
    return orjson.dumps(text).decode()


class Lark:
    """A grammar under construction of at most `most` bytes, because a grammar can be much longer than its request.
    `special`: ids of special tokens by text."""

    def __init__(self, special: Mapping[str, int], most: int = MAX_GRAMMAR_BYTES) -> None:
        self._special = special
        self._marks = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        self._lines: list[str] = []
        self._most = self._room = most

    def text(self, text: str) -> str:
        """Return an expression that matches exactly the text."""
        parts = self._marks.split(text) if self._special else [text]
        return " ".join(f"<[{self._special[p]}]>" if p in self._special else quoted(p) for p in parts if p)

    def is_special(self, text: str) -> bool:
        return text in self._special

    def reserve(self, kind: str = "r") -> str:
        """Return the name of a rule that is defined later."""
        self._lines.append("")
        return f"{kind}_{len(self._lines) - 1}"

    def define(self, name: str, body: str, flags: str = "") -> str:
        """Define a rule and return its name. Raises ValueError if the grammar becomes too long."""
        line = f"{name}{flags}: {body}"
        self._take_room(len(line.encode()) + 1)
        self._lines[int(name.rpartition("_")[2])] = line
        return name

    def rule(self, body: str, flags: str = "") -> str:
        return self.define(self.reserve(), body, flags)

    def terminal(self, body: str) -> str:
        return self.define(self.reserve("T"), body)

    def until(self, terminal: str, end: str) -> str:
        """Return an expression for the shortest text of a terminal that is followed by `end`."""
        if any(token in end for token in self._special):
            return f"{terminal} {self.text(end)}"
        return self.rule(f"{terminal} {quoted(end)}", "[lazy]")

    def json(self, schema: Any) -> str:
        return self.rule(f"%json {orjson.dumps(schema).decode()}")

    def whole(self, start: str) -> str:
        line = f"start: {start}"
        self._take_room(len(line.encode()))
        return "\n".join([line, *self._lines])

    def _take_room(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ValueError(
                f"the grammar is longer than {self._most // 1024} KiB; send smaller schemas or fewer tools"
            )


def integer_pattern(bounds: Mapping[str, int | float]) -> str:
    """Return a regular expression for the integers within `minimum`, `exclusiveMinimum`, `maximum` and
    `exclusiveMaximum`. Raises ValueError if there are none."""
    if any(isinstance(bound, bool) for bound in bounds.values()):
        raise ValueError("a bound must be a number")
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    least, most = max(lows, default=None), min(highs, default=None)
    if least is not None and most is not None and least > most:
        raise ValueError("no integer lies within the bounds")
    parts: list[str] = []
    if least is None or least < 0:
        negative = _magnitudes(max(1, -most) if most is not None else 1, None if least is None else -least)
        parts += [f"-{part}" for part in negative]
    if most is None or most >= 0:
        parts += _magnitudes(max(0, least or 0), most)
    return f"({'|'.join(parts)})"


def _magnitudes(least: int, most: int | None) -> Iterator[str]:
    """Yield patterns that together match the decimal integers from `least` to `most`; None: without limit."""
    first = str(least)
    if most is None:
        yield from _between(first, "9" * len(first))
        yield f"[1-9][0-9]{{{len(first)},}}"
        return
    last = str(most)
    if len(first) == len(last):
        yield from _between(first, last)
        return
    yield from _between(first, "9" * len(first))
    if len(last) - len(first) > 1:
        yield f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}"
    yield from _between("1" + "0" * (len(last) - 1), last)


def _between(first: str, last: str) -> Iterator[str]:
    """Yield patterns for the numbers between two numbers of the same length."""
    same = next((at for at, digit in enumerate(first) if digit != last[at]), len(first))
    if same == len(first):
        yield first
        return
    head, rest = first[:same], len(first) - same - 1
    if int(first[same]) + 1 < int(last[same]):
        yield f"{head}[{int(first[same]) + 1}-{int(last[same]) - 1}][0-9]{{{rest}}}"
    yield from _ends(first, same + 1, 1)
    yield from _ends(last, same + 1, -1)


def _ends(number: str, start: int, step: int) -> Iterator[str]:
    """Yield patterns for the numbers of the same length and first `start` digits as `number` that are at least
    (`step` 1) or at most (-1) as large."""
    yield number
    for at in range(start, len(number)):
        digit = int(number[at])
        low, high = (digit + 1, 9) if step > 0 else (0, digit - 1)
        if low <= high:
            yield f"{number[:at]}[{low}-{high}][0-9]{{{len(number) - at - 1}}}"


_KINDS: Mapping[type, Sequence[str]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), type(None): ("null",),
    list: ("array",), dict: ("object",),
}  # fmt: skip


def admits(schema: Mapping[str, Any], choice: Any) -> bool:
    """Return whether the type, bounds and lengths of a schema admit a value that it lists."""
    named = schema.get("type")
    kinds = _KINDS[int] if isinstance(choice, float) and choice.is_integer() else _KINDS[type(choice)]
    if named is not None and not any(kind in kinds for kind in ([named] if isinstance(named, str) else named)):
        return False
    if isinstance(choice, str):
        return bool(schema.get("minLength", 0) <= len(choice) <= schema.get("maxLength", len(choice)))
    if isinstance(choice, bool) or not isinstance(choice, int | float):
        return True
    least, most = schema.get("minimum", choice), schema.get("maximum", choice)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    step = schema.get("multipleOf")
    divides = step is None or Fraction(str(choice)) % Fraction(str(step)) == 0
    return bool(least <= choice <= most and above < choice < below and divides)
