"""The routers of a simulated fleet: those of the live fleet, and the baselines of LARRY's evaluation."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.fleet.routing import EngineLoad, RoutedPrompt, prefix, sal


@dataclass(slots=True)
class Chance:
    """The state of a router."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    last: int = -1  # the engine that `round_robin` chose last


Router = Callable[[Sequence[EngineLoad], RoutedPrompt, Chance], int]
"""Returns the number of the chosen engine from a non-empty sequence of loads."""


def p2c(loads: Sequence[EngineLoad], _prompt: RoutedPrompt, chance: Chance) -> int:
    """Choose two random engines and return the one with fewer requests."""
    two = chance.rng.sample(loads, min(2, len(loads)))
    return min(two, key=lambda load: load.requests).engine


def round_robin(loads: Sequence[EngineLoad], _prompt: RoutedPrompt, chance: Chance) -> int:
    """Choose the engines in turn. An absent engine is skipped."""
    numbers = sorted(load.engine for load in loads)
    chance.last = next((number for number in numbers if number > chance.last), numbers[0])
    return chance.last


def at_random(loads: Sequence[EngineLoad], _prompt: RoutedPrompt, chance: Chance) -> int:
    return chance.rng.choice(loads).engine


ROUTERS: dict[str, Router] = {
    "sal": lambda loads, prompt, _chance: sal(loads, prompt),
    "p2c": p2c,
    "round-robin": round_robin,
    "random": at_random,
    "prefix": lambda loads, prompt, _chance: prefix(loads, prompt),
}
