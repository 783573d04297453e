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
topped up with compact forms. `choose_options` does the same over convex hulls for any number of forms and any costs.

Pure and deterministic: equal densities keep the order of the input. Knows nothing of requests, steps or time.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ROUNDING = 1e-9


class Candidate(NamedTuple):
    """A request that wants to run. `value` ≥ 0 (see engine.scheduling.values), any unit that `rho` shares.

    `kv_units` ≥ 1: device units of its whole past and the growth of this step, in KV. `compact_units`: the same in
    compact form; None where that is refused (so is a form that is not smaller).
    """

    value: float
    kv_units: int
    compact_units: int | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """Indices of the candidates that run, from KV and from compact cache, best first; their sum of values (penalties
    deducted) and of units."""

    kv: tuple[int, ...]
    compact: tuple[int, ...]
    value: float
    units: int


class Option(NamedTuple):
    """One form in which a candidate could run: its device units (≥ 1), and its value with all costs deducted."""

    units: int
    value: float


@dataclass(frozen=True, slots=True)
class OptionSelection:
    """(candidate, option) indices of those that run, best first; their sum of values and of units."""

    chosen: tuple[tuple[int, int], ...]
    value: float
    units: int


def choose(candidates: Sequence[Candidate], capacity: int, *, live: int = 0, rho: float = 0.0) -> Selection:
    """The candidates that run. `live`: requests that can still meet their SLO (the N of the paper's Eq. 5).

    `rho`: what one KV unit's worth of tokens, run from compact cache, adds to a step: seconds when values are seconds
    (`RestoreCosts.rho_per_unit` has it). Candidates of different ratios go through `choose_options`.
    """
    columns = Columns(*zip(*candidates, strict=True)) if candidates else Columns((), (), ())
    return choose_columns(columns, capacity, live=live, rho=rho)


class Columns(NamedTuple):
    """Candidates, transposed: several times faster to make and to index than the rows."""

    values: Sequence[float]
    kv: Sequence[int]
    compact: Sequence[int | None]


def choose_columns(columns: Columns, capacity: int, *, live: int = 0, rho: float = 0.0) -> Selection:
    """`choose`, of candidates in columns."""
    total = sum(columns.kv)
    if total <= capacity:
        return Selection(tuple(range(len(columns.kv))), (), math.fsum(columns.values), total)
    penalty = live * rho
    ranked = _rank(columns, capacity, penalty)
    if ranked is None:
        options = [run_options(Candidate(*row), penalty) for row in zip(*columns, strict=True)]
        return _as_selection(choose_options(options, capacity))
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


def _rank(columns: Columns, capacity: int, penalty: float) -> _Ranked | None:
    """One pass and one sort; None when the ratios of the candidates differ."""
    densities, first, order = [0.0] * len(columns.kv), [0] * len(columns.kv), []
    best_value, best_index = -1.0, -1
    whole, part = next(((m, c) for _, m, c in zip(*columns, strict=True) if c is not None and c < m), (1, 0))
    bar = penalty * whole / (whole - part)  # density of an upgrade; of the KV from which on compact is admissible
    offset = penalty * whole / part if part else 0.0
    for index, (value, kv, compact) in enumerate(zip(*columns, strict=True)):
        units = kv
        if compact is not None and compact < kv:
            if compact * whole != kv * part:
                return None
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


def run_options(
    candidate: Candidate, penalty: float, *, kv_cost: float = 0.0, compact_cost: float = 0.0
) -> tuple[Option, ...]:
    """A candidate's forms for `choose_options`, KV first. `penalty`: live · rho. `kv_cost`, `compact_cost`: what it
    costs once to bring its past into the form (restore, swap in, recompute), in the unit of the values."""
    value, kv, compact = candidate
    options = (Option(kv, value - kv_cost),)
    if compact is None or compact >= kv:
        return options
    return (*options, Option(compact, value - penalty * kv - compact_cost))


def choose_options(candidates: Sequence[Sequence[Option]], capacity: int) -> OptionSelection:
    """The candidates that run and the form of each: greedy over the increments of their convex hulls.

    A form of negative value is never taken, so a candidate may have none.
    """
    hulls = [_hull(options, capacity) for options in candidates]
    increments = sorted(_increments(hulls))
    chosen = _fill_options(candidates, hulls, increments, capacity, None)
    best_value, best = max(((hull[-1][1], -index) for index, hull in enumerate(hulls) if hull), default=(-1.0, 0))
    if best_value > chosen.value:
        alone = _fill_options(candidates, hulls, increments, capacity, -best)
        chosen = alone if alone.value > chosen.value else chosen
    return chosen


_Increment = tuple[float, int, int, int]
"""(minus density, candidate, level, units): one step up a hull. Sorts best first, then by the order of the input."""

_Hull = list[tuple[int, float, int]]
"""(units, value, option) of the levels above "does not run", densities falling."""


def _hull(options: Sequence[Option], capacity: int) -> _Hull:
    """The upper convex hull over (0, 0) of the forms that fit alone; of equal values the largest form is the last."""
    hull: _Hull = []
    rows = [(units, value, option) for option, (units, value) in enumerate(options) if units <= capacity]
    rows.sort()
    for units, value, option in rows:
        if value < (hull[-1][1] if hull else 0.0):
            continue
        while hull:
            below_units, below_value = hull[-2][:2] if len(hull) > 1 else (0, 0.0)
            last_units, last_value, _ = hull[-1]
            rise, run = value - below_value, units - below_units
            if last_units < units and (last_value - below_value) * run > rise * (last_units - below_units):
                break
            hull.pop()
        hull.append((units, value, option))
    return hull


def _increments(hulls: list[_Hull]) -> Iterator[_Increment]:
    for candidate, hull in enumerate(hulls):
        held_units, held_value = 0, 0.0
        for level, (units, value, _) in enumerate(hull):
            yield (held_value - value) / (units - held_units), candidate, level, units - held_units
            held_units, held_value = units, value


def _fill_options(
    candidates: Sequence[Sequence[Option]],
    hulls: list[_Hull],
    increments: list[_Increment],
    capacity: int,
    single: int | None,
) -> OptionSelection:
    """Take the increments in order, past misfits; `single` is taken before all others, at its highest level."""
    levels = [-1] * len(hulls)
    left = capacity
    if single is not None:
        levels[single] = len(hulls[single]) - 1
        left -= hulls[single][-1][0]
    order: dict[int, None] = {} if single is None else {single: None}
    for _, index, level, units in increments:
        order.setdefault(index)
        # A level stands on the one below it: whoever could not have that stays where it is.
        if units <= left and levels[index] == level - 1:
            levels[index] = level
            left -= units
    chosen: list[tuple[int, int]] = []
    value = 0.0
    for index in order:
        level = levels[index]
        held = hulls[index][level] if level >= 0 else (0, -1.0, -1)
        if left:
            richer = _best_within(candidates[index], held, held[0] + left)
            left -= richer[0] - held[0]
            held = richer
        if held[2] >= 0:
            value += held[1]
            chosen.append((index, held[2]))
    return OptionSelection(tuple(chosen), value, capacity - left)


def _best_within(options: Sequence[Option], held: tuple[int, float, int], room: int) -> tuple[int, float, int]:
    """The most valuable form of at most `room` units, on the hull or not; what is held unless it is worth more."""
    for option, (units, value) in enumerate(options):
        if units <= room and value >= 0.0 and value > held[1]:
            held = (units, value, option)
    return held


def _as_selection(selection: OptionSelection) -> Selection:
    kv = tuple([index for index, option in selection.chosen if option == 0])
    compact = tuple([index for index, option in selection.chosen if option == 1])
    return Selection(kv, compact, selection.value, selection.units)
