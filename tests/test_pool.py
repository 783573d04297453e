"""The block pool against a plain model: who holds what, what can be shared, what may be reused and when."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.cache_map import UNITS_PER_BLOCK, CacheBlock, CacheKind, Tier
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


def test_hidden_blocks_take_one_unit_and_any_unit() -> None:
    pool = BlockPool(3)
    pair = pool.allocate(CacheKind.KV, online=True)
    hidden = pool.allocate(CacheKind.HIDDEN, online=True)
    assert pair is not None and hidden is not None
    assert len(hidden.entry.units) == 1 and hidden.entry.kind is CacheKind.HIDDEN
    assert pool.allocate(CacheKind.HIDDEN, online=True) is None
    pool.release(pair, last_step=-1)
    halves = [pool.allocate(CacheKind.HIDDEN, online=True) for _ in range(2)]
    assert {u for block in halves if block for u in block.entry.units} == set(pair.entry.units)


def test_the_host_tier_has_units_of_its_own() -> None:
    pool = BlockPool(2, host_units=3)
    block = pool.host.allocate(CacheKind.KV)
    assert block is not None and block.entry.tier is Tier.HOST
    assert pool.host.allocate(CacheKind.KV) is None, "nothing is evicted for it"
    assert pool.num_free_units == 2 and pool.num_available_units == 2
    pool.release(block, last_step=4)
    assert pool.host.allocate(CacheKind.KV) is None
    pool.complete_step(4)
    assert pool.host.allocate(CacheKind.KV) is not None
    assert BlockPool(2).host.allocate(CacheKind.HIDDEN) is None, "no host tier unless asked for"


def test_a_host_block_is_not_published() -> None:
    pool = BlockPool(2, host_units=2)
    block = pool.host.allocate(CacheKind.KV)
    assert block is not None
    with pytest.raises(AssertionError, match="device"):
        pool.publish(block, b"h")


kinds = st.sampled_from(CacheKind)


def places(block: CacheBlock) -> set[tuple[Tier, int]]:
    return {(block.entry.tier, unit) for unit in block.entry.units}


class PoolMachine(RuleBasedStateMachine):
    """References are held in a list, one item each; the pool must agree with it at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(13, host_units=7)
        self.held: list[CacheBlock] = []
        # units given up, by the step that may still touch them
        self.in_flight_units: dict[int, set[tuple[Tier, int]]] = {}
        self.step = 0
        self.completed = -1

    def take(self, kind: CacheKind, tier: Tier, online: bool) -> CacheBlock | None:
        """Allocate and hold; a unit must be free of every step in flight."""
        available = self.pool.num_available_units if tier is Tier.DEVICE else self.pool.host.num_free_units
        pool = self.pool
        block = pool.allocate(kind, online=online) if tier is Tier.DEVICE else pool.host.allocate(kind)
        assert (block is not None) == (available >= UNITS_PER_BLOCK[kind])
        if block is not None:
            assert (block.entry.kind, block.entry.tier) == (kind, tier)
            busy = {u for step, units in self.in_flight_units.items() if step > self.completed for u in units}
            assert busy.isdisjoint(places(block)), "a unit was reused while a step may touch it"
            self.held.append(block)
        return block

    def give_up(self, block: CacheBlock, last_step: int) -> None:
        self.held.remove(block)
        self.pool.release(block, last_step)
        if block.ref_count == 0:
            self.in_flight_units.setdefault(block.last_step, set()).update(places(block))

    @rule(kind=kinds, online=st.booleans())
    def allocate(self, kind: CacheKind, online: bool) -> None:
        self.take(kind, Tier.DEVICE, online)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), restore=st.booleans())
    def convert(self, data: st.DataObject, restore: bool) -> None:
        """Swap a block to the other tier, or restore it from hidden state: a new block, and the old one released."""
        block = data.draw(st.sampled_from(self.held))
        if restore and (block.entry.kind is not CacheKind.HIDDEN or block.entry.tier is not Tier.DEVICE):
            return
        other = Tier.HOST if block.entry.tier is Tier.DEVICE else Tier.DEVICE
        kind, tier = (CacheKind.KV, Tier.DEVICE) if restore else (block.entry.kind, other)
        if self.take(kind, tier, block.online) is not None:
            self.give_up(block, self.step)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block.entry.tier is Tier.DEVICE:
            self.pool.publish(block, bytes([name]))

    @rule(name=st.integers(0, 5), online=st.booleans())
    def hit(self, name: int, online: bool) -> None:
        for block in self.pool.lookup([bytes([name])]):
            before = self.pool.num_available_units
            idle = self.pool.num_idle_units([block])
            self.pool.acquire(block, online=online)
            assert self.pool.num_available_units == before - idle
            self.held.append(block)
            for units in self.in_flight_units.values():
                units.difference_update(places(block))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), touched=st.booleans())
    def release(self, data: st.DataObject, touched: bool) -> None:
        self.give_up(data.draw(st.sampled_from(self.held)), self.step if touched else -1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A second request takes a block that is held, whatever its tier."""
        block = data.draw(st.sampled_from(self.held))
        self.pool.acquire(block, online=block.online)
        self.held.append(block)

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
