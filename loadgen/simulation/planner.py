"""Capacity planner: finds the offline budget and the throughput of a machine on given traffic under an SLO.

HyGen §4.2 on a virtual clock. The traffic is split: the budget is searched on the first part, then confirmed and
reported on the second, because a server also decides by past traffic. Every replay runs the policies and limits of the
server on the real arrivals and offline lengths; all online requests of a window run to completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.api import RequestClass
from engine.colocation.replay import MIN_DRAIN, WARM_UP_SHARE, is_good, span_of, step_range
from engine.colocation.waits import ArrivalWaits
from engine.config import EngineConfig
from engine.scheduling.objective import UNLIMITED
from engine.virtual import VirtualRecord
from loadgen import InputError, traces
from loadgen.plan import Windows
from loadgen.simulation.device import Simulated
from loadgen.simulation.run import Policies, Ran, run_workload
from loadgen.workloads import Workload
from predictor.budget import DEFAULT_CLASS, BudgetParams
from predictor.budget_search import SearchResult, search_budget
from predictor.judge import aggregate
from predictor.slo import SLO, Objective, attainment_key, service_of

MAX_WARM_UP = 30.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Question:
    """Input of the planner: traffic, machine, configuration and SLO.

    `seconds` of the traffic are used, the first half for the search unless `budget` (no search) is given.
    `evaluations`: replays that the search may make. `fill_policy`: tidemill or hygen. `offline_policy`: see
    `engine.scheduling.queues`.
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
    offline_policy: str = "psm"

    @property
    def searches(self) -> bool:
        """Whether a budget is searched: both classes exist and no budget is given."""
        return self.budget is None and self.traffic.online is not None and bool(self.traffic.jobs)


@dataclass(frozen=True, slots=True)
class Arm:
    """Result of one replay.

    Online: the requests that arrived in the measure window, including `refused` (429) and `unfinished`; `judged`: by
    service class how many met their promise, of how many; for the default class the aggregates of the SLO in seconds,
    and for each per-request limit the share of requests that met it. Offline: prompt tokens, output tokens and lines of
    the window.
    """

    requests: int
    refused: int
    unfinished: int
    judged: Mapping[str, tuple[int, int]]
    values: Mapping[str, float]
    shares: Mapping[str, float]
    seconds: float
    offline_tokens: int
    offline_output_tokens: int
    offline_lines: int
    prefix_hits: float

    def attainment(self, service: str = DEFAULT_CLASS) -> float:
        """Return the share of good requests of a class; 1 without requests."""
        good, requests = self.judged[service]
        return good / requests if requests else 1.0

    @property
    def attainments(self) -> dict[str, float]:
        """The attainment of every class by key."""
        return {attainment_key(name): self.attainment(name) for name in self.judged}

    def keeps_targets(self, slo: SLO) -> bool:
        """Return whether every class has the attainment that `slo` asks for."""
        targets = [(name, own.attainment_target) for name, own in slo.by_class]
        return all(target is None or self.attainment(name) >= target - 1e-12 for name, target in targets)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by which the search compares replays."""
        rate = self.offline_tokens / self.seconds
        counts = {attainment_key(name).replace("slo_attainment", "requests"): n for name, (_, n) in self.judged.items()}
        return {**self.values, **self.attainments, **counts, "offline_throughput": rate}


@dataclass(frozen=True, slots=True)
class ObjectiveCheck:
    """One objective of the SLO: its bound in seconds (for a tolerance: relative to the online-only replay), the values
    of both replays, and whether it holds with offline work. For a per-request limit, `share` is the share of requests
    that meet it and `wanted` the required share."""

    objective: Objective
    bound: float
    alone: float
    beside: float
    kept: bool
    share: float | None = None
    wanted: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of the planner. Arms: online work alone, online with offline work, and offline work alone (None if the
    traffic has no such class). `search` is None if a budget was given."""

    question: Question
    budget: BudgetParams
    search: SearchResult | None
    alone: Arm | None
    beside: Arm
    offline_only: Arm | None
    verdicts: tuple[ObjectiveCheck, ...]

    @property
    def kept(self) -> bool:
        """Whether the SLO holds with offline work: each objective, and the per-request limits together."""
        return all(v.kept for v in self.verdicts) and self.beside.keeps_targets(self.question.slo)


def answer(question: Question, say: Say = lambda _line: None) -> Answer:
    """Search the budget, replay and evaluate; `say` gets a line per replay. Raises InputError for unusable traffic."""
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
    """Return the traffic for the search and the traffic for the report; without a search, both are the whole."""
    made, seconds = question.traffic, question.seconds
    if made.closed_loop:
        raise InputError("the requests have no arrival times; set --rate")
    if not question.searches:
        online = None if made.online is None else traces.window(made.online, 0.0, seconds)
        whole = replace(made, online=online, horizon=seconds)
        return whole, whole
    assert made.online is not None
    half = seconds / 2
    first, second = (
        replace(made, online=traces.window(made.online, start, start + half), horizon=half) for start in (0.0, half)
    )
    if not (len(first.online or ()) and len(second.online or ())):
        raise InputError(f"half of the {seconds:g} s has no online request: use more of the traffic (--duration)")
    return first, second


def verdicts(slo: SLO, alone: Arm | None, beside: Arm) -> tuple[ObjectiveCheck, ...]:
    """Evaluate every objective of the default class; empty without online requests."""
    if alone is None:
        return ()
    found = []
    for objective in slo.objectives:
        key = objective.key
        before, after = alone.values[key], beside.values[key]
        if objective.limit is None:
            assert objective.tolerance is not None
            bound = before * (1.0 + objective.tolerance)
            found.append(ObjectiveCheck(objective, bound, before, after, after <= bound + 1e-12))
        elif objective.percentile is None:
            found.append(ObjectiveCheck(objective, objective.limit, before, after, after <= objective.limit))
        else:
            share, wanted = beside.shares[key], objective.percentile / 100
            kept = share >= wanted - 1e-12
            found.append(ObjectiveCheck(objective, objective.limit, before, after, kept, share, wanted))
    return tuple(found)


class _Replays:
    """Replays of one part of the traffic; each runs once."""

    def __init__(self, question: Question, part: Workload, say: Say) -> None:
        self._question = question
        self._part = part
        self._say = say
        self._done: dict[BudgetParams | None, Arm] = {}

    def metrics(self, budget: BudgetParams) -> dict[str, float]:
        """Return the metrics of a budget for the search; a zero budget means online work alone."""
        arm = self.with_offline(budget) if budget.latency_budget > 0.0 else self.online_only()
        metrics = arm.metrics
        rate, count, good = metrics["offline_throughput"], arm.requests, min(arm.attainments.values())
        self._say(f"  {budget!s:24} {rate:9,.0f} offline tokens/s, {good:.2%} of {count} requests good")
        return metrics

    def online_only(self) -> Arm:
        """Replay the online requests alone."""
        if None not in self._done:
            self._done[None] = self._run(replace(self._part, jobs=()), BudgetParams("hygen", 0.0))
        return self._done[None]

    def with_offline(self, budget: BudgetParams) -> Arm:
        """Replay both classes. With a zero budget, offline work runs only while there is no online request."""
        if budget not in self._done:
            self._done[budget] = self._run(self._part, budget)
        return self._done[budget]

    def offline_only(self) -> Arm:
        """Replay the offline jobs alone."""
        return self._run(replace(self._part, online=None), UNLIMITED)

    def _run(self, made: Workload, budget: BudgetParams) -> Arm:
        question, config = self._question, self._question.config
        assert made.horizon is not None
        warm_up = min(WARM_UP_SHARE * made.horizon, MAX_WARM_UP)
        tokens = made.online.input_tokens.tolist() if made.online is not None else []
        prompts = [(DEFAULT_CLASS, count) for count in tokens]
        waits = ArrivalWaits.of(question.slo, question.machine.model, prompts, len(prompts) / made.horizon)
        windows = Windows(warm_up, 0.0, max(made.horizon, MIN_DRAIN), made.horizon)
        ran = run_workload(
            question.machine,
            made,
            windows,
            waits.objective(question.slo, budget, searched=True),
            question.seed,
            Policies(config.online_policy, question.offline_policy),
            drain=True,
            promises=[None, *(question.slo.promise(name) for name, _ in question.slo.classes)],
        )
        return measured(ran, question.slo)


def measured(ran: Ran, slo: SLO) -> Arm:
    """Measure a run. A refused or unfinished request meets no limit."""
    begin, end = ran.window
    run = ran.run
    online = [r for r in run.online if r.arrival.request.request_class is RequestClass.ONLINE]
    chosen = [r for r in online if begin <= r.arrival.at <= end]
    served = [r for r in chosen if not r.rejected]
    ended = [r for r in served if r.ended is not None]
    usual = [r for r in chosen if r.arrival.request.promise is None]
    limited = [o for o in slo.objectives if o.per_request]
    kept = {o.key: sum(SLO((o,)).good(r.ttft, r.gaps) for r in usual if r.ended is not None) for o in limited}
    return Arm(
        requests=len(chosen),
        refused=len(chosen) - len(served),
        unfinished=len(served) - len(ended),
        judged=_judged(chosen, slo),
        values=aggregate([span_of(r, slo, run.end) for r in usual], [o.key for o in slo.objectives]),
        shares={key: count / max(len(usual), 1) for key, count in kept.items()},
        seconds=end - begin,
        offline_tokens=run.offline_tokens,
        offline_output_tokens=run.offline_output_tokens,
        offline_lines=run.offline_ended,
        prefix_hits=ran.prefix_hits,
    )


def _judged(records: Sequence[VirtualRecord], slo: SLO) -> dict[str, tuple[int, int]]:
    """Return the good requests and all requests of every class."""
    found = {}
    for name, _ in slo.by_class:
        own = [r for r in records if service_of(r.arrival.request.promise) == name]
        found[name] = sum(r.ended is not None and is_good(r, slo) for r in own), len(own)
    return found
