"""Who starts when memory is short, and from which representation (Apt-Serve §4.2-§5; `goodput` is ours).

Requests that run keep their place while they fit. Those that wait compete for what is free or can be taken from offline
work: `select_apt` and `select_goodput` value them, `engine.scheduling.knapsack` chooses. Until the demand exceeds the
room nobody calls this, and requests start in the order of the policy, from KV.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.cache_map import UNITS_PER_BLOCK, CacheKind
from engine.request import Request
from engine.scheduling.knapsack import Candidate, Selection, choose
from engine.scheduling.values import (
    APT_TAIL,
    GOODPUT_TAIL,
    apt_value,
    can_meet,
    goodput_value,
    has_missed,
    pending_time,
    seconds_to_token,
)
from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor

DEFAULT_TTFT = 1.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the choice depends on. `capacity`: device units that online requests could get now, `hidden_blocks`: how
    many more blocks may be run from hidden state (0: none is offered). `rho`: seconds that a KV unit's worth of tokens
    adds to the steps in which it is run from hidden state, all together. `ttft`, `tbt`: limits in seconds, infinite
    where none is stated.
    """

    now: float
    running: Sequence[Request]
    capacity: int
    block_size: int
    hidden_blocks: int = 0
    rho: float = 0.0
    ttft: float = math.inf
    tbt: float = math.inf
    model: LatencyPredictor | None = None
    max_chunk: int = 512


class Start(NamedTuple):
    """A waiting request that was chosen, what it stores, and whether it can still meet its SLO."""

    request: Request
    kind: CacheKind
    savable: bool


Select = Callable[[Sequence[Request], Pressure], list[Start]]


def select_apt(waiting: Sequence[Request], pressure: Pressure, tail: float = APT_TAIL) -> list[Start]:
    """By pending time; a request that has missed its SLO counts for `tail` of it (the paper's fallback)."""
    savable = [_has_hope(request, pressure) for request in waiting]
    values = [
        apt_value(pending_time(pressure.now, request.times.arrival, request.times.last_token), hope, tail)
        for request, hope in zip(waiting, savable, strict=True)
    ]
    return _chosen(waiting, values, savable, pressure, pressure.rho)


def select_goodput(waiting: Sequence[Request], pressure: Pressure, tail: float = GOODPUT_TAIL) -> list[Start]:
    """One point for everybody who can still meet the SLO if started now; the others by `tail`, at 0 next to nothing."""
    unit = pressure.ttft if math.isfinite(pressure.ttft) else DEFAULT_TTFT
    beside = BatchFeatures()
    beside.add_decodes(len(pressure.running), sum(request.num_computed_tokens for request in pressure.running))
    base = pressure.model.predict(beside) if pressure.model is not None else 0.0
    savable = [_is_savable(request, pressure, beside, base) for request in waiting]
    values = [
        goodput_value(pending_time(pressure.now, request.times.arrival, request.times.last_token), hope, unit, tail)
        for request, hope in zip(waiting, savable, strict=True)
    ]
    return _chosen(waiting, values, savable, pressure, pressure.rho / unit)


def _has_hope(request: Request, pressure: Pressure) -> bool:
    times = request.times
    missed = has_missed(
        pressure.now, times.arrival, times.first_token, times.last_token, ttft=pressure.ttft, tbt=pressure.tbt
    )
    return not missed


def _is_savable(request: Request, pressure: Pressure, beside: BatchFeatures, base: float) -> bool:
    if not _has_hope(request, pressure):
        return False
    times = request.times
    deadline = times.arrival + pressure.ttft if times.last_token is None else times.last_token + pressure.tbt
    if pressure.model is None or math.isinf(deadline):
        return True
    stored = request.num_parked_tokens
    length = max(1, len(request.token_ids) - stored)
    seconds = seconds_to_token(pressure.model, base, beside, stored, length, pressure.max_chunk)
    return can_meet(pressure.now, deadline, seconds)


def _chosen(
    waiting: Sequence[Request], values: Sequence[float], savable: Sequence[bool], pressure: Pressure, rho: float
) -> list[Start]:
    """The knapsack's answer, best first; compact forms only while the scratch area lasts."""
    candidates = [
        _candidate(request, value, hope, pressure)
        for request, value, hope in zip(waiting, values, savable, strict=True)
    ]
    # With nobody left to save a step still costs time: else all that are late would run from hidden state for nothing.
    live = max(1, sum(savable) + sum(_has_hope(request, pressure) for request in pressure.running))
    selection: Selection = choose(candidates, pressure.capacity, live=live, rho=rho)
    if sum(candidates[index].compact_units or 0 for index in selection.compact) > pressure.hidden_blocks:
        # The best of them may have the scratch area; the others compete again, for KV alone.
        allowed, room = set(), pressure.hidden_blocks
        for index in selection.compact:
            if (candidates[index].compact_units or 0) <= room:
                room -= candidates[index].compact_units or 0
                allowed.add(index)
        candidates = [each if i in allowed else each._replace(compact_units=None) for i, each in enumerate(candidates)]
        selection = choose(candidates, pressure.capacity, live=live, rho=rho)
    chosen = [(index, CacheKind.KV) for index in selection.kv]
    chosen += [(index, CacheKind.HIDDEN) for index in selection.compact]
    chosen.sort(key=lambda item: -values[item[0]] / candidates[item[0]].kv_units)
    return [Start(waiting[index], kind, savable[index]) for index, kind in chosen]


def _candidate(request: Request, value: float, savable: bool, pressure: Pressure) -> Candidate:
    """Its whole known length and the next token in each form. What lies on the host comes back as it was stored.

    Hidden state is not for those that have missed their SLO: every step would be slower for those that have not.
    """
    blocks = len(request.token_ids) // pressure.block_size + 1
    if request.parked_blocks:
        stored = sum(len(block.entry.units) for block in request.parked_blocks)
        stored += (blocks - len(request.parked_blocks)) * UNITS_PER_BLOCK[request.cache_kind]
        return Candidate(value, stored)
    offered = savable and pressure.hidden_blocks > 0
    compact = blocks * UNITS_PER_BLOCK[CacheKind.HIDDEN] if offered else None
    return Candidate(value, blocks * UNITS_PER_BLOCK[CacheKind.KV], compact)
