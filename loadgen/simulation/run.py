"""Run of a load generator workload on a simulated machine: the real engine core on a virtual clock.

Deterministic for equal arguments.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.api import RequestClass
from engine.colocation.virtual import Arrival, VirtualDriver, VirtualRun
from engine.core import EngineCore
from engine.scheduling.objective import StepObjective
from loadgen.plan import FIRST_OFFLINE, Windows
from loadgen.prompts import PromptMaker, TokenIds
from loadgen.simulation.device import Simulated
from loadgen.simulation.measure import Metrics, measure
from loadgen.simulation.requests import request_of, rows_of
from loadgen.traces import Content, Trace
from loadgen.workloads import Workload


@dataclass(frozen=True, slots=True)
class Policies:
    """Scheduling policy of each class. `backlog`: open offline requests (default: twice the capacity of a step)."""

    online: str = "fcfs"
    offline: str = "psm"
    backlog: int | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """A run, its measure window in seconds, and the share of prompt tokens found in the cache."""

    run: VirtualRun
    window: tuple[float, float]
    prefix_hits: float


def simulate(
    device: Simulated,
    made: Workload,
    windows: Windows,
    objective: StepObjective,
    seed: int,
    policies: Policies = Policies(),
) -> Metrics:
    """Run and measure. Metrics have the names of the reports; in addition `prefix_hits` (share of tokens)."""
    ran = run_workload(device, made, windows, objective, seed, policies)
    return {**measure(ran.run, *ran.window), "prefix_hits": ran.prefix_hits}


def run_workload(
    device: Simulated,
    made: Workload,
    windows: Windows,
    objective: StepObjective,
    seed: int,
    policies: Policies,
    *,
    drain: bool = False,
) -> Ran:
    """Run a workload until the horizon, or with `drain` until every online request has ended or its time is up.

    Where the machine caches prefixes, prompts are the token ids that the load generator would send, else all tokens are
    alike. Jobs whose lines share prefixes end with their last line; others start over until the horizon.
    """
    config, shared = device.config, shares_prefixes(made)
    maker = PromptMaker(TokenIds(), "completions", seed, 0) if config.enable_prefix_caching else None
    model, runner = device.start(seed)
    # Without a cache the prefix tree has nothing to order by.
    offline_policy = "fcfs" if maker is None and policies.offline == "psm" else policies.offline
    core = EngineCore(
        config, online_policy=policies.online, offline_policy=offline_policy, model=model, objective=objective
    )
    limit, end = config.max_model_len, math.inf if windows.horizon is None else windows.horizon
    arrivals = [] if made.online is None else list(requests(made.online, "n", maker, limit, RequestClass.ONLINE))
    jobs = [job.lines for job in made.jobs if len(job.lines)]
    endless = not shared and math.isfinite(end)
    offline = (arrival.request for arrival in _lines(jobs, maker, limit, endless=endless)) if jobs else None
    measured = (windows.warmup, end - windows.cooldown)
    backlog = policies.backlog or 2 * config.max_num_seqs
    driver = VirtualDriver(core, runner, arrivals, offline, backlog=backlog, window=measured)
    run = driver.run(end, drain=windows.drain if drain else 0.0)
    stats = core.stats()
    hits = stats.prefix_hit_tokens / stats.prefix_queried_tokens if stats.prefix_queried_tokens else 0.0
    return Ran(run, measured, hits)


def shares_prefixes(made: Workload) -> bool:
    """Return whether any prompt of the workload has a part that others may share."""
    traces = [job.lines for job in made.jobs] + ([made.online] if made.online is not None else [])
    return any(content.segments for trace in traces for content in trace.content)


def _lines(jobs: Sequence[Trace], maker: PromptMaker | None, limit: int, *, endless: bool) -> Iterator[Arrival]:
    for turn in itertools.count():
        first = FIRST_OFFLINE
        for number, job in enumerate(jobs):
            yield from requests(job, f"f{turn}.{number}.", maker, limit, RequestClass.OFFLINE, first)
            first += len(job)
        if not endless:
            return


def requests(
    trace: Trace, name: str, maker: PromptMaker | None, limit: int, request_class: RequestClass, first: int = 0
) -> Iterator[Arrival]:
    """Return the requests of a trace, with prompts numbered from `first` as by the load generator."""
    for index, row in enumerate(rows_of(trace, limit)):
        tokens: tuple[int, ...] = ()
        if maker is not None:
            shown = Content(segments=trace.content_of(index).segments)
            tokens = tuple(maker.fields(first + index, row[1], shown)["prompt"])
        yield Arrival(row[0], request_of(f"{name}{index}", row, request_class, limit, tokens))
