"""The statistics of all processes of one engine as if they were one, so that counters do not fall at a restart."""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

from engine.api import EngineStats

GAUGES = frozenset(
    {"running", "waiting", "units_total", "units_free", "units_cached", "units_owned", "host_units_total"}
    | {"host_units_used", "host_units_cached", "hidden_blocks", "colocation", "token_costs", "restarts"}
    | {"resumed_requests", "engines", "pipelines", "state_slots_total", "state_slots_used"}
)
COUNTERS = tuple(field.name for field in fields(EngineStats) if field.name not in GAUGES)


class Figures:
    """The statistics of one engine. `last`: the last answer of the current process; `restarts`: restarts by cause."""

    def __init__(self) -> None:
        self.last = EngineStats()
        self.restarts: Counter[str] = Counter()
        self._before = EngineStats()

    def process_ended(self) -> None:
        """Add the counters of the ended process to the total; those of the next process begin at zero."""
        self._before = replace(EngineStats(), **self._summed())
        empty = EngineStats()
        self.last = replace(self.last, **{name: getattr(empty, name) for name in COUNTERS})

    def total(self, resumed: int) -> EngineStats:
        """Return the sum over all processes. `resumed`: number of requests that another process continued."""
        return replace(self.last, **self._summed(), restarts=dict(self.restarts), resumed_requests=resumed)

    def _summed(self) -> dict[str, Any]:
        return {name: _sum(getattr(self._before, name), getattr(self.last, name)) for name in COUNTERS}


def _sum(one: Any, other: Any) -> Any:
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other
