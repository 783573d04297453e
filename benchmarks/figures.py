"""The four figures of the serving benchmark and the work behind them, and percentiles."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from loadgen.stats import nearest_rank

PROMPT, OUTPUT, PREFILL = 128, 64, 512


class Figures(NamedTuple):
    """Tokens per second: one stream's decode, a 512-token prefill, and 8 and 16 streams of 128 in / 64 out."""

    one_stream: float
    prefill: float
    eight: float
    sixteen: float


def medians(rounds: Sequence[Figures]) -> Figures:
    """Column by column."""
    return Figures(*map(median, zip(*rounds, strict=True)))


def percentile(values: ArrayLike, percent: float) -> float:
    """Return the nearest-rank percentile, or 0 if there are no values."""
    array = np.asarray(values, dtype=np.float64)
    return nearest_rank(array, percent) if array.size else 0.0
