"""One surface per workload and window: settings replayed once, every metric and tolerance read off them.

The search for a single SLO lives in `predictor.budget`. Here many SLOs share the replays: one-parameter families of
settings are explored on a coarse grid, then the brackets between kept and broken are halved for all targets at once, a
batch at a time, so that replays can run side by side. Nothing is assumed to be monotone: of all replays that keep a
target, the one with the most offline throughput is taken.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.experiments.replay import Setting
from loadgen.simulation.run import Metrics

RESOLUTION = 1.02
BATCH = 2
"""Replays that are decided on at a time. It shapes the surface, so it does not follow the number of processes."""
CONFIRMED = 5
"""Number of settings that are tried in further windows."""
Evaluate = Callable[[Sequence[Setting]], Sequence[Metrics]]
"""Replays a batch of settings."""


@dataclass(frozen=True, slots=True)
class Target:
    """A tolerated interference on one metric (`ttft_mean`, `tbt_p99` ...), as a ratio over the online-only run."""

    metric: str
    tolerance: float


@dataclass(frozen=True, slots=True)
class Family:
    """Settings along one positive parameter in [low, high], explored for the metrics that they can serve."""

    name: str
    make: Callable[[float], Setting]
    low: float
    high: float
    grid: int
    runs: int
    metrics: tuple[str, ...]


def interference(metrics: Metrics, base: Metrics, key: str) -> float:
    """(co-located − online-only) ÷ online-only."""
    return (metrics[key] - base[key]) / base[key] if base[key] > 0 else 0.0


@dataclass(slots=True)
class Surface:
    """All replays of one workload and window. `online_only` is the setting that tolerances compare with."""

    evaluate: Evaluate
    online_only: Setting
    points: dict[Setting, Metrics] = field(default_factory=dict)
    members: dict[str, dict[float, Setting]] = field(default_factory=dict)

    @property
    def base(self) -> Metrics:
        """Metrics of the online-only run."""
        return self.points[self.online_only]

    def replay(self, settings: Sequence[Setting]) -> None:
        """Make the replays of `settings` that are missing."""
        missing = [s for s in dict.fromkeys(settings) if s not in self.points]
        if missing:
            self.points.update(zip(missing, self.evaluate(missing), strict=True))

    def explore(self, family: Family, targets: Sequence[Target], margin: float) -> None:
        """At most `family.runs` replays: the grid, then brackets around each target's best."""
        wanted = [target for target in targets if target.metric in family.metrics]
        ratio = family.high / family.low
        self.add(family.name, family.make, [family.low * ratio ** (i / (family.grid - 1)) for i in range(family.grid)])
        while (left := family.runs - len(self.members[family.name])) > 0:
            middles = self._middles(family, wanted, margin)
            if not middles:
                return
            self.add(family.name, family.make, middles[: min(left, BATCH)])

    def add(self, name: str, make: Callable[[float], Setting], values: Sequence[float]) -> None:
        """Replay settings as members of a family, each with its parameter."""
        members = self.members.setdefault(name, {})
        members.update((value, make(value)) for value in values)
        self.replay(list(members.values()))

    def _middles(self, family: Family, targets: Sequence[Target], margin: float) -> list[float]:
        """Middles of the gaps beside the best member of each target, those with the most to gain first."""
        members = self.members[family.name]
        values = sorted(members)
        throughput = {value: self.points[members[value]]["offline_throughput"] for value in values}
        gaps: dict[float, float] = {}
        for target in targets:
            kept = [value for value in values if self.keeps(members[value], target, margin)]
            best = max(kept, key=throughput.__getitem__, default=values[0])
            around = values[max(values.index(best) - 1, 0) : values.index(best) + 2]
            for low, high in pairwise(around):
                if high / low > RESOLUTION:
                    middle, gain = math.sqrt(low * high), abs(throughput[high] - throughput[low])
                    gaps[middle] = max(gaps.get(middle, 0.0), gain / max(throughput[best], 1.0))
        return sorted(gaps, key=lambda middle: -gaps[middle])

    def keeps(self, setting: Setting, target: Target, margin: float = 1.0) -> bool:
        """Whether the replay of `setting` used at most `margin` of the target's tolerance."""
        return interference(self.points[setting], self.base, target.metric) <= margin * target.tolerance

    def choose(
        self,
        targets: Target | Sequence[Target],
        margin: float,
        families: Sequence[str],
        further: Sequence["Surface"] = (),
    ) -> Setting:
        """The setting of `families` with the most offline throughput that keeps all targets; else online only.

        Several targets are constraints of one choice among the same replays (HyGen §5.4), not a minimum of answers.
        `further`: surfaces of other windows in which the setting must keep the targets, too; CONFIRMED settings are
        tried.
        """
        wanted = (targets,) if isinstance(targets, Target) else targets
        allowed = [setting for name in families for setting in self.members.get(name, {}).values()]
        kept = [setting for setting in allowed if all(self.keeps(setting, target, margin) for target in wanted)]
        kept.sort(key=lambda setting: self.points[setting]["offline_throughput"], reverse=True)
        for setting in kept[:CONFIRMED] if further else kept[:1]:
            if all(surface.confirms(setting, wanted) for surface in further):
                return setting
        return self.online_only

    def confirms(self, setting: Setting, targets: Sequence[Target]) -> bool:
        """Whether the setting keeps the targets in this window; replay it if it was not."""
        self.replay([self.online_only, setting])
        return all(self.keeps(setting, target) for target in targets)
