"""Online policies: the order in which waiting requests start, and the handling of a request that does not fit.

Each policy is a pure function of the queue and a small context. `larry:0.5` sets α. `apt:0.1` and `goodput:0.1` set the
weight of a request that has missed its SLO, see `engine.scheduling.selection`.

- `fcfs`: by arrival; the first request that does not fit stops admission;
- `no-preempt`: by arrival; a request starts only if its prompt and all of its `max_tokens` fit beside the maximum size
  of the running requests, so a shortage of memory never preempts a request;
- `larry` (LARRY §4): by `α · waiting time − queue length · memory`, highest first; a request that does not fit is
  skipped. The paper prints a plus before the memory term, but its text and its results need the minus. Memory is a
  fraction of the pool, and time is in units of the TTFT objective, so α has no dimension. A request that has waited
  longer than the objective goes first;
- `random` (Apt-Serve §3.2): a random order per seed, as a baseline;
- `apt` (Apt-Serve §4): by arrival while memory lasts; then a knapsack over pending times chooses the requests to start,
  and those to run from hidden state if the model supports it;
- `goodput` (ours): the same knapsack with one point for each request that can still meet the SLO;
- `goodput-strict` (ours): late requests count almost nothing, and lose their memory to requests that can still meet the
  SLO. More requests meet the SLO, but tail latencies are several times as long;
- `srpt-oracle`: shortest remaining output first, by the true lengths, without preemption (TRAIL with perfect
  predictions and c = 0). Only a simulator knows the true lengths: it passes them as `min_tokens`.

Policies know nothing of steps, unit locations or time limits.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.errors import ConfigError
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.selection import Select, Start, select_apt, select_goodput

DEFAULT_ALPHA = 1.0
DEFAULT_TTFT = 1.0
"""Unit of waiting time, in seconds, without a TTFT objective."""


@dataclass(frozen=True, slots=True)
class QueueContext:
    """The facts available to a policy. Times are seconds on the core's clock.

    Attributes:
        running: Online requests with a row, read-only.
        num_units: Units of the device pool.
        ttft: TTFT objective in seconds; infinite without one.
    """

    now: float
    num_waiting: int
    running: Sequence[Request]
    num_units: int
    block_size: int
    ttft: float = math.inf
    seed: int = 0
    most_blocks: int = sys.maxsize

    def units(self, tokens: int) -> int:
        """Return the cache units for `tokens` tokens and the next one."""
        return min(tokens // self.block_size + 1, self.most_blocks) * UNITS_PER_BLOCK

    def is_aged(self, request: Request) -> bool:
        """Return whether the request has waited longer than the TTFT objective."""
        return self.now - request.times.arrival > self.ttft


Order = Callable[[Sequence[Request], QueueContext], Sequence[Request]]


def _always(_request: Request, _context: QueueContext) -> bool:
    return True


def _never(_request: Request, _context: QueueContext) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class OnlinePolicy:
    """One online policy.

    Attributes:
        order: Sort the waiting requests, given by arrival, best first.
        admits: Whether a request may start now.
        scans_past: Whether admission continues behind a request that could not start.
        select: Choose the requests to start, and their representation, when memory is short; None: use `order`.
        late_last: A running request that missed its TTFT objective loses its memory to those that can still meet it.
        by_laxity: Prompts that can still meet the objective go first; while memory lasts they also start first.
    """

    order: Order
    admits: Callable[[Request, QueueContext], bool] = _always
    scans_past: Callable[[Request, QueueContext], bool] = _never
    select: Select | None = None
    late_last: bool = False
    by_laxity: bool = False


def fcfs(waiting: Sequence[Request], _context: QueueContext) -> Sequence[Request]:
    """First come, first served. The queue is in arrival order, and a preempted request keeps its arrival time."""
    return waiting


def fits_whole(request: Request, context: QueueContext) -> bool:
    """Return whether the request at its maximum length fits beside all running requests at theirs."""
    # The K and V of an answer's last token are never computed, so it needs no room.
    reserved = sum(context.units(running.max_total_tokens - 1) for running in context.running)
    return reserved + context.units(request.max_total_tokens - 1) <= context.num_units


def larry_score(request: Request, context: QueueContext, alpha: float) -> float:
    """Return LARRY's score, higher is better: α · waiting time ÷ TTFT objective − queue length · share of the pool."""
    memory = context.units(len(request.token_ids)) / context.num_units
    unit = context.ttft if math.isfinite(context.ttft) and context.ttft > 0.0 else DEFAULT_TTFT
    return alpha * (context.now - request.times.arrival) / unit - context.num_waiting * memory


def larry(waiting: Sequence[Request], context: QueueContext, *, alpha: float = DEFAULT_ALPHA) -> Sequence[Request]:
    """Order aged requests by arrival, then the others by score; equal scores keep arrival order."""
    if len(waiting) == 1:
        return waiting
    scored = [
        ((0, 0.0) if context.is_aged(request) else (1, -larry_score(request, context, alpha)), index)
        for index, request in enumerate(waiting)
    ]
    scored.sort()
    return [waiting[index] for _, index in scored]


def shuffled(waiting: Sequence[Request], context: QueueContext) -> Sequence[Request]:
    """Return a random order that depends only on the seed and the requests.

    A waiting request keeps its random value.
    """
    return sorted(waiting, key=lambda request: _lot(context.seed, request.arrival_order))


def shortest_remaining(waiting: Sequence[Request], _context: QueueContext) -> Sequence[Request]:
    """Order by remaining output tokens, from `min_tokens` or, if it is 0, `max_tokens`."""
    return sorted(waiting, key=_remaining)


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


def _is_young(request: Request, context: QueueContext) -> bool:
    # An aged request that does not fit blocks the queue; if it could be skipped, it might never start.
    return not context.is_aged(request)


ONLINE_POLICIES: dict[str, OnlinePolicy] = {
    "fcfs": OnlinePolicy(fcfs),
    "no-preempt": OnlinePolicy(fcfs, admits=fits_whole),
    "larry": OnlinePolicy(larry, scans_past=_is_young),
    "random": OnlinePolicy(shuffled),
    "srpt-oracle": OnlinePolicy(shortest_remaining),
    "apt": OnlinePolicy(fcfs, select=select_apt, by_laxity=True),
    "goodput": OnlinePolicy(fcfs, select=select_goodput, by_laxity=True),
    "goodput-strict": OnlinePolicy(fcfs, select=partial(select_goodput, tail=0.0), late_last=True, by_laxity=True),
}
SELECTS: dict[str, Callable[..., list[Start]]] = {
    "apt": select_apt,
    "goodput": select_goodput,
}


def find_policy(name: str) -> OnlinePolicy:
    """Return the policy `name`, optionally with a parameter: `larry:ALPHA`, `apt:TAIL`, `goodput:TAIL`.

    Raises:
        ConfigError: The name or the parameter is not valid.
    """
    base, colon, value = name.partition(":")
    policy = ONLINE_POLICIES.get(base)
    if policy is None:
        raise ConfigError(f"unknown online policy '{name}'; known: {', '.join(ONLINE_POLICIES)}")
    if not colon:
        return policy
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if base == "larry" and 0.0 <= number < math.inf:
        return replace(policy, order=partial(larry, alpha=number))
    if base in SELECTS and 0.0 <= number <= 1.0:
        return replace(policy, select=partial(SELECTS[base], tail=number))
    raise ConfigError(
        f"online policy '{name}': only larry (alpha >= 0), apt and goodput (0 <= tail <= 1) take a number (larry:0.5)"
    )
