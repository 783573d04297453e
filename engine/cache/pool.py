"""The pool of one tier: who holds which unit, what may be reused, and which blocks can be shared.

Every unit is in exactly one place (reliability E1): *free*; *owned* by a block some request refers to; *cached*, in a
published block that nobody refers to (a prefix hit revives it, an allocation evicts it); or *deferred*, in a block
given up while a step that may touch it is still in flight (E2). The pool counts units and knows nothing of requests,
tensors or time; steps are known by their increasing ids. There is one for each tier (`engine.cache.tiers`).

A block never changes its kind or tier. To convert or swap one, allocate the target, schedule the `CacheOperation` in a
step, put the target in the request's map in place of the source, and release the source with that step as `last_step`:
its units stay what they are until the step has ended, so a copy may run at any time within it.

In a *paired* pool every block takes two units, and V's is the one behind K's, so that one number says where a block
lies: the free list is a stack of such pairs, which blocks leave and come back to whole. Where blocks of one unit are
among others (hidden state) units come free one by one, and no pool is paired.

A pool may gain memory and lose it again (KunServe §4.1, §4.4): `grow` adds unit numbers behind the last one, `shrink`
takes numbers from the end. Units behind the new end that a block still holds *retire*: nobody gets them any more, and
they are gone when that block is given up. Memory may serve something else only once `num_retiring_units` is 0.
"""

from collections.abc import Iterable

from engine.cache.blocks import CacheBlock, CacheEntry, CacheKind, Tier, count_units
from predictor.limits import UNITS_PER_BLOCK


class BlockPool:
    """Allocation, sharing and eviction of blocks over `num_units` units of one tier. `paired`: for K and V alone, each
    block in neighbours; such a pool grows and shrinks by whole blocks.

    `num_owned_units` and `num_deferred_units` count those that retire as well.
    """

    def __init__(self, num_units: int, tier: Tier = Tier.DEVICE, *, paired: bool = False) -> None:
        self.num_units = num_units
        self._tier = tier
        self._paired = paired
        self._free = list(range(num_units - 1, -1, -1))
        self._index: dict[bytes, CacheBlock] = {}
        # Insertion order is release order, so the first key is the least recently used block.
        self._cached_offline: dict[CacheBlock, None] = {}
        self._cached_online: dict[CacheBlock, None] = {}
        self._deferred: dict[CacheBlock, None] = {}
        self._retiring: set[int] = set()
        self._last_completed_step = -1
        self.num_owned_units = 0
        self.num_cached_units = 0
        self.num_cached_online_units = 0
        self.num_deferred_units = 0

    @property
    def num_free_units(self) -> int:
        return len(self._free)

    @property
    def num_retiring_units(self) -> int:
        """Units behind the end of the pool that blocks still hold."""
        return len(self._retiring)

    @property
    def num_available_units(self) -> int:
        """Units an allocation could get now: free ones and those of evictable cached blocks."""
        return len(self._free) + self.num_cached_units

    def grow(self, units: int) -> None:
        """Add `units` units behind the last one. Those that were about to retire are ordinary units again."""
        assert units >= 0, "a pool grows by a number of units"
        first, self.num_units = self.num_units, self.num_units + units
        added = range(first, self.num_units)
        new = [unit for unit in reversed(added) if unit not in self._retiring]
        self._retiring.difference_update(added)
        # Behind all others: what came last should be free when it must go.
        self._free = [*new, *self._free]

    def shrink(self, units: int) -> None:
        """Take the last `units` units. Free and cached ones go at once, those that a block holds retire with it: such
        blocks are offered to nobody any more, but who has one keeps it and may share it."""
        assert 0 <= units <= self.num_units, "a pool loses units that it has"
        end = self.num_units - units
        assert not (self._paired and end % UNITS_PER_BLOCK), "half of a block would be left"
        self._retiring.update(range(end, self.num_units))
        self.num_units = end
        for block in [b for b in self._index.values() if max(b.entry.units) >= end]:
            self.withdraw(block)
        self._retiring.difference_update(unit for unit in self._free if unit >= end)
        self._free = [unit for unit in self._free if unit < end]

    def allocate(self, kind: CacheKind, *, online: bool) -> CacheBlock | None:
        """A block with reference count 1, or None when not enough units are available."""
        size = kind.form.units
        while len(self._free) < size:
            if (block := self.next_evicted) is None:
                return None
            self.withdraw(block)
        units = tuple(self._free[: -size - 1 : -1])
        del self._free[-size:]
        self.num_owned_units += size
        return CacheBlock(CacheEntry(kind, self._tier, units), online=online)

    def take_free(self, kind: CacheKind, count: int, *, online: bool) -> list[CacheBlock]:
        """So many blocks of units that are free now: as if each were allocated."""
        size, units = kind.form.units, self._free
        first = len(units) - size * count
        assert first >= 0, "not so many units are free"
        taken = units[first:]
        taken.reverse()
        del units[first:]
        self.num_owned_units += size * count
        tier = self._tier
        return [
            CacheBlock(CacheEntry(kind, tier, each), online=online)
            for each in zip(*(taken[i::size] for i in range(size)), strict=True)
        ]

    def forget(self) -> None:
        """Withdraw every published block, because its content is lost. Holders keep their blocks."""
        for block in list(self._index.values()):
            self.withdraw(block)

    def find(self, block_hash: bytes) -> CacheBlock | None:
        """The block that is published under this hash."""
        return self._index.get(block_hash)

    @property
    def next_evicted(self) -> CacheBlock | None:
        """The least recently used cached block; those that only offline work touched come first."""
        return next(iter(self._cached_offline or self._cached_online), None)

    def num_idle_units(self, blocks: Iterable[CacheBlock]) -> int:
        """How many of these blocks' units count as available here now and would no longer once acquired."""
        tier, deferred = self._tier, self._deferred
        return count_units(b for b in blocks if b.ref_count == 0 and b.entry.tier is tier and b not in deferred)

    def acquire(self, block: CacheBlock, *, online: bool) -> None:
        """One more reference to a block that is published or held; an online touch raises the block's class."""
        assert block.ref_count or block.block_hash is not None, "nobody holds this block any more"
        if block.ref_count == 0:
            size = len(block.entry.units)
            if block in self._deferred:
                del self._deferred[block]
                self.num_deferred_units -= size
            else:
                self._leave_cached(block)
            self.num_owned_units += size
        block.ref_count += 1
        block.online = block.online or online

    def release(self, block: CacheBlock, last_step: int) -> None:
        """Give up one reference; `last_step` is the newest step of the caller that may touch the block."""
        assert block.ref_count > 0, "released more often than acquired"
        block.ref_count -= 1
        block.last_step = max(block.last_step, last_step)
        if block.ref_count:
            return
        size = len(block.entry.units)
        self.num_owned_units -= size
        if block.last_step > self._last_completed_step:
            self._deferred[block] = None
            self.num_deferred_units += size
        else:
            self._settle(block)

    def complete_step(self, step_id: int) -> None:
        """All steps up to `step_id` have ended: blocks deferred for them become free or cached."""
        self._last_completed_step = step_id
        for block in [b for b in self._deferred if b.last_step <= step_id]:
            del self._deferred[block]
            self.num_deferred_units -= len(block.entry.units)
            self._settle(block)

    def publish(self, block: CacheBlock, block_hash: bytes) -> None:
        """Offer a full, confirmed block to later requests; the first block published under a hash stays. One that
        retires is not offered."""
        if self._retiring and not self._retiring.isdisjoint(block.entry.units):
            return
        if block.block_hash is None and block_hash not in self._index:
            block.block_hash = block_hash
            self._index[block_hash] = block

    def withdraw(self, block: CacheBlock) -> None:
        """Take a block out of the prefix index (its content is in doubt); holders keep it."""
        if block.block_hash is None:
            return
        del self._index[block.block_hash]
        if block.ref_count == 0 and block not in self._deferred:
            self._leave_cached(block)
            self._give_back(block)
        block.block_hash = None

    def check_integrity(self, held: Iterable[CacheBlock]) -> None:
        """Assert unit conservation, given every reference that requests hold (one item per reference)."""
        counts: dict[CacheBlock, int] = {}
        for block in held:
            counts[block] = counts.get(block, 0) + 1
        assert all(block.ref_count == count for block, count in counts.items()), "reference counts differ"
        cached = [*self._cached_offline, *self._cached_online]
        idle = [*cached, *self._deferred]
        assert all(block.ref_count == 0 for block in idle), "an idle block is referred to"
        assert all(block.block_hash is not None for block in cached), "an unpublished block is cached"
        assert all(block.entry.tier is self._tier for block in (*counts, *idle)), "a block of another tier"
        units = list(self._free)
        for block in [*counts, *idle]:
            units.extend(block.entry.units)
        assert sorted(units) == [*range(self.num_units), *sorted(self._retiring)], "a unit is lost or owned twice"
        assert min(self._retiring, default=self.num_units) >= self.num_units, "a unit of the pool retires"
        assert self._retiring.isdisjoint(u for b in cached for u in b.entry.units), "a unit that retires is cached"
        assert self.num_owned_units == count_units(counts)
        assert self.num_cached_units == count_units(cached)
        assert self.num_cached_online_units == count_units(self._cached_online)
        assert self.num_deferred_units == count_units(self._deferred)
        if self._paired:
            free = self._free[::-1]
            pairs = [*zip(free[::2], free[1::2], strict=False), *(b.entry.units for b in (*counts, *idle))]
            assert all(units[1:] == (units[0] + 1,) for units in pairs if units), "V does not lie behind its K"
        alive = {*counts, *idle}
        assert all(b in alive and b.block_hash == h for h, b in self._index.items()), "the index holds a dead block"

    def _settle(self, block: CacheBlock) -> None:
        if block.block_hash is None:
            self._give_back(block)
        else:
            self._cached_of(block)[block] = None
            self.num_cached_units += len(block.entry.units)
            self.num_cached_online_units += len(block.entry.units) if block.online else 0

    def _give_back(self, block: CacheBlock) -> None:
        """Units that nobody holds any more are free, or gone when they retire. The next block gets them in their
        order: K's first."""
        if not self._retiring:
            self._free.extend(reversed(block.entry.units))
            return
        for unit in reversed(block.entry.units):
            if unit in self._retiring:
                self._retiring.discard(unit)
            else:
                self._free.append(unit)

    def _leave_cached(self, block: CacheBlock) -> None:
        del self._cached_of(block)[block]
        self.num_cached_units -= len(block.entry.units)
        self.num_cached_online_units -= len(block.entry.units) if block.online else 0

    def _cached_of(self, block: CacheBlock) -> dict[CacheBlock, None]:
        return self._cached_online if block.online else self._cached_offline
