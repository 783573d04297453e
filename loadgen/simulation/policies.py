"""Online policies of the simulator only: baselines of papers, and an oracle. `serve` refuses their names.

- `no-preempt`: by arrival; a request starts only if its prompt and all of its `max_tokens` fit beside the maximum size
  of the running requests, so a shortage of memory never preempts a request;
- `random` (Apt-Serve §3.2): a random order per seed, as a baseline;
- `srpt-oracle`: shortest remaining output first, by the true lengths, without preemption (TRAIL with perfect
  predictions and c = 0). Only a simulator knows the true lengths: it passes them as `min_tokens`.
"""

from engine.api import RequestClass
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling import policies
from engine.scheduling.state import OnlinePolicy, SchedulerState


def fits_whole(state: SchedulerState, request: Request) -> bool:
    """Return whether the request at its maximum length fits beside all running requests at theirs."""
    # The K and V of an answer's last token are never computed, so it needs no room.
    size, most = state.config.block_size, state.config.most_blocks
    together = (*state.running[RequestClass.ONLINE], request)
    blocks = sum(min((each.max_total_tokens - 1) // size + 1, most) for each in together)
    return UNITS_PER_BLOCK * blocks <= state.pool.num_units


def shuffled(state: SchedulerState, _now: float) -> list[Request]:
    """Return a random order that depends only on the seed and the requests.

    A waiting request keeps its random value.
    """
    return sorted(state.waiting_online, key=lambda request: _lot(state.config.seed, request.arrival_order))


def shortest_remaining(state: SchedulerState, _now: float) -> list[Request]:
    """Order by remaining output tokens, from `min_tokens` or, if it is 0, `max_tokens`."""
    return sorted(state.waiting_online, key=_remaining)


def _remaining(request: Request) -> int:
    sampling = request.spec.sampling
    return (sampling.min_tokens or sampling.max_tokens) - request.num_output_tokens


def _lot(seed: int, order: int) -> int:
    """Return a well-mixed 64-bit hash of (seed, order): splitmix64's finaliser."""
    mask = 2**64 - 1
    value = (order + 1 + (seed + 1) * 0x9E3779B97F4A7C15) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & mask
    return value ^ (value >> 31)


SIMULATED_POLICIES = {
    "no-preempt": OnlinePolicy(admits=fits_whole),
    "random": OnlinePolicy(shuffled),
    "srpt-oracle": OnlinePolicy(shortest_remaining),
}


def find_policy(name: str) -> OnlinePolicy:
    """Return a policy of the simulator or of the engine. Raise ConfigError for an unknown name or parameter."""
    return SIMULATED_POLICIES.get(name) or policies.find_policy(name)
