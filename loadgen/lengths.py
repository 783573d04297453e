"""Lengths and public arrivals: from data files if available, else from generators with the same moments.

The tables are token quantiles of the public data sets at PERCENTS; generators draw from them by log-linear
interpolation. The trace's notes say which source was used.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.arrivals import RateCurve, constant_rate, schedule
from loadgen.stats import stream
from loadgen.traces import Trace, build, read

Ints = NDArray[np.int64]
PERCENTS = (0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 100.0)
TRACE_SPAN = 3500.0
"""Length of a synthetic arrival trace, seconds; about that of the Azure traces."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Quantiles of input and output tokens of a data set, and its file name in the data folder."""

    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    file: str


AZURE_CONV = Lengths(
    (2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6179, 14050),
    (7, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000),
    "azure2023_conv.csv.gz",
)
AZURE_CODE = Lengths(
    (3, 75, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437, 7437),
    (6, 6, 7, 9, 13, 24, 55, 90, 251, 825, 1899),
    "azure2023_code.csv.gz",
)
ARXIV = Lengths(
    (1, 749, 1242, 1986, 2730, 3370, 3702, 3813, 3933, 4012, 4054),
    (5, 60, 78, 115, 167, 242, 372, 736, 3271, 3844, 4056),
    "lengths_arxiv_summarization.csv.gz",
)
SHAREGPT = Lengths(
    (1, 29, 74, 580, 1730, 3734, 5696, 6563, 7434, 7854, 8141),
    (2, 44, 84, 228, 415, 628, 834, 920, 998, 1021, 1024),
    "lengths_sharegpt_8k.csv.gz",
)
HUMANEVAL = Lengths(
    (29, 43, 54, 72, 99, 142, 193, 229, 301, 336, 340),
    (4, 8, 10, 20, 37, 60, 92, 108, 164, 209, 216),
    "humaneval.jsonl.gz",
)


def draw(quantiles: tuple[float, ...], count: int, random: np.random.Generator) -> Ints:
    """Draw `count` lengths of at least one token from a quantile table."""
    at = random.uniform(0.0, 100.0, count)
    drawn: Ints = np.maximum(1, np.rint(np.exp(np.interp(at, PERCENTS, np.log(quantiles))))).astype(np.int64)
    return drawn


def sample(lengths: Lengths, count: int, seed: int, data: Path | None, purpose: str) -> Trace:
    """Draw `count` pairs of lengths without times, from rows of the data file or else from the quantiles."""
    random = stream(seed, "lengths", len(purpose), *purpose.encode())
    path = _file(lengths, data)
    if path is not None:
        rows = read(path)
        picked = rows.take(random.integers(0, len(rows), count))
        bare = build(None, picked.input_tokens, picked.output_tokens)
        estimated = " (estimates: 4 characters per token)" if rows.content and rows.content[0].text else ""
        return bare.noted(f"{purpose} lengths: {path.name}{estimated}")
    bare = build(None, draw(lengths.inputs, count, random), draw(lengths.outputs, count, random))
    return bare.noted(f"{purpose} lengths: SYNTHETIC, with the quantiles of {lengths.file.split('.')[0]}")


def arrivals(lengths: Lengths, seed: int, data: Path | None) -> Trace:
    """Return the data file as a trace, or a synthetic one with the same rate, burstiness and length quantiles."""
    path = _file(lengths, data)
    if path is not None:
        return read(path).noted(f"arrivals and lengths: {path.name}")
    random = stream(seed, "arrivals")
    if lengths is AZURE_CODE:
        curve, what = on_off(random), "on-off with 56 % idle 10-s bins"
        span, times = curve.period, schedule(curve, "poisson", random, duration=curve.period)
    else:
        span, what = TRACE_SPAN, "gamma CV 1.09"
        times = schedule(constant_rate(5.53), "gamma", random, duration=span, cv=1.09)
    drawn = stream(seed, "lengths")
    sizes = draw(lengths.inputs, len(times), drawn), draw(lengths.outputs, len(times), drawn)
    trace = Trace(times, *sizes, span=span)
    name = lengths.file.split(".")[0]
    return trace.noted(f"arrivals and lengths: SYNTHETIC, {what}, with the quantiles of {name}")


def on_off(random: np.random.Generator) -> RateCurve:
    """Return a curve of 350 bins of 10 s: busy periods (mean 38 s) and idle ones (mean 49 s); busy rates have CV 0.8.

    The mean rate and the share of idle bins are exactly those of the Azure code trace.
    """
    bins = 350
    busy = np.zeros(bins, dtype=bool)
    state = False
    for index in range(bins):
        busy[index] = state
        state = random.random() >= 1 / 3.8 if state else random.random() < 1 / 4.9
    target = round(0.44 * bins)
    excess = int(busy.sum()) - target
    pool = np.flatnonzero(busy if excess > 0 else ~busy)
    busy[random.choice(pool, abs(excess), replace=False)] = excess < 0
    # The floor prevents busy bins without any arrival.
    rates = np.where(busy, np.maximum(0.6, random.gamma(1 / 0.64, 0.64 * 5.83, bins)), 0.0)
    return RateCurve(np.full(bins, 10.0), rates).scaled(2.567)


def _file(lengths: Lengths, data: Path | None) -> Path | None:
    path = None if data is None else data / lengths.file
    return path if path is not None and path.is_file() else None
