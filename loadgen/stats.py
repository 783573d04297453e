"""Random streams, percentiles and intervals: nearest rank, Wilson.

All percentiles are nearest rank, so that every percentile is a measured value and figures of a report agree.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

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
    # 99 % of 100 is 99.00000000000001 in binary floating point: round before taking the ceiling.
    rank = math.ceil(round(percent * array.size / 100.0, 9))
    return float(array[min(array.size, max(1, rank)) - 1])


def spread(name: str, values: ArrayLike, percents: Sequence[int] = (50, 99), empty: float | None = None) -> Any:
    """Return `{name_mean, name_p50, ...}` of the values, `empty` for each if there are no values."""
    array = np.sort(np.asarray(values, dtype=np.float64))
    if not array.size:
        return dict.fromkeys((f"{name}_mean", *(f"{name}_p{percent}" for percent in percents)), empty)
    ranks = {f"{name}_p{percent}": nearest_rank(array, percent) for percent in percents}
    return {f"{name}_mean": float(array.mean()), **ranks}


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion, or (0, 1) without trials."""
    from scipy.stats import binomtest  # takes half a second to import

    if not trials:
        return 0.0, 1.0
    found = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(found.low), float(found.high)
