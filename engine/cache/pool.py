"""The unified block pool: who holds which unit, what may be reused, and which blocks can be shared.

Every unit is in exactly one place (reliability E1): *free*; *owned* by a block some request refers to; *cached*, in a
published block that nobody refers to (a prefix hit revives it, an allocation evicts it); or *deferred*, in a block
given up while a step that may touch it is still in flight (E2). The pool counts units and knows nothing of requests,
tensors or time; steps are known by their increasing ids.

A block never changes its kind or tier. To convert or swap one, allocate the target, schedule the `CacheOperation` in a
step, put the target in the request's map in place of the source, and release the source with that step as `last_step`:
its units stay what they are until the step has ended, so a copy may run at any time within it.
"""

from collections.abc import Iterable, Sequence

from engine.cache.cache_map import UNITS_PER_BLOCK, CacheBlock, CacheEntry, CacheKind, Tier
from engine.cache.host_pool import HostPool

UNITS_PER_KV_BLOCK = UNITS_PER_BLOCK[CacheKind.KV]


class BlockPool:
    """Allocation, sharing and eviction of blocks over `num_units` device units.

    `host` is the other tier, without room by default; `acquire`, `release`, `complete_step` and `check_integrity` serve
    the blocks of both, all other methods and counters are the device's.
    """

    def __init__(self, num_units: int, host_units: int = 0) -> None:
        self.num_units = num_units
        self.host = HostPool(host_units)
        self._free = list(range(num_units - 1, -1, -1))
        self._index: dict[bytes, CacheBlock] = {}
        # Insertion order is release order, so the first key is the least recently used block.
        self._cached_offline: dict[CacheBlock, None] = {}
        self._cached_online: dict[CacheBlock, None] = {}
        self._deferred: dict[CacheBlock, None] = {}
        self._last_completed_step = -1
        self.num_owned_units = 0
        self.num_cached_units = 0
        self.num_cached_online_units = 0
        self.num_deferred_units = 0

    @property
    def num_free_units(self) -> int:
        return len(self._free)

    @property
    def num_available_units(self) -> int:
        """Units an allocation could get now: free ones and those of evictable cached blocks."""
        return len(self._free) + self.num_cached_units

    def allocate(self, kind: CacheKind, *, online: bool) -> CacheBlock | None:
        """A device block with reference count 1, or None when not enough units are available."""
        size = UNITS_PER_BLOCK[kind]
        while len(self._free) < size:
            if not self._evict_one():
                return None
        units = tuple(self._free.pop() for _ in range(size))
        self.num_owned_units += size
        return CacheBlock(CacheEntry(kind, Tier.DEVICE, units), online=online)

    def allocate_kv(self, *, online: bool) -> CacheBlock | None:
        """`allocate` of the common kind."""
        return self.allocate(CacheKind.KV, online=online)

    def lookup(self, hashes: Sequence[bytes]) -> list[CacheBlock]:
        """The longest run of published blocks along a hash chain, from its root."""
        found: list[CacheBlock] = []
        for block_hash in hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle_units(self, blocks: Iterable[CacheBlock]) -> int:
        """How many of these blocks' units count as available now and would no longer once acquired."""
        return sum(len(b.entry.units) for b in blocks if b.ref_count == 0 and b not in self._deferred)

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
        in_flight = block.last_step > self._last_completed_step
        if block.entry.tier is Tier.HOST:
            self.host.give_up(block, in_flight)
            return
        size = len(block.entry.units)
        self.num_owned_units -= size
        if in_flight:
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
        self.host.complete_step(step_id)

    def publish(self, block: CacheBlock, block_hash: bytes) -> None:
        """Offer a full, confirmed device block to later requests; the first block published under a hash stays."""
        assert block.entry.tier is Tier.DEVICE, "only blocks on the device are published"
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
            self._free.extend(block.entry.units)
        block.block_hash = None

    def check_integrity(self, held: Iterable[CacheBlock]) -> None:
        """Assert unit conservation on both tiers, given every reference that requests hold (one item per reference)."""
        counts: dict[CacheBlock, int] = {}
        on_host: dict[CacheBlock, int] = {}
        for block in held:
            counted = counts if block.entry.tier is Tier.DEVICE else on_host
            counted[block] = counted.get(block, 0) + 1
        self.host.check_integrity(on_host)
        assert all(block.ref_count == count for block, count in counts.items()), "reference counts differ"
        cached = [*self._cached_offline, *self._cached_online]
        idle = [*cached, *self._deferred]
        assert all(block.ref_count == 0 for block in idle), "an idle block is referred to"
        assert all(block.block_hash is not None for block in cached), "an unpublished block is cached"
        units = list(self._free)
        for block in [*counts, *idle]:
            units.extend(block.entry.units)
        assert sorted(units) == list(range(self.num_units)), "a unit is lost or owned twice"
        assert self.num_owned_units == sum(len(block.entry.units) for block in counts)
        assert self.num_cached_units == sum(len(block.entry.units) for block in cached)
        assert self.num_cached_online_units == sum(len(block.entry.units) for block in self._cached_online)
        assert self.num_deferred_units == sum(len(block.entry.units) for block in self._deferred)
        alive = {*counts, *idle}
        assert all(b in alive and b.block_hash == h for h, b in self._index.items()), "the index holds a dead block"

    def _settle(self, block: CacheBlock) -> None:
        if block.block_hash is None:
            self._free.extend(block.entry.units)
        else:
            self._cached_of(block)[block] = None
            self.num_cached_units += len(block.entry.units)
            self.num_cached_online_units += len(block.entry.units) if block.online else 0

    def _leave_cached(self, block: CacheBlock) -> None:
        del self._cached_of(block)[block]
        self.num_cached_units -= len(block.entry.units)
        self.num_cached_online_units -= len(block.entry.units) if block.online else 0

    def _cached_of(self, block: CacheBlock) -> dict[CacheBlock, None]:
        return self._cached_online if block.online else self._cached_offline

    def _evict_one(self) -> bool:
        """Evict the least recently used cached block, those that only offline work touched first."""
        cached = self._cached_offline or self._cached_online
        if not cached:
            return False
        block = next(iter(cached))
        self.withdraw(block)
        return True
