"""Route requests to engines: LARRY's load balancer SAL (section 4.2), and by cached prefixes.

Routers are pure functions of the engines' loads. Engines may differ in speed, pool and latency model. The live and the
simulated fleet share this module.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BALANCE = 0.25
"""Maximum excess over an engine's proportional share of requests for the sake of a cached prefix."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of one engine: the requests that were routed to it and are not known to have ended."""

    engine: int
    queued_tokens: int = 0  # prompt tokens still to be computed
    queued_units: float = 0.0  # units that these prompts need beyond those they hold
    queued_requests: int = 0  # requests whose prompt is not fully computed
    running: int = 0  # requests past their prompt
    free_units: int = 0
    pool_units: int = 0  # 0: unknown memory
    tokens_per_unit: float = 8.0
    tokens_per_step: int = 512
    mean_input: float = 1.0  # mean prompt tokens of recent requests
    mean_output: float = 1.0  # mean output tokens of recent requests
    step_seconds: float = 1.0  # time of a full step by the engine's latency model; 1 for all engines if one has none

    @property
    def requests(self) -> int:
        """Number of open requests."""
        return self.queued_requests + self.running


class RoutedPrompt(NamedTuple):
    """A prompt to be routed."""

    tokens: int
    hits: Mapping[int, int] = {}  # by engine, prompt tokens expected in its prefix cache

    def new_tokens(self, engine: int) -> int:
        """Return the tokens that an engine would have to compute; at least the last one, whose output is sampled."""
        return max(1, self.tokens - self.hits.get(engine, 0))


def sal_load(load: EngineLoad, prompt: RoutedPrompt) -> float:
    """Return the seconds until the engine would have computed the prompt: the wait for memory or for computation.

    This is Equation 2 in steps. Prompts are computed at `tokens_per_step`. Each running request frees (beta - 1) tokens
    per step on average, with beta = (mean input + mean output) / mean output: it frees all its tokens after its mean
    output steps and takes one per step until then.
    """
    tokens = prompt.new_tokens(load.engine)
    steps = (load.queued_tokens + tokens) / load.tokens_per_step
    if load.pool_units:
        needed = math.ceil(tokens / load.tokens_per_unit) + load.queued_units
        lacking = max(0.0, needed - load.free_units) * load.tokens_per_unit
        freed = load.mean_input / max(1.0, load.mean_output) * load.running
        steps = max(steps, lacking / max(1.0, freed))
    return steps * load.step_seconds


def sal(loads: Sequence[EngineLoad], prompt: RoutedPrompt) -> int:
    """Choose the engine with the shortest wait; among equals, such as idle engines, the one with the least work."""
    return min(loads, key=lambda load: (sal_load(load, prompt), load.requests * load.step_seconds, load.engine)).engine


def prefix(loads: Sequence[EngineLoad], prompt: RoutedPrompt) -> int:
    """Choose the engine with the longest cached prefix; among equals by SAL.

    Only engines with at most 1 + `BALANCE` times their share of all requests, in proportion to speed, are considered
    ("consistent hashing with bounded loads").
    """
    speed = sum(1.0 / load.step_seconds for load in loads)
    requests = sum(load.requests for load in loads) + 1

    def has_room(load: EngineLoad) -> bool:
        part = requests / load.step_seconds / speed
        return load.requests + 1 <= math.ceil((1.0 + BALANCE) * part)

    allowed = [load for load in loads if has_room(load)]  # never empty: not every engine exceeds its share
    longest = max(prompt.hits.get(load.engine, 0) for load in allowed)
    return sal([load for load in allowed if prompt.hits.get(load.engine, 0) == longest], prompt)
