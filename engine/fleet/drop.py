"""Which engines give up replicated layers when memory is short, and which layers each of them keeps (KunServe §4.1).

A *group* is engines that hold one copy of the model between them and run it as a pipeline, at first one engine each.
Merging two groups makes one copy superfluous: its bytes become cache. Fewer engines in a pipeline cost less, so the two
smallest groups merge first. Pure functions of counts and bytes: no clock, no transport, torch-free; the live and the
simulated fleet share them.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

DROP_AT = 0.95
"""Share of the cache in use from which requests that wait for memory are a reason to drop."""
EXPECT_AT, LEAST = 0.7, 0.05
"""Shares of the cache: in use, and missing, from which demand that is expected is a reason, too."""
RESTORE_AT = 0.5
"""Share of the cache without any drop; layers are restored when what is held fits in it."""


class Group(NamedTuple):
    """Engines with one copy of the model between them. `units`, `used`: cache they have, and what is held of it;
    `queued`: what requests without a place need; `growth`: what all of them are expected to need beyond that. All in
    one unit."""

    engines: tuple[int, ...]
    units: int
    used: int
    queued: int
    growth: int = 0

    @property
    def missing(self) -> int:
        """What is needed beyond what is free."""
        return max(0, self.queued + self.growth - (self.units - self.used))

    @property
    def is_expected(self) -> bool:
        """Whether its memory will not be enough, with much of it in use already."""
        return self.growth > 0 and self.used >= EXPECT_AT * self.units and self.missing >= LEAST * self.units

    @property
    def is_short(self) -> bool:
        """Whether its memory is (almost) full and more is queued than is free, or that is expected."""
        return (self.queued > self.units - self.used and self.used >= DROP_AT * self.units) or self.is_expected


class DropPlan(NamedTuple):
    """`merges`: by new group, the groups (numbers in the input) that it is made of, in pipeline order; the others stay
    as they are. `freed`: units won. `enough`: whether that is what was asked for: if not, more engines are needed."""

    merges: tuple[tuple[int, ...], ...]
    freed: int
    enough: bool


def plan_drop(groups: Sequence[Group], copy_units: int, most: int | None = None) -> DropPlan:
    """Merge the two smallest groups until what is missing in all of them is freed (Figure 6, O(N log N)).

    Of equal ones those merge first that miss most. Nothing is planned unless some group is short. `copy_units`: what
    one copy of the droppable layers makes room for; `most`: engines of the largest group that may be made.
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
    """Whether a group's layers can come back: use is falling (`before`: a while ago), nobody waits for memory, and what
    is held takes at most `RESTORE_AT` of the cache that its engines have without a drop (§4.4), and will fit in it."""
    return queued == 0 and used <= before and used <= RESTORE_AT * undropped and used + growth <= undropped


def split_layers(num_layers: int, speeds: Sequence[float], last_extra: float = 0.0) -> tuple[range, ...]:
    """Contiguous layers for each stage of a pipeline, of about equal cost: in proportion to speed, every stage at least
    one. `last_extra`: what the output head costs the last stage, in layers. Raises ValueError for more stages than
    layers."""
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
    """Cache units of a pipeline. `engine_bytes`: each engine's cache with all layers in place; `layer_bytes`: the
    weights of one layer, `unit_layer_bytes`: one layer's part of a unit. A unit needs its part on every stage: the
    stage with the least room for its layers counts."""
    num_layers = sum(map(len, kept))
    return min(
        int((room + (num_layers - len(layers)) * layer_bytes) / (len(layers) * unit_layer_bytes))
        for layers, room in zip(kept, engine_bytes, strict=True)
    )


class Exchange(NamedTuple):
    """Layers whose K and V go from one engine to another."""

    source: int
    target: int
    layers: int


def exchanges(before: Sequence[tuple[int, range]], after: Sequence[tuple[int, range]]) -> list[Exchange]:
    """What moves of a request whose layers lay on the engines `before` and go on `after` (engine, layers)."""
    found: dict[tuple[int, int], int] = {}
    for source, held in before:
        for target, kept in after:
            common = min(held.stop, kept.stop) - max(held.start, kept.start)
            if source != target and common > 0:
                found[source, target] = found.get((source, target), 0) + common
    return [Exchange(source, target, layers) for (source, target), layers in found.items()]
