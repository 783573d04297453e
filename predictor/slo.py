"""Service-level objectives: what the user states, and how one request and one window are judged by it.

`X_pNN=limit` limits that value of each request (`tbt_pNN`: the nearest-rank percentile of the request's own gaps; no
gap: it holds) and asks for NN % of requests good. `X_mean=limit`, and every tolerance in percent over the online-only
run (HyGen §4.2), act on the aggregates of a window, gaps pooled. Times are seconds inside, units in the text.

Knows nothing of requests, clocks or budgets.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

METRICS = ("ttft", "tbt", "tpot")
PERCENTILES = (50, 99)
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TOLERANCE_KEYS = ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99")
"""What a bare percentage stands for: HyGen's four metrics."""
BEYOND_PERCENTILE = 10
FEWEST_ARRIVALS = 200

ALLOWED = (
    "an objective is {ttft,tbt,tpot}_{mean,p50..p99}=VALUE with VALUE in us, ms, s or %, or a percentage alone; "
    "for example 'ttft_p99=1s,tbt_p99=100ms' or '5%'"
)


class SLOError(ValueError):
    """A service-level objective that cannot be read; names the offending part and what is allowed."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"SLO '{part}': {reason} ({ALLOWED})")
        self.part = part


@dataclass(frozen=True, slots=True)
class Objective:
    """One constraint: `metric` (one of METRICS), `percentile` (None: the mean), and either `limit` in seconds or
    `tolerance` as a ratio over the online-only run."""

    metric: str
    percentile: int | None
    limit: float | None = None
    tolerance: float | None = None

    @property
    def key(self) -> str:
        """Its name in reports: `ttft_p99`, `tbt_mean` ..."""
        return f"{self.metric}_{'mean' if self.percentile is None else f'p{self.percentile}'}"

    @property
    def per_request(self) -> bool:
        """True when the limit holds for each request, not for an aggregate."""
        return self.limit is not None and self.percentile is not None

    def __str__(self) -> str:
        if self.tolerance is not None:
            return f"{self.key}={self.tolerance * 100:g}%"
        assert self.limit is not None
        unit = next(unit for unit in ("s", "ms", "us") if self.limit >= UNITS[unit] or unit == "us")
        return f"{self.key}={self.limit / UNITS[unit]:.12g}{unit}"


@dataclass(frozen=True, slots=True)
class SLO:
    """All constraints together; every one must hold. An empty SLO always holds."""

    objectives: tuple[Objective, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SLO":
        """The SLO in `text`; raises SLOError. A tolerance for all metrics gives way to objectives for single ones."""
        general: Objective | None = None
        named: dict[str, Objective] = {}
        for part in (part.strip() for part in text.split(",")):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals:
                if general is not None:
                    raise SLOError(part, "a second percentage for all metrics")
                general = _parse_general(part)
                continue
            objective = _parse_objective(part, name.lower(), value)
            if objective.key in named:
                raise SLOError(part, f"a second objective for {objective.key}")
            named[objective.key] = objective
        if general is not None:
            for key in TOLERANCE_KEYS:
                metric, statistic = _parse_key(key)
                named.setdefault(key, Objective(metric, statistic, tolerance=general.tolerance))
        return cls(tuple(named.values()))

    def __str__(self) -> str:
        """Text that parses to the same SLO."""
        return ",".join(map(str, self.objectives))

    def limits(self) -> dict[str, float]:
        """Absolute limits in seconds by key."""
        return {o.key: o.limit for o in self.objectives if o.limit is not None}

    def tolerances(self) -> dict[str, float]:
        """Tolerated interference by key, as a ratio over the online-only run."""
        return {o.key: o.tolerance for o in self.objectives if o.tolerance is not None}

    @property
    def attainment_target(self) -> float | None:
        """The share of requests that must be good: the strictest percentile; None when no limit is per request."""
        targets = [o.percentile / 100 for o in self.objectives if o.per_request and o.percentile is not None]
        return max(targets, default=None)

    @property
    def arrivals_needed(self) -> int:
        """How many requests a window must have to tell whether it keeps this SLO: ten beyond the highest percentile."""
        percentile = max((o.percentile for o in self.objectives if o.percentile is not None), default=0)
        return max(FEWEST_ARRIVALS, round(100 * BEYOND_PERCENTILE / (100 - percentile)))

    def limit_of(self, metric: str) -> float | None:
        """The strictest absolute limit on `metric` in seconds, of whatever statistic; None without one."""
        return min((o.limit for o in self.objectives if o.metric == metric and o.limit is not None), default=None)

    @property
    def gap_limited(self) -> bool:
        """True when an absolute limit holds for every gap (`tbt_pNN`), not only for their mean."""
        return any(o.metric == "tbt" and o.per_request for o in self.objectives)

    def good(self, ttft: float | None, gaps: Sequence[float]) -> bool:
        """True when one request that ended well kept every per-request limit.

        `ttft` in seconds (None: no token came, never good while anything is limited), `gaps` between its tokens.
        """
        limited = [o for o in self.objectives if o.per_request]
        if ttft is None:
            return not limited
        values = {"ttft": [ttft], "tbt": gaps, "tpot": [math.fsum(gaps) / len(gaps)] if gaps else []}
        for objective in limited:
            assert objective.limit is not None and objective.percentile is not None
            measured = values[objective.metric]
            if measured and nearest_rank(measured, objective.percentile) > objective.limit:
                return False
        return True

    def violations(
        self, window: Mapping[str, float], baseline: Mapping[str, float] | None = None, margin: float = 1.0
    ) -> dict[str, float]:
        """Violated constraints of a window of aggregates: key → (value − bound) ÷ bound, positive. Empty: all hold.

        `window` and `baseline` (the online-only run of the same workload) map the keys of the objectives to seconds,
        and `slo_attainment` to a share when a limit is per request. `margin` is the share of the room between base
        line and limit that may be used. Raises KeyError when a metric is missing, ValueError for a tolerance without
        a base line.
        """
        found = {}
        for key, bound in self.bounds(baseline, margin).items():
            value = 1.0 - window["slo_attainment"] if key == "slo_attainment" else window[key]
            if not value <= bound + 1e-12:
                found[key] = (value - bound) / max(bound, 1e-9)
        return found

    def bounds(self, baseline: Mapping[str, float] | None, margin: float = 1.0) -> dict[str, float]:
        """Upper bounds by key on the aggregates of a window; that of `slo_attainment` is on the share of misses.

        A limit that the base line itself breaks is relaxed to the base line: co-location shall not make it worse.
        """
        bounds: dict[str, float] = {}
        for objective in self.objectives:
            if objective.tolerance is not None:
                if baseline is None:
                    raise ValueError(f"'{objective}' is a tolerance and needs the online-only run to compare with")
                bounds[objective.key] = baseline[objective.key] * (1.0 + margin * objective.tolerance)
            elif objective.limit is not None and not objective.per_request:
                base = None if baseline is None else baseline[objective.key]
                bounds[objective.key] = _bound(objective.limit, base, margin)
        if (target := self.attainment_target) is not None:
            base = None if baseline is None else 1.0 - baseline["slo_attainment"]
            bounds["slo_attainment"] = _bound(1.0 - target, base, margin)
        return bounds


def nearest_rank(values: Sequence[float], percentile: float) -> float:
    """The smallest value that at least `percentile` % of `values` (not empty, any order) do not exceed."""
    return sorted(values)[max(math.ceil(percentile * len(values) / 100), 1) - 1]


def aggregate(
    requests: Sequence[tuple[float, Sequence[float]]], keys: Sequence[str] = TOLERANCE_KEYS
) -> dict[str, float]:
    """Aggregates of a window by key, in seconds, from (ttft, gaps) of each request; gaps are pooled.

    A metric without a value (no requests, no gaps) is 0. Raises SLOError for a key that is none.
    """
    pools: dict[str, list[float]] = {
        "ttft": [ttft for ttft, _ in requests],
        "tbt": [gap for _, gaps in requests for gap in gaps],
        "tpot": [math.fsum(gaps) / len(gaps) for _, gaps in requests if gaps],
    }
    ordered = {metric: sorted(pool) for metric, pool in pools.items()}
    found = {}
    for key in keys:
        metric, percentile = _parse_key(key)
        pool = ordered[metric]
        if not pool:
            found[key] = 0.0
        elif percentile is None:
            found[key] = math.fsum(pool) / len(pool)
        else:
            found[key] = nearest_rank(pool, percentile)
    return found


def _bound(limit: float, base: float | None, margin: float) -> float:
    if base is None:
        return limit * margin
    return max(base, base + margin * (limit - base))


def _parse_key(key: str) -> tuple[str, int | None]:
    metric, _, statistic = key.partition("_")
    if metric not in METRICS:
        raise SLOError(key, f"unknown metric '{metric}'")
    if statistic == "mean":
        return metric, None
    low, high = PERCENTILES
    if re.fullmatch(r"p\d\d", statistic, re.ASCII) is None or not low <= int(statistic[1:]) <= high:
        raise SLOError(key, f"unknown statistic '{statistic}'")
    return metric, int(statistic[1:])


def _parse_value(part: str, value: str) -> tuple[float, str]:
    """(positive number in seconds or as a ratio, unit)."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|%)", value, re.ASCII | re.IGNORECASE)
    if match is None:
        raise SLOError(part, f"'{value}' is no time or percentage")
    number, unit = float(match[1]), match[2].lower()
    if not 0.0 < number < math.inf:
        raise SLOError(part, f"'{value}' is not a positive number")
    return (number / 100 if unit == "%" else number * UNITS[unit]), unit


def _parse_general(part: str) -> Objective:
    if not part:
        raise SLOError(part, "an empty objective")
    ratio, unit = _parse_value(part, part)
    if unit != "%":
        raise SLOError(part, "a time needs the name of a metric")
    return Objective("ttft", None, tolerance=ratio)


def _parse_objective(part: str, name: str, value: str) -> Objective:
    try:
        metric, percentile = _parse_key(name)
    except SLOError as error:
        raise SLOError(part, str(error).split(": ", 1)[1].split(" (", 1)[0]) from None
    amount, unit = _parse_value(part, value)
    if unit == "%":
        return Objective(metric, percentile, tolerance=amount)
    return Objective(metric, percentile, limit=amount)
