"""The pools of all tiers, and the copies between them in the step being built.

The host pool is a second prefix cache behind the device's. When the device evicts a published block of an online
request, the step that reuses its units copies it to the host first, if that costs less than recomputing it, given the
share of evicted blocks that requests ask for again. The host keeps its copy when a block is fetched back. A copy is
published once its step has succeeded. Parked blocks (`engine.cache.parked`) take priority: they evict the least
recently used prefixes.
"""

from collections.abc import Collection, Iterable, Sequence

from engine.cache.blocks import (
    BlockPool,
    CacheAction,
    CacheBlock,
    CacheEntry,
    CacheKind,
    CacheOperation,
    Tier,
)
from engine.cache.placement import EvictedPrefixes, restore_costs
from engine.limits import UNITS_PER_BLOCK, SchedulerConfig
from predictor.features import LatencyPredictor


class Tiers:
    """All tiers.

    Attributes:
        operations: Cache operations of the step being built.
        moved_units: Units of all operations so far, by action.
    """

    def __init__(self, config: SchedulerConfig, model: LatencyPredictor | None) -> None:
        self.device = BlockPool(config.num_units, paired=config.paired)
        self.host = BlockPool(config.host_units, Tier.HOST)
        self._pools = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        self.operations: list[CacheOperation] = []
        self.moved_units: dict[str, int] = {}
        self._config = config
        self._model = model
        # Host blocks that step `last_step` writes, with their hashes; each has a reference until the step ends.
        self._saving: dict[CacheBlock, bytes] = {}
        self._evicted = EvictedPrefixes(config.host_units // UNITS_PER_BLOCK)
        self._priced_step: int | None = None
        self._computed = self._copied = 0.0

    def pool(self, block: CacheBlock) -> BlockPool:
        """Return the pool that holds the block."""
        return self._pools[block.entry.tier]

    def find(self, hashes: Sequence[bytes]) -> list[CacheBlock]:
        """Return the longest run of published blocks along a hash chain, from its root, each on the nearest tier."""
        found: list[CacheBlock] = []
        for block_hash in hashes:
            block = self.device.find(block_hash) or self.host.find(block_hash)
            if block is None:
                break
            found.append(block)
        if self.host.num_units:
            for index, block_hash in enumerate(hashes):
                if not self._evicted.ask(block_hash) and index >= len(found):
                    break
        return found

    def saving_step(self, block_hash: bytes) -> int | None:
        """Return the step in flight that copies a block with this hash to the host, or None."""
        return next((block.last_step for block, saved in self._saving.items() if saved == block_hash), None)

    def allocate(self, kind: CacheKind, step_id: int, *, online: bool, tier: Tier = Tier.DEVICE) -> CacheBlock | None:
        """Return a block for step `step_id` with reference count 1, or None if not enough units are available.

        Evicted blocks are saved on the host if that pays.
        """
        pool, size = self._pools[tier], kind.form.units
        while pool.num_free_units < size and (block := pool.next_evicted) is not None:
            self._save(block, step_id)
            pool.withdraw(block)
        return pool.allocate(kind, online=online)

    def fetch(self, source: CacheBlock, step_id: int, *, online: bool) -> CacheBlock:
        """Return a device block that step `step_id` fills from a host block, and release the host block.

        Room must exist.
        """
        target = self.allocate(source.entry.kind, step_id, online=online)
        assert target is not None, "admitted without room"
        self.operations.append(CacheOperation(CacheAction.SWAP_IN, source.entry, target.entry))
        self.pool(source).release(source, step_id)
        return target

    def cancel(self, targets: Collection[CacheEntry]) -> set[CacheEntry]:
        """Cancel the operations that write these entries, if they are not launched yet.

        Return the cancelled targets.
        """
        unsent = {operation.target for operation in self.operations if operation.target in targets}
        if unsent:
            self.operations = [operation for operation in self.operations if operation.target not in unsent]
        return unsent

    def take_operations(self) -> tuple[CacheOperation, ...]:
        """Return and count the operations of the step being launched; those that free units come first."""
        operations, self.operations = self.operations, []
        for operation in operations:
            name = operation.action.value
            self.moved_units[name] = self.moved_units.get(name, 0) + len(operation.target.units)
        return tuple(sorted(operations, key=_action_order))

    def copied_bytes(self, blocks: Iterable[CacheBlock]) -> int:
        """Return the bytes to copy from the host to bring these blocks to the device."""
        return self._config.unit_bytes * sum(len(b.entry.units) for b in blocks if not b.on_device)

    def moved_bytes(self, operations: Iterable[CacheOperation]) -> int:
        """Return the bytes that these operations copy between tiers."""
        copies = (each for each in operations if each.source.tier is not each.target.tier)
        return self._config.unit_bytes * sum(len(each.source.units) for each in copies)

    def withdraw(self, blocks: Iterable[CacheBlock], hashes: Sequence[bytes]) -> None:
        """Withdraw these device blocks and the host copies under these hashes, because their content is in doubt."""
        for block in blocks:
            self.device.withdraw(block)
        for block_hash in hashes:
            if (copy := self.host.find(block_hash)) is not None:
                self.host.withdraw(copy)

    def rewind(self, failed: Collection[int]) -> None:
        """Drop the host copies made by the failed steps."""
        for block in [block for block in self._saving if block.last_step in failed]:
            del self._saving[block]
            self.host.release(block, block.last_step)

    def complete_step(self, step_id: int) -> None:
        """Record that all steps up to `step_id` ended: free deferred blocks and publish the copies made."""
        for pool in self._pools.values():
            pool.complete_step(step_id)
        for block in [block for block in self._saving if block.last_step <= step_id]:
            self.host.publish(block, self._saving.pop(block))
            self.host.release(block, block.last_step)

    def _save(self, block: CacheBlock, step_id: int) -> None:
        """Copy a block that the device is about to evict to the host, if that is useful.

        The block must have been used by an online request, and the copy must be faster than recomputing it.
        """
        assert block.block_hash is not None, "an unpublished block is cached"
        if not block.online or block.entry.tier is not Tier.DEVICE or not self.host.num_units:
            return
        self._evicted.evict(block.block_hash)
        if (copy := self.host.find(block.block_hash)) is not None:  # mark the existing copy as recently used
            self.host.acquire(copy, online=True)
            self.host.release(copy, copy.last_step)
            return
        kind = block.entry.kind
        target = self.allocate(kind, step_id, online=True, tier=Tier.HOST) if self._copy_pays(kind, step_id) else None
        if target is not None:
            target.last_step = step_id
            self._saving[target] = block.block_hash
            self.operations.append(CacheOperation(CacheAction.SWAP_OUT, block.entry, target.entry))

    def _copy_pays(self, kind: CacheKind, step_id: int) -> bool:
        """Return whether copying a block out, and back if it is asked for, is faster than recomputing it then.

        The price is that of a block at the start of a prompt; recomputing a later block takes longer still.
        """
        if step_id != self._priced_step:
            costs = restore_costs(self._model, self._config)
            self._computed = costs.recompute_seconds(0, self._config.block_size)
            self._copied, self._priced_step = costs.copy, step_id
        share = self._evicted.share
        return kind.form.units * self._copied * (1.0 + share) / 2.0 < share * self._computed


def _action_order(operation: CacheOperation) -> int:
    return list(CacheAction).index(operation.action)
