"""Route requests to engines: LARRY's load balancer SAL (section 4.2), and by cached prefixes.

Routers are pure functions of the engines' loads. Engines may differ in speed, pool and latency model. The live and the
simulated fleet share this module.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from engine.api import LoadReport

BALANCE = 0.25
"""Maximum excess over an engine's proportional share of requests for the sake of a cached prefix."""


Loads = Mapping[int, LoadReport]
"""The load of each engine by number, with the requests that were routed to it since its report. `step_seconds` is
positive: 1 for all engines if one has no latency model. `num_units` 0: the memory is unknown."""


class RoutedPrompt(NamedTuple):
    """A prompt to be routed."""

    tokens: int
    hits: Mapping[int, int] = {}  # by engine, prompt tokens expected in its prefix cache

    def new_tokens(self, engine: int) -> int:
        """Return the tokens that an engine would have to compute; at least the last one, whose output is sampled."""
        return max(1, self.tokens - self.hits.get(engine, 0))


def sal_load(engine: int, load: LoadReport, prompt: RoutedPrompt) -> float:
    """Return the seconds until the engine would have computed the prompt: the wait for memory or for computation.

    This is Equation 2 in steps. Prompts are computed at `tokens_per_step`. Each running request frees (beta - 1) tokens
    per step on average, with beta = (mean input + mean output) / mean output: it frees all its tokens after its mean
    output steps and takes one per step until then.
    """
    tokens = prompt.new_tokens(engine)
    steps = (load.queued_tokens + tokens) / load.tokens_per_step
    if load.num_units:
        needed = math.ceil(tokens / load.tokens_per_unit) + load.queued_units
        lacking = max(0.0, needed - load.available_units) * load.tokens_per_unit
        freed = load.mean_input / max(1.0, load.mean_output) * load.running
        steps = max(steps, lacking / max(1.0, freed))
    return steps * load.step_seconds


def sal(loads: Loads, prompt: RoutedPrompt) -> int:
    """Choose the engine with the shortest wait; among equals, such as idle engines, the one with the least work."""

    def wait(engine: int) -> tuple[float, float, int]:
        load = loads[engine]
        return sal_load(engine, load, prompt), load.num_requests * load.step_seconds, engine

    return min(loads, key=wait)


def prefix(loads: Loads, prompt: RoutedPrompt) -> int:
    """Choose the engine with the longest cached prefix; among equals by SAL.

    Only engines with at most 1 + `BALANCE` times their share of all requests, in proportion to speed, are considered
    ("consistent hashing with bounded loads").
    """
    speed = sum(1.0 / load.step_seconds for load in loads.values())
    requests = sum(load.num_requests for load in loads.values()) + 1

    def has_room(load: LoadReport) -> bool:
        part = requests / load.step_seconds / speed
        return load.num_requests + 1 <= math.ceil((1.0 + BALANCE) * part)

    allowed = {engine: load for engine, load in loads.items() if has_room(load)}  # never empty: not all exceed theirs
    longest = max(prompt.hits.get(engine, 0) for engine in allowed)
    return sal({engine: load for engine, load in allowed.items() if prompt.hits.get(engine, 0) == longest}, prompt)
