"""Service-level objectives: parsing, and evaluation for one request or one window.

`X_pNN=limit` limits the value of each request and requires NN % of requests to be good. For `tbt_pNN` the value is the
nearest-rank percentile of the request's own gaps; a request without gaps is good. `X_mean=limit`, and every tolerance
in percent over the online-only run (HyGen §4.2), apply to the aggregates of a window, with gaps pooled. Times are
seconds internally and have units in the text.

`ttft_p99=1s;agent:e2e_p99=20s` has a named class: its objectives apply to the requests of that class alone, and limit
single requests.
"""

import difflib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from predictor.budget import DEFAULT_CLASS, Promise

METRICS = ("ttft", "tbt", "tpot", "e2e")
PERCENTILES = (50, 99)
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TOLERANCE_KEYS = ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99")
"""HyGen's four metrics, to which a bare percentage applies."""
BEYOND_PERCENTILE = 10
FEWEST_ARRIVALS = 200

ALLOWED = (
    "an objective is {ttft,tbt,tpot,e2e}_{mean,p50..p99}=VALUE with VALUE in us, ms, s or %, or a percentage alone; "
    "for example 'ttft_p99=1s,tbt_p99=100ms' or '5%'"
)


_USUAL = ("mean", "p50", "p90", "p99")  # suggestions for an unknown statistic
CLASS_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_BLANK_SEPARATED = re.compile(r"\S\s+[A-Za-z]+(_\w+)?\s*=")


def attainment_key(service: str) -> str:
    """Return the key of a class's attainment among the metrics of a window."""
    return "slo_attainment" if service == DEFAULT_CLASS else f"{service}:slo_attainment"


def service_of(promise: Promise | None) -> str:
    """Return the service class of a request."""
    return DEFAULT_CLASS if promise is None else promise.service


class SLOError(ValueError):
    """A service-level objective that cannot be parsed; the message names the part and an advice, or the syntax."""

    def __init__(self, part: str, reason: str, advice: str = "") -> None:
        super().__init__(f"SLO '{part}': {reason}" + (f"; {advice}" if advice else f" ({ALLOWED})"))
        self.part = part


@dataclass(frozen=True, slots=True)
class Standing:
    """One objective evaluated over the window; NaN for unknown values, times in seconds.

    Attributes:
        objective: The objective in the syntax of the SLO.
        value: Measured percentile or mean.
        bound: Upper bound of `value`.
        attainment: Share of requests at whose end the objective was met.
    """

    objective: str
    value: float
    bound: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Objective:
    """One constraint on a metric.

    Attributes:
        metric: One of METRICS.
        percentile: Percentile; None for the mean.
        limit: Absolute limit in seconds, or None.
        tolerance: Ratio over the online-only run, or None.
    """

    metric: str
    percentile: int | None
    limit: float | None = None
    tolerance: float | None = None

    @property
    def key(self) -> str:
        """Name in reports: `ttft_p99`, `tbt_mean` ..."""
        return f"{self.metric}_{'mean' if self.percentile is None else f'p{self.percentile}'}"

    @property
    def per_request(self) -> bool:
        """Whether the limit applies to each request instead of an aggregate."""
        return self.limit is not None and self.percentile is not None

    def values(self, ttft: float, gaps: Sequence[float]) -> Sequence[float]:
        """Return the values of the metric for one request in seconds: its TTFT, duration, gaps, or mean gap."""
        if self.metric == "ttft":
            return (ttft,)
        if self.metric == "e2e":
            return (ttft + math.fsum(gaps),)
        if self.metric == "tpot":
            return (math.fsum(gaps) / len(gaps),) if gaps else ()
        return gaps

    def value(self, ttft: float | None, gaps: Sequence[float]) -> float:
        """Return the value of one request that its limit bounds; infinite without a token, 0 without a gap."""
        if ttft is None:
            return math.inf
        assert self.percentile is not None
        values = self.values(ttft, gaps)
        return nearest_rank(values, self.percentile) if values else 0.0

    def __str__(self) -> str:
        if self.tolerance is not None:
            return f"{self.key}={self.tolerance * 100:g}%"
        assert self.limit is not None
        unit = next(unit for unit in ("s", "ms", "us") if self.limit >= UNITS[unit] or unit == "us")
        return f"{self.key}={self.limit / UNITS[unit]:.12g}{unit}"


@dataclass(frozen=True, slots=True)
class SLO:
    """A conjunction of objectives for each class of requests. An empty SLO always holds.

    Attributes:
        objectives: Those of the class `default`.
        classes: The SLOs of the other classes by name, without classes of their own.
    """

    objectives: tuple[Objective, ...] = ()
    classes: tuple[tuple[str, "SLO"], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SLO":
        """Parse `text`; raises SLOError. Objectives for single metrics override a bare percentage."""
        found: dict[str, SLO] = {}
        for part in text.split(";"):
            name, colon, rest = part.strip().rpartition(":")
            name = name.strip() if colon else DEFAULT_CLASS
            if CLASS_NAME.fullmatch(name) is None:
                raise SLOError(part, f"'{name}' is no name of a class", "use lower-case letters, digits, '-' and '_'")
            if name in found:
                raise SLOError(part, f"a second SLO for the class '{name}'; remove one")
            found[name] = cls._parse_class(rest)
            if name != DEFAULT_CLASS and not all(o.per_request for o in found[name].objectives):
                raise SLOError(part, "a named class needs limits on single requests", "for example ttft_p99=300ms")
        if DEFAULT_CLASS not in found:
            raise SLOError(text, "no objectives for requests without a class", "add, for example, ttft_p99=1s")
        objectives = found.pop(DEFAULT_CLASS).objectives
        return cls(objectives, tuple(found.items()))

    @classmethod
    def _parse_class(cls, text: str) -> "SLO":
        general: Objective | None = None
        named: dict[str, Objective] = {}
        for part in (part.strip() for part in text.split(",")):
            if _BLANK_SEPARATED.search(part):
                raise SLOError(part, "white space between objectives", "separate objectives with commas")
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals:
                if general is not None:
                    raise SLOError(part, "a second percentage for all metrics; remove one")
                general = _parse_general(part)
                continue
            objective = _parse_objective(part, name.lower(), value)
            if objective.key in named:
                raise SLOError(part, f"a second objective for {objective.key}; remove one")
            named[objective.key] = objective
        if general is not None:
            for key in TOLERANCE_KEYS:
                metric, statistic = parse_key(key)
                named.setdefault(key, Objective(metric, statistic, tolerance=general.tolerance))
        return cls(tuple(named.values()))

    def __str__(self) -> str:
        """Text that parses to the same SLO."""
        own = ",".join(map(str, self.objectives))
        return ";".join([own, *(f"{name}:{slo}" for name, slo in self.classes)])

    @property
    def by_class(self) -> Iterator[tuple[str, "SLO"]]:
        """Yield every class with its SLO, the class `default` first."""
        yield DEFAULT_CLASS, SLO(self.objectives)
        yield from self.classes

    def of(self, promise: Promise | None) -> "SLO":
        """Return the SLO of a request's class; `self` is that of requests without a promise of their own."""
        return self if promise is None else dict(self.classes).get(promise.service, self)

    def promise(self, service: str = DEFAULT_CLASS) -> Promise:
        """Return the absolute limits of a class."""
        slo = dict(self.classes).get(service, self)
        ttft, tbt, tpot, e2e = (slo.limit_of(metric) or math.inf for metric in METRICS)
        return Promise(service, ttft, min(tbt, tpot), e2e)

    def tightest(self, metric: str) -> float:
        """Return the strictest absolute limit on a metric in any class, in seconds; infinite without one."""
        return min(slo.limit_of(metric) or math.inf for _, slo in self.by_class)

    def tolerances(self) -> dict[str, float]:
        """Return the tolerances by key, as ratios over the online-only run."""
        return {o.key: o.tolerance for o in self.objectives if o.tolerance is not None}

    @property
    def attainment_target(self) -> float | None:
        """Share of requests that must be good, from the strictest percentile; None without limits per request."""
        targets = [o.percentile / 100 for o in self.objectives if o.per_request and o.percentile is not None]
        return max(targets, default=None)

    @property
    def arrivals_needed(self) -> int:
        """Requests that a window needs to evaluate this SLO: ten beyond the highest percentile."""
        percentile = max((o.percentile for o in self.objectives if o.percentile is not None), default=0)
        return max(FEWEST_ARRIVALS, round(100 * BEYOND_PERCENTILE / (100 - percentile)))

    def limit_of(self, metric: str) -> float | None:
        """Return the strictest absolute limit on any statistic of `metric`, in seconds; None without one."""
        return min((o.limit for o in self.objectives if o.metric == metric and o.limit is not None), default=None)

    @property
    def gap_limited(self) -> bool:
        """Whether an absolute limit applies to every gap (`tbt_pNN`), not only to the mean gap."""
        return any(o.metric == "tbt" and o.per_request for o in self.objectives)

    def values(self, ttft: float | None, gaps: Sequence[float], promise: Promise | None = None) -> dict[str, float]:
        """Return the values of a request that the limits per request of its class bound, by key.

        Values of a request with a promise of its own are in proportion to the limits of its class.
        """
        own = self.of(promise)
        usual, limited = own.promise(), [o for o in own.objectives if o.per_request]
        scale = {o.metric: usual.limit(o.metric) / promise.limit(o.metric) for o in limited} if promise else {}
        return {o.key: o.value(ttft, gaps) * scale.get(o.metric, 1.0) for o in limited}

    def good(self, ttft: float | None, gaps: Sequence[float], promise: Promise | None = None) -> bool:
        """Return whether a request that ended without an error met every limit per request, and its own promise.

        `ttft` is in seconds; None: no token arrived, which violates any limit. `gaps` are the seconds between tokens.
        """
        values = self.values(ttft, gaps, promise)
        limits = {o.key: o.limit or 0.0 for o in self.of(promise).objectives}
        kept = all(value <= limits[key] for key, value in values.items())
        return kept and (promise is None or promise.kept(ttft, gaps))

    def violations(
        self, window: Mapping[str, float], baseline: Mapping[str, float] | None = None, margin: float = 1.0
    ) -> dict[str, float]:
        """Return the violated constraints of a window as key → (value − bound) ÷ bound. Empty: all hold.

        Args:
            window: Aggregates in seconds by key; `slo_attainment` as a share if there are limits per request; that
                of a named class is `NAME:slo_attainment`.
            baseline: The same for the online-only run of the workload.
            margin: Share of the room between baseline and limit that may be used.

        Raises:
            KeyError: If a metric is missing.
            ValueError: For a tolerance without a baseline.
        """
        found = {}
        for key, bound in self.bounds(baseline, margin).items():
            value = 1.0 - window[key] if key.endswith("slo_attainment") else window[key]
            if not value <= bound + 1e-12:
                found[key] = (value - bound) / max(bound, 1e-9)
        return found

    def bounds(self, baseline: Mapping[str, float] | None, margin: float = 1.0) -> dict[str, float]:
        """Return upper bounds on the aggregates of a window by key; `slo_attainment` bounds the share of misses.

        A limit that the baseline itself exceeds is relaxed to the baseline: co-location must not increase the excess.
        """
        bounds: dict[str, float] = {}
        for objective in self.objectives:
            if objective.tolerance is not None:
                if baseline is None:
                    raise ValueError(f"'{objective}' is a tolerance; pass the baseline of an online-only run")
                bounds[objective.key] = baseline[objective.key] * (1.0 + margin * objective.tolerance)
            elif objective.limit is not None and not objective.per_request:
                base = None if baseline is None else baseline[objective.key]
                bounds[objective.key] = _bound(objective.limit, base, margin)
        for name, slo in self.by_class:
            if (target := slo.attainment_target) is not None:
                key = attainment_key(name)
                base = None if baseline is None else 1.0 - baseline[key]
                bounds[key] = _bound(1.0 - target, base, margin)
        return bounds


@functools.lru_cache(maxsize=8)
def parse_slo(text: str) -> SLO:
    """Return `SLO.parse(text)`, parsed once; "" is an SLO without objectives."""
    return SLO.parse(text) if text else SLO()


def nearest_rank(values: Sequence[float], percentile: float) -> float:
    """Return the smallest value that at least `percentile` % of `values` (any order, not empty) do not exceed."""
    return sorted(values)[max(math.ceil(percentile * len(values) / 100), 1) - 1]


def _bound(limit: float, base: float | None, margin: float) -> float:
    if base is None:
        return limit * margin
    return max(base, base + margin * (limit - base))


def parse_key(key: str, part: str = "") -> tuple[str, int | None]:
    """Return metric and percentile of a key. `part`: the text that an error names; by default the key."""
    metric, _, statistic = key.partition("_")
    if metric not in METRICS:
        raise SLOError(part or key, f"unknown metric '{metric}'", _suggest(metric, METRICS))
    if statistic == "mean":
        return metric, None
    low, high = PERCENTILES
    if re.fullmatch(r"p\d\d", statistic, re.ASCII) is None or not low <= int(statistic[1:]) <= high:
        raise SLOError(part or key, f"unknown statistic '{statistic}'", _suggest(statistic, _USUAL))
    return metric, int(statistic[1:])


def _suggest(word: str, known: Sequence[str]) -> str:
    """Return a question that names similar words, or "" without one."""
    near = difflib.get_close_matches(word, known, 2)
    return f"did you mean {' or '.join(sorted(near))}?" if near else ""


def _parse_value(part: str, value: str) -> tuple[float, str]:
    """Return (positive number in seconds or as a ratio, unit)."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|%)?", value, re.ASCII | re.IGNORECASE)
    if match is None:
        raise SLOError(part, f"'{value}' is neither a time nor a percentage")
    if match[2] is None:
        raise SLOError(part, f"'{value}' has no unit", f"did you mean {part}s or {part}ms?" if part != value else "")
    number, unit = float(match[1]), match[2].lower()
    if not 0.0 < number < math.inf:
        raise SLOError(part, f"'{value}' is not a positive number")
    return (number / 100 if unit == "%" else number * UNITS[unit]), unit


def parse_seconds(text: str) -> float:
    """Return a time such as `500ms` in seconds. Raises SLOError."""
    seconds, unit = _parse_value(text, text)
    if unit == "%":
        raise SLOError(text, "a percentage is no time")
    return seconds


def _parse_general(part: str) -> Objective:
    if not part:
        raise SLOError(part, "the objective is empty")
    ratio, unit = _parse_value(part, part)
    if unit != "%":
        raise SLOError(part, "a time needs a metric")
    return Objective("ttft", None, tolerance=ratio)


def _parse_objective(part: str, name: str, value: str) -> Objective:
    metric, percentile = parse_key(name, part)
    amount, unit = _parse_value(part, value)
    if unit == "%":
        objective = Objective(metric, percentile, tolerance=amount)
    else:
        objective = Objective(metric, percentile, limit=amount)
    if metric == "e2e" and not objective.per_request:
        raise SLOError(part, "e2e limits single requests", "for example e2e_p99=20s")
    return objective
