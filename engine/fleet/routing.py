"""Which engine of several a request goes to: LARRY's load balancer SAL (section 4.2), and those it is compared with.

Pure functions of what is known of each engine: no clock, no I/O, chance comes from a seeded generator. Every engine may
have a speed, a pool and a latency model of its own. Knows nothing of processes; the live and the simulated fleet share
it.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import ConfigError

BALANCE = 0.25
"""How much more than its part an engine may hold for the sake of a prefix."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine as a router sees it: what was routed to it and has not ended, as far as anybody knows.

    `queued_tokens`, `queued_units`, `queued_requests`: prompts that wait or are not yet computed to their end, what of
    them is still to be computed, and the units that they need beyond those they hold. `running`: requests past their
    prompt. `pool_units` 0: nothing is known of its memory. `mean_input`, `mean_output`: tokens of the requests of
    late. `step_seconds`: a full step by the engine's own latency model; 1 for all where none of them has one.
    """

    engine: int
    queued_tokens: int = 0
    queued_units: float = 0.0
    queued_requests: int = 0
    running: int = 0
    free_units: int = 0
    pool_units: int = 0
    tokens_per_unit: float = 8.0
    tokens_per_step: int = 512
    mean_input: float = 1.0
    mean_output: float = 1.0
    step_seconds: float = 1.0

    @property
    def requests(self) -> int:
        """All that it has not ended."""
        return self.queued_requests + self.running


class RoutedPrompt(NamedTuple):
    """What is to be routed. `hits`: by engine, how many of its tokens are expected in the prefix cache there."""

    tokens: int
    hits: Mapping[int, int] = {}

    def new_tokens(self, engine: int) -> int:
        """What that engine would have to compute: the last token at least, as its output is the first to be sampled."""
        return max(1, self.tokens - self.hits.get(engine, 0))


@dataclass(slots=True)
class Chance:
    """What a router draws from, and which engine had the last turn."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    last: int = -1


Router = Callable[[Sequence[EngineLoad], RoutedPrompt, Chance], int]
"""Gives the number of one of the engines, of which there is at least one."""


def sal_load(load: EngineLoad, prompt: RoutedPrompt) -> float:
    """Seconds that a request would wait there: for memory, or for the prompts before it, its own included.

    Equation 2 in steps: of the tokens lacking, each running request gives back (beta - 1) a step on average
    (beta = (mean input + mean output) / mean output: what it holds at its end is freed within its mean output steps,
    and it takes one a step meanwhile); of the prompts, a step computes `tokens_per_step`.
    """
    tokens = prompt.new_tokens(load.engine)
    steps = (load.queued_tokens + tokens) / load.tokens_per_step
    if load.pool_units:
        needed = math.ceil(tokens / load.tokens_per_unit) + load.queued_units
        lacking = max(0.0, needed - load.free_units) * load.tokens_per_unit
        freed = load.mean_input / max(1.0, load.mean_output) * load.running
        steps = max(steps, lacking / max(1.0, freed))
    return steps * load.step_seconds


def sal(loads: Sequence[EngineLoad], prompt: RoutedPrompt, _chance: Chance) -> int:
    """The least wait; among equals, as among idle engines, the least to do."""
    return min(loads, key=lambda load: (sal_load(load, prompt), load.requests * load.step_seconds, load.engine)).engine


def p2c(loads: Sequence[EngineLoad], _prompt: RoutedPrompt, chance: Chance) -> int:
    """The one of two random ones that has fewer requests."""
    two = chance.rng.sample(loads, min(2, len(loads)))
    return min(two, key=lambda load: load.requests).engine


def round_robin(loads: Sequence[EngineLoad], _prompt: RoutedPrompt, chance: Chance) -> int:
    """One after the other; an engine that is away loses its turn, and nobody has two."""
    numbers = sorted(load.engine for load in loads)
    chance.last = next((number for number in numbers if number > chance.last), numbers[0])
    return chance.last


def at_random(loads: Sequence[EngineLoad], _prompt: RoutedPrompt, chance: Chance) -> int:
    return chance.rng.choice(loads).engine


def prefix(loads: Sequence[EngineLoad], prompt: RoutedPrompt, chance: Chance) -> int:
    """The longest prefix in the cache, among engines that hold at most `BALANCE` more than their part of all requests,
    by speed ("consistent hashing with bounded loads"); without any, SAL."""
    speed = sum(1.0 / load.step_seconds for load in loads)
    requests = sum(load.requests for load in loads) + 1

    def has_room(load: EngineLoad) -> bool:
        part = requests / load.step_seconds / speed
        return load.requests + 1 <= math.ceil((1.0 + BALANCE) * part)

    allowed = [load for load in loads if has_room(load)]  # one at least: not all are above their part
    longest = max(prompt.hits.get(load.engine, 0) for load in allowed)
    return sal([load for load in allowed if prompt.hits.get(load.engine, 0) == longest], prompt, chance)


ROUTERS: dict[str, Router] = {
    "sal": sal,
    "p2c": p2c,
    "round-robin": round_robin,
    "random": at_random,
    "prefix": prefix,
}


def find_router(name: str) -> Router:
    """Raises ConfigError for a name that is none."""
    if name not in ROUTERS:
        raise ConfigError(f"the router must be one of {', '.join(ROUTERS)}, not {name!r}")
    return ROUTERS[name]
