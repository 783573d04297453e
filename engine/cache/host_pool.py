"""The host tier of the cache: units of host memory for blocks that were swapped out (HybridServe §4).

Every host unit is *free*, *owned* by a block that some request refers to, or *deferred*: given up while a step that may
touch it is still in flight. Nothing here is cached or shared by prefix: what is looked up lives on the device.
"""

from collections.abc import Mapping

from engine.cache.cache_map import UNITS_PER_BLOCK, CacheBlock, CacheEntry, CacheKind, Tier


class HostPool:
    """Allocation of blocks over `num_units` host units; `BlockPool` forwards what concerns both tiers."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._free = list(range(num_units - 1, -1, -1))
        self._deferred: dict[CacheBlock, None] = {}
        self.num_owned_units = 0
        self.num_deferred_units = 0

    @property
    def num_free_units(self) -> int:
        return len(self._free)

    def allocate(self, kind: CacheKind) -> CacheBlock | None:
        """A block with reference count 1, or None when the host has no room; what is there is never evicted for it."""
        size = UNITS_PER_BLOCK[kind]
        if len(self._free) < size:
            return None
        units = tuple(self._free.pop() for _ in range(size))
        self.num_owned_units += size
        return CacheBlock(CacheEntry(kind, Tier.HOST, units))

    def give_up(self, block: CacheBlock, in_flight: bool) -> None:
        """The last reference is gone; `in_flight`: a step that may touch the units has not ended."""
        size = len(block.entry.units)
        self.num_owned_units -= size
        if in_flight:
            self._deferred[block] = None
            self.num_deferred_units += size
        else:
            self._free.extend(block.entry.units)

    def complete_step(self, step_id: int) -> None:
        """All steps up to `step_id` have ended: units deferred for them are free."""
        for block in [b for b in self._deferred if b.last_step <= step_id]:
            del self._deferred[block]
            self.num_deferred_units -= len(block.entry.units)
            self._free.extend(block.entry.units)

    def check_integrity(self, counts: Mapping[CacheBlock, int]) -> None:
        """Assert unit conservation; `counts`: references to every host block that requests hold."""
        assert all(block.ref_count == count for block, count in counts.items()), "host reference counts differ"
        assert all(block.ref_count == 0 for block in self._deferred), "a deferred host block is referred to"
        assert all(block.block_hash is None for block in (*counts, *self._deferred)), "a host block is published"
        units = list(self._free)
        for block in (*counts, *self._deferred):
            units.extend(block.entry.units)
        assert sorted(units) == list(range(self.num_units)), "a host unit is lost or owned twice"
        assert self.num_owned_units == sum(len(block.entry.units) for block in counts)
        assert self.num_deferred_units == sum(len(block.entry.units) for block in self._deferred)
