"""What a server has to do: arrivals and lengths as they come, learned while it serves, and windows of such work.

- The rate: of the last arrivals (what is true now), and by ten minutes of the week (what comes next).
- Who comes: the last arrivals with the time between them in units of the mean of that hour, prompts, cached parts and
  answers; and the lengths of offline requests.

A window for a replay is a moving-block bootstrap of that: runs of consecutive arrivals, stretched to the wanted rate.
So bursts stay bursts, prompts stay beside the answers that they got, and a window can be as long as a percentile needs
although fewer requests were seen.

Pure: times are arguments, in seconds; `LoadModel` wants those of the calendar. Randomness is seeded. Knows nothing of
engines, budgets or files.
"""

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

BLOCK = 16
"""Consecutive arrivals that stay together in a window: about what one burst of chat requests has."""
DEFAULT_OUTPUT = 64
"""Output tokens of a request that ended before anybody knew, when no other request tells."""
REMEMBERED = 1024
"""Arrivals, and offline requests, that are remembered."""
RATE_SECONDS = 60.0
RATE_ARRIVALS = 32
"""The rate of now is that of the arrivals of the last RATE_SECONDS, but of RATE_ARRIVALS of them at least."""
BUCKET = 600.0
WEEK = 7 * 86_400.0
NUM_BUCKETS = int(WEEK / BUCKET)
DAY_BUCKETS = NUM_BUCKETS // 7
FORGETTING = 0.3
"""Share of the newest week in the rate of a bucket."""


class Lengths(NamedTuple):
    """One request in tokens. `cached`: of the prompt, found in the prefix cache. `output` 0: not known (refused)."""

    prompt: int
    output: int
    cached: int = 0

    @property
    def to_compute(self) -> int:
        """Prompt tokens to compute, one at least."""
        return max(1, self.prompt - self.cached)


class OnlineArrival(NamedTuple):
    """An online request and when it came, in seconds."""

    at: float
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Shape:
    """Mean lengths in tokens, online and offline (0: none seen). `prompt` without what is cached."""

    prompt: float
    cached: float
    output: float
    offline_prompt: float = 0.0
    offline_output: float = 0.0

    def differs(self, other: "Shape", factor: float) -> bool:
        """Whether any of the means is more than `factor` times the `other`'s; a few tokens are no difference.

        Where the other one has seen no offline request these are not compared.
        """
        known = 5 if other.offline_prompt else 3
        pairs = list(zip(self.values(), other.values(), strict=True))[:known]
        return any(max(a, b) + FEW_TOKENS > factor * (min(a, b) + FEW_TOKENS) for a, b in pairs)

    def values(self) -> tuple[float, ...]:
        return (self.prompt, self.cached, self.output, self.offline_prompt, self.offline_output)


FEW_TOKENS = 8.0


class LoadModel:
    """What was seen so far. `start`: when this server began to look, on the calendar clock of all other times here."""

    def __init__(self, start: float) -> None:
        self.arrivals: deque[OnlineArrival] = deque(maxlen=REMEMBERED)
        self.offline: deque[Lengths] = deque(maxlen=REMEMBERED)
        self.week: list[float] = [math.nan] * NUM_BUCKETS
        self._times: deque[float] = deque(maxlen=4096)
        self._bucket = math.floor(start / BUCKET)
        self._bucket_since = start
        self._bucket_count = 0

    def arrive(self, at: float) -> None:
        """An online request came, whatever became of it."""
        self.advance(at)
        self._bucket_count += 1
        self._times.append(at)
        while len(self._times) > RATE_ARRIVALS and self._times[0] < at - RATE_SECONDS:
            self._times.popleft()

    def remember(self, arrival: OnlineArrival) -> None:
        """An online request ended, or was refused: its lengths are known as far as they ever will be."""
        self.arrivals.append(arrival)

    def remember_offline(self, lengths: Lengths) -> None:
        """An offline request ended."""
        self.offline.append(lengths)

    def advance(self, now: float) -> None:
        """Close the buckets of the week that have passed; one that was watched for less than half tells nothing."""
        bucket = math.floor(now / BUCKET)
        first = max(self._bucket, bucket - NUM_BUCKETS)
        for passed in range(first, bucket):
            begin = max(self._bucket_since, passed * BUCKET)
            watched = (passed + 1) * BUCKET - begin
            if watched >= BUCKET / 2:
                self._learn(passed % NUM_BUCKETS, (self._bucket_count if passed == self._bucket else 0) / watched)
        if bucket > self._bucket:
            self._bucket, self._bucket_count = bucket, 0

    def _learn(self, index: int, rate: float) -> None:
        known = self.week[index]
        self.week[index] = rate if math.isnan(known) else known + FORGETTING * (rate - known)

    def rate(self, now: float) -> float:
        """Online requests a second of late; 0 before the second one."""
        times = self._times
        if len(times) < 2:
            return 0.0
        # The time since the last one counts too: who falls silent has a falling rate.
        span = max(now - times[0], 1e-6)
        return (len(times) - 1) / span

    def forecast(self, at: float) -> float:
        """Online requests a second at that time of the week, else of the day; NaN when nobody has seen either."""
        index = math.floor(at / BUCKET) % NUM_BUCKETS
        if not math.isnan(self.week[index]):
            return self.week[index]
        days = [rate for rate in self.week[index % DAY_BUCKETS :: DAY_BUCKETS] if not math.isnan(rate)]
        return fmean(days) if days else math.nan

    def shape(self, offline: Sequence[Lengths] = ()) -> Shape | None:
        """Mean lengths of those remembered last; None before the first. `offline`: where none has ended yet."""
        recent = [arrival.lengths for arrival in list(self.arrivals)[-SHAPE_OF:]]
        if not recent:
            return None
        work = list(self.offline)[-SHAPE_OF:] or offline
        answered = [lengths.output for lengths in recent if lengths.output]
        return Shape(
            fmean(lengths.prompt - lengths.cached for lengths in recent),
            fmean(lengths.cached for lengths in recent),
            fmean(answered) if answered else DEFAULT_OUTPUT,
            fmean(lengths.prompt - lengths.cached for lengths in work) if work else 0.0,
            fmean(lengths.output for lengths in work) if work else 0.0,
        )

    def to_document(self) -> dict[str, Any]:
        """All of it as plain JSON values, of bounded size."""
        ordered = sorted(self.arrivals)
        gaps = unit_gaps([arrival.at for arrival in ordered])
        return {
            "week": [None if math.isnan(rate) else round(rate, 6) for rate in self.week],
            "arrivals": [[round(gap, 4), *a.lengths] for gap, a in zip(gaps, ordered, strict=True)],
            "offline": [list(lengths) for lengths in self.offline],
        }

    @classmethod
    def from_document(cls, document: dict[str, Any], start: float) -> "LoadModel":
        """What an earlier server saw. Raises KeyError, TypeError or ValueError for a document that is none."""
        model = cls(start)
        week = [math.nan if rate is None else _finite(rate) for rate in document["week"]]
        if len(week) != NUM_BUCKETS:
            raise ValueError(f"a week has {NUM_BUCKETS} rates, not {len(week)}")
        model.week = week
        rows = [(_finite(gap), _lengths(lengths)) for gap, *lengths in document["arrivals"][-REMEMBERED:]]
        at = start - math.fsum(gap for gap, _ in rows)
        for gap, lengths in rows:
            at += gap
            model.arrivals.append(OnlineArrival(at, lengths))
        model.offline.extend(_lengths(lengths) for lengths in document["offline"][-REMEMBERED:])
        return model


SHAPE_OF = 200
"""Requests of which mean lengths are taken."""


def _finite(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value < math.inf:
        raise TypeError(f"a number of at least 0 was expected, not {value!r:.40}")
    return float(value)


def _lengths(values: Iterable[object]) -> Lengths:
    prompt, output, cached = (int(_finite(value)) for value in values)
    return Lengths(prompt, output, cached)


NEIGHBOURS = 24


def unit_gaps(times: Sequence[float]) -> list[float]:
    """Of ascending times, the gap before each in units of the mean gap around it (1 for the first)."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    found = [1.0] if times else []
    for index, gap in enumerate(gaps):
        begin, end = max(0, index - NEIGHBOURS), min(len(gaps), index + NEIGHBOURS + 1)
        mean = (times[end] - times[begin]) / (end - begin)
        found.append(gap / mean if mean > 0.0 else 1.0)
    return found


def resample(recorded: Iterable[OnlineArrival], rate: float, count: int, seed: int) -> tuple[OnlineArrival, ...]:
    """`count` arrivals from time 0 on at `rate` requests a second, in blocks of what was `recorded`.

    A request of unknown output gets that of a random other one. Raises ValueError for a record of fewer than two
    arrivals.
    """
    ordered = sorted(recorded)
    if len(ordered) < 2 or rate <= 0.0:
        raise ValueError("a window needs a rate and a record of at least two arrivals")
    gaps = unit_gaps([arrival.at for arrival in ordered])
    outputs = [arrival.lengths.output for arrival in ordered if arrival.lengths.output] or [DEFAULT_OUTPUT]
    generator = random.Random(seed)
    block = min(BLOCK, len(ordered) - 1)
    found: list[OnlineArrival] = []
    at = 0.0
    while len(found) < count:
        begin = generator.randrange(1, len(ordered) - block + 1)
        for index in range(begin, begin + block):
            at += gaps[index] / rate
            lengths = ordered[index].lengths
            if not lengths.output:
                lengths = lengths._replace(output=generator.choice(outputs))
            found.append(OnlineArrival(at, lengths))
    return tuple(found[:count])
