"""Judge online requests against an SLO, individually and over a sliding window.

A limit on requests (`ttft_p99=1s`) is met or missed by each request. A limit on an aggregate (`tbt_mean=50ms`) and a
tolerance relative to the online-only run (`5%`) are met or missed by the window; a request then counts as good if the
objective was met when the request ended. The caller sets the baseline of a tolerance from a replay of the same requests
without offline work. Until then the objective is not judged.

Pure: times are arguments, in seconds.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from predictor.budget import DEFAULT_CLASS, Promise
from predictor.slo import (
    SLO,
    TOLERANCE_KEYS,
    Objective,
    Standing,
    attainment_key,
    nearest_rank,
    parse_key,
    service_of,
)

WINDOW = 200
"""Maximum number of requests in the window."""
MAX_AGE = 600.0
"""Maximum age in seconds of a request in the window."""
SLACK = 0.01
"""Relative excess over a bound that is attributed to prediction error instead of offline work."""


class Served(NamedTuple):
    """One online request as measured at the client. `ttft` is None if no token arrived; `failed` marks an error.

    `promise`: as in `EngineRequest`.
    """

    arrival: float
    ttft: float | None
    gaps: Sequence[float]
    failed: bool = False
    promise: Promise | None = None


class Verdict(NamedTuple):
    """Result for one request.

    Attributes:
        good: Whether every objective was met when the request ended. None if no objective can be evaluated yet.
        limits_kept: Whether every limit on single requests was met.
        excesses: Excess over the bound of each aggregate, by key. A positive mean over requests breaks the bound.
        used: Largest share of a limit on single requests that the request took.
    """

    good: bool | None
    limits_kept: bool
    excesses: dict[str, float]
    used: float


@dataclass(slots=True)
class _Judged:
    at: float
    served: Served
    values: dict[str, float]
    kept: dict[str, bool]
    good: bool | None = None
    over: dict[str, float] = field(default_factory=dict)


def aggregate(
    requests: Sequence[tuple[float, Sequence[float]]], keys: Sequence[str] = TOLERANCE_KEYS
) -> dict[str, float]:
    """Aggregate (ttft, gaps) of the requests of a window by key, in seconds; gaps are pooled.

    A metric without a value (no requests, no gaps) is 0. Raises SLOError for an unknown key.
    """
    pools: dict[str, list[float]] = {
        "ttft": [ttft for ttft, _ in requests],
        "tbt": [gap for _, gaps in requests for gap in gaps],
        "tpot": [math.fsum(gaps) / len(gaps) for _, gaps in requests if gaps],
        "e2e": [ttft + math.fsum(gaps) for ttft, gaps in requests],
    }
    ordered = {metric: sorted(pool) for metric, pool in pools.items()}
    found = {}
    for key in keys:
        metric, percentile = parse_key(key)
        pool = ordered[metric]
        if not pool:
            found[key] = 0.0
        elif percentile is None:
            found[key] = math.fsum(pool) / len(pool)
        else:
            found[key] = nearest_rank(pool, percentile)
    return found


def attainments(slo: SLO, requests: Sequence[tuple[Promise | None, bool]]) -> dict[str, float]:
    """Return the attainment of every class by key, 1 without requests.

    `requests`: the promise to each request, and whether the request was good.
    """
    found = {}
    for name, _ in slo.by_class:
        own = [good for promise, good in requests if service_of(promise) == name]
        found[attainment_key(name)] = sum(own) / len(own) if own else 1.0
    return found


class Judge:
    """Sliding window of judged requests of the class `name`. `good`, `bad` and `refused` count since the start.

    A request with a promise of its own is judged by it: its values count in proportion to the limits of its class.
    """

    def __init__(self, slo: SLO, name: str = DEFAULT_CLASS) -> None:
        self.slo = slo
        self._prefix = "" if name == DEFAULT_CLASS else f"{name}:"
        self.good = self.bad = self.refused = 0
        self._window: deque[_Judged] = deque()
        self._over = dict.fromkeys((o.key for o in slo.objectives if not o.per_request), 0.0)
        self._baseline: Mapping[str, float] = {}
        self._standings: tuple[Standing, ...] | None = None

    def judge(self, now: float, served: Served) -> Verdict:
        """Add a request that ended at `now` and judge it."""
        values = self.slo.values(served.ttft, served.gaps, served.promise)
        judged = _Judged(now, served, values, {})
        self._window.append(judged)
        self._weigh(judged)
        self._forget(now)
        for objective in self.slo.objectives:
            kept = self._keeps(objective, judged)
            if kept is not None:
                judged.kept[objective.key] = kept
        promise = served.promise
        limits_kept = not served.failed and all(judged.kept[o.key] for o in self.slo.objectives if o.per_request)
        limits_kept = limits_kept and (promise is None or promise.kept(served.ttft, served.gaps))
        if served.failed or judged.kept or not self.slo.objectives:
            judged.good = not served.failed and all(judged.kept.values()) and (promise is None or limits_kept)
            self.good += judged.good
            self.bad += not judged.good
        self._standings = None
        shares = [values[o.key] / o.limit for o in self.slo.objectives if o.per_request and o.limit]
        return Verdict(judged.good, limits_kept, self._absolute_excesses(served), max(shares, default=0.0))

    def _keeps(self, objective: Objective, judged: _Judged) -> bool | None:
        """Return whether the objective is met as the request ends; None if its baseline is unknown."""
        if objective.per_request:
            assert objective.limit is not None
            return judged.values[objective.key] <= objective.limit
        if math.isnan(self._bound(objective)):
            return None
        return self._over[objective.key] <= 1e-9

    def _absolute_excesses(self, served: Served) -> dict[str, float]:
        objectives = (o for o in self.slo.objectives if o.limit is not None and not o.per_request)
        return {o.key: excess(o, served, (1.0 + SLACK) * (o.limit or 0.0)) for o in objectives}

    def set_baseline(self, aggregates: Mapping[str, float]) -> None:
        """Set the aggregates of the online-only run, in seconds by key, and re-evaluate the window against them."""
        self._baseline = dict(aggregates)
        for key in self._over:
            self._over[key] = 0.0
        for judged in self._window:
            judged.over.clear()
            self._weigh(judged)
        self._standings = None

    def _weigh(self, judged: _Judged) -> None:
        """Add the request's excesses over the bounds of aggregates."""
        for objective in self.slo.objectives:
            if not objective.per_request and not math.isnan(bound := self._bound(objective)):
                judged.over[objective.key] = excess(objective, judged.served, bound)
                self._over[objective.key] += judged.over[objective.key]

    def attainment(self, now: float) -> float:
        """Return the share of good requests in the window; NaN without judged requests."""
        return _share(self.verdicts(now))

    def verdicts(self, now: float) -> list[bool]:
        """Return whether each judged request in the window was good."""
        self._forget(now)
        return [judged.good for judged in self._window if judged.good is not None]

    def standings(self, now: float) -> tuple[Standing, ...]:
        """Return every objective evaluated over the window, in the order of the SLO."""
        self._forget(now)
        if self._standings is None:
            self._standings = tuple(map(self._standing, self.slo.objectives))
        return self._standings

    def breaks_a_limit(self, served: Served) -> bool:
        """Return whether the unfinished request already exceeds a limit on single requests."""
        values = self.slo.values(served.ttft, served.gaps, served.promise)
        return any(values[o.key] > (o.limit or 0.0) for o in self.slo.objectives if o.per_request)

    def _standing(self, objective: Objective) -> Standing:
        key = objective.key
        attainment = _share([judged.kept[key] for judged in self._window if key in judged.kept])
        if objective.per_request:
            assert objective.percentile is not None and objective.limit is not None
            values = [judged.values[key] for judged in self._window]
            value = nearest_rank(values, objective.percentile) if values else math.nan
            return Standing(f"{self._prefix}{objective}", value, objective.limit, attainment)
        spans = [(s.ttft, s.gaps) for s in (judged.served for judged in self._window) if s.ttft is not None]
        value = aggregate(spans, [key])[key] if spans else math.nan
        return Standing(f"{self._prefix}{objective}", value, self._bound(objective), attainment)

    def _bound(self, objective: Objective) -> float:
        """Return the upper bound of the objective; NaN while its baseline is unknown."""
        if objective.limit is not None:
            return objective.limit
        assert objective.tolerance is not None
        return self._baseline.get(objective.key, math.nan) * (1.0 + objective.tolerance)

    def _forget(self, now: float) -> None:
        window = self._window
        while window and (len(window) > WINDOW or window[0].at < now - MAX_AGE):
            for key, over in window.popleft().over.items():
                self._over[key] -= over
            self._standings = None
        if not window:
            self._over = dict.fromkeys(self._over, 0.0)  # discard accumulated rounding errors


def attainment_of(judges: Sequence[Judge], now: float) -> float:
    """Return the share of good requests of all classes; NaN without judged requests."""
    return _share([good for judge in judges for good in judge.verdicts(now)])


def _share(kept: Sequence[bool]) -> float:
    return sum(kept) / len(kept) if kept else math.nan


def excess(objective: Objective, served: Served, bound: float) -> float:
    """Return the request's contribution to the excess of an aggregate over `bound`.

    The sum over requests is positive iff the aggregate exceeds the bound. For a mean, the contribution is summed over
    the values of the request in units of the bound. For a percentile, it is the number of values above the bound minus
    the number that may be. A request without a value contributes 0.
    """
    if served.ttft is None:
        return 0.0
    values = objective.values(served.ttft, served.gaps)
    if objective.percentile is None:
        return math.fsum(values) / bound - len(values)
    return sum(value > bound for value in values) - (1.0 - objective.percentile / 100) * len(values)


def excess_over(
    objective: Objective, served: Served, alone: Mapping[str, float], own: tuple[float, float]
) -> float | None:
    """Return `excess` over a tolerance; None without a baseline or a value.

    `alone` holds the aggregates of the online-only run by key, `own` the TTFT and mean gap of this request in that run.
    Means are compared per request, so that differences between requests add no noise.
    """
    base = alone.get(objective.key, 0.0)
    if served.ttft is None or objective.tolerance is None or base <= 0.0:
        return None
    factor = (1.0 + objective.tolerance) * (1.0 + SLACK)
    if objective.percentile is not None:
        return excess(objective, served, factor * base)
    ttft, gap = own
    if objective.metric == "ttft":
        return (served.ttft - factor * ttft) / base
    if not served.gaps:
        return None
    over = (math.fsum(served.gaps) - factor * gap * len(served.gaps)) / base
    return over if objective.metric == "tbt" else over / len(served.gaps)
