"""The capacity planner: what a machine gives on some traffic under an SLO, and the offline budget that gives it.

HyGen §4.2 on a virtual clock. The traffic is cut in two: the budget is searched on the first part, confirmed and
reported on the second, as a server chooses by the past what it does next. Every replay runs the server's own policies
and limits on the real arrivals and the real offline lengths; all online requests of a window are served to their end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.api import RequestClass
from engine.colocation.replay import MIN_DRAIN, WARM_UP_SHARE, span_of
from engine.colocation.search import step_range
from engine.colocation.virtual import VirtualRecord
from engine.colocation.waits import ArrivalWaits
from engine.config import EngineConfig
from engine.scheduling.objective import UNLIMITED
from loadgen import traces
from loadgen.errors import InputError
from loadgen.plan import Windows
from loadgen.simulation.device import Simulated
from loadgen.simulation.run import Policies, Ran, run_workload
from loadgen.workloads import Workload
from predictor.budget import BudgetParams, SearchResult, search_budget
from predictor.slo import SLO, Objective, aggregate

MAX_WARM_UP = 30.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: this traffic on this machine, served under this configuration and SLO.

    `seconds` of the traffic are used, the first half for the search unless `budget` (no search) is given.
    `evaluations`: replays that the search may make. `fill_policy`: tidemill or hygen.
    """

    machine: Simulated
    traffic: Workload
    config: EngineConfig
    slo: SLO
    seconds: float
    evaluations: int = 16
    budget: BudgetParams | None = None
    seed: int = 0
    fill_policy: str = "tidemill"

    @property
    def searches(self) -> bool:
        """Whether there is a budget to find: both classes, and none given."""
        return self.budget is None and self.traffic.online is not None and bool(self.traffic.jobs)


@dataclass(frozen=True, slots=True)
class Arm:
    """One replay. Online: requests that arrived in the measure window, those refused (429) or not served to their end
    among them, how many kept every limit that holds for a request (`good`), the SLO's aggregates in seconds, and of
    each such limit the share of requests that kept it. Offline: prompt and output tokens and lines of the window.
    """

    requests: int
    refused: int
    unfinished: int
    good: int
    values: Mapping[str, float]
    shares: Mapping[str, float]
    seconds: float
    offline_tokens: int
    offline_output_tokens: int
    offline_lines: int
    prefix_hits: float

    @property
    def attainment(self) -> float:
        """The share of good requests, 1 without any."""
        return self.good / self.requests if self.requests else 1.0

    @property
    def metrics(self) -> dict[str, float]:
        """What a search judges a replay by."""
        rate = self.offline_tokens / self.seconds
        return {**self.values, "slo_attainment": self.attainment, "offline_throughput": rate}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One objective of the SLO: what was promised in seconds (of a tolerance: over the online-only run), what the two
    replays measured, and whether the promise holds beside offline work. Of a limit that holds for each request `share`
    is the share that keeps it and `wanted` the share that must."""

    objective: Objective
    bound: float
    alone: float
    beside: float
    kept: bool
    share: float | None = None
    wanted: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the machine gives. Arms: online work alone, with offline work beside it, and offline work alone (None where
    the traffic has no such class). `search` is None when a budget was given."""

    question: Question
    budget: BudgetParams
    search: SearchResult | None
    alone: Arm | None
    beside: Arm
    offline_only: Arm | None
    verdicts: tuple[Verdict, ...]

    @property
    def kept(self) -> bool:
        """Whether the SLO holds beside offline work: every objective, and those of each request together."""
        target = self.question.slo.attainment_target
        return all(v.kept for v in self.verdicts) and (target is None or self.beside.attainment >= target - 1e-12)


def answer(question: Question, say: Say = lambda _line: None) -> Answer:
    """Search, replay, judge. `say` is told a line after every replay. Raises InputError when nothing can be asked."""
    slo, made = question.slo, question.traffic
    first, second = parts(question)
    replays = _Replays(question, second, say)
    search = None
    if question.searches:
        search = search_budget(
            _Replays(question, first, say).metrics,
            slo,
            step_range(question.machine.model, question.machine.config),
            question.fill_policy,
            confirm=[replays.metrics],
            max_evaluations=question.evaluations,
        )
    budget = search.params if search is not None else question.budget or BudgetParams(question.fill_policy, 0.0)
    alone = replays.online_only() if made.online is not None else None
    offline_only = replays.offline_only() if made.jobs else None
    beside = replays.with_offline(budget) if alone is not None and offline_only is not None else alone or offline_only
    assert beside is not None, "traffic without requests"
    return Answer(question, budget, search, alone, beside, offline_only, verdicts(slo, alone, beside))


def parts(question: Question) -> tuple[Workload, Workload]:
    """The traffic to search on and the traffic to report on; both the whole where nothing is searched."""
    made, seconds = question.traffic, question.seconds
    if made.closed_loop:
        raise InputError("requests without arrival times say nothing of a rate: give --rate")
    if not question.searches:
        online = None if made.online is None else traces.window(made.online, 0.0, seconds)
        whole = replace(made, online=online, horizon=seconds)
        return whole, whole
    assert made.online is not None
    cuts = (0.0, seconds / 2, seconds)
    first, second = (
        replace(made, online=traces.window(made.online, start, end), horizon=end - start)
        for start, end in pairwise(cuts)
    )
    if not (len(first.online or ()) and len(second.online or ())):
        raise InputError(f"half of the {seconds:g} s has no online request: use more of the traffic (--duration)")
    return first, second


def verdicts(slo: SLO, alone: Arm | None, beside: Arm) -> tuple[Verdict, ...]:
    """Every objective judged as it was stated; none without online requests."""
    if alone is None:
        return ()
    found = []
    for objective in slo.objectives:
        key = objective.key
        before, after = alone.values[key], beside.values[key]
        if objective.limit is None:
            assert objective.tolerance is not None
            bound = before * (1.0 + objective.tolerance)
            found.append(Verdict(objective, bound, before, after, after <= bound + 1e-12))
        elif objective.percentile is None:
            found.append(Verdict(objective, objective.limit, before, after, after <= objective.limit))
        else:
            share, wanted = beside.shares[key], objective.percentile / 100
            kept = share >= wanted - 1e-12
            found.append(Verdict(objective, objective.limit, before, after, kept, share, wanted))
    return tuple(found)


class _Replays:
    """Replays of one part of the traffic, each made once."""

    def __init__(self, question: Question, part: Workload, say: Say) -> None:
        self._question = question
        self._part = part
        self._say = say
        self._done: dict[BudgetParams | None, Arm] = {}
        self._count = 0

    def metrics(self, budget: BudgetParams) -> dict[str, float]:
        """For the search; a budget of zero stands for online work alone."""
        arm = self.with_offline(budget) if budget.latency_budget > 0.0 else self.online_only()
        metrics = arm.metrics
        tried = f"L {budget.latency_budget * 1e3:.1f} ms, {budget.rule}" if budget.latency_budget else "online only"
        rate, count = metrics["offline_throughput"], arm.requests
        self._say(f"  {tried:24} {rate:9,.0f} offline tokens/s, {arm.attainment:.2%} of {count} requests good")
        return metrics

    def online_only(self) -> Arm:
        """The online requests alone."""
        if None not in self._done:
            self._done[None] = self._run(replace(self._part, jobs=()), BudgetParams("hygen", 0.0))
        return self._done[None]

    def with_offline(self, budget: BudgetParams) -> Arm:
        """Both classes; a budget of zero leaves offline work the time when there is no online request."""
        if budget not in self._done:
            self._done[budget] = self._run(self._part, budget)
        return self._done[budget]

    def offline_only(self) -> Arm:
        """The jobs with the machine to themselves."""
        return self._run(replace(self._part, online=None), UNLIMITED)

    def _run(self, made: Workload, budget: BudgetParams) -> Arm:
        question, config = self._question, self._question.config
        assert made.horizon is not None
        warm_up = min(WARM_UP_SHARE * made.horizon, MAX_WARM_UP)
        prompts = made.online.input_tokens.tolist() if made.online is not None else []
        waits = ArrivalWaits.of(question.slo, question.machine.model, prompts, len(prompts) / made.horizon)
        windows = Windows(warm_up, 0.0, max(made.horizon, MIN_DRAIN), made.horizon)
        ran = run_workload(
            question.machine,
            made,
            windows,
            waits.objective(question.slo, budget, searched=True),
            question.seed,
            Policies(config.online_policy, config.offline_policy),
            drain=True,
        )
        return measured(ran, question.slo)


def measured(ran: Ran, slo: SLO) -> Arm:
    """What a run gave; a request that was refused or not served to its end kept nothing."""
    begin, end = ran.window
    run = ran.run
    chosen = [r for r in run.online if _is_online(r) and begin <= r.arrival.at <= end]
    served = [r for r in chosen if not r.rejected]
    ended = [r for r in served if r.ended is not None]
    limited = [o for o in slo.objectives if o.per_request]
    shares = {o.key: sum(SLO((o,)).good(r.ttft, r.gaps) for r in ended) / max(len(chosen), 1) for o in limited}
    return Arm(
        requests=len(chosen),
        refused=len(chosen) - len(served),
        unfinished=len(served) - len(ended),
        good=sum(slo.good(r.ttft, r.gaps) for r in ended),
        values=aggregate([span_of(r, slo, run.end) for r in chosen], [o.key for o in slo.objectives]),
        shares=shares,
        seconds=end - begin,
        offline_tokens=run.offline_tokens,
        offline_output_tokens=run.offline_output_tokens,
        offline_lines=run.offline_ended,
        prefix_hits=ran.prefix_hits,
    )


def _is_online(record: VirtualRecord) -> bool:
    return record.arrival.request.request_class is RequestClass.ONLINE
