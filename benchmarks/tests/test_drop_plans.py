"""KunServe's plans by hand and against brute force: which groups merge, and which layers each engine keeps."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.simulated_fleet.plans import DropPlan, pipeline_units, plan_drop, split_layers
from engine.fleet.overload import Group, plan_pairs, should_restore


def full(engines: int, first: int, queued: int) -> Group:
    return Group(tuple(range(first, first + engines)), 100 * engines, 97 * engines, queued)


def test_the_two_smallest_groups_merge_until_it_is_enough() -> None:
    groups = [full(1, 0, 53), full(1, 1, 3), full(2, 2, 46), full(1, 4, 13)]
    plan = plan_drop(groups, copy_units=60)
    # missing: 50 + 0 + 46 - 6 + 10 = 100: of the small ones those that miss most, then the smallest two of what is left
    assert plan == DropPlan(((1, 0, 3),), 120, enough=True)
    assert plan_drop(groups[:2], copy_units=60) == DropPlan(((0, 1),), 60, enough=True)


def test_a_plan_that_cannot_be_enough_says_so() -> None:
    plan = plan_drop([full(1, 0, 500), full(1, 1, 500)], copy_units=60)
    assert plan.merges == ((0, 1),) and not plan.enough
    assert plan_drop([full(1, 0, 500)], copy_units=60) == DropPlan((), 0, enough=False)
    bounded = plan_drop([full(1, i, 500) for i in range(4)], copy_units=60, most=2)
    assert bounded.merges == ((0, 1), (2, 3)) and not bounded.enough


def test_nothing_is_dropped_before_memory_is_full_and_the_queue_larger_than_what_is_free() -> None:
    roomy, idle = Group((0,), 100, 90, 50), Group((1,), 100, 99, 1)
    assert plan_drop([roomy, idle], 60).merges == ()
    assert plan_drop([Group((0,), 100, 95, 6), idle], 60).merges == ((0, 1),)
    assert should_restore(Group((0,), 200, 99, 0), before=120, undropped=200)
    assert not should_restore(Group((0,), 200, 99, 0), before=90, undropped=200), "use is rising"
    assert not should_restore(Group((0,), 200, 101, 0), before=120, undropped=200)
    assert not should_restore(Group((0,), 200, 50, 4), before=120, undropped=200)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    queued=st.lists(st.integers(0, 300), min_size=8, max_size=8),
    copy=st.integers(1, 100),
)
def test_a_plan_merges_whole_groups_once_and_no_more_than_it_must(
    sizes: list[int], queued: list[int], copy: int
) -> None:
    groups = [full(size, 10 * i, q) for i, (size, q) in enumerate(zip(sizes, queued, strict=False))]
    plan = plan_drop(groups, copy)
    members = [member for merge in plan.merges for member in merge]
    assert len(set(members)) == len(members) and all(len(merge) > 1 for merge in plan.merges)
    needed = sum(group.missing for group in groups)
    count = len(members) - len(plan.merges)
    assert plan.freed == copy * count and plan.enough == (plan.freed >= needed)
    if any(group.is_short for group in groups):
        assert count == min(len(groups) - 1, -(-needed // copy))


@given(layers=st.integers(1, 80), speeds=st.lists(st.floats(0.2, 4.0), min_size=1, max_size=8), extra=st.floats(0, 4))
def test_layers_are_split_whole_and_in_order(layers: int, speeds: list[float], extra: float) -> None:
    if len(speeds) > layers:
        with pytest.raises(ValueError, match="cannot be split"):
            split_layers(layers, speeds, extra)
        return
    kept = split_layers(layers, speeds, extra)
    assert [layer for part in kept for layer in part] == list(range(layers)) and all(kept)


def test_stages_cost_the_same_and_a_copy_becomes_cache() -> None:
    assert split_layers(48, (1.0, 1.0)) == (range(24), range(24, 48))
    assert split_layers(48, (1.0, 1.0), last_extra=2.0) == (range(25), range(25, 48)), "the head counts"
    assert split_layers(48, (2.0, 1.0)) == (range(32), range(32, 48))
    # two engines of 1,000 bytes each; a copy has 480; a unit takes 48 bytes
    assert pipeline_units((range(24), range(24, 48)), (1000, 1000), 10, 1.0) == (1000 + 240) // 24
    assert pipeline_units((range(48),), (1000,), 10, 1.0) == 1000 // 48


@given(
    sizes=st.lists(st.integers(1, 2), min_size=1, max_size=8),
    queued=st.lists(st.integers(0, 300), min_size=8, max_size=8),
    copy=st.integers(1, 100),
)
def test_the_live_fleet_pairs_as_the_plan_for_two_engines(sizes: list[int], queued: list[int], copy: int) -> None:
    groups = [full(size, 10 * i, q) for i, (size, q) in enumerate(zip(sizes, queued, strict=False))]
    plan = plan_drop(groups, copy, most=2)
    pairs = [tuple(groups[index].engines[0] for index in merge) for merge in plan.merges]
    assert plan_pairs(groups, copy) == (pairs, plan.enough)
