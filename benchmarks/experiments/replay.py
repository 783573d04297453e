"""One run of a scenario on a simulated machine: the engine's own core, policies and planner on the virtual clock.

A scenario holds arrivals, lengths and windows; a setting holds policies, budget and rate of offline work. Metrics
carry the names of the load generator's reports; times in seconds, throughput in tokens/s.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from typing import Any

from benchmarks.experiments.machine import Machine
from engine.api import EngineRequest, RequestClass
from engine.core import EngineCore
from engine.limits import DEFAULT_QUEUE
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import Collect, ModelRunner, SchedulerOutput
from engine.virtual import Arrival, VirtualDriver
from loadgen import traces
from loadgen.simulation.policies import find_policy
from loadgen.simulation.run import Metrics, Row, measure, request_of, rows_of
from loadgen.stats import stream
from loadgen.traces import Trace
from predictor.budget import BudgetParams
from predictor.features import LatencyPredictor
from predictor.model import Sample

ONLINE_ONLY = BudgetParams("hygen", 0.0)
PREFIX_BACKLOG = 1000
FIRST_GROUP, OWN_TOKENS = 10, 1_000_000
"""Token ids of groups' prefixes, and those that no two prompts share."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`online` by arrival; `offline` lengths (arrival ignored), repeated without end. `shared`: the group of each
    offline row and the number of prompt tokens that the group shares; empty: no row shares any.

    Requests that arrive in [warm_up, measure_end] are measured; the run goes on to `end` (infinite: until all is done).
    """

    online: tuple[Row, ...]
    offline: tuple[Row, ...] = ()
    warm_up: float = 0.0
    measure_end: float = math.inf
    end: float = math.inf
    shared: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a run. `offline_rate`: offline requests/s (None: a backlog that never ends, under `budget`).

    `profile`: the latency model, "" for the machine's own or a name in `Machine.profiles`.
    `offline_policy`: the order of waiting offline requests, "" for `psm` where prefixes are cached and else `fcfs`.
    `ttft`, `tbt`: absolute objectives in seconds; a finite `ttft` also bounds the wait (`--max-queue-time`).
    """

    budget: BudgetParams = ONLINE_ONLY
    offline_rate: float | None = None
    online_policy: str = "fcfs"
    profile: str = ""
    offline_policy: str = ""
    ttft: float = math.inf
    tbt: float = math.inf
    max_queue_time: str = DEFAULT_QUEUE


def replay(machine: Machine, scenario: Scenario, setting: Setting, seed: int) -> Metrics:
    """Run and measure; deterministic for equal arguments."""
    driver = make_driver(machine, scenario, setting, seed, machine.runner(seed))
    return measure(driver.run(scenario.end), scenario.warm_up, scenario.measure_end)


def recorded_steps(machine: Machine, scenario: Scenario, setting: Setting, seed: int) -> list[Sample]:
    """Every step of a run: its features and the seconds it took."""
    runner = Recording(machine.runner(seed))
    make_driver(machine, scenario, setting, seed, runner).run(scenario.end)
    return runner.steps


class Recording:
    """A runner that keeps the features of its steps."""

    def __init__(self, inner: ModelRunner) -> None:
        self.steps: list[Sample] = []
        self._inner = inner

    def launch(self, output: SchedulerOutput) -> Collect:
        result = self._inner.launch(output)()
        self.steps.append(Sample(output.features, result.latency))
        return lambda: result


def online_arrivals(rows: Sequence[Row], limit: int, *, alike: bool = True) -> list[Arrival]:
    """Return online requests, cut to `limit` tokens; not `alike`: each prompt begins with a token of its own."""
    return [
        Arrival(row[0], request_of(f"n{i}", row, RequestClass.ONLINE, limit, () if alike else (-1 - i,)))
        for i, row in enumerate(rows)
    ]


def part_of_trace(source: Trace, rate: float, count: int, seed: int, limit: int) -> tuple[Row, ...]:
    """Return the seed's own `count` requests of a trace, stretched to `rate` requests/s, cut to `limit` tokens.

    Parts hold equally many requests, each at the rate by itself: a busy part would else be a load of its own.
    """
    count = min(count, len(source))
    first = seed * count % (len(source) - count + 1)
    end = float(source.arrived_at[first + count]) if first + count < len(source) else source.span
    part = traces.window(source, float(source.arrived_at[first]), end)
    return rows_of(traces.stretch(part, part.rate / rate), limit)


def make_driver(
    machine: Machine, scenario: Scenario, setting: Setting, seed: int, runner: ModelRunner
) -> VirtualDriver:
    """Return the driver of a run that has not begun."""
    limit = machine.config.max_model_len
    core = make_core(machine, scenario, setting)
    arrivals = online_arrivals(scenario.online, limit, alike=not scenario.shared)
    offline = None
    if setting.offline_rate is not None:
        arrivals += _at_rate(scenario, setting.offline_rate, seed, limit)
        arrivals.sort(key=lambda arrival: arrival.at)
    elif setting.budget.latency_budget > 0 and scenario.offline:
        offline = _backlog(scenario, limit)
    window = (scenario.warm_up, scenario.measure_end)
    # Prefix order depends on the visible lines: a batch queue knows far more lines than run at a time.
    backlog = PREFIX_BACKLOG if scenario.shared else 2 * machine.config.max_num_seqs
    return VirtualDriver(core, runner, arrivals, offline, backlog=backlog, window=window)


def make_core(machine: Machine, scenario: Scenario, setting: Setting) -> EngineCore:
    """The engine under `setting`. Without offline work it needs no latency model, and so none
    refuses a request early: a comparison of online policies must serve the same requests under each."""
    model: LatencyPredictor | None = None
    if scenario.offline or setting.tbt < math.inf:
        model = machine.profile(setting.profile)
    # Without shared prefixes the tree has nothing to order by, and hashing made-up prompts costs as much as a step.
    policy = setting.offline_policy or ("psm" if machine.spec.prefix_caching else "fcfs")
    objective = StepObjective(setting.ttft, setting.tbt, budget=setting.budget)
    return EngineCore(
        replace(machine.config, max_queue_time=setting.max_queue_time),
        online_policy=find_policy(setting.online_policy),
        offline_policy=policy,
        model=model,
        objective=objective,
    )


def _backlog(scenario: Scenario, limit: int) -> Iterator[EngineRequest]:
    count = len(scenario.shared)
    for i, row in enumerate(cycle(scenario.offline)):
        head: tuple[int, ...] = ()
        if count:  # the group's prefix, then a question of its own
            group, shared = scenario.shared[i % count]
            head = (*((FIRST_GROUP + group,) * min(shared, row[1] - 1)), OWN_TOKENS + i)
        yield request_of(f"f{i}", row, RequestClass.OFFLINE, limit, head)


def _at_rate(scenario: Scenario, rate: float, seed: int, limit: int) -> list[Arrival]:
    """Offline requests as a Poisson process of its own."""
    if rate <= 0.0:
        return []
    random, at = stream(seed, "offline arrivals"), 0.0
    found: list[Arrival] = []
    while (at := at + float(random.exponential(1.0 / rate))) < scenario.end:
        row = scenario.offline[len(found) % len(scenario.offline)]
        found.append(Arrival(at, request_of(f"f{len(found)}", row, RequestClass.OFFLINE, limit)))
    return found


# --- replays side by side

Each = Callable[..., list[Any]]
"""Apply a function to each case, in order; the function, its argument and its result must be picklable."""


def one_by_one(run: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    """Apply `run` to each case in this process."""
    return list(map(run, cases))


@contextmanager
def side_by_side(workers: int) -> Iterator[Each]:
    """Yield `Each` of so many processes. One worker: in this process."""
    if workers <= 1:
        yield one_by_one
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    try:
        yield lambda run, cases: list(pool.map(run, cases))
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays of settings on named scenarios of one seed."""

    machine: Machine
    scenarios: Mapping[str, Scenario]
    seed: int
    each: Each

    def on(self, scenario: str, settings: Sequence[Setting]) -> list[Metrics]:
        """The metrics of each setting, in order."""
        return self.each(partial(replay, self.machine, self.scenarios[scenario], seed=self.seed), settings)
