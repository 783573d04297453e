"""Where a past is parked, against brute force over whole blocks."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples

from engine.cache.blocks import CacheKind
from engine.cache.placement import (
    BlockPlace,
    Move,
    PastRun,
    RestoreCosts,
    recompute_costs,
    release_units,
)
from predictor.features import BatchFeatures
from predictor.model import LatencyModel

BLOCK = 16
KV, HIDDEN = CacheKind.KV, CacheKind.HIDDEN
HELD = [kind for kind in CacheKind if kind.form.units]  # the uses of a block


def past(blocks: int, kind: CacheKind = KV, *, start: int = 0) -> PastRun:
    return PastRun(start, blocks * BLOCK, kind, BLOCK)


def units_of(pasts: Sequence[PastRun]) -> int:
    return sum(one.num_blocks * one.block_units for one in pasts)


def block_cost(one: PastRun, place: BlockPlace | None, costs: RestoreCosts) -> float:
    """Seconds of one full block, written down from the definition; None: it stays."""
    if place is None:
        return 0.0
    if place is BlockPlace.HOST:
        return one.kind.form.units * costs.copy
    owed = BLOCK * costs.restore if one.kind is HIDDEN else 0.0  # (the projection is owed anyway)
    return max(0.0, BLOCK * costs.recompute - owed)


def seconds_of(pasts: Sequence[PastRun], moves: Sequence[Move], costs: RestoreCosts) -> float:
    """Return the cost of the moves, for pasts of full blocks."""
    return sum(blocks * block_cost(pasts[index], place, costs) for index, place, blocks in moves)


def layouts(pasts: Sequence[PastRun]) -> Iterator[tuple[tuple[PastRun, BlockPlace | None], ...]]:
    """Every way to place every block."""
    blocks = [one for one in pasts for _ in range(one.num_blocks)]
    for choice in product((None, *BlockPlace), repeat=len(blocks)):
        yield tuple(zip(blocks, choice, strict=True))


def cheapest(pasts: Sequence[PastRun], units: int, host_room: int, costs: RestoreCosts) -> float:
    return min(
        sum(block_cost(one, place, costs) for one, place in layout)
        for layout in layouts(pasts)
        if sum(one.block_units for one, place in layout if place is not None) >= units
        and sum(one.block_units for one, place in layout if place is BlockPlace.HOST) <= host_room
    )


def check(pasts: Sequence[PastRun], moves: Sequence[Move], units: int, host_room: int) -> None:
    """Enough is freed, the host is not overfilled, no block is moved twice, and the order is as promised."""
    moved = dict.fromkeys(range(len(pasts)), 0)
    for index, _, blocks in moves:
        assert blocks > 0
        moved[index] += blocks
    assert all(blocks <= pasts[index].num_blocks for index, blocks in moved.items())
    assert list(moves) == sorted(moves)
    assert sum(blocks * pasts[index].block_units for index, _, blocks in moves) >= min(units, units_of(pasts))
    copied = [move for move in moves if move.place is BlockPlace.HOST]
    assert sum(blocks * pasts[index].block_units for index, _, blocks in copied) <= host_room


seconds = st.floats(0.0, 1.0)
all_costs = st.builds(RestoreCosts, seconds, seconds, seconds)
some_pasts = st.lists(st.builds(past, st.integers(1, 2), st.sampled_from(HELD)), min_size=1, max_size=3)


@settings(max_examples=examples(150), deadline=None)
@given(some_pasts, st.data(), all_costs)
def test_dearer_than_the_best_by_one_block_at_most(
    pasts: list[PastRun], data: st.DataObject, costs: RestoreCosts
) -> None:
    units = data.draw(st.integers(1, units_of(pasts)))
    moves = release_units(pasts, units, 100, costs)
    check(pasts, moves, units, 100)
    best = cheapest(pasts, units, 100, costs)
    # The whole plan but for one block's last step is part of the best fractional plan.
    one_block = max(block_cost(one, place, costs) for one in pasts for place in BlockPlace)
    assert best - 1e-9 <= seconds_of(pasts, moves, costs) <= best + one_block + 1e-9
    if units == units_of(pasts):
        assert seconds_of(pasts, moves, costs) == pytest.approx(best, abs=1e-9)
    assert moves == release_units(pasts, units, 100, costs)


@settings(max_examples=examples(150), deadline=None)
@given(some_pasts, st.data(), all_costs, st.integers(0, 4))
def test_a_full_host_is_never_overfilled(
    pasts: list[PastRun], data: st.DataObject, costs: RestoreCosts, host_room: int
) -> None:
    units = data.draw(st.integers(1, units_of(pasts)))
    moves = release_units(pasts, units, host_room, costs)
    check(pasts, moves, units, host_room)
    assert seconds_of(pasts, moves, costs) >= cheapest(pasts, units, host_room, costs) - 1e-9


# An H200 with OPT-13B: 8.4 us a token from hidden state, 16.4 us from the host, 42 us by recompute.
H200 = RestoreCosts(recompute=42e-6, restore=8.4e-6, copy=128e-6)


def test_hidden_state_owes_its_projection_anyway() -> None:
    """So dropping it costs less than dropping K and V, for the same tokens."""
    assert past(3, HIDDEN).drop_seconds(2, H200) == pytest.approx(2 * BLOCK * (42e-6 - 8.4e-6))
    assert past(3).drop_seconds(2, H200) == pytest.approx(2 * BLOCK * 42e-6)
    assert release_units([past(3, HIDDEN)], 2, 0, H200) == [(0, BlockPlace.DROP, 2)]
    assert release_units([past(3, HIDDEN)], 2, 1, H200) == [(0, BlockPlace.DROP, 1), (0, BlockPlace.HOST, 1)]


def test_what_lies_in_front_of_something_else_is_not_dropped() -> None:
    front = PastRun(0, 2 * BLOCK, KV, BLOCK, can_drop=False)
    assert release_units([front], 4, 2, H200) == [(0, BlockPlace.HOST, 1)]


def test_recompute_costs_are_those_of_the_latency_model() -> None:
    model = LatencyModel(intercept=0.01, attention=2e-9, prefill_chunks=1e-4, knots=(0, 64), hinges=(1e-6, 4e-5))
    beside = BatchFeatures()
    beside.add_decodes(64, 64 * 500)
    per_token, pair = recompute_costs(model, beside, 256)
    costs = RestoreCosts(per_token, 0.0, 0.0, recompute_pair=pair)
    for start in (0, 512, 3840):
        assert costs.recompute_seconds(start, 256) == pytest.approx(model.marginal(beside, start, 256))
