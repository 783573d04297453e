"""Online policies: the order in which waiting requests start, and the handling of a request that does not fit.

Each policy is a pure function of the scheduler's state. `larry:0.5` sets α. `apt:0.1` and `goodput:0.1` set the
weight of a request that has missed its SLO, see `engine.scheduling.selection`.

- `fcfs`: by arrival; the first request that does not fit stops admission;
- `larry` (LARRY §4): by `α · waiting time − queue length · memory`, highest first; a request that does not fit is
  skipped. Time is in seconds and memory in cache blocks, as in the paper. The paper prints a plus before the memory
  term, but its text and its results need the minus. `--max-queue-time` bounds the wait, as for every policy that
  reorders: in a lasting overload the oldest requests then start first. `none` gives the published policy;
- `apt` (Apt-Serve §4): by arrival while memory lasts; then a knapsack over pending times chooses the requests to start,
  and those to run from hidden state if the model supports it;
- `goodput` (ours): the same knapsack with one point for each request that can still meet the SLO;
- `goodput-strict` (ours): late requests count almost nothing, and lose their memory to requests that can still meet the
  SLO. More requests meet the SLO, and those that miss it wait longer.

Policies know nothing of steps, unit locations or time limits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from operator import not_

import numpy as np

from engine.api import RequestClass
from engine.arrays import BoolArray, FloatArray
from engine.cache.blocks import COMPACT
from engine.errors import ConfigError
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.fair_share import by_tenant
from engine.scheduling.selection import (
    DEFAULT_TAIL,
    Pressure,
    apt_values,
    goodput_values,
    select_apt,
    select_goodput,
    ttft_unit,
)
from engine.scheduling.state import FCFS, OnlinePolicy, SchedulerState
from engine.scheduling.urgency import PATIENCE, freed_units, longest_queue_time
from engine.scheduling.waiting import Start

DEFAULT_ALPHA = 1.0
READ_STEPS = 64
"""Steps for which a request that starts from compact form is charged, i.e. until memory is no longer short."""
Choose = Callable[[Sequence[Request], Pressure], list[Start]]
"""Choose among waiting requests for the memory that there is."""
Values = Callable[[FloatArray, BoolArray, float], FloatArray]
"""Return the knapsack's values of requests, from their pending times in seconds, whether they can still meet the SLO,
and the TTFT limit."""
JUST_NOW = 1e-3
"""Minimum pending time in seconds: tokens of the last step came at the same time, and then the units decide."""
LATE_HEADROOM = 0.25
"""Share of the pool that a late request must leave free when it starts, under `goodput-strict`."""


def larry_score(state: SchedulerState, request: Request, now: float, alpha: float) -> float:
    """Return LARRY's score, higher is better: α · waiting time in seconds − queue length · blocks (Equation 1)."""
    blocks = request.num_blocks(state.config.block_size)
    return alpha * (now - request.times.arrival) - len(state.waiting_online) * blocks


def larry(state: SchedulerState, now: float, *, alpha: float = DEFAULT_ALPHA) -> list[Request]:
    """Order the waiting requests by score; equal scores keep arrival order."""
    return sorted(state.waiting_online, key=lambda request: -larry_score(state, request, now, alpha))


def choose_starts(select: Choose, late_last: bool, state: SchedulerState, now: float) -> list[Start] | None:
    """Return the waiting requests that the knapsack `select` chose to start; None if memory suffices.

    `late_last`: running requests that missed their TTFT objective lose their memory to those that can still meet it.
    """
    if not state.waiting_online:
        return None
    late = evictable(state, now) if late_last else []
    if (pressure := pressure_of(state, late, now)) is None:
        return None
    starts = select_by_tenant(state, select, pressure)
    decided = state.counters.knapsack
    for start in starts:
        decided["compact" if start.kind is COMPACT else "kv"] += 1
    decided["passed_over"] += len(state.waiting_online) - len(starts)
    if late:
        evict_late(state, starts, late, now)
    return starts


def select_by_tenant(state: SchedulerState, select: Choose, pressure: Pressure) -> list[Start]:
    """Return the waiting requests that `select` chooses, tenant by tenant in the memory that earlier tenants leave."""
    if not state.online_share.is_contested:
        return select(state.waiting_online, pressure)
    groups = by_tenant(state.waiting_online)
    starts: list[Start] = []
    for tenant in state.online_share.by_standing(groups):
        found = select(groups[tenant], pressure)
        starts += found
        if not found:
            break  # smaller requests of later tenants would take this tenant's room again and again
        pressure = pressure.less(found)
    return starts


def evictable(state: SchedulerState, now: float) -> list[Request]:
    """Return the late running requests that must yield to savable ones, first to lose first.

    A request that was preempted `max_offline_preemptions` times is exempt.
    """
    limit = state.config.max_offline_preemptions
    running = reversed(state.running[RequestClass.ONLINE])
    late = [r for r in running if r.num_preemptions < limit and state.objective.is_late(r, now)]
    return [request for request in late if not owes(state, request, now)]


def owes(state: SchedulerState, request: Request, now: float) -> bool:
    """Return whether a running request without a token since it started has waited so long that it keeps its memory."""
    times = request.times
    waited = now - (times.arrival if times.last_token is None else times.last_token)
    return waited >= PATIENCE * longest_queue_time(state, request)


def evict_late(state: SchedulerState, starts: Sequence[Start], late: Sequence[Request], now: float) -> None:
    """Preempt `late` running requests to make room for the savable requests that the step can start.

    Called before the step contains any request.
    """
    size, units, tokens = state.config.block_size, 0, 0
    for request, kind, savable in starts:
        if savable and tokens < state.config.max_num_batched_tokens:
            units += request.num_blocks(size) * kind.form.units
            tokens += len(request.token_ids)
    missing = units - state.pool.num_available_units - state.pool.num_deferred_units
    missing -= state.cache.parked.num_units(online=True)
    missing -= sum(freed_units(request) for request in state.running[RequestClass.OFFLINE])
    for victim in late:
        if missing <= 0:
            return
        missing -= freed_units(victim)
        state.preempt(victim, "late", now)


def pressure_of(state: SchedulerState, late: Sequence[Request], now: float) -> Pressure | None:
    """Return the inputs of the knapsack, or None if memory suffices for the waiting online requests.

    `late`: running requests that yield to them.
    """
    offline = state.running[RequestClass.OFFLINE]
    capacity = (
        state.pool.num_available_units + state.pool.num_deferred_units + state.cache.parked.num_units(online=True)
    )
    capacity += sum(request.cache_map.num_running_units for request in offline)
    capacity -= state.prompt_reserve(state.running_prompts())
    if not _demand_exceeds(state, capacity):
        return None
    capacity += sum(request.cache_map.num_running_units for request in late)
    rho = _rho(state) * READ_STEPS * state.config.block_size / UNITS_PER_BLOCK
    return Pressure(state, now, capacity, state.cache.compact_room, rho)


def _rho(state: SchedulerState) -> float:
    """Return the seconds that one more token in compact form adds to a step.

    If some requests run from compact form already, the fixed cost of projection is paid anyway and not included.
    """
    if state.model is not None and state.cache.num_compact:
        return state.model.cache_work(compact_tokens=1)
    return state.config.rho


def _demand_exceeds(state: SchedulerState, units: int) -> bool:
    """Return whether the waiting online requests need more than `units` units in KV."""
    waiting, size = state.waiting_online, state.config.block_size
    columns = waiting.columns
    blocks = int(np.minimum(columns.lengths // size + 1, state.config.most_blocks)[~columns.began].sum())
    for index in np.flatnonzero(columns.began).tolist():
        blocks += min(len(waiting[index].token_ids) // size + 1, state.config.most_blocks)
    return blocks > units // UNITS_PER_BLOCK


def order_by_value(values: Values, state: SchedulerState, now: float) -> list[Request]:
    """Return the running online requests by arrival, the late ones last.

    If memory is short, the others are ordered by value per unit, as Apt-Serve chooses among running requests (§5): a
    request with many units and little value loses them first. Requests without a limit on gaps lose theirs before those
    with one.
    """
    running = list(state.running[RequestClass.ONLINE])
    if not (math.isfinite(state.objective.ttft) or state.promised):
        return running
    late = [state.objective.is_late(request, now) and not owes(state, request, now) for request in running]
    if state.pool.num_available_units >= UNITS_PER_BLOCK * len(running):
        return [*compress(running, map(not_, late)), *compress(running, late)] if any(late) else running
    times = [request.times for request in running]
    pending = np.array([max(JUST_NOW, now - (t.arrival if t.last_token is None else t.last_token)) for t in times])
    found = values(pending, ~np.array(late, dtype=bool), state.objective.ttft)
    units = np.array([max(1, request.cache_map.num_running_units) for request in running])
    patient = [r.spec.promise is not None and math.isinf(r.spec.promise.tbt) for r in running]
    return [running[index] for index in np.lexsort((-found / units, patient, late)).tolist()]


def leaves_headroom(state: SchedulerState, request: Request) -> bool:
    """Return whether a late request may start: it must leave `LATE_HEADROOM` of the pool to savable requests.

    With less left, it would only be preempted again. Always true while no online request runs.
    """
    if not state.running[RequestClass.ONLINE]:
        return True
    units = request.num_blocks(state.config.block_size) * UNITS_PER_BLOCK
    room = state.pool.num_available_units + state.cache.parked.num_units(online=True)
    return room - units >= LATE_HEADROOM * state.pool.num_units


def _apt(tail: float = DEFAULT_TAIL) -> OnlinePolicy:
    values = lambda pending, hopeful, _ttft: apt_values(pending, hopeful, tail)  # noqa: E731
    return _by_knapsack(partial(select_apt, tail=tail), values)


def _goodput(tail: float = DEFAULT_TAIL, *, late_last: bool = False) -> OnlinePolicy:
    values = lambda pending, hopeful, ttft: goodput_values(pending, hopeful, ttft_unit(ttft), tail)  # noqa: E731
    policy = _by_knapsack(partial(select_goodput, tail=tail), values, late_last=late_last)
    return replace(policy, admits_late=leaves_headroom) if late_last else policy


def _by_knapsack(select: Choose, values: Values, *, late_last: bool = False) -> OnlinePolicy:
    starts, order = partial(choose_starts, select, late_last), partial(order_by_value, values)
    return OnlinePolicy(select=starts, running_order=order, by_laxity=True)


ONLINE_POLICIES: dict[str, OnlinePolicy] = {
    "fcfs": FCFS,
    "larry": OnlinePolicy(larry, scans_past=True),
    "apt": _apt(),
    "goodput": _goodput(),
    "goodput-strict": _goodput(0.0, late_last=True),
}
KNAPSACKS = {"apt": _apt, "goodput": _goodput}


def find_policy(name: str) -> OnlinePolicy:
    """Return the policy `name`, optionally with a parameter: `larry:ALPHA`, `apt:TAIL`, `goodput:TAIL`.

    Raises:
        ConfigError: The name or the parameter is not valid.
    """
    base, colon, value = name.partition(":")
    policy = ONLINE_POLICIES.get(base)
    if policy is None:
        raise ConfigError(f"unknown online policy '{name}'; known: {', '.join(ONLINE_POLICIES)}")
    if not colon:
        return policy
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if base == "larry" and 0.0 <= number < math.inf:
        return replace(policy, order=partial(larry, alpha=number))
    if base in KNAPSACKS and 0.0 <= number <= 1.0:
        return KNAPSACKS[base](number)
    raise ConfigError(
        f"online policy '{name}': only larry (alpha >= 0), apt and goodput (0 <= tail <= 1) take a number (larry:0.5)"
    )
