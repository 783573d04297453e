"""Stage 2 of the hybrid cache: where a past is parked, against brute force over whole blocks."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.parking import ParkingPlan, Past, Place, RestoreCosts, recompute_costs, release_units
from predictor.features import BatchFeatures
from predictor.model import LatencyModel

BLOCK = 16


def past(blocks: int, kv: int = 2, hidden: int = 0, *, start: int = 0) -> Past:
    return Past(start, blocks * BLOCK, kv, hidden, BLOCK)


def block_cost(one: Past, place: Place, costs: RestoreCosts) -> float:
    """Seconds of one full block, written down from the definition."""
    transfer = costs.unit_to_host + costs.unit_from_host
    project = BLOCK * costs.restore_hidden
    if not one.kv_units:  # (the projection is owed anyway)
        dropped = max(0.0, BLOCK * costs.recompute - project)
        return {Place.KEEP: 0.0, Place.DROP: dropped, Place.HOST_HIDDEN: one.hidden_units * transfer}[place]
    return {
        Place.KEEP: 0.0,
        Place.HIDDEN: project,
        Place.HOST_KV: one.kv_units * transfer,
        Place.HOST_HIDDEN: one.hidden_units * transfer + project,
        Place.DROP: BLOCK * costs.recompute,
    }[place]


def places(one: Past) -> list[Place]:
    found = [Place.KEEP, Place.DROP]
    found += [Place.HOST_KV] if one.kv_units else []
    found += [Place.HOST_HIDDEN] if one.hidden_units else []
    found += [Place.HIDDEN] if one.kv_units and one.hidden_units else []
    return found


def freed(one: Past, place: Place) -> int:
    if place is Place.KEEP:
        return 0
    return one.kv_units + (0 if place is Place.HIDDEN else one.hidden_units)


def host_units(one: Past, place: Place) -> int:
    return {Place.HOST_KV: one.kv_units, Place.HOST_HIDDEN: one.hidden_units}.get(place, 0)


def layouts(pasts: Sequence[Past]) -> Iterator[tuple[tuple[Past, Place], ...]]:
    """Every way to place every block."""
    blocks = [one for one in pasts for _ in range(one.num_blocks)]
    for choice in product(*(places(one) for one in blocks)):
        yield tuple(zip(blocks, choice, strict=True))


def cheapest(pasts: Sequence[Past], units: int, host_room: int, costs: RestoreCosts) -> float:
    return min(
        sum(block_cost(one, place, costs) for one, place in layout)
        for layout in layouts(pasts)
        if sum(freed(one, place) for one, place in layout) >= units
        and sum(host_units(one, place) for one, place in layout) <= host_room
    )


def check(pasts: Sequence[Past], plan: ParkingPlan, units: int, host_room: int) -> None:
    """Enough is freed, the host is not overfilled, no block is moved twice, and the plan's sums are its moves'."""
    moved = dict.fromkeys(range(len(pasts)), 0)
    for index, place, blocks in plan.moves:
        assert blocks > 0 and place in places(pasts[index]) and place is not Place.KEEP
        moved[index] += blocks
    assert all(moved[index] <= one.num_blocks for index, one in enumerate(pasts))
    assert plan.units == sum(blocks * freed(pasts[index], place) for index, place, blocks in plan.moves) >= units
    assert plan.host_units == sum(blocks * host_units(pasts[i], place) for i, place, blocks in plan.moves) <= host_room


seconds = st.floats(0.0, 1.0)
all_costs = st.builds(RestoreCosts, seconds, seconds, seconds, seconds)
some_pasts = st.lists(
    st.builds(past, st.integers(1, 2), st.just(2), st.integers(0, 1))
    | st.builds(past, st.integers(1, 2), st.just(0), st.just(1)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(some_pasts, st.data(), all_costs)
def test_dearer_than_the_best_by_one_block_at_most(pasts: list[Past], data: st.DataObject, costs: RestoreCosts) -> None:
    units = data.draw(st.integers(1, sum(one.units for one in pasts)))
    plan = release_units(pasts, units, 100, costs)
    assert plan is not None
    check(pasts, plan, units, 100)
    best = cheapest(pasts, units, 100, costs)
    # The whole plan but for one block's last step is part of the best fractional plan.
    one_block = max(block_cost(one, place, costs) for one in pasts for place in places(one))
    assert best - 1e-9 <= plan.seconds <= best + one_block + 1e-9
    if units == sum(one.units for one in pasts):
        assert plan.seconds == pytest.approx(best, abs=1e-9)
    assert plan == release_units(pasts, units, 100, costs)


def test_a_block_that_was_to_keep_its_hidden_state_may_still_go_to_the_host_as_kv() -> None:
    """Cheapest for two units: restore from hidden state. For all three: copy K and V, not the hidden state."""
    both = Past(0, 16, 2, 1, 16)
    costs = RestoreCosts(recompute=1.0, restore_hidden=0.109375, unit_to_host=1.0, unit_from_host=0.5)
    for units, place, seconds in ((2, Place.HIDDEN, 1.75), (3, Place.HOST_KV, 3.0)):
        plan = release_units([both], units, 100, costs)
        assert plan is not None and [move.place for move in plan.moves] == [place] and plan.seconds == seconds


@settings(max_examples=150, deadline=None)
@given(some_pasts, st.data(), all_costs, st.integers(0, 4))
def test_a_full_host_is_never_overfilled(
    pasts: list[Past], data: st.DataObject, costs: RestoreCosts, host_room: int
) -> None:
    units = data.draw(st.integers(1, sum(one.units for one in pasts)))
    plan = release_units(pasts, units, host_room, costs)
    assert plan is not None
    check(pasts, plan, units, host_room)
    assert plan.seconds >= cheapest(pasts, units, host_room, costs) - 1e-9
    assert plan.seconds <= sum(one.num_blocks * max(block_cost(one, p, costs) for p in places(one)) for one in pasts)


@settings(max_examples=100, deadline=None)
@given(some_pasts, all_costs, st.integers(1, 8))
def test_more_units_never_cost_less_without_a_host(pasts: list[Past], costs: RestoreCosts, units: int) -> None:
    plans = [release_units(pasts, wanted, 0, costs) for wanted in (units, units + 1)]
    if plans[0] is not None and plans[1] is not None:
        assert plans[1].seconds >= plans[0].seconds - 1e-9


# An H200 with OPT-13B: 8.4 us a token from hidden state, 16.4 us from the host, 42 us by recompute.
H200 = RestoreCosts(recompute=42e-6, restore_hidden=8.4e-6, unit_to_host=64e-6, unit_from_host=64e-6)


def test_hidden_before_host_before_recompute() -> None:
    stored, plain = past(4, hidden=1), past(4)
    plan = release_units([plain, stored], 8, 100, H200)
    assert plan is not None and plan.moves == ((1, Place.HIDDEN, 4),)
    assert plan.seconds == pytest.approx(4 * BLOCK * 8.4e-6)
    # More than the hidden state releases: two copied units free three. If the host is small, the plain one goes there.
    plan = release_units([plain, stored], 12, 100, H200)
    assert plan is not None and plan.moves == ((1, Place.HOST_KV, 4),) and plan.host_units == 8
    assert plan.seconds == pytest.approx(cheapest([plain, stored], 12, 100, H200))
    plan = release_units([plain, stored], 12, 7, H200)
    assert plan is not None and plan.moves == ((0, Place.HOST_KV, 2), (1, Place.HIDDEN, 4)) and plan.host_units == 4
    plan = release_units([plain, stored], 12, 2, H200)
    # For the unit pair that finds no room, the plain one's recompute is cheaper per unit than the other's.
    assert plan is not None
    assert plan.moves == ((0, Place.DROP, 1), (0, Place.HOST_KV, 1), (1, Place.HIDDEN, 4))
    plan = release_units([plain], 8, 4, H200)
    assert plan is not None and plan.moves == ((0, Place.DROP, 2), (0, Place.HOST_KV, 2))


def test_without_a_stored_hidden_state_nothing_is_converted() -> None:
    free = RestoreCosts(recompute=1.0, restore_hidden=0.0, unit_to_host=1.0, unit_from_host=1.0)
    plan = release_units([past(3)], 6, 0, free)
    assert plan is not None and plan.moves == ((0, Place.DROP, 3),)


def test_hidden_state_alone_owes_its_projection_anyway() -> None:
    plan = release_units([past(3, kv=0, hidden=1)], 2, 0, H200)
    assert plan is not None and plan.moves == ((0, Place.DROP, 2),)
    assert plan.seconds == pytest.approx(2 * BLOCK * (42e-6 - 8.4e-6))
    plan = release_units([past(3, kv=0, hidden=1)], 2, 1, H200)
    assert plan is not None and plan.moves == ((0, Place.DROP, 1), (0, Place.HOST_HIDDEN, 1))


def test_only_what_is_needed_is_given_up() -> None:
    plan = release_units([past(100), past(100)], 5, 0, H200)
    assert plan is not None and plan.moves == ((0, Place.DROP, 3),) and plan.units == 6
    nothing = ParkingPlan((), 0, 0, 0.0)
    assert release_units([past(3)], 0, 10, H200) == nothing
    assert release_units([past(3)], -4, 10, H200) == nothing
    assert release_units([], 0, 0, H200) == nothing


def test_more_than_there_is_gives_no_plan() -> None:
    assert release_units([past(2), past(1, hidden=1)], 8, 100, H200) is None
    assert release_units([past(2), past(1, hidden=1)], 7, 100, H200) is not None
    assert release_units([], 1, 100, H200) is None


def test_a_nearly_empty_last_block_goes_first() -> None:
    young = Past(0, 2 * BLOCK + 1, 2, 0, BLOCK)
    plan = release_units([past(3), young], 2, 0, H200)
    assert plan is not None and plan.moves == ((1, Place.DROP, 1),)
    assert plan.seconds == pytest.approx(42e-6)


def test_a_long_past_costs_more_to_recompute() -> None:
    costs = RestoreCosts(1e-5, 1.0, 1.0, 1.0, recompute_pair=1e-8)
    late, early = past(2, start=4000), past(2)
    plan = release_units([late, early], 4, 0, costs)
    assert plan is not None and plan.moves == ((1, Place.DROP, 2),)
    assert plan.seconds == pytest.approx(32e-5 + 1e-8 * 32 * 33 / 2)
    # The tail of a long past is what is dropped, and it is priced there.
    plan = release_units([past(100)], 2, 0, costs)
    assert plan is not None and plan.seconds == pytest.approx(16e-5 + 1e-8 * (16 * 99 * 16 + 16 * 17 / 2))


def test_a_second_step_is_paid_for_what_it_adds() -> None:
    costs = RestoreCosts(42e-6, 8.4e-6, 1.0, 1.0, recompute_pair=1e-8)
    # Dropping converted hidden state adds 33.6 us a token for one unit; the far block takes 75 us a token for two.
    plan = release_units([past(1, start=3300), past(1, hidden=1)], 3, 0, costs)
    assert plan is not None and plan.moves == ((1, Place.DROP, 1),)


def test_recompute_costs_are_those_of_the_latency_model() -> None:
    model = LatencyModel(intercept=0.01, attention=2e-9, prefill_chunks=1e-4, knots=(0, 64), hinges=(1e-6, 4e-5))
    beside = BatchFeatures()
    beside.add_decodes(64, 64 * 500)
    per_token, pair = recompute_costs(model, beside, 256)
    costs = RestoreCosts(per_token, 0.0, 0.0, 0.0, recompute_pair=pair)
    for start in (0, 512, 3840):
        assert costs.recompute_seconds(start, 256) == pytest.approx(model.marginal(beside, start, 256))


def test_rho_of_a_unit() -> None:
    costs = RestoreCosts(0.0, 0.0, 0.0, 0.0, rho=3e-6)
    # One KV block has two units and 16 tokens.
    assert costs.rho_per_unit(16) * 2 == pytest.approx(16 * 3e-6)
