"""Regular expressions for integers within bounds of any size."""

import math
from collections.abc import Iterator, Mapping


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
