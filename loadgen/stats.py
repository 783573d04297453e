"""Percentiles and intervals: nearest rank, Wilson, cluster bootstrap paired by request.

Knows nothing of requests or servers: arrays in, numbers out. One percentile rule everywhere (nearest rank: the value
is always one that was measured), so that no two figures of a report disagree because of interpolation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

Z95 = 1.959963984540054


def nearest_rank(values: ArrayLike, percent: float) -> float:
    """The nearest-rank percentile: the smallest value with at least `percent` % of the values at or below it.

    `percent` is in (0, 100]; raises ValueError for no values.
    """
    array = np.sort(np.asarray(values, dtype=np.float64))
    if array.size == 0:
        raise ValueError("a percentile of no values")
    return float(array[rank_index(array.size, percent)])


def percentile(values: ArrayLike, percent: float) -> float:
    """The nearest-rank percentile; 0 for no values."""
    array = np.asarray(values, dtype=np.float64)
    return nearest_rank(array, percent) if array.size else 0.0


def rank_index(count: int, percent: float) -> int:
    """Index of the nearest-rank percentile in a sorted array of `count` values."""
    # 99 % of 100 is 99.00000000000001 in binary floating point: round before taking the ceiling.
    return min(count - 1, max(0, math.ceil(round(percent * count / 100.0, 9)) - 1))


def describe(values: ArrayLike, percents: tuple[float, ...] = (50.0, 99.0)) -> dict[str, float | None]:
    """`{"mean", "p50", "p99"}` of the values (or the percents asked for); every entry is None for no values."""
    array = np.sort(np.asarray(values, dtype=np.float64))
    names = [f"p{percent:g}" for percent in percents]
    if array.size == 0:
        return dict.fromkeys(["mean", *names])
    entries: dict[str, float | None] = {"mean": float(array.mean())}
    for name, percent in zip(names, percents, strict=True):
        entries[name] = float(array[rank_index(array.size, percent)])
    return entries


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a proportion; (0, 1) when there was no trial."""
    if not 0 <= successes <= trials:
        raise ValueError("successes must lie between 0 and trials")
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At 0 and at 1 the bound is exact in theory; arithmetic leaves it a hair away.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


@dataclass(frozen=True, slots=True)
class Clustered:
    """Values grouped by request, sorted once, so that every bootstrap round is one weighted pass.

    `values`: sorted float64[n]; `owner`: int64[n], the request (0 … `clusters` - 1) each value came from.
    """

    values: Floats
    owner: NDArray[np.int64]
    clusters: int

    @classmethod
    def of(cls, groups: list[Floats]) -> "Clustered":
        """One group of values per request (a group may be empty)."""
        values = np.concatenate([*groups, np.empty(0)])
        owner = np.repeat(np.arange(len(groups), dtype=np.int64), [len(group) for group in groups])
        order = np.argsort(values, kind="stable")
        return cls(values[order], owner[order], len(groups))


Statistic = Callable[[Clustered, NDArray[np.int64]], float]


def weighted_mean(data: Clustered, weights: NDArray[np.int64]) -> float:
    """Mean of the values when request i was drawn `weights[i]` times; NaN when nothing was drawn."""
    per_value = weights[data.owner]
    total = int(per_value.sum())
    return float((data.values * per_value).sum() / total) if total else math.nan


def weighted_percentile(percent: float) -> Statistic:
    """The nearest-rank percentile as a function of drawn weights."""

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
    """A 95 % percentile-bootstrap interval of `statistic(second) - statistic(first)`.

    Requests, not values, are drawn: the gaps of one request are not independent. With `paired` the same requests are
    drawn in both arms (both must have the same number); raises ValueError otherwise.
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
