"""What running a request is worth: pending time, SLO misses, predicted tokens, the tail knob, the vote."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.selection import (
    DEFAULT_TAIL,
    EPSILON,
    Columns,
    apt_values,
    choose,
    goodput_values,
    pending_time,
    seconds_to_token,
)
from predictor.budget import Promise
from predictor.features import BatchFeatures
from predictor.model import LatencyModel

SLO = Promise("", ttft=1.0, tbt=0.1)


def test_pending_since_arrival_and_then_since_the_last_token() -> None:
    assert pending_time(5.0, 3.0, None) == 2.0
    assert pending_time(5.0, 3.0, 4.5) == 0.5
    assert pending_time(5.0, 5.5, None) == 0.0


def test_a_missed_slo() -> None:
    assert not SLO.is_missed(1.0, 0.0, None, None)
    assert SLO.is_missed(1.01, 0.0, None, None)
    assert not SLO.is_missed(2.0, 0.0, 0.9, 1.95)
    assert SLO.is_missed(2.0, 0.0, 1.1, 1.95)  # its first token was late: nothing can make that good
    assert SLO.is_missed(2.0, 0.0, 0.9, 1.85)  # the next one is late now
    assert not Promise("").is_missed(1e9, 0.0, 5.0, 6.0)


@given(st.integers(0, 2000), st.integers(1, 3000), st.sampled_from([64, 256, 512]))
def test_predicted_seconds_are_those_of_the_steps(start: int, length: int, chunk: int) -> None:
    model = LatencyModel(intercept=0.01, attention=2e-9, prefill_chunks=1e-4, knots=(0, 64), hinges=(1e-6, 4e-5))
    beside = BatchFeatures()
    beside.add_decodes(20, 20 * 700)
    base = model.predict(beside)
    steps = 0.0
    for begin in range(start, start + length, chunk):
        steps += base + model.marginal(beside, begin, min(chunk, start + length - begin))
    assert seconds_to_token(model, base, beside, start, length, chunk) == pytest.approx(steps, rel=1e-6)


def apt_value(pending: float, savable: bool, tail: float = DEFAULT_TAIL) -> float:
    return float(apt_values(np.array([pending]), np.array([savable]), tail)[0])


def goodput_value(pending: float, savable: bool, ttft: float, tail: float = 0.0) -> float:
    return float(goodput_values(np.array([pending]), np.array([savable]), ttft, tail)[0])


def test_apt_value_decays_what_is_late() -> None:
    assert apt_value(2.0, True) == 2.0
    assert apt_value(2.0, False) == pytest.approx(0.8)
    assert apt_value(2.0, False, tail=0.0) == EPSILON
    assert apt_value(0.0, True) == 0.0


def test_goodput_values_every_savable_request_alike() -> None:
    assert goodput_value(0.0, True, 1.0) == goodput_value(0.9, True, 1.0) == 1.0
    assert goodput_value(50.0, False, 1.0) == EPSILON
    assert goodput_value(50.0, False, math.inf, tail=0.5) == EPSILON


@given(st.floats(0.01, 1.0), st.floats(0.1, 10.0))
def test_after_one_over_tail_objectives_a_late_request_counts_in_full(tail: float, ttft: float) -> None:
    at = ttft / tail
    assert goodput_value(at, False, ttft, tail) == pytest.approx(1.0)
    assert goodput_value(at * 0.5, False, ttft, tail) < 1.0 < goodput_value(at * 2, False, ttft, tail)
    # In apt as well: a savable request has waited for one objective at most.
    assert apt_value(at, False, tail) == pytest.approx(apt_value(ttft, True))


def test_small_savable_requests_go_first_under_goodput_and_old_ones_under_apt() -> None:
    # (pending, savable, units): an old large one, two small young ones, one that is late.
    queue = [(0.9, True, 20), (0.1, True, 8), (0.2, True, 10), (3.0, False, 4)]
    units = [row[2] for row in queue]

    def chosen(values: list[float], capacity: int) -> tuple[int, ...]:
        return choose(Columns(np.array(values), np.array(units), np.zeros(len(units), dtype=np.int64)), capacity).kv

    assert chosen([goodput_value(p, savable, 1.0) for p, savable, _ in queue], 22) == (1, 2, 3)
    assert chosen([apt_value(p, savable, tail=0.0) for p, savable, _ in queue], 22) == (0,)
    # With a tail the late one is back ahead of all: 0.4 · 3 s for four units.
    assert chosen([apt_value(p, savable) for p, savable, _ in queue], 22)[0] == 3
