"""Random streams, percentiles and intervals: nearest rank, Wilson, cluster bootstrap paired by request.

All percentiles are nearest rank, so that every percentile is a measured value and figures of a report agree.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


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


def describe(values: ArrayLike, percents: tuple[float, ...] = (50.0, 99.0)) -> dict[str, float | None]:
    """Return `{"mean", "p50", "p99"}`, or other `percents`, of the values; all None if there are no values."""
    array = np.sort(np.asarray(values, dtype=np.float64))
    names = [f"p{percent:g}" for percent in percents]
    if array.size == 0:
        return dict.fromkeys(["mean", *names])
    entries: dict[str, float | None] = {"mean": float(array.mean())}
    for name, percent in zip(names, percents, strict=True):
        entries[name] = float(array[rank_index(array.size, percent)])
    return entries


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion, or (0, 1) without trials."""
    from scipy.stats import binomtest  # takes half a second to import

    if not trials:
        return 0.0, 1.0
    found = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


@dataclass(frozen=True, slots=True)
class Clustered:
    """Values grouped by request, sorted once, so that every bootstrap round is one weighted pass."""

    values: Floats  # float64[n], sorted
    owner: NDArray[np.int64]  # int64[n], request of each value, 0 … `clusters` - 1
    clusters: int

    @classmethod
    def of(cls, groups: list[Floats]) -> "Clustered":
        """Build from one group of values per request; groups may be empty."""
        values = np.concatenate([*groups, np.empty(0)])
        owner = np.repeat(np.arange(len(groups), dtype=np.int64), [len(group) for group in groups])
        order = np.argsort(values, kind="stable")
        return cls(values[order], owner[order], len(groups))


Statistic = Callable[[Clustered, NDArray[np.int64]], float]


def weighted_mean(data: Clustered, weights: NDArray[np.int64]) -> float:
    """Return the mean of the values with request i drawn `weights[i]` times; NaN if no value was drawn."""
    per_value = weights[data.owner]
    total = int(per_value.sum())
    return float((data.values * per_value).sum() / total) if total else math.nan


def weighted_percentile(percent: float) -> Statistic:
    """Return a statistic for the nearest-rank percentile; the statistic returns NaN if no value was drawn."""

    def statistic(data: Clustered, weights: NDArray[np.int64]) -> float:
        running = np.cumsum(weights[data.owner])
        if running.size == 0 or running[-1] == 0:
            return math.nan
        rank = rank_index(int(running[-1]), percent) + 1
        return float(data.values[np.searchsorted(running, rank)])

    return statistic


def bootstrap_difference(
    first: Clustered, second: Clustered, statistic: Statistic, *, paired: bool, rounds: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile-bootstrap interval of `statistic(second) - statistic(first)`.

    Requests are drawn instead of values, because the gaps of a request are not independent. With `paired`, the same
    requests are drawn in both arms. Raise ValueError if their numbers of requests differ then.
    """
    if paired and first.clusters != second.clusters:
        raise ValueError("a paired bootstrap needs the same requests in both arms")
    if min(first.clusters, second.clusters) == 0:
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    differences = np.empty(rounds)
    for index in range(rounds):
        drawn = _draw(random, first.clusters)
        other = drawn if paired else _draw(random, second.clusters)
        differences[index] = statistic(second, other) - statistic(first, drawn)
    differences = np.sort(differences[~np.isnan(differences)])
    if differences.size == 0:
        return math.nan, math.nan
    low, high = rank_index(differences.size, 2.5), rank_index(differences.size, 97.5)
    return float(differences[low]), float(differences[high])


def _draw(random: np.random.Generator, clusters: int) -> NDArray[np.int64]:
    return np.bincount(random.integers(0, clusters, clusters), minlength=clusters).astype(np.int64)
