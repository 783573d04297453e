"""When engines drop layers and have them back: by reports alone, on a clock of the test's own."""

from engine.fleet.drop import Group
from engine.fleet.overload import FALLING, Watch


def full(engine: int, queued: int = 20) -> Group:
    return Group((engine,), 100, 98, queued)


def test_two_engines_merge_when_one_is_full_and_more_waits_than_is_free() -> None:
    watch = Watch()
    free = Group((1,), 100, 10, 0)
    assert watch.merges([full(0, queued=2), free], 50, now=0.0) == [], "there is room for what waits"
    assert watch.merges([Group((0,), 100, 80, 60), free], 50, now=0.0) == [], "it is not full"
    assert watch.merges([full(0), free], 50, now=0.0) == [(0, 1)] and not watch.too_little
    assert watch.merges([full(0, queued=90), free], 50, now=0.0) == [(0, 1)] and watch.too_little
    assert watch.merges([full(0)], 50, now=0.0) == [] and watch.too_little, "there is nobody to merge with"


def test_a_pair_is_the_largest_pipeline() -> None:
    watch = Watch()
    pair = Group((0, 1), 250, 245, 30)
    assert watch.merges([pair, Group((2,), 100, 10, 0)], 50, now=0.0) == [] and watch.too_little
    assert watch.merges([pair, full(2), full(3)], 50, now=0.0) == [(2, 3)]
    four = [full(engine, queued=60) for engine in range(4)]
    assert sorted(sum(watch.merges(four, 50, now=0.0), ())) == [0, 1, 2, 3]


def test_engines_that_have_just_changed_stay_as_they_are() -> None:
    watch = Watch()
    watch.note([0, 1], until=30.0)
    groups = [full(0), full(1)]
    assert watch.merges(groups, 500, now=29.9) == []
    assert watch.merges(groups, 500, now=30.0) == [(0, 1)]


def test_layers_come_back_once_use_falls_and_fits_without_a_drop() -> None:
    watch = Watch()

    def looks(used: int, now: float, queued: int = 0) -> bool:
        return watch.restores(Group((0, 1), 250, used, queued), 200, now)

    watch.note([0, 1], until=5.0)
    assert not looks(90, 0.0) and not looks(90, 4.0), "too soon"
    assert not looks(120, 5.0), "half of what they have without a drop is not enough"
    assert not looks(100, 5.0 + FALLING / 2), "use is compared over a while"
    assert not looks(90, 5.0 + FALLING, queued=3), "somebody waits"
    assert not looks(95, 5.0 + 2 * FALLING), "use grows"
    assert looks(95, 5.0 + 3 * FALLING)
