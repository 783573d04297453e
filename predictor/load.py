"""What a server has to do: arrivals and lengths as they were served, and windows of such work for a replay.

A window is a moving-block bootstrap of what was recorded: runs of consecutive arrivals with their own gaps and lengths,
stretched to the wanted rate. So bursts stay bursts, prompts stay beside the answers that they got, and a window can be
as long as a percentile needs although fewer requests were seen.

Pure: times are arguments (seconds, any clock), randomness is seeded. Knows nothing of engines or budgets.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 16
"""Consecutive arrivals that stay together in a window: about what one burst of chat requests has."""
DEFAULT_OUTPUT = 64
"""Output tokens of a request that ended before anybody knew, when no other request tells."""


class Lengths(NamedTuple):
    """One request in tokens. `cached`: of the prompt, found in the prefix cache. `output` 0: not known (refused)."""

    prompt: int
    output: int
    cached: int = 0


class OnlineArrival(NamedTuple):
    """An online request and when it came, in seconds."""

    at: float
    lengths: Lengths


def observed_rate(recorded: Sequence[OnlineArrival]) -> float:
    """Requests a second over the recorded time (any order); 0 for fewer than two, or when all came at once."""
    times = [arrival.at for arrival in recorded]
    span = max(times, default=0.0) - min(times, default=0.0)
    return (len(times) - 1) / span if span > 0.0 else 0.0


def resample(recorded: Sequence[OnlineArrival], rate: float, count: int, seed: int) -> tuple[OnlineArrival, ...]:
    """`count` arrivals from time 0 on at `rate` requests a second, in blocks of what was `recorded`.

    A request of unknown output gets that of a random other one. Raises ValueError for a record of fewer than two
    arrivals.
    """
    ordered = sorted(recorded)
    mean_gap = (ordered[-1].at - ordered[0].at) / (len(ordered) - 1) if len(ordered) > 1 else 0.0
    if mean_gap <= 0.0:
        raise ValueError("a window needs a record of at least two arrivals, apart in time")
    outputs = [arrival.lengths.output for arrival in ordered if arrival.lengths.output] or [DEFAULT_OUTPUT]
    generator = random.Random(seed)
    stretch = 1.0 / (rate * mean_gap)
    block = min(BLOCK, len(ordered) - 1)
    found: list[OnlineArrival] = []
    at = 0.0
    while len(found) < count:
        begin = generator.randrange(1, len(ordered) - block + 1)
        for index in range(begin, begin + block):
            at += stretch * (ordered[index].at - ordered[index - 1].at)
            lengths = ordered[index].lengths
            if not lengths.output:
                lengths = lengths._replace(output=generator.choice(outputs))
            found.append(OnlineArrival(at, lengths))
    return tuple(found[:count])
