"""End times of jobs under processor sharing: tenants share the machine equally, and so do the jobs of a tenant.

The machine is always busy, so time is work divided by the rate. A job of work w ends when its tenant has received
T = sum of min(v, w) over the works v of the tenant's jobs. By then the lane has received the sum of min(S, T) over the
tenants' totals S. Sorted works with prefix sums give both in O(log n).
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

URGENT_SHARE = 7 / 8
"""Share of the machine for jobs at risk while other jobs run, as in the engine's lanes."""
MAX_WORK = 1e15
"""Maximum work of one job, so that sums over all jobs stay finite and precise."""


@dataclass(frozen=True, slots=True)
class JobLoad:
    """The work that one job has left."""

    batch_id: str
    tenant: str
    work: float
    """In predicted engine seconds."""
    at_risk: bool = False

    @property
    def counted(self) -> float:
        """The work, limited to [0, MAX_WORK]; NaN counts as 0."""
        return min(self.work, MAX_WORK) if self.work > 0.0 else 0.0


@dataclass(slots=True)
class SortedWorks:
    """Sorted works with their prefix sums."""

    works: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=lambda: [0.0])

    def seal(self) -> None:
        self.works.sort()
        self.sums = list(accumulate(self.works, initial=0.0))

    def up_to(self, level: float) -> float:
        """Return the sum of min(work, level)."""
        index = bisect_right(self.works, level)
        return self.sums[index] + (len(self.works) - index) * level


_NOTHING = SortedWorks()


class _Lane:
    def __init__(self) -> None:
        self.tenants: dict[str, SortedWorks] = {}
        self.totals = SortedWorks()

    @property
    def total(self) -> float:
        return self.totals.sums[-1]

    def seal(self) -> None:
        for works in self.tenants.values():
            works.seal()
        self.totals = SortedWorks([works.sums[-1] for works in self.tenants.values()])
        self.totals.seal()

    def done_by(self, tenant: str, work: float, is_new: bool) -> float:
        """Return the work that the lane does until a job with `work` ends; `is_new`: the job is not in the lane yet."""
        works = self.tenants.get(tenant, _NOTHING)
        level = works.up_to(work) + (work if is_new else 0.0)
        return self.totals.up_to(level) + (level - min(works.sums[-1], level) if is_new else 0.0)


class Shares:
    """All jobs of a machine. Add the jobs, call `seal` once, then ask for the end of a job, added or new."""

    def __init__(self) -> None:
        self._lanes: dict[bool, _Lane] = {}

    def add(self, load: JobLoad) -> None:
        lane = self._lanes.setdefault(load.at_risk, _Lane())
        lane.tenants.setdefault(load.tenant, SortedWorks()).works.append(load.counted)

    def seal(self) -> None:
        for lane in self._lanes.values():
            lane.seal()

    def seconds(self, load: JobLoad, rate: float, *, is_new: bool = False) -> float:
        """Return the time until the job ends at `rate` (work per second); `is_new`: the job was not added.

        Infinity if the rate is not positive."""
        lane = self._lanes.get(load.at_risk, _Lane())
        other = self._lanes.get(not load.at_risk)
        done = lane.done_by(load.tenant, load.counted, is_new)
        if other is not None:
            share = URGENT_SHARE if load.at_risk else 1.0 - URGENT_SHARE
            alone = other.total / (1.0 - share)  # work of the machine until the other lane is empty
            done = done / share if done <= alone * share else done + other.total
        return done / rate if rate > 0.0 else math.inf
