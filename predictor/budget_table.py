"""The table of searched budgets by online rate. It answers a change of load with a lookup instead of a search.

Rates are cells of a geometric grid. A budget is searched at the upper edge of its cell and is therefore safe in the
whole cell. An entry records the request lengths, the step time and the time of its search. Times are arguments, in
seconds of calendar time.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from predictor.budget import BudgetParams
from predictor.load import LoadShape

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
