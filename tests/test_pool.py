"""The block pool against a plain model: owners of blocks, sharing, and when a block may be reused."""

from unittest import mock

import hypothesis.strategies as st
import pytest
from driver import Driver, make_request
from fakes.runner import FakeRunner
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from integrity import check_pool
from support.fuzz import machine_test

from engine.cache.blocks import BlockPool, CacheBlock, CacheKind, Tier, extend_hashes
from engine.cache.tiers import Tiers
from engine.limits import SchedulerConfig

HELD = [kind for kind in CacheKind if kind.form.units]  # the uses of a block


def test_a_chunk_takes_its_free_blocks_at_once() -> None:
    config = SchedulerConfig(num_units=512, max_model_len=2048, block_size=16, max_num_batched_tokens=2048)
    driver = Driver(FakeRunner(block_size=16, vocab_size=30), config)
    driver.add(make_request("long", list(range(1, 29)) * 50, 20))
    with mock.patch.object(BlockPool, "allocate", side_effect=AssertionError("one by one")):
        driver.run()
    assert len(driver.outputs["long"]) == 20


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


kinds = st.sampled_from(HELD)


def places(block: CacheBlock) -> set[tuple[Tier, int]]:
    return {(block.entry.tier, unit) for unit in block.entry.units}


@pytest.mark.parametrize("options", [{"scratch_blocks": 4}, {}])
def test_the_pool_of_a_core_is_paired_where_no_block_takes_one_unit(options: dict[str, object]) -> None:
    config = SchedulerConfig(num_units=8, max_model_len=64, **options)  # type: ignore[arg-type]
    assert config.paired == Tiers(config, None).device._paired == (not options)


class PoolMachine(RuleBasedStateMachine):
    """References are held in a list, one item each; the pool must agree with it at every moment."""

    paired = False

    def __init__(self) -> None:
        super().__init__()
        device = BlockPool(12, paired=True) if self.paired else BlockPool(13)
        self.pools = {Tier.DEVICE: device, Tier.HOST: BlockPool(7, Tier.HOST)}
        self.pool = self.pools[Tier.DEVICE]
        self.held: list[CacheBlock] = []
        # units given up, by the step that may still touch them
        self.in_flight_units: dict[int, set[tuple[Tier, int]]] = {}
        self.step = 0
        self.completed = -1

    def take(self, kind: CacheKind, tier: Tier, online: bool) -> CacheBlock | None:
        """Allocate and hold; a unit must be free of every step in flight."""
        pool = self.pools[tier]
        available = pool.num_available_units
        block = pool.allocate(kind, online=online)
        assert (block is not None) == (available >= kind.form.units)
        if block is not None:
            assert (block.entry.kind, block.entry.tier) == (kind, tier)
            busy = {u for step, units in self.in_flight_units.items() if step > self.completed for u in units}
            assert busy.isdisjoint(places(block)), "a unit was reused while a step may touch it"
            assert max(block.entry.units) < pool.num_units, "a unit that retires was given away"
            self.held.append(block)
        return block

    def give_up(self, block: CacheBlock, last_step: int) -> None:
        self.held.remove(block)
        self.pools[block.entry.tier].release(block, last_step)
        if block.ref_count == 0:
            self.in_flight_units.setdefault(block.last_step, set()).update(places(block))

    @rule(kind=kinds, online=st.booleans())
    def allocate(self, kind: CacheKind, online: bool) -> None:
        self.take(CacheKind.KV if self.paired else kind, Tier.DEVICE, online)

    def whole(self, tier: Tier, units: int) -> int:
        """As many units as this tier may gain or lose at once."""
        return units - units % 2 if self.paired and tier is Tier.DEVICE else units

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
        if (block := self.pool.find(bytes([name]))) is not None:
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
        """Let a second request take a held block of any tier."""
        block = data.draw(st.sampled_from(self.held))
        self.pools[block.entry.tier].acquire(block, online=block.online)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pools[block.entry.tier].withdraw(block)

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]), units=st.integers(0, 5))
    def grow(self, tier: Tier, units: int) -> None:
        pool, units = self.pools[tier], self.whole(tier, units)
        before, retiring = pool.num_available_units, pool.num_retiring_units
        pool.grow(units)
        back = retiring - pool.num_retiring_units
        assert pool.num_available_units == before + units - back

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]), units=st.integers(0, 5))
    def shrink(self, tier: Tier, units: int) -> None:
        pool = self.pools[tier]
        pool.shrink(self.whole(tier, min(units, pool.num_units)))
        held = {unit for block in self.held if block.entry.tier is tier for unit in block.entry.units}
        assert {unit for unit in held if unit >= pool.num_units} <= pool._retiring
        assert all(max(block.entry.units) < pool.num_units for block in pool._index.values())

    @rule()
    def complete(self) -> None:
        for pool in self.pools.values():
            pool.complete_step(self.step)
        self.completed = self.step
        self.step += 1

    @invariant()
    def conserved(self) -> None:
        for tier, pool in self.pools.items():
            check_pool(pool, (block for block in self.held if block.entry.tier is tier))


class PairedPoolMachine(PoolMachine):
    """With K and V alone on the device: every block in neighbours, and none is lost to halves that lie apart."""

    paired = True


TestPoolMachine = machine_test(PoolMachine, 80, 50)
TestPairedPoolMachine = machine_test(PairedPoolMachine, 80, 50)
