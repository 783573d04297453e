"""One run of a scenario on a simulated machine: the engine's own core, policies and planner on the virtual clock.

A scenario holds arrivals, lengths and windows; a setting holds policies, budget and rate of offline work. Metrics
carry the names of the load generator's reports; times in seconds, throughput in tokens/s.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from benchmarks.experiments.machine import Machine
from engine.api import EngineRequest, RequestClass, RequestOutput
from engine.core import EngineCore
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import Collect, ModelRunner, SchedulerOutput
from engine.virtual import Arrival, Keeper, VirtualDriver, VirtualRun
from loadgen.simulation.policies import find_policy
from loadgen.simulation.run import Metrics, Row, measure, request_of
from loadgen.stats import stream
from predictor.budget import BudgetParams
from predictor.features import LatencyPredictor
from predictor.promise import Promise
from predictor.samples import Sample

ONLINE_ONLY = BudgetParams("hygen", 0.0)
PREFIX_BACKLOG = 1000
FIRST_GROUP, OWN_TOKENS = 10, 1_000_000
"""Token ids of groups' prefixes, and those that no two prompts share."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`online` by arrival; `offline` lengths (arrival ignored), repeated without end unless `finite`. `shared`: the
    group of each offline row and the number of prompt tokens that the group shares; empty: no row shares any.
    `windows`: seconds within which the rows of each job should end, jobs being equal parts of `offline`; empty: not
    measured.

    Requests that arrive in [warm_up, measure_end] are measured; the run goes on to `end` (infinite: until all is done).
    """

    online: tuple[Row, ...]
    offline: tuple[Row, ...] = ()
    warm_up: float = 0.0
    measure_end: float = math.inf
    end: float = math.inf
    finite: bool = False
    shared: tuple[tuple[int, int], ...] = ()
    windows: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a run. `offline_rate`: offline requests/s (None: a backlog that never ends, under `budget`).

    `profile`: whose latency model it uses, "" for the machine's own or a
    device's of `Machine.profiles`. `mixed`: offline rows arrive as online requests, evenly over so many seconds.
    `offline_policy`: the order of waiting offline requests, "" for `psm` where prefixes are cached and else `fcfs`.
    `ttft`, `tbt`: absolute objectives in seconds; a finite `ttft` makes LARRY's age guard active.
    """

    budget: BudgetParams = ONLINE_ONLY
    offline_rate: float | None = None
    online_policy: str = "fcfs"
    profile: str = ""
    mixed: float | None = None
    offline_policy: str = ""
    ttft: float = math.inf
    tbt: float = math.inf


def replay(machine: Machine, scenario: Scenario, setting: Setting, seed: int) -> Metrics:
    """Run and measure; deterministic for equal arguments. Where the scenario has windows, `lines_kept` is the share of
    offline rows that ended within theirs, and `lines_done` the seconds until the last one ended."""
    ends = OfflineEnds()
    driver = make_driver(machine, scenario, setting, seed, machine.runner(seed), ends if scenario.windows else None)
    found = measure(driver.run(scenario.end), scenario.warm_up, scenario.measure_end)
    return found | (ends.metrics(scenario) if scenario.windows else {})


class OfflineEnds:
    """When offline rows ended, in seconds by row. Has the methods of `engine.virtual.Keeper`."""

    def __init__(self) -> None:
        self._ended: dict[int, float] = {}

    def on_arrival(self, request_class: RequestClass, now: float) -> None:
        """Do nothing."""

    def on_promise(self, request: EngineRequest, now: float) -> None:
        """Do nothing."""

    def on_refused(
        self, request_class: RequestClass, prompt_tokens: int, now: float, promise: Promise | None = None
    ) -> None:
        """Do nothing."""

    def on_step(self, output: SchedulerOutput, measured: float, outputs: list[RequestOutput], now: float) -> None:
        """Record the ends of offline rows."""
        del output, measured
        for each in outputs:
            if each.finish_reason is not None and each.request_id.startswith("f"):
                self._ended[int(each.request_id[1:])] = now

    def metrics(self, scenario: Scenario) -> Metrics:
        """Return the share of the rows that ended within the window of their job, and the end of the last row."""
        count, windows = len(scenario.offline), scenario.windows
        kept = sum(at <= windows[row * len(windows) // count] for row, at in self._ended.items())
        return {"lines_kept": kept / count, "lines_done": max(self._ended.values(), default=0.0)}


def run(machine: Machine, scenario: Scenario, setting: Setting, seed: int) -> VirtualRun:
    """The run itself, with the token times of every online request."""
    return make_driver(machine, scenario, setting, seed, machine.runner(seed)).run(scenario.end)


def recorded_steps(machine: Machine, scenario: Scenario, setting: Setting, seed: int) -> list[Sample]:
    """Every step of a run: its features and the seconds it took."""
    runner = _Recording(machine.runner(seed))
    make_driver(machine, scenario, setting, seed, runner).run(scenario.end)
    return runner.steps


class _Recording:
    """A runner that keeps the features of its steps."""

    def __init__(self, inner: ModelRunner) -> None:
        self.steps: list[Sample] = []
        self._inner = inner

    def launch(self, output: SchedulerOutput) -> Collect:
        result = self._inner.launch(output)()
        self.steps.append(Sample(output.features, result.latency))
        return lambda: result


def make_driver(
    machine: Machine, scenario: Scenario, setting: Setting, seed: int, runner: ModelRunner, keeper: Keeper | None = None
) -> VirtualDriver:
    """The driver of a run that has not begun."""
    limit = machine.config.max_model_len
    core = make_core(machine, scenario, setting)
    arrivals = [
        Arrival(row[0], request_of(f"n{i}", row, RequestClass.ONLINE, limit, (-1 - i,) if scenario.shared else ()))
        for i, row in enumerate(scenario.online)
    ]
    offline = None
    if setting.mixed is not None:
        gap = setting.mixed / max(1, len(scenario.offline))
        arrivals += [
            Arrival(i * gap, request_of(f"f{i}", row, RequestClass.ONLINE, limit))
            for i, row in enumerate(scenario.offline)
        ]
    elif setting.offline_rate is not None:
        arrivals += _at_rate(scenario, setting.offline_rate, seed, limit)
    elif setting.budget.latency_budget > 0 and scenario.offline:
        offline = _backlog(scenario, limit)
    arrivals.sort(key=lambda arrival: arrival.at)
    window = (scenario.warm_up, scenario.measure_end)
    # Prefix order depends on the visible lines: a batch queue knows far more lines than run at a time.
    backlog = PREFIX_BACKLOG if scenario.shared else 2 * machine.config.max_num_seqs
    return VirtualDriver(core, runner, arrivals, offline, backlog=backlog, window=window, keeper=keeper)


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
        machine.config,
        online_policy=find_policy(setting.online_policy),
        offline_policy=policy,
        model=model,
        objective=objective,
    )


def _backlog(scenario: Scenario, limit: int) -> Iterator[EngineRequest]:
    rows = scenario.offline if scenario.finite else cycle(scenario.offline)
    count = len(scenario.shared)
    for i, row in enumerate(rows):
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
