"""Stage 1 of the hybrid cache: the selected requests against the exact optimum of small instances in whole units."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples

from engine.scheduling import selection
from engine.scheduling.selection import Columns, Selection

ROUNDING = 1e-9


class Candidate(NamedTuple):
    """One row of the columns."""

    value: float
    kv_units: int
    compact_units: int | None = None


class Option(NamedTuple):
    """One form in which a candidate could run, its value with the cost of it deducted."""

    units: int
    value: float


def choose(candidates: Sequence[Candidate], capacity: int, *, live: int = 0, rho: float = 0.0) -> Selection:
    values, kv, compact = zip(*candidates, strict=True) if candidates else ((), (), ())
    columns = Columns(
        np.array(values, np.float64), np.array(kv, np.int64), np.array([units or 0 for units in compact], np.int64)
    )
    return selection.choose(columns, capacity, live=live, rho=rho)


def optimum(candidates: Sequence[Sequence[Option]], capacity: int) -> float:
    """The best sum of values within `capacity`, at most one form of each: dynamic programming over whole units."""
    best = [0.0] * (capacity + 1)
    for options in candidates:
        best = [
            max([value, *(best[left - o.units] + o.value for o in options if o.units <= left)])
            for left, value in enumerate(best)
        ]
    return best[capacity]


def forms(candidates: Sequence[Candidate], penalty: float) -> list[list[Option]]:
    found = []
    for value, kv, compact in candidates:
        found.append([Option(kv, value)])
        if compact is not None and compact < kv:
            found[-1].append(Option(compact, value - penalty * kv))
    return found


def check(candidates: Sequence[Candidate], capacity: int, selection: Selection, penalty: float) -> None:
    """Check the capacity, that no request is chosen twice, and the sums of the choice."""
    assert len({*selection.kv, *selection.compact}) == len(selection.kv) + len(selection.compact)
    units = sum(candidates[i].kv_units for i in selection.kv)
    value = sum(candidates[i].value for i in selection.kv)
    for index in selection.compact:
        one = candidates[index]
        assert one.compact_units is not None and one.compact_units < one.kv_units
        units += one.compact_units
        value += one.value - penalty * one.kv_units
        assert one.value >= penalty * one.kv_units * (1 - ROUNDING)
    assert selection.units == units <= capacity
    assert selection.value == pytest.approx(value, abs=1e-9)


values = st.one_of(st.just(0.0), st.floats(0.001, 10.0), st.sampled_from([1e-6, 1.0]))
blocks = st.integers(1, 12)


@st.composite
def one_ratio(draw: st.DrawFn) -> list[Candidate]:
    """Candidates with r = 1/2 (as whole units have it) or 1/4; compact is refused for some."""
    whole, part = draw(st.sampled_from([(2, 1), (4, 1)]))
    sizes = st.tuples(values, blocks, st.booleans())
    return [
        Candidate(value, whole * size, part * size if offered else None)
        for value, size, offered in draw(st.lists(sizes, min_size=1, max_size=9))
    ]


rhos = st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3])


@settings(max_examples=examples(300), deadline=None)
@given(one_ratio(), st.integers(0, 120), st.integers(0, 9), rhos)
def test_at_least_half_of_the_optimum(candidates: list[Candidate], capacity: int, live: int, rho: float) -> None:
    penalty = live * rho
    selection = choose(candidates, capacity, live=live, rho=rho)
    check(candidates, capacity, selection, penalty)
    best = optimum(forms(candidates, penalty), capacity)
    assert best / 2 - ROUNDING <= selection.value <= best + ROUNDING
    assert selection == choose(candidates, capacity, live=live, rho=rho)


@settings(max_examples=examples(200), deadline=None)
@given(one_ratio(), st.integers(0, 9), rhos)
def test_who_fits_runs_from_kv_in_the_given_order(candidates: list[Candidate], live: int, rho: float) -> None:
    demand = sum(candidate.kv_units for candidate in candidates)
    selection = choose(candidates, demand, live=live, rho=rho)
    assert selection.kv == tuple(range(len(candidates))) and selection.compact == ()
    assert selection.units == demand


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 10), st.integers(1, 9), st.floats(0.1, 5.0), st.integers(0, 90), st.integers(1, 60))
def test_more_capacity_is_never_worse_among_equals(
    size: int, count: int, value: float, capacity: int, more: int
) -> None:
    """Greedy is not monotone in general (no greedy for a knapsack is); among equal candidates it is."""
    candidates = [Candidate(value, 2 * size, size)] * count
    less = choose(candidates, capacity, live=5, rho=0.001)
    assert choose(candidates, capacity + more, live=5, rho=0.001).value >= less.value - ROUNDING


def test_compact_first_then_upgrades_then_the_rest() -> None:
    # P = 0.1, r = 1/2: compact is admissible for p >= 0.2 m.
    dense, denser, thin = Candidate(4.0, 10, 5), Candidate(6.0, 10, 5), Candidate(1.5, 10, 5)
    both = [dense, denser, thin]
    assert choose(both, 10, live=1, rho=0.1) == Selection((), (1, 0), 8.0, 10)
    assert choose(both, 15, live=1, rho=0.1) == Selection((1,), (0,), 9.0, 15)
    assert choose(both, 20, live=1, rho=0.1) == Selection((1, 0), (), 10.0, 20)
    # The thin one's KV (10) does not fit behind them; the rest is filled with its compact form.
    assert choose(both, 25, live=1, rho=0.1) == Selection((1, 0), (2,), 10.5, 25)
    # A dear re-projection: no request runs from compact cache, however much it saves.
    assert choose(both, 15, live=10, rho=0.1) == Selection((1,), (), 6.0, 10)


def test_the_single_candidate_is_taken_in_the_richest_form_that_fits() -> None:
    # By density the small one goes first and the large one no longer fits; alone it is worth nearly everything, and
    # only its compact form fits at all.
    small, large = Candidate(1.5, 2), Candidate(10.0, 40, 20)
    assert choose([small, large], 21, live=1, rho=0.01) == Selection((), (1,), 9.6, 20)
    assert choose([small, Candidate(10.0, 21)], 21) == Selection((1,), (), 10.0, 21)
    # The rest after the single request is filled too.
    assert choose([Candidate(0.9, 3), Candidate(5.0, 20), Candidate(0.1, 2)], 22).kv == (1, 2)
    assert choose([Candidate(1.0, 12, 6)], 6, live=1, rho=0.05) == Selection((), (0,), pytest.approx(0.4), 6)
    for capacity, options in ((6, {"live": 1, "rho": 0.1}), (5, {})):
        assert choose([Candidate(1.0, 12, 6)], capacity, **options) == Selection((), (), 0.0, 0)


def test_mean_ratio_to_the_optimum() -> None:
    generator = random.Random(6)
    ratios = []
    for _ in range(60):
        candidates = [
            Candidate(generator.expovariate(2.0), 2 * (size := generator.randrange(2, 40)), size) for _ in range(24)
        ]
        capacity = int(generator.uniform(0.15, 0.8) * sum(candidate.kv_units for candidate in candidates))
        penalty = generator.choice([0.0, 1e-3, 5e-3, 2e-2])
        selection = choose(candidates, capacity, live=1, rho=penalty)
        ratios.append(selection.value / optimum(forms(candidates, penalty), capacity))
    mean = sum(ratios) / len(ratios)
    print(f"knapsack, 60 instances of 24: mean ratio to the optimum {mean:.4f}, worst {min(ratios):.3f}")
    assert mean >= 0.98 and min(ratios) >= 0.5
