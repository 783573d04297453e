"""Lengths of a batch's lines and answers. Answers are learned from the finished lines. Pure, in constant memory.

Of the lines in the engine, those with short answers end first. So an answer counts once all lines that were fed before
its line have ended. Lines are fed by prefix, so even these are no sample of the batch: a run of short answers may come
first. The ranks are therefore divided into ranges. The answer of a line is expected to be the mean of its range plus a
slope times the line's length. Means of ranges are shrunk towards the mean of all ranges by as much as chance alone
explains their differences (random effects; DerSimonian and Laird, Controlled Clinical Trials 7, 1986).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.store.lease_rows import AnswerSums
from gateway.store.objects import LineRef

RANGES = 32
"""Ranges of ranks with a mean of their own."""
LEAST_LEARNED = 16
"""Answers from which lengths are predicted."""
MAX_PENDING = 1024
"""Maximum number of fed lines that do not count yet: one very long answer must not keep all others from counting."""
REFIT = 1.05
"""Growth of the number of finished lines after which the means are computed again."""


@dataclass(slots=True)
class _Sums:
    """Sums over finished lines: x is the length of the line in bytes, y its output tokens."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y
        self.yy += y * y


@dataclass(frozen=True, slots=True)
class _Fit:
    """Expected output tokens: the mean of the range at `center` bytes, plus `slope` per further byte in [low, high]."""

    means: tuple[float, ...]
    slope: float
    center: float

    def at(self, index: int, x: float) -> float:
        return max(0.0, self.means[index] + self.slope * (x - self.center))


class AnswerLengths:
    """Lengths of the answers of a batch of `num_lines` lines."""

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self.clear()

    def clear(self) -> None:
        """Forget all lines."""
        self._sums = [_Sums() for _ in range(RANGES)]
        self._pending: OrderedDict[int, tuple[int, int] | None] = OrderedDict()
        self._pending_output = self._learned = 0
        self._low, self._high = math.inf, 0.0
        self._fit: _Fit | None = None
        self._fitted = 0
        self.ended = 0
        """Number of finished lines, failed ones included."""
        self.bytes = 0
        """Length of the finished lines."""

    def load(self, sums: Sequence[AnswerSums]) -> None:
        """Replace all lines by sums over the finished lines of each range of ranks."""
        low, high = self._low, self._high
        self.clear()
        for place, n, *totals in sums:
            own = self._sums[min(place, RANGES - 1)] = _Sums(n, *map(float, totals))
            self.ended, self._learned, self.bytes = self.ended + n, self._learned + n, self.bytes + round(own.x)
            deviation = math.sqrt(max(0.0, own.xx / n - (own.x / n) ** 2))
            low, high = min(low, own.x / n - deviation), max(high, own.x / n + deviation)
        self._low, self._high = low, high

    def begin(self, ref: LineRef) -> None:
        """Record that a line is fed."""
        self._pending.setdefault(ref.rank, None)

    def add(self, ref: LineRef, output_tokens: int) -> None:
        """Count a finished line; a failed one has no output tokens. A line that was never fed was finished before."""
        self.ended += 1
        self.bytes += ref.length
        if ref.rank not in self._pending:
            self._learn(ref.rank, ref.length, output_tokens)
            return
        self._pending[ref.rank] = (ref.length, output_tokens)
        self._pending_output += output_tokens
        while self._pending:
            rank, ended = self._pending.popitem(last=False)
            if ended is not None:
                self._pending_output -= ended[1]
                self._learn(rank, *ended)
            elif len(self._pending) < MAX_PENDING:
                self._pending[rank] = None
                self._pending.move_to_end(rank, last=False)
                return

    def _learn(self, rank: int, length: int, output_tokens: int) -> None:
        self._learned += 1
        self._low, self._high = min(self._low, length), max(self._high, length)
        self._sums[self._range(rank)].add(length, output_tokens)

    @property
    def is_known(self) -> bool:
        """Whether enough answers count to predict lengths."""
        return self._learned >= max(LEAST_LEARNED, self.ended / 2)

    def predictor(self) -> Callable[[LineRef], float]:
        """Return a function that gives the expected output tokens of a line. At least one line must have finished."""
        fit = self._fitted_means()
        return lambda ref: fit.at(self._range(ref.rank), self._clamped(ref.length))

    def left(self, line_bytes: float) -> float:
        """Return the mean expected output tokens of the unfinished lines, whose mean length is `line_bytes`."""
        fit, x = self._fitted_means(), self._clamped(line_bytes)
        left = [max(0, self._size(index) - sums.n) for index, sums in enumerate(self._sums)]
        total = sum(count * fit.at(index, x) for index, count in enumerate(left)) - self._pending_output
        return max(0.0, total) / max(1, self.num_lines - self.ended)

    @property
    def longest_left(self) -> float:
        """Longest expected answer of the lines that do not count yet, in tokens. At least one answer must count."""
        means = enumerate(self._fitted_means().means)
        return max((mean for index, mean in means if self._sums[index].n < self._size(index)), default=0.0)

    @property
    def stretch(self) -> float:
        """Ratio of the longest expected answer to the mean of the finished ones, at least 1."""
        fit, mean = self._fitted_means(), sum(sums.y for sums in self._sums) / self._learned
        longest = max(fit.means) + abs(fit.slope) * max(self._high - fit.center, fit.center - self._low)
        return max(1.0, longest / mean) if mean > 0.0 else 1.0

    def _range(self, rank: int) -> int:
        return min(rank * RANGES // max(1, self.num_lines), RANGES - 1)

    def _size(self, index: int) -> int:
        """Return the number of lines of a range."""
        first, after = (-(-i * self.num_lines // RANGES) for i in (index, index + 1))
        return after - first

    def _clamped(self, x: float) -> float:
        return min(max(x, self._low), self._high)

    def _fitted_means(self) -> _Fit:
        if self._fit is None or self._learned >= REFIT * self._fitted:
            self._fit, self._fitted = _fit(self._sums), self._learned
        return self._fit


def _fit(sums: Sequence[_Sums]) -> _Fit:
    """Fit a slope common to all ranges, and the mean of each range."""
    seen = [s for s in sums if s.n]
    count = sum(s.n for s in seen)
    xx = sum(s.xx - s.x * s.x / s.n for s in seen)
    xy = sum(s.xy - s.x * s.y / s.n for s in seen)
    yy = sum(s.yy - s.y * s.y / s.n for s in seen)
    free = count - len(seen) - 1
    slope = xy / xx if xx > 1e-9 * count else 0.0
    if free >= len(seen):
        noise = (yy - slope * xy) / free
    else:  # too few lines to tell ranges apart
        noise = sum(s.yy for s in seen) / count - (sum(s.y for s in seen) / count) ** 2
    noise = max(noise, 1e-9)
    slope *= max(0.0, 1.0 - noise / (slope * slope * xx)) if slope else 0.0  # a slope that chance explains becomes 0
    center = sum(s.x for s in seen) / count
    own = [s.y / s.n - slope * (s.x / s.n - center) if s.n else 0.0 for s in sums]
    spread = _variance_between(sums, own, noise)
    weights = [1.0 / (spread + noise / s.n) if s.n else 0.0 for s in sums]
    mean = sum(w * value for w, value in zip(weights, own, strict=True)) / sum(weights)
    means = (mean + spread * w * (value - mean) for w, value in zip(weights, own, strict=True))
    return _Fit(tuple(means), slope, center)


def _variance_between(sums: Sequence[_Sums], own: Sequence[float], noise: float) -> float:
    """Return DerSimonian and Laird's variance of the true means of ranges with the measured means `own`."""
    weights = [s.n / noise for s in sums]
    total, squares = sum(weights), sum(w * w for w in weights)
    common = sum(w * value for w, value in zip(weights, own, strict=True)) / total
    excess = sum(w * (value - common) ** 2 for w, value in zip(weights, own, strict=True))
    scale = total - squares / total
    return max(0.0, excess - (sum(s.n > 0 for s in sums) - 1)) / scale if scale > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class LineLengths:
    """Sizes of a batch's lines."""

    total_bytes: int
    """Bytes of all lines."""
    pending_line: float
    """Mean bytes of a line without a result."""
    answers: tuple[float, ...] = ()
    """Maximum output tokens of a sample of the lines; infinity for a line without a limit."""
    learned: AnswerLengths | None = None
