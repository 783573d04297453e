"""Arrival processes: absolute schedules computed before the run starts.

A unit-rate renewal process (constant, Poisson or gamma gaps) is mapped through the inverse of the cumulative rate. The
same construction serves a fixed rate and any rate curve.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from loadgen import InputError

Floats = NDArray[np.float64]
Process = Literal["constant", "poisson", "gamma"]


@dataclass(frozen=True, slots=True)
class RateCurve:
    """A periodic, piecewise constant rate: `rates[i]` requests/s for `durations[i]` seconds."""

    durations: Floats
    rates: Floats

    def __post_init__(self) -> None:
        if len(self.durations) != len(self.rates) or len(self.rates) == 0:
            raise InputError("a rate curve needs one rate per duration, and at least one")
        if not (np.isfinite(self.durations).all() and np.isfinite(self.rates).all()):
            raise InputError("a rate curve needs finite numbers")
        if (self.durations <= 0).any() or (self.rates < 0).any() or not self.rates.any():
            raise InputError("a rate curve needs positive durations, no negative rate and some positive rate")

    @property
    def period(self) -> float:
        """Period of the curve, seconds."""
        return float(self.durations.sum())

    @property
    def mean_rate(self) -> float:
        """Mean requests/s over a period."""
        return float((self.durations * self.rates).sum() / self.period)

    def scaled(self, mean_rate: float) -> "RateCurve":
        """Return a curve of the same shape with mean rate `mean_rate`, requests/s."""
        return RateCurve(self.durations, self.rates * (mean_rate / self.mean_rate))

    def invert(self, events: Floats) -> Floats:
        """Return the times at which the cumulative expected count reaches each of `events` (sorted, >= 0)."""
        cumulative = np.concatenate([[0.0], np.cumsum(self.durations * self.rates)])
        edges = np.concatenate([[0.0], np.cumsum(self.durations)])
        # The cumulative count is flat where the rate is zero; the first time that reaches the count is returned.
        rising = np.concatenate([[True], np.diff(cumulative) > 0])
        ends = np.flatnonzero(rising)[1:]
        periods, within = np.divmod(events, cumulative[-1])
        segment = ends[np.minimum(np.searchsorted(cumulative[ends], within), len(ends) - 1)]
        offset = (within - cumulative[segment - 1]) / self.rates[segment - 1]
        return cast(Floats, periods * self.period + edges[segment - 1] + offset)


def constant_rate(rate: float) -> RateCurve:
    """Return the curve of a fixed rate, requests/s."""
    if not (math.isfinite(rate) and rate > 0):
        raise InputError(f"a rate must be positive and finite, not {rate}")
    return RateCurve(np.array([1.0 / rate]), np.array([rate]))


def gaps(process: Process, count: int, random: np.random.Generator, cv: float = 1.0) -> Floats:
    """Draw `count` gaps of mean 1. Only `gamma` uses `cv`: shape 1 / cv², scale cv²."""
    if process == "constant":
        return np.ones(count)
    if process == "poisson":
        return random.exponential(1.0, count)
    if not (math.isfinite(cv) and cv > 0):
        raise InputError(f"cv must be positive, not {cv}")
    return random.gamma(1.0 / cv**2, cv**2, count)


def schedule(
    curve: RateCurve,
    process: Process,
    random: np.random.Generator,
    *,
    count: int | None = None,
    duration: float | None = None,
    cv: float = 1.0,
) -> Floats:
    """Return sorted arrival times, seconds from the start: the first `count`, those before `duration`, or both limits.

    Raise InputError if neither limit is given.
    """
    if count is not None:
        events = np.cumsum(gaps(process, count, random, cv))
        times = curve.invert(_from_zero(process, events))
        return times if duration is None else times[times < duration]
    if duration is None:
        raise InputError("an arrival schedule needs a number of requests or a duration")
    block = max(64, int(curve.mean_rate * duration * 1.2))
    events = np.empty(0)
    while True:
        start = events[-1] if len(events) else 0.0
        events = np.concatenate([events, start + np.cumsum(gaps(process, block, random, cv))])
        times = curve.invert(_from_zero(process, events))
        if times[-1] >= duration:
            return times[times < duration]


def _from_zero(process: Process, events: Floats) -> Floats:
    # A constant process starts with an arrival at 0, so that n requests take n / rate seconds.
    return events - 1.0 if process == "constant" else events


def parse_curve(text: str) -> RateCurve:
    """Parse a rate curve of the command line.

    `steps:90@15,90@1` (seconds@requests/s) · `sine:mean=5,amplitude=3,period=60` ·
    `burst:base=1,peak=10,every=60,for=10`.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "steps":
            pairs = [part.split("@") for part in rest.split(",")]
            return RateCurve(np.array([float(a) for a, _ in pairs]), np.array([float(b) for _, b in pairs]))
        named = {key: float(value) for key, value in (part.split("=") for part in rest.split(","))}
        if kind == "sine":
            return sine(named.pop("mean"), named.pop("amplitude"), named.pop("period"), **named)
        if kind == "burst":
            peak_for = named.pop("for")
            return burst(named.pop("base"), named.pop("peak"), named.pop("every"), peak_for, **named)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"invalid rate curve {text!r}: {error}") from None
    raise InputError(f"unknown rate curve {kind!r}: use steps, sine or burst")


def sine(mean: float, amplitude: float, period: float, steps: float = 200) -> RateCurve:
    """Return `mean + amplitude · sin(2πt / period)` as `steps` steps per period, each with its average rate."""
    if amplitude > mean:
        raise InputError("a sine's amplitude must not exceed its mean")
    edges = np.linspace(0.0, 2 * math.pi, int(steps) + 1)
    average = (np.cos(edges[:-1]) - np.cos(edges[1:])) / np.diff(edges)
    return RateCurve(np.full(len(average), period / len(average)), np.maximum(0.0, mean + amplitude * average))


def burst(base: float, peak: float, every: float, peak_for: float) -> RateCurve:
    """Return `base` requests/s, with `peak` requests/s in the last `peak_for` of every `every` seconds."""
    return RateCurve(np.array([every - peak_for, peak_for]), np.array([base, peak]))
