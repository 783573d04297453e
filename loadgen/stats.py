"""Random streams, percentiles and intervals: nearest rank, Wilson.

All percentiles are nearest rank, so that every percentile is a measured value and figures of a report agree.
"""

import math
import zlib

import numpy as np
from numpy.typing import ArrayLike


def stream(seed: int, purpose: str, *more: int) -> np.random.Generator:
    """Return the generator for `seed`, `purpose` ("arrivals", "lengths", "text", ...) and optional numbers `more`.

    Streams of different purposes are independent, so that e.g. drawing other lengths keeps the arrivals.
    """
    parts = [seed, zlib.crc32(purpose.encode()), *more]
    return np.random.default_rng([part & 0xFFFFFFFF for part in parts])


def nearest_rank(values: ArrayLike, percent: float) -> float:
    """Return the nearest-rank percentile: the smallest value with at least `percent` % of the values at or below it.

    `percent` is in (0, 100]. Raise ValueError if there are no values.
    """
    array = np.sort(np.asarray(values, dtype=np.float64))
    if array.size == 0:
        raise ValueError("a percentile of no values")
    return float(array[rank_index(array.size, percent)])


def rank_index(count: int, percent: float) -> int:
    """Return the index of the nearest-rank percentile in a sorted array of `count` values."""
    # 99 % of 100 is 99.00000000000001 in binary floating point: round before taking the ceiling.
    return min(count - 1, max(0, math.ceil(round(percent * count / 100.0, 9)) - 1))


def describe(values: ArrayLike) -> dict[str, float | None]:
    """Return `{"mean", "p50", "p99"}` of the values; all None if there are no values."""
    array = np.sort(np.asarray(values, dtype=np.float64))
    if array.size == 0:
        return dict.fromkeys(("mean", "p50", "p99"))
    p50, p99 = (float(array[rank_index(array.size, percent)]) for percent in (50.0, 99.0))
    return {"mean": float(array.mean()), "p50": p50, "p99": p99}


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion, or (0, 1) without trials."""
    from scipy.stats import binomtest  # takes half a second to import

    if not trials:
        return 0.0, 1.0
    found = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(found.low), float(found.high)
