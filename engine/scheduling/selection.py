"""Selects the requests to start when memory is short, and their representation (Apt-Serve §4.2-§5; `goodput` is ours).

Running requests stay while they fit. Waiting requests compete for free memory and for memory that offline work can give
up: `select_apt` and `select_goodput` assign values, and `choose` solves a knapsack over cache units.

The value of a request is its pending time (Apt-Serve §4.2) or one point (`goodput`). Both demote a request that missed
its SLO to `tail` times its pending time, so after 1/tail objectives it is worth as much as a request that can still
meet its SLO. 0 is the paper's near-zero constant: the best attainment, but about a tenth of the requests starve. 0.4 is
the paper's decayed variant (§6.6). The queue is processed in columns, because thousands of requests may wait.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.api import RequestClass
from engine.arrays import BoolArray, FloatArray, IntArray
from engine.cache.blocks import COMPACT, CacheKind, count_units
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import Start, columns_of
from predictor.budget import DEFAULT_CLASS, Promise
from predictor.features import BatchFeatures, LatencyPredictor

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


DEFAULT_TAIL = 0.4
EPSILON = 1e-6
"""Minimum value of a request that has missed its SLO: above 0, below that of any request that can still meet it."""
DEFAULT_TTFT = 1.0
"""Unit of waiting time, in seconds, without a TTFT objective."""
KV_PER_COMPACT = UNITS_PER_BLOCK // COMPACT.form.units
GRAIN = 16
"""Prompt lengths are rounded up to a multiple of this when their time is predicted, in tokens."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Inputs of the selection, beside the state.

    Attributes:
        capacity: Device units available to online requests.
        compact_blocks: Further blocks that may run from hidden state; 0 if the model does not support it.
        rho: Seconds that the tokens of one KV unit, run from hidden state, add to all steps together.
    """

    state: SchedulerState
    now: float
    capacity: int
    compact_blocks: int = 0
    rho: float = 0.0

    def promise_to(self, request: Request) -> Promise:
        """Return the latency promised to a request, that of the default class if it has none of its own."""
        return request.spec.promise or Promise(DEFAULT_CLASS, self.state.objective.ttft, self.state.objective.tbt)

    def less(self, starts: Iterable[Start]) -> "Pressure":
        """Return the pressure after these requests have started."""
        units = compact = 0
        for request, kind, _ in starts:
            blocks = request.num_blocks(self.state.config.block_size)
            units += blocks * kind.form.units
            compact += blocks * (kind is COMPACT)
        return replace(self, capacity=self.capacity - units, compact_blocks=self.compact_blocks - compact)


def select_apt(waiting: Sequence[Request], pressure: Pressure, tail: float = DEFAULT_TAIL) -> list[Start]:
    """Select by pending time; a request that missed its SLO counts `tail` of it (the paper's fallback)."""
    queue = _transposed(waiting, pressure)
    values = apt_values(queue.pending, queue.hopeful, tail)
    return _chosen(queue, values, queue.hopeful, pressure, pressure.rho, tail)


def select_goodput(waiting: Sequence[Request], pressure: Pressure, tail: float = DEFAULT_TAIL) -> list[Start]:
    """Select with one point per request that meets its SLO if started now; a late one counts by `tail`."""
    unit = ttft_unit(pressure.state.objective.ttft)
    queue = _transposed(waiting, pressure)
    savable = _savable(queue, pressure)
    values = goodput_values(queue.pending, savable, unit, tail)
    return _chosen(queue, values, savable, pressure, pressure.rho / unit, tail)


class _Queue(NamedTuple):
    """The waiting requests in columns.

    Attributes:
        pending: Seconds since the last token, or since arrival.
        slack: Seconds until the SLO is missed; negative if it is already missed.
        hopeful: Whether the SLO is not missed yet.
        kv: Device units in KV for all known tokens and the next one.
        compact: The same in compact form; 0 for a request with parked blocks, which keep their form.
        missing: Tokens to compute before the next new one.
        began: Indices of requests that have run before.
    """

    requests: Sequence[Request]
    pending: FloatArray
    slack: FloatArray
    hopeful: BoolArray
    kv: IntArray
    compact: IntArray
    missing: IntArray
    began: list[int]


def _transposed(waiting: Sequence[Request], pressure: Pressure) -> _Queue:
    columns = columns_of(waiting)
    state, pending = pressure.state, pressure.now - columns.arrivals
    kv = np.minimum(columns.lengths // state.config.block_size + 1, state.config.most_blocks) * UNITS_PER_BLOCK
    compact = kv // KV_PER_COMPACT if pressure.compact_blocks > 0 else np.zeros_like(kv)
    began = np.flatnonzero(columns.began).tolist()
    slack, hopeful = state.objective.ttft - pending, pending <= state.objective.ttft
    queue = _Queue(waiting, pending, slack, hopeful, kv, compact, columns.missing.copy(), began)
    for index, request in enumerate(waiting) if state.promised else ():
        if request.spec.promise is not None:
            slack[index] = request.spec.promise.start - pending[index]
            hopeful[index] = slack[index] >= 0.0
    for index in began:
        _correct(queue, index, waiting[index], pressure)
    return queue


def _correct(queue: _Queue, index: int, request: Request, pressure: Pressure) -> None:
    """Fill in the row of a request that has run before."""
    times, cache_map = request.times, request.cache_map
    queue.pending[index] = pending = pending_time(pressure.now, times.arrival, times.last_token)
    queue.hopeful[index] = hope = _has_hope(request, pressure)
    promise = pressure.promise_to(request)
    limit = promise.start if times.last_token is None else promise.tbt
    queue.slack[index] = limit - pending if hope else -math.inf
    queue.missing[index] = max(1, len(request.token_ids) - cache_map.num_parked_tokens)
    blocks = request.num_blocks(pressure.state.config.block_size)
    queue.kv[index] = blocks * UNITS_PER_BLOCK
    if cache_map.blocks:
        missing = (blocks - len(cache_map.blocks)) * cache_map.kind.form.units
        queue.kv[index] = count_units(cache_map.blocks) + missing
        queue.compact[index] = 0
    elif queue.compact[index]:
        queue.compact[index] = queue.kv[index] // KV_PER_COMPACT


def _has_hope(request: Request, pressure: Pressure) -> bool:
    times, promise = request.times, pressure.promise_to(request)
    return not promise.is_missed(pressure.now, times.arrival, times.first_token, times.last_token)


def _savable(queue: _Queue, pressure: Pressure) -> BoolArray:
    """Return which requests would get their next token in time, by the latency model, if they ran from now on."""
    model, running = pressure.state.model, pressure.state.running[RequestClass.ONLINE]
    if model is None or not len(queue.requests):
        return queue.hopeful
    beside = BatchFeatures(model.reach)
    beside.add_decodes(len(running), model.reach.contexts([request.num_computed_tokens for request in running]))
    base, chunk = model.predict(beside), pressure.state.config.max_num_batched_tokens
    grains = queue.missing // GRAIN
    seconds = np.full(int(grains.max()) + 1, math.inf)
    for grain in np.flatnonzero(np.bincount(grains[queue.hopeful])).tolist():
        seconds[grain] = seconds_to_token(model, base, beside, 0, (grain + 1) * GRAIN, chunk)
    savable = queue.hopeful & (queue.slack >= seconds[grains])
    for index in queue.began:
        if stored := queue.requests[index].cache_map.num_parked_tokens:
            needed = seconds_to_token(model, base, beside, stored, int(queue.missing[index]), chunk)
            savable[index] = queue.slack[index] >= needed
    return savable


def _chosen(
    queue: _Queue, values: FloatArray, savable: BoolArray, pressure: Pressure, rho: float, tail: float
) -> list[Start]:
    """Return the knapsack's selection, best first. Compact forms are used only while the scratch area lasts.

    A request that missed its SLO never runs from hidden state: it would slow down the steps of the others.
    """
    indices = _in_reach(queue.kv, savable, pressure.capacity) if tail == 0.0 else np.arange(len(values))
    columns = Columns(values[indices], queue.kv[indices], np.where(savable, queue.compact, 0)[indices])
    # At least 1: compact form must cost something even if no request can meet its SLO any more.
    running = pressure.state.running[RequestClass.ONLINE]
    live = max(1, int(savable.sum()) + sum([_has_hope(request, pressure) for request in running]))
    selection: Selection = choose(columns, pressure.capacity, live=live, rho=rho)
    if sum(int(columns.compact[index]) for index in selection.compact) > pressure.compact_blocks:
        # The best compact candidates keep the scratch area; the others compete again with KV only.
        allowed, room = np.zeros_like(columns.compact), pressure.compact_blocks
        for index in selection.compact:
            if columns.compact[index] <= room:
                room -= int(columns.compact[index])
                allowed[index] = columns.compact[index]
        selection = choose(columns._replace(compact=allowed), pressure.capacity, live=live, rho=rho)
    chosen = [(index, CacheKind.KV) for index in selection.kv]
    chosen += [(index, COMPACT) for index in selection.compact]
    chosen.sort(key=lambda item: -columns.values[item[0]] / columns.kv[item[0]])
    places = indices.tolist()
    return [Start(queue.requests[places[index]], kind, bool(savable[places[index]])) for index, kind in chosen]


def _in_reach(kv: IntArray, savable: BoolArray, capacity: int) -> IntArray:
    """Return the savable requests, and the smallest late requests that fit together.

    With a tail of 0 all late requests have the same tiny value, so the knapsack would choose no others.
    """
    late = np.flatnonzero(~savable)
    late = late[np.argsort(kv[late], kind="stable")]
    few = late[: int(np.searchsorted(kv[late].cumsum(), capacity, side="right"))]
    return np.sort(np.concatenate((np.flatnonzero(savable), few)))


def pending_time(now: float, arrival: float, last_token: float | None) -> float:
    """Return the seconds since the last token, or since arrival before the first one (p in Apt-Serve's Eq. 5)."""
    return max(0.0, now - (arrival if last_token is None else last_token))


def seconds_to_token(
    model: LatencyPredictor, base: float, beside: BatchFeatures, start: int, length: int, chunk: int
) -> float:
    """Return the predicted seconds until a request gets its next token if it runs from now on.

    Steps differ only in the start of their chunk, in which the model is linear up to a window; so the middle step times
    their number gives the total.

    Args:
        base: `model.predict(beside)`.
        beside: Decodes in the same steps.
        start: Computed tokens.
        length: Tokens still to compute, ≥ 1.
        chunk: Maximum tokens per step.
    """
    full, rest = divmod(length, chunk)
    seconds = 0.0
    if full:
        for share, middle in model.reach.middles(start, full * chunk, chunk):
            seconds += full * share * (base + model.marginal(beside, middle, chunk))
    if rest:
        seconds += base + model.marginal(beside, start + full * chunk, rest)
    return seconds


def ttft_unit(ttft: float) -> float:
    """Return the unit of waiting time in seconds: the TTFT limit, if there is one."""
    return ttft if math.isfinite(ttft) else DEFAULT_TTFT


def apt_values(pending: FloatArray, savable: BoolArray, tail: float = DEFAULT_TAIL) -> FloatArray:
    """Return the paper's values: pending times in seconds. `savable`: the SLO is not missed yet."""
    return np.where(savable, pending, np.maximum(EPSILON, tail * pending))


def goodput_values(pending: FloatArray, savable: BoolArray, ttft: float, tail: float = DEFAULT_TAIL) -> FloatArray:
    """Return 1 for each request that can still meet its SLO, and less for the others.

    Values are in units of `ttft` > 0, and ρ must be too: divide seconds by `ttft`, or by 1 s without an objective.
    """
    return np.where(savable, 1.0, np.maximum(EPSILON, tail / ttft * pending))
