"""Blocks, the units that hold them, and the operations on them.

A *block* is `block_size` tokens of one request. A *unit* is the pool's currency: one block's K, or its V, or a part of
its hidden state, for all layers. An entry names its kind and tier, so one request may mix representations block by
block (Apt-Serve §4, HybridServe §4). The control plane knows a kind only by its `CacheKind.form`.

The unit pool of one tier: ownership, reuse and sharing of blocks.

Every unit is in exactly one state (reliability E1):

- *free*;
- *owned* by a block with references;
- *cached* in a published block without references: a prefix hit revives the block, an allocation evicts it;
- *deferred* in a released block that a step in flight may still use (E2).

A block never changes its kind or tier. To convert or swap a block, allocate the target, schedule the `CacheOperation`
in a step, replace the source in the request's map, and release the source with that step as `last_step`: its units are
not reused before the step ends.

In a *paired* pool V's unit follows K's, so that one number locates a block. Pools that also hold blocks of one unit
(hidden state) are never paired, since their units are freed one by one.

A pool may grow and shrink (KunServe §4.1, §4.4). Removed units that a block still holds *retire*: they vanish when the
block is released, and the memory may be reused only once `num_retiring_units` is 0.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import takewhile
from struct import Struct
from typing import NamedTuple

from engine.limits import UNITS_PER_BLOCK

DIGEST_BYTES = 16


class Representation(NamedTuple):
    """Form of a block.

    Attributes:
        units: Units per block, on any tier.
        compact: A step that runs the block must project K and V into a block of scratch. RESTORE projects them once.
    """

    units: int
    compact: bool = False


class CacheKind(enum.Enum):
    """Representation of a block.

    Attributes:
        KV: Keys and values.
        HIDDEN: Normed input of every attention layer, from which K and V are projected. Only for models whose hidden
            state needs at most half the room of K and V (`engine.models.spec.hidden_state_refusal`).
        GONE: Placeholder for a block before every attention window: no unit, never read.
        STATE: State of the recurrent layers at the end of a block, of constant size. Its unit is a slot in separate
            memory (`engine.cache.snapshots`).
    """

    KV = "kv", Representation(UNITS_PER_BLOCK)
    HIDDEN = "hidden", Representation(1, compact=True)
    GONE = "gone", Representation(0)
    STATE = "state", Representation(1)

    form: Representation

    def __new__(cls, value: str, form: Representation) -> "CacheKind":
        member = object.__new__(cls)
        member._value_, member.form = value, form
        return member

    __hash__ = object.__hash__  # Enum's own __hash__ is slow Python code; a step hashes hundreds of kinds


COMPACT = CacheKind.HIDDEN
"""The kind that replaces K and V when memory is short."""

RECURRENT = CacheKind.STATE
"""The kind of recurrent states."""


class Tier(enum.Enum):
    """Memory that holds the units."""

    DEVICE = "device"
    HOST = "host"


class CacheEntry(NamedTuple):
    """One block as the data plane sees it. `units`: (k_unit, v_unit) for KV, (unit,) for HIDDEN.

    Units of each tier are numbered from 0. A unit has the same size on every tier.
    """

    kind: CacheKind
    tier: Tier
    units: tuple[int, ...]


@dataclass(slots=True, eq=False)
class CacheBlock:
    """One block in a pool, possibly shared read-only by several requests.

    Attributes:
        ref_count: References by requests and by copies in progress.
        block_hash: Hash under which the block is published; None until it is full, confirmed and published.
        online: An online request has used the block.
        last_step: Newest step that may read or write the units.
    """

    entry: CacheEntry
    ref_count: int = 1
    block_hash: bytes | None = None
    online: bool = False
    last_step: int = -1

    @property
    def on_device(self) -> bool:
        return self.entry.tier is Tier.DEVICE


@dataclass(slots=True, eq=False)
class CacheMap:
    """The blocks of one request in token order; block i covers tokens [i·block_size, (i+1)·block_size).

    While the request runs, all blocks are on the device. While it waits, they are its parked blocks on either tier
    (`engine.cache.parked`).

    Attributes:
        kind: Kind of new blocks; kept across preemptions.
        num_compact: Compact blocks of a running request.
        num_gone: Leading blocks that a running request has freed behind the attention window.
        num_parked_tokens: Tokens in the parked blocks.
        parked_in_step: Step of the last copy of a parked block to the host.
        hashes: Chained hashes of full blocks, computed lazily and kept across preemptions.
        num_published: Leading blocks already offered to the prefix index.
        snapshot: Slot with the recurrent state that the request started from; -1 without one.
        branch: Prompt tokens with published blocks, but without a recurrent state, when the request started.
    """

    blocks: list[CacheBlock] = field(default_factory=list)
    kind: CacheKind = CacheKind.KV
    num_compact: int = 0
    num_gone: int = 0
    num_parked_tokens: int = 0
    parked_in_step: int = -1
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    snapshot: int = -1
    branch: int = 0

    @property
    def num_live(self) -> int:
        """Return the blocks of a running request that occupy units."""
        return len(self.blocks) - self.num_gone

    @property
    def num_running_units(self) -> int:
        """Return the units of a running request; same as `count_units(blocks)`, but in constant time."""
        saved = UNITS_PER_BLOCK - COMPACT.form.units
        return UNITS_PER_BLOCK * self.num_live - saved * self.num_compact


_NOWHERE = CacheEntry(CacheKind.GONE, Tier.DEVICE, ())


class CacheAction(enum.Enum):
    """Operation on the units of a block."""

    SWAP_OUT = "swap_out"
    """Copy from device to host, any kind."""
    SWAP_IN = "swap_in"
    """Copy from host to device, any kind."""
    RESTORE = "restore"
    """Project K and V from HIDDEN, once, both on the device."""


class CacheOperation(NamedTuple):
    """Write a whole block, full or not, from `source` to `target`. The source keeps its content.

    `start`: position of the block's first token; RESTORE rotates K by it. A target may be the source of a later
    operation of the step (swap in, then restore). A source may be the target of a later action or chunk, so a unit that
    was swapped out can be reused at once. No unit is a target twice. Adjacent operations of one action run as one
    batch; pass them together, in the order of `CacheAction`.
    """

    action: CacheAction
    source: CacheEntry
    target: CacheEntry
    start: int = 0


def gone_block() -> CacheBlock:
    """Return a placeholder for a freed block; each holder needs its own."""
    return CacheBlock(_NOWHERE)


def count_gone(blocks: Iterable[CacheBlock]) -> int:
    """Return the number of leading placeholders of freed blocks."""
    return sum(1 for _ in takewhile(lambda block: block.entry.kind is CacheKind.GONE, blocks))


def count_units(blocks: Iterable[CacheBlock]) -> int:
    """Return the total units of `blocks`."""
    return sum(len(block.entry.units) for block in blocks)


def count_compact(blocks: Iterable[CacheBlock]) -> int:
    """Return how many blocks need scratch in every step that runs them."""
    return sum(block.entry.kind.form.compact for block in blocks)


@cache
def _pack_of(count: int) -> Callable[..., bytes]:
    return Struct(f"{count}q").pack


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: bytes) -> None:
    """Append the chained hashes of the full blocks of `token_ids` that `hashes` does not contain yet.

    hash(i) = H(hash(i-1) ‖ tokens of block i), rooted in the tenant's salt. Equal hashes mean equal whole prefixes, and
    tenants cannot share blocks.
    """
    first, last = len(hashes) * block_size, len(token_ids) - block_size
    if first > last:
        return
    parent = hashes[-1] if hashes else blake2b(salt, digest_size=DIGEST_BYTES).digest()
    pack = _pack_of(block_size)
    for start in range(first, last + 1, block_size):
        tokens = pack(*token_ids[start : start + block_size])
        parent = blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)


class BlockPool:
    """Allocation, sharing and eviction of blocks over `num_units` units of one tier.

    `paired`: the pool holds only K and V, each block in adjacent units; it grows and shrinks by whole blocks.
    `num_owned_units` and `num_deferred_units` include retiring units.
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
        """Return the removed units that blocks still hold."""
        return len(self._retiring)

    @property
    def num_available_units(self) -> int:
        """Return the units that an allocation could get now: free units and those of cached blocks."""
        return len(self._free) + self.num_cached_units

    def grow(self, units: int) -> None:
        """Append `units` units. Retiring units among them become ordinary units again."""
        assert units >= 0, "a pool grows by a number of units"
        first, self.num_units = self.num_units, self.num_units + units
        added = range(first, self.num_units)
        new = [unit for unit in reversed(added) if unit not in self._retiring]
        self._retiring.difference_update(added)
        # Allocate the new units last, so that they are likely free when the pool shrinks again.
        self._free = [*new, *self._free]

    def shrink(self, units: int) -> None:
        """Remove the last `units` units. Free and cached ones vanish at once; units that a block holds retire with it.

        Retiring blocks leave the prefix index, but their holders keep them and may share them.
        """
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
        """Return a block with reference count 1, or None if not enough units are available."""
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
        """Return `count` blocks from free units, as if each were allocated."""
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
        """Return the block published under this hash, or None."""
        return self._index.get(block_hash)

    @property
    def next_evicted(self) -> CacheBlock | None:
        """Return the least recently used cached block; blocks used only by offline requests come first."""
        return next(iter(self._cached_offline or self._cached_online), None)

    def num_idle_units(self, blocks: Iterable[CacheBlock]) -> int:
        """Return the units of `blocks` that are available in this pool now and would not be once acquired."""
        tier, deferred = self._tier, self._deferred
        return count_units(b for b in blocks if b.ref_count == 0 and b.entry.tier is tier and b not in deferred)

    def acquire(self, block: CacheBlock, *, online: bool) -> None:
        """Add a reference to a published or held block. Online use marks the block as online."""
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
        """Drop one reference. `last_step` is the newest step of the caller that may use the block."""
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
        """Record that all steps up to `step_id` ended: blocks deferred for them become free or cached."""
        self._last_completed_step = step_id
        for block in [b for b in self._deferred if b.last_step <= step_id]:
            del self._deferred[block]
            self.num_deferred_units -= len(block.entry.units)
            self._settle(block)

    def publish(self, block: CacheBlock, block_hash: bytes) -> None:
        """Offer a full, confirmed block to later requests, unless its hash is taken or the block retires."""
        if self._retiring and not self._retiring.isdisjoint(block.entry.units):
            return
        if block.block_hash is None and block_hash not in self._index:
            block.block_hash = block_hash
            self._index[block_hash] = block

    def withdraw(self, block: CacheBlock) -> None:
        """Remove a block from the prefix index, e.g. because its content is in doubt. Holders keep it."""
        if block.block_hash is None:
            return
        del self._index[block.block_hash]
        if block.ref_count == 0 and block not in self._deferred:
            self._leave_cached(block)
            self._give_back(block)
        block.block_hash = None

    def _settle(self, block: CacheBlock) -> None:
        if block.block_hash is None:
            self._give_back(block)
        else:
            self._cached_of(block)[block] = None
            self.num_cached_units += len(block.entry.units)
            self.num_cached_online_units += len(block.entry.units) if block.online else 0

    def _give_back(self, block: CacheBlock) -> None:
        """Free the units of a block, or remove them if they retire.

        The order keeps K's unit before V's for the next block.
        """
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
