"""Sequential tests: is a promise being broken, or was it bad luck? Both can be asked after every single request.

- `MissTest` for a promise about a share of requests: Page's CUSUM of the log-likelihood ratio, one per alternative.
  The sums never fall below zero, so old good requests buy nothing, and age does not matter: four misses in a row are
  four misses, within a second or within ten minutes.
- `ExcessTest` for a promise about a mean: Student's t over the last requests, with a threshold far out in the tail
  because it is asked again and again.

Knows nothing of clocks, requests or what follows from an alarm.
"""

import math
from collections import deque

ODDS_RATIOS = (3.0, 10.0, 50.0)
"""How much worse than promised the alternatives are: a little, clearly, hopelessly."""
FALSE_ALARMS = 1e-5
"""At most so many false alarms a request while misses are just as frequent as promised; far fewer below that."""
FEWEST_SAMPLES = 8
FEWEST_MISSES_ALLOWED = 1e-3


class MissTest:
    """Whether misses are more frequent than `allowed` (a share, in [0, 1)).

    With the threshold h = ln(alternatives ÷ FALSE_ALARMS) the mean number of requests until a false alarm is at least
    1 ÷ FALSE_ALARMS (Wald's inequality for each CUSUM, and their union).
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
        """One request."""
        self._sums = [max(0.0, total + step[missed]) for total, step in zip(self._sums, self._steps, strict=True)]

    @property
    def alarm(self) -> bool:
        return max(self._sums) >= self._threshold

    def restart(self, suspicion: float = 0.0) -> None:
        """Forget everything. `suspicion`: share of the threshold to begin with, so that fewer misses are enough."""
        self._sums = [suspicion * self._threshold] * len(self._sums)


class ExcessTest:
    """Whether values have a mean above zero (each is by how much one request was over its bound).

    It looks at the last `window` of them. The threshold of t grows where there are few, so that heavy tails of the
    distribution itself are no alarm; values of equal size are one with FEWEST_SAMPLES.
    """

    def __init__(self, window: int = 200) -> None:
        self._values: deque[float] = deque(maxlen=window)

    def record(self, excess: float) -> None:
        """One request."""
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
        """Forget everything."""
        self._values.clear()
