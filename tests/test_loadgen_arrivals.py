"""Arrival processes and rate curves: rate, burstiness and distribution at fixed seeds."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import InputError
from loadgen.arrivals import RateCurve, burst, constant_rate, parse_curve, schedule, sine
from loadgen.stats import stream


def random(seed: int = 1) -> np.random.Generator:
    return stream(seed, "arrivals")


def kstest(*arguments: Any, **options: Any) -> Any:
    from scipy import stats

    return stats.kstest(*arguments, **options)


def test_constant_is_an_exact_grid_from_zero() -> None:
    times = schedule(constant_rate(4.0), "constant", random(), count=9)
    assert times == pytest.approx(np.arange(9) / 4.0)


@pytest.mark.parametrize("rate", [0.5, 7.0, 300.0])
def test_poisson_has_its_rate_and_exponential_gaps(rate: float) -> None:
    times = schedule(constant_rate(rate), "poisson", random(), count=20_000)
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.01


@pytest.mark.parametrize("cv", [0.5, 1.0, 5.0, 10.0])
def test_gamma_has_its_rate_cv_and_distribution(cv: float) -> None:
    times = schedule(constant_rate(2.0), "gamma", random(3), count=60_000, cv=cv)
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.5, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    # The smallest gaps drown in the rounding of large times: test the distribution of the gaps before they are summed.
    drawn = stream(3, "arrivals").gamma(1 / cv**2, cv**2, 60_000)
    assert gaps == pytest.approx(drawn * 0.5, abs=1e-6)
    assert kstest(drawn, "gamma", args=(1 / cv**2, 0, cv**2)).pvalue > 0.01


def test_steps_give_each_step_its_rate_and_repeat() -> None:
    curve = parse_curve("steps:90@15,90@1")
    times = schedule(curve, "poisson", random(), duration=1800.0)
    phase = times % 180.0
    assert (phase < 90).sum() / 900.0 == pytest.approx(15.0, rel=0.03)
    assert (phase >= 90).sum() / 900.0 == pytest.approx(1.0, rel=0.1)
    # Time-rescaling: the expected counts at the arrivals of a Poisson process form a unit-rate Poisson process.
    inside = np.where(phase < 90, phase * 15, 1350 + (phase - 90))
    counts = times // 180 * 1440 + inside
    assert kstest(np.diff(counts), "expon").pvalue > 0.01


def test_a_step_of_rate_zero_has_no_arrival() -> None:
    times = schedule(parse_curve("steps:10@0,5@20,5@0"), "constant", random(), count=250)
    phase = times % 20.0
    assert ((phase >= 10) & (phase <= 15 + 1e-9)).all()
    assert np.diff(times).min() > 0


def test_sine_follows_the_wave() -> None:
    curve = sine(5.00371, 4.0, 60.0)  # a whole number of arrivals a period would alias
    assert curve.mean_rate == pytest.approx(5.00371, rel=1e-6)
    times = schedule(curve, "constant", random(), duration=6000.0)
    rates = np.histogram(times % 60.0, bins=60, range=(0, 60))[0] / 100.0
    wave = 5.0 + 4.0 * np.sin(2 * math.pi * (np.arange(60) + 0.5) / 60)
    assert np.abs(rates - wave).max() < 0.35


def test_burst_puts_the_peak_at_the_end_of_each_period() -> None:
    curve = burst(1.0, 10.0, 60.0, 10.0)
    assert curve.durations.tolist() == [50.0, 10.0] and curve.rates.tolist() == [1.0, 10.0]
    assert curve.mean_rate == pytest.approx((50 + 100) / 60)


@pytest.mark.parametrize(
    "text",
    [
        "steps:90", "steps:0@5", "steps:5@-1", "steps:5@0", "sine:mean=1,amplitude=2,period=3",
        "sine:mean=1", "burst:base=1", "wave:1", "steps:5@nan",
        "burst:base=1,peak=2,every=5,for=9",
    ],
)  # fmt: skip
def test_bad_curves_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_curve(text)


def test_a_schedule_needs_an_end() -> None:
    with pytest.raises(InputError):
        schedule(constant_rate(1.0), "poisson", random())


@given(
    seed=st.integers(0, 50),
    steps=st.lists(st.tuples(st.floats(0.5, 50), st.floats(0, 40)), min_size=1, max_size=5).filter(
        lambda pairs: any(rate > 0.1 for _, rate in pairs)
    ),
    duration=st.floats(1, 60),
)
def test_schedules_are_sorted_inside_the_duration_and_repeatable(seed, steps, duration) -> None:
    curve = RateCurve(np.array([a for a, _ in steps]), np.array([b for _, b in steps]))
    times = schedule(curve, "poisson", random(seed), duration=duration)
    assert (np.diff(times) >= 0).all()
    assert len(times) == 0 or (times[0] >= 0 and times[-1] < duration)
    assert (times == schedule(curve, "poisson", random(seed), duration=duration)).all()
    # Drawing by count yields the same arrivals: the limits do not change the process.
    again = schedule(curve, "poisson", random(seed), count=len(times))
    assert len(times) == 0 or again[0] == pytest.approx(times[0])


def test_streams_of_one_seed_are_independent() -> None:
    a, b = stream(7, "arrivals").random(2000), stream(7, "lengths").random(2000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    assert (stream(7, "arrivals").random(5) == a[:5]).all()
