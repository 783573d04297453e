"""Which requests start when memory is short, and from which representation (Apt-Serve §4.2-§5; `goodput` is ours).

Requests that run keep their place while they fit. Those that wait compete for what is free or can be taken from offline
work: `select_apt` and `select_goodput` value them, `engine.scheduling.knapsack` chooses. Until the demand exceeds the
room nothing here is called, and requests start in the order of the policy, from KV.

What running a request is worth is its pending time (Apt-Serve §4.2), or one point (`goodput`). Both demote a request
that has missed its SLO, by one knob, `tail`: it counts with `tail` times its pending time, so that after 1/tail
objectives of waiting it is worth as much as any that can still be saved. 0 is the paper's near-zero constant, the best
attainment, and starves about a tenth; 0.4 is the paper's decayed variant (§6.6).

Thousands may wait and a step is a few milliseconds, so the queue is handled by columns; what differs from request to
request by more than arrival and length (those that were preempted) is filled in one by one.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.cache.blocks import COMPACT, CacheKind, count_units
from engine.request import Request
from engine.scheduling.knapsack import Columns, Floats, Ints, Selection, choose
from engine.scheduling.waiting import Bools, columns_of
from predictor.features import BatchFeatures
from predictor.limits import UNITS_PER_BLOCK
from predictor.model import LatencyPredictor

DEFAULT_TAIL = 0.4
EPSILON = 1e-6
"""What a request is worth that has missed its SLO, at least: more than nothing, less than any that can be saved."""
DEFAULT_TTFT = 1.0
KV_PER_COMPACT = UNITS_PER_BLOCK // COMPACT.form.units
GRAIN = 16
"""Tokens to which a prompt is rounded up when its time is predicted."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the choice depends on. `capacity`: device units that online requests could get now, `compact_blocks`: how
    many more blocks may be run from hidden state (0: none is offered). `rho`: seconds that a KV unit's worth of
    tokens adds to the steps in which it is run from that form, all together. `ttft`, `tbt`: limits in seconds, infinite
    where none is stated.
    """

    now: float
    running: Sequence[Request]
    capacity: int
    block_size: int
    compact_blocks: int = 0
    rho: float = 0.0
    ttft: float = math.inf
    tbt: float = math.inf
    model: LatencyPredictor | None = None
    max_chunk: int = 512
    most_blocks: int = sys.maxsize

    def less(self, starts: Iterable["Start"]) -> "Pressure":
        """What is left once these have started."""
        units = compact = 0
        for request, kind, _ in starts:
            blocks = min(len(request.token_ids) // self.block_size + 1, self.most_blocks)
            units += blocks * kind.form.units
            compact += blocks * (kind is COMPACT)
        return replace(self, capacity=self.capacity - units, compact_blocks=self.compact_blocks - compact)


class Start(NamedTuple):
    """A waiting request that was chosen, what it stores, and whether it can still meet its SLO."""

    request: Request
    kind: CacheKind
    savable: bool


Select = Callable[[Sequence[Request], Pressure], list[Start]]


def select_apt(waiting: Sequence[Request], pressure: Pressure, tail: float = DEFAULT_TAIL) -> list[Start]:
    """By pending time; a request that has missed its SLO counts for `tail` of it (the paper's fallback)."""
    queue = _transposed(waiting, pressure)
    values = apt_values(queue.pending, queue.hopeful, tail)
    return _chosen(queue, values, queue.hopeful, pressure, pressure.rho, tail)


def select_goodput(waiting: Sequence[Request], pressure: Pressure, tail: float = DEFAULT_TAIL) -> list[Start]:
    """One point for each that can still meet the SLO if started now; the others by `tail`, at 0 next to nothing."""
    unit = pressure.ttft if math.isfinite(pressure.ttft) else DEFAULT_TTFT
    queue = _transposed(waiting, pressure)
    savable = _savable(queue, pressure)
    values = goodput_values(queue.pending, savable, unit, tail)
    return _chosen(queue, values, savable, pressure, pressure.rho / unit, tail)


class _Queue(NamedTuple):
    """The waiting requests, transposed. `pending`: seconds since the last token or arrival; `slack`: until the SLO is
    broken, below zero where it is, `hopeful`: where it is not; `kv`, `compact`: device units of the whole known length
    and the next token in each form (what is parked comes back as it was stored: `compact` is 0); `missing`: tokens
    to compute up to the next new one; `began`: which of them have run before."""

    requests: Sequence[Request]
    pending: Floats
    slack: Floats
    hopeful: Bools
    kv: Ints
    compact: Ints
    missing: Ints
    began: list[int]


def _transposed(waiting: Sequence[Request], pressure: Pressure) -> _Queue:
    columns = columns_of(waiting)
    pending = pressure.now - columns.arrivals
    kv = np.minimum(columns.lengths // pressure.block_size + 1, pressure.most_blocks) * UNITS_PER_BLOCK
    compact = kv // KV_PER_COMPACT if pressure.compact_blocks > 0 else np.zeros_like(kv)
    began = np.flatnonzero(columns.began).tolist()
    slack, hopeful = pressure.ttft - pending, pending <= pressure.ttft
    queue = _Queue(waiting, pending, slack, hopeful, kv, compact, columns.missing.copy(), began)
    for index in began:
        _correct(queue, index, waiting[index], pressure)
    return queue


def _correct(queue: _Queue, index: int, request: Request, pressure: Pressure) -> None:
    """The row of a request that has run before."""
    times, length, cache_map = request.times, len(request.token_ids), request.cache_map
    queue.pending[index] = pending = pending_time(pressure.now, times.arrival, times.last_token)
    queue.hopeful[index] = hope = _has_hope(request, pressure)
    limit = pressure.ttft if times.last_token is None else pressure.tbt
    queue.slack[index] = limit - pending if hope else -math.inf
    queue.missing[index] = max(1, length - cache_map.num_parked_tokens)
    blocks = min(length // pressure.block_size + 1, pressure.most_blocks)
    queue.kv[index] = blocks * UNITS_PER_BLOCK
    if cache_map.blocks:
        missing = (blocks - len(cache_map.blocks)) * cache_map.kind.form.units
        queue.kv[index] = count_units(cache_map.blocks) + missing
        queue.compact[index] = 0
    elif queue.compact[index]:
        queue.compact[index] = queue.kv[index] // KV_PER_COMPACT


def _has_hope(request: Request, pressure: Pressure) -> bool:
    times = request.times
    missed = has_missed(
        pressure.now, times.arrival, times.first_token, times.last_token, ttft=pressure.ttft, tbt=pressure.tbt
    )
    return not missed


def _savable(queue: _Queue, pressure: Pressure) -> Bools:
    """Who would have its next token in time, by the latency model, if it ran from now on."""
    model = pressure.model
    if model is None or not len(queue.requests):
        return queue.hopeful
    beside = BatchFeatures(model.reach)
    contexts = model.reach.contexts([request.num_computed_tokens for request in pressure.running])
    beside.add_decodes(len(pressure.running), contexts)
    base, chunk = model.predict(beside), pressure.max_chunk
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


def _chosen(queue: _Queue, values: Floats, savable: Bools, pressure: Pressure, rho: float, tail: float) -> list[Start]:
    """The knapsack's answer, best first; compact forms only while the scratch area lasts.

    Hidden state is not for those that have missed their SLO: every step would be slower for those that have not.
    """
    indices = _in_reach(queue.kv, savable, pressure.capacity) if tail == 0.0 else np.arange(len(values))
    columns = Columns(values[indices], queue.kv[indices], np.where(savable, queue.compact, 0)[indices])
    # With none left to save, a step still costs time: else all that are late would run from hidden state for nothing.
    live = max(1, int(savable.sum()) + sum([_has_hope(request, pressure) for request in pressure.running]))
    selection: Selection = choose(columns, pressure.capacity, live=live, rho=rho)
    if sum(int(columns.compact[index]) for index in selection.compact) > pressure.compact_blocks:
        # The best of them may have the scratch area; the others compete again, for KV alone.
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


def _in_reach(kv: Ints, savable: Bools, capacity: int) -> Ints:
    """Where late requests are worth next to nothing, and all the same: the savable ones, and of the late ones the
    smallest that have room together. The knapsack would take no other."""
    late = np.flatnonzero(~savable)
    late = late[np.argsort(kv[late], kind="stable")]
    few = late[: int(np.searchsorted(kv[late].cumsum(), capacity, side="right"))]
    return np.sort(np.concatenate((np.flatnonzero(savable), few)))


def pending_time(now: float, arrival: float, last_token: float | None) -> float:
    """Seconds since its last token, or since its arrival before the first one (p of Apt-Serve's Eq. 5)."""
    return max(0.0, now - (arrival if last_token is None else last_token))


def has_missed(
    now: float, arrival: float, first_token: float | None, last_token: float | None, *, ttft: float, tbt: float
) -> bool:
    """Whether the SLO is broken as the clock stands: the first token came or is late, or the next one is."""
    if first_token is None or last_token is None:
        return now - arrival > ttft
    return first_token - arrival > ttft or now - last_token > tbt


def seconds_to_token(
    model: LatencyPredictor, base: float, beside: BatchFeatures, start: int, length: int, chunk: int
) -> float:
    """Predicted seconds until a request has its next token if it runs from now on.

    `beside`: the decodes that run in the same steps; `base`: `model.predict(beside)`. `start` computed tokens, `length`
    ≥ 1 still to be computed, at most `chunk` in a step. Steps differ only in their start, in which every term of the
    model is linear up to a window: the middle one, times their number.
    """
    full, rest = divmod(length, chunk)
    seconds = 0.0
    if full:
        for share, middle in model.reach.middles(start, full * chunk, chunk):
            seconds += full * share * (base + model.marginal(beside, middle, chunk))
    if rest:
        seconds += base + model.marginal(beside, start + full * chunk, rest)
    return seconds


def apt_values(pending: Floats, savable: Bools, tail: float = DEFAULT_TAIL) -> Floats:
    """The paper's values, in seconds: the pending times that running ends. `savable`: the SLO is not missed yet."""
    return np.where(savable, pending, np.maximum(EPSILON, tail * pending))


def goodput_values(pending: Floats, savable: Bools, ttft: float, tail: float = DEFAULT_TAIL) -> Floats:
    """1 for one that can still meet its SLO. `ttft` > 0: the objective; the values count in units of it, and so must ρ:
    divide seconds by `ttft`, or by 1 s when none is stated."""
    return np.where(savable, 1.0, np.maximum(EPSILON, tail / ttft * pending))
