"""Which requests start when memory is short, and from which representation (Apt-Serve §4.2-§5; `goodput` is ours).

Requests that run keep their place while they fit. Those that wait compete for what is free or can be taken from offline
work: `select_apt` and `select_goodput` value them, `engine.scheduling.knapsack` chooses. Until the demand exceeds the
room nothing here is called, and requests start in the order of the policy, from KV.

What running a request is worth is its pending time (Apt-Serve §4.2), or one point (`goodput`). Both demote a request
that has missed its SLO, by one knob, `tail`: it counts with `tail` times its pending time, so that after 1/tail
objectives of waiting it is worth as much as any that can still be saved. 0 is the paper's near-zero constant, the best
attainment, and starves about a tenth; 0.4 is the paper's decayed variant (§6.6). Also Apt-Serve's vote on the type of
an iteration (§5), for schedulers without chunked prefill.

Thousands may wait and a step is a few milliseconds, so the queue is handled by columns; what differs from request to
request by more than arrival and length (those that were preempted) is filled in one by one.
"""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.cache.blocks import COMPACT, REPRESENTATIONS, CacheKind, count_units
from engine.request import Request
from engine.scheduling.knapsack import Columns, Selection, choose
from predictor.features import BatchFeatures
from predictor.limits import UNITS_PER_BLOCK
from predictor.model import LatencyPredictor

DEFAULT_TAIL = 0.4
EPSILON = 1e-6
"""What a request is worth that has missed its SLO, at least: more than nothing, less than any that can be saved."""
DEFAULT_TTFT = 1.0
KV_PER_COMPACT = UNITS_PER_BLOCK // REPRESENTATIONS[COMPACT].units
GRAIN = 16
"""Tokens to which a prompt is rounded up when its time is predicted."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the choice depends on. `capacity`: device units that online requests could get now, `compact_blocks`: how
    many more blocks may be run from hidden state (0: none is offered). `rho`: seconds that a KV unit's worth of tokens
    adds to the steps in which it is run from hidden state, all together. `ttft`, `tbt`: limits in seconds, infinite
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

    def less(self, starts: Iterable["Start"]) -> "Pressure":
        """What is left once these have started."""
        units = compact = 0
        for request, kind, _ in starts:
            blocks = len(request.token_ids) // self.block_size + 1
            units += blocks * REPRESENTATIONS[kind].units
            compact += blocks * REPRESENTATIONS[kind].compact
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
    """One point for everybody who can still meet the SLO if started now; the others by `tail`, at 0 next to nothing."""
    unit = pressure.ttft if math.isfinite(pressure.ttft) else DEFAULT_TTFT
    queue = _transposed(waiting, pressure)
    savable = _savable(queue, pressure)
    values = goodput_values(queue.pending, savable, unit, tail)
    return _chosen(queue, values, savable, pressure, pressure.rho / unit, tail)


class _Queue(NamedTuple):
    """The waiting requests, transposed. `pending`: seconds since the last token or arrival; `slack`: until the SLO is
    broken, below zero where it is, `hopeful`: where it is not; `kv`, `compact`: device units of the whole known length
    and the next token in each form (what is parked comes back as it was stored: `compact` is None); `missing`: tokens
    to compute up to the next new one."""

    requests: Sequence[Request]
    pending: list[float]
    slack: list[float]
    hopeful: list[bool]
    kv: list[int]
    compact: list[int | None]
    missing: list[int]


def _transposed(waiting: Sequence[Request], pressure: Pressure) -> _Queue:
    now, ttft, size = pressure.now, pressure.ttft, pressure.block_size
    pending = [now - request.times.arrival for request in waiting]
    lengths = [request.num_prompt_tokens for request in waiting]
    missing = [request.num_prompt_tokens - request.num_expected_hits for request in waiting]
    slack = [ttft - time for time in pending]
    hopeful = [time <= ttft for time in pending]
    kv = [(length // size + 1) * UNITS_PER_BLOCK for length in lengths]
    compact: list[int | None] = [None] * len(kv)
    if pressure.compact_blocks > 0:
        compact = [units // KV_PER_COMPACT for units in kv]
    queue = _Queue(waiting, pending, slack, hopeful, kv, compact, missing)
    for index in [index for index, request in enumerate(waiting) if request.num_preemptions]:
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
    blocks = length // pressure.block_size + 1
    queue.kv[index] = blocks * UNITS_PER_BLOCK
    if cache_map.blocks:
        queue.kv[index] = (
            count_units(cache_map.blocks) + (blocks - len(cache_map.blocks)) * REPRESENTATIONS[cache_map.kind].units
        )
        queue.compact[index] = None
    elif queue.compact[index] is not None:
        queue.compact[index] = queue.kv[index] // KV_PER_COMPACT


def _has_hope(request: Request, pressure: Pressure) -> bool:
    times = request.times
    missed = has_missed(
        pressure.now, times.arrival, times.first_token, times.last_token, ttft=pressure.ttft, tbt=pressure.tbt
    )
    return not missed


def _savable(queue: _Queue, pressure: Pressure) -> list[bool]:
    """Who would have its next token in time, by the latency model, if it ran from now on."""
    model = pressure.model
    if model is None:
        return queue.hopeful
    beside = BatchFeatures()
    beside.add_decodes(len(pressure.running), sum(request.num_computed_tokens for request in pressure.running))
    base, chunk = model.predict(beside), pressure.max_chunk
    grains = [length // GRAIN for length in queue.missing]
    seconds = {
        grain: seconds_to_token(model, base, beside, 0, (grain + 1) * GRAIN, chunk)
        for grain in {grain for grain, hope in zip(grains, queue.hopeful, strict=True) if hope}
    }
    savable = [
        hope and slack >= seconds[grain] for hope, slack, grain in zip(queue.hopeful, queue.slack, grains, strict=True)
    ]
    for index in [index for index, request in enumerate(queue.requests) if request.cache_map.num_parked_tokens]:
        request, slack = queue.requests[index], queue.slack[index]
        stored, length = request.cache_map.num_parked_tokens, queue.missing[index]
        savable[index] = slack >= seconds_to_token(model, base, beside, stored, length, chunk)
    return savable


def _chosen(
    queue: _Queue, values: list[float], savable: list[bool], pressure: Pressure, rho: float, tail: float
) -> list[Start]:
    """The knapsack's answer, best first; compact forms only while the scratch area lasts.

    Hidden state is not for those that have missed their SLO: every step would be slower for those that have not.
    """
    indices = _in_reach(queue.kv, savable, pressure.capacity) if tail == 0.0 else range(len(values))
    worth, kv = [values[i] for i in indices], [queue.kv[i] for i in indices]
    compact = [queue.compact[i] if savable[i] else None for i in indices]
    # With nobody left to save a step still costs time: else all that are late would run from hidden state for nothing.
    live = max(1, sum(savable) + sum(_has_hope(request, pressure) for request in pressure.running))
    selection: Selection = choose(Columns(worth, kv, compact), pressure.capacity, live=live, rho=rho)
    if sum(compact[index] or 0 for index in selection.compact) > pressure.compact_blocks:
        # The best of them may have the scratch area; the others compete again, for KV alone.
        allowed, room = set(), pressure.compact_blocks
        for index in selection.compact:
            if (compact[index] or 0) <= room:
                room -= compact[index] or 0
                allowed.add(index)
        compact = [units if index in allowed else None for index, units in enumerate(compact)]
        selection = choose(Columns(worth, kv, compact), pressure.capacity, live=live, rho=rho)
    chosen = [(index, CacheKind.KV) for index in selection.kv]
    chosen += [(index, COMPACT) for index in selection.compact]
    chosen.sort(key=lambda item: -worth[item[0]] / kv[item[0]])
    return [Start(queue.requests[indices[index]], kind, savable[indices[index]]) for index, kind in chosen]


def _in_reach(kv: Sequence[int], savable: Sequence[bool], capacity: int) -> list[int]:
    """Where late requests are worth next to nothing, and all the same: the savable ones, and of the late ones the
    smallest that have room together. The knapsack would take no other."""
    late = [index for index, hope in enumerate(savable) if not hope and kv[index] <= capacity]
    late.sort(key=kv.__getitem__)
    found = [index for index, hope in enumerate(savable) if hope]
    for index in late:
        capacity -= kv[index]
        if capacity < 0:
            break
        found.append(index)
    found.sort()
    return found


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
    model is linear: the middle one, times their number.
    """
    full, rest = divmod(length, chunk)
    seconds = 0.0
    if full:
        seconds += full * (base + model.marginal(beside, start + chunk * (full - 1) // 2, chunk))
    if rest:
        seconds += base + model.marginal(beside, start + full * chunk, rest)
    return seconds


def apt_values(pending: Sequence[float], savable: Sequence[bool], tail: float = DEFAULT_TAIL) -> list[float]:
    """The paper's values, in seconds: the pending times that running ends. `savable`: who has not missed its SLO."""
    return [time if hope else (max(EPSILON, tail * time)) for time, hope in zip(pending, savable, strict=True)]


def goodput_values(
    pending: Sequence[float], savable: Sequence[bool], ttft: float, tail: float = DEFAULT_TAIL
) -> list[float]:
    """1 for who can still meet its SLO. `ttft` > 0: the objective; the values count in units of it, and so must ρ:
    divide seconds by `ttft`, or by 1 s when none is stated."""
    share = tail / ttft
    return [1.0 if hope else (max(EPSILON, share * time)) for time, hope in zip(pending, savable, strict=True)]


class IterationType(enum.Enum):
    """What one iteration runs when prompts are not chunked into the steps of the decodes."""

    PREFILL = "prefill"
    DECODE = "decode"


def vote(waiting: Iterable[tuple[float, bool]], running: Iterable[tuple[float, bool]]) -> IterationType:
    """The queue with the larger sum of pending times decides; equal sums decode. Items: (pending time, savable).

    Who has missed its SLO has no vote; all have one when nobody else does. An empty queue never wins.
    """
    waiting, running = list(waiting), list(running)
    if not waiting or not running:
        return IterationType.PREFILL if waiting else IterationType.DECODE
    only_savable = any(savable for _, savable in (*waiting, *running))
    urgent_waiting, urgent_running = (
        sum(pending for pending, savable in queue if savable or not only_savable) for queue in (waiting, running)
    )
    return IterationType.PREFILL if urgent_waiting > urgent_running else IterationType.DECODE
