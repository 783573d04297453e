"""Add the statistics of the successive processes of one engine, and of several engines."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

from engine.api import ClassStanding, ColocationStats, EngineInfo, EngineStats, EngineView, TokenCosts
from predictor.budget import Standing

_NOT_ADDED = frozenset({"colocation", "token_costs", "engines", "pipelines"})
GAUGES = _NOT_ADDED | frozenset(
    {
        "running",
        "waiting",
        "running_adapters",
        "waiting_adapters",
        "units_total",
        "units_free",
        "units_cached",
        "units_owned",
        "host_units_total",
    }
    | {"host_units_used", "host_units_cached", "hidden_blocks", "restarts", "resumed_requests"}
    | {"state_slots_total", "state_slots_used", "lanes_waiting", "job_tokens"}
)
COUNTERS = tuple(field.name for field in fields(EngineStats) if field.name not in GAUGES)
COLOCATION_COUNTERS = (
    "good_requests", "bad_requests", "breaker_openings", "offline_tokens", "model_refits", "model_refits_refused",
    "class_good", "class_bad", "class_refused", "learned",
)  # fmt: skip
_COLOCATION_MEANS = ("latency_budget", "interference_weight", "decode_value", "predictor_mape", "offline_share")
_BREAKER = ("closed", "half_open", "open")


class Figures:
    """The statistics of all processes of one engine as if they were one, so that counters do not fall at a restart.

    `last`: the last answer of the current process; `restarts`: restarts by cause.
    """

    def __init__(self) -> None:
        self.last = EngineStats()
        self.restarts: Counter[str] = Counter()
        self._before = EngineStats()

    def process_ended(self) -> None:
        """Add the counters of the ended process to the total; those of the next process begin at zero."""
        self._before = _continued(self._before, self.last)
        colocation = self.last.colocation
        zeros: dict[str, Any] = {name: type(getattr(colocation, name))() for name in COLOCATION_COUNTERS if colocation}
        self.last = replace(
            self.last,
            **{name: getattr(EngineStats(), name) for name in COUNTERS},
            colocation=colocation and replace(colocation, **zeros),
        )

    def total(self, resumed: int) -> EngineStats:
        """Return the sum over all processes. `resumed`: number of requests that another process continued."""
        stats = _continued(self._before, self.last)
        return replace(stats, restarts=dict(self.restarts), resumed_requests=resumed)


def _continued(before: EngineStats, last: EngineStats) -> EngineStats:
    """Return the statistics of a process with the counters of the processes before it added."""
    counters = {name: _added([getattr(before, name), getattr(last, name)]) for name in COUNTERS}
    colocation = last.colocation or before.colocation
    if before.colocation is not None and last.colocation is not None:
        both = (before.colocation, last.colocation)
        sums = {name: _added(list(map(attrgetter(name), both))) for name in COLOCATION_COUNTERS}
        colocation = replace(last.colocation, **sums)
    return replace(last, **counters, colocation=colocation)


def total(views: Sequence[EngineView]) -> EngineStats:
    """Return the total of all engines, with each engine in `engines`. Objectives are those of the worst engine."""
    stats = [view.stats for view in views]
    added = {
        field.name: _added([getattr(each, field.name) for each in stats])
        for field in fields(EngineStats)
        if field.name not in _NOT_ADDED
    }
    colocation = [each.colocation for each in stats if each.colocation is not None]
    costs = [each.token_costs for each in stats if each.token_costs is not None]
    return EngineStats(
        **added,
        colocation=_together(colocation) if colocation else None,
        token_costs=_side_by_side(costs) if costs else None,
        engines=tuple(views),
    )


def info_of_all(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the info of the fleet: the shortest context limit and the sum of the caches."""
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        cache_tokens=sum(info.cache_tokens for info in infos),
    )


def _added(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        counts: Counter[Any] = Counter()
        for value in values:
            counts.update(value)
        return dict(counts)
    return sum(values)


def _side_by_side(costs: Sequence[TokenCosts]) -> TokenCosts:
    """Return the seconds per token of all engines computing in parallel."""
    return TokenCosts(*(1.0 / sum(1.0 / value for value in values) for values in zip(*costs, strict=True)))


def _together(stats: Sequence[ColocationStats]) -> ColocationStats:
    """Combine co-location statistics.

    Counts and rates are added, settings are averaged, and attainment is weighted by requests. Each objective has the
    standing of the engine that is furthest from meeting it.
    """
    weights = [each.good_requests + each.bad_requests for each in stats]
    worst = max(stats, key=lambda each: _BREAKER.index(each.breaker) if each.breaker in _BREAKER else -1)
    summed = (*COLOCATION_COUNTERS, "online_rate")
    figures: dict[str, Any] = {name: _added(list(map(attrgetter(name), stats))) for name in summed}
    figures |= {name: _mean(map(attrgetter(name), stats)) for name in _COLOCATION_MEANS}
    return replace(
        stats[0],
        **figures,
        attainment=_mean([each.attainment for each in stats], weights),
        objectives=tuple(_objectives(stats)),
        classes=tuple(_class_together(stats, index) for index in range(len(stats[0].classes))),
        breaker=worst.breaker,
        breaker_cause=worst.breaker_cause,
        held=next((each.held for each in stats if each.held), ""),
        overrun=max(each.overrun for each in stats),
    )


def _class_together(stats: Sequence[ColocationStats], index: int) -> ClassStanding:
    name = stats[0].classes[index].name
    weights = [each.class_good.get(name, 0) + each.class_bad.get(name, 0) for each in stats]
    shares = [each.classes[index].attainment for each in stats]
    return stats[0].classes[index]._replace(attainment=_mean(shares, weights))


def _objectives(stats: Sequence[ColocationStats]) -> Iterable[Standing]:
    names = dict.fromkeys(standing.objective for each in stats for standing in each.objectives)
    for name in names:
        standings = [standing for each in stats for standing in each.objectives if standing.objective == name]
        yield max(standings, key=_distance)


def _distance(standing: Standing) -> float:
    """Return an objective's value relative to its bound; -1 if unknown."""
    share = standing.value / standing.bound if standing.bound else 0.0
    return share if math.isfinite(share) else -1.0


def _mean(values: Iterable[float], weights: Iterable[float] = repeat(1.0)) -> float:
    """Return the weighted mean without NaN values; NaN if there are no others."""
    pairs = [(value, weight or 1) for value, weight in zip(values, weights, strict=False) if not math.isnan(value)]
    heaviest = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / heaviest if pairs else math.nan
