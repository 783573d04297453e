"""The pools of all memories, and what moves between them in the step that is being built.

The host pool is a second prefix cache behind the device's. When the device evicts a published block that an online
request touched, and copying it out and back takes less than computing it again, the step that takes its units copies it
out first. `find` gives a prefix's run of blocks wherever each of them lies, the device's before the host's; `fetch`
brings one back in the step in which its request starts. The host keeps what it gave back: when the device evicts the
same block again there is nothing to copy.

A copy is offered to others once its step has ended well, and never if that step failed. Pasts of requests that wait
(`engine.cache.parked`) go before: they take the units of the prefixes that were used least recently. Knows nothing of
requests, queues and time.
"""

from collections.abc import Collection, Iterable, Sequence

from engine.cache.blocks import (
    CacheAction,
    CacheBlock,
    CacheEntry,
    CacheKind,
    CacheOperation,
    Tier,
)
from engine.cache.placement import restore_costs
from engine.cache.pool import BlockPool
from engine.config import SchedulerConfig
from predictor.model import LatencyPredictor


class Tiers:
    """`operations`: cache operations of the step that is being built. `moved_units`: units of all operations so far, by
    action."""

    def __init__(self, config: SchedulerConfig, model: LatencyPredictor | None) -> None:
        self.device = BlockPool(config.num_units, paired=config.paired)
        self.host = BlockPool(config.host_units, Tier.HOST)
        self._pools = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        self.operations: list[CacheOperation] = []
        self.moved_units: dict[str, int] = {}
        self._config = config
        self._model = model
        # Blocks of the host that the step `last_step` writes; a reference to each is held until it has ended.
        self._saving: dict[CacheBlock, bytes] = {}
        self._priced_step: int | None = None
        self._computed = self._copied = 0.0

    def pool(self, block: CacheBlock) -> BlockPool:
        """Where the block lies."""
        return self._pools[block.entry.tier]

    def find(self, hashes: Sequence[bytes]) -> list[CacheBlock]:
        """Return the longest run of published blocks along a hash chain, from its root, each on the nearest tier."""
        found: list[CacheBlock] = []
        for block_hash in hashes:
            block = self.device.find(block_hash) or self.host.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def saving_step(self, block_hash: bytes) -> int | None:
        """Return the step that copies such a block to the host, where it is offered when that step has ended."""
        return next((block.last_step for block, saved in self._saving.items() if saved == block_hash), None)

    def allocate(self, kind: CacheKind, step_id: int, *, online: bool, tier: Tier = Tier.DEVICE) -> CacheBlock | None:
        """A block for the step `step_id`, with reference count 1, or None when not enough units are available. What it
        takes the place of is saved on the host if that pays."""
        pool, size = self._pools[tier], kind.form.units
        while pool.num_free_units < size and (block := pool.next_evicted) is not None:
            self._save(block, step_id)
            pool.withdraw(block)
        return pool.allocate(kind, online=online)

    def fetch(self, source: CacheBlock, step_id: int, *, online: bool) -> CacheBlock:
        """A block on the device that the step `step_id` fills from one of the host, whose reference is given up.
        There must be room."""
        target = self.allocate(source.entry.kind, step_id, online=online)
        assert target is not None, "admitted without room"
        self.operations.append(CacheOperation(CacheAction.SWAP_IN, source.entry, target.entry))
        self.pool(source).release(source, step_id)
        return target

    def cancel(self, targets: Collection[CacheEntry]) -> set[CacheEntry]:
        """Call off the operations that write these entries, as far as they are not on their way; which were."""
        unsent = {operation.target for operation in self.operations if operation.target in targets}
        if unsent:
            self.operations = [operation for operation in self.operations if operation.target not in unsent]
        return unsent

    def take_operations(self) -> tuple[CacheOperation, ...]:
        """What the step that is being launched must do, counted: what leaves units first, for others may get them."""
        operations, self.operations = self.operations, []
        for operation in operations:
            name = operation.action.value
            self.moved_units[name] = self.moved_units.get(name, 0) + len(operation.target.units)
        return tuple(sorted(operations, key=_action_order))

    def copied_bytes(self, blocks: Iterable[CacheBlock]) -> int:
        """What bringing these to the device counts as, in bytes between device and host."""
        return self._config.unit_bytes * sum(len(b.entry.units) for b in blocks if not b.on_device)

    def moved_bytes(self, operations: Iterable[CacheOperation]) -> int:
        """What all of their copies count as."""
        copies = (each for each in operations if each.source.tier is not each.target.tier)
        return self._config.unit_bytes * sum(len(each.source.units) for each in copies)

    def withdraw(self, blocks: Iterable[CacheBlock], hashes: Sequence[bytes]) -> None:
        """The content of these device blocks is in doubt, and so are the copies under the hashes of their tokens."""
        for block in blocks:
            self.device.withdraw(block)
        for block_hash in hashes:
            if (copy := self.host.find(block_hash)) is not None:
                self.host.withdraw(copy)

    def rewind(self, failed: Collection[int]) -> None:
        """The steps `failed` have failed: what they copied to the host is in doubt."""
        for block in [block for block in self._saving if block.last_step in failed]:
            del self._saving[block]
            self.host.release(block, block.last_step)

    def complete_step(self, step_id: int) -> None:
        """All steps up to `step_id` have ended: what was given up for them is free, what they saved is offered."""
        for pool in self._pools.values():
            pool.complete_step(step_id)
        for block in [block for block in self._saving if block.last_step <= step_id]:
            self.host.publish(block, self._saving.pop(block))
            self.host.release(block, block.last_step)

    def check_integrity(self, held: Iterable[CacheBlock]) -> None:
        """Assert unit conservation on every tier, given every reference that requests hold."""
        held = [*held, *self._saving]
        for tier, pool in self._pools.items():
            pool.check_integrity(block for block in held if block.entry.tier is tier)

    def _save(self, block: CacheBlock, step_id: int) -> None:
        """Copy a block that the device is about to evict to the host, if a chat may want it and that pays."""
        assert block.block_hash is not None, "an unpublished block is cached"
        if not block.online or block.entry.tier is not Tier.DEVICE or not self.host.num_units:
            return
        if (copy := self.host.find(block.block_hash)) is not None:  # the copy counts as used now
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
        """Return whether a copy to the host and back takes less than computing the block again as the first of its
        prompt: further behind, computing takes longer still."""
        if step_id != self._priced_step:
            costs = restore_costs(self._model, self._config)
            self._computed = costs.recompute_seconds(0, self._config.block_size)
            self._copied, self._priced_step = costs.copy, step_id
        return kind.form.units * self._copied < self._computed


def _action_order(operation: CacheOperation) -> int:
    return list(CacheAction).index(operation.action)
