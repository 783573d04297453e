"""Online policies: in which order waiting requests compete for a step, and what happens at one that does not fit.

Each is a pure function of the queue and a small context, chosen by name (`larry:0.5` gives one its parameter, and
`apt:0.1` or `goodput:0.1` what a request that has missed its SLO still counts, see `engine.scheduling.selection`):

- `fcfs`: by arrival; the first that does not fit ends the admission;
- `no-preempt`: by arrival; a request starts only if its prompt and all of its `max_tokens` fit beside what the running
  ones may still take, so memory never forces a request out;
- `larry` (LARRY §4): `α · waiting time − queue length · memory`, highest first, past misfits. The paper prints a plus
  before the memory term; its text and its results need the minus. Memory is a fraction of the pool and time is in units
  of the TTFT objective, so α has no dimension. A request that waited longer than the objective goes first;
- `random` (Apt-Serve §3.2): a random order per seed, a base line;
- `apt` (Apt-Serve §4): by arrival while memory lasts; then a knapsack over pending times chooses who starts, and who
  runs from hidden state where the model offers it;
- `goodput` (ours): the same knapsack, one point for each request that can still meet the SLO;
- `goodput-strict` (ours): late requests count next to nothing, and lose the memory that they hold to those that can
  still be saved: more objectives met, and tails several times as long;
- `srpt-oracle`: shortest remaining output first, by the true lengths, without preemption (TRAIL with perfect
  predictions and c = 0). Only a simulator knows true lengths: it states them as `min_tokens`.

Knows nothing of steps, units' whereabouts or time limits.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.errors import ConfigError
from engine.request import Request
from engine.scheduling.selection import Select, Start, select_apt, select_goodput
from predictor.limits import UNITS_PER_BLOCK

DEFAULT_ALPHA = 1.0
DEFAULT_TTFT = 1.0
"""The unit of waiting time, in seconds, when no TTFT objective is stated."""


@dataclass(frozen=True, slots=True)
class QueueContext:
    """What a policy may look at. `running`: online requests that hold a row; it must not be changed. `ttft`: the
    objective in seconds, infinite when none is stated. Times in seconds on the core's clock."""

    now: float
    num_waiting: int
    running: Sequence[Request]
    num_units: int
    block_size: int
    ttft: float = math.inf
    seed: int = 0
    most_blocks: int = sys.maxsize

    def units(self, tokens: int) -> int:
        """Cache units that `tokens` tokens and the next one take."""
        return min(tokens // self.block_size + 1, self.most_blocks) * UNITS_PER_BLOCK

    def is_aged(self, request: Request) -> bool:
        """Whether it has waited for longer than the TTFT objective."""
        return self.now - request.times.arrival > self.ttft


Order = Callable[[Sequence[Request], QueueContext], Sequence[Request]]


def _always(_request: Request, _context: QueueContext) -> bool:
    return True


def _never(_request: Request, _context: QueueContext) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class OnlinePolicy:
    """`order`: the waiting requests, best first (given by arrival). `admits`: whether one may start at all now.
    `scans_past`: whether the next is looked at although this one could not start. `select`: who starts, and from which
    representation, once they want more memory than there is; None: the order decides then too. `late_last`: a
    running request that has missed its TTFT objective gives its memory to those that can still be saved. `by_laxity`:
    prompts that can still meet the objective get the time of steps first, while memory lasts also to start."""

    order: Order
    admits: Callable[[Request, QueueContext], bool] = _always
    scans_past: Callable[[Request, QueueContext], bool] = _never
    select: Select | None = None
    late_last: bool = False
    by_laxity: bool = False


def fcfs(waiting: Sequence[Request], _context: QueueContext) -> Sequence[Request]:
    """First come, first served; the queue is kept by arrival, and a preempted request keeps its age."""
    return waiting


def fits_whole(request: Request, context: QueueContext) -> bool:
    """Whether the request's longest possible form fits beside the longest forms of all that run."""
    # The last token of an answer is never computed on, so it takes no room.
    reserved = sum(context.units(running.max_total_tokens - 1) for running in context.running)
    return reserved + context.units(request.max_total_tokens - 1) <= context.num_units


def larry_score(request: Request, context: QueueContext, alpha: float) -> float:
    """LARRY's score, higher is better: α · waiting time ÷ TTFT objective − queue length · share of the pool."""
    memory = context.units(len(request.token_ids)) / context.num_units
    unit = context.ttft if math.isfinite(context.ttft) and context.ttft > 0.0 else DEFAULT_TTFT
    return alpha * (context.now - request.times.arrival) / unit - context.num_waiting * memory


def larry(waiting: Sequence[Request], context: QueueContext, *, alpha: float = DEFAULT_ALPHA) -> Sequence[Request]:
    """Aged requests by arrival, then the others by score; a stable sort keeps equals by arrival."""
    if len(waiting) == 1:
        return waiting
    scored = [
        ((0, 0.0) if context.is_aged(request) else (1, -larry_score(request, context, alpha)), index)
        for index, request in enumerate(waiting)
    ]
    scored.sort()
    return [waiting[index] for _, index in scored]


def shuffled(waiting: Sequence[Request], context: QueueContext) -> Sequence[Request]:
    """A random order that is a function of the seed and of what waits; a request keeps its lot while it waits."""
    return sorted(waiting, key=lambda request: _lot(context.seed, request.arrival_order))


def shortest_remaining(waiting: Sequence[Request], _context: QueueContext) -> Sequence[Request]:
    """By the output tokens that are still to come, as `min_tokens` states them (`max_tokens` where it does not)."""
    return sorted(waiting, key=_remaining)


def _remaining(request: Request) -> int:
    sampling = request.spec.sampling
    return (sampling.min_tokens or sampling.max_tokens) - request.num_output_tokens


def _lot(seed: int, order: int) -> int:
    """A well-mixed 64-bit function of (seed, order): splitmix64's finaliser."""
    mask = 2**64 - 1
    value = (order + 1 + (seed + 1) * 0x9E3779B97F4A7C15) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & mask
    return value ^ (value >> 31)


def _is_young(request: Request, context: QueueContext) -> bool:
    # An aged request that does not fit holds the queue: passed over again and again, it would never start.
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
    """The policy called `name`, or with its parameter `larry:ALPHA`, `apt:TAIL`, `goodput:TAIL`; raises ConfigError for
    anything else."""
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
