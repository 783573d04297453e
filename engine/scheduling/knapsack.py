"""Who runs when memory is short, and from which representation: a knapsack over cache units (Apt-Serve §4.2, §5).

Every candidate would be worth `value` if it ran, in KV (`kv_units`) or in compact form (`compact_units`, hidden state),
where it is worth `live · rho · kv_units` less: each step takes that much longer for everybody. Maximise the sum of the
values within `capacity` units.

`choose` is the closed form for {kv, compact} with one ratio r = compact / kv. With P = live · rho and m = kv, a
candidate's hull has a first increment of density (value/m − P)/r and an upgrade of density P/(1 − r), the same for all;
compact is on the hull iff value ≥ P·m/(1 − r). So one sort gives the order of all increments: admissible compacts,
their upgrades, the others as KV. Three things beside the paper's greedy: a misfit does not end it; a form that does not
fit even alone is taken out first, and the result is compared with the best single candidate in the richest form that
fits, so that the value is never less than half of the optimum (with a single in KV only it can be 0); what is left is
topped up with compact forms.

Pure and deterministic: equal densities keep the order of the input. Knows nothing of requests, steps or time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-9
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Selection:
    """Indices of the candidates that run, from KV and from compact cache, best first; their sum of values (penalties
    deducted) and of units."""

    kv: tuple[int, ...]
    compact: tuple[int, ...]
    value: float
    units: int


class Columns(NamedTuple):
    """The requests that want to run, transposed.

    `values` ≥ 0 (see engine.scheduling.selection), in any unit that `rho` shares. `kv` ≥ 1: device units of the whole
    past and the growth of this step, in KV. `compact`: the same in compact form, the same share of `kv` for all; 0
    where that is refused (so is a form that is not smaller).
    """

    values: Floats
    kv: Ints
    compact: Ints

    @classmethod
    def of(cls, values: Sequence[float], kv: Sequence[int], compact: Sequence[int]) -> "Columns":
        return cls(np.array(values, np.float64), np.array(kv, np.int64), np.array(compact, np.int64))


def choose(columns: Columns, capacity: int, *, live: int = 0, rho: float = 0.0) -> Selection:
    """The candidates that run. `live`: requests that can still meet their SLO (the N of the paper's Eq. 5).

    `rho`: what one KV unit's worth of tokens, run from compact cache, adds to a step: seconds when values are seconds.
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
    """`order`: candidates of which some form fits, by the density of their first increment; `first`: the units of it,
    `whole`: of their KV. `num_before`: how many of them go before the upgrades. The best one alone: `best_index`."""

    order: list[int]
    first: list[int]
    whole: list[int]
    num_before: int
    best_value: float
    best_index: int


def _rank(columns: Columns, capacity: int, penalty: float) -> _Ranked:
    """One pass and one sort."""
    values, kv, compact = columns
    smaller = (compact > 0) & (compact < kv)
    whole, part = 1, 0
    if smaller.any():
        sample = int(smaller.argmax())
        whole, part = int(kv[sample]), int(compact[sample])
        assert (compact[smaller] * whole == kv[smaller] * part).all(), "compact forms take different shares of their KV"
    bar = penalty * whole / (whole - part)  # density of an upgrade; of the KV from which on compact is admissible
    offset = penalty * whole / part if part else 0.0
    is_compact = smaller & ((kv > capacity) | (values >= bar * kv))
    units = np.where(is_compact, compact, kv)
    worth = np.where(kv <= capacity, values, values - penalty * kv)
    found = np.flatnonzero((units <= capacity) & (worth >= 0.0))
    if not len(found):
        return _Ranked([], [], [], 0, -1.0, -1)
    density = values / units - np.where(is_compact, offset, 0.0)
    order = found[np.argsort(-density[found], kind="stable")]
    # An admissible compact form may miss the bar by a rounding error.
    num_before = int(np.searchsorted(-density[order], -bar * (1.0 - ROUNDING), side="right")) if part else 0
    best = int(found[worth[found].argmax()])
    return _Ranked(order.tolist(), units[order].tolist(), kv[order].tolist(), num_before, float(worth[best]), best)


def _fill(columns: Columns, ranked: _Ranked, capacity: int, penalty: float, single: int | None) -> Selection:
    """Take the increments in order, past misfits; `single` is taken before all others, in its richest form.

    `held`: units by place in the order.
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
    """First increments while there is room for any; returns what is left."""
    least = min(first[places.start : places.stop], default=0)
    for place in places:
        if left < least:
            break
        if (units := first[place]) <= left and place not in held:
            held[place] = units
            left -= units
    return left


def _top_up(columns: Columns, ranked: _Ranked, held: dict[int, int], left: int, penalty: float) -> int:
    """Give what is left to candidates whose KV did not fit, as compact where that still has a value."""
    values, kv, compact = (column[ranked.order].tolist() for column in columns)
    for place in range(len(ranked.order)):
        units = compact[place]
        if not units or units > left or place in held:
            continue
        # (a compact form that saves nothing does not come this far: its KV would have fitted)
        if values[place] > penalty * kv[place]:
            held[place] = units
            left -= units
    return left
