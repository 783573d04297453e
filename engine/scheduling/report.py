"""How much of each engine's time and memory is taken, as a router of several must know it (LARRY section 4.2).

Online work only: it goes before offline work, and takes the memory that this holds.
"""

from engine.api import LoadReport, RequestClass
from engine.scheduling.service_cost import token_costs
from engine.scheduling.state import SchedulerState
from predictor.limits import UNITS_PER_BLOCK
from predictor.online import OnlineModel


def report_load(
    state: SchedulerState, now: float, mean_input: float, mean_output: float, offline_tokens: int
) -> LoadReport:
    """The load of now. `mean_input`, `mean_output`: tokens of online requests that ended of late; `offline_tokens`:
    computed for offline requests so far."""
    size, pool, most = state.config.block_size, state.pool, state.config.max_num_batched_tokens
    prompts = state.running_prompts()
    online, offline = (state.running[request_class] for request_class in (RequestClass.ONLINE, RequestClass.OFFLINE))
    missing = [request.num_missing_tokens for request in state.waiting_online]
    model = state.model if isinstance(state.model, OnlineModel) else None
    held = UNITS_PER_BLOCK * sum(len(request.cache_map.blocks) for request in offline)
    return LoadReport(
        queued_tokens=sum(missing) + sum(request.num_missing_tokens for request in prompts),
        queued_units=UNITS_PER_BLOCK * sum(-(-tokens // size) for tokens in missing) + state.prompt_reserve(prompts),
        queued_requests=len(missing) + len(prompts),
        running=len(online) - len(prompts),
        available_units=min(pool.num_available_units + held, pool.num_units),
        num_units=pool.num_units,
        tokens_per_unit=size / UNITS_PER_BLOCK,
        tokens_per_step=most,
        step_seconds=0.0 if state.model is None else most * token_costs(state.model, state.config).prefill,
        mean_input=mean_input,
        mean_output=mean_output,
        offline_tokens=offline_tokens,
        offline_waits=len(state.waiting_offline) > 0,
        time=now,
        device_seconds=0.0 if model is None else model.device_seconds,
        profile_seconds=0.0 if model is None else model.profile_seconds,
    )
