"""Queued online work of a simulated engine, for a load balancer and a fleet short of memory."""

from typing import NamedTuple

from engine.api import RequestClass
from engine.core import EngineCore
from engine.limits import UNITS_PER_BLOCK


class QueuedWork(NamedTuple):
    """Online prompts that wait or are not computed to their end (of preempted requests, with their answers so far): how
    many, their tokens still to be computed, and the units that they need beyond those they hold. `running`: online
    requests past their prompt. `waiting_units`: what requests without a row need."""

    requests: int
    tokens: int
    units: int
    running: int
    waiting_units: int


def queued_work(core: EngineCore) -> QueuedWork:
    """The online work of an engine now."""
    state = core.state
    size = state.config.block_size
    requests = tokens = units = waiting_units = 0
    for request in state.waiting_online:
        missing = request.num_missing_tokens
        requests, tokens = requests + 1, tokens + missing
        waiting_units += UNITS_PER_BLOCK * min(missing // size + 1, request.most_blocks)
    running = state.running[RequestClass.ONLINE]
    prompts = state.running_prompts()
    for request in prompts:
        requests, tokens = requests + 1, tokens + len(request.token_ids) - request.num_computed_tokens
        units += UNITS_PER_BLOCK * max(0, request.num_blocks(size) - request.cache_map.num_live)
    return QueuedWork(requests, tokens, units + waiting_units, len(running) - len(prompts), waiting_units)
