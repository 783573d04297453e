"""What was searched so far: from a rate of online requests to the offline budget, so a change of load is a look-up.

Rates are cells of a grid; a budget is searched at the upper edge of its cell, so it is on the safe side in all of it.
An entry also knows the lengths of requests and the pace of steps that it was found for, and when.

Pure: times are arguments, in seconds on the calendar's clock.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from predictor.budget import BudgetParams, params_of, to_plain
from predictor.load import Shape

GRID = 1.5
LOWEST_CELL, HIGHEST_CELL = -16, 24
"""A request in eleven minutes … 17,000 a second."""
HYSTERESIS = 1.1
"""How far beyond the edge of the cell in force a rate must be: its estimate varies."""
SAME_LENGTHS = 1.3
SAME_PACE = 1.25
SURELY_FASTER = SAME_PACE**2
"""Steps that are so much faster than those for which no budget was found may leave room for one."""
MAX_AGE = 3600.0


def cell_of(rate: float, current: int | None = None) -> int:
    """The cell of a rate; the `current` one as long as the rate is not clearly outside it."""
    if current is not None and lowest_rate(current) < rate <= upper_rate(current) * HYSTERESIS:
        return current
    if rate <= 0.0:
        return LOWEST_CELL
    return min(max(math.ceil(math.log(rate, GRID) - 1e-9), LOWEST_CELL), HIGHEST_CELL)


def upper_rate(cell: int) -> float:
    """The highest rate of a cell, requests a second."""
    return GRID**cell


def lowest_rate(cell: int) -> float:
    """The lowest rate for which a cell may be in force, requests a second."""
    return upper_rate(cell - 1) / HYSTERESIS


@dataclass(frozen=True, slots=True)
class Situation:
    """Besides the rate, what a budget was found for: lengths, and the seconds of a reference step."""

    shape: Shape
    pace: float

    def is_like(self, other: "Situation") -> bool:
        ratio = self.pace / other.pace if other.pace > 0.0 else math.inf
        return max(ratio, 1.0 / ratio) <= SAME_PACE and not self.shape.differs(other.shape, SAME_LENGTHS)


@dataclass(frozen=True, slots=True)
class Entry:
    """`params` of L = 0: no budget keeps the SLO. `found_at`: calendar seconds."""

    params: BudgetParams
    situation: Situation
    found_at: float

    def at_pace(self, pace: float) -> "Entry | None":
        """What it says where steps take another time; None for nothing. What kept the SLO with faster steps may not
        keep it now: so much less of its L is left as steps are slower. Slower ones are on the safe side."""
        if not self.params.latency_budget and pace * SURELY_FASTER < self.situation.pace:
            return None
        less = self.params.latency_budget * min(1.0, self.situation.pace / pace)
        return replace(self, params=_lower(self.params, less))

    def holds(self, situation: Situation, now: float) -> bool:
        """Whether the answer would still be the same, for all that is known."""
        return now - self.found_at < MAX_AGE and self.situation.is_like(situation)


class BudgetTable:
    """The newest entry of each cell."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def put(self, cell: int, entry: Entry) -> None:
        self.entries[cell] = entry

    def look_up(self, cell: int, situation: Situation, relative: bool = False) -> tuple[BudgetParams, int] | None:
        """The budget for a cell, and the cell that it was searched for; None when nothing of use is known.

        An old entry is better than none, one for other lengths is not; entries for another pace say something where
        there are none for this one. Of other cells, the next one above is safe. What kept the SLO at a lower rate was
        searched for less than there is: so much less of its L is left as the rate is higher, and "none at all" stays
        none.

        `relative`: the SLO has tolerances over the online-only run. Then no other cell is safe: where fewer requests
        come they have shorter steps alone, and λ lets more be added to a step with fewer of them. So much less of L and
        of λ is left, and "none at all" says nothing of it.
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

    def answers(self, cell: int, situation: Situation) -> Entry | None:
        """The entry that was searched for just this, whenever that was; None where there is none."""
        entry = self.entries.get(cell)
        return entry if entry is not None and entry.situation.is_like(situation) else None

    def needs(self, cell: int, situation: Situation, now: float) -> bool:
        """Whether a search for this cell would tell something new."""
        entry = self.entries.get(cell)
        return entry is None or not entry.holds(situation, now)

    def to_document(self) -> list[dict[str, Any]]:
        """All entries as plain JSON values."""
        return [{"cell": cell, **_plain(entry)} for cell, entry in sorted(self.entries.items())]

    @classmethod
    def from_document(cls, document: list[dict[str, Any]]) -> "BudgetTable":
        """Raises KeyError, TypeError or ValueError for a document that is none."""
        table = cls()
        for row in document[: HIGHEST_CELL - LOWEST_CELL + 1]:
            situation = Situation(Shape(*(float(value) for value in row["shape"])), float(row["pace"]))
            table.put(int(row["cell"]), Entry(params_of(row["params"]), situation, float(row["found_at"])))
        return table


def _lower(params: BudgetParams, budget: float) -> BudgetParams:
    """With a smaller L: under `tbt_p99` that would free more steps from it."""
    if budget >= params.latency_budget:
        return params
    return replace(params, latency_budget=budget, rule="flat" if params.rule == "tbt_p99" else params.rule)


def _for_fewer(params: BudgetParams, share: float) -> BudgetParams:
    """Where only a `share` of the requests come."""
    return _lower(replace(params, lam=params.lam * share), params.latency_budget * share)


def _plain(entry: Entry) -> dict[str, Any]:
    situation = entry.situation
    described = {"shape": list(situation.shape.values()), "pace": situation.pace, "found_at": entry.found_at}
    return {"params": to_plain(entry.params), **described}
