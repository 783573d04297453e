"""Replays a workload on a virtual clock with the server's own core, policies and margins, and finds budgets by replay.

A step takes the time predicted by the latency model, times the measured variation of real steps. Torch-free;
deterministic for equal arguments.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass, SamplingParams
from engine.cache.snapshots import snapshots_of
from engine.colocation.waits import ArrivalWaits
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from engine.scheduling.policies import find_policy
from engine.scheduling.speculation import Speculation
from engine.scheduling.state import SchedulerState
from engine.speculation.trace import DraftTraces, TracedDrafts
from engine.virtual import Arrival, PredictedRunner, VirtualDriver, VirtualRecord, VirtualRun
from predictor.budget import BudgetParams
from predictor.budget_search import MAX_CONFIRMATIONS, SearchResult, search_budget
from predictor.features import BatchFeatures, LatencyPredictor
from predictor.judge import aggregate, attainments
from predictor.load import Lengths, OnlineArrival, resample
from predictor.model import LatencyModel
from predictor.online import OnlineModel, StepNoise
from predictor.slo import SLO, service_of

WARM_UP_SHARE = 0.1
USUAL_OFFLINE = tuple(Lengths(prompt, prompt // 8) for prompt in range(256, 769, 64))
"""Assumed lengths of offline requests before the first one arrives."""
REPLAYED_JOB = "replayed"
MIN_DRAIN = 60.0
"""Minimum seconds to complete requests after their window; an overloaded run gets the length of the window."""


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    """One window: online arrivals, ascending from 0 to at most `seconds`, and the lengths of offline requests."""

    arrivals: tuple[OnlineArrival, ...]
    seconds: float
    offline_lengths: tuple[Lengths, ...] = USUAL_OFFLINE

    @classmethod
    def recorded(
        cls,
        arrivals: Sequence[OnlineArrival],
        offline: Sequence[Lengths],
        rate: float,
        count: int,
        seed: int,
        *,
        longest: float = math.inf,
        idle: float = math.inf,
    ) -> "ReplayWindow":
        """Return a window of `count` arrivals resampled from the recorded ones, at `rate` requests per second.

        Raises ValueError if too few arrivals were recorded.

        Args:
            longest: Maximum seconds of the window.
            idle: Maximum seconds between two arrivals; longer ones would only replay offline work without chats.
        """
        window: list[OnlineArrival] = []
        at = previous = 0.0
        for arrival in resample(arrivals, rate, count, seed):
            at += min(arrival.at - previous, idle)
            previous = arrival.at
            if at > longest and window:
                break
            window.append(arrival._replace(at=at))
        return cls(tuple(window), window[-1].at, tuple(offline) or USUAL_OFFLINE)

    def online(self, max_model_len: int) -> Iterator[Arrival]:
        """Yield the online requests, cut to the context length. Prompts share only their cached part."""
        for index, (at, lengths, promise) in enumerate(self.arrivals):
            request = _request(f"online-{index}", index + 1, lengths, RequestClass.ONLINE, max_model_len)
            yield Arrival(at, request if promise is None else replace(request, promise=promise))

    def offline(self, max_model_len: int, seed: int) -> Iterator[EngineRequest]:
        """Yield offline requests without end, with lengths drawn from `offline_lengths`."""
        generator = random.Random(seed)
        for index in count():
            lengths = generator.choice(self.offline_lengths)
            yield _request(f"offline-{index}", -1 - index, lengths, RequestClass.OFFLINE, max_model_len)


def _request(name: str, salt: int, lengths: Lengths, request_class: RequestClass, max_model_len: int) -> EngineRequest:
    prompt = max(1, min(lengths.prompt, max_model_len - 2))
    output = max(1, min(lengths.output, max_model_len - prompt))
    cached = min(lengths.cached, prompt - 1)
    tokens = (0,) * cached + (salt,) + (0,) * (prompt - 1 - cached)
    tenant = request_class.value.encode()  # the two classes share no prefix
    job = REPLAYED_JOB if request_class is RequestClass.OFFLINE else ""
    return EngineRequest(name, tokens, SamplingParams(max_tokens=output), request_class, tenant, job=job)


@dataclass(frozen=True, slots=True)
class ReplayedServer:
    """The replayed server: its configuration, SLO and step times.

    `noise`: measured ÷ predicted times of real steps. Steps draw from their regime, so that the core keeps the margins
    of the live server.
    `drafts`: outcomes of the server's drafts; None: it drafts nothing.
    """

    model: LatencyModel
    slo: SLO
    config: SchedulerConfig
    online_policy: str = "fcfs"
    noise: StepNoise = ()
    drafts: DraftTraces | None = None


def normal_noise(mape: float) -> StepNoise:
    """Return 99 quantiles of measured ÷ predicted for a mean relative error, assuming log-normal errors."""
    errors = NormalDist(0.0, max(mape, 1e-9) * math.sqrt(math.pi / 2))
    return (tuple(math.exp(errors.inv_cdf((i + 0.5) / 99)) for i in range(99)),)


def replay(workload: ReplayWindow, server: ReplayedServer, budget: BudgetParams, seed: int = 0) -> dict[str, float]:
    """Replay the workload under a budget. Return metrics by their report names. L = 0: online only."""
    return metrics_of(run_workload(workload, server, budget, seed=seed), server.slo, workload.seconds)


TOLERANCE_SHARE = 0.5
"""Share of a tolerance that a search may use, since live chats lose more than a replay shows: where a replay found mean
gaps 4 % longer, they were 7.4 ± 2.3 % longer on two cores."""
BASELINES = 5
"""Number of online-only replays from which the noise of a baseline is computed."""


def baseline_noise(workload: ReplayWindow, server: ReplayedServer) -> tuple[dict[str, float], dict[str, float]]:
    """Return the mean metrics of online-only replays, and the variation by key of each tolerance.

    The replays differ in the variation of step times only. 95 % of the values lie within 1 ± the variation times the
    mean.
    """
    runs = [replay(workload, server, BudgetParams("tidemill", 0.0), seed) for seed in range(BASELINES)]
    means = {key: fmean(run[key] for run in runs) for key in runs[0]}
    keys = [key for key in server.slo.tolerances() if means[key] > 0.0]
    return means, {key: 2.0 * stdev(run[key] for run in runs) / means[key] for key in keys}


def run_workload(workload: ReplayWindow, server: ReplayedServer, budget: BudgetParams, *, seed: int = 0) -> VirtualRun:
    """Replay the workload and return the run, with requests in workload order. `seed` draws the step times.

    Every request is followed to its end, even past the window; offline tokens count only inside it.
    """
    model, noise, config = server.model, server.noise, server.config
    online = OnlineModel(model, _mean_error(noise))
    prompts = [(service_of(arrival.promise), arrival.lengths.to_compute) for arrival in workload.arrivals]
    waits = ArrivalWaits.of(server.slo, model, prompts, len(prompts) / workload.seconds if prompts else 0.0)
    assumed = online if noise else model
    core = EngineCore(
        config,
        online_policy=find_policy(server.online_policy),
        model=assumed,
        objective=waits.objective(server.slo, budget, searched=True),
        speculation=None if server.drafts is None else Speculation(drafts=TracedDrafts(server.drafts)),
        snapshots=snapshots_of(config, assumed),
    )
    driver = VirtualDriver(
        core,
        PredictedRunner(model, noise, online.observe if noise else None, seed),
        workload.online(config.max_model_len),
        workload.offline(config.max_model_len, seed=1) if budget.latency_budget > 0 else None,
        backlog=2 * config.max_num_seqs,
        window=(0.0, workload.seconds),
    )
    return driver.run(workload.seconds, drain=max(workload.seconds, MIN_DRAIN))


def _mean_error(noise: StepNoise) -> float:
    errors = [abs(1.0 / ratio - 1.0) for ratios in noise for ratio in ratios]
    return fmean(errors) if errors else 0.0


def metrics_of(run: VirtualRun, slo: SLO, seconds: float) -> dict[str, float]:
    """Return the aggregates of requests that arrived after the warm-up of a window of `seconds`.

    A refused request counts as missing its SLO.
    """
    records = [r for r in run.online if r.arrival.at >= WARM_UP_SHARE * seconds]
    usual = [r for r in records if slo.of(r.arrival.request.promise) is slo]
    found = aggregate([span_of(r, slo, run.end) for r in usual], [objective.key for objective in slo.objectives])
    judged = [(r.arrival.request.promise, r.ended is not None and is_good(r, slo)) for r in records]
    found |= attainments(slo, judged)
    found["offline_throughput"] = run.offline_tokens / seconds if seconds > 0 else 0.0
    return found


def is_good(record: VirtualRecord, slo: SLO) -> bool:
    """Return whether an ended request met its promise."""
    return slo.good(record.ttft, record.gaps, record.arrival.request.promise)


def span_of(record: VirtualRecord, slo: SLO, end: float) -> tuple[float, list[float]]:
    """Return (TTFT, gaps) of a request in seconds.

    Without a token by the `end` of a run, it waited at least until then. A refused request waited the TTFT limit plus
    its retry time.
    """
    waited = (slo.limit_of("ttft") or 0.0) + record.retry_after if record.rejected else end - record.arrival.at
    return waited if record.ttft is None else record.ttft, record.gaps


def offline_lengths(state: SchedulerState, limit: int) -> list[Lengths]:
    """Return the prompt length and the longest answer of up to `limit` offline requests that have not ended."""
    requests = chain(state.running[RequestClass.OFFLINE], state.waiting_offline)
    return [Lengths(r.num_prompt_tokens, r.spec.sampling.max_tokens) for r in islice(requests, limit)]


def step_range(model: LatencyPredictor, config: SchedulerConfig) -> tuple[float, float]:
    """Return the seconds of the smallest step and twice those of a full one: the search range of L."""
    smallest, largest = BatchFeatures(model.reach), BatchFeatures(model.reach)
    smallest.add_decodes(1, 1)
    largest.add_chunk(0, max(2, config.max_num_batched_tokens))
    low = model.predict(smallest)
    return low, max(2.0 * model.predict(largest), 2.0 * low)


class Replayed(NamedTuple):
    """A completed replay of a search. `window`: 0 for the searched one; `seconds`: its CPU time."""

    window: int
    budget: BudgetParams
    metrics: dict[str, float]
    seconds: float


def find_budget(
    first: ReplayWindow,
    others: Sequence[ReplayWindow],
    server: ReplayedServer,
    max_evaluations: int = 24,
    start: BudgetParams | None = None,
    cpu_seconds: float = math.inf,
    *,
    notes: list[Replayed] | None = None,
    clock: Callable[[], float] = time.process_time,
) -> SearchResult:
    """Search on the first window and confirm on the others.

    Args:
        max_evaluations: Maximum number of replays for a single other window.
        start: Budget to try first.
        cpu_seconds: CPU time after which the search makes no further replay but those that confirm.
        notes: Replays of a search that was interrupted; every new replay is appended.
        clock: CPU time of this process.
    """
    notes = [] if notes is None else notes
    known = {(each.window, each.budget): each for each in notes}
    halved = (
        o if o.tolerance is None else replace(o, tolerance=TOLERANCE_SHARE * o.tolerance) for o in server.slo.objectives
    )
    slo = replace(server.slo, objectives=tuple(halved))
    spent, noise = 0.0, dict[str, float]()
    if server.slo.tolerances():  # candidates are compared with the mean of several baselines
        began = clock()
        metrics, noise = baseline_noise(first, server)
        alone = BudgetParams("tidemill", 0.0)
        known[0, alone] = Replayed(0, alone, metrics, clock() - began)

    def evaluate_on(window: int, workload: ReplayWindow) -> Callable[[BudgetParams], dict[str, float]]:
        def evaluate(budget: BudgetParams) -> dict[str, float]:
            nonlocal spent
            found = known.get((window, budget))
            if found is None:
                began = clock()
                metrics = replay(workload, server, budget)
                found = known[window, budget] = Replayed(window, budget, metrics, clock() - began)
                notes.append(found)
            spent += found.seconds
            return found.metrics

        return evaluate

    found = search_budget(
        evaluate_on(0, first),
        slo,
        step_range(server.model, server.config),
        confirm=[evaluate_on(index, other) for index, other in enumerate(others, 1)],
        max_evaluations=max_evaluations + (MAX_CONFIRMATIONS + 1) * max(0, len(others) - 1),
        start=start,
        is_over=lambda: spent >= cpu_seconds,
    )
    return replace(found, noise=noise)
