"""The figures of all engine processes so far as if they were of one: what only grows must not fall at a restart."""

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
    """`last`: the figures that the process of now gave last; `restarts` are counted outside of it."""

    def __init__(self) -> None:
        self.last = EngineStats()
        self.restarts: Counter[str] = Counter()
        self._before = EngineStats()

    def process_ended(self) -> None:
        """The counters of the next one begin at zero."""
        self._before = replace(EngineStats(), **self._summed())
        empty = EngineStats()
        self.last = replace(self.last, **{name: getattr(empty, name) for name in COUNTERS})

    def total(self, resumed: int) -> EngineStats:
        """Return the sum over all processes. `resumed`: requests that went on in another process."""
        return replace(self.last, **self._summed(), restarts=dict(self.restarts), resumed_requests=resumed)

    def _summed(self) -> dict[str, Any]:
        return {name: _sum(getattr(self._before, name), getattr(self.last, name)) for name in COUNTERS}


def _sum(one: Any, other: Any) -> Any:
    return dict(Counter(one) + Counter(other)) if isinstance(one, dict) else one + other
