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
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Selection:
    """Indices of the candidates that run, from KV and from compact cache, best first; their sum of values (penalties
    deducted) and of units."""

    kv: tuple[int, ...]
    compact: tuple[int, ...]
    value: float
    units: int


class Columns(NamedTuple):
    """The requests that want to run, transposed: several times faster to make and to index than rows.

    `values` ≥ 0 (see engine.scheduling.selection), in any unit that `rho` shares. `kv` ≥ 1: device units of the whole
    past and the growth of this step, in KV. `compact`: the same in compact form, the same share of `kv` for all; None
    where that is refused (so is a form that is not smaller).
    """

    values: Sequence[float]
    kv: Sequence[int]
    compact: Sequence[int | None]


def choose(columns: Columns, capacity: int, *, live: int = 0, rho: float = 0.0) -> Selection:
    """The candidates that run. `live`: requests that can still meet their SLO (the N of the paper's Eq. 5).

    `rho`: what one KV unit's worth of tokens, run from compact cache, adds to a step: seconds when values are seconds.
    """
    total = sum(columns.kv)
    if total <= capacity:
        return Selection(tuple(range(len(columns.kv))), (), math.fsum(columns.values), total)
    penalty = live * rho
    ranked = _rank(columns, capacity, penalty)
    chosen = _fill(columns, ranked, capacity, penalty, None)
    if ranked.best_value > chosen.value:
        alone = _fill(columns, ranked, capacity, penalty, ranked.best_index)
        chosen = alone if alone.value > chosen.value else chosen
    return chosen


class _Ranked(NamedTuple):
    """`order`: candidates of which some form fits, by the density of their first increment. `num_before`: how many of
    them go before the upgrades. `first`: units of each candidate's first increment."""

    order: list[int]
    num_before: int
    first: list[int]
    best_value: float
    best_index: int


def _rank(columns: Columns, capacity: int, penalty: float) -> _Ranked:
    """One pass and one sort."""
    densities, first, order = [0.0] * len(columns.kv), [0] * len(columns.kv), []
    best_value, best_index = -1.0, -1
    whole, part = next(((m, c) for _, m, c in zip(*columns, strict=True) if c is not None and c < m), (1, 0))
    bar = penalty * whole / (whole - part)  # density of an upgrade; of the KV from which on compact is admissible
    offset = penalty * whole / part if part else 0.0
    for index, (value, kv, compact) in enumerate(zip(*columns, strict=True)):
        units = kv
        if compact is not None and compact < kv:
            assert compact * whole == kv * part, "compact forms take different shares of their KV"
            if kv > capacity or value >= bar * kv:
                units = compact
        if units > capacity:
            continue
        worth = value if kv <= capacity else value - penalty * kv
        if worth < 0.0:
            continue
        if worth > best_value:
            best_value, best_index = worth, index
        densities[index] = value / units - offset if units < kv else value / kv
        first[index] = units
        order.append(index)
    order.sort(key=densities.__getitem__, reverse=True)
    # An admissible compact form may miss the bar by a rounding error.
    num_before = bisect_right(order, -bar * (1.0 - ROUNDING), key=lambda index: -densities[index]) if part else 0
    return _Ranked(order, num_before, first, best_value, best_index)


def _fill(columns: Columns, ranked: _Ranked, capacity: int, penalty: float, single: int | None) -> Selection:
    """Take the increments in order, past misfits; `single` is taken before all others, in its richest form."""
    order, num_before, first, _, _ = ranked
    kv = columns.kv
    held = [0] * len(kv)
    left = capacity
    if single is not None:
        held[single] = kv[single] if kv[single] <= capacity else first[single]
        left -= held[single]
    before = order[:num_before]
    for index in before:
        if (units := first[index]) <= left and not held[index]:
            held[index] = units
            left -= units
    for index in before:
        if held[index] and (step := kv[index] - held[index]) <= left:
            held[index] = kv[index]
            left -= step
    for index in order[num_before:]:
        if (units := first[index]) <= left and not held[index]:
            held[index] = units
            left -= units
    if left:
        left = _top_up(columns, order, held, left, penalty)
    taken = [index for index in order if held[index]]
    compact = [index for index in taken if held[index] < kv[index]]
    value = math.fsum([columns.values[index] for index in taken]) - penalty * sum([kv[index] for index in compact])
    whole = tuple([index for index in taken if held[index] == kv[index]])
    return Selection(whole, tuple(compact), value, capacity - left)


def _top_up(columns: Columns, order: list[int], held: list[int], left: int, penalty: float) -> int:
    """Give what is left to candidates whose KV did not fit, as compact where that still has a value."""
    values, kv, compact = columns
    for index in order:
        units = compact[index]
        if units is None or units > left or held[index]:
            continue
        # (a compact form that saves nothing does not come this far: its KV would have fitted)
        if values[index] > penalty * kv[index]:
            held[index] = units
            left -= units
    return left
