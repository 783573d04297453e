"""Selects requests and their representations when memory is short: a knapsack over cache units (Apt-Serve §4.2, §5).

A candidate has `value` if it runs from KV (`kv_units`). From compact form (`compact_units`, hidden state) its value is
`live · rho · kv_units` less, because each step takes that much longer for every live request. The sum of values is
maximised within `capacity` units.

`choose` is the closed form for {kv, compact} with one ratio r = compact / kv. With P = live · rho and m = kv, a
candidate's hull has a first increment of density (value/m − P)/r and an upgrade of density P/(1 − r), the same for all;
compact is on the hull iff value ≥ P·m/(1 − r). So one sort orders all increments: admissible compacts, their upgrades,
the others as KV; equal densities keep their input order. Three additions to the paper's greedy rule: an increment that
does not fit is skipped; the result is compared with the best single candidate in its richest form that fits, which
guarantees half of the optimum; and remaining units are filled with compact forms.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.arrays import FloatArray, IntArray

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected candidates.

    Attributes:
        kv: Indices of candidates that run from KV, best first.
        compact: Indices of candidates that run from compact form, best first.
        value: Sum of values, less penalties.
        units: Sum of units.
    """

    kv: tuple[int, ...]
    compact: tuple[int, ...]
    value: float
    units: int


class Columns(NamedTuple):
    """The candidates in columns.

    Attributes:
        values: Values ≥ 0 (see `engine.scheduling.selection`), in any unit that `rho` shares.
        kv: Device units ≥ 1 in KV, for all known tokens and the growth of this step.
        compact: The same in compact form, a constant share of `kv`; 0 (or not less than `kv`) if not allowed.
    """

    values: FloatArray
    kv: IntArray
    compact: IntArray


def choose(columns: Columns, capacity: int, *, live: int = 0, rho: float = 0.0) -> Selection:
    """Return the selected candidates.

    Args:
        live: Number of requests that can still meet their SLO (N in the paper's Eq. 5).
        rho: Time that the tokens of one KV unit, run from compact form, add to a step, in the unit of the values.
    """
    total = int(columns.kv.sum())
    if total <= capacity:
        return Selection(tuple(range(len(columns.kv))), (), math.fsum(columns.values.tolist()), total)
    penalty = live * rho
    ranked = _rank(columns, capacity, penalty)
    chosen = _fill(columns, ranked, capacity, penalty, None)
    if ranked.best_value > chosen.value:
        alone = _fill(columns, ranked, capacity, penalty, ranked.best_index)
        chosen = alone if alone.value > chosen.value else chosen
    return chosen


class _Ranked(NamedTuple):
    """Candidates with at least one form that fits.

    Attributes:
        order: Candidate indices by density of the first increment.
        first: Units of the first increment, in that order.
        whole: Units of the KV form, in that order.
        num_before: Number of leading candidates that precede the upgrades.
        best_value: Value of the best single candidate.
        best_index: Index of that candidate.
    """

    order: list[int]
    first: list[int]
    whole: list[int]
    num_before: int
    best_value: float
    best_index: int


def _rank(columns: Columns, capacity: int, penalty: float) -> _Ranked:
    """Rank the candidates in one pass and one sort."""
    values, kv, compact = columns
    smaller = (compact > 0) & (compact < kv)
    whole, part = 1, 0
    if smaller.any():
        sample = int(smaller.argmax())
        whole, part = int(kv[sample]), int(compact[sample])
        assert (compact[smaller] * whole == kv[smaller] * part).all(), "compact forms take different shares of their KV"
    bar = penalty * whole / (whole - part)  # density of an upgrade; compact is admissible from this KV density on
    offset = penalty * whole / part if part else 0.0
    is_compact = smaller & ((kv > capacity) | (values >= bar * kv))
    units = np.where(is_compact, compact, kv)
    worth = np.where(kv <= capacity, values, values - penalty * kv)
    found = np.flatnonzero((units <= capacity) & (worth >= 0.0))
    if not len(found):
        return _Ranked([], [], [], 0, -1.0, -1)
    density = values / units - np.where(is_compact, offset, 0.0)
    order = found[np.argsort(-density[found], kind="stable")]
    # The density of an admissible compact form may be below the bar by a rounding error.
    num_before = int(np.searchsorted(-density[order], -bar * (1.0 - ROUNDING), side="right")) if part else 0
    best = int(found[worth[found].argmax()])
    return _Ranked(order.tolist(), units[order].tolist(), kv[order].tolist(), num_before, float(worth[best]), best)


def _fill(columns: Columns, ranked: _Ranked, capacity: int, penalty: float, single: int | None) -> Selection:
    """Take the increments in order, skipping those that do not fit.

    `single`: candidate to take before all others, in its richest form that fits.
    """
    order, first, whole, num_before = ranked.order, ranked.first, ranked.whole, ranked.num_before
    held: dict[int, int] = {}
    left = capacity
    if single is not None:
        place = order.index(single)
        held[place] = whole[place] if whole[place] <= capacity else first[place]
        left -= held[place]
    left = _take(held, first, range(num_before), left)
    for place in sorted(place for place in held if place < num_before):
        if 0 < (step := whole[place] - held[place]) <= left:
            held[place] = whole[place]
            left -= step
    left = _take(held, first, range(num_before, len(order)), left)
    if left and columns.compact.any():
        left = _top_up(columns, ranked, held, left, penalty)
    taken = sorted(held)
    compact = [place for place in taken if held[place] < whole[place]]
    worth = columns.values[[order[place] for place in taken]].tolist() if taken else []
    value = math.fsum(worth) - penalty * sum([whole[place] for place in compact])
    rich = tuple([order[place] for place in taken if held[place] == whole[place]])
    return Selection(rich, tuple([order[place] for place in compact]), value, capacity - left)


def _take(held: dict[int, int], first: list[int], places: range, left: int) -> int:
    """Take first increments while any fits. Return the remaining units."""
    least = min(first[places.start : places.stop], default=0)
    for place in places:
        if left < least:
            break
        if (units := first[place]) <= left and place not in held:
            held[place] = units
            left -= units
    return left


def _top_up(columns: Columns, ranked: _Ranked, held: dict[int, int], left: int, penalty: float) -> int:
    """Fill the remaining units with compact forms of positive value. Return the units that remain."""
    values, kv, compact = (column[ranked.order].tolist() for column in columns)
    for place in range(len(ranked.order)):
        units = compact[place]
        if not units or units > left or place in held:
            continue
        # A compact form as large as its KV cannot occur here: the KV would have fitted.
        if values[place] > penalty * kv[place]:
            held[place] = units
            left -= units
    return left
