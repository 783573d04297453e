"""Budget search: find the parameters of the offline fill that keep an SLO, by replay (HyGen §4.2).

The caller provides `evaluate(params) → metrics`, a replay of one workload on a virtual clock; this module chooses the
parameters to replay. Every replay is checked against all constraints of the SLO. Offline throughput is not monotone in
the budget: large steps fill the cache with decodes and waste the memory-bound region. The search therefore uses a
coarse grid and refines around the best points instead of bisecting. It is deterministic and replays each set of
parameters at most once.

- `hygen`: one flat latency budget L per step.
- `tidemill`: (L, λ, δ, rule), starting from the best flat L, so it is never worse on the replayed window.

The table of searched budgets by online rate. It answers a change of load with a lookup instead of a search.

Rates are cells of a geometric grid. A budget is searched at the upper edge of its cell and is therefore safe in the
whole cell. An entry records the request lengths, the step time and the time of its search. Times are arguments, in
seconds of calendar time.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from predictor.budget import BudgetParams
from predictor.load import LoadShape
from predictor.slo import SLO

GRID = 1.5
LOWEST_CELL, HIGHEST_CELL = -16, 24
"""Cells from one request in eleven minutes to 17,000 per second."""
HYSTERESIS = 1.1
"""Factor by which a rate must exceed the edge of the current cell to leave it; rate estimates fluctuate."""
SAME_LENGTHS = 1.3
SAME_PACE = 1.25
SURELY_FASTER = SAME_PACE**2
"""Speed-up of steps after which a fruitless search is worth repeating."""
MAX_AGE = 3600.0


def cell_of(rate: float, current: int | None = None) -> int:
    """Return the cell of a rate; keep the `current` cell unless the rate is clearly outside it."""
    if current is not None and lowest_rate(current) < rate <= upper_rate(current) * HYSTERESIS:
        return current
    if rate <= 0.0:
        return LOWEST_CELL
    return min(max(math.ceil(math.log(rate, GRID) - 1e-9), LOWEST_CELL), HIGHEST_CELL)


def upper_rate(cell: int) -> float:
    """Return the highest rate of a cell in requests per second."""
    return GRID**cell


def lowest_rate(cell: int) -> float:
    """Return the lowest rate, in requests per second, at which a cell may stay current."""
    return upper_rate(cell - 1) / HYSTERESIS


@dataclass(frozen=True, slots=True)
class Situation:
    """Conditions of a search besides the rate: request lengths, and the seconds of a reference step (`pace`)."""

    shape: LoadShape
    pace: float

    def is_like(self, other: "Situation") -> bool:
        ratio = self.pace / other.pace if other.pace > 0.0 else math.inf
        return max(ratio, 1.0 / ratio) <= SAME_PACE and not self.shape.differs(other.shape, SAME_LENGTHS)


@dataclass(frozen=True, slots=True)
class BudgetEntry:
    """Result of a search; `params` with L = 0 means that no budget keeps the SLO. `found_at` is in calendar seconds."""

    params: BudgetParams
    situation: Situation
    found_at: float

    def at_pace(self, pace: float) -> "BudgetEntry | None":
        """Return the entry adapted to another step time; None if it does not apply.

        For slower steps, L is reduced in proportion. For faster steps it stays, which is safe.
        """
        if not self.params.latency_budget and pace * SURELY_FASTER < self.situation.pace:
            return None
        less = self.params.latency_budget * min(1.0, self.situation.pace / pace)
        return replace(self, params=_lower(self.params, less))

    def holds(self, situation: Situation, now: float) -> bool:
        """Return whether a new search would presumably give the same answer."""
        return now - self.found_at < MAX_AGE and self.situation.is_like(situation)


class BudgetTable:
    """Newest entry of each cell."""

    def __init__(self) -> None:
        self.entries: dict[int, BudgetEntry] = {}

    def put(self, cell: int, entry: BudgetEntry) -> None:
        self.entries[cell] = entry

    def look_up(self, cell: int, situation: Situation, relative: bool = False) -> tuple[BudgetParams, int] | None:
        """Return the budget for a cell and the cell it was searched for; None without a usable entry.

        An old entry is usable; an entry for other request lengths is not. Entries for another step time are adapted if
        there are none for this one. If the cell itself has no entry, the next cell above is safe. A budget from a cell
        below was searched for a lower rate: its L is reduced in proportion to the rates, and L = 0 stays 0.

        `relative`: the SLO has tolerances relative to the online-only run. Then no other cell is safe: at a lower rate
        the online-only steps are shorter, and λ admits more work to steps with fewer requests. L and λ are both reduced
        in proportion, and L = 0 in a cell above says nothing about this cell.
        """
        alike = {c: e for c, e in self.entries.items() if not e.situation.shape.differs(situation.shape, SAME_LENGTHS)}
        usable = {c: e for c, e in alike.items() if e.situation.is_like(situation)}
        if not usable:
            usable = {c: there for c, e in alike.items() if (there := e.at_pace(situation.pace)) is not None}
        above = min((c for c in usable if c >= cell), default=None)
        if above is not None and (above == cell or usable[above].params.latency_budget > 0.0):
            params = usable[above].params
            return _for_fewer(params, upper_rate(cell) / upper_rate(above)) if relative else params, above
        below = max((c for c in usable if c < cell), default=None)
        if below is None:
            return None
        params = usable[below].params
        return _lower(params, params.latency_budget * upper_rate(below) / upper_rate(cell)), below

    def answers(self, cell: int, situation: Situation) -> BudgetEntry | None:
        """Return the entry searched for this cell and situation, of any age; None if there is none."""
        entry = self.entries.get(cell)
        return entry if entry is not None and entry.situation.is_like(situation) else None

    def needs(self, cell: int, situation: Situation, now: float) -> bool:
        """Return whether a search for this cell would give new information."""
        entry = self.entries.get(cell)
        return entry is None or not entry.holds(situation, now)

    def to_document(self) -> list[dict[str, Any]]:
        """Return all entries as JSON values."""
        return [{"cell": cell, **_plain(entry)} for cell, entry in sorted(self.entries.items())]

    @classmethod
    def from_document(cls, document: list[dict[str, Any]]) -> "BudgetTable":
        """Restore a table. Raises KeyError, TypeError or ValueError if the document is invalid."""
        table = cls()
        for row in document[: HIGHEST_CELL - LOWEST_CELL + 1]:
            situation = Situation(LoadShape(*(float(value) for value in row["shape"])), float(row["pace"]))
            table.put(int(row["cell"]), BudgetEntry(params_of(row["params"]), situation, float(row["found_at"])))
        return table


def to_plain(params: BudgetParams) -> dict[str, Any]:
    """Return the parameters as JSON values; an infinite λ becomes null."""
    return {name: None if value == math.inf else value for name, value in asdict(params).items()}


def params_of(plain: dict[str, Any]) -> BudgetParams:
    """Inverse of `to_plain`. Raises KeyError, TypeError or ValueError for invalid values."""
    values: dict[str, Any] = {name: math.inf if value is None else value for name, value in plain.items()}
    return BudgetParams(**values)


def _lower(params: BudgetParams, budget: float) -> BudgetParams:
    """Reduce L; `tbt_p99` becomes `flat`, because a smaller L would exempt more steps under that rule."""
    if budget >= params.latency_budget:
        return params
    return replace(params, latency_budget=budget, rule="flat" if params.rule == "tbt_p99" else params.rule)


def _for_fewer(params: BudgetParams, share: float) -> BudgetParams:
    """Reduce L and λ for a cell with only a `share` of the requests."""
    return _lower(replace(params, lam=params.lam * share), params.latency_budget * share)


def _plain(entry: BudgetEntry) -> dict[str, Any]:
    situation = entry.situation
    described = {"shape": list(situation.shape.values()), "pace": situation.pace, "found_at": entry.found_at}
    return {"params": to_plain(entry.params), **described}


Metrics = Mapping[str, float]
"""`offline_throughput`, the SLO's keys (`ttft_p99` ..., in seconds) and `slo_attainment` for limits per request.

With `requests`, the number of judged requests (of a named class: `NAME:requests`), one miss alone does not make a
budget infeasible in the searched window: among few requests it says little about the share of misses.
"""

MAX_EVALUATIONS = 60
MARGIN = 0.8
RESOLUTION = 1.005
MAX_CONFIRMATIONS = 5
SIMILAR = 0.98
"""Ratio of throughputs from which candidates count as equally good."""
SAME = 1.05
"""Ratio of budgets up to which both presumably keep or fail the same window."""
STEP_DOWN = 4.0
"""First step down from a budget that failed; bisection then steps up."""
FEWEST_REPLAYS = 5
DELTAS = (1.0, 2.0, 4.0, 8.0)
DEFAULT_DELTA = 4.0
LAMBDA_STEP, LAMBDA_RESOLUTION = 4.0, 1.1
MIN_LAMBDA, MAX_LAMBDA = 1e-4, 1e4


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Result of one replay; `violations` holds the relative excess over each violated bound (empty: feasible)."""

    params: BudgetParams
    metrics: dict[str, float]
    violations: dict[str, float]

    @property
    def feasible(self) -> bool:
        """Whether every constraint holds, including the margin."""
        return not self.violations

    @property
    def throughput(self) -> float:
        """Offline tokens per second."""
        return self.metrics["offline_throughput"]

    def rank(self) -> tuple[float, float, float, float]:
        """Sort key, larger is better: feasible first, then throughput or violation, then the smaller budget."""
        if self.feasible:
            return (1.0, self.throughput, -self.params.latency_budget, -self.params.lam)
        return (0.0, -max(self.violations.values()), -self.params.latency_budget, -self.params.lam)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: The chosen replay.
        baseline: The online-only replay.
        surface: All replays in order; the baseline is the first.
        slo_in_reach: False if the online-only run itself exceeds an absolute limit. The search then only ensured that
            co-location does not increase the excess.
        confirmed: Whether `best` kept the SLO in all further windows; None without such windows.
        num_evaluations: Number of replays, further windows included.
        noise: Random variation of the online-only run by key of each tolerance, as a share; empty if unknown.
    """

    best: Evaluated
    baseline: Evaluated
    surface: tuple[Evaluated, ...]
    slo_in_reach: bool
    confirmed: bool | None
    num_evaluations: int
    noise: Mapping[str, float] = field(default_factory=dict)

    @property
    def params(self) -> BudgetParams:
        """The chosen parameters."""
        return self.best.params


def search_budget(
    evaluate: Callable[[BudgetParams], Metrics],
    slo: SLO,
    latency_range: tuple[float, float],
    policy: str = "tidemill",
    *,
    confirm: Sequence[Callable[[BudgetParams], Metrics]] = (),
    margin: float = MARGIN,
    max_evaluations: int = MAX_EVALUATIONS,
    start: BudgetParams | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """Find the parameters of `policy` with the highest offline throughput that keep the SLO.

    `evaluate` and `confirm` together are called at most `max_evaluations` times.

    Args:
        evaluate: Replays the searched window.
        slo: Constraints to keep.
        latency_range: Bounds of L in seconds: the shortest and the longest step.
        policy: One of POLICIES.
        confirm: Replays of further windows, in which the whole tolerance may be used.
        margin: Share of the tolerance that may be used in the searched window.
        max_evaluations: Maximum number of replays.
        start: Budget to try first, such as the one in force.
        is_over: Whether the search must end; it makes at least FEWEST_REPLAYS.

    Raises:
        ValueError: For an invalid range, an unknown policy or too few evaluations.
        KeyError: If a replay lacks a metric.
    """
    low, high = latency_range
    if not 0.0 < low < high < math.inf:
        raise ValueError(f"latency_range must ascend from above 0, not {latency_range}")
    reserve = (MAX_CONFIRMATIONS + 1) * len(confirm)
    if max_evaluations - reserve < 4:
        raise ValueError(f"max_evaluations must leave at least 4 for the search, not {max_evaluations - reserve}")
    search = _Search(evaluate, slo, margin, (low, high), max_evaluations - reserve, is_over)
    search.baseline = search.take(BudgetParams(policy, 0.0))
    if start is not None and start.policy == policy:
        search.take(replace(start, latency_budget=min(max(start.latency_budget, low), high)))
    flat_share = 1.0 if policy == "hygen" else 0.4
    flat = search.flat(policy, max(3, round(flat_share * search.left)))
    if policy == "tidemill":
        rules = protecting_rules(slo)
        for index, rule in enumerate(rules):
            search.weighted(rule, flat.params.latency_budget, search.left // (len(rules) - index))
    if not confirm:
        best, confirmed, spent = search.best(), None, 0
    else:
        best, confirmed, spent = _confirm(search, confirm, slo)
    surface = tuple(search.done.values())
    in_reach = _keeps_limits(slo, search.baseline.metrics)
    return SearchResult(best, search.baseline, surface, in_reach, confirmed, len(surface) + spent)


def protecting_rules(slo: SLO) -> tuple[str, ...]:
    """Return the rules that can help with the metrics of `slo`, without duplicates; `flat` is always searched too."""
    rules = []
    for objective in (o for _, own in slo.by_class for o in own.objectives if o.metric != "e2e"):
        metric = "tbt" if objective.metric == "tpot" else objective.metric
        statistic = "mean" if objective.percentile is None or objective.metric == "tpot" else "p99"
        rules.append(f"{metric}_{statistic}")
    return tuple(dict.fromkeys(rules))


def _is_one_miss(key: str, metrics: Metrics) -> bool:
    """Return whether a violation is that of an attainment with a single miss."""
    requests = metrics.get(key.replace("slo_attainment", "requests"), 0.0)
    return key.endswith("slo_attainment") and round((1.0 - metrics[key]) * requests) == 1


def _keeps_limits(slo: SLO, online_only: Metrics) -> bool:
    """Return whether the online-only run keeps the absolute limits."""
    absolute = replace(slo, objectives=tuple(objective for objective in slo.objectives if objective.limit is not None))
    return not absolute.violations(online_only)


class _Search:
    """Replays made so far, each set of parameters once."""

    def __init__(
        self,
        evaluate: Callable[[BudgetParams], Metrics],
        slo: SLO,
        margin: float,
        latency_range: tuple[float, float],
        max_evaluations: int,
        is_over: Callable[[], bool],
    ) -> None:
        self.done: dict[BudgetParams, Evaluated] = {}
        self.baseline: Evaluated | None = None
        self._evaluate = evaluate
        self._slo = slo
        self._margin = margin
        self._low, self._high = latency_range
        self._max_evaluations = max_evaluations
        self._is_over = is_over

    @property
    def left(self) -> int:
        """Number of replays left."""
        if len(self.done) >= FEWEST_REPLAYS and self._is_over():
            return 0
        return self._max_evaluations - len(self.done)

    def best(self) -> Evaluated:
        """Return the best replay so far; the online-only replay is always feasible."""
        return max(self.done.values(), key=Evaluated.rank)

    def take(self, params: BudgetParams) -> Evaluated:
        """Replay `params`, or return the result of an earlier replay."""
        if params not in self.done:
            assert len(self.done) < self._max_evaluations, "out of evaluations"
            metrics = dict(self._evaluate(params))
            base = self.baseline.metrics if self.baseline is not None else metrics
            violations = self._slo.violations(metrics, base, self._margin)
            counted = {key: excess for key, excess in violations.items() if not _is_one_miss(key, metrics)}
            self.done[params] = Evaluated(params, metrics, counted)
        return self.done[params]

    def extend(self, evaluations: int) -> None:
        """Allow `evaluations` replays from now on."""
        self._max_evaluations = len(self.done) + evaluations

    def flat(self, policy: str, evaluations: int) -> Evaluated:
        """Return the best flat budget: try a geometric grid, then halve the gaps beside the best points."""
        stop = max(self.left - evaluations, 0)
        size = max(3, round(0.5 * evaluations))
        ratio = self._high / self._low
        grid = [self._low * ratio ** (i / (size - 1)) for i in range(size - 1)] + [self._high]
        budgets = [*grid[2::4], *grid[0::4], *grid[1::2]]  # coarse to fine: the time may end
        points: list[Evaluated] = []
        while budgets and self.left > stop:
            points += self.take_all((BudgetParams(policy, budget) for budget in budgets), stop)
            budgets = _next_budgets(points)
        return max(points, key=Evaluated.rank)

    def take_all(self, candidates: Iterable[BudgetParams], stop: int) -> list[Evaluated]:
        """Replay candidates until `stop` replays are left."""
        return [self.take(params) for params in candidates if self.left > stop]

    def weighted(self, rule: str, flat_budget: float, evaluations: int) -> None:
        """Search (L, λ, δ) under one rule by pattern search from the best of a few start points.

        With λ, the largest L comes first: λ has no effect under an L that is as small as a flat budget must be.
        """
        stop = max(self.left - evaluations, 0)
        if rule == "tbt_mean":
            priced = BudgetParams("tidemill", self._high, 1.0, DEFAULT_DELTA, rule)
            tried = self._edge(priced, stop + evaluations // 3)
        else:
            budgets = dict.fromkeys((flat_budget, self._high, math.sqrt(flat_budget * self._high)))
            tried = self.take_all((BudgetParams("tidemill", budget, math.inf, 1.0, rule) for budget in budgets), stop)
        if not tried:
            return
        here, factor = max(tried, key=Evaluated.rank), 2.0
        while factor > RESOLUTION and self.left > stop:
            found = self.take_all([p for p in self._neighbours(here.params, factor) if p not in self.done], stop)
            ahead = max([here, *found], key=Evaluated.rank)
            if ahead is here:
                factor = math.sqrt(factor)
            here = ahead

    def _edge(self, params: BudgetParams, stop: int) -> list[Evaluated]:
        """Replay `params` with λ ever closer to the largest feasible one, since interference grows with λ."""
        found, feasible, infeasible, lam = [], 0.0, math.inf, params.lam
        while self.left > stop and infeasible > LAMBDA_RESOLUTION * feasible and MIN_LAMBDA < lam < MAX_LAMBDA:
            found.append(self.take(replace(params, lam=lam)))
            if found[-1].feasible:
                feasible = lam
            else:
                infeasible = lam
            if not feasible:
                lam = infeasible / LAMBDA_STEP
            else:
                lam = math.sqrt(feasible * infeasible) if infeasible < math.inf else feasible * LAMBDA_STEP
        return found

    def _neighbours(self, params: BudgetParams, factor: float) -> list[BudgetParams]:
        """Return the parameters one step away along each axis, clamped to the range."""
        found = []
        for step in (factor, 1.0 / factor):
            budget = min(max(params.latency_budget * step, self._low), self._high)
            found.append(replace(params, latency_budget=budget))
            if not math.isinf(params.lam):
                found.append(replace(params, lam=params.lam * step))
        if not math.isinf(params.lam) and params.delta in DELTAS:
            at = DELTAS.index(params.delta)
            found += [replace(params, delta=DELTAS[i]) for i in (at + 1, at - 1) if 0 <= i < len(DELTAS)]
        return found


def _next_budgets(points: Sequence[Evaluated]) -> list[float]:
    """Return the midpoints of the gaps beside the two best local maxima; empty if all gaps are below RESOLUTION.

    Two maxima are refined because the best point of a coarse grid need not be next to the best point of the range.
    """
    ordered = sorted(points, key=lambda point: point.params.latency_budget)
    ranks = [point.rank() for point in ordered]
    peaks = [
        i for i, rank in enumerate(ranks) if rank >= max(ranks[max(i - 1, 0) : i + 2]) and ordered[i].feasible
    ] or [ranks.index(max(ranks))]
    found = []
    for at in sorted(peaks, key=lambda i: ranks[i], reverse=True)[:2]:
        for left in (at, at - 1):
            if 0 <= left < len(ordered) - 1:
                low, high = ordered[left].params.latency_budget, ordered[left + 1].params.latency_budget
                if high / low > RESOLUTION:
                    found.append(math.sqrt(low * high))
    return list(dict.fromkeys(found))


def _confirm(
    search: _Search, windows: Sequence[Callable[[BudgetParams], Metrics]], slo: SLO
) -> tuple[Evaluated, bool, int]:
    """Return (the best candidate that keeps the SLO in all further windows, True, number of replays).

    If none of the first MAX_CONFIRMATIONS candidates keeps it, return the online-only replay and False. Replays that
    are left bisect between the confirmed budget and the failed one above it.
    """
    assert search.baseline is not None
    bases = [dict(replay(search.baseline.params)) for replay in windows]
    spent, reserve = len(windows), MAX_CONFIRMATIONS * len(windows) + search.left
    left = sorted((e for e in search.done.values() if e.feasible), key=Evaluated.rank, reverse=True)

    def keeps(candidate: Evaluated) -> bool:
        nonlocal spent, reserve
        for replay, base in zip(windows, bases, strict=True):
            spent, reserve = spent + 1, reserve - 1
            if slo.violations(dict(replay(candidate.params)), base):
                return False
        return True

    failed = [each for each in search.done.values() if not each.feasible]
    far = left
    for _ in range(MAX_CONFIRMATIONS):
        best = _safest_of_best(far if len(far) > 1 else left)
        if best is search.baseline or keeps(best):
            break
        failed.append(best)
        left = [e for e in left if not _no_safer(e.params, best.params, SAME) and e.metrics != best.metrics]
        far = [e for e in far if e in left and not _no_safer(e.params, best.params, STEP_DOWN)]
    else:
        return search.baseline, False, spent
    search.extend(reserve)
    while reserve > len(windows) and search.left and (middle := _middle(best, failed)) is not None:
        reserve -= middle not in search.done
        found = search.take(middle)
        if found.rank() > best.rank() and keeps(found):
            best = found
        else:
            failed.append(found)
    return best, True, spent


def _middle(best: Evaluated, failed: Sequence[Evaluated]) -> BudgetParams | None:
    """Return parameters between `best` and the failed L above it; None if they are close or give no more tokens."""
    low = best.params.latency_budget
    alike = [e for e in failed if replace(e.params, latency_budget=low) == best.params]
    above = min(
        (e for e in alike if e.params.latency_budget > low), key=lambda e: e.params.latency_budget, default=None
    )
    if not low or above is None or above.params.latency_budget <= SAME * low:
        return None
    if above.throughput * SIMILAR <= best.throughput:
        return None
    return replace(best.params, latency_budget=math.sqrt(low * above.params.latency_budget))


def _safest_of_best(ranking: Sequence[Evaluated]) -> Evaluated:
    """Return the candidate with the smallest budget among those with about the throughput of the first.

    Where memory bounds offline work, many budgets have the same throughput, and large ones disturb chats more.
    """
    best = [each for each in ranking if each.throughput >= SIMILAR * ranking[0].throughput]
    return min(best, key=lambda each: (each.params.latency_budget, each.params.lam))


def _no_safer(one: BudgetParams, failed: BudgetParams, ratio: float) -> bool:
    """Return whether `one` lets offline work disturb chats at least as much as `failed`, up to a `ratio` of budgets."""
    if one.rule != failed.rule or one.delta != failed.delta or math.isinf(one.lam) != math.isinf(failed.lam):
        return False
    weights = 1.0 if math.isinf(one.lam) else one.lam / failed.lam
    return min(one.latency_budget / failed.latency_budget, weights) > 1 / ratio
