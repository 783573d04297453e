"""Search for the highest rate that attains the SLO: bracketing and bisection to 2 %.

The search calls a function from rate to attainment, so that HTTP runs and simulations share it.
"""

import math
from collections.abc import Callable

LEVELS = (60, 90, 99)
PRECISION = 0.02
Measure = Callable[[float], float]
"""Run at a rate, requests/s, and return the attainment, 0 to 1."""


def knee(measure: Measure, level: float, start: float, known: dict[float, float], limit: int = 24) -> float | None:
    """Return the highest rate with attainment >= `level` (0 to 1), to 2 %, or None if `start` / 1024 fails.

    `known` has measured attainments by rate and receives new ones. If all of `limit` runs attain, the highest measured
    rate is returned.
    """
    if not (math.isfinite(start) and start > 0):
        raise ValueError("start must be a positive rate")
    runs = 0

    def attained(rate: float) -> bool:
        nonlocal runs
        if rate not in known:
            known[rate] = measure(rate)
            runs += 1
        return known[rate] >= level

    low, high = _bracket(attained, start, known, level, lambda: runs >= limit)
    if low is None or high is None:
        return low
    while high / low > 1 + PRECISION and runs < limit:
        middle = math.sqrt(low * high)
        if attained(middle):
            low = middle
        else:
            high = middle
    return low


def _bracket(
    attained: Callable[[float], bool], start: float, known: dict[float, float], level: float, spent: Callable[[], bool]
) -> tuple[float | None, float | None]:
    """Return a rate that attains and a higher one that does not, starting from known attainments."""
    failing = [rate for rate, value in known.items() if value < level]
    high = min(failing, default=None)
    passing = [rate for rate, value in known.items() if value >= level and (high is None or rate < high)]
    low = max(passing, default=None)
    rate = low * 2 if low is not None else high / 2 if high is not None else start
    while (low is None or high is None) and not spent():
        if attained(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
            if rate < start / 1024:
                break
    return low, high


def effective(points: dict[float, float], level: float) -> float | None:
    """Return the highest measured rate with attainment >= `level` below the first one that fails, or None."""
    best = None
    for rate in sorted(points):
        if points[rate] < level:
            break
        best = rate
    return best
