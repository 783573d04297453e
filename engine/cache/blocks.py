"""Blocks, the units that hold them, and the operations on them.

A *block* is `block_size` tokens of one request. A *unit* is the pool's currency: one block's K, or its V, or a part of
its hidden state, for all layers. An entry names its kind and tier, so one request may mix representations block by
block (Apt-Serve §4, HybridServe §4). The control plane knows a kind only by its `CacheKind.form`.
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
