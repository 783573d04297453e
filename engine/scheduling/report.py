"""Statistics of an engine, and the load report for a router of several engines (LARRY §4.2).

Online work comes before offline work in the report: memory that offline requests hold counts as available.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict

from engine.api import RequestClass
from engine.client import EngineStats, LoadReport
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request, RequestStatus
from engine.scheduling.objective import token_costs
from engine.scheduling.state import SchedulerState

LATE_PART = 0.25
"""Minimum expected remaining output of a running request, as a share of the mean output."""


def report_stats(state: SchedulerState) -> EngineStats:
    """Return a snapshot; see `EngineStats`."""
    cache = state.cache
    pool, host = cache.device, cache.host
    waiting = {RequestClass.ONLINE: len(state.waiting_online), RequestClass.OFFLINE: len(state.waiting_offline)}
    quarantined = Counter((r.request_class, r.status is RequestStatus.RUNNING) for r in state.quarantined)
    slots = () if cache.snapshots is None else (cache.snapshots.pool, cache.snapshots.host)
    return EngineStats(
        running={c: len(state.running[c]) + quarantined[c, True] for c in RequestClass},
        waiting={c: waiting[c] + quarantined[c, False] for c in RequestClass},
        running_adapters=_adapters(state.running[RequestClass.ONLINE]),
        waiting_adapters=_adapters(state.waiting_online),
        units_total=pool.num_units,
        units_free=pool.num_free_units,
        units_cached=pool.num_cached_units,
        units_owned=pool.num_owned_units + pool.num_deferred_units,
        host_units_total=host.num_units,
        host_units_used=host.num_units - host.num_free_units,
        host_units_cached=host.num_cached_units,
        hidden_blocks=cache.num_compact,
        state_slots_total=sum(each.num_units for each in slots),
        state_slots_used=sum(each.num_units - each.num_free_units for each in slots),
        cache_units=dict(cache.tiers.moved_units),
        lanes_waiting={lane.name.lower(): count for lane, count in state.waiting_offline.num_waiting.items()},
        lanes_started={lane.name.lower(): count for lane, count in state.waiting_offline.num_started.items()},
        job_tokens=_job_tokens(state.requests.values()),
        token_costs=None if state.model is None else token_costs(state.model, state.config, usual=True),
        **asdict(state.counters),
    )


def _adapters(requests: Iterable[Request]) -> dict[int, int]:
    """Return the number of requests of each LoRA adapter."""
    return dict(Counter(request.spec.adapter for request in requests if request.spec.adapter))


def _job_tokens(requests: Iterable[Request]) -> dict[str, int]:
    """Return the output tokens of the requests of each job."""
    tokens: Counter[str] = Counter()
    for request in requests:
        if request.spec.job:
            tokens[request.spec.job] += request.num_output_tokens
    return dict(tokens)


def report_load(state: SchedulerState, now: float) -> LoadReport:
    """Return the current load."""
    size, pool, most = state.config.block_size, state.pool, state.config.max_num_batched_tokens
    prompts = state.running_prompts()
    online, offline = (state.running[request_class] for request_class in (RequestClass.ONLINE, RequestClass.OFFLINE))
    missing = [request.num_missing_tokens for request in state.waiting_online]
    held = UNITS_PER_BLOCK * sum(request.cache_map.num_live for request in offline)
    return LoadReport(
        queued_tokens=sum(missing) + sum(request.num_missing_tokens for request in prompts),
        queued_units=UNITS_PER_BLOCK * sum(-(-tokens // size) for tokens in missing) + state.prompt_reserve(prompts),
        queued_requests=len(missing) + len(prompts),
        running=len(online) - len(prompts),
        growth_units=_growth(state, online, len(missing), state.mean_output),
        available_units=min(pool.num_available_units + held, pool.num_units),
        num_units=pool.num_units,
        tokens_per_unit=size / UNITS_PER_BLOCK,
        tokens_per_step=most,
        step_seconds=0.0 if state.model is None else most * token_costs(state.model, state.config).prefill,
        mean_input=state.mean_prompt,
        mean_output=state.mean_output,
        offline_tokens=state.counters.offline_prefill_tokens + state.counters.offline_decode_tokens,
        offline_waits=len(state.waiting_offline) > 0,
        time=now,
    )


def _growth(state: SchedulerState, online: Collection[Request], num_waiting: int, mean_output: float) -> int:
    """Return `LoadReport.growth_units`: growth by running requests and by the output of prompts yet to start."""
    size, later = state.config.block_size, min(num_waiting, max(0, state.config.max_num_seqs - len(online)))
    runs = []
    for request in online:
        most = request.max_total_tokens - len(request.token_ids)
        left = min(max(mean_output - request.num_output_tokens, LATE_PART * mean_output), most)
        runs.append((left, UNITS_PER_BLOCK * request.cache_map.num_live))
    return round(peak_growth(runs, later, mean_output, size / UNITS_PER_BLOCK))


def peak_growth(runs: Iterable[tuple[float, int]], later: int, mean_output: float, tokens_per_unit: float) -> float:
    """Return the maximum number of additional units in use at any later time.

    Args:
        runs: Per request, the tokens still to generate (one per step) and its units, which are freed at its end.
        later: Number of requests yet to start; each generates `mean_output` tokens.
    """
    runs = sorted(runs)
    alive, change, worst = len(runs) + later, 0.0, 0.0
    for left, held in runs:  # by end: just before an end, all remaining requests have grown by `left` tokens
        if left > mean_output and later:
            worst, alive, later = max(worst, change + alive * mean_output / tokens_per_unit), alive - later, 0
        worst = max(worst, change + alive * left / tokens_per_unit)
        change, alive = change - held, alive - 1
    return max(worst, change + alive * mean_output / tokens_per_unit)
