"""The block pool against a plain model: who holds what, what can be shared, what may be reused and when."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.cache_map import CacheBlock
from engine.cache.pool import BlockPool
from engine.cache.prefix import extend_hashes


def test_allocation_takes_two_units_and_stops_when_empty() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate_kv(online=True) for _ in range(3)]
    assert blocks[0] is not None and blocks[1] is not None and blocks[2] is None
    units = [u for b in blocks if b for u in b.entry.units]
    assert len(set(units)) == 4
    assert pool.num_available_units == 1


def test_release_while_a_step_is_in_flight_defers_reuse() -> None:
    pool = BlockPool(2)
    block = pool.allocate_kv(online=True)
    assert block is not None
    pool.release(block, last_step=7)
    assert pool.allocate_kv(online=True) is None
    pool.complete_step(6)
    assert pool.allocate_kv(online=True) is None
    pool.complete_step(7)
    assert pool.allocate_kv(online=True) is not None


def test_published_blocks_survive_release_until_evicted() -> None:
    pool = BlockPool(4)
    pool.complete_step(0)
    block = pool.allocate_kv(online=False)
    assert block is not None
    pool.publish(block, b"h")
    pool.release(block, last_step=0)
    assert pool.lookup([b"h", b"missing"]) == [block]
    assert pool.allocate_kv(online=True) is not None
    assert pool.allocate_kv(online=True) is not None, "the cached block is evicted for it"
    assert pool.lookup([b"h"]) == []


def test_double_release_is_caught() -> None:
    pool = BlockPool(2)
    block = pool.allocate_kv(online=True)
    assert block is not None
    pool.release(block, last_step=-1)
    with pytest.raises(AssertionError):
        pool.release(block, last_step=-1)


def test_hashes_are_chained_salted_and_extended() -> None:
    tokens = list(range(10))
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 4, b"a")
    assert len(hashes) == 2
    whole: list[bytes] = []
    extend_hashes(whole, tokens[:5], 4, b"a")
    extend_hashes(whole, tokens, 4, b"a")
    assert whole == hashes
    other_tenant: list[bytes] = []
    extend_hashes(other_tenant, tokens, 4, b"b")
    assert set(other_tenant).isdisjoint(hashes)
    other_head: list[bytes] = []
    extend_hashes(other_head, [99, *tokens[1:]], 4, b"a")
    assert other_head[1] != hashes[1], "equal tokens after another head are another prefix"


class PoolMachine(RuleBasedStateMachine):
    """References are held in a list, one item each; the pool must agree with it at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(13)
        self.held: list[CacheBlock] = []
        self.in_flight_units: dict[int, set[int]] = {}  # units given up, by the step that may still touch them
        self.step = 0
        self.completed = -1

    @rule(online=st.booleans())
    def allocate(self, online: bool) -> None:
        expected = self.pool.num_available_units >= 2
        block = self.pool.allocate_kv(online=online)
        assert (block is not None) == expected
        if block is not None:
            busy = {u for step, units in self.in_flight_units.items() if step > self.completed for u in units}
            assert busy.isdisjoint(block.entry.units), "a unit was reused while a step may touch it"
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        self.pool.publish(data.draw(st.sampled_from(self.held)), bytes([name]))

    @rule(name=st.integers(0, 5), online=st.booleans())
    def hit(self, name: int, online: bool) -> None:
        for block in self.pool.lookup([bytes([name])]):
            before = self.pool.num_available_units
            idle = self.pool.num_idle_units([block])
            self.pool.acquire(block, online=online)
            assert self.pool.num_available_units == before - idle
            self.held.append(block)
            for units in self.in_flight_units.values():
                units.difference_update(block.entry.units)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), touched=st.booleans())
    def release(self, data: st.DataObject, touched: bool) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        last_step = self.step if touched else -1
        self.pool.release(block, last_step)
        if block.ref_count == 0:
            self.in_flight_units.setdefault(block.last_step, set()).update(block.entry.units)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.pool.withdraw(data.draw(st.sampled_from(self.held)))

    @rule()
    def complete(self) -> None:
        self.pool.complete_step(self.step)
        self.completed = self.step
        self.step += 1

    @invariant()
    def conserved(self) -> None:
        self.pool.check_integrity(self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
