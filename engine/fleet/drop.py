"""Decide which engines drop replicated layers when memory is short, and which layers each keeps (KunServe §4.1).

A *group* is a set of engines that hold one copy of the model and run it as a pipeline; at first each engine is a group.
Merging two groups makes one copy superfluous, and its bytes become cache. Short pipelines cost less, so the two
smallest groups merge first. The live and the simulated fleet share these pure functions of counts and bytes.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

DROP_AT = 0.95
"""Share of the cache in use from which waiting requests trigger a drop."""
EXPECT_AT, LEAST = 0.7, 0.05
"""Shares of the cache in use, and missing, from which expected demand triggers a drop."""
RESTORE_AT = 0.5
"""Share of the undropped cache into which the used units must fit before layers are restored."""


class Group(NamedTuple):
    """Engines that together hold one copy of the model. All amounts are cache units."""

    engines: tuple[int, ...]
    units: int
    used: int
    queued: int  # units that waiting requests need
    growth: int = 0  # units that all requests are expected to need beyond that

    @property
    def missing(self) -> int:
        """Units needed beyond the free ones."""
        return max(0, self.queued + self.growth - (self.units - self.used))

    @property
    def is_expected(self) -> bool:
        """Whether the memory is expected to run out and much of it is already in use."""
        return self.growth > 0 and self.used >= EXPECT_AT * self.units and self.missing >= LEAST * self.units

    @property
    def is_short(self) -> bool:
        """Whether the memory is (almost) full and the queue needs more than is free, or this is expected."""
        return (self.queued > self.units - self.used and self.used >= DROP_AT * self.units) or self.is_expected


class DropPlan(NamedTuple):
    """The merges of groups and the units that they free."""

    merges: tuple[tuple[int, ...], ...]  # per new group, the indices of its old groups in pipeline order
    freed: int
    enough: bool  # whether the freed units cover the missing ones; if not, more engines are needed


def plan_drop(groups: Sequence[Group], copy_units: int, most: int | None = None) -> DropPlan:
    """Merge the two smallest groups until the missing units of all groups are freed (Figure 6, O(N log N)).

    Among groups of equal size, those with the most missing units merge first. Without a short group, return no merge.

    Args:
        groups: The current groups.
        copy_units: Units that one copy of the droppable layers frees.
        most: Maximum engines of a new group; None: no limit.
    """
    needed = sum(group.missing for group in groups)
    if copy_units <= 0 or not any(group.is_short for group in groups):
        return DropPlan((), 0, needed == 0)
    heap: list[tuple[int, int, int, tuple[int, ...]]] = [
        (len(group.engines), -group.missing, i, (i,)) for i, group in enumerate(groups)
    ]
    heapq.heapify(heap)
    freed = 0
    while len(heap) >= 2 and freed < needed:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        size = first[0] + second[0]
        if most is not None and size > most:
            heapq.heappush(heap, first)
            heapq.heappush(heap, second)
            break
        freed += copy_units
        heapq.heappush(heap, (size, first[1] + second[1], first[2], (*first[3], *second[3])))
    merges = sorted(members for _, _, _, members in heap if len(members) > 1)
    return DropPlan(tuple(merges), freed, freed >= needed)


def should_restore(used: int, before: int, undropped: int, queued: int, growth: int = 0) -> bool:
    """Return whether a group can restore its layers (§4.4).

    Its use must not be rising, no request may wait for memory, and the used units must take at most `RESTORE_AT` of the
    undropped cache. The expected growth must fit, too.

    Args:
        used: Units in use now.
        before: Units in use some time ago.
        undropped: Units of the engines with all layers.
        queued: Units that waiting requests need.
        growth: Units that are expected to be needed beyond that.
    """
    return queued == 0 and used <= before and used <= RESTORE_AT * undropped and used + growth <= undropped


def split_layers(num_layers: int, speeds: Sequence[float], last_extra: float = 0.0) -> tuple[range, ...]:
    """Return contiguous layers for each pipeline stage, in proportion to the stages' speeds and at least one each.

    `last_extra`: cost of the output head on the last stage, in layers. Raise ValueError for more stages than layers.
    """
    stages = len(speeds)
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be split into {stages} stages")
    total, bounds, share = num_layers + last_extra, [0], 0.0
    for stage, speed in enumerate(speeds[:-1]):
        share += speed / sum(speeds)
        end = round(share * total)
        bounds.append(min(max(end, bounds[-1] + 1), num_layers - (stages - 1 - stage)))
    bounds.append(num_layers)
    return tuple(range(begin, end) for begin, end in pairwise(bounds))


def pipeline_units(
    kept: Sequence[range], engine_bytes: Sequence[float], layer_bytes: float, unit_layer_bytes: float
) -> int:
    """Return the cache units of a pipeline. The stage with the least room determines them.

    Args:
        kept: The layers of each engine.
        engine_bytes: Bytes of each engine's cache with all layers.
        layer_bytes: Bytes of one layer's weights.
        unit_layer_bytes: Bytes of one layer in a unit.
    """
    num_layers = sum(map(len, kept))
    return min(
        int((room + (num_layers - len(layers)) * layer_bytes) / (len(layers) * unit_layer_bytes))
        for layers, room in zip(kept, engine_bytes, strict=True)
    )
