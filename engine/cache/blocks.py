"""Blocks, the units that they lie in, and what can be done to them.

A *block* is `block_size` tokens of one request. A *unit* is one block's worth of K, or of V, or a part of its hidden
state, for all layers: the pool's currency. An entry names its kind and tier, so that one request may mix
representations block by block (Apt-Serve §4, HybridServe §4). The rows of `CacheKind` say everything that the control
plane knows about a kind: it asks `kind.form`, not which kind it is.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from predictor.limits import UNITS_PER_BLOCK


class Representation(NamedTuple):
    """`units`: units of a block, on any tier. `compact`: a step that runs the block projects K and V from it, and needs
    a block of scratch for them; RESTORE projects them once."""

    units: int
    compact: bool = False


class CacheKind(enum.Enum):
    """Which representation of the past a block holds.

    HIDDEN is the normed input of every attention layer, from which K and V are projected again; it is offered only by
    models whose hidden state fits in half the room of K and V (`engine.models.spec.hidden_offer`). GONE is the place of
    a block that lies before every window of the model: it has no unit and is never read. STATE is what recurrent layers
    keep of a request at the end of a block, however much lies before it; its unit is a slot of memory of its own
    (`engine.cache.checkpoints`).
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

    __hash__ = object.__hash__  # enum's own is written in Python; a step looks hundreds up


COMPACT = CacheKind.HIDDEN
"""The kind that is offered beside K and V when memory is short."""

RECURRENT = CacheKind.STATE
"""What layers keep that have no K and V."""


class Tier(enum.Enum):
    """Which memory the units are in."""

    DEVICE = "device"
    HOST = "host"


class CacheEntry(NamedTuple):
    """One block as the data plane sees it. `units`: (k_unit, v_unit) for KV, (unit,) for HIDDEN.

    Each tier's units are numbered from 0; a unit of another tier holds exactly what a device unit holds.
    """

    kind: CacheKind
    tier: Tier
    units: tuple[int, ...]


@dataclass(slots=True, eq=False)
class CacheBlock:
    """One block in a pool, perhaps shared read-only by several requests.

    `block_hash` is set once the block is full, confirmed and published; `online` is raised by an online touch;
    `last_step` is the newest step that may read or write the units.
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

    While the request runs, all blocks are on the device. While it waits, they are what is kept of its past
    (`engine.cache.parked`): its first `num_parked_tokens` tokens, on either tier. The step
    `parked_in_step` made the last copy to the host.

    `kind`: what new blocks are stored as; it outlives preemptions. `num_compact` blocks of a running request are
    compact, its first `num_gone` given back. `hashes` are the chained hashes of the full blocks
    known so far (computed lazily, kept across preemptions); the first `num_published` blocks are already offered to the
    prefix index. `checkpoint`: the slot with the state that it started from, -1: it started from nothing; `branch`:
    tokens of its prompt that blocks were there for when it started, but no state.
    """

    blocks: list[CacheBlock] = field(default_factory=list)
    kind: CacheKind = CacheKind.KV
    num_compact: int = 0
    num_gone: int = 0
    num_parked_tokens: int = 0
    parked_in_step: int = -1
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    checkpoint: int = -1
    branch: int = 0

    @property
    def num_live(self) -> int:
        """Blocks of a running request that lie somewhere."""
        return len(self.blocks) - self.num_gone

    @property
    def num_running_units(self) -> int:
        """What the blocks of a running request take, as `count_units` says, without a look at each of them."""
        saved = UNITS_PER_BLOCK - COMPACT.form.units
        return UNITS_PER_BLOCK * self.num_live - saved * self.num_compact


_NOWHERE = CacheEntry(CacheKind.GONE, Tier.DEVICE, ())


class CacheAction(enum.Enum):
    """What a cache operation does to the units of a block."""

    SWAP_OUT = "swap_out"
    """Device -> host, any kind."""
    SWAP_IN = "swap_in"
    """Host -> device, any kind."""
    RESTORE = "restore"
    """HIDDEN on the device -> KV on the device: K and V are projected, once, from the hidden state."""


class CacheOperation(NamedTuple):
    """Writes `target` from `source`, which keeps what it holds; whole blocks, full or not.

    `start`: position of the block's first token (RESTORE rotates K by it; the others ignore it). A target may be the
    source of a later operation of the step (swap in, then restore), and a source the target of one of another action: a
    unit that was swapped out may be given away at once, to operations and chunks behind it. No unit is a target twice.
    Neighbours of one action run as one batch, so give them together, in the order of `CacheAction`.
    """

    action: CacheAction
    source: CacheEntry
    target: CacheEntry
    start: int = 0


def gone_block() -> CacheBlock:
    """What stands in a block's place that was given back: one for each holder."""
    return CacheBlock(_NOWHERE)


def count_gone(blocks: Iterable[CacheBlock]) -> int:
    """How many of these blocks were given back; none comes behind one that was not."""
    return sum(1 for _ in takewhile(lambda block: block.entry.kind is CacheKind.GONE, blocks))


def count_units(blocks: Iterable[CacheBlock]) -> int:
    """Units of these blocks."""
    return sum(len(block.entry.units) for block in blocks)


def count_compact(blocks: Iterable[CacheBlock]) -> int:
    """How many of these blocks need scratch in every step that runs them."""
    return sum(block.entry.kind.form.compact for block in blocks)
