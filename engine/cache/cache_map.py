"""Where one request's past lives, block by block.

A *block* is `block_size` tokens of one request. A *unit* is one block's worth of K, or of V, or a part of its hidden
state, for all layers: the pool's currency. A KV block has two units (K, V), a block of hidden state one. Entries carry
kind and tier, so that one request may mix representations block by block (Apt-Serve §4, HybridServe §4).
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class CacheKind(enum.Enum):
    """Which representation of the past a block holds.

    HIDDEN is the normed input of every attention layer, from which K and V are projected again; it is offered only by
    models whose hidden state fits in half the room of K and V (`engine.models.spec.hidden_offer`).
    """

    KV = "kv"
    HIDDEN = "hidden"


class Tier(enum.Enum):
    """Which memory the units are in."""

    DEVICE = "device"
    HOST = "host"


UNITS_PER_BLOCK = {CacheKind.KV: 2, CacheKind.HIDDEN: 1}
"""How many units a block takes, on either tier."""


class CacheEntry(NamedTuple):
    """One block as the data plane sees it. `units`: (k_unit, v_unit) for KV, (unit,) for HIDDEN.

    Device and host units are numbered apart, each from 0; a host unit holds exactly what a device unit holds.
    """

    kind: CacheKind
    tier: Tier
    units: tuple[int, ...]


@dataclass(slots=True, eq=False)
class CacheBlock:
    """One block in the pool, perhaps shared read-only by several requests.

    `block_hash` is set once the block is full, confirmed and published; `online` is raised by an online touch;
    `last_step` is the newest step that may read or write the units.
    """

    entry: CacheEntry
    ref_count: int = 1
    block_hash: bytes | None = None
    online: bool = False
    last_step: int = -1


@dataclass(slots=True, eq=False)
class CacheMap:
    """The blocks of one request in token order; block i covers tokens [i·block_size, (i+1)·block_size).

    `hashes` are the chained hashes of the full blocks known so far (computed lazily, kept across preemptions);
    `num_published` blocks of this map are already offered to the prefix index; `num_hidden` of them hold hidden state.
    """

    blocks: list[CacheBlock] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_hidden: int = 0
