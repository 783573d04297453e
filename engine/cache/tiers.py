"""The pools of all memories, and what moves between them in the step that is being built.

The host pool is a second prefix cache behind the device's. When the device evicts a published block that an online
request touched, and copying it out and back takes less than computing it again, the step that takes its units copies it
out first. `find` gives a prefix's run of blocks wherever each of them lies, the device's before the host's; `fetch`
brings one back in the step in which its request starts. The host keeps what it gave back: when the device evicts the
same block again there is nothing to copy.

A disk is a third tier behind the host, or right behind the device where there is none: what the tier before it evicts
is written, and read back to the device. It outlives the process (`adopt`); what the tiers before it hold when the
process ends in order is written then (`unkept`, `keep`).

A copy is offered to others once its step has ended well, and never if that step failed. Pasts of requests that wait
(`engine.cache.parked`) go before: they take the units of the prefixes that were used least recently. Knows nothing of
requests, queues and time.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise

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
    action. `disk_seconds`: what writing a unit to the disk and reading it back takes now."""

    def __init__(self, config: SchedulerConfig, model: LatencyPredictor | None) -> None:
        self.device = BlockPool(config.num_units, paired=config.paired)
        self.host = BlockPool(config.host_units, Tier.HOST)
        self.disk = BlockPool(config.disk_units, Tier.DISK)
        self._pools = {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}
        self._below = dict(pairwise(tier for tier, pool in self._pools.items() if pool.num_units))
        self.operations: list[CacheOperation] = []
        self.moved_units: dict[str, int] = {}
        self.disk_seconds = config.disk_seconds
        self._config = config
        self._model = model
        # Blocks of lower tiers that the step `last_step` writes; a reference to each is held until it has ended.
        self._saving: dict[CacheBlock, bytes] = {}
        self._priced_step: int | None = None
        self._computed = self._copied = 0.0

    def pool(self, block: CacheBlock) -> BlockPool:
        """Where the block lies."""
        return self._pools[block.entry.tier]

    def adopt(self, found: Iterable[tuple[CacheEntry, bytes]]) -> None:
        """What an earlier process has left on the disk: entries, and the hashes they are published under."""
        self.disk.adopt(found)

    def lose_disk(self) -> None:
        """The disk can no longer be used: nothing is found on it, and nothing more is written."""
        self.disk.forget()
        self._below = {upper: lower for upper, lower in self._below.items() if lower is not Tier.DISK}

    def unkept(self) -> list[CacheBlock]:
        """Of what chats may come back for, as much as the disk holds and is not there yet; what was used last first.
        No request may hold anything, nor a step be in flight."""
        room, wanted = self.disk.num_units, dict[bytes, CacheBlock]()
        for block in chain(self.device.kept_for_chats, self.host.kept_for_chats):
            assert block.block_hash is not None, "an unpublished block is cached"
            if block.block_hash not in wanted:
                room -= len(block.entry.units)
                if room < 0:
                    break
                wanted[block.block_hash] = block
        return [block for block_hash, block in wanted.items() if not self._touch(self.disk, block_hash)]

    def keep(self, blocks: Iterable[CacheBlock], step_id: int) -> None:
        """Write these to the disk in the step `step_id`, as far as reading them pays."""
        for block in blocks:
            if Tier.DISK in self._below.values():
                self._copy(block, Tier.DISK, step_id)

    def find(self, hashes: Sequence[bytes]) -> list[CacheBlock]:
        """The longest run of published blocks along a hash chain, from its root, each on the nearest tier; what lies on
        a disk that has become too slow is not there."""
        found: list[CacheBlock] = []
        for block_hash in hashes:
            block = next(filter(None, (pool.find(block_hash) for pool in self._pools.values())), None)
            if block is None or (block.entry.tier is Tier.DISK and not self._reading_pays(block)):
                break
            found.append(block)
        return found

    def saving_step(self, block_hash: bytes) -> int | None:
        """The step that copies such a block to a lower tier, where it is offered when that step has ended."""
        return next((block.last_step for block, saved in self._saving.items() if saved == block_hash), None)

    def allocate(self, kind: CacheKind, step_id: int, *, online: bool, tier: Tier = Tier.DEVICE) -> CacheBlock | None:
        """A block for the step `step_id`, with reference count 1, or None when not enough units are available. What it
        takes the place of is saved on the tier below if that pays."""
        pool, size = self._pools[tier], kind.form.units
        while pool.num_free_units < size and (block := pool.next_evicted) is not None:
            self._save(block, step_id)
            pool.withdraw(block)
        return pool.allocate(kind, online=online)

    def fetch(self, source: CacheBlock, step_id: int, *, online: bool) -> CacheBlock:
        """A block on the device that the step `step_id` fills from one of another tier, whose reference is given up.
        There must be room."""
        target = self.allocate(source.entry.kind, step_id, online=online)
        assert target is not None, "admitted without room"
        action = CacheAction.READ if source.entry.tier is Tier.DISK else CacheAction.SWAP_IN
        self.operations.append(CacheOperation(action, source.entry, target.entry, key=source.block_hash or b""))
        self.pool(source).release(source, step_id)
        return target

    def expand(self, source: CacheBlock, step_id: int, *, online: bool) -> CacheBlock:
        """The KV block that the step `step_id` makes of one in 8 bits on the device, where it lies. There must be
        room."""
        spare = self.allocate(source.entry.kind, step_id, online=online)
        assert spare is not None, "admitted without room"
        target = self.device.expand(source, spare)
        self.operations.append(CacheOperation(CacheAction.EXPAND, source.entry, target.entry))
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
        return sum(len(b.entry.units) * self._unit_bytes(b.entry.tier) for b in blocks if not b.on_device)

    def moved_bytes(self, operations: Iterable[CacheOperation]) -> int:
        """What all of their copies count as."""
        return sum(
            len(each.source.units) * self._unit_bytes(_slowest(each))
            for each in operations
            if each.source.tier is not each.target.tier
        )

    def converted_tokens(self, operations: Iterable[CacheOperation]) -> int:
        """Tokens whose K and V go to 8 bits, or come from them."""
        ways = (CacheAction.COMPRESS, CacheAction.EXPAND)
        return self._config.block_size * sum(each.action in ways for each in operations)

    def _unit_bytes(self, tier: Tier) -> int:
        """Of a unit to or from this tier; the disk's has as many as the host's link moves in the time it takes."""
        config, per_byte = self._config, 0.0
        if tier is Tier.DISK and self.disk_seconds and self._model is not None:
            per_byte = self._model.cache_work(transferred_bytes=1)
        return round(self.disk_seconds / 2 / per_byte) if per_byte else config.unit_bytes

    def withdraw(self, blocks: Iterable[CacheBlock], hashes: Sequence[bytes]) -> None:
        """The content of these device blocks is in doubt, and so are the copies under the hashes of their tokens."""
        for block in blocks:
            self.device.withdraw(block)
        for block_hash in hashes:
            for pool in (self.host, self.disk):
                if (copy := pool.find(block_hash)) is not None:
                    pool.withdraw(copy)

    def rewind(self, failed: Collection[int]) -> None:
        """The steps `failed` have failed: what they copied to lower tiers is in doubt."""
        for block in [block for block in self._saving if block.last_step in failed]:
            del self._saving[block]
            self.pool(block).release(block, block.last_step)

    def complete_step(self, step_id: int) -> None:
        """All steps up to `step_id` have ended: what was given up for them is free, what they saved is offered."""
        for pool in self._pools.values():
            pool.complete_step(step_id)
        for block in [block for block in self._saving if block.last_step <= step_id]:
            pool, block_hash = self.pool(block), self._saving.pop(block)
            if block.entry.tier in self._below.values():
                pool.publish(block, block_hash)
            pool.release(block, block.last_step)

    def check_integrity(self, held: Iterable[CacheBlock]) -> None:
        """Assert unit conservation on every tier, given every reference that requests hold."""
        held = [*held, *self._saving]
        for tier, pool in self._pools.items():
            pool.check_integrity(block for block in held if block.entry.tier is tier)

    def _save(self, block: CacheBlock, step_id: int) -> None:
        """Copy a block that its tier is about to evict to the one below, if a chat may want it and that pays."""
        below = self._below.get(block.entry.tier)
        assert block.block_hash is not None, "an unpublished block is cached"
        if block.online and below is not None and not self._touch(self._pools[below], block.block_hash):
            self._copy(block, below, step_id)

    def _touch(self, pool: BlockPool, block_hash: bytes) -> bool:
        """Whether a copy lies there, which counts as used now: it was of use further up."""
        if (copy := pool.find(block_hash)) is not None:
            pool.acquire(copy, online=True)
            pool.release(copy, copy.last_step)
        return copy is not None

    def _copy(self, block: CacheBlock, below: Tier, step_id: int) -> None:
        block_hash, kind = block.block_hash, block.entry.kind
        assert block_hash is not None, "an unpublished block is copied"
        pays = self._copy_pays(kind, below, step_id)
        target = self.allocate(kind, step_id, online=True, tier=below) if pays else None
        if target is None:
            return
        target.last_step = step_id
        self._saving[target] = block_hash
        action = CacheAction.WRITE if below is Tier.DISK else CacheAction.SWAP_OUT
        self.operations.append(CacheOperation(action, block.entry, target.entry, key=block_hash))

    def _copy_pays(self, kind: CacheKind, below: Tier, step_id: int) -> bool:
        """Whether a block is copied to that tier and back sooner than computed again, were it the first of its prompt:
        further behind, computing takes longer still."""
        if step_id != self._priced_step:
            self._price(step_id)
        return kind.form.units * (self.disk_seconds if below is Tier.DISK else self._copied) < self._computed

    def _reading_pays(self, block: CacheBlock) -> bool:
        """Whether a block on the disk still is at hand sooner than computed again."""
        if self._priced_step is None:
            self._price(-1)
        return len(block.entry.units) * self.disk_seconds / 2 < self._computed

    def _price(self, step_id: int) -> None:
        costs = restore_costs(self._model, self._config)
        self._computed = costs.recompute_seconds(0, self._config.block_size)
        self._copied, self._priced_step = costs.copy, step_id


def _slowest(operation: CacheOperation) -> Tier:
    return Tier.DISK if Tier.DISK in (operation.source.tier, operation.target.tier) else Tier.HOST


def _action_order(operation: CacheOperation) -> int:
    return list(CacheAction).index(operation.action)
