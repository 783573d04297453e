"""The state of memory while waiting online requests want more than there is."""

import numpy as np

from engine.api import RequestClass
from engine.cache.placement import READ_STEPS
from engine.scheduling.selection import Pressure
from engine.scheduling.state import SchedulerState
from engine.scheduling.victims import evictable
from predictor.limits import UNITS_PER_BLOCK


def pressure_of(state: SchedulerState, now: float) -> Pressure | None:
    """The state of memory if the waiting online requests want more than they could get now, else None."""
    block_size = state.config.block_size
    offline = state.running[RequestClass.OFFLINE]
    capacity = (
        state.pool.num_available_units + state.pool.num_deferred_units + state.cache.parked.num_units(online=True)
    )
    capacity += sum(request.cache_map.num_running_units for request in offline)
    capacity -= state.prompt_reserve(state.running_prompts())
    if not _demand_exceeds(state, capacity):
        return None
    capacity += sum(request.cache_map.num_running_units for request in evictable(state, now))
    return Pressure(
        now=now,
        running=state.running[RequestClass.ONLINE],
        capacity=capacity,
        block_size=block_size,
        compact_blocks=state.cache.compact_room,
        rho=_rho(state) * READ_STEPS * block_size / UNITS_PER_BLOCK,
        ttft=state.objective.ttft,
        tbt=state.objective.tbt,
        model=state.model,
        max_chunk=state.config.max_num_batched_tokens,
        most_blocks=state.config.most_blocks,
    )


def _rho(state: SchedulerState) -> float:
    """What a further token from compact form adds to a step: where some run from it already, the step pays what does
    not grow with them anyway. Else it is shared by as many as there may be."""
    if state.model is not None and state.cache.num_compact:
        return state.model.cache_work(compact_tokens=1)
    return state.config.rho


def _demand_exceeds(state: SchedulerState, units: int) -> bool:
    """Whether the waiting online requests want more than so many units, all of them in KV."""
    waiting, size = state.waiting_online, state.config.block_size
    columns = waiting.columns
    blocks = int(np.minimum(columns.lengths // size + 1, state.config.most_blocks)[~columns.began].sum())
    for index in np.flatnonzero(columns.began).tolist():
        blocks += min(len(waiting[index].token_ids) // size + 1, state.config.most_blocks)
    return blocks > units // UNITS_PER_BLOCK
