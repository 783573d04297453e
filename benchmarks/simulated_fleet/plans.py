"""Pipelines of any number of engines: the merges of groups, and the layers and units of each stage (KunServe §4.1).

The live fleet forms pipelines of two engines only (`engine.fleet.overload`).
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.fleet.overload import Group  # imports the server's libraries, which a GPU check runs without


def plan_drop(groups: "Sequence[Group]", copy_units: int) -> tuple[list[tuple[int, ...]], bool]:
    """Merge the two smallest groups until the missing units of all groups are freed (Figure 6, O(N log N)).

    Among groups of equal size, those with the most missing units merge first. Return for each new group the indices of
    its old groups in pipeline order (nothing without a short group), and whether the freed units cover the missing
    ones; if not, more engines are needed.

    Args:
        groups: The current groups.
        copy_units: Units that one copy of the droppable layers frees.
    """
    needed = sum(group.missing for group in groups)
    if copy_units <= 0 or not any(group.is_short for group in groups):
        return [], needed == 0
    heap: list[tuple[int, int, int, tuple[int, ...]]] = [
        (len(group.engines), -group.missing, i, (i,)) for i, group in enumerate(groups)
    ]
    heapq.heapify(heap)
    freed = 0
    while len(heap) >= 2 and freed < needed:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        size = first[0] + second[0]
        freed += copy_units
        heapq.heappush(heap, (size, first[1] + second[1], first[2], (*first[3], *second[3])))
    return sorted(members for _, _, _, members in heap if len(members) > 1), freed >= needed


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
