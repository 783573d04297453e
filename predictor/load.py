"""Model of a server's load: arrival rates and request lengths, learned while serving, and synthetic windows of load.

- Rates: the current rate from the last arrivals, and a weekly profile in buckets of ten minutes.
- Requests: for the last arrivals, the gap before each (in units of the mean gap around it), prompt, cached part and
  output length; and the lengths of offline requests.

A window for a replay is a moving-block bootstrap of the remembered requests: runs of consecutive arrivals, stretched to
the requested rate. This keeps bursts, and the correlation of prompt and output lengths. A window can be longer than the
record.

Pure: times are arguments, in seconds; `LoadModel` uses calendar time. Randomness is seeded.
"""

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from predictor.budget import DEFAULT_OUTPUT, Promise

BLOCK = 16
"""Consecutive arrivals that stay together in a window, about the size of one burst of chat requests."""
REMEMBERED = 1024
"""Number of online arrivals, and of offline requests, that are remembered."""
RATE_SECONDS = 60.0
RATE_ARRIVALS = 32
"""The current rate covers the arrivals of the last RATE_SECONDS, and at least RATE_ARRIVALS arrivals."""
BUCKET = 600.0
WEEK = 7 * 86_400.0
NUM_BUCKETS = int(WEEK / BUCKET)
DAY_BUCKETS = NUM_BUCKETS // 7
FORGETTING = 0.3
"""Weight of the newest week in the rate of a bucket."""


class Lengths(NamedTuple):
    """Token counts of one request. `cached`: prompt tokens in the prefix cache. `output`: 0 if unknown (refused)."""

    prompt: int
    output: int
    cached: int = 0

    @property
    def to_compute(self) -> int:
        """Prompt tokens to compute, at least 1."""
        return max(1, self.prompt - self.cached)


class OnlineArrival(NamedTuple):
    """An online request and its arrival time in seconds. `promise`: as in `EngineRequest`."""

    at: float
    lengths: Lengths
    promise: Promise | None = None


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Mean lengths in tokens, online and offline (0: no request seen). `prompt` excludes the cached part."""

    prompt: float
    cached: float
    output: float
    offline_prompt: float = 0.0
    offline_output: float = 0.0

    def differs(self, other: "LoadShape", factor: float) -> bool:
        """Return whether any mean differs by more than `factor`, ignoring differences of a few tokens.

        Offline lengths are compared only if `other` has them.
        """
        known = 5 if other.offline_prompt else 3
        pairs = list(zip(self.values(), other.values(), strict=True))[:known]
        return any(max(a, b) + FEW_TOKENS > factor * (min(a, b) + FEW_TOKENS) for a, b in pairs)

    def values(self) -> tuple[float, ...]:
        return (self.prompt, self.cached, self.output, self.offline_prompt, self.offline_output)


FEW_TOKENS = 8.0


class LoadModel:
    """Observed load. `start`: calendar time at which observation began, in seconds."""

    def __init__(self, start: float) -> None:
        self.arrivals: deque[OnlineArrival] = deque(maxlen=REMEMBERED)
        self.offline: deque[Lengths] = deque(maxlen=REMEMBERED)
        self.week: list[float] = [math.nan] * NUM_BUCKETS
        self._times: deque[float] = deque(maxlen=4096)
        self._bucket = math.floor(start / BUCKET)
        self._bucket_since = start
        self._bucket_count = 0

    def arrive(self, at: float) -> None:
        """Count an online request that arrived at `at`, whether or not it was admitted."""
        self.advance(at)
        self._bucket_count += 1
        self._times.append(at)
        while len(self._times) > RATE_ARRIVALS and self._times[0] < at - RATE_SECONDS:
            self._times.popleft()

    def remember(self, arrival: OnlineArrival) -> None:
        """Store the lengths of an online request that ended or was refused."""
        self.arrivals.append(arrival)

    def remember_offline(self, lengths: Lengths) -> None:
        """Store the lengths of an offline request that ended."""
        self.offline.append(lengths)

    def advance(self, now: float) -> None:
        """Close buckets of the week that have passed; ignore buckets observed for less than half of their time."""
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
        """Return the current rate in online requests per second; 0 before the second request."""
        times = self._times
        if len(times) < 2:
            return 0.0
        # Include the time since the last arrival: the rate must fall when requests stop.
        span = max(now - times[0], 1e-6)
        return (len(times) - 1) / span

    def forecast(self, at: float) -> float:
        """Return the expected rate (requests per second) at that time of the week, else of the day; NaN if unknown."""
        index = math.floor(at / BUCKET) % NUM_BUCKETS
        if not math.isnan(self.week[index]):
            return self.week[index]
        days = [rate for rate in self.week[index % DAY_BUCKETS :: DAY_BUCKETS] if not math.isnan(rate)]
        return fmean(days) if days else math.nan

    def shape(self, offline: Sequence[Lengths] = ()) -> LoadShape | None:
        """Return mean lengths of recent requests; None without any. `offline`: fallback if no offline request ended."""
        recent = [arrival.lengths for arrival in list(self.arrivals)[-SHAPE_OF:]]
        if not recent:
            return None
        work = list(self.offline)[-SHAPE_OF:] or offline
        answered = [lengths.output for lengths in recent if lengths.output]
        return LoadShape(
            fmean(lengths.prompt - lengths.cached for lengths in recent),
            fmean(lengths.cached for lengths in recent),
            fmean(answered) if answered else DEFAULT_OUTPUT,
            fmean(lengths.prompt - lengths.cached for lengths in work) if work else 0.0,
            fmean(lengths.output for lengths in work) if work else 0.0,
        )

    def to_document(self) -> dict[str, Any]:
        """Return the model as JSON values of bounded size."""
        ordered = sorted(self.arrivals, key=attrgetter("at"))
        gaps = unit_gaps([arrival.at for arrival in ordered])
        return {
            "week": [None if math.isnan(rate) else round(rate, 6) for rate in self.week],
            "arrivals": [[round(gap, 4), *a.lengths, *_row(a.promise)] for gap, a in zip(gaps, ordered, strict=True)],
            "offline": [list(lengths) for lengths in self.offline],
        }

    @classmethod
    def from_document(cls, document: dict[str, Any], start: float) -> "LoadModel":
        """Restore a saved model. Raises KeyError, TypeError or ValueError if the document is invalid."""
        model = cls(start)
        week = [math.nan if rate is None else _finite(rate) for rate in document["week"]]
        if len(week) != NUM_BUCKETS:
            raise ValueError(f"a week must have {NUM_BUCKETS} rates, not {len(week)}")
        model.week = week
        rows = [
            (_finite(gap), _lengths(rest[:3]), _promise(rest[3:])) for gap, *rest in document["arrivals"][-REMEMBERED:]
        ]
        at = start - math.fsum(gap for gap, *_ in rows)
        for gap, lengths, promise in rows:
            at += gap
            model.arrivals.append(OnlineArrival(at, lengths, promise))
        model.offline.extend(_lengths(lengths) for lengths in document["offline"][-REMEMBERED:])
        return model


SHAPE_OF = 200
"""Number of recent requests over which mean lengths are taken."""


def _finite(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value < math.inf:
        raise TypeError(f"a number of at least 0 was expected, not {value!r:.40}")
    return float(value)


def _lengths(values: Iterable[object]) -> Lengths:
    prompt, output, cached = (int(_finite(value)) for value in values)
    return Lengths(prompt, output, cached)


def _row(promise: Promise | None) -> list[Any]:
    """Return a promise as JSON values, null for no limit; an empty list for the promise of the default class."""
    return [] if promise is None else [None if value == math.inf else value for value in promise[:4]]


def _promise(row: Sequence[Any]) -> Promise | None:
    if not row:
        return None
    ttft, tbt, e2e = (math.inf if value is None else _finite(value) for value in row[1:])
    return Promise(str(row[0]), ttft, tbt, e2e)


NEIGHBOURS = 24


def unit_gaps(times: Sequence[float]) -> list[float]:
    """Return the gap before each of the ascending times, in units of the mean gap around it (1 for the first)."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    found = [1.0] if times else []
    for index, gap in enumerate(gaps):
        begin, end = max(0, index - NEIGHBOURS), min(len(gaps), index + NEIGHBOURS + 1)
        mean = (times[end] - times[begin]) / (end - begin)
        found.append(gap / mean if mean > 0.0 else 1.0)
    return found


def resample(recorded: Iterable[OnlineArrival], rate: float, count: int, seed: int) -> tuple[OnlineArrival, ...]:
    """Return `count` arrivals from time 0 at `rate` requests per second, in blocks of consecutive `recorded` arrivals.

    A request of unknown output length gets the output length of a random other one. Raises ValueError for fewer than
    two recorded arrivals or a rate of 0.
    """
    ordered = sorted(recorded, key=attrgetter("at"))
    if len(ordered) < 2 or rate <= 0.0:
        raise ValueError("a window needs a positive rate and at least two recorded arrivals")
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
            found.append(OnlineArrival(at, lengths, ordered[index].promise))
    return tuple(found[:count])
