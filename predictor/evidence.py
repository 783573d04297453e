"""Sequential tests that distinguish a broken promise from chance; both can be evaluated after every request.

- `MissTest`, for a promised share of good requests: Page's CUSUM of the log-likelihood ratio, one per alternative. The
  sums never fall below zero, so old good requests do not offset new misses. Age does not matter: four misses in a row
  count the same within a second or within ten minutes.
- `ExcessTest`, for a promised mean: Student's t over the last requests. Its threshold lies far in the tail because the
  test is repeated after every request.
"""

import math
from collections import deque

ODDS_RATIOS = (3.0, 10.0, 50.0)
"""Odds of a miss under each alternative, relative to the promise."""
FALSE_ALARMS = 1e-5
"""Maximum rate of false alarms per request while misses are exactly as frequent as allowed; far lower below that."""
FEWEST_SAMPLES = 8
FEWEST_MISSES_ALLOWED = 1e-3


class MissTest:
    """Test whether misses are more frequent than `allowed` (a share, in [0, 1)).

    With the threshold h = ln(alternatives ÷ FALSE_ALARMS), the mean number of requests until a false alarm is at least
    1 ÷ FALSE_ALARMS (Wald's inequality for each CUSUM, and a union bound).
    """

    def __init__(self, allowed: float) -> None:
        allowed = min(max(allowed, FEWEST_MISSES_ALLOWED), 1.0 - FEWEST_MISSES_ALLOWED)
        self._threshold = math.log(len(ODDS_RATIOS) / FALSE_ALARMS)
        self._steps: list[tuple[float, float]] = []
        for ratio in ODDS_RATIOS:
            odds = ratio * allowed / (1.0 - allowed)
            worse = odds / (1.0 + odds)
            self._steps.append((math.log((1.0 - worse) / (1.0 - allowed)), math.log(worse / allowed)))
        self._sums = [0.0] * len(self._steps)

    def record(self, missed: bool) -> None:
        """Add one request."""
        self._sums = [max(0.0, total + step[missed]) for total, step in zip(self._sums, self._steps, strict=True)]

    @property
    def alarm(self) -> bool:
        return max(self._sums) >= self._threshold

    def restart(self, suspicion: float = 0.0) -> None:
        """Discard all evidence. `suspicion`: share of the threshold to start from, so that fewer misses suffice."""
        self._sums = [suspicion * self._threshold] * len(self._sums)


class ExcessTest:
    """Test whether the mean of the values is positive; each value is the excess of one request over its bound.

    The test covers the last `window` values. The threshold of t is higher for few values, so that heavy tails alone do
    not raise an alarm. FEWEST_SAMPLES positive values of equal size do.
    """

    def __init__(self, window: int = 200) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def record(self, excess: float) -> None:
        """Add one request."""
        self._values.append(excess)

    @property
    def alarm(self) -> bool:
        count = len(self._values)
        if count < FEWEST_SAMPLES:
            return False
        mean = math.fsum(self._values) / count
        if mean <= 0.0:
            return False
        variance = math.fsum((value - mean) ** 2 for value in self._values) / (count - 1)
        critical = 4.0 * (1.0 + 6.0 / (count - 1))
        return mean > critical * math.sqrt(variance / count)

    def restart(self) -> None:
        """Discard all evidence."""
        self._values.clear()
